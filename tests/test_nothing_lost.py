"""Numbers that are not finite, signals, damaged checkpoints, full disks, two runs at once."""

import errno
import functools
import json
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
from recipes.common.cli import Run
from recipes.common.errors import Stopped
from recipes.common.metrics import Log
from recipes.common.optimizer import apply, gradients, skipping
from recipes.common.workdir import Workdir
from tests.conftest import ROOT
from tests.runs import TINY, assert_bit_equal, records, state_of, steps_saved


@pytest.fixture
def go(inside, book, tmp_path):
    """A function of flags that trains a tiny Transformer in tmp_path/w, in this process."""
    return functools.partial(
        inside, "recipes.transformer", *TINY, book, "--mesh=4x2", "--log_every=1",
        f"--workdir={tmp_path / 'w'}",
    )  # fmt: skip


@pytest.fixture
def at_step(monkeypatch):
    """A function of a step and an action, which then runs while that step is under way."""

    def hook(step, action):
        original = Log.step

        def wrapped(log, done, *rest):
            if done == step:
                action()
            return original(log, done, *rest)

        monkeypatch.setattr(Log, "step", wrapped)

    return hook


@pytest.fixture(scope="module")
def trained(tmp_path_factory, book):
    """A workdir with checkpoints of steps 4 and 6."""
    path = tmp_path_factory.mktemp("trained") / "w"
    flags = (*TINY, book, "--mesh=4x2", "--log_every=1", "--steps=6", "--checkpoint_every=4")
    command = [sys.executable, "-m", "recipes.transformer", *flags, f"--workdir={path}"]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    return path


# ---- numbers -------------------------------------------------------------------------------------


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


def test_a_skipped_update_leaves_parameters_and_moments_bit_equal():
    optimizer = optax.adam(0.1)
    params = {"w": jnp.arange(4.0)}
    state = {
        "params": params,
        "opt_state": optimizer.init(params),
        "step": jnp.int32(0),
        "rngs": {},
    }

    def loss(params, x):
        return jnp.sum(params["w"] * x), jnp.float32(1)

    def train_step(state, x):
        mean, grads = gradients(loss, state["params"], x)
        return apply(optimizer, state, grads), {"loss": mean, "grad_norm": optax.tree.norm(grads)}

    import flax.serialization

    state["opt_state"] = flax.serialization.to_state_dict(state["opt_state"])
    step = jax.jit(skipping(train_step, 1))
    good, bad = jnp.ones(4), jnp.array([1.0, jnp.nan, 1.0, jnp.inf])
    one, metrics = step(state, good)
    assert not metrics["skipped"]
    two, metrics = step(one, bad)
    assert metrics["skipped"]
    assert int(two["step"]) == 2
    jax.tree.map(np.testing.assert_array_equal, two | {"step": 0}, one | {"step": 0})
    three, _ = step(two, good)
    without, _ = step(one, good)
    jax.tree.map(np.testing.assert_array_equal, three | {"step": 0}, without | {"step": 0})
    assert skipping(train_step, 0) is train_step


def test_so_many_skipped_updates_in_a_row_are_tolerated_and_no_more(go, tmp_path, capfd):
    done = go("--steps=9", "--learning_rate=1e38", "--warmup_steps=0", "--skip_nonfinite=2")
    lines = done.err.splitlines()
    assert done.code == 1
    assert len(lines) == 3, done.err
    assert all("this update is skipped" in line for line in lines[:2])
    assert "the 3th update in a row" in lines[2].replace("3rd", "3th")
    skipped = [record for record in records(tmp_path / "w", "step", "loss", "skipped")]
    assert [s for _, _, s in skipped if s] == [1, 1]
    log = Log(tmp_path / "m.jsonl", 0, Run(steps=9, log_every=3, skip_nonfinite=1), "x", 1)
    for step, loss in enumerate([1.0, np.nan, 3.0, np.inf, 5.0, np.nan], start=1):
        log.step(step, {"loss": np.float32(loss), "skipped": not np.isfinite(loss)}, 0.0)
    log.settle()
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [(r["step"], r["loss"], r["skipped"]) for r in lines] == [(3, 3.0, 1), (6, None, 2)]


