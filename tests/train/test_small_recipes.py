"""recipes.dot_relu_dot, recipes.mlp, recipes.vit and recipes.siglip as users run them."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest

from recipes.common.sharding.abstract import abstract_model, paths
from tests.conftest import ROOT, full_except
from tests.data.test_image_text import shards
from tests.support.entries import ENTRIES
from tests.support.quick import quick as quick
from tests.support.runs import assert_bit_equal, records, state_of

pytestmark = pytest.mark.promise("resume")


@pytest.fixture
def train(inside):
    """Returns a function of a recipe and flags that runs it and returns its output."""

    def command(recipe, *flags, by=inside):
        done = by(f"recipes.{recipe}", *flags)
        assert done.code == 0, done.err
        assert done.err == ""
        return done.out

    return command


def assert_in_order(text, marks):
    at = [text.find(mark) for mark in marks]
    assert -1 not in at, marks[at.index(-1)]
    assert at == sorted(at)


def assert_png(path):
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5_000


def check_dot_relu_dot(out, workdir, steps):
    assert_in_order(
        out,
        [
            "mesh 2x4 (data 2 × model 4) · rules fsdp_tp · 8 simulated CPU devices",
            "w1         32×128  float32  embed hidden  (data, model)        2.0 kB",
            "8,192 parameters. Per device: parameters 4.1 kB",
            "Collectives a step, per device: 2 all-gather of 8.2 kB",
            f"step {steps}/{steps}",
            "Held-out loss ",
            "w1 [32, 128] (embed, hidden): ('data', 'model')\n┌────",
            "CPU 7",
            f"The same as a picture: {workdir}/layout.png",
            "Resharding w1 from fsdp_tp to dp takes 2 all-gather of ",
            "Resharding w1 from fsdp_tp to tp takes 1 all-gather of 4.1 kB; back: none.",
            f"Loss curve: {workdir}/pictures/loss.png",
            f"Checkpoint: {workdir}/checkpoints/{steps}",
            f"On another mesh: python -m recipes.dot_relu_dot --mesh=1x8 --restore_from={workdir}",
            f"Its layout in pictures: python -m recipes.explore --from={workdir}",
        ],
    )
    assert len(out.splitlines()) < 100
    assert_png(workdir / "layout.png")
    assert_png(workdir / "pictures" / "loss.png")


def check_mlp(out, workdir) -> str:
    """Returns the line with the accuracy."""
    ((accuracy, loss),) = records(workdir, "held_out_accuracy", "held_out_loss")
    line = f"Held-out accuracy {accuracy:.4f}: {accuracy * 360:.0f} of 360 images; loss {loss:.4f} nats."
    assert_in_order(out, [line, f"Loss curve and confusion matrix: {workdir}/learning.png"])
    assert len(out.splitlines()) < 80
    assert_png(workdir / "learning.png")
    assert_png(workdir / "pictures" / "loss.png")
    return line


# ---- default runs --------------------------------------------------------------------------------


@pytest.mark.full
def test_dot_relu_dot_learns_its_teacher(train, run, tmp_path):
    out = train("dot_relu_dot", "--mesh=2x4", "--log_every=1", f"--workdir={tmp_path}", by=run)
    losses = [loss for (loss,) in records(tmp_path, "loss")]
    assert len(losses) == 200
    assert losses[0] / losses[-1] > 100
    ((held_out,),) = records(tmp_path, "held_out_loss")
    assert losses[0] / held_out > 100
    assert "Held-out loss 0.00" in out
    check_dot_relu_dot(out, tmp_path, 200)


@pytest.mark.full
def test_mlp_learns_digits(train, run, tmp_path):
    out = train("mlp", "--mesh=4x2", f"--workdir={tmp_path}", by=run)
    ((accuracy,),) = records(tmp_path, "held_out_accuracy")
    assert accuracy > 0.96
    check_mlp(out, tmp_path)


@pytest.mark.full
def test_vit_learns_digits(train, quick, tmp_path):
    """A short run without crops; the default has 1,000 steps and gets 98.6% right."""
    flags = ("--mesh=1x2", "--steps=60", "--crop=false", "--warmup_steps=10")
    out = train("vit", *flags, f"--workdir={tmp_path}")
    ((accuracy,),) = records(tmp_path, "held_out_accuracy")
    assert accuracy > 0.9
    check_mlp(out, tmp_path)


# ---- short ones ----------------------------------------------------------------------------------


def test_dot_relu_dot_prints_what_each_device_holds(train, quick, tmp_path):
    flags = ("--mesh=2x4", "--steps=2", "--batch_size=64")
    out = train("dot_relu_dot", *flags, f"--workdir={tmp_path}")
    check_dot_relu_dot(out, tmp_path, 2)


@pytest.mark.full
def test_mlp_evaluates_the_same_on_another_mesh(train, quick, tmp_path):
    flags = ("--embed=16", "--hidden=64", "--depth=1", "--batch_size=64", "--learning_rate=0.01")
    out = train("mlp", "--mesh=4x2", "--steps=20", *flags, f"--workdir={tmp_path / 'm'}")
    line = check_mlp(out, tmp_path / "m")
    elsewhere = (f"--restore_from={tmp_path / 'm'}", f"--workdir={tmp_path / 'e'}", "--steps=0")
    assert line in train("mlp", "--mesh=1x8", "--rules=tp", *elsewhere)
    assert not (tmp_path / "e").exists(), "evaluation leaves no files"


@pytest.mark.parametrize("recipe", full_except(["dot_relu_dot", "mlp"], []))
def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(recipe, train, quick, tmp_path):
    flags = ("--mesh=2x2", "--steps=20", "--checkpoint_every=10", "--batch_size=64")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(recipe, *flags, f"--workdir={whole}")
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "20")
    out = train(recipe, *flags, f"--workdir={parts}")
    assert f"Resumes at step 10, from {parts}/checkpoints/10." in out
    assert_bit_equal(state_of(parts, 20), state_of(whole, 20))
    fields = ("step", "loss", "grad_norm", "learning_rate")
    assert records(whole, *fields) == records(parts, *fields)
    held_out = ("step", "held_out_loss")
    assert records(whole, *held_out) == records(parts, *held_out)
    metadata = whole / "checkpoints" / "20" / "metadata" / "metadata"
    assert json.loads(metadata.read_text())["entry"] == recipe


@pytest.fixture
def pets(tmp_path):
    """A folder of colored pictures, ten of each of three classes."""
    rng = np.random.default_rng(0)
    for number, name in enumerate(("cat", "dog", "owl")):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for i in range(10):
            pixels = rng.integers(0, 60, (14, 12, 3), np.uint8)
            pixels[..., number] += 150
            PIL.Image.fromarray(pixels).save(tmp_path / "pets" / name / f"{i}.png")
    return tmp_path / "pets"


@pytest.mark.full
def test_vit_fine_tunes_a_hugging_face_model_with_a_new_head(train, quick, pets, tmp_path):
    """The folder's classes get a head; the run keeps the model's inputs and names the classes."""
    theirs = ROOT / "tests" / "golden" / "hf" / "vit"
    flags = ("--mesh=2x2", f"--dataset={pets}", "--batch_size=16", f"--workdir={tmp_path / 'v'}")
    more = ("--steps=20", "--learning_rate=0.01", "--warmup_steps=2", "--flip")
    out = train("vit", f"--restore_from=hf:{theirs}", *flags, *more)
    assert "The head is new and starts at zero, for 3 other classes." in out
    assert "attention: xla, because the kernels attend to earlier positions alone" in out
    assert f"Starts at step 0 from the parameters of {theirs}." in out
    found = records(tmp_path / "v", "held_out_accuracy", "held_out_loss")
    assert found[0][1] == pytest.approx(np.log(3), rel=1e-5), "a head of zeros"
    assert found[-1][0] == 1
    metadata = json.loads((tmp_path / "v/checkpoints/20/metadata/metadata").read_text())
    config, inputs = (
        metadata["config"],
        json.loads((theirs / "preprocessor_config.json").read_text()),
    )
    assert config["labels"] == ["cat", "dog", "owl"]
    assert (config["mean"], config["std"]) == (inputs["image_mean"], inputs["image_std"])
    assert config["resample"] == "bicubic"

    # Evaluated on pictures of two of its classes, it keeps its head; exported, it names them all.
    shutil.rmtree(pets / "dog")
    evaluated = train("vit", f"--restore_from={tmp_path / 'v'}", f"--dataset={pets}", "--steps=0",
                      "--mesh=4", "--batch_size=16")  # fmt: skip
    assert "The head is new" not in evaluated
    assert "Held-out accuracy 1.0000: 2 of 2 images" in evaluated
    exported = train("hf", "export", f"--source={tmp_path / 'v'}", f"--target={tmp_path / 'out'}")
    assert "AutoModelForImageClassification" in exported
    back = json.loads((tmp_path / "out" / "config.json").read_text())
    assert back["id2label"] == {"0": "cat", "1": "dog", "2": "owl"}
    back = json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())
    for key in ("image_mean", "image_std", "resample", "size", "rescale_factor"):
        assert back[key] == inputs[key], key
    imported = train("hf", "import", f"--source={tmp_path / 'out'}", f"--target={tmp_path / 'in'}")
    assert "tokenizer" not in imported


@pytest.mark.full
def test_vit_trains_an_adapter_and_a_new_head(train, inside, quick, pets, tmp_path):
    """Only these are saved; merged with the base on another mesh, they give the run's metrics."""
    theirs, work = ROOT / "tests" / "golden" / "hf" / "vit", tmp_path / "v"
    data = (f"--dataset={pets}", "--batch_size=16")
    flags = (
        f"--restore_from=hf:{theirs}",
        "--mesh=2x2",
        "--lora_rank=2",
        f"--workdir={work}",
        *data,
    )
    more = ("--steps=20", "--learning_rate=0.01", "--warmup_steps=2", "--lora_targets=q,v")
    out = train("vit", *flags, *more)
    # Two layers of A [32, 2] and B [2, 32] for q and v, and a head [32, 3] with a bias.
    assert f"Trains {2 * 2 * 128 + 32 * 3 + 3:,} of " in out
    line = next(x for x in out.splitlines() if x.startswith("Held-out accuracy 1.0000: 3 of 3"))
    names = {path.removeprefix("params/") for path in state_of(work, 20) if "params/" in path}
    heads = {name for name in names if "/lora/" not in name}
    assert (heads, len(names)) == ({"head", "head_bias"}, 2 + 4)
    assert line in train("vit", f"--restore_from={work}", "--mesh=1x4", "--steps=0", *data)
    shutil.rmtree(pets / "owl")
    (pets / "dog").rename(pets / "fox")  # so that another head is needed
    again = inside("recipes.vit", f"--restore_from={work}", "--lora_rank=4", "--mesh=1x4", *data)
    assert again.err.startswith("error: --lora_rank=4 must match the adapter ")
    train("hf", "export", f"--source={work}", f"--target={tmp_path / 'peft'}", "--adapter")
    keys = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (keys["modules_to_save"], keys["target_modules"]) == (
        ["classifier"],
        ["q_proj", "v_proj"],
    )


