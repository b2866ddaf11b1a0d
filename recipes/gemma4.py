"""Trains a text model of Gemma 4's kinds, sharded over any mesh.

    python -m recipes.gemma4 --mesh=4x2                           # a laptop: 8 simulated devices
    python -m recipes.gemma4 --mesh=data=2,seq=4                  # resumes, with long rows split
    python -m recipes.gemma4 --restore_from=hf:DIR --steps=0 --prompt="def "  # Gemma 4

Running the same command again resumes. --dataset takes your own text; --size a larger model.
"""

import functools

from recipes.common import language
from recipes.common.language import DECODER, Sample, Text, Training
from recipes.common.runtime import Run
from recipes.common.runtime.start import start
from zoo.gemma4 import SIZES, Config

# The flags of the model: a Config's fields that are set most often. --set reaches the others.
MODEL = language.model_flags(Config, DECODER, SIZES, Config.REMAT)
NEW = (Run(steps=400, batch_size=16, learning_rate=4e-3), Text(), MODEL, Training(), Sample())

# The run, from the mesh to the sample: recipes/common/language/recipe.py.
main = functools.partial(language.main, "gemma4")
defaults = functools.partial(language.fine_tuning, "gemma4", NEW)

if __name__ == "__main__":
    start(main, *NEW, defaults=defaults)
