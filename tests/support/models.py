"""Values of a model's variables for tests that compute with them, without compiling an initialization."""

import jax
import numpy as np

from recipes.common.sharding.layout import Layout, Tree, shardings


def random_values(shapes: Tree, seed: int = 0) -> Tree:
    """Normal values of standard deviation 1/16 as numpy arrays; the scales of norms are around 1.

    Values are about as small as those that models start with. With 1/8, activations grow from layer
    to layer, and so do the rounding errors in which meshes differ.
    """
    rng = np.random.default_rng(seed)

    def value(path, leaf) -> np.ndarray:
        normal = rng.standard_normal(leaf.shape, np.float32) / 16
        return normal + ("norm" in jax.tree_util.keystr(path))

    return jax.tree_util.tree_map_with_path(value, shapes)


def random_variables(layout: Layout) -> Tree:
    """Random values of a model, the same on any mesh, sharded by the layout."""
    variables = layout.variables()
    return jax.device_put(random_values(variables), shardings(variables))
