"""When one of several processes fails, the others report it in time and nothing is lost."""

import hashlib
import json
import pathlib
import re
import signal
import socket
import sys
import threading
import time

import numpy as np
import pytest
from jax._src import distributed

from recipes.common import checkpoint
from recipes.common.checkpoint import integrity, run_folder, saver
from recipes.common.runtime import agreement, processes, start
from recipes.common.runtime.errors import UserError
from tests.support.local_processes import FLAGS, IMPATIENT, LOST, SMALLEST, LocalProcesses
from tests.support.local_processes import smallest as smallest
from tests.support.many_starts import played
from tests.support.quick import quick as quick
from tests.support.runs import records

pytestmark = pytest.mark.promise("processes-differ")

# A process whose disk is not shared finds other files under the same names.
OWN_DISK = """
import sys
from recipes.common.checkpoint import run_folder
if "--process_id=1" in sys.argv:
    appears = run_folder._appears
    run_folder._appears = lambda name: appears("/another_host" + name)
"""
OTHER_VERSION = """
import importlib.metadata, sys
version = importlib.metadata.version
if "--process_id=1" in sys.argv:
    importlib.metadata.version = lambda name: "0.0.1" if name == "optax" else version(name)
"""
# One of four can't write its part of a checkpoint from the second save on.
BAD_DISK = """
import sys
from recipes.common.checkpoint import store
import orbax.checkpoint as ocp
save, saves = ocp.PyTreeCheckpointHandler.async_save, []
async def fails(*arguments, **named):
    saves.append(1)
    if "--process_id=2" in sys.argv and len(saves) > 1:
        raise OSError(28, "No space left on device")
    return await save(*arguments, **named)
ocp.PyTreeCheckpointHandler.async_save = fails
"""


# ---- reported before anything is computed ------------------------------------------------------------


@pytest.mark.promise("many-processes")
@pytest.mark.full
@pytest.mark.parametrize(
    ("each", "around", "message"),
    [
        ([(), ("--learning_rate=0.5",)], "", "has --learning_rate=0.5, and process 0 has 0.1; start all with the same flags"),
        ([], OTHER_VERSION, "has optax 0.0.1, and process 0 has "),
        ([], OWN_DISK, "does not see what process 0 ("),
    ],
    ids=["flags", "version", "disk"],
)  # fmt: skip
def test_processes_that_differ_are_refused_at_the_start(each, around, message, tmp_path):
    flags = (*SMALLEST, "--steps=5", f"--workdir={tmp_path / 'w'}")
    run = LocalProcesses(2, *flags, each=each, around=around, recipe="dot_relu_dot")
    for code, out, err in run.finish():
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert "process 1 (" in err
        assert message in err
        assert err.count("\n") == 1, err
    assert list(tmp_path.iterdir()) == [], "nothing is written"


@pytest.mark.promise("many-processes")
@pytest.mark.full
def test_a_file_missing_on_one_process_ends_all(book, tmp_path):
    """Its error says why; the others don't wait until its heartbeats stop."""
    around = "import sys\nif '--process_id=1' in sys.argv: sys.argv[-1] = '--dataset=/none'\n"
    around += "from recipes.common.runtime import agreement; agreement.check = lambda *_: None\n"
    run = LocalProcesses(
        2, *FLAGS, "--steps=5", f"--workdir={tmp_path / 'w'}", around=around, each=[(book,)] * 2
    )
    started = time.monotonic()
    (code, _, err), (theirs, _, why) = run.finish()
    assert (theirs, why.count("\n")) == (2, 1)
    assert why.startswith("error: --dataset=/none")
    assert code != 0
    assert any(message in err for message in LOST), err
    print(f"both ended after {time.monotonic() - started:.1f} s")


def test_differences_between_processes_are_named():
    first = {"versions": {"jax": "1"}, "flags": {"--a": 1, "--b": 2}, "code": "x"}
    assert agreement.difference(first, first) == ""
    for other, message in (
        ({"versions": {"jax": "2"}}, "has jax 2, and process 0 has 1; install the same on all"),
        ({"flags": {"--a": 1, "--b": 3}}, "has --b=3, and process 0 has 2; start all with the same flags"),
        ({"code": "y"}, "runs different code than process 0; give all of them the same clone"),
    ):  # fmt: skip
        assert agreement.difference(first, first | other) == message


