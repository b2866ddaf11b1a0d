"""Several real processes on one host train like one; none hangs when one dies."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from data import images, text
from data.batches import held_out_batches, train_batches
from recipes.common import checkpoint
from recipes.common.runtime import mesh, processes
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.mesh import make_mesh
from tests.conftest import ROOT
from tests.support import small_tokenizers
from tests.support.devices import gpus
from tests.support.local_processes import FLAGS, IMPATIENT, LOST, SMALLEST, LocalProcesses
from tests.support.local_processes import smallest as smallest
from tests.support.quick import quick as quick
from tests.support.runs import records, state_of, steps_saved, to_reinforce

pytestmark = pytest.mark.promise("many-processes")


@pytest.fixture
def alone(inside, quick, book):
    """Returns a function of flags that runs the recipe in this one process."""

    def command(*flags):
        done = inside("recipes.transformer", *FLAGS, book, *flags)
        assert done.code == 0, done.err
        return done.out

    return command


@pytest.mark.full
def test_four_then_two_then_one_process_train_like_one(alone, book, tmp_path):
    a, b = tmp_path / "one", tmp_path / "many"
    for steps in (2, 4, 6):
        alone(f"--steps={steps}", f"--workdir={a}")
    data = text.load(book.removeprefix("--dataset="), seq_len=32)
    feed = iter(train_batches(data, batch_size=16, seed=0))
    want = [next(feed) for _ in range(6)]
    held_out = list(held_out_batches(data, 16))

    for count, first in ((4, 0), (2, 2)):
        (tmp_path / str(count)).mkdir()
        flags = (*FLAGS, book, f"--steps={first + 2}", f"--workdir={b}")
        ends = LocalProcesses(count, *flags, watch=tmp_path / str(count)).finish()
        for index, (code, out, err) in enumerate(ends):
            assert (code, err) == (0, ""), err
            assert (out == "") == (index > 0), "only the first process prints"
        out = ends[0][1]
        assert f"8 simulated CPU devices in {count} processes" in out
        assert "Gloo" not in out
        # Together they fed the same global batches, each its own rows, and read no others.
        parts = [np.load(tmp_path / str(count) / f"{i}.npz") for i in range(count)]
        for name in data.filler:
            fed = np.concatenate([part[name] for part in parts], axis=1)
            batches = [*want[first : first + 2], want[first + 2], *held_out]  # one is prefetched
            np.testing.assert_array_equal(fed, [batch[name] for batch in batches])
            assert all(part[name].shape[1] == 16 // count for part in parts)
        read = [set(map(tuple, part["read"].tolist())) for part in parts]
        assert sum(map(len, read)) == len(set.union(*read)), "two processes read the same row"
        # Files are hashed by the process that wrote them; those of other processes' runs, shared out.
        hashed = [part["hashed"].tolist() for part in parts]
        own = [
            [name for name in names if f"ocdbt.process_{i}/" in name]
            for i, names in enumerate(hashed)
        ]
        assert all(own), hashed
        if first == 0:
            assert own[1:] == hashed[1:]
        else:
            resumed = [len(names) for names in hashed]
            assert max(resumed) < 0.8 * sum(resumed), resumed
        # Each wrote the shards on its own devices.
        state = b / "checkpoints" / str(first + 2) / "state"
        sizes = [
            sum(p.stat().st_size for p in (state / f"ocdbt.process_{i}" / "d").iterdir())
            for i in range(count)
        ]
        assert max(sizes) < 2 * sum(sizes) / count, sizes
    out = alone("--steps=6", f"--workdir={b}")
    assert "Resumes at step 4" in out

    fields = ("step", "loss", "grad_norm", "learning_rate")
    assert [step for step, *_ in records(b, *fields)] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(records(a, *fields), records(b, *fields), rtol=2e-5)
    held = ("step", "held_out_loss", "held_out_targets")
    assert [r[2] for r in records(a, *held)] == [r[2] for r in records(b, *held)]
    np.testing.assert_allclose(records(a, *held), records(b, *held), rtol=2e-5)


# Notes the answers of each process, and how many rewards it computes.
WATCHED_ROLLOUTS = """
import json, pathlib
from recipes.common.generation.rollouts import Sampler
from recipes.common.reinforcement.rewards import Rewards
from recipes.common.runtime import processes

