"""Non-finite numbers, signals, damaged checkpoints, full disks, two runs at once."""

import errno
import functools
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from recipes.common import checkpoint
from recipes.common.checkpoint.run_folder import open_run
from recipes.common.checkpoint.saver import Saver
from recipes.common.runtime.errors import Stopped, UserError
from recipes.common.runtime.flags import Run
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.layout import make_layout
from recipes.common.storage import folders, lock
from recipes.common.train.metrics import Log, NonFiniteError
from recipes.common.train.optimizer import LearningRate
from recipes.common.train.resume import messages
from recipes.common.train.state import initialize
from recipes.common.train.step import TrainStep
from tests.conftest import ROOT, full_except
from tests.support.limits import limit_files
from tests.support.quick import QUICK, XLA_FLAGS
from tests.support.quick import quick as quick
from tests.support.runs import (
    TINY,
    NoFlags,
    assert_bit_equal,
    forget_hashes,
    records,
    saving,
    state_of,
    steps_saved,
)
from zoo.dot_relu_dot import Config, DotReluDot

SIX = ("--steps=6", "--checkpoint_every=4")


@pytest.fixture
def command(inside, quick, book):
    """Returns a function of flags that trains a tiny Transformer in this process."""
    return functools.partial(
        inside, "recipes.transformer", *TINY, book, "--mesh=4x2", "--log_every=1"
    )


@pytest.fixture
def go(command, tmp_path):
    """Runs `command` with workdir tmp_path/w."""
    return functools.partial(command, f"--workdir={tmp_path / 'w'}")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("trained") / "w"


@pytest.fixture
def trained(place, command):
    """A workdir with checkpoints of steps 4 and 6, made on first use."""
    if not place.exists():
        assert command(*SIX, f"--workdir={place}").code == 0
    return place


@pytest.fixture
def at_step(monkeypatch):
    """Returns a function of a step and an action that runs during that step."""

    def hook(step, action):
        original = Log.step

        def wrapped(log, done, *rest):
            if done == step:
                action()
            return original(log, done, *rest)

        monkeypatch.setattr(Log, "step", wrapped)

    return hook


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.promise("nonfinite")
def test_a_loss_that_is_not_finite_stops_the_run_before_anything_bad_is_saved(go, tmp_path):
    done = go("--steps=9", "--learning_rate=1e38", "--warmup_steps=2", "--checkpoint_every=1")
    assert done.code == 1
    newest = steps_saved(tmp_path / "w")[-1]
    assert re.fullmatch(
        rf"error: (loss|grad_norm) is (nan|inf) at step {newest + 1}; the last good checkpoint is "
        rf"{tmp_path}/w/checkpoints/{newest}\n",
        done.err,
    )
    assert [step for (step,) in records(tmp_path / "w", "step")] == list(range(1, newest + 1))
    saved = state_of(tmp_path / "w", newest)
    assert all(np.isfinite(value).all() for value in saved.values())


@pytest.mark.promise("nonfinite")
def test_a_skipped_update_leaves_parameters_and_moments_bit_equal():
    layout = make_layout(DotReluDot, Config.tiny(), make_mesh("1x1"), batch_size=4)
    step = TrainStep(layout, optax.adam(0.1), LearningRate(0.1, 1, 9), skip_nonfinite=True)
    initial = initialize(layout, step.optimizer, 0, step.abstract_state())
    take = jax.jit(step, compiler_options=QUICK)
    good = {"x": jnp.ones((4, 16)), "y": jnp.ones((4, 16)), "weight": jnp.ones(4)}
    bad = good | {"x": good["x"].at[1, 1].set(jnp.nan).at[2, 3].set(jnp.inf)}
    one, metrics = take(initial, good)
    assert not metrics["skipped"]
    assert (one["params"]["w1"] != initial["params"]["w1"]).any()
    two, metrics = take(one, bad)
    assert metrics["skipped"]
    assert int(two["step"]) == 2
    jax.tree.map(np.testing.assert_array_equal, two | {"step": 0}, one | {"step": 0})
    three, _ = take(two, good)
    without, _ = take(one, good)
    jax.tree.map(np.testing.assert_array_equal, three | {"step": 0}, without | {"step": 0})
    step = TrainStep(layout, step.optimizer, step.lr)
    state, metrics = jax.jit(step, compiler_options=QUICK)(one, bad)
    assert "skipped" not in metrics
    assert np.isnan(state["params"]["w1"]).any(), "without the flag nothing is skipped"


