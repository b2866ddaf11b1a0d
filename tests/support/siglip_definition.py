"""SiglipModel of `transformers`, written again in NumPy and float64, on its own tensors."""

import numpy as np


def embeddings(
    tensors: dict[str, np.ndarray], image_BWWC, tokens_BT, *, heads: int, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    """(embeddings of images, of texts), [B, D], of length 1."""
    tensors = {name: np.float64(tensor) for name, tensor in tensors.items()}

    def linear(x, name: str):
        return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

    def norm(x, name: str):
        centered = x - x.mean(axis=-1, keepdims=True)
        x = centered / np.sqrt(np.square(centered).mean(axis=-1, keepdims=True) + eps)
        return x * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def mlp(x, name: str):
        x = linear(x, f"{name}.fc1")
        x = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        return linear(x, f"{name}.fc2")

    def attend(q_BTD, k_BSD, v_BSD):
        q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in (q_BTD, k_BSD, v_BSD))
        scores_BNTS = np.einsum("BTNH,BSNH->BNTS", q, k) / np.sqrt(q.shape[-1])
        weights_BNTS = np.exp(scores_BNTS - scores_BNTS.max(axis=-1, keepdims=True))
        weights_BNTS /= weights_BNTS.sum(axis=-1, keepdims=True)
        return np.einsum("BNTS,BSNH->BTNH", weights_BNTS, v).reshape(q_BTD.shape)

    def tower(x_BTD, side: str, last_norm: str):
        layers = {name.split(".")[3] for name in tensors if f"{side}.encoder.layers." in name}
        for layer in range(len(layers)):
            prefix = f"{side}.encoder.layers.{layer}"
            y_BTD = norm(x_BTD, f"{prefix}.layer_norm1")
            qkv = (linear(y_BTD, f"{prefix}.self_attn.{part}_proj") for part in "qkv")
            x_BTD = x_BTD + linear(attend(*qkv), f"{prefix}.self_attn.out_proj")
            x_BTD = x_BTD + mlp(norm(x_BTD, f"{prefix}.layer_norm2"), f"{prefix}.mlp")
        return norm(x_BTD, f"{side}.{last_norm}")

    def pool(x_BTD, head: str):
        weights = np.split(tensors[f"{head}.attention.in_proj_weight"], 3)
        biases = np.split(tensors[f"{head}.attention.in_proj_bias"], 3)
        probe_B1D = np.tile(tensors[f"{head}.probe"], (len(x_BTD), 1, 1))
        inputs = probe_B1D, x_BTD, x_BTD
        qkv = (x @ w.T + b for x, w, b in zip(inputs, weights, biases, strict=True))
        x_B1D = linear(attend(*qkv), f"{head}.attention.out_proj")
        return (x_B1D + mlp(norm(x_B1D, f"{head}.layernorm"), f"{head}.mlp"))[:, 0]

    # A convolution whose stride is its width: rows of patches, each patch row by row.
    kernel_DCPP = tensors["vision_model.embeddings.patch_embedding.weight"]
    (B, W, _, C), P = image_BWWC.shape, kernel_DCPP.shape[-1]
    G = W // P
    patch_BGGPPC = np.float64(image_BWWC).reshape(B, G, P, G, P, C).swapaxes(2, 3)
    x_BTD = np.einsum("BGHXYC,DCXY->BGHD", patch_BGGPPC, kernel_DCPP).reshape(B, G * G, -1)
    x_BTD = x_BTD + tensors["vision_model.embeddings.patch_embedding.bias"]
    x_BTD = x_BTD + tensors["vision_model.embeddings.position_embedding.weight"]
    image_BD = pool(tower(x_BTD, "vision_model", "post_layernorm"), "vision_model.head")

    x_BTD = tensors["text_model.embeddings.token_embedding.weight"][tokens_BT]
    x_BTD = x_BTD + tensors["text_model.embeddings.position_embedding.weight"]
    x_BTD = tower(x_BTD, "text_model", "final_layer_norm")
    text_BD = linear(x_BTD[:, -1], "text_model.head")
    image_BD, text_BD = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (image_BD, text_BD))
    return image_BD, text_BD
