"""Runs in a bucket keep a disk's guarantees; tests/support/bucket.py is the server."""

import contextlib
import copy
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data import DataError, buckets, corpus, sources, text, tokenizer
from recipes.common import checkpoint
from recipes.common.checkpoint.run_folder import open_run
from recipes.common.checkpoint.saver import Saver
from recipes.common.mesh import make_mesh
from recipes.common.runtime import Run, Stopped, UserError, preemption, start
from recipes.common.sharding.abstract import paths
from recipes.common.storage import folders, lock
from recipes.common.train.loop import finish
from recipes.common.train.metrics import Log
from recipes.common.train.profiled_steps import Profile
from tests.conftest import ROOT
from tests.support import small_tokenizers
from tests.support.bucket import CUT, LOST, Bucket, Request
from tests.support.local_processes import SMALLEST, LocalProcesses
from tests.support.quick import XLA_FLAGS
from tests.support.quick import quick as quick
from tests.support.runs import TINY, NoFlags, assert_bit_equal, records, saving, state_of, talker

pytestmark = pytest.mark.promise("buckets")

WORKDIR = "gs://zoo/runs/w"
MODELS = ROOT / "tests" / "golden" / "hf"


@pytest.fixture(scope="session")
def server():
    """One server for each worker, because TensorStore reads its address only once."""
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
    """A state sharded over all devices that differs from those of other steps."""
    where = jax.sharding.NamedSharding(make_mesh("8"), jax.P("data"))
    params = {"x": jax.device_put(jnp.full((8, 4), float(step)), where), "y": jnp.arange(3.0)}
    return {"params": params, "step": jnp.int32(step)}


def at(path: str):
    return folders.to_path(f"{WORKDIR}/{path}")


def in_folder(bucket: Bucket, name: str) -> list[str]:
    """Steps that have any file, finished or not."""
    prefix = f"runs/w/{name}/"
    return sorted({n.removeprefix(prefix).partition("/")[0] for n in bucket.names(prefix)})


# ---- checkpoints ---------------------------------------------------------------------------------


