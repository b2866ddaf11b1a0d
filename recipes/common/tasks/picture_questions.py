"""A few held-out questions about pictures, and a model's answers, at the end of a run."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from data.batches import Dataset
from data.tokenizer import Tokenizer
from recipes.common.generation.generator import Generator, Sampling, cap_windows
from recipes.common.runtime import print0
from recipes.common.sharding import Layout, Tree, make_layout
from recipes.common.train.beside import beside

LONGEST = 64  # most tokens of an answer
WIDEST = 16  # width in pixels up to which a picture is drawn
SHADES = " .:-=+*#%@"  # from dark to light


@dataclasses.dataclass(frozen=True)
class Question:
    """A held-out row."""

    tokens: np.ndarray  # up to its first answer, pictures included
    images: np.ndarray  # uint8 [pictures, W, W, C]
    answer: np.ndarray  # the tokens of its first answer


class Questions:
    """Asks a model a few held-out questions. Stages of layers can't answer."""

    def __init__(
        self, model: type, layout: Layout, tokenizer: Tokenizer, data: Dataset, count: int
    ):
        """Compiles nothing yet.

        Args:
          layout: the training's.
          data: of data/pictured.py.
          count: of questions; 0: none.
        """
        self._model, self._training, self._tokenizer = model, layout, tokenizer
        places = np.linspace(0, len(data.held_out) - 1, count).astype(int)
        rows = [data.held_out[i] for i in dict.fromkeys(places.tolist())]
        self._questions = [question(row, layout.config) for row in rows]
        self._generator: Callable[[], Generator] | None = None

    def begin(self) -> None:
        """Begins to compile the programs, beside the main thread."""
        if self._questions and self._training.stages == 1:
            self._generator = beside(self._training.mesh, self._compile)

    def show(self, state: Tree) -> None:
        """Prints the questions and the likeliest answers."""
        if not self._questions:
            return
        if self._generator is None:
            print0(f"No answers to show: {self._training.stages} stages of layers can't generate.")
            return
        generator = self._generator().with_variables(state)
        steps = list(generator(self._prompts, self._most, images=self._images))
        print0("Held-out questions and the model's answers:")
        for question, tokens in zip(self._questions, np.stack(steps, axis=1), strict=True):
            print0(*lines(question, tokens, generator.end, self._tokenizer, self._training.config))

    @property
    def _prompts(self) -> list[np.ndarray]:
        return [question.tokens for question in self._questions]

    @property
    def _images(self) -> list[np.ndarray]:
        return [question.images for question in self._questions]

    @property
    def _most(self) -> int:
        return min(LONGEST, max(len(question.answer) for question in self._questions))

    def _compile(self) -> Generator:
        training, tokenizer = self._training, self._tokenizer
        config = cap_windows(training.config, training.seq_len)
        layout = make_layout(self._model, config, training.mesh, training.rules)
        end, vocabulary = tokenizer.end, tokenizer.vocabulary
        generator = Generator(layout, training.variables(), Sampling(), end, vocabulary)
        generator.compile([len(tokens) for tokens in self._prompts], self._most, self._images)
        return generator


def question(row: dict[str, np.ndarray], config: Any) -> Question:
    """The question of an example of data/pictured.py: what is before its first answer."""
    is_target = row["targets"] >= 0
    first = int(np.flatnonzero(is_target)[0])
    length = int(np.argmin(np.append(is_target[first:], False)))
    tokens = row["tokens"][: first + 1]
    pictures = int((tokens == config.image_token).sum()) // config.picture_tokens
    return Question(tokens, row["images"][:pictures], row["targets"][first : first + length])


def lines(
    question: Question, tokens: np.ndarray, end: np.ndarray, tokenizer: Tokenizer, config: Any
) -> list[str]:
    """Lines about one question: its pictures if they are small, its text, and the answer."""
    around = [config.picture_begin, config.image_token, config.picture_end]
    text = tokenizer.decode(question.tokens[~np.isin(question.tokens, around)]).strip()
    answer, wanted = (
        tokenizer.decode(x[(x >= 0) & ~np.isin(x, end)]).strip() for x in (tokens, question.answer)
    )
    verdict = "right" if answer == wanted else f"expected {wanted}"
    return [*drawn(question.images), f"  {text} {answer} ({verdict})"]


def drawn(images_MWWC: np.ndarray) -> list[str]:
    """Small pictures side by side, a character or two for each pixel."""
    if not len(images_MWWC) or images_MWWC.shape[2] > WIDEST:
        return []
    grey_MWW = images_MWWC.mean(axis=-1) / 256
    rows = np.concatenate(list(grey_MWW), axis=1) if len(grey_MWW) == 1 else _beside(grey_MWW)
    shades = np.array([*SHADES])[(rows * len(SHADES)).astype(int)]
    return ["  " + "".join(shade * 2 for shade in row).rstrip() for row in shades]


def _beside(grey_MWW: np.ndarray) -> np.ndarray:
    gap = np.zeros((grey_MWW.shape[1], 1))
    parts = [part for grey_WW in grey_MWW for part in (grey_WW, gap)]
    return np.concatenate(parts[:-1], axis=1)
