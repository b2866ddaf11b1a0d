"""Flags of the optimizer and the train step."""

import dataclasses

from recipes.common.runtime import flag
from recipes.common.train.offload import Offload
from recipes.common.train.optimizer import OPTIMIZERS


@dataclasses.dataclass(frozen=True)
class Optimization:
    """Flags of the optimizer."""

    optimizer: str = flag(
        "adamw", "Optimizer; muon uses Adam for all but hidden matrices.", "optimizer",
        choices=OPTIMIZERS,
    )  # fmt: skip
    warmup_steps: int = flag(
        40, "Steps in which the learning rate rises to its peak.", "optimizer", at_least=0
    )
    weight_decay: float = flag(
        0.1, "Weight decay of matrices, times the learning rate.", "optimizer", at_least=0.0
    )
    clip_norm: float = flag(1.0, "Largest global norm of a gradient.", "optimizer", at_least=1e-9)

    # Recipes of small models have no such flags.
    accumulate = 1
    offload = ""


@dataclasses.dataclass(frozen=True)
class Training(Optimization, Offload):
    """Flags of recipes that can train large models."""

    accumulate: int = flag(
        1, "Gradient-accumulation steps: microbatches in a batch.", "optimizer", at_least=1
    )
