"""AdamW, and the learning rate with warm-up and cosine decay."""

import dataclasses

import jax
import optax

from recipes.common.sharding import Tree


@dataclasses.dataclass(frozen=True)
class LearningRate:
    """Step → learning rate: from 0 to `peak` in `warmup` steps, by a cosine to peak / 10 at `steps`."""

    peak: float
    warmup: int
    steps: int

    def __call__(self, step):
        warmup = min(self.warmup, max(self.steps - 1, 0))
        decay = max(self.steps, 1)
        return optax.warmup_cosine_decay_schedule(0.0, self.peak, warmup, decay, self.peak / 10)(
            step
        )


def adamw(
    lr: optax.Schedule, weight_decay: float, clip_norm: float
) -> optax.GradientTransformation:
    """Clips by global norm, then AdamW (Loshchilov & Hutter 2019). Matrices decay, vectors don't."""

    def decays(params: Tree) -> Tree:
        # By name, not rank: stacked layers give a vector a second dim.
        vectors = ("scale", "bias")
        return jax.tree_util.tree_map_with_path(
            lambda path, _: not path[-1].key.endswith(vectors), params
        )

    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(lr, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=decays),
    )
