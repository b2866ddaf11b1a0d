"""Layers that attend to the keys and values of earlier layers, and layers with embeddings of their own.

The last `shared_layers` of a model have queries alone. Each attends to the keys and values of the last
layer before them of its kind, sliding or global. So a cache has nothing of them, and a scan over the
layers before carries the keys and values that they read.

A model takes `run_layers` as a method, and make_layers of unlike_layers.py. Its Config has `pattern`,
`period`, `kinds` and `kv_shape`, as gemma4.py's, and its Layer is called with more arguments.

Shapes: B batch, T positions, D embed, K kv heads, H head dim, P layer embed, L layers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..core.sharding import constrain
from . import unlike_layers
from .cache import ATTENTION, SLIDING, CachedInputs, Place
from .periods import scan_periods

# Stack of layers with keys and values → that of the layers that read those of its last one.
READS = {SLIDING: "shared_sliding", ATTENTION: "shared_attention"}


def run_layers(self, x_BTD, inputs) -> tuple[jax.Array, Any, Any]:
    """`Decoder.run_layers`; a cache keeps a dict, stack → keys and values.

    Args:
      x_BTD: or a pair of it and of the layers' own embeddings [L, B, T, P].
    """
    config = self.config
    if not config.shared_layers and not config.layer_embed:
        return unlike_layers.run_layers(self, x_BTD, inputs)
    embedded_LBTP = None
    if config.layer_embed:
        x_BTD, embedded_LBTP = x_BTD
        # A scan sums the gradients of what all layers read, although each reads its own part.
        embedded_LBTP = embedded_LBTP.astype(jnp.float32)
    first_shared = config.num_layers - config.shared_layers

    def run_layer(x_BTD, numbered, kind, place, shared_kv=None):
        layer, number = numbered
        layer = config.use_layer(layer, self.axes)  # inside remat, as in Decoder.run_layer
        embedding_BTP = None
        if embedded_LBTP is not None:
            take = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
            embedding_BTP = take(embedded_LBTP, number).astype(x_BTD.dtype)
        return layer(x_BTD, inputs, kind, place, shared_kv, embedding_BTP)

    def run_own(x_and_kv, layer, kind):
        x_BTD, latest = x_and_kv
        stack, attention_type = kind
        *numbered, place = layer
        x_BTD, kv, metrics = run_layer(x_BTD, numbered, attention_type, place)
        if latest:
            latest = latest | {stack: in_float32(kv)}
        return (x_BTD, latest), (kv if inputs.generates else None, metrics)

    def run_shared(x_BTD, layer, kind):
        stack, attention_type = kind
        kv = tuple(x_BTKH.astype(x_BTD.dtype) for x_BTKH in latest[stack])
        x_BTD, _, metrics = run_layer(x_BTD, layer, attention_type, places[stack], kv)
        return x_BTD, metrics

    def of_layers(name: str) -> tuple:
        numbers = [l for l, stack in enumerate(config.period) if stack == name]
        return self.layers[name], jnp.array(numbers)

    remat = config.remat_policy
    is_cached = isinstance(inputs, CachedInputs)
    stacks = {
        name: (*of_layers(name), inputs.of_stack(name, self.layers[name]) if is_cached else None)
        for name in dict.fromkeys(config.pattern)
    }
    order = list(zip(config.pattern, config.kinds, strict=True))
    latest = no_keys(config, x_BTD) if config.shared_layers else {}
    (x_BTD, latest), outputs = scan_periods(
        run_own, (x_BTD, latest), stacks, tuple(order), remat, config.pattern
    )
    kept = {name: kv for name, (kv, _) in outputs.items()}
    metrics = [metrics for _, metrics in outputs.values()]
    if config.shared_layers:
        lengths = {name: config.period.count(name) for name in READS}
        places = {
            name: Place(jnp.int32(length - 1), name) if is_cached else None
            for name, length in lengths.items()
        }
        start = first_shared % len(order)
        order = order[start:] + order[:start]
        period = tuple(READS[name] for name, _ in order)
        readers = {name: of_layers(name) for name in dict.fromkeys(period) if name in self.layers}
        x_BTD, outputs = scan_periods(run_shared, x_BTD, readers, tuple(order), remat, period)
        metrics += outputs.values()
    return x_BTD, kept, jax.tree.map(lambda *x: jnp.concatenate(x), *metrics)


def in_float32(kv) -> tuple[jax.Array, ...]:
    """Keys and values whose gradients, of all layers that read them, add up in float32."""
    return tuple(x_BTKH.astype(jnp.float32) for x_BTKH in kv)


def no_keys(config, x_BTD) -> dict[str, tuple]:
    """Zeros in place of the latest keys and values, which the first layers don't have."""
    B, T, _ = x_BTD.shape
    axes = ("batch", "seq", "kv_heads", "head_dim")
    zeros = {name: constrain(jnp.zeros((B, T, *config.kv_shape(name))), *axes) for name in READS}
    return {name: (x_BTKH, x_BTKH) for name, x_BTKH in zeros.items()}