@pytest.mark.promise("nonfinite")
def test_consecutive_skipped_updates_are_counted_and_one_too_many_stops(tmp_path, capfd):
    flags = Run(steps=9, log_every=3, skip_nonfinite=1)
    log = Log(tmp_path / "metrics.jsonl", 0, flags, "x", 1)
    for step, loss in enumerate([1.0, np.nan, 3.0, np.inf, 5.0, np.nan], start=1):
        log.step(step, {"loss": np.float32(loss), "skipped": not np.isfinite(loss)}, 0.0)
    log.settle()
    assert records(tmp_path, "step", "loss", "skipped") == [(3, 3.0, 1), (6, None, 2)]
    assert capfd.readouterr().err == "".join(
        f"warning: loss is {loss} at step {step}; this update is skipped\n"
        for step, loss in ((2, "nan"), (4, "inf"), (6, "nan"))
    )
    log.step(7, {"loss": np.float32(np.nan), "skipped": True}, 0.0)
    with pytest.raises(NonFiniteError) as caught:
        log.settle()
    assert str(caught.value) == "loss is nan at step 7, after 1 skipped in a row"
    log.close()


@pytest.mark.promise("nonfinite")
@pytest.mark.full
def test_a_run_skips_consecutive_updates_and_then_stops(go, tmp_path):
    done = go("--steps=9", "--learning_rate=1e38", "--warmup_steps=0", "--skip_nonfinite=2")
    lines = done.err.splitlines()
    assert done.code == 1
    assert len(lines) == 3, done.err
    assert all("this update is skipped" in line for line in lines[:2])
    assert "after 2 skipped in a row" in lines[2]
    skipped = records(tmp_path / "w", "step", "loss", "skipped")
    assert [s for _, _, s in skipped if s] == [1, 1]


# ---- preemption ----------------------------------------------------------------------------------


@pytest.mark.promise("preemption")
@pytest.mark.parametrize("name", full_except(["SIGTERM", "SIGINT"], ["SIGTERM"]))
def test_a_signal_ends_the_step_and_saves_and_the_next_start_resumes_there(
    go, at_step, tmp_path, trained, name
):
    at_step(3, lambda: os.kill(os.getpid(), getattr(signal, name)))
    done = go(*SIX)
    saved = tmp_path / "w" / "checkpoints" / "3"
    assert done.code == 0, done.err
    assert done.err == ""
    assert f"Stopped by {name} after step 3, saved in {saved}; " in done.out
    assert "Held-out" not in done.out
    assert steps_saved(tmp_path / "w") == [3]
    done = go(*SIX)
    assert done.code == 0, done.err
    assert f"Resumes at step 3, from {saved}." in done.out
    assert_bit_equal(state_of(tmp_path / "w", 6), state_of(trained, 6))
    fields = ("step", "loss", "grad_norm")
    assert records(tmp_path / "w", *fields) == records(trained, *fields)


