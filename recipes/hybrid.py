"""Trains a hybrid on text: Mamba-2 and short convolutions beside few layers that attend.

    python -m recipes.hybrid --mesh=data=2,seq=4             # a laptop: 8 simulated devices
    python -m recipes.hybrid --mesh=4x2                      # resumes on another mesh
    python -m recipes.hybrid --pattern=M-M-*- --set=num_layers=12 --workdir=runs/mamba
    python -m recipes.hybrid --pattern=ME*E --num_experts=8 --experts_per_token=2 --set=mlp=88 --workdir=runs/experts

Running the same command again resumes. --dataset takes your own text; --size a larger model.
"""

import functools

from recipes.common import language
from recipes.common.language import DECODER, EXPERTS, Sample, Text, Training
from recipes.common.runtime import Run
from recipes.common.runtime.start import start
from zoo.hybrid import Config
from zoo.sizes import HYBRID

# The flags of the model: a Config's fields that are set most often. --set reaches the others.
MODEL = language.model_flags(Config, (*DECODER, *EXPERTS, "pattern"), HYBRID, Config.REMAT)
NEW = (Run(steps=400, batch_size=16, learning_rate=4e-3), Text(), MODEL, Training(), Sample())

# The run, from the mesh to the sample: recipes/common/language/recipe.py.
main = functools.partial(language.main, "hybrid")
defaults = functools.partial(language.fine_tuning, "hybrid", NEW)

if __name__ == "__main__":
    start(main, *NEW, defaults=defaults)
