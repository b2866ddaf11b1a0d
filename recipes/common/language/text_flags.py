"""Flags of every language model: its text and its training."""

import dataclasses

from data import sources
from data import text as texts
from data.batches import Dataset
from data.tokenizer import Tokenizer
from recipes.common.runtime import flag
from recipes.common.train import training_flags


@dataclasses.dataclass(frozen=True)
class Text:
    """Flags of the training and evaluation text."""

    dataset: str = flag(
        "stdlib", "Training text: stdlib, a file, folder or pattern of .txt, .jsonl or .parquet "
        "files, or hf:NAME; several with their shares: a.jsonl@0.7,b.parquet@0.3. Rows of messages, "
        "or of prompt and completion, are trained on what the assistant says.", "data",
    )  # fmt: skip
    eval_dataset: str = flag(
        "", "Text to hold out, as --dataset takes it; empty: a part of --dataset.", "data"
    )
    text_column: str = flag(
        "text", "Column of .jsonl, .parquet and hf: datasets that has the text.", "data"
    )
    tokenizer: str = flag(
        "", "Tokenizer: bytes, a tokenizer.json or a folder with one, or ORG/NAME on the Hub; empty: "
        "the checkpoint's, or bytes.", "data", may_change=True,
    )  # fmt: skip
    pack: str = flag(
        "", "Rows of whole documents in place of windows that cut them; empty: with a tokenizer "
        "other than bytes.", "data", choices=["", "true", "false"],
    )  # fmt: skip
    seq_len: int = flag(128, "Tokens of context.", "data", at_least=1)

    def load(self, tokenizer: Tokenizer, seed: int) -> Dataset:
        """Loads the text as examples. Raises DataError if it can't be found or read.

        Args:
          seed: of the run, for examples that are drawn at random.
        """
        sources.check_column(self.text_column, self.dataset, self.eval_dataset)
        return texts.load(
            self.dataset, self.text_column, self.seq_len, tokenizer, self.pack, self.eval_dataset
        )


@dataclasses.dataclass(frozen=True)
class Training(training_flags.Training):
    """Flags of the optimizer and the train step."""

    warmup_steps: int = flag(
        40, "Steps in which the learning rate rises to its peak. With --restore_from it defaults to at "
        "most a tenth of --steps, and --learning_rate to 5e-5, or 5e-4 with LoRA.", "optimizer",
        at_least=0,
    )  # fmt: skip