@pytest.mark.promise("preemption")
def test_a_second_sigint_stops_at_once():
    script = """
        import os, signal
        from recipes.common.runtime import preemption
        preemption.watch()
        with preemption.training():
            os.kill(os.getpid(), signal.SIGINT)
            print("continues", preemption.requested(1), flush=True)
            os.kill(os.getpid(), signal.SIGINT)
            print("never", flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (130, "continues SIGINT\n")
    assert done.stderr == "\nStopped at once; checkpoints saved before are intact.\n"


@pytest.mark.promise("preemption")
def test_a_signal_outside_of_training_ends_the_process_at_once():
    script = "import os, signal; from recipes.common.runtime import preemption; preemption.watch(); os.kill(os.getpid(), signal.SIGTERM); print('never')"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout == "Stopped by SIGTERM outside of training; the same command resumes.\n"


# ---- damage --------------------------------------------------------------------------------------


def big_file(folder: pathlib.Path) -> pathlib.Path:
    return max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)


def flip(path: pathlib.Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def truncate(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


UNCHANGED = dict(steps=6, batch_size=16, learning_rate=4e-3)  # of what the run began with

DAMAGE = {
    "an array's file cut short": lambda f: truncate(big_file(f)),
    "an array's file gone": lambda f: big_file(f).unlink(),
    "a bit of an array flipped": lambda f: flip(big_file(f), 1000),
    "a bit of the tree's description flipped": lambda f: flip(f / "state" / "_METADATA", 100),
    "metadata that is no JSON": lambda f: (f / "metadata" / "metadata").write_text("{"),
    "a bit of the metadata flipped": lambda f: flip(f / "metadata" / "metadata", 20),
    "hashes that are no JSON": lambda f: truncate(f / "hashes.json"),
    "no hashes": lambda f: (f / "hashes.json").unlink(),
    "no hashes, a bit of an array flipped": lambda f: [
        (f / "hashes.json").unlink(), flip(big_file(f), 1000)],
    "hashes of no file": lambda f: (f / "hashes.json").write_text("{}"),
    "hashes that are a list": lambda f: (f / "hashes.json").write_text("[]"),
    "hashes without a digest": lambda f: (f / "hashes.json").write_text('{"state/_METADATA": [1]}'),
    "a file without a hash": lambda f: (f / "state" / "d" / "more").write_text("x"),
    "the item state gone": lambda f: shutil.rmtree(f / "state"),
    "the item data gone": lambda f: shutil.rmtree(f / "data"),
    "no commit marker": lambda f: (f / "commit_success.txt").unlink(),
    "an empty folder": lambda f: [shutil.rmtree(p) if p.is_dir() else p.unlink() for p in f.iterdir()],
}  # fmt: skip


@pytest.mark.promise("damaged")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(trained, tmp_path, damage):
    shutil.copytree(trained, tmp_path / "w")
    folder = tmp_path / "w" / "checkpoints" / "6"
    assert checkpoint.verify(folder) == ""
    DAMAGE[damage](folder)
    bad = checkpoint.verify(folder)
    assert bad
    run = Run(workdir=str(tmp_path / "w"), **UNCHANGED)
    found = open_run("transformer", run, NoFlags())
    assert found.step == 4
    assert messages(found, run, step=None) == [
        f"Damaged: {folder}: {bad}. It is moved to {tmp_path}/w/damaged.",
        f"Resumes at step 4, from {tmp_path}/w/checkpoints/4.",
    ]
    assert folder.exists(), "nothing moves before the run begins"
    found.close()


@pytest.mark.promise("damaged")
def test_a_run_resumes_from_the_good_checkpoint_and_keeps_the_damaged_one_aside(
    go, trained, tmp_path
):
    shutil.copytree(trained, tmp_path / "w")
    folder = tmp_path / "w" / "checkpoints" / "6"
    name = big_file(folder).relative_to(folder)
    flip(folder / name, 1000)
    content = (folder / name).read_bytes()
    done = go(*SIX)
    assert done.code == 0, done.err
    assert (
        f"Damaged: {folder}: {name} differs from what was saved (its SHA-256 does not match). It is "
        f"moved to {tmp_path}/w/damaged." in done.out
    )
    assert "Resumes at step 4" in done.out
    assert (tmp_path / "w" / "damaged" / "6" / name).read_bytes() == content
    assert_bit_equal(state_of(tmp_path / "w", 6), state_of(trained, 6))
    assert [s for (s,) in records(tmp_path / "w", "step")] == [1, 2, 3, 4, 5, 6, 6]


@pytest.mark.promise("damaged")
def test_every_byte_counts(trained, tmp_path):
    """Any flipped bit is found, except in the two files that Orbax writes last."""
    folder = tmp_path / "6"
    shutil.copytree(trained / "checkpoints" / "6", folder)
    rng = np.random.default_rng(0)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name in ("commit_success.txt", "_CHECKPOINT_METADATA"):
            continue
        content = path.read_bytes()
        for at in rng.integers(0, len(content), 3):
            flip(path, at)
            assert name in checkpoint.verify(folder) or name == "hashes.json"
            assert checkpoint.verify(folder)
            path.write_bytes(content)
    assert checkpoint.verify(folder) == ""


@pytest.mark.full
@pytest.mark.promise("damaged")
def test_a_checkpoint_without_hashes_is_refused_unless_an_early_version_wrote_it(
    go, trained, tmp_path, capfd
):
    """It is then restored and resumed, with a line that nothing was checked."""
    shutil.copytree(trained, tmp_path / "w")
    for step in (4, 6):
        (tmp_path / "w" / "checkpoints" / str(step) / "hashes.json").unlink()
    folder = tmp_path / "w" / "checkpoints" / "6"
    with pytest.raises(UserError, match=rf"w: hashes.json is missing in {folder}; use an intact"):
        checkpoint.restore(tmp_path / "w", make_mesh("4x2"))
    done = go(*SIX)
    assert done.code == 2
    assert "has no intact checkpoint (step 6: hashes.json is missing); use a" in done.err

    shutil.copytree(trained, tmp_path / "old")
    folder = tmp_path / "old" / "checkpoints" / "6"
    forget_hashes(folder)
    said = (
        f"{folder} has no hashes.json, like checkpoints of early versions: its files were not checked "
        "for damage.\n"
    )
    capfd.readouterr()
    checkpoint.restore(tmp_path / "old", make_mesh("4x2"))
    assert capfd.readouterr().out == said
    done = go("--steps=7", "--checkpoint_every=4", f"--workdir={tmp_path / 'old'}")
    assert done.code == 0, done.err
    assert done.out.count(said) == 1
    assert "Resumes at step 6" in done.out


@pytest.mark.promise("damaged")
def test_no_good_checkpoint_is_a_user_error_not_a_new_start(trained, tmp_path, go):
    shutil.copytree(trained, tmp_path / "w")
    for step in (4, 6):
        truncate(big_file(tmp_path / "w" / "checkpoints" / str(step)))
    done = go(*SIX)
    assert done.code == 2
    assert "has no intact checkpoint (step 6: state/" in done.err
    assert steps_saved(tmp_path / "w") == [4, 6]


@pytest.mark.promise("damaged")
def test_a_damaged_restore_from_is_refused(trained, tmp_path, go):
    shutil.copytree(trained, tmp_path / "other")
    bad = big_file(tmp_path / "other" / "checkpoints" / "6")
    truncate(bad)
    for path in ("other", "other/checkpoints/6"):
        done = go("--steps=0", f"--restore_from={tmp_path / path}")
        assert done.code == 2
        assert done.err.startswith(f"error: --restore_from={tmp_path / path}: state/")
        assert bad.name in done.err
        assert done.err.count("\n") == 1
    done = go("--steps=0", f"--restore_from={tmp_path}/other/checkpoints/4")
    assert done.code == 0, done.err


# ---- a full disk ---------------------------------------------------------------------------------


LIMITED = """
import resource, runpy, sys
from recipes.common.checkpoint.saver import Saver
from recipes.common.sharding.compiler_options import COMPILER_OPTIONS
from tests.support.limits import limit_files
from tests.support.quick import QUICK

