"""A few held-out questions about pictures, and a model's answers, at the end of a run."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from data.batches import Dataset
from data.squares import joined
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
    pictures: dict[str, np.ndarray]  # as in a batch, [pictures, ...]
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
        steps = list(generator(self._prompts, self._most, pictures=self._pictures))
        print0("Held-out questions and the model's answers:")
        for question, tokens in zip(self._questions, np.stack(steps, axis=1), strict=True):
            print0(*lines(question, tokens, generator.end, self._tokenizer, self._training.config))

    @property
    def _prompts(self) -> list[np.ndarray]:
        return [question.tokens for question in self._questions]

    @property
    def _pictures(self) -> list[dict[str, np.ndarray]]:
        return [question.pictures for question in self._questions]

    @property
    def _most(self) -> int:
        return min(LONGEST, max(len(question.answer) for question in self._questions))

    def _compile(self) -> Generator:
        training, tokenizer = self._training, self._tokenizer
        config = cap_windows(training.config, training.seq_len)
        layout = make_layout(self._model, config, training.mesh, training.rules)
        end, vocabulary = tokenizer.end, tokenizer.vocabulary
        generator = Generator(layout, training.variables(), Sampling(), end, vocabulary)
        generator.compile([len(tokens) for tokens in self._prompts], self._most, self._pictures)
        return generator


def question(row: dict[str, np.ndarray], config: Any) -> Question:
    """The question of an example of data/pictured.py: what is before its first answer."""
    is_target = row["targets"] >= 0
    first = int(np.flatnonzero(is_target)[0])
    length = int(np.argmin(np.append(is_target[first:], False)))
    tokens = row["tokens"][: first + 1]
    count = int((tokens == config.picture_begin).sum())
    pictures = {name: row[name][:count] for name in ("images", "grids") if name in row}
    return Question(tokens, pictures, row["targets"][first : first + length])


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
    return [*drawn(pixels_of(question.pictures)), f"  {text} {answer} ({verdict})"]


def pixels_of(pictures: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The pixels of pictures, each [height, width, C]."""
    images = list(pictures["images"])
    if "grids" not in pictures:
        return images
    return [joined(*picture) for picture in zip(images, pictures["grids"], strict=True)]


def drawn(pictures: list[np.ndarray]) -> list[str]:
    """Small pictures side by side, a character or two for each pixel."""
    if not pictures or max(max(pixels.shape) for pixels in pictures) > WIDEST:
        return []
    grey = [pixels.mean(axis=-1) / 256 for pixels in pictures]
    rows = grey[0] if len(grey) == 1 else _beside(grey)
    shades = np.array([*SHADES])[(rows * len(SHADES)).astype(int)]
    return ["  " + "".join(shade * 2 for shade in row).rstrip() for row in shades]


def _beside(pictures: list[np.ndarray]) -> np.ndarray:
    """Joins pictures [height, width], the lower ones with empty rows below."""
    most = max(map(len, pictures))
    filled = [np.pad(grey, ((0, most - len(grey)), (0, 0))) for grey in pictures]
    parts = [part for grey in filled for part in (grey, np.zeros((most, 1)))]
    return np.concatenate(parts[:-1], axis=1)