def watch(owner, name):
    call = getattr(owner, name)
    def watched(self, *arguments):
        result = call(self, *arguments)
        log = pathlib.Path("{}") / f"{{processes.index()}}.jsonl"
        with log.open("a") as file:
            tokens = result.tokens_BN.tolist() if owner is Sampler else len(result)
            file.write(json.dumps([owner.__name__, tokens]) + "\\n")
        return result
    setattr(owner, name, watched)

watch(Sampler, "__call__")
watch(Rewards, "__call__")
"""


@pytest.mark.full
def test_two_processes_answer_and_learn_like_one(inside, quick, tmp_path):
    """Each makes the same answers; the first one alone asks for rewards, and tells the other."""
    a, b = tmp_path / "one", tmp_path / "two"
    flags = (
        "--mesh=4x2", "--seq_len=48", "--max_new_tokens=6", "--group_size=4", "--steps=3",
        "--batch_size=8", "--log_every=1", "--learning_rate=0.003", "--warmup_steps=1",
        "--eval_every=2", "--updates=2", "--sample_rules=tp",
        *to_reinforce(tmp_path),
    )  # fmt: skip
    done = inside("recipes.grpo", *flags, f"--workdir={a}")
    assert done.code == 0, done.err
    around = WATCHED_ROLLOUTS.format(tmp_path)
    run = LocalProcesses(2, *flags, f"--workdir={b}", around=around, recipe="grpo")
    for code, _, err in run.finish():
        assert (code, err) == (0, ""), err
    first, second = (
        [json.loads(line) for line in (tmp_path / f"{i}.jsonl").read_text().splitlines()]
        for i in range(2)
    )
    assert second == [line for line in first if line[0] == "Sampler"], "the same answers"
    assert [line[1] for line in first if line[0] == "Rewards"] == [1, 16, 16, 1, 16, 1]
    samples = [(folder / "samples.jsonl").read_text() for folder in (a, b)]
    assert samples[0] == samples[1]
    fields = ("step", "reward", "loss", "grad_norm", "entropy", "mismatch")
    assert len(records(b, *fields)) == 3
    np.testing.assert_allclose(records(a, *fields), records(b, *fields), rtol=2e-5, atol=2e-6)


# Orders devices so that those of a process lie apart, as on the rings of a TPU's chips.
RINGS = """
from recipes.common.runtime import mesh
_arrange = mesh.arrange
def arrange(axes, devices):
    inside = _arrange(axes, devices)
    order = [0, 6, 4, 1, 2, 7, 5, 3]  # process 0 has places 0, 3, 4, 7 and process 1 the others
    return mesh.Mesh(inside.devices[order], inside.axis_names, axis_types=inside.axis_types)