def save(saver, step, state, original=Saver.save):
    saver._join()
    limit_files(LIMITS.get(step, resource.RLIM_INFINITY))
    original(saver, step, state)

LIMITS = eval(sys.argv.pop(1))
Saver.save = save
COMPILER_OPTIONS["cpu"] = QUICK  # initial values too are the bits of a run in the tests' process
runpy.run_module("recipes.transformer", run_name="__main__")
"""


@pytest.fixture
def limited(book, tmp_path):
    """Runs a process in which saves of the steps in `limits` may write that many bytes per file."""

    def command(limits, *flags):
        flags = (*TINY, book, "--mesh=4x2", "--log_every=1", f"--workdir={tmp_path / 'w'}", *flags)
        return subprocess.run(
            [sys.executable, "-c", LIMITED, str(limits), *flags],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip

    return command


NOT_SAVED = (
    "warning: the checkpoint of step {step} could not be saved (File too large); training continues, "
    "and the next save is tried as usual\n"
)


@pytest.mark.promise("full-disk")
def test_a_failed_save_is_reported_and_the_next_one_works(tmp_path, capfd):
    def state(step):
        return {"x": jnp.asarray(np.random.default_rng(step).standard_normal(50_000))}

    with saving(tmp_path, keep=2) as saver:
        saver.save(2, state(2))
        saver.wait()
        try:
            limit_files(5_000)
            saver.save(4, state(4))
            with pytest.raises(Stopped) as caught:
                saver.wait()
        finally:
            limit_files(resource.RLIM_INFINITY)
        assert capfd.readouterr().err == NOT_SAVED.format(step=4)
        assert str(caught.value) == (
            "the checkpoint of step 4 could not be saved (File too large); the newest is "
            f"{tmp_path}/checkpoints/2, and the same command resumes from there"
        )
        assert steps_saved(tmp_path) == [2]
        saver.save(6, state(6))
    assert steps_saved(tmp_path) == [2, 6], "2 stays: 4 was none"
    for step in (2, 6):
        assert checkpoint.verify(tmp_path / "checkpoints" / str(step)) == ""
        np.testing.assert_array_equal(state_of(tmp_path, step)["x"], state(step)["x"])


@pytest.mark.promise("full-disk")
@pytest.mark.full
def test_a_run_continues_after_a_failed_save(limited, trained, tmp_path):
    done = limited({4: 5_000}, "--steps=6", "--checkpoint_every=2", "--keep_checkpoints=2")
    assert (done.returncode, done.stderr) == (0, NOT_SAVED.format(step=4))
    assert steps_saved(tmp_path / "w") == [2, 6]
    assert all(checkpoint.verify(tmp_path / "w" / "checkpoints" / s) == "" for s in "26")
    assert_bit_equal(state_of(tmp_path / "w", 6), state_of(trained, 6))
    fields = ("step", "loss")
    assert records(tmp_path / "w", *fields) == records(trained, *fields)


COMPILED = """
import jax
from recipes.common.runtime import start
from tests.support.limits import limit_files

