"""Rows of prompts with their answers for training: a row for each answer, or several packed into one.

Shapes: B answers, R rows, T positions of a row, N new tokens, W bytes of a bit for each token of the vocabulary,
L layers with experts, J experts per position.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from data.packing import best_fit
from recipes.common.generation.generator import least_multiple
from recipes.common.generation.rollouts import Answers
from recipes.common.sharding import Tree

PARTS = 8  # of the largest batch: a packed one has a multiple of such a part, so that few sizes are compiled


@dataclasses.dataclass(frozen=True)
class Packing:
    """Packs the answers of an update into rows: a function of their lengths alone.

    The prompt of each answer is packed with it, and attention stays inside of them.
    """

    length: int  # T
    longest: int  # positions of a prompt with its answer, at most
    answers: int  # B, of an update
    divisor: int = 1  # of R, which mesh and --accumulate ask for

    @property
    def most_rows(self) -> int:
        """Rows that are enough for any lengths."""
        return least_multiple(-(-self.answers // (self.length // self.longest)), self.divisor)

    @property
    def most_answers(self) -> int:
        """Answers of a row, at most."""
        return min(self.answers, self.length)

    def rows(self, needed: int) -> int:
        """R, at least `needed`: one of PARTS numbers."""
        part = least_multiple(-(-self.most_rows // PARTS), self.divisor)
        return min(least_multiple(max(needed, 1), part), self.most_rows)

    def __call__(self, rows: Tree, sizes_B: np.ndarray) -> Tree:
        """Packs rows of one answer each, [B, …], into [R, T, …], with segment ids.

        Answers without targets are left out.

        Args:
          rows: tokens, targets and others by position; the advantage of each answer, [B].
          sizes_B: positions of each prompt with its answer, at the beginning of its row.
        """
        picked_P = np.flatnonzero((rows["targets"] >= 0).any(axis=1))
        row_of_P = best_fit(sizes_B[picked_P], self.length)
        R = self.rows(int(row_of_P.max(initial=0)) + 1)
        packed = {
            name: np.full((R, self.length, *x.shape[2:]), padding_of(name, x), x.dtype)
            for name, x in rows.items()
        }
        segments_RT = packed["segment_ids"] = np.zeros((R, self.length), np.int32)
        filled_R, answers_R = np.zeros((2, R), int)
        for b, row in zip(picked_P, row_of_P, strict=True):
            size = sizes_B[b]
            place = slice(filled_R[row], filled_R[row] + size)
            filled_R[row] += size
            answers_R[row] += 1
            segments_RT[row, place] = answers_R[row]
            for name, x in rows.items():
                packed[name][row, place] = x[b, :size] if x.ndim > 1 else x[b]
        return packed


def answer_rows(
    prompts: Sequence[np.ndarray], answers: Answers, length: int
) -> tuple[Tree, np.ndarray]:
    """A row of `length` positions for each answer, after its prompt, and the positions that both take."""
    B, T = len(prompts), length
    of_tokens = {
        "targets": answers.tokens_BN,
        "sampler_log_probs": answers.log_probs_BN.astype(np.float32),
        "kept": answers.kept_BNW,
        "experts": answers.experts_BNLJ,
    }
    of_tokens = {name: x for name, x in of_tokens.items() if x is not None}
    rows = {
        name: np.full((B, T, *x.shape[2:]), padding_of(name, x), x.dtype)
        for name, x in of_tokens.items()
    }
    rows["tokens"] = np.zeros((B, T), np.int32)
    sizes_B = np.zeros(B, int)
    for b, prompt in enumerate(prompts):
        written = answers.tokens_BN[b][answers.tokens_BN[b] >= 0]
        both = np.concatenate([prompt, written])
        sizes_B[b] = len(both) - 1  # the last token is only a target
        first = len(prompt) - 1  # the position that predicts the answer's first token
        place = slice(first, first + len(written))
        rows["tokens"][b, : len(both) - 1] = both[:-1]
        for name, x in of_tokens.items():
            rows[name][b, place] = x[b, : len(written)]
        if answers.experts_BTLJ is not None:
            read = answers.experts_BTLJ[b]
            rows["experts"][b, :first] = read[len(read) - len(prompt) : -1]
    return rows, sizes_B


def padding_of(name: str, x: np.ndarray) -> int | np.ndarray:
    """What an array of rows has where there is no token; padding has distinct experts, as all positions."""
    if name == "experts":
        return np.arange(x.shape[-1])
    return -1 if name == "targets" else 0
