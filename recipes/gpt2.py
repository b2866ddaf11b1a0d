"""Trains GPT-2 on text, or continues to train the published one, sharded over any mesh.

    python -m recipes.gpt2 --mesh=4x2                          # a laptop: 8 simulated devices
    python -m recipes.gpt2 --mesh=1x8 --restore_from=hf:DIR    # fine-tunes a GPT-2 from Hugging Face
    python -m recipes.gpt2 --steps=0 --prompt="def "           # evaluates and writes text

Running the same command again resumes. --dataset takes your own text; --size a larger model.
"""

import dataclasses
import functools

from recipes.common import language
from recipes.common.language import Sample, Text
from recipes.common.runtime import Run
from recipes.common.runtime.start import start
from zoo.gpt2 import REMAT, SIZES, Config


@dataclasses.dataclass(frozen=True)
class Flags(language.Flags):
    """The flags of every language model, with GPT-2's choices."""

    size: str = language.size_flag(SIZES)
    remat: str = language.remat_flag(REMAT)
    lora_targets: str = language.lora_targets_flag(Config.lora_targets)


main = functools.partial(language.main, "gpt2")  # recipes/common/language/recipe.py: the whole run

NEW = (Run(steps=600, batch_size=16, learning_rate=4e-3), Text(), Flags(), Sample())
defaults = functools.partial(language.fine_tuning, "gpt2", NEW)

if __name__ == "__main__":
    start(main, *NEW, defaults=defaults)