start._settle_libraries()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
limit_files(10)
print(jax.jit(lambda x: x + 1)(1))
"""


@pytest.mark.promise("full-disk")
@pytest.mark.full
def test_a_program_that_can_not_be_kept_is_no_news(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env=os.environ | {"ZOO_CACHE": str(tmp_path)},
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("2\n", "")


@pytest.mark.promise("full-disk")
@pytest.mark.full
def test_a_last_save_that_fails_ends_the_run_cleanly(limited, trained, tmp_path):
    flags = ("--steps=6", "--checkpoint_every=2", "--keep_checkpoints=1")
    done = limited({6: 5_000}, *flags)
    assert done.returncode == 1
    warning, error = done.stderr.splitlines()
    assert warning + "\n" == NOT_SAVED.format(step=6)
    assert error == (
        "error: the checkpoint of step 6 could not be saved (File too large); the newest is "
        f"{tmp_path}/w/checkpoints/4, and the same command resumes from there"
    )
    assert steps_saved(tmp_path / "w") == [4]
    done = limited({}, *flags)
    assert "Resumes at step 4" in done.stdout
    assert_bit_equal(state_of(tmp_path / "w", 6), state_of(trained, 6))


@pytest.mark.promise("full-disk")
def test_late_writes_of_a_failed_save_are_removed(tmp_path, monkeypatch, capfd):
    """TensorStore has begun other writes by the time one fails; they recreate their folders.

    Orbax drops writes that have not begun, and the user sees no warning about them.
    """
    late, removed = tmp_path / "checkpoints" / "3.orbax-checkpoint-tmp" / "state", []

    async def write():
        pass

    def full(*_, **__):
        late.mkdir(parents=True)
        write()  # is never awaited
        raise OSError(errno.ENOSPC, "No space left on device")

    def sleep(_):
        removed.append(not late.exists())
        if len(removed) < 3:
            late.mkdir(parents=True)

    def fail():
        with saving(tmp_path) as saver:
            monkeypatch.setattr(saver._checkpointer, "save", full)
            monkeypatch.setattr(time, "sleep", sleep)
            saver.save(3, {})

    why = r"step 3 could not be saved \(No space left on device\); there is none"
    with pytest.raises(Stopped, match=why):
        fail()
    assert removed == [True] * 3
    assert steps_saved(tmp_path) == []
    assert capfd.readouterr().err.count("\n") == 1


@pytest.mark.promise("full-disk")
def test_your_own_files_beside_the_checkpoints_are_left_alone(tmp_path):
    """Keeps copies under other names and a file manager's file; removes what a killed run left."""
    there = tmp_path / "checkpoints"
    for name in ("3.mine", "best", "3.orbax-checkpoint-tmp", "1.removed"):
        (there / name).mkdir(parents=True)
        (there / name / "file").write_text(name)
    (there / ".DS_Store").write_text("x")
    with saving(tmp_path) as saver:
        assert {p.name for p in there.iterdir()} == {"3.mine", "best", ".DS_Store"}
        for step in (2, 3):
            saver.save(step, {"x": jnp.ones(3)})
    assert {p.name for p in there.iterdir()} == {"3", "3.mine", "best", ".DS_Store"}
    assert [p.name for p in (there / "3.mine").iterdir()] == ["file"]
    assert (there / "3" / "hashes.json").exists()