# ---- preemption ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_step_saves_and_goes_on_from_that_step(
    go, at_step, tmp_path, trained, name
):
    at_step(3, lambda: os.kill(os.getpid(), getattr(signal, name)))
    done = go("--steps=6", "--checkpoint_every=4")
    saved = tmp_path / "w" / "checkpoints" / "3"
    assert done.code == 0, done.err
    assert done.err == ""
    assert f"Stopped by {name} after step 3, saved in {saved}; " in done.out
    assert "Held-out" not in done.out
    assert steps_saved(tmp_path / "w") == [3]
    done = go("--steps=6", "--checkpoint_every=4")
    assert done.code == 0, done.err
    assert f"Resumes at step 3, from {saved}." in done.out
    assert_bit_equal(state_of(tmp_path / "w", 6), state_of(trained, 6))
    fields = ("step", "loss", "grad_norm")
    assert records(tmp_path / "w", *fields) == records(trained, *fields)


def test_a_second_sigint_stops_at_once():
    script = """
        import os, signal
        from recipes.common import preemption
        preemption.watch()
        with preemption.training():
            os.kill(os.getpid(), signal.SIGINT)
            print("goes on", preemption.requested(1), flush=True)
            os.kill(os.getpid(), signal.SIGINT)
            print("never", flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (130, "goes on SIGINT\n")
    assert done.stderr == "\nStopped at once; what was saved before is whole.\n"


def test_a_signal_outside_of_training_ends_the_process_at_once():
    script = "import os, signal; from recipes.common import preemption; preemption.watch(); os.kill(os.getpid(), signal.SIGTERM); print('never')"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout == "Stopped by SIGTERM outside of training; the same command goes on.\n"


# ---- damage --------------------------------------------------------------------------------------


def big_file(folder: pathlib.Path) -> pathlib.Path:
    return max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)


def flip(path: pathlib.Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def truncate(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGE = {
    "an array's file cut short": lambda f: truncate(big_file(f)),
    "an array's file gone": lambda f: big_file(f).unlink(),
    "a bit of an array flipped": lambda f: flip(big_file(f), 1000),
    "a bit of the tree's description flipped": lambda f: flip(f / "state" / "_METADATA", 100),
    "metadata that is no JSON": lambda f: (f / "metadata" / "metadata").write_text("{"),
    "a bit of the metadata flipped": lambda f: flip(f / "metadata" / "metadata", 20),
    "hashes that are no JSON": lambda f: truncate(f / "hashes.json"),
    "the item state gone": lambda f: shutil.rmtree(f / "state"),
    "the item data gone": lambda f: shutil.rmtree(f / "data"),
    "no commit marker": lambda f: (f / "commit_success.txt").unlink(),
    "an empty folder": lambda f: [shutil.rmtree(p) if p.is_dir() else p.unlink() for p in f.iterdir()],
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(trained, tmp_path, damage):
    shutil.copytree(trained, tmp_path / "w")
    folder = tmp_path / "w" / "checkpoints" / "6"
    assert checkpoint.verify(folder) == ""
    DAMAGE[damage](folder)
    bad = checkpoint.verify(folder)
    assert bad
    work = Workdir(Run(workdir=str(tmp_path / "w")), "transformer")
    assert work.step == 4
    assert work.origin().splitlines() == [
        f"Damaged: {folder}: {bad}. It goes to {tmp_path}/w/damaged.",
        f"Resumes at step 4, from {tmp_path}/w/checkpoints/4.",
    ]
    assert folder.exists(), "nothing moves before the run begins"
    work.close()


def test_a_run_goes_on_from_the_good_one_and_keeps_the_bad_one_aside(go, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "w")
    folder = tmp_path / "w" / "checkpoints" / "6"
    name = big_file(folder).relative_to(folder)
    flip(folder / name, 1000)
    content = (folder / name).read_bytes()
    done = go("--steps=6", "--checkpoint_every=4")
    assert done.code == 0, done.err
    assert f"Damaged: {folder}: {name} is not what was saved (its SHA-256 differs)." in done.out
    assert "Resumes at step 4" in done.out
    assert (tmp_path / "w" / "damaged" / "6" / name).read_bytes() == content
    assert_bit_equal(state_of(tmp_path / "w", 6), state_of(trained, 6))
    assert [s for (s,) in records(tmp_path / "w", "step")] == [1, 2, 3, 4, 5, 6, 6]


def test_every_byte_counts(trained, tmp_path):
    """One flipped bit anywhere in any file is found, but for the two that Orbax writes last."""
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


def test_no_good_checkpoint_is_a_mistake_to_mend_not_a_new_start(trained, tmp_path, go):
    shutil.copytree(trained, tmp_path / "w")
    for step in (4, 6):
        truncate(big_file(tmp_path / "w" / "checkpoints" / str(step)))
    done = go("--steps=6", "--checkpoint_every=4")
    assert done.code == 2
    assert "has no checkpoint that is whole (step 6: state/" in done.err
    assert steps_saved(tmp_path / "w") == [4, 6]


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


def limit_files(size: int) -> None:
    """No file of this process grows beyond `size` bytes: a real error, from the real writer."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


