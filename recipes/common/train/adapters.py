"""Flags of adapters (LoRA), and the fields of a Config that they set."""

from collections.abc import Iterable
from typing import Any

from recipes.common.runtime import UserError, flag


def rank_flag() -> int:
    """--lora_rank."""
    return flag(
        0, "Rank of adapters (LoRA) to train beside the frozen weights of --restore_from; 0: train "
        "all parameters.", "model", at_least=0,
    )  # fmt: skip


def alpha_flag() -> float:
    """--lora_alpha."""
    return flag(
        0.0, "Adapters are scaled by lora_alpha / lora_rank; 0: twice the rank.", "model",
        at_least=0.0,
    )  # fmt: skip


def targets_flag(targets: Iterable[str] = ()) -> str:
    """--lora_targets: some of Config.lora_targets."""
    return flag("all", f"Weights with an adapter: all, or some of {','.join(targets)}.", "model")


def base_flag() -> str:
    """--base."""
    return flag(
        "", "Base model of the adapter, if it has moved.", "checkpoints",
        may_change=True,
    )  # fmt: skip


def lora_fields(flags: Any, known: tuple[str, ...]) -> dict[str, Any]:
    """Config's LoRA fields, from the flags. Raises UserError if the flags don't fit together.

    Args:
      known: weights that may have an adapter.
    """
    if not flags.lora_rank:
        if flags.lora_alpha or flags.lora_targets != "all":
            name = "lora_alpha" if flags.lora_alpha else "lora_targets"
            raise UserError(
                f"--{name}={getattr(flags, name)} is for adapters, and --lora_rank=0 trains none; "
                "add, for example, --lora_rank=8"
            )
        return {"lora_rank": 0}
    wanted = known if flags.lora_targets == "all" else flags.lora_targets.split(",")
    for name in wanted:
        if name not in known:
            raise UserError(
                f"--lora_targets={flags.lora_targets} has {name!r}; use all, or some of "
                f"{','.join(known)}"
            )
    return {
        "lora_rank": flags.lora_rank,
        "lora_alpha": flags.lora_alpha or 2.0 * flags.lora_rank,
        "lora_targets": tuple(name for name in known if name in wanted),
    }