@pytest.mark.promise("full-disk")
def test_metrics_wait_for_room_and_no_line_is_torn(tmp_path, capfd):
    log = Log(tmp_path / "metrics.jsonl", 0, Run(), "x", 1)
    log.write({"step": 1, "loss": 1.0, **{f"{i:05}": 0 for i in range(10_000)}})
    try:
        limit_files((tmp_path / "metrics.jsonl").stat().st_size + 7)
        log.write({"step": 2, "loss": 2.0})
        log.write({"step": 3, "loss": 3.0})
    finally:
        limit_files(resource.RLIM_INFINITY)
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 1
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"\n")
    log.write({"step": 4, "loss": 4.0})
    log.close()
    assert [step for (step,) in records(tmp_path, "step")] == [1, 2, 3, 4]
    err = capfd.readouterr().err
    assert err.startswith(f"warning: {tmp_path}/metrics.jsonl could not be written (")
    assert err.count("\n") == 1


@pytest.mark.promise("full-disk")
@pytest.mark.full
def test_a_disk_that_is_really_full(run, book, tmp_path, trained):
    """Uses an almost full tmpfs of 12 MB, where mounting is allowed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "none", disk], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not allowed here; RLIMIT_FSIZE stands in above")
    try:
        shutil.copytree(trained, disk / "w")
        with (disk / "filler").open("wb") as filler:
            filler.truncate(0)
            os.posix_fallocate(filler.fileno(), 0, shutil.disk_usage(disk).free - 200_000)
        flags = (*TINY, book, "--mesh=4x2", "--log_every=1", "--steps=12", "--checkpoint_every=3")
        done = run("recipes.transformer", *flags, f"--workdir={disk / 'w'}", XLA_FLAGS=XLA_FLAGS)
        assert done.code == 1, done.err
        assert "the checkpoint of step 12 could not be saved (No space left on device)" in done.err
        assert {line.split(":")[0] for line in done.err.splitlines()} == {"warning", "error"}
        assert steps_saved(disk / "w") == [4, 6]
        assert all(checkpoint.verify(disk / "w" / "checkpoints" / s) == "" for s in "46")
        (disk / "filler").unlink()
        done = run("recipes.transformer", *flags, f"--workdir={disk / 'w'}", XLA_FLAGS=XLA_FLAGS)
        assert done.code == 0, done.err
        assert steps_saved(disk / "w") == [9, 12]
    finally:
        subprocess.run(["umount", disk], check=True)


# ---- two runs on one workdir -----------------------------------------------------------------------


IN_USE = "--workdir={path} is in use by a running process; wait for it to end, or use a different --workdir"


@pytest.mark.promise("one-run")
def test_only_what_saves_left_behind_is_removed(tmp_path):
    """Not a user's folder whose name begins like one of those."""
    ours = {"12.removed", "12.linking", "12.orbax-checkpoint-tmp-7"}
    for name in {*ours, "12", "12.removed_mine", "12.removed.old", "12.linking2", "my12.removed"}:
        (tmp_path / name).mkdir()
    assert {left.path.name for left in folders.at(tmp_path).unfinished()} == ours


