"""Trains Qwen3-Next, gated delta networks beside attention, on text, sharded over any mesh.

    python -m recipes.qwen3_next --mesh=4x2                  # a laptop: 8 simulated devices
    python -m recipes.qwen3_next --mesh=data=2,seq=4         # resumes, with long rows split
    python -m recipes.qwen3_next --num_experts=8 --experts_per_token=2 --set=mlp=88 --workdir=runs/experts
    python -m recipes.qwen3_next --mtp_depth=1 --workdir=runs/mtp  # the token after the next too

Running the same command again resumes. --dataset takes your own text; --size a larger model.
"""

import functools

from recipes.common import language
from recipes.common.language import DECODER, EXPERTS, Sample, Text, Training
from recipes.common.runtime import Run
from recipes.common.runtime.start import start
from zoo.qwen3_next import SIZES, Config

# The flags of the model: a Config's fields that are set most often. --set reaches the others.
MODEL = language.model_flags(
    Config, (*DECODER, *EXPERTS, "mtp_depth", "mtp_weight"), SIZES, Config.REMAT
)
NEW = (Run(steps=400, batch_size=16, learning_rate=4e-3), Text(), MODEL, Training(), Sample())

# The run, from the mesh to the sample: recipes/common/language/recipe.py.
main = functools.partial(language.main, "qwen3_next")
defaults = functools.partial(language.fine_tuning, "qwen3_next", NEW)

if __name__ == "__main__":
    start(main, *NEW, defaults=defaults)
