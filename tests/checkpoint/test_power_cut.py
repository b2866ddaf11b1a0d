"""A power cut loses at most a checkpoint not yet reported as saved; system calls are traced."""

import os
import pathlib

import jax.numpy as jnp
import pytest

from recipes.common.hf.folder import new_folder
from recipes.common.runtime import Run
from recipes.common.train.metrics import Log
from tests.support.runs import saving, talker

pytestmark = pytest.mark.promise("power-cut")


@pytest.fixture
def calls(monkeypatch):
    """Records ("sync", inode) and ("rename", target) calls of this process, in order."""
    made = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(
        os, "fsync", lambda n: made.append(("sync", os.fstat(n).st_ino)) or fsync(n)
    )
    for name in ("rename", "replace"):
        monkeypatch.setattr(
            os, name, lambda a, b, **more: made.append(("rename", str(b))) or rename(a, b, **more)
        )
    return made


def synced(calls) -> set[int]:
    return {number for what, number in calls if what == "sync"}


def around(calls, folder: pathlib.Path) -> tuple[set[int], set[int]]:
    """Inodes synced before a folder is renamed, and those synced afterwards."""
    commit = calls.index(("rename", str(folder)))
    return synced(calls[:commit]), synced(calls[commit:])


def test_all_of_a_checkpoint_is_on_disk_before_it_is_committed(tmp_path, calls):
    workdir = tmp_path / "runs" / "w"
    with saving(workdir) as saver:
        parents = {path.stat().st_ino for path in (tmp_path, workdir.parent, workdir)}
        assert parents <= synced(calls), "the names of the folders themselves"
        for step in (1, 2):
            calls.clear()
            state = {"params": {"w": jnp.arange(8.0) + step}}
            saver.save(step, state)
            saver.wait()  # from here on it may be reported
            folder = workdir / "checkpoints" / str(step)
            before, after = around(calls, folder)
            # Orbax's own marks are written as it commits; without them a folder is no checkpoint.
            late = {"commit_success.txt", "_CHECKPOINT_METADATA"}
            for path in (folder, *folder.rglob("*")):
                assert path.stat().st_ino in (after if path.name in late else before), path
            assert folder.parent.stat().st_ino in after, "the rename itself"
            # The best one, before the former best goes.
            saver.keep_best(step, state, {"loss": 1 / step})
            saver.wait()
            best = workdir / "best" / str(step)
            before, after = around(calls, best)
            assert {path.stat().st_ino for path in (best, *best.rglob("*"))} <= before
            assert best.parent.stat().st_ino in after
            if step == 2:
                moves = [path for what, path in calls if what == "rename"]
                assert moves.index(str(best)) < moves.index(f"{workdir}/best/1.removed")


def test_lines_of_metrics_are_on_disk_before_a_checkpoint_of_their_steps(tmp_path, calls):
    path = tmp_path / "metrics.jsonl"
    log = Log(path, 0, Run(steps=2), "tokens", 1)
    log.write({"step": 1})
    log.flush()  # what a Saver calls before each commit
    assert {path.stat().st_ino, tmp_path.stat().st_ino} <= synced(calls), "and its name"
    log.close()
    calls.clear()
    Log(path, 1, Run(steps=2), "tokens", 1).close()  # a run that resumes writes the file anew
    before, after = around(calls, path)
    assert path.stat().st_ino in before
    assert tmp_path.stat().st_ino in after
    assert path.read_text() == '{"step": 1}\n'


def test_published_imported_and_exported_files_are_on_disk_before_the_report(tmp_path, calls):
    for name, write in {"zoo": lambda folder: talker(folder, 32), "hf": export}.items():
        calls.clear()
        folder = tmp_path / name / "new" / "mine"
        write(folder)
        before, after = around(calls, folder)
        assert {path.stat().st_ino for path in (folder, *folder.rglob("*"))} <= before
        assert folder.parent.stat().st_ino in after, "the rename itself"
        assert {path.stat().st_ino for path in (tmp_path, tmp_path / name)} <= before


def export(folder: pathlib.Path) -> None:
    with new_folder(folder, card="A card") as beside:
        (beside / "config.json").write_text("{}")