mesh.arrange = arrange
"""


@pytest.mark.full
def test_processes_whose_devices_lie_apart_train_like_one(alone, book, tmp_path):
    """They train on packed rows of two sources, evaluate, and agree on the best checkpoint."""
    a, b, other = tmp_path / "one", tmp_path / "two", tmp_path / "other.txt"
    other.write_text((ROOT / "zoo" / "moe.py").read_text()[:20_000])
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(small_tokenizers.byte_level()[tokenizer.name])
    flags = ("--mesh=8", "--steps=6", "--eval_every=2", "--keep_best")
    flags += (f"{book}@0.7,{other}@0.3", f"--tokenizer={tokenizer}")
    alone(*flags, f"--workdir={a}")
    run = LocalProcesses(2, *FLAGS, *flags, f"--workdir={b}", watch=tmp_path, around=RINGS)
    for code, _, err in run.finish():
        assert (code, err) == (0, ""), err
    rows = [set(map(tuple, np.load(tmp_path / f"{i}.npz")["read"].tolist())) for i in range(2)]
    assert not rows[0] & rows[1], "each read its own"
    assert len({tokens for tokens, _ in rows[0]}) == 4, "trained on and held out of both sources"
    fields = ("step", "loss", "grad_norm")
    np.testing.assert_allclose(records(a, *fields), records(b, *fields), rtol=2e-5)
    held = ("step", "held_out_loss", "held_out_targets")
    evaluations = records(b, *held)
    assert [step for step, *_ in evaluations] == [2, 4, 6]
    np.testing.assert_allclose(records(a, *held), evaluations, rtol=1e-5)
    assert checkpoint.steps_in(b / "best") == [min(evaluations, key=lambda line: line[1])[0]]
    assert checkpoint.verify(checkpoint.find(b / "best").path) == ""


# Feeds batches to several meshes whose rows may lie across processes, and writes a checksum of each
# row that depends on the order of its tokens.
CHECKSUMS = """
import dataclasses, json, pathlib
import jax, jax.numpy as jnp
from data import images, text
from data.batches import held_out_batches, train_batches
from recipes.common.runtime import Devices, flag, make_mesh
from recipes.common.runtime.start import start
from recipes.common.sharding import make_layout
from recipes.common.train.feed import device_batches
from zoo import vit
from zoo.llama_relatives import Config, Transformer

@dataclasses.dataclass(frozen=True)
class Flags:
    dataset: str = flag("", "Text.")
    meshes: str = flag("", "Meshes, separated by semicolons.")
    folder: str = flag("", "Folder to write to.")

def checksums(batch):
    return {name: (x * (1 + jnp.arange(x.shape[1]) ** 2)[None]).sum(axis=1) for name, x in batch.items()}

def main(devices, flags):
    found, rules = {}, {"batch": "data", "seq": "seq"}
    for mesh in flags.meshes.split(";"):
        layout = make_layout(
            Transformer, Config.tiny(), make_mesh(mesh), rules, batch_size=16, seq_len=32
        )
        mine = layout.process_rows
        data = text.load(flags.dataset, seq_len=32)
        train = train_batches(data, 16, seed=3, first=5, rows=mine)
        sums, parts, run = [], set(), None
        for rows in (train, held_out_batches(data, 16, mine)):
            for _, (batch, _) in zip(range(3), device_batches(rows, layout)):
                run = run or layout.compile(checksums, batch, out_shardings=layout.replicated)
                sums.append({name: x.tolist() for name, x in jax.device_get(run(batch)).items()})
                parts |= {part.data.shape for x in batch.values() for part in x.addressable_shards}
        found[mesh] = {"rows": mine.tolist(), "parts": list(parts), "sums": sums}
    pictures = images.load("digits", crop=True, flip=True, seed=2)
    layout, sums = make_layout(vit.ViT, vit.Config.tiny(), make_mesh("8"), batch_size=16), []
    rows = train_batches(pictures, 16, seed=3, first=88, rows=layout.process_rows)
    for _, (batch, _) in zip(range(3), device_batches(rows, layout)):
        everywhere = jax.jit(lambda x: x, out_shardings=layout.replicated)(batch)
        sums.append({name: x.ravel().tolist() for name, x in jax.device_get(everywhere).items()})
    found["images"] = sums
    path = pathlib.Path(flags.folder) / f"{jax.process_index()}.json"
    path.write_text(json.dumps(found))