@pytest.mark.parametrize(
    ("differs", "flag"),
    [({}, "dataset"), ({"tokenizer": "0" * 64}, "tokenizer")],
    ids=["text", "tokens"],
)
def test_different_data_under_the_same_name_is_refused(
    differs, flag, inside, monkeypatch, tmp_path
):
    def decide(mine, work):
        if not isinstance(mine, list):
            return work([mine])
        host, ours = mine
        return work([mine, [f"not {host}", ours | {"fingerprint": "0" * 64} | differs]])

    monkeypatch.setattr(processes, "decide", decide)
    done = inside("recipes.dot_relu_dot", *SMALLEST, "--steps=1", f"--workdir={tmp_path / 'w'}")
    assert (done.code, done.out) == (2, "")
    host = socket.gethostname()
    assert re.fullmatch(
        rf"error: process 1 \(not {host}\) reads different content from --{flag} than process 0 \({host}\): "
        r"fingerprint 0{12}, not [0-9a-f]{12}; give all of them the same files\n", done.err
    )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_together_raises_the_first_mistake_on_all(monkeypatch):
    def mistaken():
        raise UserError("it is not there")

    monkeypatch.setattr(processes, "_count", 3)
    monkeypatch.setattr(processes, "decide", lambda mine, work: work(["", mine, mine]))
    with pytest.raises(UserError, match=r"^it is not there \(process 1, as 2 of 3\)$"):
        processes.run_on_all(mistaken)
    monkeypatch.setattr(processes, "decide", lambda mine, work: work([mine] * 3))
    with pytest.raises(UserError, match=r"^it is not there$"):
        processes.run_on_all(mistaken)
    assert processes.run_on_all(lambda: 7) == 7


