"""Trains DeepSeek V3, latent attention and a mixture of experts, on text, sharded over any mesh.

    python -m recipes.deepseek --mesh=data=2,expert=4        # a laptop: 8 simulated devices
    python -m recipes.deepseek --mesh=4x2                    # resumes that run on another mesh
    python -m recipes.deepseek --mtp_depth=1                 # predicts the token after the next one too
    python -m recipes.deepseek --restore_from=hf:moonshotai/Moonlight-16B-A3B --lora_rank=8

Running the same command again resumes. --restore_from reads the published float8 weights of V3.
"""

import dataclasses
import functools

from recipes.common import language
from recipes.common.language import ExpertFlags, Sample, Text, usage, with_experts
from recipes.common.runtime import Run, flag
from recipes.common.runtime.start import start
from zoo.deepseek import REMAT, SIZES, Config


@dataclasses.dataclass(frozen=True)
class Flags(ExpertFlags):
    """The flags of every language model with experts, DeepSeek's choices, and flags of its own."""

    size: str = language.size_flag(SIZES)
    remat: str = language.remat_flag(REMAT)
    lora_targets: str = language.lora_targets_flag(Config.lora_targets)
    balance_rate: float = flag(
        -1.0, "Change per step of the experts' biases, toward even loads; 0: they stay; -1: as in the "
        "size or the checkpoint.", "model", at_least=-1.0,
    )  # fmt: skip
    mtp_depth: int = flag(
        -1, "Layers that predict a further token, 0 or 1; -1: as in the size or the checkpoint.",
        "model", choices=(-1, 0, 1),
    )  # fmt: skip
    mtp_weight: float = flag(
        -1.0, "Weight of the further token's loss; -1: as in the size or the checkpoint.", "model",
        at_least=-1.0,
    )  # fmt: skip


# The run, from the mesh to the sample: recipes/common/language/recipe.py.
main = functools.partial(language.main, "deepseek", change=with_experts, summary=usage)

NEW = (Run(steps=200, batch_size=16, learning_rate=4e-3), Text(), Flags(), Sample())
defaults = functools.partial(language.fine_tuning, "deepseek", NEW)

if __name__ == "__main__":
    start(main, *NEW, defaults=defaults)
