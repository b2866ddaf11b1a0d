"""A sample of a language model's writing at the end of a run."""

import dataclasses
import json
import pathlib
from collections.abc import Callable

import numpy as np
from flax import nnx

from data.batches import Dataset
from data.tokenizer import Tokenizer
from recipes.common.checkpoint import RunFolder
from recipes.common.generation.generator import Generator, Sampling, cap_windows
from recipes.common.runtime import UserError, flag, print0, quote, warn
from recipes.common.runtime.flags import refuse_unused
from recipes.common.runtime.processes import is_first
from recipes.common.sharding import Layout, Tree, make_layout
from recipes.common.sharding.move import move
from recipes.common.storage import folders
from recipes.common.train.beside import beside


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

    def check(self, model: type[nnx.Module], layout: Layout, tokenizer: Tokenizer) -> None:
        """Raises UserError if --chat needs a template, --sample_rules can't generate, or there is no sample."""
        if not self.sample_bytes:
            use = "the sample, and --sample_bytes=0 asks for none"
            refuse_unused(self, ("prompt", "chat", "temperature", "sample_rules"), use)
        self.begin(tokenizer)
        if self.sample_rules:
            self.layout(model, layout, layout.seq_len)

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

    def writer(
        self,
        model: type[nnx.Module],
        layout: Layout,
        tokenizer: Tokenizer,
        data: Dataset,
        *,
        seed: int,
    ) -> "Writer":
        """What shows a sample at the end of a run.

        Args:
          layout: the training's.
          data: the run's. Without --prompt, a model that has learned answers is asked its first
            held-out prompt.
        """
        return Writer(self, model, layout, tokenizer, data, seed)

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
class Plan:
    """What a sample is written with: programs, compiled, and a prompt."""

    layout: Layout
    generator: Generator  # of abstract variables
    prompt: np.ndarray
    most: int  # tokens
    answers: bool  # whether the prompt is a held-out one


class Writer:
    """Writes a sample: continues the prompt, or answers a held-out one."""

    def __init__(
        self,
        flags: Sample,
        model: type[nnx.Module],
        layout: Layout,
        tokenizer: Tokenizer,
        data: Dataset,
        seed: int,
    ):
        self._flags, self._model, self._training = flags, model, layout
        self._tokenizer, self._data, self._seed = tokenizer, data, seed
        self._plan: Callable[[], Plan] | None = None

    def begin(self) -> None:
        """Begins to compile the sample's programs, beside the main thread."""
        stages = self._training.stages > 1 and not self._flags.sample_rules
        if self._flags.sample_bytes and not stages:
            self._plan = beside(self._training.mesh, self._make_plan)

    def show(self, state: Tree, folder: RunFolder) -> None:
        """Prints a sample, and saves it in the run's folder, if --sample_bytes asks for one."""
        if not self._flags.sample_bytes:
            return
        if self._plan is None:
            print0(
                f"No sample: {self._training.stages} stages of layers can't generate; "
                "--sample_rules=fsdp, for example, can."
            )
            return
        written = self._write(self._plan(), state)
        print0(*written.lines)
        if folder.in_use and folder.last_good():
            self._flags.save(folder.path / "sample.json", state, written)

    def _make_plan(self) -> Plan:
        flags, training, tokenizer = self._flags, self._training, self._tokenizer
        target = flags.layout(self._model, training, training.seq_len)
        variables = (target if flags.sample_rules else training).variables()
        sampling = Sampling(flags.temperature, seed=self._seed)
        generator = Generator(target, variables, sampling, tokenizer.end, tokenizer.vocabulary)
        answers = self._data.has_answers and not flags.prompt
        prompt = first_prompt(self._data) if answers else flags.begin(tokenizer)
        most = flags.sample_bytes
        if answers and training.shape.max_positions:
            most = max(1, min(most, training.shape.max_positions - len(prompt)))
        generator.compile([len(prompt)], most)
        return Plan(target, generator, prompt, most, answers)

    def _write(self, plan: Plan, state: Tree) -> "Written":
        tokenizer = self._tokenizer
        moves = self._flags.sample_rules
        variables = move(state, self._training, plan.layout) if moves else state
        generator = plan.generator.with_variables(variables)
        tokens = [int(token) for (token,) in generator([plan.prompt], plan.most)]
        ended = tokens[-1] in tokenizer.end
        if plan.answers:
            answer = tokenizer.decode(tokens, after=plan.prompt)
            return Written(answer, ended, tokenizer.decode(plan.prompt))
        begin = [] if self._flags.chat else plan.prompt  # a chat shows only the answer
        return Written(tokenizer.decode([*begin, *tokens]), ended)


@dataclasses.dataclass(frozen=True)
class Written:
    """A sample of a model's writing."""

    text: str
    ended: bool  # by the model
    asked: str = ""  # the held-out prompt that it answers

    @property
    def lines(self) -> list[str]:
        """Lines to print."""
        if self.asked:
            end = ", ended by the model" * self.ended
            return [
                "Sample: a held-out prompt,", *quote(self.asked), f"and its answer{end}:", *quote(self.text)
            ]  # fmt: skip
        return ["Sample, ended by the model:" if self.ended else "Sample:", *quote(self.text)]


def first_prompt(data: Dataset) -> np.ndarray:
    """The tokens of the first held-out row up to its first answer, as training shows them."""
    row = data.held_out[0]
    first = int(np.flatnonzero(row["targets"] >= 0)[0])
    begin = int(np.flatnonzero(row["segment_ids"] == row["segment_ids"][first])[0])
    return row["tokens"][begin : first + 1]
