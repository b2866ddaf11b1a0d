"""An equal amount of work in PyTorch, for comparison if torch is installed.

Without grouped heads the model is nanoGPT's: GPT-2's block with layer norm, multi-head attention,
learned positions, and a GELU MLP wide enough for as many multiplications as our SwiGLU. With
grouped heads it is Llama's, like zoo/transformer.py: the same parameters, RMSNorm, rotary
embeddings, SwiGLU. Both use scaled_dot_product_attention, or flex_attention for packed rows, one
matmul for projections of the same input, bfloat16 residuals under autocast, torch.compile, fused
AdamW and gradient clipping.
"""

import math

import jax.numpy as jnp
import numpy as np

from recipes.instruments.bench.common import random_rows, version
from zoo.core.layers import rope_angles
from zoo.llama_relatives import Config

ATTENTION = ("flash", "cudnn")  # kernels of scaled_dot_product_attention
# Most layers in one program of torch.compile: those of 124m took 46 s, those of 1b over 78. More are
# compiled as one block, which all of them share, and the loss.
WHOLE = 12


class Step:
    """A training step. A call starts it, and `wait` waits for the device.

    Args:
      attention: an item of ATTENTION to use; empty: PyTorch chooses.
      compiled: whether to use torch.compile.
      segments: whether positions attend within documents. The mask is made once, so making it takes
        no time of a step.
    """

    def __init__(
        self, config: Config, batch_size: int, seq_len: int, device: str, attention: str = "",
        compiled: bool = True, segments: bool = False,
    ):  # fmt: skip
        import torch

        for name in (*ATTENTION, "mem_efficient", "math") if attention else ():
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(name == attention)
        self._torch, self._device = torch, device
        self._autocast = torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda")
        self.model = model(config, seq_len, bfloat16=device == "cuda").to(device)
        self._called = self.model
        if compiled and config.num_layers <= WHOLE:
            self._called = torch.compile(self.model)
        elif compiled:
            for block in self.model.blocks:
                block.compile()
            self.model.loss = torch.compile(self.model.loss)
        fused = device == "cuda"
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=fused)
        rows = random_rows(config.vocab_size, batch_size, seq_len)
        self._batch = [
            torch.from_numpy(rows[name].astype(np.int64)).to(device)
            for name in ("tokens", "targets")
        ]
        if segments:
            ids = torch.from_numpy(rows["segment_ids"]).to(device)
            self._batch.append(document_mask(ids))

    def __call__(self) -> None:
        with self._autocast:
            loss = self._called(*self._batch)
        loss.backward()
        self._torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def wait(self) -> None:
        if self._device == "cuda":
            self._torch.cuda.synchronize()


def cpu_step(config: Config, batch_size: int, seq_len: int) -> Step | None:
    """A step on the CPU; None if PyTorch is not installed."""
    return Step(config, batch_size, seq_len, "cpu") if version("torch") else None


def document_mask(ids_BT):
    """flex_attention's mask of earlier positions of the same document."""
    from torch.nn.attention import flex_attention as flex

    def seen(b, head, query, key):
        return (query >= key) & (ids_BT[b, query] == ids_BT[b, key])

    B, T = ids_BT.shape
    return flex.create_block_mask(seen, B, None, T, T, device=ids_BT.device)


def model(config: Config, seq_len: int, bfloat16: bool = False):
    """A torch.nn.Module: (tokens [B, T], targets [B, T], mask of flex_attention) → mean loss.

    Args:
      bfloat16: whether residuals are bfloat16 instead of float32.
    """
    import torch
    from torch.nn import functional
    from torch.nn.attention.flex_attention import flex_attention

    grouped = config.num_kv_heads < config.num_heads
    D, N, K, H = config.embed, config.num_heads, config.num_kv_heads, config.head_dim

    def linear(rows: int, columns: int):
        return torch.nn.Linear(rows, columns, bias=False)

    def norm():
        return torch.nn.RMSNorm(D, config.norm_eps) if grouped else torch.nn.LayerNorm(D)

    def turn(x, angles):  # like zoo/core/layers.py's `rotate`
        if angles is None:
            return x
        cos, sin = angles
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = torch.nn.ModuleList([norm(), norm()])
            self.qkv, self.o = linear(D, (N + 2 * K) * H), linear(N * H, D)
            self.up = linear(D, 2 * config.mlp if grouped else config.mlp * 3 // 2)
            self.down = linear(self.up.out_features // (2 if grouped else 1), D)

        def forward(self, x, angles, mask):
            B, T, _ = x.shape
            heads = self.qkv(self.norms[0](x)).view(B, T, N + 2 * K, H).transpose(1, 2)
            q, k, v = heads.split([N, K, K], dim=1)
            q, k = turn(q, angles), turn(k, angles)
            if mask is None:
                out = functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=grouped
                )
            else:
                out = flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)
            x = x + self.o(out.transpose(1, 2).reshape(B, T, N * H))
            up = self.up(self.norms[1](x))
            if grouped:
                gate, up = up.chunk(2, dim=-1)
                up = functional.silu(gate) * up
            else:
                up = functional.gelu(up, approximate="tanh")
            return x + self.down(up)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(config.vocab_size, D)
            torch.nn.init.normal_(self.embed.weight, std=D**-0.5)
            if grouped:
                angles_TH = np.asarray(
                    rope_angles(config.kinds[0], H, jnp.arange(seq_len)[None])[0]
                )
                self.register_buffer("cos", torch.from_numpy(np.cos(angles_TH)))
                self.register_buffer("sin", torch.from_numpy(np.sin(angles_TH)))
            else:
                self.position = torch.nn.Parameter(torch.randn(seq_len, D) / math.sqrt(D))
            self.blocks = torch.nn.ModuleList([Block() for _ in range(config.num_layers)])
            self.norm = norm()
            self.unembed = None if config.tie_embeddings else linear(D, config.vocab_size)

        def forward(self, tokens, targets, mask=None):
            x = self.embed(tokens) if grouped else self.embed(tokens) + self.position
            x = x.bfloat16() if bfloat16 else x
            angles = (self.cos, self.sin) if grouped else None
            for block in self.blocks:
                x = block(x, angles, mask)
            return self.loss(x, targets)

        def loss(self, x, targets):
            table = self.embed if self.unembed is None else self.unembed
            logits = functional.linear(self.norm(x), table.weight)
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Model()
