"""A teacher network's answers to random questions: data to learn a DotReluDot from.

y = relu(x · W1) · W2 with fixed random weights. Example i is a pure function of (seed, i), made when
it is asked for: nothing is stored, and any process can make any part.
"""

import hashlib
from collections.abc import Iterator

import grain
import numpy as np

from data import batches

TRAIN, HELD_OUT = 1_000_000, 4_096  # examples


class Teacher(grain.sources.RandomAccessDataSource):
    """`length` examples {"x": [D], "y": [D], "weight": 1}, float32; `part` makes others of them."""

    def __init__(self, embed: int, hidden: int, seed: int, part: int, length: int):
        rng = np.random.default_rng([seed, 0])
        self._w1_DF = rng.normal(0, embed**-0.5, (embed, hidden)).astype(np.float32)
        self._w2_FD = rng.normal(0, hidden**-0.5, (hidden, embed)).astype(np.float32)
        self._key, self._length = np.array([seed, part], np.uint64), length

    def __len__(self):
        return self._length

    def __getitem__(self, i):
        # One example at a time: a product of matrices rounds otherwise in batches of other sizes.
        rng = np.random.Generator(np.random.Philox(key=self._key, counter=[0, 0, 0, int(i)]))
        x_D = rng.standard_normal(len(self._w1_DF), np.float32)
        y_D = np.maximum(x_D @ self._w1_DF, 0) @ self._w2_FD
        return {"x": x_D, "y": y_D, "weight": np.float32(1)}

    def fingerprint(self) -> str:
        """sha256 of the weights and the first example."""
        parts = (self._w1_DF, self._w2_FD, self[0]["x"], self[0]["y"])
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


def train(embed: int, hidden: int, seed: int) -> Teacher:
    return Teacher(embed, hidden, seed, 0, TRAIN)


def held_out(embed: int, hidden: int, seed: int) -> Teacher:
    """Questions that `train` never asks, of the same teacher."""
    return Teacher(embed, hidden, seed, 1, HELD_OUT)


def held_out_batches(
    teacher: Teacher, batch_size: int, shard: grain.sharding.ShardOptions | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Every example once; those that fill up the last batch have weight 0."""
    filler = {name: np.zeros_like(value) for name, value in teacher[0].items()}
    return batches.held_out_batches(teacher, batch_size, filler, shard)