start(main, Devices(), Flags())
"""


@pytest.mark.full
def test_two_processes_with_stages_across_them_train_like_one(alone, book, tmp_path):
    """Each process runs one of two stages. Both must trace the same program, in any order of sets."""
    a, b = tmp_path / "one", tmp_path / "two"
    flags = ("--mesh=pipe=2,data=4", "--rules=fsdp_pp", "--steps=4")
    alone(*flags, f"--workdir={a}")
    ends = LocalProcesses(2, *FLAGS, book, *flags, f"--workdir={b}").finish()
    assert [(code, err) for code, _, err in ends] == [(0, "")] * 2
    assert "pipeline: 1f1b, 2 stages" in ends[0][1]
    fields = ("step", "loss", "grad_norm")
    assert len(records(b, *fields)) == 4
    np.testing.assert_allclose(records(a, *fields), records(b, *fields), rtol=2e-5)
    held = ("step", "held_out_loss", "held_out_targets")
    np.testing.assert_allclose(records(a, *held), records(b, *held), rtol=2e-5)


@pytest.mark.full
@pytest.mark.promise("batches")
@pytest.mark.parametrize("count", [2, 4])
def test_rows_that_lie_across_processes_are_those_of_one_process(count, book, tmp_path):
    """Each process reads the rows of its devices whole; each device gets only its positions.

    Pictures change at random, in two epochs here, and are the same on any number of processes.
    """
    sizes = {"data=1,seq=8": (1, 8), "data=2,seq=4": (2, 4), "data=4,seq=2": (4, 2)}
    flags = (book, f"--meshes={';'.join(sizes)}", f"--folder={tmp_path}")
    for code, out, err in LocalProcesses(count, *flags, program=CHECKSUMS).finish():
        assert (code, out, err) == (0, "", "")
    data = text.load(book.removeprefix("--dataset="), seq_len=32)
    train, held_out = iter(train_batches(data, 16, seed=3, first=5)), held_out_batches(data, 16)
    weights = 1 + np.arange(32) ** 2
    whole = [batch for feed in (train, held_out) for _, batch in zip(range(3), feed, strict=False)]
    wanted = [{name: (x @ weights).tolist() for name, x in batch.items()} for batch in whole]
    found = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(count)]
    pictures = images.load("digits", crop=True, flip=True, seed=2)
    shown = itertools.islice(train_batches(pictures, 16, seed=3, first=88), 3)
    shown = [{name: x.ravel().tolist() for name, x in batch.items()} for batch in shown]
    assert all(process["images"] == shown for process in found)
    for on, (rows, positions) in sizes.items():
        for number, process in enumerate(found):
            assert process[on]["sums"] == wanted, (on, number)
            assert process[on]["parts"] == [[16 // rows, 32 // positions]]
            across = min(
                rows, count
            )  # shares of the rows, each of them in count / across processes
            share = np.split(np.arange(16), across)[number // (count // across)]
            assert process[on]["rows"] == share.tolist(), (on, number)


@pytest.mark.full
def test_a_mesh_that_splits_an_inner_axis_between_processes_is_refused(tmp_path):
    flags = (*SMALLEST, "--mesh=1x8", f"--workdir={tmp_path / 'w'}")
    run = LocalProcesses(2, *flags, recipe="dot_relu_dot")
    for code, out, err in run.finish():
        assert (code, out) == (2, "")
        assert err == (
            "error: --mesh=1x8 would divide axis 'model' between 2 processes of 4 devices, but only "
            "the outermost may be; try --mesh=2x4\n"
        )
    assert not (tmp_path / "w").exists()


@pytest.mark.full
def test_a_signal_stops_all_at_the_same_step_and_a_death_ends_all(smallest, tmp_path):
    flags = ("--steps=100000", f"--workdir={tmp_path}", "--checkpoint_every=20")
    run = LocalProcesses(2, *SMALLEST, *flags, recipe="dot_relu_dot")
    run.read_until("Starts ")
    time.sleep(1)
    run.processes[1].send_signal(signal.SIGTERM)
    (code, out, err), other = run.finish()
    assert (code, err, other[:2]) == (0, "", (0, ""))
    assert "SIGTERM caught" in other[2], "JAX's own notice, where the signal came in"
    (step,) = steps_saved(tmp_path)[-1:]
    assert f"Stopped by SIGTERM after step {step}, saved in " in out
    assert int(state_of(tmp_path, step)["step"]) == step
    # The next start resumes there, until one of the two is killed.
    run = LocalProcesses(2, *SMALLEST, *flags, recipe="dot_relu_dot", around=IMPATIENT)
    run.read_until(f"Resumes at step {step}, ")
    while checkpoint.steps_in(tmp_path / "checkpoints")[-1] < step + 20:
        time.sleep(0.05)
    run.processes[1].kill()
    killed = time.monotonic()
    (code, _, err), _ = run.finish()
    print(f"the other ended {time.monotonic() - killed:.1f} s later")
    # Ours where its own collective fails first, else JAX's as its coordination service aborts it.
    assert code != 0
    assert any(message in err for message in LOST), err
    whole = checkpoint.steps_in(tmp_path / "checkpoints")[-1]
    out = smallest(*flags, f"--steps={whole + 1}")
    assert f"Resumes at step {whole}, " in out


@pytest.mark.full
def test_death_of_the_first_process_ends_the_others(tmp_path):
    flags = (*SMALLEST, "--steps=100000", f"--workdir={tmp_path}")
    run = LocalProcesses(2, *flags, recipe="dot_relu_dot")
    run.read_until("Starts ")
    time.sleep(1)
    run.processes[0].kill()
    killed = time.monotonic()
    _, (code, out, err) = run.finish()
    print(f"the other ended {time.monotonic() - killed:.1f} s later")
    assert code != 0
    assert out == ""
    assert any(message in err for message in LOST), err


def waits(which: int, seconds: int = 300) -> subprocess.Popen:
    """Starts one of two processes; the other never starts."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    code = f"""if True:
        from recipes.common.runtime import preemption, processes
        preemption.watch()
        processes.START_SECONDS = {seconds}
        print("waits", flush=True)
        processes.initialize(2, {which}, "localhost:{port}")
    """
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=-1, stderr=-1)
    process.stdout.readline()
    return process


@pytest.mark.full
@pytest.mark.parametrize(("which", "number"), [(0, signal.SIGTERM), (1, signal.SIGINT)], ids=str)
def test_a_signal_ends_a_process_that_waits_for_the_others(which, number):
    process = waits(which)
    time.sleep(1)
    process.send_signal(number)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (0, "")
    assert out == f"Stopped by {number.name} outside of training; the same command resumes.\n"


@pytest.mark.full
def test_waiting_for_a_process_that_never_comes_ends_with_one_line():
    process = waits(0, seconds=1)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (1, "")
    assert err == (
        "error: fewer than 2 processes started within 1 s; check the output of each, and start all of "
        "them again\n"
    )


# ---- how they find each other, without processes -------------------------------------------------


@pytest.mark.promise("user-errors")
def test_a_coordinator_that_is_not_there(monkeypatch):
    monkeypatch.setattr(processes, "_count", 1)
    monkeypatch.setattr(processes, "PATIENCE_SECONDS", 0)
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match="does not answer"):
            processes.initialize(2, 1, f"localhost:{port}")  # bound, but not listening
        taken.listen()
        with pytest.raises(UserError, match=r"can't be used .*use a different port"):
            processes.initialize(2, 0, f"localhost:{port}")


@pytest.mark.promise("user-errors")
def test_a_mesh_must_be_divisible_by_the_number_of_processes(monkeypatch):
    monkeypatch.setattr(processes, "_count", 3)
    with pytest.raises(UserError) as caught:
        make_mesh("4x2")
    assert str(caught.value) == (
        "--mesh=4x2 has 8 devices, not divisible by 3 processes; try --mesh=12x2"
    )
    assert dict(make_mesh("").shape) == {"data": 8}, "all that there are"
    # With accelerators it suggests those that there are.
    monkeypatch.setattr(mesh, "_only_cpu", lambda: False)
    monkeypatch.setattr(jax, "devices", lambda: gpus(3, 4))
    with pytest.raises(UserError, match=r"not divisible by 3 processes; try --mesh=6x2$"):
        make_mesh("4x2")
    assert os.environ["NPROC"] == "32"


@pytest.mark.promise("meshes-agree")
def test_simulated_devices_have_threads_for_two_collectives_each(monkeypatch):
    monkeypatch.delenv("NPROC")
    make_mesh("4x2")
    assert int(os.environ["NPROC"]) >= 2 * 8
