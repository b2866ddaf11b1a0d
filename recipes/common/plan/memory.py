"""Memory of a train step on a device by purpose, computed analytically."""

import math
from typing import NamedTuple

import jax.numpy as jnp

from recipes.common.report.flops import kinds_of_layers
from recipes.common.report.kernel import attention_kernel
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import Layout
from recipes.common.sharding.rules import shards
from zoo.pipeline import microbatches
from zoo.strategies import HEADS, KV_HEADS, LAYERS, MLP, RESIDUAL_SEQ, VOCAB
from zoo.vocabulary import positions_at_once

IN_FLIGHT = 5  # layers' inputs on the device, on their way to the host's memory or back


class Weights(NamedTuple):
    """Bytes of a model's weights on a device."""

    params: float  # at rest, float32
    stacked: float  # those of the stacked layers
    layer: float  # matrices of one layer in use, in the compute dtype
    ends: float  # matrices outside of the layers in use, in the compute dtype
    frozen: float  # at rest, without gradients or moments: LoRA's base, and buffers


def weights(layout: Layout) -> Weights:
    """Sums over the abstract parameters; nothing is traced."""
    rest = layout.rules | dict.fromkeys(layout.uneven)
    width, sizes = _width(layout), layout.mesh.shape
    params = stacked = layer = ends = frozen = 0.0
    for kind in layout.model.shapes:
        shapes = paths(layout.model.shapes[kind])
        for path, axes in paths(layout.model.axes[kind]).items():
            leaf = shapes[path]
            held = leaf.size * leaf.dtype.itemsize
            held /= math.prod(shards(rest, axis, sizes) for axis in axes)
            if kind == "params":
                params += held
                stacked += held * (LAYERS in axes)
            else:
                frozen += held
            use = [layout.zoo.IN_USE.get(axis, axis) for axis in axes]
            if set(use) & {*layout.zoo.IN_USE.values()}:
                over = math.prod(shards(layout.rules, a, sizes) for a in use if a != LAYERS)
                used = leaf.size / over * width
                layer += used / leaf.shape[axes.index(LAYERS)] if LAYERS in axes else 0
                ends += 0 if LAYERS in axes else used
    return Weights(params, stacked, layer, ends, frozen)


