"""Trains Gemma 3 on text, sharded over any mesh.

    python -m recipes.gemma3 --mesh=4x2                           # a laptop: 8 simulated devices
    python -m recipes.gemma3 --mesh=data=2,seq=4                  # resumes, with long rows split
    python -m recipes.gemma3 --restore_from=hf:DIR --steps=0 --prompt="def "  # Gemma 2 or 3

Running the same command again resumes. --dataset takes your own text; --size a larger model.
"""

import dataclasses
import functools

from recipes.common import language
from recipes.common.language import Sample, Text
from recipes.common.runtime import Run
from recipes.common.runtime.start import start
from zoo.gemma3 import REMAT, SIZES, Config


@dataclasses.dataclass(frozen=True)
class Flags(language.Flags):
    """The flags of every language model, with Gemma's choices."""

    size: str = language.size_flag(SIZES)
    remat: str = language.remat_flag(REMAT)
    lora_targets: str = language.lora_targets_flag(Config.lora_targets)


# The run, from the mesh to the sample: recipes/common/language/recipe.py.
main = functools.partial(language.main, "gemma3")

NEW = (Run(steps=400, batch_size=16, learning_rate=4e-3), Text(), Flags(), Sample())
defaults = functools.partial(language.fine_tuning, "gemma3", NEW)

if __name__ == "__main__":
    start(main, *NEW, defaults=defaults)