def test_a_shared_folder_is_left_as_it_was(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "_count", 2)
    monkeypatch.setattr(processes, "decide", lambda mine, work: work([mine, mine]))
    run_folder._check_shared(tmp_path / "not" / "there")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(run_folder, "_appears", lambda name: False)
    with pytest.raises(UserError, match=r"--workdir=.* is not one folder: process 0 \("):
        run_folder._check_shared(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_error_without_a_message_ends_the_process_too(monkeypatch):
    said = []
    monkeypatch.setattr(processes, "_count", 2)
    monkeypatch.setattr(processes, "exit_now", said.append)
    monkeypatch.setattr(start.preemption, "watch", lambda resumes: None)
    monkeypatch.setattr(start, "_settle_libraries", lambda: None)
    monkeypatch.setattr(sys, "argv", ["recipe"])

    def main():
        raise AssertionError

    start.start(main)
    (message,) = said
    assert "can't continue without the others (AssertionError); start all of them" in message


def test_each_process_hashes_the_files_that_it_wrote(monkeypatch, tmp_path):
    """Process 0 hashes what nobody has, and deletes the messages."""
    folder = tmp_path / "3.orbax-checkpoint-tmp"
    for process in (0, 1):
        (folder / f"state/ocdbt.process_{process}").mkdir(parents=True)
        (folder / f"state/ocdbt.process_{process}/file").write_text(str(process))
    (folder / "state/manifest").write_text("")
    published = {}

    def unpublish(key):
        for name in [name for name in published if name.startswith(f"{key}/")]:
            del published[name]

    monkeypatch.setattr(processes, "_count", 2)
    monkeypatch.setattr(processes, "publish", published.__setitem__)
    monkeypatch.setattr(processes, "await_published", published.__getitem__)
    monkeypatch.setattr(processes, "unpublish", unpublish)
    hashed, sha256 = [], integrity.sha256
    monkeypatch.setattr(
        integrity, "sha256", lambda folder, names: hashed.append(names) or sha256(folder, names)
    )
    for process in (1, 0):
        monkeypatch.setattr(processes, "_id", process)
        saver._publish_digests(folder / "state")
    integrity.hash_before_commit(folder, saver._published_digests(folder))
    every = ["state/ocdbt.process_1/file", "state/ocdbt.process_0/file", "state/manifest"]
    assert hashed == [[name] for name in every]
    assert json.loads((folder / "hashes.json").read_text()) == {
        name: [len(content), hashlib.sha256(content).hexdigest()]
        for name, content in zip(every, (b"1", b"0", b""), strict=True)
    }
    assert not published


def test_damage_that_any_process_finds_is_found_by_all(monkeypatch):
    """A file that only one can't read is named, too; nobody waits for an answer."""
    name = "transformer.stdlib_3m"
    folder, sha256 = checkpoint.PUBLISHED / name, integrity.sha256
    names, shares = list(json.loads((folder / "hashes.json").read_text())), []

    def decide(mine, work, seconds):
        return work([mine, other])

    def hash_mine(folder, share):
        shares.append(share)
        return sha256(folder, share)

    monkeypatch.setattr(processes, "_count", 2)
    monkeypatch.setattr(processes, "_id", 1)
    monkeypatch.setattr(processes, "decide", decide)
    monkeypatch.setattr(integrity, "sha256", hash_mine)
    for other in ("", "state/d/1 can't be read (Permission denied)"):
        assert integrity.check_hashes_on_all(folder) == other
    assert shares == [names[1::2]] * 2

    def denied(folder, share):
        raise PermissionError(13, "Permission denied", "state/d/2")

    other = ""
    monkeypatch.setattr(integrity, "sha256", denied)
    bad = integrity.check_hashes_on_all(folder)
    assert bad == "state/d/2 can't be read (Permission denied)"


@pytest.mark.parametrize(("recipe", "flags"), [("generate", []), ("evaluate", ["--dataset=a"])])
def test_a_model_to_be_used_is_verified_together(recipe, flags, inside, monkeypatch, tmp_path):
    """The second process hashes its share, and opens the checkpoint that the first found."""
    found = {"named": "--restore_from=b", "folder": str(tmp_path), "hf_name": "", "base": None}
    (tmp_path / "hashes.json").write_text(json.dumps({"a": [1, "0"], "b": [1, "0"]}))
    hashed = []
    monkeypatch.setattr(integrity, "sha256", lambda _, names: hashed.extend(names) or {})
    monkeypatch.setattr(processes, "_id", 1)
    monkeypatch.setattr(processes, "broadcast_from_first", lambda _: found)
    monkeypatch.setattr(processes, "decide", lambda mine, work, *_: work(["", mine]))
    # Two from there on: this one has all the devices.
    make_mesh = lambda _: monkeypatch.setattr(processes, "_count", 2)  # noqa: E731
    monkeypatch.setattr("recipes.common.runtime.make_mesh", make_mesh)
    monkeypatch.setattr(processes, "exit_unless_all_do", lambda code: None)
    done = inside(f"recipes.{recipe}", "--restore_from=b", *flags)
    assert hashed == ["b"]
    assert done.err.startswith("error: --restore_from=b can't be read (No such file or directory)")


class Service:
    """JAX's coordination service in this process, which counts the bytes read."""

    def __init__(self):
        self.published, self.read, self.new = {}, 0, threading.Condition()

    def key_value_set(self, key, value):
        with self.new:
            self.published[key] = value
            self.new.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self.new:
            assert self.new.wait_for(lambda: key in self.published, 20), key
            self.read += len(self.published[key])
            return self.published[key]

    def key_value_delete(self, key):
        pass


def test_startup_messages_are_linear_in_the_number_of_processes(monkeypatch):
    """Otherwise process 0 of a thousand would send gigabytes."""

    def read_by_each(count):
        monkeypatch.setattr(distributed.global_state, "client", Service())
        played(count)()
        return distributed.global_state.client.read / count

    assert read_by_each(32) < 1.2 * read_by_each(8)


# ---- while it runs -------------------------------------------------------------------------------


@pytest.mark.promise("many-processes")
@pytest.mark.full
@pytest.mark.parametrize("which", [1, 0], ids=["one", "the coordinator"])
def test_a_process_that_hangs_ends_the_run_within_the_heartbeats_time(which, tmp_path):
    flags = (*SMALLEST, "--steps=100000", f"--workdir={tmp_path}")
    run = LocalProcesses(2, *flags, around=IMPATIENT, recipe="dot_relu_dot")
    run.read_until("Starts ")
    time.sleep(1)
    run.processes[which].send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    _, err = run.processes[1 - which].communicate(timeout=120)
    took = time.monotonic() - stopped
    run.processes[which].kill()
    run.finish()
    print(f"the other ended {took:.1f} s later")
    assert took < 25, "the heartbeat's time is 6 s"
    assert run.processes[1 - which].returncode != 0
    assert any(message in err for message in LOST), err


@pytest.mark.promise("many-processes")
@pytest.mark.full
def test_a_save_that_fails_on_one_of_four_stops_all_with_the_newest_checkpoint(smallest, tmp_path):
    """They stop at once, since the next save may be hours away."""
    common = (*SMALLEST, "--checkpoint_every=10", "--schedule=constant", "--warmup_steps=0")
    flags = (*common, f"--workdir={tmp_path}")
    around = IMPATIENT + BAD_DISK
    run = LocalProcesses(4, *flags, "--steps=100000", around=around, recipe="dot_relu_dot")
    ends = run.finish()
    assert ends[2][0] == 1, ends
    assert (
        "error: the checkpoint of step 20 could not be saved (No space left on device); the newest is "
        in ends[2][2]
    )
    for code, _, err in (*ends[:2], ends[3]):
        assert code != 0
        assert any(message in err for message in LOST), err
    whole = checkpoint.steps_in(tmp_path / "checkpoints")
    assert whole == [10], ends
    assert checkpoint.verify(tmp_path / "checkpoints" / "10") == ""
    assert max(step for step, _ in records(tmp_path, "step", "loss")) < 30
    # Two of the four go on from there, with the same batches.
    for code, out, err in LocalProcesses(2, *flags, "--steps=13", recipe="dot_relu_dot").finish():
        assert (code, err) == (0, ""), err
        assert not out or "Resumes at step 10" in out
    lines = records(tmp_path, "step", "loss")
    assert [step for step, _ in lines] == list(range(1, 14))
    other = pathlib.Path(f"{tmp_path}-other")
    smallest(*common, "--steps=13", f"--workdir={other}")
    np.testing.assert_allclose(lines, records(other, "step", "loss"), rtol=2e-5)