def test_a_checkpoint_is_finished_hashed_kept_and_dropped_as_on_a_disk(bucket, tmp_path):
    tree = {3: state(3), 6: state(6), 9: state(9)}
    tokens = tokenizer.from_files(small_tokenizers.byte_level())
    for workdir in (WORKDIR, tmp_path):
        with saving(workdir, keep=2, tokenizer=tokens) as saver:
            for step, what in tree.items():
                saver.save(step, what)
        assert checkpoint.steps_in(folders.to_path(workdir) / "checkpoints") == [6, 9]
    for step in (6, 9):
        there, here = at(f"checkpoints/{step}"), tmp_path / "checkpoints" / str(step)
        assert checkpoint.verify(there) == ""
        assert_bit_equal(state_of(folders.to_path(WORKDIR), step), state_of(tmp_path, step))
        # Orbax gives its array files random names.
        plain = {name for name in folders.at(here).sizes() if "/d/" not in name}
        assert plain == {name for name in folders.at(there).sizes() if "/d/" not in name}
    assert in_folder(bucket, "checkpoints") == ["6", "9"], "nothing of 3 is left"
    assert not bucket.names("runs/w/lock.json"), "released"
    assert json.loads((at("config.json")).read_text()) == {"flags": {}, "versions": {}}
    found = checkpoint.find(WORKDIR)
    assert (found.step, found.tokenizer().files) == (9, tokens.files)
    # An object that was damaged is named; a new start moves the checkpoint aside.
    name = next(n for n in bucket.names("runs/w/checkpoints/9/") if "/d/" in n)
    content = bytearray(bucket.read(name))
    content[len(content) // 2] ^= 1
    folders.write(folders.to_path(f"gs://zoo/{name}"), bytes(content))
    assert checkpoint.verify(at("checkpoints/9")).startswith("state/")
    with saving(WORKDIR, keep=2) as saver:
        assert saver.last_good().name == "6"
        assert in_folder(bucket, "checkpoints") == ["6"]
        assert in_folder(bucket, "damaged") == ["9"]


@pytest.mark.full
def test_a_kill_at_any_instant_loses_nothing_that_is_finished(bucket):
    """A kill leaves the bucket as it is after some single change."""
    bucket.history = []
    with saving(WORKDIR, keep=1) as saver:
        for step in (1, 2, 3):
            saver.save(step, state(step))
            saver.keep_best(step, state(step), {"loss": 1 / step})
    history, bucket.history = bucket.history, None
    newest, seen, damaged = {"checkpoints": 0, "best": 0}, set(), []
    for objects, contents in history:
        objects.pop("runs/w/lock.json", None)  # of this process, which lives: see below
        for kind in newest:
            form = rf"runs/w/{kind}/(\d+)/{folders.COMMITTED}"
            steps = [int(found[1]) for name in objects if (found := re.fullmatch(form, name))]
            assert max(steps, default=0) >= newest[kind], (
                "what is finished stays until there is a newer"
            )
            newest[kind] = max(steps, default=0)
            for step in steps:
                prefix = f"runs/w/{kind}/{step}/"
                is_now = frozenset((n, o["generation"]) for n, o in objects.items() if prefix in n)
                if is_now not in seen:
                    seen.add(is_now)
                    bucket.reset((objects, contents))
                    damaged.append(checkpoint.verify(at(f"{kind}/{step}")))
    assert newest == {"checkpoints": 3, "best": 3}
    assert {*damaged} == {""}
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


@pytest.mark.promise("one-run")
def test_one_of_two_starts_wins_and_a_dead_owner_is_replaced(bucket, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.1)
    taken, refused = [], []

    def start():
        try:
            taken.append(lock.take(folders.to_path(WORKDIR), "config.json"))
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
    with contextlib.closing(lock.take(folders.to_path(WORKDIR), "config.json")) as mine:
        # … and of one elsewhere when it has been silent for long: here of ours, which then stops.
        monkeypatch.setattr(mine, "_me", mine._me | {"process": "elsewhere"})
        mine.check()
        mine._end.set()  # it does not beat any more
        monkeypatch.setattr(lock, "STALE_SECONDS", 1)
        with contextlib.closing(lock.take(folders.to_path(WORKDIR), "config.json")) as theirs:
            mine._end.clear()
            unaware = copy.copy(mine)  # ends, and leaves the lock to its new owner
            unaware._end = threading.Event()
            unaware.close()
            assert bucket.names() == ["runs/w/lock.json"]
            with pytest.raises(OSError, match="another run has taken over gs://zoo/runs/w"):
                mine.check()
            theirs.check()


def put(owner: dict) -> None:
    folders.write(at("lock.json"), json.dumps(owner).encode())


@pytest.mark.promise("one-run")
def test_a_signal_outside_of_training_releases_the_lock(bucket, capfd, monkeypatch):
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(preemption, "_asked", "")
    monkeypatch.setattr(preemption, "_resumes", True)
    for release_seconds, at_work in ((60, False), (0.1, True)):
        monkeypatch.setattr(preemption, "RELEASE_SECONDS", release_seconds)
        held = lock.take(folders.to_path(WORKDIR), "config.json")
        with held._one if at_work else contextlib.nullcontext():
            with pytest.raises(SystemExit):
                preemption._handle(signal.SIGTERM, None)
            assert bool(bucket.names()) == at_work, "the process ends, whatever it was doing"
        assert capfd.readouterr().out.startswith("Stopped by SIGTERM outside of training")


@pytest.fixture
def no_programs():
    """Restores this process's compilation cache folder."""
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)


# ---- mistakes ------------------------------------------------------------------------------------


class HttpError(Exception):
    """As gcsfs raises it."""

    def __init__(self, code: int):
        super().__init__(f"the server says {code}")
        self.code = code


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (HttpError(401), "may not list it"),
        (OSError("Forbidden: https://storage"), "may not list it"),
        (HttpError(503), "can't be reached"),
        (OSError("no route to host"), "can't be reached"),
    ],
)
def test_a_bucket_that_credentials_can_not_list_is_no_network_that_fails(failure, cause):
    assert cause in buckets.explain(failure, "b", has_credentials=True)


