"""Trains DeepSeek V3, latent attention and a mixture of experts, on text, sharded over any mesh.

    python -m recipes.deepseek --mesh=data=2,expert=4        # a laptop: 8 simulated devices
    python -m recipes.deepseek --mesh=4x2                    # resumes that run on another mesh
    python -m recipes.deepseek --mtp_depth=1                 # predicts the token after the next one too
    python -m recipes.deepseek --restore_from=hf:moonshotai/Moonlight-16B-A3B --lora_rank=8

Running the same command again resumes. --restore_from reads the published float8 weights of V3.
"""

import functools

from recipes.common import language
from recipes.common.language import DECODER, EXPERTS, Sample, Text, Training
from recipes.common.runtime import Run
from recipes.common.runtime.start import start
from zoo.deepseek import SIZES, Config

# The flags of the model: a Config's fields that are set most often. --set reaches the others.
MODEL = language.model_flags(
    Config, (*DECODER, *EXPERTS, "balance_rate", "mtp_depth", "mtp_weight"), SIZES, Config.REMAT
)
NEW = (Run(steps=200, batch_size=16, learning_rate=4e-3), Text(), MODEL, Training(), Sample())

# The run, from the mesh to the sample: recipes/common/language/recipe.py.
main = functools.partial(language.main, "deepseek")
defaults = functools.partial(language.fine_tuning, "deepseek", NEW)

if __name__ == "__main__":
    start(main, *NEW, defaults=defaults)
