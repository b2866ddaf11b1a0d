"""Flags of language models with experts, and how evenly the experts are used."""

import dataclasses
import math
from typing import Any

from recipes.common.language.flags import Flags
from recipes.common.runtime import UserError, flag
from recipes.common.sharding import Tree


@dataclasses.dataclass(frozen=True)
class ExpertFlags(Flags):
    """The flags of every language model, and flags of the experts."""

    num_experts: int = flag(
        0, "Experts in a layer; 0: as in the size or the checkpoint.", "model", at_least=0
    )
    experts_per_token: int = flag(
        0, "Experts that each token uses; 0: as in the size or the checkpoint.", "model",
        at_least=0,
    )  # fmt: skip
    capacity: str = flag(
        "", "Slots of an expert for the tokens of a sequence, in multiples of an even share; none: no "
        "limit; empty: as in the size or the checkpoint.", "model",
    )  # fmt: skip
    balance_weight: float = flag(
        -1.0, "Weight of the load-balancing loss; -1: as in the size or the checkpoint.", "model",
        at_least=-1.0,
    )  # fmt: skip


def balance_rate_flag() -> float:
    """--balance_rate, for entries whose choice of experts has biases."""
    return flag(
        -1.0, "Change per step of the experts' biases, toward even loads; 0: none; -1: as in the size "
        "or the checkpoint.", "model", at_least=-1.0,
    )  # fmt: skip


def mtp_depth_flag() -> int:
    """--mtp_depth, for entries with multi-token prediction."""
    return flag(
        -1, "Layers that predict a further token, 0 or 1; -1: as in the size or the checkpoint.",
        "model", at_least=-1, at_most=1,
    )  # fmt: skip


def mtp_weight_flag() -> float:
    """--mtp_weight, for entries with multi-token prediction."""
    return flag(
        -1.0, "Weight of the further token's loss; -1: as in the size or the checkpoint.", "model",
        at_least=-1.0,
    )  # fmt: skip


def with_experts(config: Any, flags: ExpertFlags) -> Any:
    """Applies the flags of the experts to a Config. Raises UserError."""
    num_experts = flags.num_experts or config.num_experts
    per_token = flags.experts_per_token or config.experts_per_token
    if per_token > num_experts:
        raise UserError(
            f"--experts_per_token={per_token} is more than the number of experts, {num_experts}; "
            f"use at most {num_experts}, or a larger --num_experts"
        )
    changed: dict[str, Any] = {"num_experts": num_experts, "experts_per_token": per_token}
    if flags.capacity:
        changed["capacity"] = capacity(flags.capacity)
    for name in ("balance_weight", "balance_rate", "mtp_depth", "mtp_weight"):  # if an entry has it
        if getattr(flags, name, -1) >= 0:
            changed[name] = getattr(flags, name)
    try:
        return dataclasses.replace(config, **changed)
    except ValueError as error:  # experts that groups don't divide
        given = f"--num_experts={num_experts} and --experts_per_token={per_token}"
        raise UserError(f"{given} do not fit the model: {error}; use others") from None


def capacity(given: str) -> float | None:
    """Parses --capacity. Raises UserError."""
    if given == "none":
        return None
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(
            f"--capacity={given} is not a number > 0; try 1.25, or none to drop no token"
        )
    return value


def usage(figures: Tree) -> str:
    """A line on how evenly the experts are used, and on choices that were dropped.

    Args:
      figures: held-out, name → (sum, count).
    """
    means = {name: float(total / count) for name, (total, count) in figures.items()}
    loads = [value for name, value in means.items() if name.startswith("load_")]
    each = f" ({', '.join(f'{load:.2f}' for load in loads)})" if len(loads) <= 16 else ""
    return (
        f"Use of the {len(loads)} experts, in even shares: {min(loads):.2f} to {max(loads):.2f}{each}; "
        f"no room for {means['dropped']:.2%} of what was chosen."
    )
