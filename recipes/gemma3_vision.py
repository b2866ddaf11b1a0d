"""Trains a model that sees, Gemma 3 with its tower, on rows with pictures, sharded over any mesh.

    python -m recipes.gemma3_vision --mesh=4x2                    # questions about handwritten digits
    python -m recipes.gemma3_vision --mesh=data=2,seq=4           # resumes, with rows split
    python -m recipes.gemma3_vision --dataset=rows.jsonl --restore_from=hf:DIR --lora_rank=8

Running the same command again resumes; --help lists the flags.
"""

import functools

from recipes.common import language
from recipes.common.language import DECODER, Training
from recipes.common.runtime import Run
from recipes.common.runtime.start import start
from recipes.common.tasks import seeing
from zoo.gemma3_vision import SIZES, Config

# The flags of the model: a Config's fields that are set most often. --set reaches the others.
MODEL = language.model_flags(Config, DECODER, SIZES, Config.REMAT)
NEW = (
    Run(steps=600, batch_size=64, learning_rate=2e-3),
    seeing.PicturedRows(),
    MODEL,
    Training(),
)

# The run, from the mesh to answers about held-out pictures: recipes/common/tasks/seeing.py.
main = functools.partial(seeing.main, "gemma3_vision")
defaults = functools.partial(language.fine_tuning, "gemma3_vision", NEW)

if __name__ == "__main__":
    start(main, *NEW, defaults=defaults)
