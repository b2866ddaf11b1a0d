"""Memory of the tower of a model that sees, computed analytically. It runs over all devices."""

import math

import jax.numpy as jnp

from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import Layout
from recipes.common.sharding.tower_shape import TowerShape
from zoo.kernels.choice import Request, choose_kernel

PREFIX = "vision/"  # of the paths of its weights


def with_tower(
    parts: dict[str, float], layout: Layout, tower: TowerShape, accumulate: int
) -> dict[str, float]:
    """A decoder's memory besides its state, with that of its tower.

    What the tower's layers save for their backward pass stays while the decoder runs. Its working set
    is needed before and after that, so the larger of the two counts. A frozen one saves nothing.
    """
    width = jnp.dtype(layout.shape.dtype or "float32").itemsize
    rows = layout.batch_size // accumulate
    pictures = math.ceil(rows * layout.pictures / layout.mesh.size)
    patches = pictures * tower.patches
    scores = 0
    if tower.layers and _kernel(layout, tower) == "xla":
        scores = pictures * tower.heads * tower.patches**2 * 4
    saved = 0.0
    if tower.trained:
        saved = patches * tower.layers * _saved(layout, tower, width) * width
        saved += tower.layers * scores * (layout.shape.remat == "none")
    pixels = patches * tower.patch_numbers * (4 + width)
    # Tokens of the pictures of a device's rows, and of their gradients.
    slots = rows // layout.batch_shards * layout.pictures
    tokens = slots * tower.tokens * layout.shape.embed * width
    queries = tower.heads * tower.head_dim
    inner = 4 * queries + 2 * tower.mlp + 2 * tower.embed
    working = patches * inner * width * (2 if tower.trained else 1) + 2 * tower.weights * width
    working += scores
    gradients = _gradients(layout) if tower.trained else 0.0
    live = "live working set"
    return parts | {
        "gradients": parts["gradients"] + gradients,
        "saved activations": parts["saved activations"] + saved + pixels + 2 * tokens,
        live: max(parts[live], working),
    }


def _saved(layout: Layout, tower: TowerShape, width: int) -> float:
    """Numbers that remat saves of a layer, per patch; see step_memory._saved_numbers."""
    D, queries = tower.embed, tower.heads * tower.head_dim
    of_policy = {
        "full": D,
        "gathered": 3 * D,
        "sublayers": 2 * D,
        "dots": 2 * D + 3 * queries + tower.mlp,
        "dispatched": D,
        "offload": 0,
    }
    everything = 6 * D * 4 / width + 2 * D + 4 * tower.mlp + 6 * queries
    return of_policy.get(layout.shape.remat or "none", everything)


def _kernel(layout: Layout, tower: TowerShape) -> str:
    """The kernel of its attention; no rule splits its patches."""
    request = Request(
        seq_len=tower.patches,
        head_dim=tower.head_dim,
        dtype=layout.shape.dtype or "float32",
        segments=False,
        exchange=None,
    )
    with layout.trace():
        return choose_kernel(layout.shape.kernel or "xla", request).kernel


def _gradients(layout: Layout) -> float:
    """Bytes of its gradients at rest, in float32."""
    params = paths(layout.variables()["params"])
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * 4
        for path, leaf in params.items()
        if path.startswith(PREFIX)
    )