def test_an_unusable_bucket_is_one_line(bucket, monkeypatch, inside, no_programs):
    def says(name: str) -> str:
        with pytest.raises(UserError) as caught:
            folders.to_path(name, "--workdir")
        buckets._problem.cache_clear()
        return str(caught.value)

    assert says("s3://b/run").startswith("--workdir=s3://b/run is on s3://, which can't be used; ")
    assert "use, for example, gs://my-bucket/runs/a" in says("gs://zoo")
    assert "is for patterns; use another name" in says("gs://zoo/run[1]")
    assert says("gs://zoo/a#1").endswith(
        "#1 has '#', where TensorStore ends a name; use another name"
    )
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
    jax.config.update("jax_compilation_cache_dir", "gs://nosuch/programs")  # as the variable does
    done = inside("recipes.transformer", *TINY, f"--workdir={WORKDIR}")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        "error: JAX_COMPILATION_CACHE_DIR=gs://nosuch/programs: there is no bucket 'nosuch'; create "
        "it, or check its name\n"
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert says(WORKDIR) == f"--workdir={WORKDIR} needs gcsfs; run pip install -e '.[gcs]'"
    assert not bucket.names(), "nothing is written"


def test_checkpoints_that_cannot_be_listed_are_not_taken_for_none(bucket):
    with saving(WORKDIR) as saver:
        saver.save(1, state(1))
    before = bucket.snapshot()
    listing = lambda r: r.query.get("prefix") == ["runs/w/checkpoints/"]  # noqa: E731
    with bucket.failing(refuse(listing)), pytest.raises(UserError) as caught:
        with saving(WORKDIR):
            pass
    assert str(caught.value) == (
        f"--workdir={WORKDIR} can't be read (403 Forbidden); use a different --workdir"
    )
    lock.release_all()
    assert bucket.snapshot()[0] == before[0]


def test_a_bucket_that_is_lost_after_the_last_save_is_a_warning(bucket, capfd):
    with saving(WORKDIR) as saver:
        saver.save(1, state(1))
    folder = open_run("transformer", Run(workdir=WORKDIR), NoFlags())
    log = Log(folder.path / "metrics.jsonl", 1, Run(steps=1), "tokens", 1)
    capfd.readouterr()
    with bucket.failing(refuse(lambda request: True)):
        finish(folder, None, log)
    out, err = capfd.readouterr()
    assert out.startswith("Took ")
    assert err == (
        f"warning: {WORKDIR} can no longer be read or written (403 Forbidden); the last checkpoint "
        "was saved before\n"
    )
    assert checkpoint.verify(at("checkpoints/1")) == ""


@pytest.mark.full
def test_access_refused_midway_is_one_line(bucket, inside, tmp_path, capfd, monkeypatch):
    models, target = {"export": talker(tmp_path / "zoo", 32)}, "gs://zoo/new"
    models["import"] = MODELS / "llama3"
    for (command, source), part in zip(models.items(), ("safetensors", "/d/"), strict=True):
        with bucket.failing(refuse(writes(part))):
            done = inside("recipes.hf", command, f"--source={source}", f"--target={target}")
        line = done.err.splitlines()[-1]  # TensorStore tells that it finds no credentials
        assert (done.code, done.out.count("xported") + done.out.count("mported")) == (2, 0)
        assert line.startswith(f"error: --target={target} can't be written (")
        assert line.endswith("); use a different folder")
        assert not bucket.names("new"), "the same command can be tried again"
    with saving(WORKDIR) as saver:
        saver.save(1, state(1))
    with bucket.failing(refuse(lambda r: r.query.get("prefix") == ["runs/w/checkpoints/"])):
        with pytest.raises(UserError) as caught:
            checkpoint.find(WORKDIR)
    assert (
        str(caught.value) == f"--restore_from={WORKDIR} can't be read (403 Forbidden); use another"
    )
    # A profile: training goes on. JAX's own takes seconds to begin.
    monkeypatch.setattr(jax.profiler, "start_trace", lambda to: (to / "trace").touch())
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    run = Run(workdir=WORKDIR, steps=3, profile="2:2")
    with contextlib.closing(open_run("transformer", run, NoFlags())) as folder:
        profile = Profile(run, folder)
        with bucket.failing(refuse(writes("/profile/"))), profile:
            assert profile.around(lambda state, batch: batch, 1)(0, 7) == 7
    found = re.search(
        r"warning: gs://zoo/runs/w/profile could not be written \(403 Forbidden\); training continues, "
        r"and the profile is in (.+)\n", capfd.readouterr().err,
    )  # fmt: skip
    assert list(pathlib.Path(found[1]).iterdir())
    shutil.rmtree(found[1])


