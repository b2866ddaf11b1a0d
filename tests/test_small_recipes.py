"""recipes.dot_relu_dot and recipes.mlp as a user runs them."""

import json
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest

from recipes.common.sharding import paths


@pytest.fixture
def train(inside):
    """A function of a recipe and flags that returns what it printed."""

    def command(recipe, *flags, by=inside):
        done = by(f"recipes.{recipe}", *flags)
        assert done.code == 0, done.err
        assert done.err == ""
        return done.out

    return command


def records(workdir, *fields):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [tuple(line[f] for f in fields) for line in lines if set(fields) <= set(line)]


def in_order(text, marks):
    at = [text.find(mark) for mark in marks]
    assert -1 not in at, marks[at.index(-1)]
    assert at == sorted(at)


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000


def test_dot_relu_dot_learns_its_teacher_and_shows_who_holds_what(train, run, tmp_path):
    out = train("dot_relu_dot", "--mesh=2x4", "--log_every=1", f"--workdir={tmp_path}", by=run)
    losses = [loss for (loss,) in records(tmp_path, "loss")]
    assert len(losses) == 200
    assert losses[0] / losses[-1] > 100
    ((held_out,),) = records(tmp_path, "held_out_loss")
    assert losses[0] / held_out > 100
    in_order(
        out,
        [
            "mesh 2x4 (data 2 × model 4) · rules fsdp_tp · 8 simulated CPU devices",
            "w1         32×128  float32  embed hidden  (data, model)        2.0 kB",
            "8,192 parameters. Per device: parameters 4.1 kB",
            "Collectives a step, per device: 2 all-gather of 8.2 kB",
            "step 200/200",
            "Held-out loss 0.00",
            "w1 [32, 128] (embed, hidden): ('data', 'model')\n┌────",
            "CPU 7",
            f"The same as a picture: {tmp_path}/layout.png",
            "Resharding w1 from fsdp_tp to dp takes 2 all-gather of ",
            "Resharding w1 from fsdp_tp to tp takes 1 all-gather of 4.1 kB; back: none.",
            f"Checkpoint: {tmp_path}/checkpoints/200",
            f"On another mesh: python -m recipes.dot_relu_dot --mesh=1x8 --restore_from={tmp_path}",
        ],
    )
    assert len(out.splitlines()) < 100
    assert is_png(tmp_path / "layout.png")


def test_mlp_reads_digits_and_evaluates_the_same_on_another_mesh(train, run, inside, tmp_path):
    out = train("mlp", "--mesh=4x2", f"--workdir={tmp_path / 'm'}", by=run)
    ((accuracy,),) = records(tmp_path / "m", "held_out_accuracy")
    assert accuracy > 0.96
    sentence = f"Held-out accuracy {accuracy:.4f}: {accuracy * 360:.0f} of 360 images; loss "
    assert sentence in out
    assert is_png(tmp_path / "m" / "learning.png")
    assert len(out.splitlines()) < 80

    elsewhere = ("--steps=0", f"--restore_from={tmp_path / 'm'}", f"--workdir={tmp_path / 'b'}")
    assert sentence in train("mlp", "--mesh=1x8", "--rules=tp", *elsewhere)
    assert not (tmp_path / "b").exists()
    done = inside("recipes.mlp", "--mesh=1x8", "--embed=32", *elsewhere)
    assert done.code == 2
    assert "has shape [64] in checkpoint" in done.err
    assert "and [32] in this model" in done.err
    done = inside("recipes.dot_relu_dot", *elsewhere)
    assert done.code == 2
    assert "is of 'mlp', not 'dot_relu_dot'; give another" in done.err


@pytest.mark.parametrize("recipe", ["dot_relu_dot", "mlp"])
def test_a_run_in_two_parts_is_the_unbroken_run(recipe, train, tmp_path):
    flags = ("--mesh=2x2", "--steps=20", "--checkpoint_every=10", "--batch_size=64")
    train(recipe, *flags, f"--workdir={tmp_path / 'whole'}")
    train(recipe, *flags, f"--workdir={tmp_path / 'parts'}")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "20")
    out = train(recipe, *flags, f"--workdir={tmp_path / 'parts'}")
    assert f"Resumes at step 10, from {tmp_path}/parts/checkpoints/10." in out
    whole, parts = (
        paths(ocp.StandardCheckpointer().restore(tmp_path / name / "checkpoints" / "20" / "state"))
        for name in ("whole", "parts")
    )
    assert set(whole) == set(parts)
    for path, value in whole.items():
        np.testing.assert_array_equal(value, parts[path], err_msg=path)
    fields = ("step", "loss", "grad_norm", "learning_rate")
    assert records(tmp_path / "whole", *fields) == records(tmp_path / "parts", *fields)
    ends = [records(tmp_path / name, "step", "held_out_loss") for name in ("whole", "parts")]
    assert ends[0] == ends[1]
    metadata = tmp_path / "whole" / "checkpoints" / "20" / "metadata" / "metadata"
    assert json.loads(metadata.read_text())["entry"] == recipe


def test_parameter_paths_are_public(golden):
    from tests.entries import ENTRIES

    for entry in ("dot_relu_dot", "mlp"):
        shapes = paths(ENTRIES[entry].layout("1x1", "dp").plan.shapes)
        lines = [f"params/{path} {list(x.shape)} {x.dtype}\n" for path, x in shapes.items()]
        golden(f"{entry}_paths.txt", "".join(lines))


@pytest.mark.parametrize(
    ("recipe", "flags", "sentence"),
    [
        ("mlp", ("--mesh=8", "--rules=tp"), "rules 'tp' need mesh axis 'model' (for 'hidden'), and --mesh=8 has 'data'; try --mesh=4x2"),
        ("mlp", ("--hidden=12", "--mesh=1x8"), "rules 'fsdp_tp' split dim 'hidden' of blocks/0/down/kernel [12, 64] over 8 devices"),
        ("mlp", ("--dataset=no/such",), "--dataset=no/such is not a folder"),
        ("mlp", ("--image_column=x",), "--dataset=digits has no column 'x'; set --image_column to one of 'image', 'label'"),
        ("mlp", ("--mesh=4x2", "--batch_size=6"), "--batch_size=6 does not divide over the 4 shards"),
        ("dot_relu_dot", ("--mesh=4x2", "--rules=pipeline"), "--rules=pipeline is not a strategy of this entry; there are dp, fsdp, tp, fsdp_tp, hsdp_tp"),
        ("dot_relu_dot", ("--mesh=3x1",), "and 32 does not divide by 3; meshes that fit: --mesh=2x1"),
        ("dot_relu_dot", ("--restore_from=no/such",), "--restore_from=no/such does not exist"),
    ],
)  # fmt: skip
def test_mistakes(recipe, flags, sentence, inside, tmp_path):
    done = inside(f"recipes.{recipe}", f"--workdir={tmp_path / 'w'}", *flags)
    assert done.code == 2, done.out
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert sentence in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "w").exists()
