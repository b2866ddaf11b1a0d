"""Trains the mixture of experts on text, sharded over any mesh.

    python -m recipes.moe --mesh=data=2,expert=4             # a laptop: 8 simulated devices
    python -m recipes.moe --mesh=4x2                         # resumes that run on another mesh
    python -m recipes.moe --mesh=data=1,expert=8 --steps=0 --restore_from=hf:DIR --prompt="def "

Running the same command again resumes. DIR may hold Mixtral or Qwen3-MoE. metrics.jsonl and the end
of the run show how much each expert is used: load_3=1.2 is 1.2 times its even share.
"""

import dataclasses
import functools
import math
from typing import Any

from recipes.common import language
from recipes.common.language import Sample, Text
from recipes.common.runtime import Run, UserError, flag
from recipes.common.runtime.start import start
from recipes.common.sharding import Tree
from zoo.moe import REMAT, SIZES, Config


@dataclasses.dataclass(frozen=True)
class Flags(language.Flags):
    """The flags of every language model, with the MoE's choices, and flags of the experts."""

    size: str = language.size_flag(SIZES)
    remat: str = language.remat_flag(REMAT)
    lora_targets: str = language.lora_targets_flag(Config.lora_targets)
    num_experts: int = flag(
        0, "Experts in a layer; 0: as in the size or the checkpoint.", "model", at_least=0
    )
    experts_per_token: int = flag(
        0, "Experts that each token uses; 0: as in the size or the checkpoint.", "model",
        at_least=0,
    )  # fmt: skip
    capacity: str = flag(
        "", "Slots of an expert for the tokens of a sequence, in even shares; none: for all that choose "
        "it; empty: as in the size or the checkpoint.", "model",
    )  # fmt: skip
    balance_weight: float = flag(
        -1.0, "Weight of the load-balancing loss; -1: as in the size or the checkpoint.", "model",
        at_least=-1.0,
    )  # fmt: skip
    balance_rate: float = flag(
        -1.0, "Change per step of the experts' biases, toward even loads; 0: no biases; -1: as in the "
        "size or the checkpoint.", "model", at_least=-1.0,
    )  # fmt: skip


def with_experts(config: Config, flags: Flags) -> Config:
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
    for name in ("balance_weight", "balance_rate"):
        if getattr(flags, name) >= 0:
            changed[name] = getattr(flags, name)
    return dataclasses.replace(config, **changed)


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
            f"--capacity={given} is not a number > 0; try 1.25, or none to leave no token out"
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


# The run, from the mesh to the sample: recipes/common/language/recipe.py.
main = functools.partial(language.main, "moe", change=with_experts, summary=usage)

NEW = (Run(steps=300, batch_size=16, learning_rate=4e-3), Text(), Flags(), Sample())
defaults = functools.partial(language.fine_tuning, "moe", NEW)

if __name__ == "__main__":
    start(main, *NEW, defaults=defaults)
