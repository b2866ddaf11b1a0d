"""The answer to a recipe's --plan."""

from recipes.common.runtime.errors import needs_instruments
from recipes.common.sharding.layout import Layout


def plan(
    layout: Layout,
    accumulate: int = 1,
    offload: str = "",
    optimizer: str = "adamw",
    frozen: Layout | None = None,
    frozen_bytes: int = 0,
) -> list[str]:
    """The planner's lines about a run. Raises UserError if the planner was removed.

    Args:
      frozen, frozen_bytes: a second model in the step, and its bytes on a device.
    """
    with needs_instruments("--plan"):
        from recipes.instruments.plan.answer import of_layout
    return of_layout(layout, accumulate, offload, optimizer, frozen, frozen_bytes)
