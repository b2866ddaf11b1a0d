"""Trains GPT-OSS, a mixture of experts with attention sinks, on text, sharded over any mesh.

    python -m recipes.gpt_oss --mesh=data=2,expert=4         # a laptop: 8 simulated devices
    python -m recipes.gpt_oss --mesh=4x2                     # resumes that run on another mesh
    python -m recipes.gpt_oss --restore_from=hf:openai/gpt-oss-20b --lora_rank=8 --dataset=my.jsonl

Running the same command again resumes. --restore_from reads the published MXFP4 weights.
"""

import functools

from recipes.common import language
from recipes.common.language import DECODER, EXPERTS, Sample, Text, Training
from recipes.common.runtime import Run
from recipes.common.runtime.start import start
from zoo.gpt_oss import SIZES, Config

# The flags of the model: a Config's fields that are set most often. --set reaches the others.
MODEL = language.model_flags(Config, (*DECODER, *EXPERTS), SIZES, Config.REMAT)
NEW = (Run(steps=200, batch_size=16, learning_rate=4e-3), Text(), MODEL, Training(), Sample())

# The run, from the mesh to the sample: recipes/common/language/recipe.py.
main = functools.partial(language.main, "gpt_oss")
defaults = functools.partial(language.fine_tuning, "gpt_oss", NEW)

if __name__ == "__main__":
    start(main, *NEW, defaults=defaults)