@pytest.mark.full
@pytest.mark.promise("all-pairs")
def test_two_towers_resume_and_move_to_other_meshes(train, tmp_path):
    """A run that lost its last steps repeats them bit for bit; other meshes restore what it saved."""
    work = tmp_path / "v"
    flags = ("--size=tiny", "--batch_size=16", "--checkpoint_every=2", "--log_every=1")
    run = ("--mesh=4x2", "--steps=4", f"--workdir={work}", *flags)
    train("siglip", *run)
    finished = state_of(work, 4)
    shutil.rmtree(work / "checkpoints" / "4")
    assert "step 3/4" in train("siglip", *run)
    assert_bit_equal(state_of(work, 4), finished)
    told = {
        re.search(r"Zero-shot accuracy .*nats", train("siglip", f"--restore_from={work}", *on))[0]
        for on in (("--mesh=1", "--steps=0", *flags), ("--mesh=1x8", "--steps=0", *flags))
    }
    (line,) = told
    assert "of 360 held-out images" in line


@pytest.mark.full
@pytest.mark.promise("all-pairs")
def test_two_towers_train_on_pairs_in_shards(train, tmp_path):
    shards(tmp_path / "pairs")
    flags = (f"--dataset={tmp_path / 'pairs'}", "--size=tiny", "--mesh=1x2", "--batch_size=8")
    out = train("siglip", *flags, "--steps=2", f"--workdir={tmp_path / 'run'}")
    assert "Pairs: 22 to train on, 2 held out." in out
    assert re.search(
        r"Retrieval [\d.]+: [012] of 2 held-out images find their own caption among those of 8", out
    )


