"""Trains the decoder-only Transformer on text, sharded over any mesh.

    python -m recipes.transformer --mesh=4x2                 # a laptop: 8 simulated devices
    python -m recipes.transformer --mesh=1x8 --rules=tp      # resumes that run, sharded differently
    python -m recipes.transformer --steps=0 --prompt="def "  # evaluates and writes text

Running the same command again resumes. --dataset takes your own text; --size a larger model.
"""

import dataclasses
import functools

from recipes.common import language
from recipes.common.language import Sample, Text
from recipes.common.runtime import Run
from recipes.common.runtime.start import start
from zoo.transformer import REMAT, SIZES, Config


@dataclasses.dataclass(frozen=True)
class Flags(language.Flags):
    """The flags of every language model, with the Transformer's choices."""

    size: str = language.size_flag(SIZES)
    remat: str = language.remat_flag(REMAT)
    lora_targets: str = language.lora_targets_flag(Config.lora_targets)


# The run, from the mesh to the sample: recipes/common/language/recipe.py.
main = functools.partial(language.main, "transformer")

NEW = (Run(steps=600, batch_size=16, learning_rate=4e-3), Text(), Flags(), Sample())
defaults = functools.partial(language.fine_tuning, "transformer", NEW)

if __name__ == "__main__":
    start(main, *NEW, defaults=defaults)
