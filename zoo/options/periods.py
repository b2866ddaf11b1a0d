"""Layers of several kinds, one after another: a scan whose iterations run one *period* of layers.

stack.py uses this file if layers differ in their windows or rotary embeddings, or are of unequal shapes,
so a model can be copied without it.
"""

import functools

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, PartitionSpec


def scan_periods(run_layer, x, layers, kinds: tuple, remat, period: tuple[str, ...]):
    """`stack.scan_layers` for several kinds; layer l has kind l mod len(kinds).

    Each layer of a period is compiled for its kind. Layers that are left over at the end run after
    the scan.
    """
    stacks = layers if period else {"": layers}
    names = period or ("",) * len(kinds)
    depth = {name: jax.tree.leaves(stack)[0].shape[0] for name, stack in stacks.items()}
    num_layers = sum(depth.values())
    # XLA would unroll a loop with one iteration.
    periods = num_layers // len(kinds) if num_layers >= 2 * len(kinds) else 0
    order = list(zip(names, kinds, strict=True))
    run = functools.partial(run_layers, run_layer, stacks, remat)
    outputs = {name: [] for name in stacks}
    in_loop = {name: periods * names.count(name) for name in stacks}
    if periods:
        run_period = functools.partial(run, order, prevent_cse=False)
        firsts = {name: jnp.arange(0, in_loop[name], names.count(name)) for name in stacks}
        x, output = jax.lax.scan(run_period, x, firsts)
        for name in stacks:
            outputs[name].append(jax.tree.map(merge_first_dims, output[name]))
    if left := num_layers - periods * len(kinds):
        # Outside a loop, XLA may merge forward and recomputed operations.
        x, output = run((order * 2)[:left], x, in_loop, prevent_cse=True)
        for name in output:
            outputs[name].append(output[name])
    joined = {n: jax.tree.map(lambda *o: jnp.concatenate(o), *out) for n, out in outputs.items()}
    return x, joined if period else joined[""]


def run_layers(run_layer, stacks, remat, order: list[tuple], x, first, prevent_cse: bool):
    """Runs one layer after another: (x, stack → outputs of its layers).

    Args:
      order: (stack, kind) of each layer.
      first: stack → the number of its first layer to run.
    """
    outputs = {name: [] for name in stacks}
    for name, kind in order:
        number = first[name] + len(outputs[name])

        # Layers are indexed in the full stack: slicing it by kind would copy all parameters, their
        # gradients and the cache.
        def layer(x, stack, l=number, kind=kind):
            take = functools.partial(jax.lax.dynamic_index_in_dim, index=l, keepdims=False)
            return run_layer(x, jax.tree.map(take, stack), kind)

        layer = jax.checkpoint(layer, policy=remat, prevent_cse=prevent_cse)
        if not isinstance(x, Tracer):  # called eagerly: an operation may need the mesh
            layer = jax.jit(layer)
        x, output = layer(x, stacks[name])
        outputs[name].append(output)
    made = {name: output for name, output in outputs.items() if output}
    return x, {name: jax.tree.map(lambda *o: jnp.stack(o), *o) for name, o in made.items()}


def merge_first_dims(x: jax.Array) -> jax.Array:
    """[A, B, ...] → [A · B, ...]; neither of the two is split."""
    sharding = jax.typeof(x).sharding
    is_explicit = AxisType.Explicit in sharding.mesh.axis_types
    # JAX would forget the mesh axes of dims of size 1.
    out_sharding = PartitionSpec(*sharding.spec[1:]) if is_explicit else None
    return jnp.reshape(x, (-1, *x.shape[2:]), out_sharding=out_sharding)