def test_a_lock_is_free_only_if_its_process_ended_on_this_machine_and_in_this_container():
    boot, container, number, start = lock._process(os.getpid()).split()
    for owner, is_dead in (
        ((boot, container, number, start), False),
        ((boot, container, number, "1"), True),  # another process had this number
        ((boot, "pid:[1]", number, "1"), False),
        (("another-boot", container, number, "1"), False),
        ((), False),
    ):
        facts = {"pid": os.getpid(), "process": " ".join(owner)}
        assert lock._is_dead(facts) == is_dead, owner


def test_a_second_run_is_refused_while_the_first_holds_the_lock(tmp_path):
    run = Run(workdir=str(tmp_path))
    with saving(tmp_path, "x"):
        with pytest.raises(UserError) as caught:
            open_run("x", run, NoFlags())
        assert str(caught.value) == IN_USE.format(path=tmp_path)
    open_run("x", run, NoFlags()).close()
    assert steps_saved(tmp_path) == []


@pytest.mark.promise("one-run")
def test_a_run_that_came_and_went_while_another_compiled_is_not_overwritten(tmp_path):
    late = open_run("transformer", Run(workdir=str(tmp_path)), NoFlags())  # there is no lock yet
    with saving(tmp_path) as saver:
        saver.save(2, {"x": jnp.ones(3)})
    with pytest.raises(UserError, match=f"^--workdir={tmp_path} got step 2 from another run"):
        Saver(late, 1, saver._metadata, {})
    late.close()


@pytest.mark.promise("one-run")
@pytest.mark.full
def test_a_workdir_in_use_is_refused_until_its_run_is_dead(go, trained, tmp_path, book):
    shutil.copytree(trained, tmp_path / "w")
    flags = (*TINY, book, "--mesh=2", "--steps=100000", f"--workdir={tmp_path / 'w'}")
    command = [sys.executable, "-m", "recipes.transformer", *flags]
    env = os.environ | {"XLA_FLAGS": XLA_FLAGS}
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=env)
    try:
        for line in first.stdout:
            if line.startswith("Resumes "):
                break
        before = time.process_time()
        done = go("--steps=9")
        print(f"refused in {time.process_time() - before:.2f} s of processor time")
        assert done.code == 2
        assert done.err == f"error: {IN_USE.format(path=tmp_path / 'w')}\n"
    finally:
        first.kill()
        first.wait()
        first.stdout.close()
    found = open_run("transformer", Run(workdir=str(tmp_path / "w"), **UNCHANGED), NoFlags())
    assert found.step >= 6
    found.close()
