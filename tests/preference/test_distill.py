"""recipes.distill: a teacher's distribution beside the text, teacher and student under rules of their own."""

import dataclasses
import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes import distill
from recipes.common import entries
from recipes.common.distillation import teacher_logits
from recipes.common.distillation.student_loss import Distillation, Distilling, divergence
from recipes.common.report import report
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.flags import parse
from recipes.common.runtime.mesh import make_mesh
from recipes.common.runtime.start import show_plan
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import make_layout, shardings
from recipes.common.train.step import gradients
from tests.conftest import full_except
from tests.support.models import packed_batch, random_values
from tests.support.quick import QUICK
from tests.support.quick import quick as quick
from tests.support.runs import assert_bit_equal, records, state_of, talker

pytestmark = pytest.mark.promise("distillation")

BATCH = packed_batch(rows=8, length=16)
TOLERANCE = 1e-5
KINDS = ("forward", "reverse", "js")


def definition(kind: str, teacher: np.ndarray, student: np.ndarray) -> np.ndarray:
    """Of logits [..., V], in float64."""

    def softmax(x):
        return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)

    def kl(p, q):
        return (p * np.log(p / q)).sum(axis=-1)

    p, q = softmax(teacher.astype(np.float64)), softmax(student.astype(np.float64))
    if kind == "js":
        return (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2
    return kl(p, q) if kind == "forward" else kl(q, p)


@pytest.mark.parametrize("kind", KINDS)
def test_a_divergence_and_its_gradient_are_the_definition(kind):
    random = np.random.default_rng(0)
    teacher, student = (random.normal(0, 3, (2, 3, 7)) for _ in range(2))
    padded = [
        np.pad(x, ((0, 0), (0, 0), (0, 2)), constant_values=-np.inf) for x in (teacher, student)
    ]
    arrays = [x.astype(np.float32) for x in padded]

    @jax.jit
    def with_gradient(teacher, student):
        found, pull = jax.vjp(lambda student: divergence(kind, teacher, student, 7), student)
        return found, *pull(jnp.ones_like(found))

    found, gradient = with_gradient(*arrays)
    np.testing.assert_allclose(found, definition(kind, teacher, student), rtol=2e-6, atol=1e-6)
    assert (np.asarray(gradient)[..., 7:] == 0).all()
    step = 1e-5
    for v in range(7):
        moved = np.eye(7)[v] * step
        difference = definition(kind, teacher, student + moved)
        difference = difference - definition(kind, teacher, student - moved)
        np.testing.assert_allclose(gradient[..., v], difference / (2 * step), atol=2e-5)
    same, _ = with_gradient(arrays[0], arrays[0])
    np.testing.assert_allclose(same, 0, atol=1e-6)


def layout_of(entry: str, mesh: str, strategy: str, **changes):
    config = dataclasses.replace(entries.sizes(entry)["tiny"](), loss_chunk=8, **changes)
    model = entries.model(entry)
    return make_layout(model, config, make_mesh(mesh), strategy, seq_len=16)


def values(layout, seed: int):
    variables = random_values(layout.model.shapes, seed)
    return jax.device_put(variables, shardings(layout.variables()))


@functools.cache
def figures(
    mesh: str = "1x1", strategy: str = "", rules: str = "", kind: str = "js", microbatches: int = 1,
    student: str = "transformer", teacher: str = "moe", top_k: int = 0, stored: str = "",
):  # fmt: skip
    """(metrics, gradients) of a random student with another random model as its teacher.

    Args:
      stored: the rules under which the teacher's logits are computed beforehand.
    """
    flags = Distillation(divergence=kind, tau=2.0, alpha=0.3, top_k=top_k)
    layout = layout_of(student, mesh, strategy)
    its = layout_of(teacher, mesh, rules or strategy)
    layout = dataclasses.replace(
        layout, batch_size=8, model=layout.model._replace(loss=Distilling(flags, its))
    )
    state, batch = values(layout, 0), BATCH
    if stored:
        owner = layout_of("transformer", mesh, stored)
        arguments = values(its, 1), jax.device_put(BATCH, owner.batch_shardings(BATCH))
        top = Distilling(flags, its).top_logits
        logits, ids = owner.compile(top, *arguments, compiler_options=QUICK)(*arguments)
        assert logits.shape == (8, 16, top_k)
        stored_logits = {"teacher_logits": np.asarray(logits), "teacher_ids": np.asarray(ids)}
        batch = BATCH | stored_logits
    else:
        state = state | {"frozen": values(its, 1)}
    placed = jax.device_put(batch, layout.batch_shardings(batch))

    def both(state, batch):
        grads, _, means = gradients(layout, state, batch, microbatches)
        return means, grads

    means, grads = layout.compile(both, state, placed, compiler_options=QUICK)(state, placed)
    return (
        {name: float(mean) for name, mean in means.items()},
        {path: np.asarray(x) for path, x in paths(grads).items()},
    )


@pytest.mark.parametrize("kind", full_except(KINDS, ["js"]))
def test_the_loss_is_the_definition_on_logits(kind):
    """Also its gradient, by differentiating the definition on all logits."""
    means, grads = figures(kind=kind)
    layouts = layout_of("transformer", "1x1", ""), layout_of("moe", "1x1", "")

    def total(variables, teacher):
        student = layouts[0].model.merge(variables)(BATCH["tokens"], BATCH["segment_ids"])
        with layouts[1].trace():
            logits = layouts[1].model.merge(teacher)(BATCH["tokens"], BATCH["segment_ids"])
        counts = jnp.asarray(BATCH["targets"] >= 0)
        apart = divergence(kind, logits / 2, student / 2, student.shape[-1])
        is_target = jnp.arange(student.shape[-1]) == BATCH["targets"][..., None]
        nats = -jnp.where(is_target, jax.nn.log_softmax(student), 0).sum()
        apart = jnp.where(counts, apart, 0).sum()
        return (0.7 * nats + 0.3 * 4 * apart) / counts.sum(), (nats, apart, student, logits)

    arguments = values(layouts[0], 0), values(layouts[1], 1)
    program = layouts[0].compile(
        jax.value_and_grad(total, has_aux=True), *arguments, compiler_options=QUICK
    )
    (_, (nats, _, *logits)), expected = program(*arguments)
    counts = BATCH["targets"] >= 0
    student, teacher = (np.asarray(x) / 2 for x in logits)
    apart = definition(kind, teacher, student)[counts].mean()
    np.testing.assert_allclose(means["divergence"], apart, rtol=1e-5)
    np.testing.assert_allclose(means["loss"], nats / counts.sum(), rtol=1e-5)
    for path, gradient in paths(expected["params"]).items():
        error = np.linalg.norm(grads[path] - gradient) / np.linalg.norm(gradient)
        assert error < TOLERANCE, path


@pytest.mark.full
def test_top_k_is_the_definition_on_logits():
    """The teacher's distribution, of its five likeliest tokens alone, in float64."""
    means, _ = figures(kind="forward", top_k=5)
    layouts = layout_of("transformer", "1x1", ""), layout_of("moe", "1x1", "")

    def both(variables, teacher):
        student = layouts[0].model.merge(variables)(BATCH["tokens"], BATCH["segment_ids"])
        with layouts[1].trace():
            logits = layouts[1].model.merge(teacher)(BATCH["tokens"], BATCH["segment_ids"])
        return student, logits

    arguments = values(layouts[0], 0), values(layouts[1], 1)
    program = layouts[0].compile(both, *arguments, compiler_options=QUICK)
    student, teacher = (np.asarray(x, np.float64) / 2 for x in program(*arguments))
    log_q = student - np.log(np.exp(student).sum(axis=-1, keepdims=True))
    best = np.argsort(-teacher, axis=-1)[..., :5]
    p = np.exp(np.take_along_axis(teacher, best, -1))
    p /= p.sum(axis=-1, keepdims=True)
    apart = (p * (np.log(p) - np.take_along_axis(log_q, best, -1))).sum(axis=-1)
    counts = BATCH["targets"] >= 0
    np.testing.assert_allclose(means["divergence"], apart[counts].mean(), rtol=1e-5)


STORED = {
    "js": {"kind": "js", "stored": "dp"},
    "fsdp_tp, live, teacher fsdp": {"mesh": "4x2", "strategy": "fsdp_tp", "rules": "fsdp"},
    "fsdp_tp, stored by tp": {"mesh": "4x2", "strategy": "fsdp_tp", "stored": "tp"},
    "fsdp_cp_tp, stored": {
        "mesh": "data=2,seq=2,model=2", "strategy": "fsdp_cp_tp", "stored": "fsdp_cp_tp",
        "teacher": "transformer",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", full_except(STORED, []))
def test_stored_logits_give_the_losses_of_a_live_teacher(name):
    case = {"kind": "forward", "top_k": 5} | STORED[name]
    live = {key: case[key] for key in ("kind", "top_k", "teacher") if key in case}
    assert_equal(figures(**case), figures(**live))


def assert_equal(found, expected):
    assert found[0].keys() == expected[0].keys()
    for metric, mean in expected[0].items():
        np.testing.assert_allclose(found[0][metric], mean, rtol=TOLERANCE, err_msg=metric)
    for path, gradient in expected[1].items():
        error = np.linalg.norm(found[1][path] - gradient) / np.linalg.norm(gradient)
        assert error < TOLERANCE, (path, error)


CASES = {
    "microbatches": {"microbatches": 2},
    "fsdp_tp, teacher fsdp": {"mesh": "4x2", "strategy": "fsdp_tp", "rules": "fsdp"},
    "fsdp, teacher fsdp_tp": {"mesh": "4x2", "strategy": "fsdp", "rules": "fsdp_tp"},
    "dp, teacher tp": {"mesh": "4x2", "strategy": "dp", "rules": "tp"},
    "tp": {"mesh": "1x8", "strategy": "tp"},
    "hsdp_tp": {"mesh": "2x2x2", "strategy": "hsdp_tp", "rules": "fsdp_tp"},
    "fsdp_pp, teacher pp": {"mesh": "data=4,pipe=2", "strategy": "fsdp_pp", "rules": "pp"},
    "fsdp_cp_tp, teacher fsdp_tp": {
        "mesh": "data=2,seq=2,model=2", "strategy": "fsdp_cp_tp", "rules": "fsdp_tp",
        "teacher": "transformer",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", full_except(CASES, []))
def test_every_mesh_and_every_pair_of_rules_give_the_same(name):
    case = CASES[name]
    assert_equal(figures(**case), figures(teacher=case.get("teacher", "moe")))


@pytest.mark.full
def test_no_logits_of_all_positions_exist():
    """Neither the student's nor the teacher's, by the compiler's memory."""
    temporary = {}
    for words in (4096, 8192):
        layout = layout_of("transformer", "4x2", "fsdp_tp", vocab_size=words)
        its = layout_of("transformer", "4x2", "fsdp", vocab_size=words)
        long = {name: np.zeros((8, 512), np.int32) for name in BATCH}
        layout = dataclasses.replace(
            layout, batch_size=8, model=layout.model._replace(loss=Distilling(Distillation(), its))
        )
        batch = layout.abstract_batch({name: rows[0] for name, rows in long.items()})

        def step(state, batch, layout=layout):
            return gradients(layout, state, batch)

        state = layout.variables() | {"frozen": its.variables()}
        program = layout.compile(step, state, batch, compiler_options=QUICK)
        temporary[words] = report.memory(program).temp_size_in_bytes
    more = temporary[8192] - temporary[4096]
    rows, positions, words = 2, 512, 4096  # more words, split by the student's rules or not
    assert more < 0.5 * rows * positions * words / 2 * 4


# ---- whole runs ----------------------------------------------------------------------------------

FLAGS = (
    "--seq_len=32", "--steps=4", "--checkpoint_every=2", "--batch_size=8", "--log_every=1",
    "--student=transformer.tiny", "--mesh=4x2", "--teacher_rules=fsdp",
)  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    talker(folder / "model", 48)
    lines = [json.dumps({"text": f"{n} times {n} is {n * n}. " * 8}) for n in range(200)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def run(teacher, monkeypatch, capsys):
    """Runs recipes.distill in this process; returns its output."""
    monkeypatch.setenv("ZOO_CACHE", str(teacher / "cache"))

    def run(*flags: str) -> str:
        first = (f"--teacher={teacher / 'model'}", f"--dataset={teacher / 'text.jsonl'}")
        planned = distill.main(*(parse([*first, *FLAGS, *flags], *distill.NEW) or []))
        if planned:
            show_plan(planned)
        return capsys.readouterr().out

    return run


@pytest.mark.full
def test_a_run_reports_both_models_and_resumes_bit_equal(run, tmp_path, quick):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    out = run(f"--workdir={whole}")
    assert "Teacher: a frozen copy of model, rules fsdp, " in out
    assert "Held-out divergence from the teacher: " in out
    shutil.copytree(whole, killed)  # as if it was killed after its first checkpoint
    shutil.rmtree(killed / "checkpoints" / "4")
    assert "Resumes at step 2, from " in run(f"--workdir={killed}")
    assert_bit_equal(state_of(killed, 4), state_of(whole, 4))
    assert records(killed, "loss", "divergence") == records(whole, "loss", "divergence")
    assert not [path for path in state_of(whole, 4) if path.startswith("frozen")]


@pytest.mark.full
def test_a_run_from_stored_logits_equals_a_live_one(run, tmp_path, quick):
    logits = f"--teacher_logits={tmp_path / 'logits'}"
    live, stored, again = (tmp_path / name for name in ("live", "stored", "again"))
    run("--top_k=4", f"--workdir={live}")
    out = run("--top_k=4", logits, f"--workdir={stored}")
    assert "Teacher: writes its top 4 logits of " in out
    assert "frozen model" not in out
    np.testing.assert_allclose(
        records(stored, "loss", "divergence"), records(live, "loss", "divergence"), rtol=1e-5
    )
    begun = (tmp_path / "logits" / teacher_logits.ABOUT).stat().st_mtime_ns
    assert "Teacher: its top 4 logits are read from" in run(
        "--top_k=4", logits, f"--workdir={again}"
    )
    assert_bit_equal(state_of(again, 4), state_of(stored, 4))
    assert (tmp_path / "logits" / teacher_logits.ABOUT).stat().st_mtime_ns == begun
    with pytest.raises(UserError, match="logits is of another --top_k; use a new folder"):
        run("--top_k=3", logits, f"--workdir={tmp_path / 'other'}")
    with pytest.raises(UserError, match="logits is of other data; use a new folder"):
        run("--top_k=4", "--seq_len=16", logits, f"--workdir={tmp_path / 'other'}")
    with pytest.raises(UserError, match="logits is of another teacher; use a new folder"):
        run("--top_k=4", "--teacher_dtype=bfloat16", logits, f"--workdir={tmp_path / 'other'}")
    assert not (tmp_path / "other").exists()


def test_stored_logits_of_another_teacher_are_refused(tmp_path):
    about = {"teacher": ["a"], "tokenizer": "b", "data": {"fingerprint": "c"}, "top_k": 2}
    (tmp_path / teacher_logits.ABOUT).write_text(json.dumps(about))
    teacher_logits.check(tmp_path, "logits", about)
    for key, other in teacher_logits.OTHER.items():
        with pytest.raises(UserError) as error:
            teacher_logits.check(tmp_path, "logits", about | {key: "another"})
        assert str(error.value) == f"--teacher_logits=logits is of {other}; use a new folder"
    (tmp_path / teacher_logits.ABOUT).unlink()
    with pytest.raises(UserError, match="has no teacher's logits; use a new folder"):
        teacher_logits.check(tmp_path, "logits", about)


def test_half_of_the_logits_are_no_folder(tmp_path):
    """Neither if a batch fails; and a whole folder has each row once, without padding."""
    arrays = np.arange(2 * 3 * 2.0).reshape(2, 3, 2), np.arange(12).reshape(2, 3, 2)
    parts, path = {"train": range(3), "held_out": range(1)}, tmp_path / "logits"

    def batches(fails: bool):
        yield "train", 0, arrays
        assert not path.exists()
        if fails:
            raise KeyboardInterrupt
        yield "train", 2, arrays
        yield "held_out", 0, arrays

    with pytest.raises(KeyboardInterrupt):
        teacher_logits._write(path, {}, parts, (3, 2), batches(fails=True))
    assert not [*tmp_path.iterdir()]
    teacher_logits._write(path, {}, parts, (3, 2), batches(fails=False))
    assert {x.name for x in tmp_path.iterdir()} == {"logits"}
    kept = np.load(path / "train.logits.npy")
    np.testing.assert_array_equal(kept, np.concatenate([arrays[0], arrays[0][:1]]))
    np.testing.assert_array_equal(np.load(path / "held_out.ids.npy"), arrays[1][:1])


def test_a_plan_counts_both_models(run, tmp_path):
    out = run("--plan", f"--workdir={tmp_path / 'w'}")
    (copy,) = re.findall(r"Teacher: a frozen copy of model, rules fsdp, ([\d.]+ kB)", out)
    assert f", frozen model {copy}; this fits in" in out
    alone = ("--plan", "--alpha=0", "--teacher_rules=", f"--workdir={tmp_path / 'w'}")
    assert "frozen model" not in run(*alone)
    assert not (tmp_path / "w").exists()


MISTAKES = {
    "--teacher=mlp.digits": "is a 'mlp' model, which teaches no text",
    "--teacher=nothing": "--teacher=nothing does not exist",
    "--student=transformer.huge": "--student=huge is not one of tiny",
    "--student=mlp.small": "--student=mlp is not one of transformer",
    "--alpha=1.5": "--alpha=1.5 must be ≤ 1.0",
    "--tau=0": "--tau=0 must be ≥ 0.01",
    "--teacher_rules=no": "--teacher_rules=no is not a strategy of this entry",
    "--restore_from=transformer.stdlib_3m": "--student=transformer.tiny is for a new student",
    "--set=vocab_size=640": "has 512 tokens, and the student 640; use a teacher and a student",
    "--top_k=9999": "--top_k=9999 is more than the 512 tokens of the vocabulary",
    "--top_k=2 --divergence=reverse": "--divergence=reverse is infinite with --top_k=2",
    "--teacher_logits=there": "--teacher_logits=there needs --top_k; add it, for example",
    "--mesh=data=4,pipe=2 --pipe_microbatches=3": "--pipe_microbatches=3 does not divide the",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_mistakes_are_one_line(flags, run, tmp_path):
    with pytest.raises((UserError, ValueError)) as error:
        run(*flags.split(), f"--workdir={tmp_path / 'w'}")
    assert MISTAKES[flags] in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "w").exists()
