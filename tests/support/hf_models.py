"""What our model computes of a Hugging Face folder, and the folder that we write of it."""

import pathlib

import numpy as np
from flax import nnx

from recipes.common import checkpoint, hf
from recipes.common.mesh import make_mesh
from recipes.common.sharding.abstract import paths
from tests.support.hf_families import TOKENS_BT


def inputs(config) -> np.ndarray:
    """Inputs for our or their config: TOKENS_BT, or images [B, W, W, C]."""
    if not hasattr(config, "image_size"):
        is_encoder = "bert" in getattr(config, "model_type", "") or not getattr(
            config, "causal", True
        )
        return (
            np.where(TOKENS_BT == 1, 2, TOKENS_BT) if is_encoder else TOKENS_BT
        )  # 1: RoBERTa's padding
    channels = getattr(config, "num_channels", 0) or config.channels
    shape = (2, config.image_size, config.image_size, channels)
    return np.random.default_rng(0).normal(0, 1, shape).astype(np.float32)


def our_logits(path: str | pathlib.Path, mesh: str, rules: str, base: str = "") -> np.ndarray:
    """Float32 logits [B, T, V] of the model that `checkpoint.restore` reads at `path` onto a mesh."""
    source = checkpoint.find(path, base=base)
    layout = checkpoint.layout_of(source, make_mesh(mesh), rules)
    variables = checkpoint.restore_variables(source, layout)
    if layout.model.phases:
        return our_pairs(layout, variables)
    given = inputs(layout.config)
    rows = np.resize(given, (max(len(given), layout.batch_shards), *given.shape[1:]))
    logits = layout.compile(lambda v, x: layout.model.merge(v)(x), variables, rows)
    return np.asarray(logits(variables, rows))[: len(given)]


def pairs(image_size: int, length: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs of two towers: images [B, W, W, C] and tokens [B, T], which the largest one ends."""
    random, rows = np.random.default_rng(0), 8
    image_BWWC = random.normal(size=(rows, image_size, image_size, 3)).astype(np.float32)
    tokens_BT = random.integers(3, vocab_size - 1, (rows, length)).astype(np.int32)
    tokens_BT[np.arange(rows), random.integers(1, length, rows)] = vocab_size - 1
    tokens_BT[0, -1] = vocab_size - 1  # a second one, as padding is for CLIP
    return image_BWWC, tokens_BT


def our_pairs(layout, variables) -> np.ndarray:
    """[B, 2E + B]: the embeddings of images and texts, and their scores."""
    import jax.numpy as jnp

    config = layout.config
    given = pairs(config.image_size, config.max_positions, config.vocab_size)

    def run(variables, image_BWWC, tokens_BT):
        model = layout.model.merge(variables)
        image_BE, text_BE = model.embed_images(image_BWWC), model.embed_texts(tokens_BT)
        bias = 0.0 if model.score_bias is None else model.score_bias[...]
        return image_BE, text_BE, jnp.exp(model.log_scale[...]), bias

    image_BE, text_BE, scale, bias = map(
        np.asarray, layout.compile(run, variables, *given)(variables, *given)
    )
    return np.concatenate([image_BE, text_BE, image_BE @ text_BE.T * scale + bias], 1)


def params_of(path: str | pathlib.Path) -> dict[str, np.ndarray]:
    """Returns variable's path → array for the model that `checkpoint.restore` reads at `path`."""
    model, _ = checkpoint.restore(path, make_mesh("1"), "dp")
    return paths(nnx.to_pure_dict(nnx.state(model)))


def export(source: str, target: pathlib.Path) -> None:
    """Writes a folder with our export; `source` is "hf:DIR"."""
    folder, params = checkpoint.find(source), params_of(source)
    context = folder.metadata["context"]
    entry = folder.metadata["entry"]
    hf.write(
        target, entry, folder.config, context, lambda path: np.asarray(params[path]),
        architecture=folder.metadata["architecture"],
    )  # fmt: skip
