"""Evaluation while training, the best checkpoint, TensorBoard, profiles, MFU, the loss picture."""

import contextlib
import functools
import io
import itertools
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data import synthetic
from recipes.common import checkpoint
from recipes.common.checkpoint.saver import HELD_OUT
from recipes.common.report import flops, picture
from recipes.common.runtime import processes, terminal
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.flags import Run
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.layout import Layout
from recipes.common.sharding.shape import trace_shape
from recipes.common.train import sinks
from recipes.common.train.beside import beside
from recipes.common.train.evaluation import Evaluation, in_words
from recipes.common.train.metrics import Log
from tests.conftest import ROOT
from tests.support.quick import quick as quick
from tests.support.runs import TINY, assert_bit_equal, records, saving, state_of, steps_saved
from zoo.llama_relatives import Config, Transformer

pytestmark = pytest.mark.promise("watching")

STEPS, EVERY, HALF = 12, 4, 8
WATCH = (f"--eval_every={EVERY}", "--keep_best", "--tensorboard", "--profile=2:3")
HELD_OUT_FIELDS = ("step", "held_out_loss", "held_out_perplexity", "held_out_bits_per_byte")
FIELDS = ("step", "loss", "grad_norm", "learning_rate")


@pytest.fixture
def train(inside, quick, book):
    """Returns a function of a workdir and flags that trains a tiny Transformer."""

    def command(workdir, *flags):
        flags = (*TINY, book, "--mesh=4x2", "--log_every=1", *flags, f"--workdir={workdir}")
        done = inside("recipes.transformer", *flags)
        assert (done.code, done.err) == (0, "")
        return done.out

    return functools.partial(command)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("watched")


@pytest.fixture
def watched(place, train, monkeypatch):
    """(folder, output) of a run of 12 steps with everything on, made on first use."""
    if not (place / "out").exists():
        compiled, lower = [], Layout.lower
        monkeypatch.setattr(
            Layout, "lower", lambda *a, **k: compiled.append(str(a[1])) or lower(*a, **k)
        )
        out = train(place / "w", f"--steps={STEPS}", f"--checkpoint_every={EVERY}", *WATCH)
        (place / "out").write_text(out)
        (place / "compiled").write_text("\n".join(compiled))
    return place / "w", (place / "out").read_text()


# ---- evaluation ----------------------------------------------------------------------------------


def test_evaluation_changes_no_step_and_is_compiled_once(watched, train, tmp_path):
    folder, out = watched
    train(tmp_path / "plain", f"--steps={STEPS}")
    assert records(folder, *FIELDS) == records(tmp_path / "plain", *FIELDS)
    assert_bit_equal(state_of(folder, STEPS), state_of(tmp_path / "plain", STEPS))
    held_out = records(folder, *HELD_OUT_FIELDS)
    assert [step for step, *_ in held_out] == [4, 8, 12]
    assert held_out[-1:] == records(tmp_path / "plain", *HELD_OUT_FIELDS)
    for _, nats, perplexity, bits in held_out:
        assert perplexity == pytest.approx(np.exp(nats))
        assert bits == pytest.approx(nats / np.log(2)), "a token is a byte here"
    assert f"step 4/12  held-out loss {held_out[0][1]:.4f}, perplexity " in out
    assert (folder.parent / "compiled").read_text().count(".sums ") == 1


def test_work_is_beside_the_main_thread_on_cpus_of_one_process_alone(monkeypatch):
    mesh, threads = make_mesh("1"), []

    def work():
        threads.append(threading.current_thread())
        raise UserError("two heads")

    for process_count, expected in ((1, "beside"), (2, threading.current_thread().name)):
        monkeypatch.setattr(processes, "_count", process_count)
        value = beside(mesh, work)
        with pytest.raises(UserError, match="two heads"):
            value()
        assert threads.pop().name == expected
    wait = threading.Event()
    monkeypatch.setattr(processes, "_count", 1)
    value = beside(mesh, wait.wait)
    wait.set()  # a main thread that waited would never come here
    assert value() is True


