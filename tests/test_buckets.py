"""Runs in a bucket: what a disk keeps, it keeps. The server is tests/bucket.py; no real bucket is used."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data import DataError, buckets, corpus, sources
from recipes.common import checkpoint
from recipes.common.checkpoint import integrity
from recipes.common.mesh import make_mesh
from recipes.common.runtime import Stopped, UserError, folders, lock
from recipes.common.sharding.abstract import paths
from tests.bucket import CUT, Bucket, Request
from tests.conftest import ROOT
from tests.quick import XLA_FLAGS
from tests.runs import TINY, assert_bit_equal, records, saving, state_of

WORKDIR = "gs://zoo/runs/w"


@pytest.fixture(scope="session")
def server():
    """One for each worker: TensorStore reads once where it is."""
    with Bucket() as bucket:
        yield bucket


@pytest.fixture
def bucket(server, monkeypatch):
    for key, value in server.env.items():
        monkeypatch.setenv(key, value)
    server.reset()
    yield server
    lock.release_all()
    buckets._problem.cache_clear()


def state(step: int) -> dict:
    """Sharded over all devices, and told from those of other steps."""
    where = jax.sharding.NamedSharding(make_mesh("8"), jax.P("data"))
    params = {"x": jax.device_put(jnp.full((8, 4), float(step)), where), "y": jnp.arange(3.0)}
    return {"params": params, "step": jnp.int32(step)}


def at(path: str):
    return folders.at(f"{WORKDIR}/{path}")


def in_folder(bucket: Bucket, name: str) -> list[str]:
    """Steps of which anything is there, finished or not."""
    prefix = f"runs/w/{name}/"
    return sorted({n.removeprefix(prefix).partition("/")[0] for n in bucket.names(prefix)})


# ---- checkpoints ---------------------------------------------------------------------------------


def test_a_checkpoint_is_finished_hashed_kept_and_dropped_as_on_a_disk(bucket, tmp_path):
    tree = {3: state(3), 6: state(6), 9: state(9)}
    for workdir in (WORKDIR, tmp_path):
        with saving(workdir, keep=2) as saver:
            for step, what in tree.items():
                saver.save(step, what)
        assert checkpoint.steps_in(folders.at(workdir) / "checkpoints") == [6, 9]
    for step in (6, 9):
        there, here = at(f"checkpoints/{step}"), tmp_path / "checkpoints" / str(step)
        assert checkpoint.verify(there) == ""
        assert_bit_equal(state_of(folders.at(WORKDIR), step), state_of(tmp_path, step))
        # What Orbax calls its files of arrays is by chance.
        plain = {name for name in folders.sizes(here) if "/d/" not in name}
        assert plain == {name for name in folders.sizes(there) if "/d/" not in name}
    assert in_folder(bucket, "checkpoints") == ["6", "9"], "nothing of 3 is left"
    assert not bucket.names("runs/w/lock.json"), "released"
    assert json.loads((at("config.json")).read_text()) == {"flags": {}, "versions": {}}
    assert checkpoint.find(WORKDIR).step == 9
    # An object that was damaged is named; a new start moves the checkpoint aside.
    name = next(n for n in bucket.names("runs/w/checkpoints/9/") if "/d/" in n)
    content = bytearray(bucket.read(name))
    content[len(content) // 2] ^= 1
    folders.write(folders.at(f"gs://zoo/{name}"), bytes(content))
    assert checkpoint.verify(at("checkpoints/9")).startswith("state/")
    with saving(WORKDIR, keep=2) as saver:
        assert saver.last_good().name == "6"
        assert in_folder(bucket, "checkpoints") == ["6"]
        assert in_folder(bucket, "damaged") == ["9"]


def test_a_kill_at_any_instant_loses_nothing_that_is_finished(bucket):
    """The bucket after each single change is what a kill there leaves."""
    bucket.history = []
    with saving(WORKDIR, keep=1) as saver:
        for step in (1, 2, 3):
            saver.save(step, state(step))
            saver.keep_best(step, state(step), {"loss": 1 / step})
    history, bucket.history, newest, best = bucket.history, None, 0, 0
    whole, damaged = {}, []
    for objects, contents in history:
        objects.pop("runs/w/lock.json", None)  # of this process, which lives: see below
        bucket.reset((objects, contents))
        for kind in ("checkpoints", "best"):
            for step in checkpoint.steps_in(at(kind)):
                names = bucket.names(f"runs/w/{kind}/{step}/")
                key = tuple((name, bucket.generation(name)) for name in names)
                if key not in whole:
                    whole[key] = checkpoint.verify(at(f"{kind}/{step}"))
                damaged += [whole[key]] if whole[key] else []
        steps, bests = checkpoint.steps_in(at("checkpoints")), checkpoint.steps_in(at("best"))
        assert max(steps, default=0) >= newest, "what is finished stays until there is a newer one"
        assert max(bests, default=0) >= best
        newest, best = max(steps, default=0), max(bests, default=0)
    assert (newest, best, damaged) == (3, 3, [])
    unfinished = [h for h in history if len(in_folder_of(h)) > 2]
    for objects, contents in unfinished[:: len(unfinished) // 4]:
        bucket.reset((objects, contents))
        before = checkpoint.steps_in(at("checkpoints"))
        with saving(WORKDIR, keep=1):  # removes what is left of others
            assert in_folder(bucket, "checkpoints") == [str(step) for step in before]
            assert len(in_folder(bucket, "best")) <= 1


def in_folder_of(snapshot) -> set[tuple[str, str]]:
    return {tuple(name.split("/")[2:4]) for name in snapshot[0] if name.count("/") > 3}


# ---- the lock ------------------------------------------------------------------------------------


def test_of_two_starts_one_wins_and_a_dead_one_is_taken_over(bucket, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.1)
    taken, refused = [], []

    def start():
        try:
            taken.append(lock.take(folders.at(WORKDIR), "config.json"))
        except UserError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(taken), len(refused)) == (1, 3)
    assert f"--workdir={WORKDIR} is in use by process {os.getpid()} on" in refused[0]
    taken[0].check()
    taken[0].close()
    assert not bucket.names(), "released"
    # One whose process of this machine is dead is taken over at once …
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = {"id": "1", "pid": process.pid, "process": lock._process(process.pid)}
    process.communicate()
    put(owner)
    with contextlib.closing(lock.take(folders.at(WORKDIR), "config.json")) as mine:
        # … and of one elsewhere when it has been silent for long: here of ours, which then stops.
        monkeypatch.setattr(mine, "_me", mine._me | {"process": "elsewhere"})
        mine.check()
        mine._end.set()  # it does not beat any more
        monkeypatch.setattr(lock, "STALE_SECONDS", 1)
        with contextlib.closing(lock.take(folders.at(WORKDIR), "config.json")) as theirs:
            mine._end.clear()
            with pytest.raises(OSError, match="another run has taken over gs://zoo/runs/w"):
                mine.check()
            theirs.check()


def put(owner: dict) -> None:
    folders.write(at("lock.json"), json.dumps(owner).encode())


# ---- mistakes ------------------------------------------------------------------------------------


def test_a_bucket_that_cannot_be_used_is_one_sentence(bucket, monkeypatch, inside):
    def says(name: str) -> str:
        with pytest.raises(UserError) as caught:
            folders.at(name, "--workdir")
        buckets._problem.cache_clear()
        return str(caught.value)

    assert says("s3://b/run").startswith("--workdir=s3://b/run is on s3://, which Orbax can't use; ")
    assert "use, for example, gs://my-bucket/runs/a" in says("gs://zoo")
    assert says("gs://nosuch/a") == (
        "--workdir=gs://nosuch/a: there is no bucket 'nosuch'; create it, or check its name"
    )
    with bucket.failing(lambda request: 401):
        assert "there are no Google credentials" in says(WORKDIR)
        assert "gcloud auth application-default login" in says(WORKDIR)
    monkeypatch.setattr(buckets, "SECONDS", 0.2)
    with bucket.failing(lambda request: 0.5):
        assert "no answer in 0.2 s" in says(WORKDIR)
    monkeypatch.undo()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", bucket.env["STORAGE_EMULATOR_HOST"])
    with bucket.failing(lambda request: 403 if request.method == "POST" else None):
        done = inside("recipes.transformer", *TINY, f"--workdir={WORKDIR}")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"error: --workdir={WORKDIR} can't be written (403 Forbidden); use a different --workdir\n"
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert says(WORKDIR) == f"--workdir={WORKDIR} needs gcsfs; run pip install -e '.[gcs]'"
    assert not bucket.names(), "nothing is written"