def memory_parts(
    layout: Layout, accumulate: int = 1, segments: bool = True, offload: str = ""
) -> dict[str, float]:
    """Bytes on a device at the step's peak by purpose, under AdamW.

    Saved activations are each layer's input and whatever its remat policy saves. The peak is in one
    of two places. In the loss: the unembedding table in use, its gradient, one chunk's logits and
    their gradient. Or in the layers' backward pass: gradients are those of all layers at rest and
    that of the table, whole; the live working set is the weights in use of two layers (one is being
    gathered), the recomputed activations of one layer, including float32 attention scores unless a
    kernel keeps them on chip, and all layers' weights in the compute dtype, because the compiler
    casts them before the loop. Experts compute `capacity` times the positions that choose them.

    In stages, a device has its layers' weights whole in the compute dtype and their gradients whole
    in float32 for the whole step, beside those of one microbatch, and keeps what 2S - 1 microbatches
    save (all M with GPipe).

    What is in the host's memory (`on_host`) is not counted. The update then has fewer moments on the
    device than the layers have activations, so the peak is where it was.

    Args:
      accumulate: gradient-accumulation steps, which need one more array for each gradient.
      segments: whether batches have segment ids.
      offload: "optimizer": its state is in the host's memory.
    """
    config, held = layout.config, weights(layout)
    moments = 0.0 if offload else 2 * held.params
    found = {"parameters": held.params + held.frozen, "optimizer": moments}
    if not hasattr(config, "vocab_size"):
        return found | _plain_parts(layout, accumulate, held)
    width = _width(layout)

    def over(axis):
        return shards(layout.rules, axis, layout.mesh.shape)

    rows = layout.batch_size // layout.batch_shards // accumulate
    stages = layout.stages
    parts = microbatches(config, rows, stages) if stages > 1 else 1
    rows //= parts
    length = layout.seq_len // layout.seq_shards
    between = layout.seq_len // over(RESIDUAL_SEQ)  # positions, between sublayers
    D, F = config.embed, config.mlp // over(MLP)
    q = config.num_heads * config.head_dim // over(HEADS)
    both = config.head_dim + getattr(config, "value_dim", config.head_dim)
    kv = config.num_kv_heads * both // over(KV_HEADS)
    latents = sum(getattr(config, name, 0) for name in ("q_latent", "kv_latent", "rope_dim"))
    matrices = getattr(config, "mlp_matrices", 3)
    # Per position: D of what an MLP reads and writes, F of its matrices.
    slots = getattr(config, "experts_per_token", 0)
    often = slots * (getattr(config, "capacity", None) or 1.0) if slots else 1.0
    hidden, moved = often * F, often * D if slots else 0
    hidden += getattr(config, "shared_experts", 0) * F
    # Per position, between sublayers and inside them.
    kept = {"full": (D, 0), "gathered": (D, 2 * D), "sublayers": (2 * D, 0)}
    shared = getattr(config, "shared_experts", 0) if slots else 1
    kept["dots"] = 2 * D, q + kv + latents + shared * (matrices - 1) * F
    kept["dispatched"] = D, moved
    kept["offload"] = 0, 0
    saved, largest = 0.0, 0
    for kind, layers in kinds_of_layers(config):
        heads = config.num_heads // over(HEADS)
        attention, scores = _of_attention(layout, segments, kind.window, rows, heads, q, kv)
        # All inputs of derivatives; q, k and v share theirs, and so do gate and up.
        inside = 2 * D + 2 * matrices * hidden + moved + attention + 2 * latents
        kept["none"] = 6 * D * 4 // width, inside
        outside, inside = kept[config.remat]
        layers /= stages
        saved += layers * rows * (between * outside + length * inside) * width
        if config.remat == "none":  # also weights in use, and scores before and after the softmax
            saved += layers * (held.layer + scores * (4 + width) // 4)
        largest = max(largest, scores)
    if config.remat == "offload":
        saved = IN_FLIGHT * rows * between * D * width
    with layout.trace():
        chunk = positions_at_once(config.loss_chunk, rows, length)
    logits = rows * chunk * config.vocab_size // over(VOCAB) * (4 + width)
    in_use = config.vocab_size // over(VOCAB) * D * width
    recomputed = rows * length * (2 * q + kv + matrices * hidden + 2 * D + 2 * moved) * width
    cast = held.stacked * width // 4 if width < 4 and config.remat != "none" else 0  # or saved
    # A loss of one chunk needs no sum of the table's gradients beside the logits.
    loss = in_use * (chunk < length), in_use + logits
    # While a layer computes, the next one is gathered; of experts, one matrix at a time.
    gathered = 1 if slots else 2
    backward = held.stacked + in_use, cast + gathered * held.layer + recomputed + largest
    if stages > 1:
        each = config.num_layers / stages * held.layer
        saved *= min(2 * stages - 1, parts + 1) if config.pipeline == "1f1b" else parts + 1
        loss = (each + held.ends) * 4 / width, 2 * each + held.ends + in_use + logits
        backward = loss[0], 2 * each + held.ends + recomputed + largest
    grads, live = max(loss, backward, key=sum)
    if accumulate > 1:
        grads += held.params
    return found | {"gradients": grads, "saved activations": saved, "live working set": live}


def on_host(layout: Layout, accumulate: int = 1, offload: str = "") -> dict[str, float]:
    """Bytes of a device's arrays in the host's memory. A step copies each to the device and back.

    Args:
      accumulate, offload: as in `memory_parts`.
    """
    found, config = {}, layout.config
    if offload:
        found["optimizer"] = 2 * weights(layout).params
    if hasattr(config, "vocab_size") and config.remat == "offload":
        rows = layout.batch_size // layout.batch_shards // accumulate
        between = layout.seq_len // shards(layout.rules, RESIDUAL_SEQ, layout.mesh.shape)
        inputs = rows * between * config.embed * _width(layout)
        found["saved activations"] = config.num_layers / layout.stages * inputs
    return found


def _plain_parts(layout: Layout, accumulate: int, held: Weights) -> dict[str, float]:
    """Memory of a model that is not a decoder; activations are each weight's output, twice."""
    rows = layout.batch_size // layout.batch_shards // accumulate
    width, outputs = _width(layout), 0.0
    for path, axes in paths(layout.model.axes["params"]).items():
        use = [layout.zoo.IN_USE.get(axis, axis) for axis in axes]
        leaf, over = paths(layout.model.shapes["params"])[path], 1
        if len(axes) > 1:
            over = shards(layout.rules, use[-1], layout.mesh.shape)
            outputs += math.prod(leaf.shape[:1] if LAYERS in axes else ()) * leaf.shape[-1] / over
    positions = getattr(layout.config, "num_positions", 1)
    grads = held.params * (1 + (accumulate > 1))
    saved = rows * positions * outputs * width
    return {"gradients": grads, "saved activations": saved, "live working set": 2 * held.layer}


def kernel(layout: Layout, segments: bool = True) -> str:
    """The attention kernel of a step."""
    with layout.trace():
        return attention_kernel(layout.config, layout.seq_len, segments).kernel


def _of_attention(
    layout: Layout, segments: bool, window: int | None, rows: int, heads: int, q: int, kv: int
) -> tuple[int, int]:
    """(elements per token that attention's derivative needs, bytes of its float32 scores).

    Args:
      window: of the kind of layer.
      rows, heads, q, kv: numbers on a device of sequences, query heads, elements of all queries,
        and elements of all keys and values.
    """
    length, norms = layout.seq_len, heads * 4 // _width(layout)
    match kernel(layout, segments):
        case "xla":  # keys and values count once per block of queries, as in the model
            block, back = max(128, -(-length // 8)), length if window is None else window - 1
            blocks = [(a, min(a + block, length)) for a in range(0, length, block)]
            keys = [b - max(0, a - back) for a, b in blocks]
            seen = sum((b - a) * k for (a, b), k in zip(blocks, keys, strict=True))
            scores = rows * heads * seen * 4 // layout.seq_shards
            return 2 * q + kv * sum(keys) // length, scores
        case _:  # the output counts twice: the kernel and the projection lay it out differently
            return 3 * q + kv + norms, 0


def _width(layout: Layout) -> int:
    """Bytes of a number in the compute dtype."""
    return jnp.dtype(getattr(layout.config, "dtype", "float32")).itemsize
