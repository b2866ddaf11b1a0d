"""What recipes of language models share: flags of the text and of the sample, and what they mean."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from flax import nnx

from data import text as texts
from data.batches import Dataset
from data.tokenizer import START, Tokenizer
from recipes.common import checkpoint
from recipes.common.checkpoint import Source, flags_of
from recipes.common.generation import Generator, Sampling, cap_windows
from recipes.common.runtime import Run, flag, quote
from recipes.common.sharding import Layout, Tree, make_layout
from zoo.attention import attention_kernels


@dataclasses.dataclass(frozen=True)
class Text:
    """Flags of the text that a model is trained and evaluated on."""

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

    def load(self, tokenizer: Tokenizer) -> Dataset:
        """The text as examples. Raises DataError if it is not here."""
        where = (self.dataset, self.text_column, self.seq_len)
        return texts.load(*where, tokenizer, self.pack, self.eval_dataset)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Flags of the text that a model writes at the end of a run."""

    prompt: str = flag("", "Start of the sample at the end.", may_change=True)
    chat: bool = flag(
        False, "Give --prompt to the model as a user's message, by its chat template.",
        may_change=True,
    )  # fmt: skip
    sample_bytes: int = flag(
        400, "Length of the sample, in bytes, or in tokens of another tokenizer; 0: none.",
        at_least=0, may_change=True,
    )  # fmt: skip
    temperature: float = flag(
        0.8, "Temperature of the sample; 0 takes the likeliest token.", at_least=0.0,
        may_change=True,
    )  # fmt: skip

    def begin(self, tokenizer: Tokenizer) -> np.ndarray:
        """What the sample starts with: --prompt as a document's beginning, or as a user's message."""
        if self.chat:
            return tokenizer.ask([{"role": "user", "content": self.prompt}])
        return tokenizer.prompt(self.prompt)

    def write(
        self,
        model: type[nnx.Module],
        layout: Layout,
        state: Tree,
        tokenizer: Tokenizer,
        prompt: np.ndarray,
        text: Text,
        seed: int,
    ) -> list[str]:
        """Lines that show what the model writes after the prompt, and whether it ended it itself.

        A position attends to the last `text.seq_len` tokens, as many as it has seen in training.
        """
        config = cap_windows(layout.config, text.seq_len)
        layout = make_layout(model, config, layout.mesh, layout.table)
        vocabulary = tokenizer.size if tokenizer.files else START  # bytes write no other start
        chosen = Sampling(self.temperature, seed=seed)
        generator = Generator(layout, state, chosen, tokenizer.end, vocabulary)
        written = [int(token) for (token,) in generator([prompt], self.sample_bytes)]
        begin = [] if self.chat else prompt  # of a conversation, the answer alone
        shown = quote(tokenizer.decode([*begin, *written]))
        return [
            "Sample, ended by the model:" if written[-1] in tokenizer.end else "Sample:",
            *shown,
        ]


def architecture(
    sizes: dict[str, Callable[[], Any]], size: str, start: Source | None, tokenizer: Tokenizer
) -> Any:
    """The model's Config: of this size, or that of the checkpoint. Raises UserError.

    Args:
      sizes: the zoo file's.
      size: --size; empty: the checkpoint's, or small.
      start: what the run begins from, if anything.
    """
    if start and not size:
        config = checkpoint.config_of(start)
    else:
        config = sizes[size or "small"]()
        if tokenizer.files:  # bytes take the size's own vocabulary
            config = dataclasses.replace(config, vocab_size=tokenizer.size)
    return config


def default_dtype(platform: str) -> str:
    """Of activations and matmuls."""
    return "float32" if platform == "cpu" else "bfloat16"


def attention(layout: Layout, seq_len: int, segments: bool) -> list[str]:
    """A line for the report on the kernel that the mesh's devices take; none for CPU's only one."""
    with layout.trace():
        found = attention_kernels(layout.config, seq_len, segments)
    described = " and ".join(dict.fromkeys(text for _, text in found))
    return [] if described == "xla" else [f"attention: {described}"]


def fine_tuning(entry: str, groups: Sequence[Any], run: Run, learning_rate: float) -> list[Any]:
    """A recipe's flags with the defaults of this command line, if it begins on given parameters.

    Args:
      groups: the flags with the defaults of a new model's run.
      run: as the command line has them.
      learning_rate: a new model's would undo what given parameters have learned.
    """
    before = flags_of(entry, run.workdir)
    if not run.steps or not (run.restore_from or before.get("restore_from")):
        return list(groups)
    usual = next(group.warmup_steps for group in groups if hasattr(group, "warmup_steps"))
    # One step of warmup would be a step at a rate of 0.
    warmup = min(usual, run.steps // 10) if run.steps >= 20 else 0
    # A run that resumes keeps its own, whatever --steps is now.
    other = {"learning_rate": learning_rate, "warmup_steps": warmup}
    other = {name: before.get(name, value) for name, value in other.items()}

    def changed(group: Any) -> Any:
        here = {name: value for name, value in other.items() if hasattr(group, name)}
        return dataclasses.replace(group, **here)

    return [changed(group) for group in groups]
