"""The training state: {"params": …, "opt_state": …, "step": …, "rngs": …} and what else the model has
of "base" and "buffers" (sharding/abstract.py).

Nested dicts with arrays for leaves, which is what a checkpoint holds and what Orbax reads without
any code of ours.
"""

from collections.abc import Callable

import flax.serialization
import jax
import jax.numpy as jnp
import optax

from recipes.common.sharding import Layout, Tree, paths, shardings
from recipes.common.sharding.abstract import variables_of


def new_state(
    layout: Layout, optimizer: optax.GradientTransformation, seed: int, variables: Tree = None
) -> Tree:
    """The training state before the first step, to be traced.

    Args:
      variables: the model's; None: its own initial values.
    """
    variables = variables or variables_of(layout.build())
    return variables | {
        "opt_state": flax.serialization.to_state_dict(optimizer.init(variables["params"])),
        "step": jnp.zeros((), jnp.int32),
        "rngs": {"default": jax.random.key_data(jax.random.key(seed))},
    }


def abstract_state(layout: Layout, optimizer: optax.GradientTransformation) -> Tree:
    """The training state as ShapeDtypeStructs, each with its NamedSharding.

    What the optimizer keeps for a parameter (its moments) is sharded like that parameter: arrays of
    its shape whose path in the optimizer's state ends with the parameter's.
    """
    shapes = jax.eval_shape(lambda: new_state(layout, optimizer, seed=0))
    variables = shardings(layout.variables())
    where = jax.tree.map(lambda _: layout.replicated, shapes) | variables
    params = paths(layout.variables()["params"])

    def like_its_parameter(path, leaf) -> jax.sharding.NamedSharding:
        keys = [str(key.key) for key in path]
        for first in range(len(keys)):
            param = params.get("/".join(keys[first:]))
            if param is not None and param.shape == leaf.shape:
                return param.sharding
        return layout.replicated

    where["opt_state"] = jax.tree_util.tree_map_with_path(like_its_parameter, shapes["opt_state"])
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes, where
    )


def initialize(
    layout: Layout, optimizer: optax.GradientTransformation, seed: int, abstract: Tree
) -> Tree:
    """The new training state, each shard made on its own device."""
    return initialization(layout, optimizer, seed, abstract)()


def initialization(
    layout: Layout, optimizer: optax.GradientTransformation, seed: int, abstract: Tree
) -> jax.stages.Compiled:
    """The program that makes the new training state."""
    return _program(layout, lambda: new_state(layout, optimizer, seed), abstract)


def new_params(layout: Layout) -> Tree:
    """The model's own initial values of what is trained, each shard made on its own device."""
    make = _program(
        layout, lambda: variables_of(layout.build())["params"], layout.variables()["params"]
    )
    return make()


def _program(layout: Layout, make: Callable[[], Tree], abstract: Tree) -> jax.stages.Compiled:
    """`make`, compiled to the same bits on any mesh."""
    options = {}
    if layout.mesh.devices.flat[0].platform == "cpu":
        # Above 1, LLVM vectorizes where a shard's shape allows, which may change the last bit.
        options["xla_backend_optimization_level"] = 1
    # Traced outside the mesh: inside, Explicit axes say of each array where it lies, and of new
    # random numbers that is everywhere.
    compiled = jax.jit(make, out_shardings=shardings(abstract), compiler_options=options)
    return compiled.lower().compile()