def test_bits_per_byte_count_the_bytes_behind_the_tokens():
    data = synthetic.load(4, 4, 0)._replace(held_out_bytes=300)
    nats, tokens = np.float64(200), np.float64(100)
    metrics = Evaluation(None, data).metrics({"loss": (nats, tokens), "confusion": np.ones(3)})
    want = {"loss": 2, "targets": 100, "perplexity": np.exp(2), "bits_per_byte": 200 / np.log(2) / 300}  # fmt: skip
    assert metrics == pytest.approx(want)
    assert in_words({"loss": (nats, tokens)}, 300) == (
        "loss 2.0000 nats/token, perplexity 7.39, 0.9618 bits/byte, over 100 tokens, 300 bytes"
    )
    assert Evaluation(None, synthetic.load(4, 4, 0)).metrics({"loss": (nats, tokens)}) == {
        "loss": 2
    }


def test_each_evaluation_is_there_once_after_a_kill(watched, train, tmp_path):
    """Simulates a kill after step 8 was saved, before its evaluation was logged and it became best."""
    folder, _ = watched
    shutil.copytree(folder, tmp_path / "w")
    shutil.rmtree(tmp_path / "w" / "checkpoints" / str(STEPS))
    shutil.rmtree(tmp_path / "w" / "best")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    at = next(i for i, x in enumerate(lines) if json.loads(x)["step"] == HALF and "held" in x)
    (tmp_path / "w" / "metrics.jsonl").write_text("\n".join(lines[:at]) + '\n{"step": 8, "hel')
    train(tmp_path / "w", f"--steps={STEPS}", f"--checkpoint_every={EVERY}", *WATCH[:-1])
    for fields in (FIELDS, HELD_OUT_FIELDS):
        assert records(tmp_path / "w", *fields) == records(folder, *fields)
    assert os.listdir(tmp_path / "w" / "best") == os.listdir(folder / "best") == [str(STEPS)]
    assert_bit_equal(state_of(tmp_path / "w", STEPS), state_of(folder, STEPS))
    check_board(tmp_path / "w")


def test_the_best_checkpoint_is_restored_like_any_other(watched, inside, train, tmp_path, book):
    folder, out = watched
    assert f"Best checkpoint: {folder}/best/12\n" in out
    ((_, held_out, *_),) = records(folder, *HELD_OUT_FIELDS)[-1:]
    for path in ("best", "best/12"):
        again = train(tmp_path / "e", "--steps=0", f"--restore_from={folder / path}")
        assert f"Held-out loss {held_out:.4f} nats/byte" in again
    _, metadata = checkpoint.restore(folder / "best", make_mesh("2x4"))
    assert metadata["step"] == STEPS


# ---- the best checkpoint -------------------------------------------------------------------------


def state(step):
    return {"x": jnp.full(1_000, step, jnp.float32)}


def kept(workdir: pathlib.Path) -> list[int]:
    """Steps in best/, after checking that each is whole."""
    steps = checkpoint.steps_in(workdir / "best")
    assert all(checkpoint.verify(workdir / "best" / str(step)) == "" for step in steps)
    return steps


def test_the_best_checkpoint_stays_and_costs_no_bytes_twice(tmp_path):
    with saving(tmp_path, keep=1) as saver:
        for step, loss in ((1, 3.0), (2, 5.0), (3, np.nan), (4, 3.0)):
            saver.save(step, state(step))
            saver.keep_best(step, state(step), {"loss": loss})
            saver.wait()
            assert kept(tmp_path) == [1]
        assert steps_saved(tmp_path) == [4], "the others are gone, and the best one is not"
        saver.keep_best(5, state(5), {"loss": 2.0})  # it is not saved yet
        saver.wait()
        assert kept(tmp_path) == [5]
        assert steps_saved(tmp_path) == [5]
        ours, theirs = (next((tmp_path / f / "5" / "state").rglob("d/*")) for f in ("best", "checkpoints"))  # fmt: skip
        assert ours.samefile(theirs)
    with saving(tmp_path) as saver:  # started again, it knows what is best
        saver.save(6, state(6))
        saver.keep_best(6, state(6), {"loss": 2.5})
    assert kept(tmp_path) == [5]
    assert json.loads((tmp_path / "best" / "5" / HELD_OUT).read_text()) == {"loss": 2.0}


class Killed(BaseException):
    pass


