"""The answer to a recipe's --plan."""

from typing import NamedTuple

from recipes.common.runtime.errors import needs_instruments
from recipes.common.sharding.layout import Layout


class Second(NamedTuple):
    """A frozen model beside the one that is trained."""

    layout: Layout
    bytes_per_device: int  # of its weights; 0 if they are the first model's
    on_host: bool  # they are in the host's memory


def plan(
    layout: Layout,
    accumulate: int = 1,
    offload: str = "",
    optimizer: str = "adamw",
    second: Second | None = None,
) -> list[str]:
    """The planner's lines about a run. Raises UserError if the planner was removed.

    Args:
      second: a frozen model in the step.
    """
    with needs_instruments("--plan"):
        from recipes.instruments.plan.answer import of_layout
    return of_layout(layout, accumulate, offload, optimizer, second)