LIMITED = """
import resource, runpy, sys
from recipes.common.workdir import Workdir
from tests.test_nothing_lost import limit_files

def save(work, step, state, original=Workdir.save):
    work._join()
    limit_files(LIMITS.get(step, resource.RLIM_INFINITY))
    original(work, step, state)

LIMITS = eval(sys.argv.pop(1))
Workdir.save = save
runpy.run_module("recipes.transformer", run_name="__main__")
"""


@pytest.fixture
def limited(book, tmp_path):
    """As `go`, in a process where a save of a step in `limits` finds room for so many bytes a file."""

    def command(limits, *flags):
        flags = (*TINY, book, "--mesh=4x2", "--log_every=1", f"--workdir={tmp_path / 'w'}", *flags)
        return subprocess.run(
            [sys.executable, "-c", LIMITED, str(limits), *flags],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip

    return command


def test_a_failed_save_is_reported_and_the_next_one_works(limited, trained, tmp_path):
    done = limited({4: 5_000}, "--steps=6", "--checkpoint_every=2", "--keep_checkpoints=2")
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        "warning: the checkpoint of step 4 could not be saved (File too large); training goes on, "
        "and the next one is tried\n"
    )
    assert steps_saved(tmp_path / "w") == [2, 6], "2 stays: 4 was none"
    assert all(checkpoint.verify(tmp_path / "w" / "checkpoints" / s) == "" for s in "26")
    assert_bit_equal(state_of(tmp_path / "w", 6), state_of(trained, 6))
    fields = ("step", "loss")
    assert records(tmp_path / "w", *fields) == records(trained, *fields)


def test_a_last_save_that_fails_ends_the_run_cleanly(limited, trained, tmp_path):
    flags = ("--steps=6", "--checkpoint_every=2", "--keep_checkpoints=1")
    done = limited({6: 5_000}, *flags)
    assert done.returncode == 1
    warning, error = done.stderr.splitlines()
    assert warning.startswith(
        "warning: the checkpoint of step 6 could not be saved (File too large)"
    )
    assert error == (
        "error: the checkpoint of step 6 could not be saved (File too large); the newest is "
        f"{tmp_path}/w/checkpoints/4, and the same command goes on from there once there is room"
    )
    assert steps_saved(tmp_path / "w") == [4]
    done = limited({}, *flags)
    assert "Resumes at step 4" in done.stdout
    assert_bit_equal(state_of(tmp_path / "w", 6), state_of(trained, 6))


