"""Trains the mixture of experts on text, sharded over any mesh.

    python -m recipes.moe --mesh=data=2,expert=4             # a laptop: 8 simulated devices
    python -m recipes.moe --mesh=4x2                         # resumes that run on another mesh
    python -m recipes.moe --mesh=data=1,expert=8 --steps=0 --restore_from=hf:DIR --prompt="def "

Running the same command again resumes. DIR may hold Mixtral or Qwen3-MoE. metrics.jsonl and the end
of the run show how much each expert is used: load_3=1.2 is 1.2 times its even share.
"""

import dataclasses
import functools

from recipes.common import language
from recipes.common.language import ExpertFlags, Sample, Text, usage, with_experts
from recipes.common.runtime import Run
from recipes.common.runtime.start import start
from zoo.moe import REMAT, SIZES, Config


@dataclasses.dataclass(frozen=True)
class Flags(ExpertFlags):
    """The flags of every language model with experts, the MoE's choices, and a flag of its own."""

    size: str = language.size_flag(SIZES)
    remat: str = language.remat_flag(REMAT)
    lora_targets: str = language.lora_targets_flag(Config.lora_targets)
    balance_rate: float = language.balance_rate_flag()


# The run, from the mesh to the sample: recipes/common/language/recipe.py.
main = functools.partial(language.main, "moe", change=with_experts, summary=usage)

NEW = (Run(steps=300, batch_size=16, learning_rate=4e-3), Text(), Flags(), Sample())
defaults = functools.partial(language.fine_tuning, "moe", NEW)

if __name__ == "__main__":
    start(main, *NEW, defaults=defaults)
