"""A decoder's layers as one stack: built together, and run by a scan.

Shapes: L layers, P layers of one period.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

# What a layer's forward pass keeps for its backward pass; the rest is computed again.
REMAT = {
    "none": jax.checkpoint_policies.everything_saveable,  # under FSDP, gathered weights too
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # products with a weight
    # The two sublayers' outputs: no all-reduce of tensor parallelism runs a second time.
    "sublayers": jax.checkpoint_policies.save_only_these_names("sublayer"),
    "full": jax.checkpoint_policies.nothing_saveable,  # only the layer's input
}


def stack(make_layer, num_layers: int, rngs: nnx.Rngs):
    """`num_layers` layers as one module, whose variables have L, logical axis `layers`, in front.

    Args:
      make_layer: function of `rngs` → a layer.
    """
    split = nnx.split_rngs(splits=num_layers)
    names = {nnx.PARTITION_NAME: "layers"}
    build = nnx.vmap(
        lambda rngs: make_layer(rngs=rngs), in_axes=0, out_axes=0, transform_metadata=names
    )
    return split(build)(rngs)


def scan_layers(function, x: jax.Array, layers, kinds: tuple, remat, unroll: int = 1):
    """Runs x through stacked layers, so that compile time doesn't grow with their number.

    A trip of the scan runs one *period* of layers: as many as there are kinds, each compiled for its
    own kind. Layers that are left over at the end follow the scan.

    Args:
      function: (x, one layer of `layers`, its kind) → (x, outputs).
      layers: tree of arrays with L in front.
      kinds: what sets layers of equal shapes apart; layer l has kind l mod len(kinds). Static.
      remat: a policy of REMAT.
      unroll: trips of the scan in one trip of the loop, where layers are all alike.

    Returns: (x, outputs of all layers with L in front).
    """
    one = [functools.partial(function, kind=kind) for kind in kinds]
    inside = [jax.checkpoint(f, policy=remat, prevent_cse=False) for f in one]
    if len(kinds) == 1:
        return jax.lax.scan(inside[0], x, layers, unroll=unroll)
    L, P = jax.tree.leaves(layers)[0].shape[0], len(kinds)
    whole = L - L % P

    def period(x, parts):
        outputs = []
        for layer, part in zip(inside, parts, strict=True):
            x, output = layer(x, part)
            outputs.append(output)
        return x, outputs

    every = [jax.tree.map(lambda w, i=i: w[i:whole:P], layers) for i in range(P)]
    x, outputs = jax.lax.scan(period, x, every)
    # [L/P, ...] of each place in the period → [L, ...]
    outputs = jax.tree.map(lambda *o: jnp.stack(o, 1).reshape(whole, *o[0].shape[1:]), *outputs)
    for i in range(whole, L):  # outside of a loop, XLA may merge forward and recomputed operations
        layer = jax.checkpoint(one[i % P], policy=remat)
        x, output = layer(x, jax.tree.map(lambda w, i=i: w[i], layers))
        outputs = jax.tree.map(lambda o, new: jnp.concatenate([o, new[None]]), outputs, output)
    return x, outputs


def check_config(config, **choices) -> None:
    """Raises ValueError if a decoder can't have this Config.

    Args:
      choices: the values that some of its fields may have.
    """
    for name, value in vars(config).items():
        least = 0 if name == "lora_rank" else 1
        if type(value) is int and value < least:
            raise ValueError(f"{name}={value} must be ≥ {least}")
        if name in choices and value not in choices[name]:
            raise ValueError(f"{name}={value!r} is not one of {', '.join(choices[name])}")
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    if N % K:
        raise ValueError(f"num_heads={N} is not divisible by num_kv_heads={K}")
    if H % 2:
        raise ValueError(f"head_dim={H} must be even: rotary embeddings rotate pairs of dims")
    known = type(config).lora_targets
    for target in {*config.lora_targets} - {*known}:
        raise ValueError(f"lora_targets has {target!r}, which is not one of {', '.join(known)}")
    kinds, window = len(config.layer_kinds), config.sliding_window
    if kinds > config.num_layers:
        raise ValueError(
            f"layer_kinds has {kinds} kinds of layers for num_layers={config.num_layers}"
        )
    if kinds and window is not None:
        raise ValueError(
            f"sliding_window={window} and layer_kinds, which has windows, exclude each other"
        )