# ---- what the server may do ----------------------------------------------------------------------


def writes(part: str):
    """Matches writes of objects whose names contain `part`."""
    return lambda request: request.method == "POST" and part in request.name


def refuse(which):
    return lambda request: 403 if which(request) else None


@pytest.mark.full
def test_refused_writes_are_reported_and_the_next_save_works(bucket, capfd, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", start._unraisable)  # as runs do, for TensorStore
    with bucket.failing(refuse(writes("checkpoints/2/"))):
        with saving(WORKDIR, keep=3) as saver:
            for step in (1, 2, 3):
                saver.save(step, state(step))
        assert checkpoint.steps_in(at("checkpoints")) == [1, 3]
        err = capfd.readouterr().err
        assert "warning: the checkpoint of step 2 could not be saved (" in err
        assert "403" in err
        assert in_folder(bucket, "checkpoints") == ["1", "3"]
    # Nothing may be deleted: what is saved is saved.
    with saving(WORKDIR, keep=1) as saver:
        with bucket.failing(refuse(lambda r: r.method == "DELETE" and "s/1/" in r.name)):
            saver.save(4, state(4))
            saver.wait()
    err = capfd.readouterr().err
    assert "warning: old checkpoints could not be removed (403 Forbidden)" in err
    assert checkpoint.steps_in(at("checkpoints"))[-1] == 4
    saver = saving(WORKDIR, keep=2).__enter__()
    with bucket.failing(refuse(writes("checkpoints/5/"))):
        saver.save(5, state(5))
        with pytest.raises(
            Stopped, match=rf"step 5 .*403.*; the newest is {WORKDIR}/checkpoints/4"
        ):
            saver.wait()
    assert checkpoint.verify(at("checkpoints/4")) == ""


@pytest.mark.full
def test_transient_server_errors_are_retried(bucket, capfd):
    seen: set[tuple] = set()
    answers = [503, 429, CUT]

    def now_and_then(request: Request):
        key = (request.method, request.name)
        if "checkpoints/" not in request.name or key in seen or len(seen) >= 9:
            return 0.02  # slow, too
        seen.add(key)
        if request.query.get("uploadType", ["resumable"]) != ["resumable"]:
            return LOST  # the emulator forgets a resumable one that is whole: a bucket does not
        return answers[len(seen) % 3]

    with bucket.failing(now_and_then), saving(WORKDIR) as saver:
        saver.save(1, state(1))
    assert len(seen) == 9
    assert checkpoint.verify(at("checkpoints/1")) == ""
    assert "warning" not in capfd.readouterr().err


@pytest.mark.promise("one-run")
@pytest.mark.full
def test_a_lock_is_ours_though_the_answer_was_lost(bucket):
    """The library's retry finds the object that its first attempt wrote."""
    lost = iter([LOST])
    with bucket.failing(lambda r: next(lost, None) if writes("lock.json")(r) else None):
        held = lock.take(folders.to_path(WORKDIR), "config.json")
        held.check()
    held.close()
    assert sum(map(writes("lock.json"), bucket.requests)) == 3
    assert not bucket.names()


@pytest.mark.promise("one-run")
@pytest.mark.full
def test_a_run_that_lost_its_lock_stops(bucket, monkeypatch):
    """After a takeover the old run overwrites nothing; the new one saves the remaining steps."""
    monkeypatch.setattr(lock, "STALE_SECONDS", -1)
    monkeypatch.setattr(lock, "SURE_SECONDS", 0)
    taken = f"another run has taken over {WORKDIR}"
    first = saving(WORKDIR).__enter__()
    first.save(1, state(1))
    first.wait()
    log = Log(at("metrics.jsonl"), 1, Run(), "tokens", 1, locks=first._folder.locks)
    first.before_commit, others, save = log.flush, [], first._checkpointer.save

    def silent_within_a_save(*args, **more):
        others.append(saving(WORKDIR, keep=5).__enter__())
        folders.write(at("metrics.jsonl"), b"theirs\n")
        log.write({"step": 2})
        save(*args, **more)

    monkeypatch.setattr(first._checkpointer, "save", silent_within_a_save)
    first.save(2, state(2))
    with pytest.raises(Stopped, match=taken):
        first.wait()
    log.close()
    assert at("metrics.jsonl").read_bytes() == b"theirs\n"
    assert checkpoint.steps_in(at("checkpoints")) == [1]
    assert in_folder(bucket, "checkpoints") == ["1", "2"], "the other's to remove, or to finish"
    assert not (at("checkpoints/2") / "hashes.json").exists(), "it has stopped writing"
    second, late = *others, open_run("transformer", Run(workdir=WORKDIR), NoFlags())
    with contextlib.closing(lock.take(folders.to_path(WORKDIR), "config.json")):
        before = bucket.snapshot()[0]
        with pytest.raises(UserError, match=taken):
            Saver(late, 1, first._metadata, {})
        with pytest.raises(Stopped, match=taken):
            second.save(2, state(2))
        assert bucket.snapshot()[0] == before
    with saving(WORKDIR, keep=5) as third:
        folders.write(at("checkpoints/2/late"), b"of the first")
        third.save(2, state(2))
    assert checkpoint.steps_in(at("checkpoints")) == [1, 2]
    assert checkpoint.verify(at("checkpoints/2")) == ""
    assert not (at("checkpoints/2") / "late").exists()


# ---- whole runs ----------------------------------------------------------------------------------

SHORT = (
    *TINY,
    "--steps=6",
    "--checkpoint_every=3",
    "--log_every=1",
    "--eval_every=3",
    "--keep_best",
)


@pytest.mark.full
def test_a_run_in_a_bucket_is_the_run_on_a_disk(bucket, book, quick, inside, tmp_path, monkeypatch):
    """Covers saving, resuming on another mesh, evaluating, publishing, exporting and importing."""
    flags = (*SHORT, book)
    train = lambda *more: inside("recipes.transformer", *flags, *more)  # noqa: E731
    here, there = tmp_path / "w", folders.to_path(WORKDIR)
    for workdir in (here, there):
        assert train("--mesh=4x2", "--steps=3", f"--workdir={workdir}").code == 0
        done = train("--mesh=2x4", f"--workdir={workdir}")
        assert done.code == 0, done.err
    assert f"Resumes at step 3, from {there / 'checkpoints' / '3'}." in done.out
    for step in (3, 6):
        assert_bit_equal(state_of(there, step), state_of(here, step))
    for fields in (("step", "loss", "grad_norm"), ("step", "held_out_loss")):
        assert records(there, *fields) == records(here, *fields)
    config = json.loads((there / "config.json").read_text())
    assert config["flags"]["workdir"] == WORKDIR
    assert {n.split("/")[2] for n in bucket.names("runs/w/")} == {p.name for p in here.iterdir()}
    assert (there / "best" / "6" / "held_out.json").read_text() == (
        here / "best" / "6" / "held_out.json"
    ).read_text()

    # A failed save is reported, and so is the end.
    with monkeypatch.context() as patch, bucket.failing(refuse(writes("checkpoints/8/"))):
        patch.setattr(sys, "unraisablehook", start._unraisable)
        done = train("--mesh=2x4", "--steps=8", f"--workdir={there}")
    assert (done.code, "error: the checkpoint of step 8 could not be" in done.err) == (1, True)
    assert checkpoint.steps_in(there / "checkpoints") == [3, 6]
    assert not bucket.names("runs/w/lock.json")

    published, exported, imported = "gs://zoo/zoo/mine", "gs://zoo/hf/mine", "gs://zoo/runs/hf"
    done = inside(
        "recipes.publish", f"--source={WORKDIR}", f"--target={published}", "--licence=CC0-1.0"
    )
    assert done.code == 0, done.err
    assert checkpoint.verify(published) == ""
    done = inside("recipes.hf", "export", f"--source={published}", f"--target={exported}")
    assert done.code == 0, done.err
    written = [r.name for r in bucket.requests if r.changes and r.name.startswith("hf/mine/")]
    assert written.index("hf/mine/config.json") == len(written) - 1, "whole once it has that"
    done = inside("recipes.hf", "import", f"--source={exported}", f"--target={imported}")
    assert done.code == 0, done.err
    want = None
    for path in (WORKDIR, published, f"hf:{exported}", imported):
        model, metadata = checkpoint.restore(path, make_mesh("1x8"))
        got = jax.device_get(jax.tree.leaves(model_params(model)))
        want = want or got
        jax.tree.map(np.testing.assert_array_equal, got, want)
    assert metadata["imported"] == f"hf:{exported}"
    left = {name.split("/")[1] for name in bucket.names() if not name.startswith("runs/w/")}
    assert left == {"mine", "hf"}, "nothing beside them"


def model_params(model):
    from flax import nnx

    return paths(nnx.to_pure_dict(nnx.state(model)))


@pytest.mark.full
def test_several_processes_save_to_a_bucket(bucket):
    flags = (*SMALLEST, "--mesh=4", "--steps=6", "--checkpoint_every=3", f"--workdir={WORKDIR}")
    two = LocalProcesses(2, *flags, recipe="dot_relu_dot")
    for code, _, err in two.finish():
        assert code == 0, err
    assert checkpoint.steps_in(at("checkpoints")) == [3, 6]
    assert [checkpoint.verify(at(f"checkpoints/{step}")) for step in (3, 6)] == ["", ""]
    assert {"ocdbt.process_0", "ocdbt.process_1"} <= {
        name.split("/")[5] for name in bucket.names("runs/w/checkpoints/6/state/")
    }
    assert [step for step, _ in records(folders.to_path(WORKDIR), "step", "loss")] == list(
        range(1, 7)
    )
    assert not bucket.names("runs/w/lock.json")


@pytest.mark.full
def test_data_in_a_bucket_is_the_data_on_a_disk(bucket, tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    # For compiled programs: what is prepared stays on a disk.
    monkeypatch.setenv("ZOO_CACHE", "gs://zoo/cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [{"text": f"Document {i}. " * 20} for i in range(40)]
    (tmp_path / "d").mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "d" / "a.jsonl").write_text(lines)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d" / "b.parquet")
    for name in ("a.jsonl", "b.parquet"):
        folders.write(folders.to_path(f"gs://zoo/d/{name}"), (tmp_path / "d" / name).read_bytes())
    for name in ("d/a.jsonl", "d/b.parquet", "d/*.jsonl", "d"):
        (there,), (here,) = sources.find(f"gs://zoo/{name}"), sources.find(str(tmp_path / name))
        assert corpus.prepare(there).fingerprint == corpus.prepare(here).fingerprint
    evaluated = [
        text.load(f"{place}/d/a.jsonl", eval_dataset=f"{place}/d/b.parquet").facts["fingerprint"]
        for place in ("gs://zoo", tmp_path)
    ]
    assert evaluated[0] == evaluated[1] != corpus.prepare(there).fingerprint
    before = len(bucket.requests)
    (again,) = sources.find("gs://zoo/d/a.jsonl")
    assert all("alt" not in request.query for request in bucket.requests[before:]), "copied once"
    folders.write(folders.to_path("gs://zoo/d/a.jsonl"), (lines + lines).encode())
    (changed,) = sources.find("gs://zoo/d/a.jsonl@0.5,gs://zoo/d/b.parquet@0.5")[:1]
    assert changed.files[0].read_text() == lines + lines, "another content is another copy"
    assert again.files[0].read_text() == lines
    with pytest.raises(
        DataError, match=r"^--dataset=gs://zoo/none.txt does not exist; check the name"
    ):
        sources.find("gs://zoo/none.txt")
    assert {*os.listdir(tmp_path / "cache" / "sharded-model-zoo")} == {"buckets", "text"}
    assert not bucket.names("cache")


@pytest.mark.full
def test_a_model_in_a_bucket_answers_with_its_tokenizer(bucket, quick, inside, tmp_path):
    """Prompts, texts and evaluation figures are in the bucket, too."""
    answers, figures = [], []
    for place in (folders.to_path("gs://zoo/x"), tmp_path / "x"):
        model, rows, out = talker(place / "talker", 32), place / "a.jsonl", place / "figures.json"
        folders.at(place).make()
        folders.write(rows, json.dumps({"prompt": "def one", "text": "All work. " * 9}).encode())
        answers.append(
            inside(
                "recipes.generate", f"--restore_from={model}", f"--prompts={rows}",
                "--max_new_tokens=8", "--temperature=0",
            )
        )  # fmt: skip
        done = inside(
            "recipes.evaluate", f"--restore_from={model}", f"--dataset={rows}", f"--out={out}"
        )
        assert done.code == 0, done.err
        (figure,) = json.loads(out.read_text())["datasets"].values()
        figures.append(figure)
    assert [done.code for done in answers] == [0, 0], answers[0].err
    there, here = (re.sub(r"[\d.,]+ (s|tokens/s|MB/s)", "", done.out) for done in answers)
    assert there == here
    assert figures[0] == figures[1]
    assert figures[0]["bytes"] == 89
    with pytest.raises(UserError, match="is in a bucket, where nothing can be appended; use a loc"):
        folders.new_path("gs://zoo/answers.jsonl", "out", appended=True)


@pytest.mark.full
def test_the_base_of_an_adapter_may_be_in_a_bucket(bucket):
    base, there = f"hf:{MODELS / 'llama3'}", "gs://zoo/base"
    source = checkpoint.find(base)
    variables = checkpoint.restore_variables(source, checkpoint.layout_of(source, make_mesh("1")))
    checkpoint.write(folders.to_path(there), variables, {"flags": {}} | source.metadata)
    found = [checkpoint.find(MODELS / "llama3_lora", base=where) for where in (there, base)]
    assert [paths(each.shapes()).keys() for each in found] == [paths(source.shapes()).keys()] * 2
    assert found[0].metadata["config"] == found[1].metadata["config"]


# ---- kill -9 -------------------------------------------------------------------------------------

STEPS = 9
KILLED = (*SMALLEST, "--mesh=2", f"--steps={STEPS}", "--checkpoint_every=3", "--eval_every=3")
KILLED += ("--keep_best",)


@pytest.mark.full
def test_a_run_killed_in_the_midst_of_a_save_ends_as_an_uninterrupted_one(bucket, tmp_path):
    """Compiled programs are kept in the bucket, too."""
    cache = {"ZOO_CACHE": "gs://zoo/cache"}
    jaxs_own = {"JAX_COMPILATION_CACHE_DIR": "gs://zoo/cache/xla"}
    jaxs_own["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

    def begin(workdir, cache=cache) -> subprocess.Popen:
        command = [sys.executable, "-m", "recipes.dot_relu_dot", *KILLED]
        return subprocess.Popen(
            [*command, f"--workdir={workdir}"], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | cache | {"XLA_FLAGS": XLA_FLAGS},
        )  # fmt: skip

    def killed_at(moment) -> list[int]:
        process = begin(WORKDIR)

        def fault(request: Request):
            if moment(request):
                process.send_signal(signal.SIGKILL)
                return CUT

        with bucket.failing(fault):
            process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL
        return checkpoint.steps_in(at("checkpoints"))

    here = tmp_path / "w"
    whole = begin(here, cache | jaxs_own)
    _, err = whole.communicate(timeout=120)
    assert whole.returncode == 0, err
    made = bucket.names("cache/xla/")
    assert made
    assert killed_at(writes("checkpoints/3/state/d/")) == [], "an upload is cut"
    assert killed_at(writes("checkpoints/6/commit_success.txt")) == [3], "before its mark"
    saved = killed_at(lambda r: r.method == "DELETE" and "checkpoints/3/state/" in r.name)
    assert saved == [6, 9], "all is saved, and an old one half removed"
    process = begin(WORKDIR)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert in_folder(bucket, "checkpoints") == ["6", "9"]
    for step in (6, 9):
        assert_bit_equal(state_of(folders.to_path(WORKDIR), step), state_of(here, step))
    for fields in (("step", "loss", "grad_norm", "learning_rate"), ("step", "held_out_loss")):
        assert records(folders.to_path(WORKDIR), *fields) == records(here, *fields)
    assert in_folder(bucket, "best") == os.listdir(here / "best")
    read = [r.name for r in bucket.requests if "alt" in r.query and r.name in made]
    assert len(made) < len(read), "made once, and read by the others"
