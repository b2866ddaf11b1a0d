"""Trains a text encoder to fill masked tokens in, sharded over any mesh.

    python -m recipes.bert --mesh=4x2                     # a laptop: 8 simulated devices
    python -m recipes.bert --mesh=4x2 --size=bert_base --tokenizer=DIR --dataset=texts.jsonl

Running the same command again resumes. The default model has ModernBERT's form.
"""

import dataclasses
import functools

from data import masked
from data.batches import Dataset
from data.tokenizer import Tokenizer
from recipes.common import language
from recipes.common.language import DECODER, Text, Training
from recipes.common.runtime import Run, flag
from recipes.common.runtime.start import start
from recipes.common.sharding import Tree
from zoo.bert import SIZES, Config


@dataclasses.dataclass(frozen=True)
class MaskedText(Text):
    """Flags of the text, and of the tokens to fill in."""

    mask_rate: float = flag(
        0.15, "Share of the tokens to fill in.", "data", at_least=0.0, at_most=1.0
    )

    def load(self, tokenizer: Tokenizer, seed: int) -> Dataset:
        return masked.load(
            self.dataset, self.text_column, self.seq_len, tokenizer, self.pack, self.eval_dataset,
            self.mask_rate, seed,
        )  # fmt: skip


def count_right(model, batch: Tree) -> Tree:
    """An extra sum for an evaluation: masked tokens that are the likeliest ones."""
    wanted_BT = batch["targets"]
    guess_BT = model(batch["tokens"], batch.get("segment_ids")).argmax(axis=-1)
    right = (guess_BT == wanted_BT).sum()  # padding has the target -1
    return {"accuracy": (right, (wanted_BT >= 0).sum())}


# The flags of the model: a Config's fields that are set most often. --set reaches the others.
MODEL = language.model_flags(Config, DECODER, SIZES, Config.REMAT)
NEW = (Run(steps=600, batch_size=16, learning_rate=4e-3), MaskedText(), MODEL, Training())

# The run, from the mesh to the evaluation: recipes/common/language/recipe.py.
main = functools.partial(language.main, "bert", extra=count_right)
defaults = functools.partial(language.fine_tuning, "bert", NEW)

if __name__ == "__main__":
    start(main, *NEW, defaults=defaults)
