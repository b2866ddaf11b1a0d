"""Training data for DotReluDot: a teacher network's answers to random questions.

y = relu(x · W1) · W2 with fixed random weights. Example i is a pure function of (seed, i), computed
on demand: nothing is stored, and every process can make every example.
"""

import hashlib

import grain
import numpy as np

from data.batches import Dataset

TRAIN, HELD_OUT = 1_000_000, 4_096  # examples


class Teacher(grain.sources.RandomAccessDataSource):
    """Examples {"x": [D], "y": [D], "weight": 1}, float32; each `part` has different ones."""

    def __init__(self, embed: int, hidden: int, seed: int, part: int, length: int):
        rng = np.random.default_rng([seed, 0])
        self._w1_DF = rng.normal(0, embed**-0.5, (embed, hidden)).astype(np.float32)
        self._w2_FD = rng.normal(0, hidden**-0.5, (hidden, embed)).astype(np.float32)
        self._key, self._length = np.array([seed, part], np.uint64), length

    def __len__(self):
        return self._length

    def __getitem__(self, i):
        # One example at a time: matmuls of different batch sizes round differently.
        rng = np.random.Generator(np.random.Philox(key=self._key, counter=[0, 0, 0, int(i)]))
        x_D = rng.standard_normal(len(self._w1_DF), np.float32)
        y_D = np.maximum(x_D @ self._w1_DF, 0) @ self._w2_FD
        return {"x": x_D, "y": y_D, "weight": np.float32(1)}

    def fingerprint(self) -> str:
        """Hash (sha256) of the weights and the first example."""
        parts = (self._w1_DF, self._w2_FD, self[0]["x"], self[0]["y"])
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


def filler(embed: int) -> dict[str, np.ndarray]:
    """An example that does not count: its weight is 0."""
    row = np.zeros(embed, np.float32)
    return {"x": row, "y": row, "weight": np.zeros((), np.float32)}


def load(embed: int, hidden: int, seed: int) -> Dataset:
    """Makes a teacher with training questions and different held-out questions."""
    train = Teacher(embed, hidden, seed, 0, TRAIN)
    return Dataset(
        train=train,
        held_out=Teacher(embed, hidden, seed, 1, HELD_OUT),
        filler=filler(embed),
        unit="examples",
        units=1,
        config={},
        facts={"dataset": "teacher", "fingerprint": train.fingerprint()},
    )