def test_a_kill_at_any_instant_leaves_a_best_checkpoint(tmp_path, monkeypatch):
    """Kills before each change to the file system that keeping a new best checkpoint makes."""
    with saving(tmp_path / "w", keep=2) as saver:
        saver.save(1, state(1))
        saver.keep_best(1, state(1), {"loss": 3.0})
        saver.save(2, state(2))
    changes = [(os, name) for name in ("link", "mkdir", "unlink", "rmdir", "rename")]
    changes += [(pathlib.Path, name) for name in ("rename", "write_text")]
    for after in range(100):
        workdir, left = tmp_path / str(after), [after]
        shutil.copytree(tmp_path / "w", workdir)

        def dying(change, left=left):
            def call(*args, **kwargs):
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                return change(*args, **kwargs)

            return call

        with saving(workdir) as saver, monkeypatch.context() as patch:
            for where, name in changes:
                patch.setattr(where, name, dying(getattr(where, name)))
            with contextlib.suppress(Killed):
                saver._link(2, {"loss": 2.0})
        assert kept(workdir) in ([1], [2], [1, 2]), after
        with saving(workdir) as saver:
            assert len(kept(workdir)) == 1
            assert all(p.name.isdigit() for p in (workdir / "best").iterdir()), "nothing is left"
            saver.keep_best(2, state(2), {"loss": 2.0})
        assert kept(workdir) == [2]
        if left[0] >= 0:
            break
    assert 10 < after < 99, "each change has been the last one"


def test_without_hard_links_files_are_copied(tmp_path, monkeypatch):
    def none(*_):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", none)
    with saving(tmp_path) as saver:
        saver.keep_best(1, state(1), {"loss": 1.0})
    assert kept(tmp_path) == [1]


# ---- watching ------------------------------------------------------------------------------------


def check_board(folder: pathlib.Path) -> None:
    """TensorBoard's own reader finds what metrics.jsonl has, each step once."""
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    tags = set()
    for key in json.loads((folder / "metrics.jsonl").read_text().splitlines()[0]).keys() - {"step"}:
        tags |= {(f"train/{key}", key)}
    for key in ("loss", "targets", "perplexity", "bits_per_byte"):
        tags |= {(f"held_out/{key}", f"held_out_{key}")}
    assert set(board.Tags()["scalars"]) == {tag for tag, _ in tags}
    for tag, key in tags:
        found = [(event.step, event.value) for event in board.Scalars(tag)]
        np.testing.assert_allclose(found, records(folder, "step", key), rtol=1e-6, err_msg=tag)


def test_tensorboard_shows_what_metrics_jsonl_has(watched):
    check_board(watched[0])  # of a resumed run: in test_each_evaluation_is_there_once_after_a_kill


def test_tensorboard_of_a_run_that_began_without_it(watched, train, tmp_path):
    shutil.copytree(watched[0], tmp_path / "w")
    shutil.rmtree(tmp_path / "w" / "tensorboard")
    train(tmp_path / "w", f"--steps={STEPS}", "--tensorboard")
    check_board(tmp_path / "w")


def test_tensorboard_has_the_steps_of_runs_without_it(tmp_path):
    """Covers steps 10 to 20, the first torn by a kill, and one that is repeated."""
    lines = [{"step": step, "loss": 1 / step} for step in range(1, 31)]
    for first, last in ((0, 10), (20, 24), (22, 30)):
        board = sinks.TensorBoard(tmp_path, lines[:first])
        for line in lines[first:last]:
            board.write(line)
        if not first:
            (file,) = (tmp_path / "tensorboard").iterdir()
            os.truncate(file, file.stat().st_size - 3)
    assert len(os.listdir(tmp_path / "tensorboard")) == 2, "restarts don't pile up files"
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in found] == [
        (line["step"], pytest.approx(line["loss"])) for line in lines
    ]


def test_a_running_tensorboard_shows_each_step_once(tmp_path):
    """It has read the file of an earlier start when the next one begins."""
    board = sinks.TensorBoard(tmp_path, [])
    board.write({"step": 1, "loss": 3.0})
    board.write({"step": 2, "loss": 2.0})
    reader = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in reader.Scalars("train/loss")] == [1, 2]
    board.close()
    sinks.TensorBoard(tmp_path, [{"step": 1, "loss": 3.0}]).write({"step": 2, "loss": 1.0})
    found = reader.Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in found] == [(1, 3.0), (2, 1.0)]


@pytest.fixture
def wandb_offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


