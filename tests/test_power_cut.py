"""A power cut loses at most a checkpoint that is not reported as saved: the calls are traced."""

import os

import jax.numpy as jnp

from tests.runs import saving


def test_all_of_a_checkpoint_is_on_disk_before_it_is_committed(tmp_path, monkeypatch):
    calls = []  # ("sync", inode) and ("rename", where to)
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(
        os, "fsync", lambda n: calls.append(("sync", os.fstat(n).st_ino)) or fsync(n)
    )
    for name in ("rename", "replace"):
        monkeypatch.setattr(
            os, name, lambda a, b, **more: calls.append(("rename", str(b))) or rename(a, b, **more)
        )
    with saving(tmp_path) as saver:
        for step in (1, 2):
            calls.clear()
            saver.save(step, {"params": {"w": jnp.arange(8.0) + step}})
            saver.wait()  # from here on it may be reported
            folder = tmp_path / "checkpoints" / str(step)
            commit = calls.index(("rename", str(folder)))
            before = {number for what, number in calls[:commit] if what == "sync"}
            after = {number for what, number in calls[commit:] if what == "sync"}
            # Orbax's own marks are written as it commits; without them a folder is no checkpoint.
            late = {"commit_success.txt", "_CHECKPOINT_METADATA"}
            for path in (folder, *folder.rglob("*")):
                assert path.stat().st_ino in (after if path.name in late else before), path
            assert folder.parent.stat().st_ino in after, "the rename itself"
