"""A decoder's layers as one stack, run by a scan.

Shapes: L layers, P layers of one period.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

# What a layer's forward pass keeps for its backward pass; the rest is recomputed.
REMAT_POLICIES = {
    "none": jax.checkpoint_policies.everything_saveable,  # under FSDP, gathered weights too
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # products with a weight
    # The two sublayers' outputs: tensor parallelism repeats no all-reduce.
    "sublayers": jax.checkpoint_policies.save_only_these_names("sublayer"),
    "full": jax.checkpoint_policies.nothing_saveable,  # only the layer's input
}


def stack(make_layer, num_layers: int, rngs: nnx.Rngs):
    """Builds `num_layers` layers as one module; its variables start with L, logical axis `layers`.

    Args:
      make_layer: a function of `rngs` that returns a layer.
    """
    layers = nnx.vmap(lambda rngs: make_layer(rngs=rngs))(rngs.split(num_layers))
    # nnx.vmap's transform_metadata names the axis only in NNX's graph mode, not in tree mode.
    for _, variable in nnx.iter_graph(layers):
        if isinstance(variable, nnx.Variable) and hasattr(variable, "out_sharding"):
            variable.set_metadata(out_sharding=("layers", *variable.out_sharding))
    return layers


def scan_layers(function, x: jax.Array, layers, kinds: tuple, remat, unroll: int = 1):
    """Runs x through stacked layers, so that compile time doesn't grow with their number.

    Each iteration of the scan runs one *period* of layers: one for each kind, compiled for that
    kind. Layers that are left over at the end run after the scan.

    Args:
      function: (x, one layer of `layers`, its kind) → (x, outputs).
      layers: tree of arrays whose first dim is L.
      kinds: static settings of layers with equal shapes; layer l has kind l mod len(kinds).
      remat: one of REMAT_POLICIES' values.
      unroll: layers per iteration of the compiled loop, if there is only one kind.

    Returns: (x, outputs of all layers, stacked in a first dim L).
    """
    if len(kinds) == 1:
        layer = functools.partial(function, kind=kinds[0])
        layer = jax.checkpoint(layer, policy=remat, prevent_cse=False)
        return jax.lax.scan(layer, x, layers, unroll=unroll)
    L, P = jax.tree.leaves(layers)[0].shape[0], len(kinds)
    whole = L - L % P if L >= 2 * P else 0  # XLA would unroll a loop with one iteration
    outputs = []

    def run(x, first, count, prevent_cse):
        """Layers `first` to `first` + count - 1."""
        found = []
        for i in range(count):
            # Layers are indexed in the whole stack: slicing it by kind would copy all parameters,
            # their gradients and the cache.
            def layer(x, layers, l=first + i, kind=kinds[i % P]):
                at = functools.partial(jax.lax.dynamic_index_in_dim, index=l, keepdims=False)
                return function(x, jax.tree.map(at, layers), kind=kind)

            layer = jax.checkpoint(layer, policy=remat, prevent_cse=prevent_cse)
            x, output = layer(x, layers)
            found.append(output)
        return x, jax.tree.map(lambda *o: jnp.stack(o), *found)

    if whole:
        trip = functools.partial(run, count=P, prevent_cse=False)
        x, found = jax.lax.scan(trip, x, jnp.arange(0, whole, P))
        outputs.append(jax.tree.map(lambda o: o.reshape(whole, *o.shape[2:]), found))
    if whole < L:  # outside a loop, XLA may merge forward and recomputed operations
        x, found = run(x, whole, L - whole, prevent_cse=True)
        outputs.append(found)
    return x, jax.tree.map(lambda *o: jnp.concatenate(o), *outputs)


def check_config(config, **choices) -> None:
    """Raises ValueError if a decoder's Config is invalid.

    Args:
      choices: field → its valid values.
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
    for least in (kind[0] for kind in config.layer_kinds):
        if least is not None and least < 1:
            raise ValueError(f"layer_kinds has window={least}, which must be ≥ 1, or None")
    if kinds > config.num_layers:
        raise ValueError(f"layer_kinds has {kinds} kinds, more than num_layers={config.num_layers}")
    if kinds and window is not None:
        raise ValueError(
            f"sliding_window={window} and layer_kinds exclude each other; state each kind's window "
            "in layer_kinds"
        )
