"""The recipes as a user runs them: commands in, text and files out."""

import json
import re
import shutil

import jax
import numpy as np
import pytest

from tests.runs import TINY, assert_bit_equal, records, state_of


@pytest.fixture
def train(inside, book):
    """A function of flags that trains a tiny Transformer and returns what it printed."""

    def command(*flags, by=inside):
        done = by("recipes.transformer", *TINY, book, *flags)
        assert done.code == 0, done.err
        assert done.err == "", "the terminal is for what the user needs"
        return done.out

    return command


def test_what_a_user_sees_in_order(train, run, tmp_path):
    flags = ("--mesh=4x2", "--steps=20", "--sample_bytes=40", "--prompt=def ")
    out = train(*flags, f"--workdir={tmp_path}", by=run)
    marks = [
        "mesh 4x2 (data 4 × model 2) · rules fsdp_tp · 8 simulated CPU devices",
        "parameter ",
        "layers/attention/q           2×64×16×8  float32  layers embed heads head_dim      (-, data, model, -)        8.2 kB",
        "123,200 parameters. Per device: parameters 62.7 kB, gradients 62.7 kB, optimizer state 125.4 kB.",
        "Compiled step, per device: ",
        "Collectives a step, per device: 29 all-gather of 442.4 kB; ",
        "Starts at step 0, on new parameters.",
        "step 10/20  loss ",
        "step 20/20  loss ",
        "Held-out loss ",
        "Sample:\n  | def ",
        f"Checkpoint: {tmp_path}/checkpoints/20",
        "On another mesh: python -m recipes.transformer --mesh=1x8 --restore_from=",
        "Took ",
    ]  # fmt: skip
    at = [re.sub(" +", " ", out).find(re.sub(" +", " ", mark)) for mark in marks]
    assert -1 not in at, marks[at.index(-1)]
    assert at == sorted(at)
    assert len(out.splitlines()) < 80
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) < 120


def test_files_that_a_run_leaves(train, tmp_path):
    train("--mesh=2x2", "--steps=20", "--checkpoint_every=5", f"--workdir={tmp_path}")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "checkpoints",
        "config.json",
        "metrics.jsonl",
    ]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["15", "20"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["flags"]["steps"] == 20
    assert config["flags"]["seed"] == 0
    assert config["versions"]["jax"] == jax.__version__
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 20]
    step = {"step", "loss", "grad_norm", "learning_rate", "step_seconds", "input_wait_seconds"}
    assert set(lines[0]) == step | {"tokens_per_second"}
    assert set(lines[2]) == {"step", "held_out_loss", "held_out_targets"}
    items = tmp_path / "checkpoints" / "20"
    data = json.loads((items / "data" / "metadata").read_text())
    assert data["next_batch"] == 20
    metadata = json.loads((items / "metadata" / "metadata").read_text())
    assert metadata["entry"] == "transformer"
    assert metadata["config"]["embed"] == 64
    assert metadata["rules"]["name"] == "fsdp_tp"
    assert metadata["rules"]["table"]["embed"] == "data"
    assert metadata["mesh"] == {"data": 2, "model": 2}
    assert metadata["logical_axes"]["layers/mlp/up"] == ["layers", "embed", "mlp"]
    assert metadata["data"]["fingerprint"] == data["fingerprint"]
    assert metadata["versions"] == config["versions"]


def test_parameter_paths_are_public(train, tmp_path, golden):
    train("--mesh=1x1", "--steps=1", f"--workdir={tmp_path}")
    state = state_of(tmp_path, 1)
    golden(
        "transformer_paths.txt",
        "".join(f"{p} {list(v.shape)} {v.dtype}\n" for p, v in state.items()),
    )


def test_a_run_in_two_parts_is_the_unbroken_run(train, run, tmp_path):
    """Stopped after step 20 of 40 (its newest checkpoint is all that is left) and started again."""
    flags = ("--mesh=4x2", "--checkpoint_every=20", "--steps=40")
    train(*flags, f"--workdir={tmp_path / 'whole'}")
    train(*flags, f"--workdir={tmp_path / 'parts'}")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "40")
    out = train(*flags, f"--workdir={tmp_path / 'parts'}", by=run)
    assert f"Resumes at step 20, from {tmp_path}/parts/checkpoints/20." in out
    assert_bit_equal(state_of(tmp_path / "whole", 40), state_of(tmp_path / "parts", 40))
    fields = ("step", "loss", "grad_norm", "learning_rate")
    whole, parts = (records(tmp_path / name, *fields) for name in ("whole", "parts"))
    assert [r[0] for r in whole] == [10, 20, 30, 40]
    assert whole == parts
    held_out = [records(tmp_path / name, "step", "held_out_loss") for name in ("whole", "parts")]
    assert held_out[0] == held_out[1]


def test_more_steps_go_on_and_say_what_that_does_to_the_learning_rate(train, tmp_path):
    flags = ("--mesh=4x2", f"--workdir={tmp_path}", "--checkpoint_every=10")
    train(*flags, "--steps=20")
    out = train(*flags, "--steps=30")
    assert f"Resumes at step 20, from {tmp_path}/checkpoints/20." in out
    assert (
        "--steps was 20 and is 30: the learning rate now decays until step 30, and at step 20"
        in out
    )
    assert [step for (step,) in records(tmp_path, "step")] == [10, 20, 20, 30, 30]
    done = train(*flags, "--steps=30")
    assert "Resumes at step 30" in done
    assert "step 30/30" not in done