def test_what_a_failed_save_goes_on_writing_is_removed_too(tmp_path, monkeypatch, capfd):
    """TensorStore has begun other writes by the time one fails; they make their folders anew. And
    what Orbax drops before it has begun is not told to the user.
    """
    work = Workdir(Run(workdir=str(tmp_path)), "x")
    work.check_data({})
    work.begin(1, {"flags": {}, "versions": {}})
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

    monkeypatch.setattr(work._checkpointer, "save", full)
    monkeypatch.setattr(time, "sleep", sleep)
    work.save(3, {})
    assert removed == [True] * 3
    assert steps_saved(tmp_path) == []
    with pytest.raises(Stopped, match=r"step 3 could not be saved \(No space left on device\)"):
        work.close()
    assert capfd.readouterr().err.count("\n") == 1


def test_what_a_user_puts_beside_the_checkpoints_stays_as_it_is(tmp_path):
    """A copy under another name, the file manager's own file; what a killed run left goes."""
    there = tmp_path / "checkpoints"
    for name in ("3.mine", "best", "3.orbax-checkpoint-tmp", "1.removed"):
        (there / name).mkdir(parents=True)
        (there / name / "file").write_text(name)
    (there / ".DS_Store").write_text("x")
    work = Workdir(Run(workdir=str(tmp_path)), "x")
    work.check_data({})
    work.begin(1, {"flags": {}, "versions": {}})
    assert {p.name for p in there.iterdir()} == {"3.mine", "best", ".DS_Store"}
    for step in (2, 3):
        work.save(step, {"x": jnp.ones(3)})
    work.close()
    assert {p.name for p in there.iterdir()} == {"3", "3.mine", "best", ".DS_Store"}
    assert [p.name for p in (there / "3.mine").iterdir()] == ["file"]
    assert (there / "3" / "hashes.json").exists()


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


def test_a_disk_that_is_really_full(run, book, tmp_path, trained):
    """On a tmpfs of 12 MB, of which all but a little is taken; where mounting is allowed."""
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
        done = run("recipes.transformer", *flags, f"--workdir={disk / 'w'}")
        assert done.code == 1, done.err
        assert "the checkpoint of step 12 could not be saved (No space left on device)" in done.err
        assert {line.split(":")[0] for line in done.err.splitlines()} == {"warning", "error"}
        assert steps_saved(disk / "w") == [4, 6]
        assert all(checkpoint.verify(disk / "w" / "checkpoints" / s) == "" for s in "46")
        (disk / "filler").unlink()
        done = run("recipes.transformer", *flags, f"--workdir={disk / 'w'}")
        assert done.code == 0, done.err
        assert steps_saved(disk / "w") == [9, 12]
    finally:
        subprocess.run(["umount", disk], check=True)


# ---- two runs on one workdir -----------------------------------------------------------------------


def test_a_workdir_in_use_is_refused_until_its_run_is_dead(go, trained, tmp_path, book):
    shutil.copytree(trained, tmp_path / "w")
    flags = (*TINY, book, "--mesh=2", "--steps=100000", f"--workdir={tmp_path / 'w'}")
    command = [sys.executable, "-m", "recipes.transformer", *flags]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        for line in first.stdout:
            if line.startswith("Resumes "):
                break
        before = time.process_time()
        done = go("--steps=9")
        print(f"refused in {time.process_time() - before:.2f} s of processor time")
        assert done.code == 2
        assert done.err == (
            f"error: --workdir={tmp_path}/w is in use by a run that is alive; wait for it, or give "
            "another --workdir\n"
        )
    finally:
        first.kill()
        first.wait()
        first.stdout.close()
    work = Workdir(Run(workdir=str(tmp_path / "w")), "transformer")
    assert work.step >= 6
    work.close()
