"""Layers of several kinds, one after another: a scan whose iterations run one *period* of layers.

A model whose layers differ in their windows or rotary embeddings has `scan = scan_kinds`, so that its
Config's `layer_kinds`, a period of AttentionTypes, is repeated over the depth.
"""

import functools

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, PartitionSpec

from ..core.stack import remat_input, scan_layers


def scan_kinds(self, layers, x_BTD, inputs, first: int = 0):
    """`Decoder.scan` of layers of the kinds in self.config.kinds.

    Args:
      first: the number of the first layer, which is of kind `first` mod len(kinds).
    """
    config = self.config
    start = first % len(config.kinds)
    kinds = config.kinds[start:] + config.kinds[:start]
    run_layer = functools.partial(self.run_layer, inputs)
    return scan_by_kind(run_layer, x_BTD, layers, kinds, config.remat_policy, config.unroll)


def scan_by_kind(function, x, layers, kinds: tuple, remat, unroll: int = 1):
    """`stack.scan_layers` where layer l has kind l mod len(kinds), which `function` gets last."""
    if len(kinds) == 1:
        run_layer = functools.partial(function, kind=kinds[0])
        return scan_layers(run_layer, x, layers, remat, unroll)
    x, outputs = scan_periods(function, x, {"": layers}, kinds, remat, ("",) * len(kinds))
    return x, outputs[""]


def scan_periods(function, x, stacks: dict, kinds: tuple, remat, period: tuple[str, ...]):
    """Runs x through stacks of layers, whose order is a period of the stacks' names.

    Each layer of a period is compiled for its kind. Layers that are left over at the end run after
    the scan.

    Args:
      function: (x, one layer of a stack, its kind) → (x, outputs).
      stacks: name → tree of arrays whose first dim is the stack's number of layers.
      kinds: static settings of the layers of a period.
      period: the stack of each layer of a period; as long as `kinds`.

    Returns: (x, name → outputs of the stack's layers, stacked in a first dim).
    """

    def run_layer(x, layer, kind):
        return remat_input(functools.partial(function, kind=kind), remat)(x, layer)

    depth = {name: jax.tree.leaves(stack)[0].shape[0] for name, stack in stacks.items()}
    num_layers = sum(depth.values())
    # XLA would unroll a loop with one iteration.
    periods = num_layers // len(kinds) if num_layers >= 2 * len(kinds) else 0
    order = list(zip(period, kinds, strict=True))
    run = functools.partial(run_layers, run_layer, stacks, remat)
    outputs = {name: [] for name in stacks}
    in_loop = {name: periods * period.count(name) for name in stacks}
    if periods:
        run_period = functools.partial(run, order, prevent_cse=False)
        firsts = {name: jnp.arange(0, in_loop[name], period.count(name)) for name in stacks}
        x, output = jax.lax.scan(run_period, x, firsts)
        for name in stacks:
            outputs[name].append(jax.tree.map(merge_first_dims, output[name]))
    if left := num_layers - periods * len(kinds):
        # Outside a loop, XLA may merge forward and recomputed operations.
        x, output = run((order * 2)[:left], x, in_loop, prevent_cse=True)
        for name in output:
            outputs[name].append(output[name])
    return x, {n: jax.tree.map(lambda *o: jnp.concatenate(o), *out) for n, out in outputs.items()}


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
        if not isinstance(jax.tree.leaves(x)[0], Tracer):  # called eagerly: may need the mesh
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


def check_kinds(config) -> None:
    """Raises ValueError if a Config's `layer_kinds` are invalid."""
    kinds = config.layer_kinds
    if config.sliding_window:
        raise ValueError(
            f"sliding_window={config.sliding_window} and layer_kinds exclude each other; state "
            "each kind's window in layer_kinds"
        )
    if len(kinds) > config.num_layers:
        raise ValueError(
            f"layer_kinds has {len(kinds)} kinds, more than num_layers={config.num_layers}"
        )
    for kind in kinds:
        if kind.window is not None and kind.window < 1:
            raise ValueError(f"layer_kinds has window={kind.window}, which must be ≥ 1, or None")