def offline_records(path: pathlib.Path):
    """Records of a run as wandb keeps them offline: protobufs in LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 2**15 - at % 2**15) < 7:  # the rest of a block
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield Record.FromString(record)
            record = b""


def offline_runs(folder: pathlib.Path) -> list[tuple[str, dict[int, dict[str, float]]]]:
    """(project/id, step → its numbers) of each start, from what `wandb sync` uploads."""
    runs = []
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        lines, name = {}, ""
        for record in offline_records(path):
            if record.HasField("run"):
                name = f"{record.run.project}/{record.run.run_id}"
            if record.HasField("history"):
                items = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
                numbers = {key: json.loads(value) for key, value in items.items()}
                lines[numbers["_step"]] = {k: v for k, v in numbers.items() if k[0] != "_"}
        runs.append((name, lines))
    return runs


@pytest.mark.full
def test_wandb_gets_what_metrics_jsonl_has_and_a_resumed_run_goes_on(
    watched, train, tmp_path, wandb_offline
):
    """The second start, and the first one with --wandb, resumes at step 8; the third takes no step."""
    workdir = tmp_path / "w"
    shutil.copytree(watched[0], workdir)
    shutil.rmtree(workdir / "checkpoints" / str(STEPS))
    out = train(workdir, f"--steps={STEPS}", "--eval_every=4", "--wandb=digits")
    (place,) = (workdir / "wandb").glob("offline-run-*")
    assert f"\nWeights & Biases: {place}; to upload: wandb sync {place}\n" in out
    train(workdir, f"--steps={STEPS}", "--wandb=digits")
    (first, lines), (second, again) = offline_runs(workdir)
    assert first == second == f"digits/{(workdir / 'wandb' / 'id').read_text()}"
    want: dict[int, dict[str, float]] = {}
    for line in map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines()):
        want.setdefault(line["step"], {}).update(sinks.scalars(line))
    assert lines == want
    assert {step: line["train/loss"] for step, line in again.items()} == {
        step: line["train/loss"] for step, line in want.items()
    }


def test_a_sink_that_fails_is_a_warning_and_the_others_go_on(tmp_path, monkeypatch, capfd):
    def fails(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(sinks.WeightsAndBiases, "__init__", fails)
    log = Log(tmp_path / "metrics.jsonl", 0, Run(steps=3, tensorboard=True, wandb="p"), "x", 1)
    log.write({"step": 1, "loss": 1.0})
    monkeypatch.setattr(sinks.TensorBoard, "write", fails)
    log.write({"step": 2, "loss": 1.0})
    log.write({"step": 3, "loss": 1.0})
    log.close()
    assert records(tmp_path, "step") == [(1,), (2,), (3,)]
    assert capfd.readouterr().err == "".join(
        f"warning: {name} failed (No space left on device); training continues without it\n"
        for name in ("Weights & Biases", "TensorBoard")
    )


@pytest.mark.parametrize(
    ("flag", "library"), [("--tensorboard", "tensorboardX"), ("--wandb=mine", "wandb")]
)
def test_a_missing_extra_is_named(inside, tmp_path, book, monkeypatch, flag, library):
    monkeypatch.setitem(sys.modules, library, None)
    flags = (*TINY, book, "--mesh=4x2", flag, f"--workdir={tmp_path / 'w'}")
    done = inside("recipes.transformer", *flags)
    assert (done.code, done.out) == (2, "")
    name = flag.partition("=")[0]
    assert done.err == (
        f"error: {name} needs {library}; run pip install -e '.[{name.removeprefix('--')}]'\n"
    )
    assert not (tmp_path / "w").exists()


@pytest.mark.filterwarnings("ignore:builtin type event_stats")
def test_a_profile_has_the_steps_that_were_asked_for(watched):
    folder, out = watched
    command = re.search(r"Profile of steps 2 to 3: (\S+); to open it: (.+)", out)
    assert command[1] == f"{folder}/profile"
    assert command[2] == f"pip install xprof && xprof --port=8791 {folder}/profile"
    (trace,) = (folder / "profile").rglob("*.xplane.pb")
    steps, data = [], jax.profiler.ProfileData.from_file(str(trace))
    for plane in data.planes:
        for line in plane.lines:
            # Each part is read while the one that it is of exists: it does not keep that alive.
            steps += [dict(e.stats)["step_num"] for e in line.events if e.name == "step"]
    assert sorted(steps) == [2, 3]


def test_mfu_is_there_where_the_peak_is_known(train, watched, tmp_path, monkeypatch):
    assert "MFU" not in watched[1]
    monkeypatch.setitem(flops.PEAK, "cpu", 1e9)  # of each of the eight
    shutil.copytree(watched[0], tmp_path / "w")
    shutil.rmtree(tmp_path / "w" / "checkpoints" / str(STEPS))
    out = train(tmp_path / "w", f"--steps={STEPS}")
    token = flops.decoder(trace_shape(Transformer, Config.tiny()), 32)["causal"] / 32
    rates = records(tmp_path / "w", "tokens_per_second", "mfu")
    assert len(rates) == STEPS - HALF
    for speed, mfu in rates:
        assert mfu == pytest.approx(speed * token / 8e9)
    assert re.search(r"\nTook .*; [\d,]+ tokens/s  MFU \d+\.\d%\.\n$", out)
    assert re.search(r"\nstep 12/12  loss \S+  [\d,]+ tokens/s  MFU \d+\.\d%  0:00 left\n", out)


def test_peaks_are_of_one_device_in_bfloat16():
    """Uses device_kind as JAX's TPU compiler and NVIDIA's driver report it."""
    for kind, peak in {
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H100 NVL": 835e12,
        "NVIDIA H200": 989e12,
        "NVIDIA H200 NVL": 835e12,
        "NVIDIA GH200 480GB": 989e12,
        "NVIDIA H20": 148e12,
        "NVIDIA GB200": 2500e12,
        "NVIDIA A100-SXM4-40GB": 312e12,
        "NVIDIA A10": 125e12,
        "NVIDIA A10G": None,
        "NVIDIA L40": 181e12,
        "NVIDIA L4": 121e12,
        "NVIDIA L40S": 362e12,
        "TPU v5 lite": 197e12,
        "TPU v5": 459e12,
        "TPU v6 lite": 918e12,
        "TPU7x": 2307e12 / 2,
        "cpu": None,
    }.items():
        assert flops.chip(kind) == peak, kind
    assert flops.chip(jax.devices()[0].device_kind) is None


# ---- pictures and comparisons --------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch):
    """A list of the figures that are saved, as matplotlib has them."""
    figures, save = [], picture._save
    monkeypatch.setattr(picture, "_save", lambda f, path: figures.append(f) or save(f, path))
    return figures


def numbers_on(axis) -> list[float]:
    """The labels of an axis as numbers; each must be a plain one."""
    axis.axes.figure.canvas.draw()
    texts = [label.get_text() for label in axis.get_ticklabels(which="both") if label.get_text()]
    assert all(re.fullmatch(r"[\d,]*\.?\d+", text) for text in texts), texts
    return [float(text.replace(",", "")) for text in texts]


def write_run(folder, lines, **flags) -> str:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.json").write_text(json.dumps({"flags": flags}))
    return str(folder)


def step_line(step, loss, seconds, tokens=2_048, unit="tokens"):
    return {
        "step": step,
        "loss": loss,
        "step_seconds": seconds,
        f"{unit}_per_second": tokens / seconds,
    }


@pytest.mark.parametrize(
    ("losses", "evaluated"),
    [([6.0, 2.0, 1.3], None), ([2.71, 2.69, 2.68], 2.7), ([900.0, 1.0, 0.004], None), ([0.5], 0.4)],
)
def test_a_loss_picture_has_a_title_units_and_plain_numbers(losses, evaluated, drawn, tmp_path):
    lines = [
        step_line(step, loss, 1) for step, loss in zip((10, 1_000, 2_345), losses, strict=False)
    ]
    lines += [{"step": 0, "held_out_loss": evaluated, "held_out_perplexity": 1.0}] * bool(evaluated)
    write_run(tmp_path / "mine", lines)
    picture.loss(tmp_path / "loss.png", tmp_path / "mine" / "metrics.jsonl")
    (axes,) = drawn[0].axes
    assert axes.get_title() == "Loss of mine"
    assert axes.get_ylabel() == "loss, nats per token"
    assert axes.get_xlabel() == "step"
    assert axes.get_xlim() == (0 if evaluated else 1, lines[len(losses) - 1]["step"])
    steps, shown = numbers_on(axes.xaxis), numbers_on(axes.yaxis)
    assert all(step == int(step) for step in steps)
    low, high = axes.get_ylim()
    assert len([x for x in shown if low <= x <= high]) >= 2
    assert [text.get_text() for text in axes.get_legend().get_texts()][:1] == ["training"]


def test_units_of_losses():
    assert picture.loss_unit([step_line(1, 1.0, 1)]) == "nats per token"
    assert picture.loss_unit([{"step": 1, "loss": 1.0, "accuracy": 0.5}]) == "nats per example"
    assert picture.loss_unit([{"step": 1, "loss": 1.0}]) == "loss"


def test_runs_are_compared_by_value(inside, drawn, tmp_path):
    """Two runs of 3 logged steps; the second sees half of the tokens in twice the time."""
    one = [{"step": 0, "held_out_loss": 6.5, "held_out_bits_per_byte": 9.0}]
    one += [step_line(10, 6.0, 10), step_line(20, 3.0, 20)]
    one += [{"step": 20, "held_out_loss": 3.5, "held_out_bits_per_byte": 5.0}]
    one += [step_line(25, 2.0, 20)]
    one += [{"step": 25, "held_out_loss": 4.25, "held_out_bits_per_byte": 6.0}]
    two = [step_line(10, 5.0, 40, 1_024), step_line(20, 4.0, 40, 1_024)]
    same = {"seed": 0, "dataset": "stdlib", "log_every": 10}
    names = [
        write_run(tmp_path / "r" / "one", one, optimizer="adamw", mesh="", **same, workdir="a"),
        write_run(tmp_path / "r" / "two", two, optimizer="muon", mesh="4x2", **same, workdir="b"),
    ]
    out = tmp_path / "c.png"
    done = inside("recipes.compare", *names, f"--out={out}")
    assert (done.code, done.err) == (0, "")
    assert done.out == (
        "| run | steps | tokens | training | tokens/s | loss | held-out loss | bits/byte | at step | best held-out loss |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n"
        "| one | 25 | 51,200 | 6:40 | 128 | 3.6667 | 4.2500 | 6.0000 | 25 | 3.5000 at step 20 |\n"
        "| two | 20 | 20,480 | 13:20 | 26 | 4.5000 | - | - | - | - |\n"
        "\n"
        "| flag | one | two |\n"
        "|---|---|---|\n"
        "| --optimizer | adamw | muon |\n"
        "| --mesh | empty | 4x2 |\n"
        "\n"
        f"Losses over steps, tokens and time: {out}\n"
    )
    assert out.read_bytes().startswith(b"\x89PNG")
    steps, tokens, minutes = drawn[0].axes
    assert [x.get_xlabel() for x in drawn[0].axes] == ["step", "tokens", "minutes of training"]
    assert steps.get_title() == "Loss of 2 runs; points: held out"
    for axes, first, points in (
        (steps, [10, 20, 25], [0, 20, 25]),
        (tokens, [20_480, 40_960, 51_200], [0, 40_960, 51_200]),
        (minutes, [100 / 60, 5, 400 / 60], [0, 5, 400 / 60]),
    ):
        line, held_out, other = axes.lines
        np.testing.assert_allclose(line.get_xdata(), first)
        np.testing.assert_allclose(line.get_ydata(), [6.0, 3.0, 2.0])
        np.testing.assert_allclose(held_out.get_xdata(), points)
        np.testing.assert_allclose(held_out.get_ydata(), [6.5, 3.5, 4.25])
        np.testing.assert_allclose(other.get_ydata(), [5.0, 4.0])
        assert axes.get_xlim()[0] == 0
        assert axes.get_ylabel() == "loss, nats per token"
        assert numbers_on(axes.xaxis)
        assert numbers_on(axes.yaxis)


def test_a_run_is_compared_while_it_trains_and_with_other_data(inside, tmp_path):
    """The last line is torn; a flag of the data differs; folders share their last name."""
    names = [
        write_run(tmp_path / place / "run", [step_line(10, 2.0, 1)], dataset=data, seq_len=128)
        for place, data in (("x", "a|b.txt"), ("y", ""))
    ]
    with (tmp_path / "x" / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "lo')
    done = inside("recipes.compare", *names, "--out", str(tmp_path / "c.svg"))
    assert (done.code, done.err) == (0, "")
    assert "| x/run | 10 | 20,480 | 0:10 | 2,048 | 2.0000 |\n| y/run |" in done.out
    assert "| --dataset | a\\|b.txt | empty |\n" in done.out
    assert "differ in --dataset: their held-out losses are not of the same tokens." in done.out
    assert "<svg" in (tmp_path / "c.svg").read_text()


def test_a_comparison_says_which_losses_are_not_finite(inside, tmp_path):
    lines = [step_line(10, 2.0, 1), step_line(20, None, 1), step_line(30, 4.0, 1)]
    lines += [{"step": 30, "held_out_loss": None}]
    name = write_run(tmp_path / "run", lines)
    done = inside("recipes.compare", name, "--out", str(tmp_path / "c.svg"))
    assert (done.code, done.err) == (0, "")
    assert "| run | 30 | 61,440 | 0:30 | 2,048 | 3.0000 |" in done.out
    assert (
        "\nrun: 2 losses are not finite, the last at step 30; its row leaves them out.\n"
        in done.out
    )


def test_a_real_run_is_compared(watched, inside, tmp_path):
    done = inside("recipes.compare", str(watched[0]), f"--out={tmp_path / 'c.png'}")
    assert (done.code, done.err) == (0, "")
    (held_out,) = records(watched[0], "held_out_loss")[-1]
    row = done.out.splitlines()[2]
    assert row.startswith(f"| w | 12 | {12 * 16 * 32:,} | ")
    assert f" | {held_out:.4f} | " in row


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "no run is named; write python -m recipes.compare RUN RUN"),
        (["{here}/nothing"], "{here}/nothing does not exist; use a run's workdir"),
        (["{here}"], "{here} has no metrics.jsonl; use a run's workdir"),
        (["{here}/young"], "{here}/young has no training loss in metrics.jsonl yet; wait for"),
        (["{here}/young", "{here}/young"], "{here}/young is named twice; name each run once"),
        (["{here}/young", "--out=x.txt"], "--out=x.txt is no picture; use a name ending in .png, .svg, .pdf"),
        (["{here}/young", "--out=/nowhere/x.png"], "--out=/nowhere/x.png: there is no folder /nowhere"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_comparison_is_one_line(words, sentence, inside, tmp_path):
    write_run(tmp_path / "young", [])
    done = inside("recipes.compare", *(word.replace("{here}", str(tmp_path)) for word in words))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {sentence.replace('{here}', str(tmp_path))}")
    assert done.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["young"]


def test_the_loss_picture_shows_the_whole_run(watched):
    folder, out = watched
    assert f"Loss curve: {folder}/pictures/loss.png\n" in out
    assert (folder / "pictures" / "loss.png").read_bytes().startswith(b"\x89PNG")


# ---- the terminal --------------------------------------------------------------------------------


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(terminal: sinks.Terminal, screen: Tty) -> str:
    """The last state of the live line, as text."""
    assert terminal._bar
    terminal._bar.refresh()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).split("\r")[-1].strip()


def test_a_terminal_is_live_from_the_first_step_on(monkeypatch):
    screen, clock = Tty(), [100.0]
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sinks.time, "perf_counter", lambda: clock[0])
    terminal = sinks.Terminal(Run(steps=100, log_every=10), 0, "tokens", 64, peak=128)
    assert shown(terminal, screen).startswith("step 0/100 ")
    assert "starting" in shown(terminal, screen)
    clock[0] += 2
    terminal.progress(1, 2.5)
    assert shown(terminal, screen).startswith("step 1/100 ")
    assert shown(terminal, screen).endswith("loss 2.5000  32 tokens/s  MFU 25.0%  3:18 left")
    clock[0] += 7  # an evaluation, which is not training
    terminal.pause(7)
    clock[0] += 2
    terminal.progress(2, 2.25)
    assert shown(terminal, screen).endswith("loss 2.2500  32 tokens/s  MFU 25.0%  3:16 left")
    for step in range(3, 14):  # averaged over the last ten steps
        clock[0] += 1
        terminal.progress(step, 2.0)
    assert shown(terminal, screen).endswith("loss 2.0000  64 tokens/s  MFU 50.0%  1:27 left")
    terminal.close()


@pytest.mark.parametrize(("seconds", "most"), [(0.1, 20), (25, 3), (90, 1)])
def test_elsewhere_the_first_step_a_tenth_of_the_run_and_each_minute_have_a_line(
    seconds, most, monkeypatch, capsys
):
    """A run of 200 steps that resumes after step 5."""
    clock = [0.0]
    monkeypatch.setattr(sinks.time, "perf_counter", lambda: clock[0])
    terminal = sinks.Terminal(Run(steps=205, log_every=10), 5, "tokens", 64)
    for step in range(6, 206):
        clock[0] += seconds
        terminal.progress(step, 1.0)
    lines = capsys.readouterr().out.splitlines()
    found = [int(re.match(r"step (\d+)/205  loss 1\.0000  ", line)[1]) for line in lines]
    assert {6, *range(20, 201, 20), 205} <= {*found}
    assert most == max(b - a for a, b in itertools.pairwise(found))
    assert len(found) <= 200 / most + 12
    assert lines[-1].endswith("0:00 left")


def test_what_is_done_is_said_before_it_is_done(watched):
    """The line about compiling comes after the table, and the first step has a line."""
    _, out = watched
    marks = [
        "parameters. Per device",
        "\nCompiling the train step.\n",
        "\nCompiled step, per device",
    ]
    marks += ["\nstep 1/12  loss ", "\nstep 12/12  loss "]
    places = [out.index(mark) for mark in marks]
    assert places == sorted(places)


SAFE = {
    "joined emoji": "\N{MAN}\u200d\N{WOMAN}\u200d\N{GIRL} \N{HEAVY BLACK HEART}\ufe0f",
    "flag of England": "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "Persian": "می\u200cخواهم\u200f.",
    "French": "«\u00a0Vraiment\u202f?\u00a0»",
    "Japanese": "東京\u3000大阪",
    "Thai": "ภาษา\u200bไทย",
    "spaces": "a\u2003b\u2009c\u205fd",
    "hyphens": "co\u00adop\u2060\ufeff",
    "newer than this Python": "\U0001fae9",
    "two lines": "a\nb",
}
UNSAFE = ["\x1b", "\x00", "\x07", "\b", "\r", "\x7f", "\x85", "\x9b", "\u2028", "\u2029", "\ud800"]
UNSAFE += ["\u202a", "\u202b", "\u202c", "\u202d", "\u202e", "\u2066", "\u2067", "\u2068", "\u2069"]


@pytest.mark.parametrize("text", SAFE.values(), ids=SAFE)
def test_a_terminal_shows_text_of_any_script(text, capsys):
    terminal.show(text)
    assert capsys.readouterr().out == text
    assert terminal.quote(text) == [f"  | {line}" for line in text.split("\n")]


@pytest.mark.parametrize("c", UNSAFE, ids=ascii)
def test_a_terminal_is_never_sent_what_could_manipulate_it(c, capsys):
    terminal.show(f"a{c}b")
    assert capsys.readouterr().out == "a\N{REPLACEMENT CHARACTER}b"


WAITS = """
import os, signal
from recipes.common.runtime import Devices, Run
from recipes.common.runtime.start import start

