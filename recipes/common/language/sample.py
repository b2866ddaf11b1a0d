"""A sample of a language model's writing at the end of a run."""

import dataclasses
import json
import pathlib

import numpy as np
from flax import nnx

from data.tokenizer import START, Tokenizer
from recipes.common.generation import Generator, Sampling, cap_windows
from recipes.common.language.flags import Text
from recipes.common.runtime import flag, quote, warn
from recipes.common.runtime.processes import is_first
from recipes.common.sharding import Layout, Tree, make_layout
from recipes.common.storage import folders


@dataclasses.dataclass(frozen=True)
class Sample:
    """Flags of the sample."""

    prompt: str = flag("", "Start of the sample at the end.", may_change=True)
    chat: bool = flag(
        False, "Give --prompt to the model as a user's message in its chat template.",
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
        """Tokens of --prompt: the beginning of a document, or a user's message."""
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
        path: pathlib.Path | None = None,
    ) -> list[str]:
        """Returns lines to print: the text after the prompt, and whether the model ended it.

        A position attends to the last `text.seq_len` tokens, the context of training.

        Args:
          path: file for the sample, for the model's card; None: none.
        """
        config = cap_windows(layout.config, text.seq_len)
        layout = make_layout(model, config, layout.mesh, layout.rules)
        vocabulary = tokenizer.size if tokenizer.files else START  # in bytes, no START
        chosen = Sampling(self.temperature, seed=seed)
        generator = Generator(layout, state, chosen, tokenizer.end, vocabulary)
        written = [int(token) for (token,) in generator([prompt], self.sample_bytes)]
        begin = [] if self.chat else prompt  # a chat shows only the answer
        sample = tokenizer.decode([*begin, *written])
        if path and is_first():
            facts = {"step": int(state["step"]), "prompt": self.prompt}
            facts |= {"temperature": self.temperature, "text": sample}
            try:
                folders.write(path, (json.dumps(facts, indent=1) + "\n").encode())
            except folders.errors() as error:
                warn(f"{path} could not be written ({folders.reason(error)})")
        shown = quote(sample)
        return [
            "Sample, ended by the model:" if written[-1] in tokenizer.end else "Sample:",
            *shown,
        ]
