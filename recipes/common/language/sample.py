"""A sample of a language model's writing at the end of a run."""

import dataclasses
import json
import pathlib

import numpy as np
from flax import nnx

from data.tokenizer import Tokenizer
from recipes.common.generation import Generator, Sampling, cap_windows
from recipes.common.runtime import UserError, flag, quote, warn
from recipes.common.runtime.processes import is_first
from recipes.common.sharding import Layout, Tree, make_layout
from recipes.common.sharding.move import move
from recipes.common.storage import folders

ASKED = 400  # characters of a held-out prompt that are printed, its last ones


def prompt_of_row(row: dict[str, np.ndarray]) -> np.ndarray | None:
    """The tokens of a row before the first that is learned; None if it learns from the start.

    Rows of chats learn only answers.
    """
    learned = np.flatnonzero(row["targets"] >= 0)
    if not len(learned) or not learned[0]:
        return None
    return np.asarray(row["tokens"][: learned[0] + 1], np.int32)


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

    sample_rules: str = flag(
        "", "Sharding rules to write the sample with, on the same mesh; empty: those of training.",
        may_change=True,
    )  # fmt: skip

    def begin(self, tokenizer: Tokenizer) -> np.ndarray:
        """Tokens of --prompt: the beginning of a document, or a user's message."""
        if self.chat:
            return tokenizer.ask([{"role": "user", "content": self.prompt}])
        return tokenizer.prompt(self.prompt)

    def layout(self, model: type[nnx.Module], training: Layout, context: int) -> Layout:
        """The layout to write with, see `write`. Raises UserError if --sample_rules can't."""
        config = cap_windows(training.config, context)
        try:
            layout = make_layout(model, config, training.mesh, self.sample_rules or training.rules)
        except UserError as error:  # the run's own rules were found to fit
            raise UserError(str(error).replace("--rules", "--sample_rules")) from None
        if self.sample_rules and layout.stages > 1:
            raise UserError(
                f"--sample_rules={self.sample_rules} has {layout.stages} stages of layers, which can't "
                "generate; use --sample_rules=fsdp, for example"
            )
        return layout

    def write(
        self,
        model: type[nnx.Module],
        layout: Layout,
        state: Tree,
        tokenizer: Tokenizer,
        *,
        context: int,
        seed: int,
        held_out: np.ndarray | None = None,
    ) -> "Written":
        """Continues the prompt.

        Args:
          held_out: tokens of a held-out row to answer if there is no prompt; None: there is none.
          context: tokens that a position attends to, as in training.
        """
        target = self.layout(model, layout, context)
        variables = move(state, layout, target) if self.sample_rules else state
        sampling = Sampling(self.temperature, seed=seed)
        generator = Generator(target, variables, sampling, tokenizer.end, tokenizer.vocabulary)
        own = self.begin(tokenizer)
        prompt = own if held_out is None or self.prompt or self.chat else held_out
        asks = prompt is not own
        tokens = [int(token) for (token,) in generator([prompt], self.sample_bytes)]
        begin = [] if self.chat or asks else prompt  # a chat shows only the answer
        text = tokenizer.decode([*begin, *tokens])
        asked = tokenizer.decode(prompt) if asks else ""
        return Written(text, tokens[-1] in tokenizer.end, asked)

    def save(self, path: pathlib.Path, state: Tree, written: "Written") -> None:
        """Writes a sample to a file, for the model's card; I/O errors become warnings."""
        if not is_first():
            return
        facts = {"step": int(state["step"]), "prompt": self.prompt or written.asked}
        facts |= {"temperature": self.temperature, "text": written.text}
        try:
            folders.write(path, (json.dumps(facts, indent=1) + "\n").encode())
        except folders.errors() as error:
            warn(f"{path} could not be written ({folders.reason(error)})")


@dataclasses.dataclass(frozen=True)
class Written:
    """A sample of a model's writing."""

    text: str
    ended: bool  # by the model
    asked: str = ""  # a held-out row's prompt, in place of one of the user's

    @property
    def lines(self) -> list[str]:
        """Lines to print."""
        asked = ["Asked, of what is held out:", *quote(self.asked[-ASKED:])] if self.asked else []
        title = "Sample, ended by the model:" if self.ended else "Sample:"
        return [*asked, title, *quote(self.text)]