def main(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    print("never")

start(main, {group}())
"""


@pytest.mark.parametrize(
    ("group", "code", "out", "err"),
    [
        ("Devices", 143, "", "Stopped by SIGTERM.\n"),
        ("Run", 0, "Stopped by SIGTERM outside of training; the same command resumes.\n", ""),
    ],
)
def test_only_a_training_run_says_that_it_resumes(group, code, out, err, tmp_path):
    script = tmp_path / "waits.py"
    script.write_text(WAITS.format(group=group))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


TALKS = """
import pathlib, sys
from recipes.common.runtime import Run, print0, warn
from recipes.common.runtime.start import start

def main(run):
    for i in range(20_000):
        print0(f"line {i}")
    warn("nobody reads this either")
    pathlib.Path(run.workdir).write_text("trained")

start(main, Run())
"""


@pytest.mark.parametrize(
    ("pipe", "shown"),
    [("2>&1 | head -1", "line 0\n"), ("2>&1 | true", ""), ("> /dev/full", "nobody reads")],
)
def test_a_run_outlives_the_reader_of_its_output(pipe, shown, tmp_path):
    script, workdir = tmp_path / "talks.py", tmp_path / "workdir"
    script.write_text(TALKS)
    command = f"{sys.executable} {script} --workdir={workdir} {pipe}; echo ${{PIPESTATUS[0]}} >&2"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert workdir.read_text() == "trained"
    assert done.stderr.endswith("0\n")
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
    assert shown in done.stdout + done.stderr
