"""Trains the decoder-only Transformer on text, sharded over any mesh.

    python -m recipes.transformer --mesh=4x2                 # a laptop: 8 simulated devices
    python -m recipes.transformer --mesh=1x8 --rules=tp      # resumes that run, sharded differently
    python -m recipes.transformer --steps=0 --prompt="def "  # evaluates and writes text

Running the same command again resumes. --dataset takes your own text; --size a larger model.
"""

import functools

from recipes.common import language
from recipes.common.language import DECODER, Sample, Text, Training
from recipes.common.runtime import Run
from recipes.common.runtime.start import start
from zoo.llama_relatives import Config
from zoo.sizes import TRANSFORMER

# The flags of the model: a Config's fields that are set most often. --set reaches the others.
MODEL = language.model_flags(Config, DECODER, TRANSFORMER, Config.REMAT)
NEW = (Run(steps=600, batch_size=16, learning_rate=4e-3), Text(), MODEL, Training(), Sample())

# The run, from the mesh to the sample: recipes/common/language/recipe.py.
main = functools.partial(language.main, "transformer")
defaults = functools.partial(language.fine_tuning, "transformer", NEW)

if __name__ == "__main__":
    start(main, *NEW, defaults=defaults)
