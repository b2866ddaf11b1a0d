"""What a recipe returns under --plan: `start` prints the planner's answer."""

import dataclasses
from collections.abc import Sequence

from recipes.common.sharding import Layout
from recipes.common.train.training_flags import Optimization


@dataclasses.dataclass(frozen=True)
class FrozenModel:
    """A second model in the step, which nothing trains."""

    layout: Layout
    bytes_per_device: int  # of its weights; 0 if they are the first model's
    on_host: bool  # they are in the host's memory


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """A train step to plan instead of compiling it."""

    layout: Layout
    training: Optimization
    frozen: FrozenModel | None = None
    notes: Sequence[str] = ()  # lines after the plan
