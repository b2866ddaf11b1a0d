"""Moves a model from one layout to another on the same devices: from training to generation."""

import jax

from recipes.common.sharding.abstract import Tree, paths
from recipes.common.sharding.layout import Layout, shardings


def move(state: Tree, source: Layout, target: Layout, donate: bool = False) -> Tree:
    """The model's variables under another layout's rules and mesh, bit-equal.

    One array at a time: beside the result, memory holds what transfers one array.

    Args:
      state: the variables, or a training state, whose other arrays are left out.
      source: their layout.
      target: a layout of the same model on the same devices.
      donate: frees each array of `state` once it is moved; JAX's own donation keeps some.

    Raises ValueError if the layouts are of different models or devices, or the state is not `source`'s.
    """
    if {*source.mesh.devices.flat} != {*target.mesh.devices.flat}:
        raise ValueError(
            f"the layouts are on {source.mesh.size} and {target.mesh.size} devices that are not the same"
        )
    kinds = source.model.shapes.keys()
    variables = {kind: state[kind] for kind in kinds}
    before, after = paths(source.variables()), paths(target.variables())
    arrays = paths(variables)
    for path in {**before, **after, **arrays}:
        shapes = [tree[path].shape if path in tree else None for tree in (arrays, before, after)]
        if len({*shapes}) > 1:
            raise ValueError(f"{path} has shapes {shapes} in the state and in the two layouts")
        if not arrays[path].sharding.is_equivalent_to(before[path].sharding, arrays[path].ndim):
            raise ValueError(
                f"{path} is sharded {arrays[path].sharding.spec}, and the layout that it comes from has "
                f"{before[path].sharding.spec}"
            )

    def one(x: jax.Array, sharding: jax.sharding.NamedSharding) -> jax.Array:
        moved = jax.block_until_ready(jax.device_put(x, sharding))
        if donate and not x.sharding.is_equivalent_to(sharding, x.ndim):  # else they share memory
            x.delete()
        return moved

    return jax.tree.map(one, variables, shardings(target.variables()))
