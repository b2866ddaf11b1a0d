"""Trains the mixture of experts on text, sharded over any mesh.

    python -m recipes.moe --mesh=data=2,expert=4             # a laptop: 8 simulated devices
    python -m recipes.moe --mesh=4x2                         # resumes that run on another mesh
    python -m recipes.moe --mesh=data=1,expert=8 --steps=0 --restore_from=hf:DIR --prompt="def "

Running the same command again resumes. DIR may hold Mixtral or Qwen3-MoE. metrics.jsonl and the end
of the run show how much each expert is used: load_3=1.2 is 1.2 times its even share.
"""

import functools

from recipes.common import language
from recipes.common.language import DECODER, EXPERTS, Sample, Text, Training
from recipes.common.runtime import Run
from recipes.common.runtime.start import start
from zoo.moe import Config
from zoo.sizes import MOE

# The flags of the model: a Config's fields that are set most often. --set reaches the others.
MODEL = language.model_flags(Config, (*DECODER, *EXPERTS, "balance_rate"), MOE, Config.REMAT)
NEW = (Run(steps=300, batch_size=16, learning_rate=4e-3), Text(), MODEL, Training(), Sample())

# The run, from the mesh to the sample: recipes/common/language/recipe.py.
main = functools.partial(language.main, "moe")
defaults = functools.partial(language.fine_tuning, "moe", NEW)

if __name__ == "__main__":
    start(main, *NEW, defaults=defaults)