def test_another_mesh_goes_on_with_the_same_run(train, tmp_path):
    """The workdir of one mesh continues on another: same batches, losses to float32's last bits."""
    for name, meshes in (("a", ("4x2", "4x2")), ("b", ("4x2", "1x8"))):
        for mesh, steps in zip(meshes, (10, 20), strict=True):
            train(
                f"--mesh={mesh}",
                f"--workdir={tmp_path / name}",
                f"--steps={steps}",
                "--log_every=1",
            )
    a, b = (dict(records(tmp_path / name, "step", "loss")) for name in ("a", "b"))
    assert [a[i] for i in range(1, 11)] == [b[i] for i in range(1, 11)]
    np.testing.assert_allclose(
        [a[i] for i in range(11, 21)], [b[i] for i in range(11, 21)], rtol=1e-5
    )


def test_restore_from_starts_anew_on_given_parameters(train, tmp_path):
    train("--mesh=4x2", "--steps=10", f"--workdir={tmp_path / 'a'}")
    held_out = records(tmp_path / "a", "held_out_loss")[-1][0]
    out = train(
        "--mesh=1x8",
        "--rules=tp",
        "--steps=0",
        f"--restore_from={tmp_path / 'a'}",
        f"--workdir={tmp_path / 'b'}",
    )
    assert f"Evaluates {tmp_path}/a/checkpoints/10, of step 10." in out
    assert f"Held-out loss {held_out:.4f} nats/byte" in out
    assert not (tmp_path / "b").exists(), "evaluation leaves no files"
    out = train(
        "--mesh=2x2x2",
        "--rules=hsdp_tp",
        "--steps=5",
        f"--restore_from={tmp_path / 'a'}",
        f"--workdir={tmp_path / 'c'}",
    )
    assert f"Starts at step 0, on the parameters of {tmp_path}/a/checkpoints/10." in out
    a, c = state_of(tmp_path / "a", 10), state_of(tmp_path / "c", 5)
    assert set(a) == set(c)
    assert int(c["step"]) == 5
    assert (a["params/embed"] != c["params/embed"]).any()


def test_accumulated_gradients_are_the_gradients_of_the_whole_batch(train, tmp_path):
    for parts in (1, 4):
        train(
            "--mesh=4x1",
            "--steps=5",
            "--log_every=1",
            f"--accumulate={parts}",
            f"--workdir={tmp_path / str(parts)}",
        )
    fields = ("step", "loss", "grad_norm")
    np.testing.assert_allclose(
        records(tmp_path / "1", *fields), records(tmp_path / "4", *fields), rtol=2e-5
    )


def test_learning_rate_warms_up_and_decays_and_vectors_do_not_decay():
    import jax.numpy as jnp

    from recipes.common.optimizer import adamw, schedule

    rate = schedule(1.0, 10, 100)
    assert [round(float(rate(i)), 3) for i in (0, 5, 10, 55, 100)] == [0, 0.5, 1, 0.55, 0.1]
    optimizer = adamw(lambda _: 1.0, weight_decay=0.5, clip_norm=1.0)
    params = {"q": jnp.ones((2, 2)), "scale": jnp.ones((2, 2)), "q_bias": jnp.ones((2, 2, 2))}
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    assert float(updates["q"][0, 0]) == -0.5
    assert not updates["scale"].any()
    assert not updates["q_bias"].any()


# ---- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--mesh=3x3",), "over 3 devices (mesh axis 'data' of --mesh=3x3), and 64 does not divide by 3; meshes that fit: --mesh="),
        (("--mesh=4x2", "--batch_size=6"), "--batch_size=6 does not divide over the 4 shards"),
        (("--mesh=8", "--rules=tp"), "rules 'tp' need mesh axis 'model'"),
        (("--size=huge",), "--size=huge is not one of \"\", tiny, small, medium, 124m, 1b, 8b, 70b"),
        (("--batch_size=16", "--accumulate=3"), "--batch_size=16 does not divide by --accumulate=3"),
        (("--restore_from=no/such",), "--restore_from=no/such does not exist"),
        (("--dataset=no/such",), "--dataset=no/such does not exist"),
    ],
)  # fmt: skip
def test_mistakes(flags, sentence, run, tmp_path):
    done = run("recipes.transformer", "--size=tiny", f"--workdir={tmp_path / 'w'}", *flags)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert sentence in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "w").exists()


def test_a_workdir_of_another_run_is_refused(train, inside, book, tmp_path):
    train("--mesh=1x1", "--steps=1", f"--workdir={tmp_path}")
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    for flag in (
        "--seed=1",
        "--batch_size=8",
        "--learning_rate=0.5",
        "--seq_len=16",
        "--size=small",
    ):
        flags = (*TINY, book, "--mesh=1x1", f"--workdir={tmp_path}", flag)
        done = inside("recipes.transformer", *flags)
        assert done.code == 2, flag
        assert done.err.startswith(f"error: {flag} is not what this run began with, ")
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_other_shapes_name_the_parameter_and_both(train, inside, book, tmp_path):
    train("--mesh=1x1", "--steps=1", f"--workdir={tmp_path / 'a'}")
    done = inside("recipes.transformer", "--size=small", book, "--mesh=1x1", "--steps=0",
                  f"--restore_from={tmp_path / 'a'}", f"--workdir={tmp_path / 'b'}")  # fmt: skip
    assert done.code == 2
    assert "embed has shape [384, 64] in checkpoint" in done.err
    assert "and [384, 128] in this model" in done.err
    assert not (tmp_path / "b").exists()
