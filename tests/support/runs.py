"""Helpers for tests of whole runs: a tiny command, and the files that it leaves."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from data import tokenizer
from data.tokenizer import BYTES, Tokenizer
from recipes.common import checkpoint
from recipes.common.checkpoint import integrity
from recipes.common.checkpoint.run_folder import open_run
from recipes.common.checkpoint.saver import Saver
from recipes.common.mesh import make_mesh
from recipes.common.runtime.flags import Run
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import make_layout
from tests.support import small_tokenizers
from zoo.llama_relatives import Config, Transformer

TINY = ("--size=tiny", "--sample_bytes=0", "--seq_len=32", "--batch_size=16")


def records(workdir: pathlib.Path, *fields: str) -> list[tuple]:
    """Returns `fields` of each line of metrics.jsonl that has them all."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [tuple(line[f] for f in fields) for line in lines if set(fields) <= set(line)]


def steps_saved(workdir: pathlib.Path) -> list[int]:
    return sorted(int(p.name) for p in (workdir / "checkpoints").iterdir())


def state_of(workdir: pathlib.Path, step: int) -> dict:
    """Every array of a checkpoint's state, by its path, read with Orbax alone."""
    folder = workdir / "checkpoints" / str(step) / "state"
    return paths(ocp.StandardCheckpointer().restore(folder))


def assert_bit_equal(a: dict, b: dict) -> None:
    assert set(a) == set(b)
    for path, value in a.items():
        np.testing.assert_array_equal(value, b[path], err_msg=path)


def talker(folder: pathlib.Path, context: int, **sizes) -> pathlib.Path:
    """Makes a checkpoint: a random model of 512 tokens with a tokenizer and a chat template."""
    config = dataclasses.replace(Config.tiny(), vocab_size=512, **sizes)
    layout, random = make_layout(Transformer, config, make_mesh("1")), np.random.default_rng(0)
    params = jax.tree.map(
        lambda a: jax.numpy.array(random.normal(0, 0.2, a.shape), a.dtype), layout.model.shapes
    )
    facts = checkpoint.metadata("transformer", layout, {}) | {"step": 0, "context": context}
    tokens = tokenizer.from_files(small_tokenizers.byte_level())
    checkpoint.write(folder, params, facts, tokenizer=tokens)
    return folder


# Pays for letters before "a"; a column of the row makes all rewards different.
REWARD = """
def reward(prompt, completion, row):
    return sum(letter < "a" for letter in completion) / 6 + row["bonus"] / 1000
"""


def to_reinforce(folder: pathlib.Path, reward: str = REWARD) -> tuple[str, ...]:
    """Makes a talker, questions for it and a reward; returns the flags of recipes.grpo that name them."""
    talker(folder / "model", 48)
    rows = [
        {"messages": [{"role": "user", "content": f"What is {n}?"}], "bonus": n} for n in range(24)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(reward)
    return (
        f"--restore_from={folder / 'model'}",
        f"--dataset={folder / 'prompts.jsonl'}",
        f"--reward={folder / 'reward.py'}:reward",
    )


def forget_hashes(folder: pathlib.Path) -> None:
    """Makes a checkpoint one of an early version, which had no hashes.json."""
    (folder / integrity.HASHES).unlink()
    file = folder / "metadata" / "metadata"
    facts = json.loads(file.read_text())
    del facts[integrity.HASHED]
    file.write_text(json.dumps(facts))


@dataclasses.dataclass(frozen=True)
class NoFlags:
    """Flags of a recipe that adds none."""


@contextlib.contextmanager
def saving(
    workdir: pathlib.Path,
    entry: str = "transformer",
    metadata: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    keep: int = 1,
    tokenizer: Tokenizer = BYTES,
) -> Iterator[Saver]:
    """Yields a saver for a workdir; on exit, waits for its saves and releases the lock."""
    folder = open_run(entry, Run(workdir=str(workdir)), NoFlags())
    least = {"entry": entry, "config": {}, "flags": {}, "versions": {}}
    saver = Saver(folder, keep, metadata or least, data or {}, tokenizer)
    yield saver
    saver.close()
    folder.close()
