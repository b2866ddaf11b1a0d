"""The training state: "params", "opt_state", "step", "rngs"; "base" and "buffers" if the model has any.

Nested dicts of arrays: a checkpoint holds them as they are, and Orbax alone can read it. For "base"
and "buffers" see sharding/abstract.py. "frozen" has the variables of a second model for the loss,
such as a teacher; it is not saved.
"""

from collections.abc import Callable

import flax.serialization
import jax
import jax.numpy as jnp
import optax

from recipes.common.sharding import Layout, Tree, paths, shardings
from recipes.common.sharding.abstract import unadapted, variables_of
from recipes.common.sharding.compiler_options import compiler_options
from recipes.common.sharding.host_memory import on_host


def new_state(
    layout: Layout, optimizer: optax.GradientTransformation, seed: int, variables: Tree = None
) -> Tree:
    """The training state before the first step. Call it inside jit.

    Args:
      variables: the model's; None: its own initial values.
    """
    variables = variables or variables_of(layout.build())
    return variables | {
        "opt_state": flax.serialization.to_state_dict(optimizer.init(variables["params"])),
        "step": jnp.zeros((), jnp.int32),
        "rngs": {"default": jax.random.key_data(jax.random.key(seed))},
    }


def abstract_state(
    layout: Layout, optimizer: optax.GradientTransformation, offload: str = ""
) -> Tree:
    """The training state as ShapeDtypeStructs, each with its NamedSharding.

    A parameter's moments are arrays of its shape in the optimizer's state whose path ends with the
    parameter's; `Layout.optimizer_shardings` has their shardings.

    Args:
      offload: "optimizer": moments are in the host's memory.
    """
    shapes = jax.eval_shape(lambda v: new_state(layout, optimizer, 0, v), layout.model.shapes)
    variables = shardings(layout.variables())
    where = jax.tree.map(lambda _: layout.replicated, shapes) | variables
    params = paths(layout.model.shapes["params"])
    of_params = paths(layout.optimizer_shardings())

    def sharding(path, leaf) -> jax.sharding.NamedSharding:
        keys = [str(key.key) for key in path]
        for first in range(len(keys)):
            param = "/".join(keys[first:])
            if param in params and params[param].shape == leaf.shape:
                return on_host(of_params[param]) if offload else of_params[param]
        return layout.replicated

    where["opt_state"] = jax.tree_util.tree_map_with_path(sharding, shapes["opt_state"])
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes, where
    )


def initialize(
    layout: Layout, optimizer: optax.GradientTransformation, seed: int, abstract: Tree
) -> Tree:
    """A new training state. Each device makes its own shards."""
    return initialization(layout, optimizer, seed, abstract)()


def initialization(
    layout: Layout, optimizer: optax.GradientTransformation, seed: int, abstract: Tree
) -> jax.stages.Compiled:
    """The program that makes the new training state."""
    return _program(layout, lambda: new_state(layout, optimizer, seed), abstract)


def new_params(layout: Layout) -> Tree:
    """New values of the trained parameters. Each device makes its own shards."""
    return new_params_program(layout)()


def new_params_program(layout: Layout) -> jax.stages.Compiled:
    """The program that makes `new_params`."""
    return _program(
        layout, lambda: variables_of(layout.build())["params"], layout.variables()["params"]
    )


def new_values(layout: Layout, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """New values of some parameters, by path. Each device makes its own shards."""

    def make() -> dict[str, jax.Array]:
        params = paths(unadapted(variables_of(layout.build()))["params"])
        return {path: params[path] for path in wanted}

    return _program(layout, make, wanted)()


def _program(layout: Layout, make: Callable[[], Tree], abstract: Tree) -> jax.stages.Compiled:
    """Compiles `make` so that it gives the same bits on any mesh."""
    options = {}
    if layout.mesh.devices.flat[0].platform == "cpu":
        # Above level 1, LLVM vectorizes if a shard's shape allows it, which may change the last bit.
        options = {"xla_backend_optimization_level": 1} | compiler_options(layout.mesh)
    # Traced outside the mesh: inside it, with Explicit axes, new random numbers would be replicated.
    compiled = jax.jit(make, out_shardings=shardings(abstract), compiler_options=options)
    return compiled.lower().compile()
