"""Flags of preference tuning: its pairs and its reference."""

import dataclasses

from data import pairs
from data.batches import Dataset
from data.tokenizer import Tokenizer
from recipes.common.runtime import flag

IN_STEP, ON_HOST, STORED = "copy", "host", "stored"


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Flags of the pairs."""

    dataset: str = flag(
        "stdlib", "Pairs: stdlib, a file, folder or pattern of .jsonl or .parquet files, or hf:NAME, with "
        "prompt, chosen and rejected as texts or messages. For kto also prompt, completion and label.", "data",
    )  # fmt: skip
    eval_dataset: str = flag(
        "", "Pairs to hold out, as --dataset takes them; empty: a part of --dataset.", "data"
    )
    tokenizer: str = flag(
        "", "Tokenizer, if the model has none of its own: bytes, a tokenizer.json, ORG/NAME.",
        "data", may_change=True,
    )  # fmt: skip
    seq_len: int = flag(128, "Tokens of a prompt with an answer.", "data", at_least=2)

    as_chat: bool = flag(
        False, "Give prompts and answers that are texts to the model as messages, in its chat template.",
        "data",
    )  # fmt: skip

    def load(self, tokenizer: Tokenizer, labelled: bool = False) -> Dataset:
        """Loads the pairs, or labelled answers. Raises DataError if they can't be found or read."""
        return pairs.load(
            self.dataset, self.seq_len, tokenizer, self.eval_dataset, self.as_chat, labelled
        )


@dataclasses.dataclass(frozen=True)
class Reference:
    """Flags of the reference."""

    reference: str = flag(
        "", "The starting checkpoint as the reference: a frozen copy, one in the host's memory, or stored "
        "log-probabilities, computed once; empty: the model without its adapter, or a copy if it has none.",
        "optimizer", choices=["", IN_STEP, ON_HOST, STORED],
    )  # fmt: skip
    reference_rules: str = flag(
        "", "Sharding rules of a copy; empty: the model's.", "optimizer", may_change=True
    )
    reference_dtype: str = flag(
        "", "Type of a copy's weights and activations; empty: the model's.", "optimizer",
        choices=["", "float32", "bfloat16"],
    )  # fmt: skip
