"""The answer to a recipe's --plan."""

from recipes.common.runtime.errors import needs_instruments
from recipes.common.sharding.layout import Layout


def plan(
    layout: Layout, accumulate: int = 1, offload: str = "", optimizer: str = "adamw"
) -> list[str]:
    """The planner's lines about a run. Raises UserError if the planner was removed."""
    with needs_instruments("--plan"):
        from recipes.instruments.plan.answer import of_layout
    return of_layout(layout, accumulate, offload, optimizer)