@pytest.mark.parametrize("entry", ["dot_relu_dot", "mlp", "vit", "siglip"])
def test_parameter_paths_are_public(entry, golden):
    shapes = paths(abstract_model(ENTRIES[entry].build).shapes["params"])
    lines = [f"params/{path} {list(x.shape)} {x.dtype}\n" for path, x in shapes.items()]
    golden(f"{entry}_paths.txt", "".join(lines))


# ---- without recipes/instruments -----------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A copy of the project after `rm -r recipes/instruments`."""
    folder = tmp_path_factory.mktemp("bare")
    for name in ("zoo", "data"):
        (folder / name).symlink_to(ROOT / name)
    skipped = shutil.ignore_patterns("instruments", "__pycache__", "docs", "launch")
    shutil.copytree(ROOT / "recipes", folder / "recipes", ignore=skipped)
    return folder


@pytest.mark.promise("structure")
@pytest.mark.full
def test_recipes_run_without_instruments(bare):
    """All of them are imported, and one trains."""
    recipes = sorted(path.stem for path in (bare / "recipes").glob("[!_]*.py"))
    assert {"transformer", "generate", "evaluate", "plan", "bench"} <= {*recipes}
    code = f"""
import runpy, sys
from recipes import {", ".join(recipes)}
sys.argv[1:] = ["--steps=2", "--workdir=run"]
runpy.run_module("recipes.dot_relu_dot", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=bare, env=os.environ | {"PYTHONPATH": str(bare)},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout


@pytest.mark.promise("structure")
@pytest.mark.parametrize(
    ("command", "needs"),
    [
        ("transformer --plan --size=tiny", "--plan"),
        ("mlp --plan", "--plan"),
        ("evaluate --tasks=arc_easy --restore_from=transformer.stdlib_3m", "--tasks"),
        ("plan --size=tiny", "this command"),
        ("bench cpu --rounds=1", "this command"),
    ],
)
def test_what_needs_instruments_says_that_they_are_missing(
    command, needs, inside, monkeypatch, tmp_path
):
    for module in [name for name in sys.modules if name.startswith("recipes.instruments")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "recipes.instruments", None)  # importing it fails
    monkeypatch.chdir(tmp_path)
    done = inside(*f"recipes.{command}".split())
    assert done.code == 2
    assert done.err == (
        f"error: {needs} needs recipes/instruments, which is not here; git checkout "
        "recipes/instruments brings it back\n"
    )
    assert not [*tmp_path.iterdir()]
