"""Tuning a model that sees: adapters and whole models of a folder, written and read back."""

import dataclasses

import jax
import numpy as np
import pytest
import safetensors.numpy

from recipes.common import checkpoint
from recipes.common.mesh import make_mesh
from recipes.common.report import report
from recipes.common.runtime import Run
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import make_layout, shardings
from recipes.common.train.state import initialize
from recipes.common.train.step import make_step
from recipes.common.train.training_flags import Training
from tests.conftest import full_except
from tests.support.pictured_folder import GOLDEN, write_folder
from tests.support.quick import QUICK
from tests.support.quick import quick as quick
from zoo.core.layers import AttentionType
from zoo.gemma3_vision import Config, Gemma3Vision

pytestmark = pytest.mark.promise("hugging-face")

# Entry → the golden folder that it reads, and tokens of a row with a picture.
FOLDERS = {"gemma3_vision": (GOLDEN, 24), "gemma4_vision": (GOLDEN.parent / "gemma4_large", 80)}


def logits(source, golden) -> np.ndarray:
    layout = checkpoint.layout_of(source, make_mesh("1x1"), "dp")
    variables = checkpoint.restore_variables(source, layout)
    stored = np.load(golden / "outputs.npz")
    pictures = {name: stored[name] for name in ("images", "grids") if name in stored}

    def run(variables, tokens, pictures):
        return layout.model.merge(variables)(tokens, None, **pictures)

    given = (variables, stored["tokens"], pictures)
    return np.asarray(layout.compile(run, *given, compiler_options=QUICK)(*given))


def tune(inside, entry, folder, *flags) -> None:
    done = inside(
        f"recipes.{entry}", f"--restore_from=hf:{folder}", "--mesh=1x1", "--batch_size=4",
        f"--dataset={folder.parent / 'rows.jsonl'}", "--questions=0", "--steps=3",
        f"--workdir={folder.parent / 'run'}", "--learning_rate=0.01", "--warmup_steps=0", *flags,
    )  # fmt: skip
    assert (done.code, done.err) == (0, "")


def export(inside, folder, target: str, *flags) -> str:
    run = folder.parent / "run"
    done = inside(
        "recipes.hf", "export", f"--source={run}", f"--target={folder.parent / target}", *flags
    )
    assert (done.code, done.err) == (0, "")
    return f"hf:{folder.parent / target}"


@pytest.mark.parametrize(
    "entry", full_except([*FOLDERS], fast=["gemma3_vision"], release=["gemma4_vision"])
)
def test_an_adapter_of_a_folder_is_exported_merged_and_alone(entry, tmp_path, inside, quick):
    golden, length = FOLDERS[entry]
    folder = write_folder(tmp_path, golden)
    tune(inside, entry, folder, "--lora_rank=2", f"--seq_len={length}")
    tuned = logits(checkpoint.find(folder.parent / "run"), golden)
    base = logits(checkpoint.find(f"hf:{folder}", entry=entry), golden)
    assert np.abs(tuned - base).max() > 1e-3
    merged = checkpoint.find(export(inside, folder, "merged"), entry=entry)
    np.testing.assert_array_equal(logits(merged, golden), tuned)
    text = entry.removesuffix("_vision")
    asked = checkpoint.find(folder.parent / "run", entry=text)
    assert asked.base.metadata["entry"] == entry, "as the run says, whatever is asked"
    flags = (f"--source={folder.parent / 'run'}", f"--target={folder.parent / 'x'}", "--adapter")
    done = inside("recipes.hf", "export", *flags, f"--entry={text}")
    assert done.code == 2, "the run's checkpoint says its entry"
    assert f"--entry={text} does not read --source=" in done.err
    assert f", a '{entry}' model; leave --entry out, or use --entry={entry}" in done.err
    name = export(inside, folder, "adapter", "--adapter")
    written = safetensors.numpy.load_file(folder.parent / "adapter" / "adapter_model.safetensors")
    in_memory = "base_model.model.model.language_model.layers."
    assert all(tensor.startswith(in_memory) for tensor in written), "names of transformers' modules"
    alone = checkpoint.find(name, base=f"hf:{folder}", entry=entry)
    np.testing.assert_array_equal(logits(alone, golden), tuned)


@pytest.mark.parametrize(
    "optimizer", full_except(["adamw", "muon", "sgd"], fast=[], release=["muon", "sgd"])
)
def test_a_frozen_tower_is_not_trained(optimizer):
    """Nor has it moments; everything else is trained."""
    config = dataclasses.replace(
        Config.tiny(),
        num_layers=1,
        tower_layers=1,
        layer_kinds=(AttentionType(None, 1e6),),
        freeze_tower=True,
    )
    layout = make_layout(Gemma3Vision, config, make_mesh("2"), "fsdp", batch_size=8, seq_len=16)
    run = Run(steps=4, batch_size=8, learning_rate=0.1)
    step = make_step(layout, run, Training(optimizer=optimizer, warmup_steps=0))
    abstract = step.abstract_state()
    moments = [path for path in paths(abstract["opt_state"]) if "vision" in path]
    assert not moments
    counts = [x.size for path, x in paths(abstract["params"]).items() if path[:7] != "vision/"]
    assert f"Trains {sum(counts):,} of " in report.table(layout, abstract)
    assert [path for path in paths(abstract["opt_state"]) if "layers/mlp/up" in path]
    random = np.random.default_rng(0)
    tokens = random.integers(0, 257, (8, 16), np.int32)
    tokens[:3, 2:6] = config.image_token
    batch = {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "segment_ids": np.zeros((8, 16), np.int32),
        "images": random.integers(0, 256, (8, 1, 8, 8, 3), np.uint8),
    }
    example = {name: x[0] for name, x in batch.items()}
    compiled = layout.compile(
        step, abstract, layout.abstract_batch(example), out_shardings=(shardings(abstract), None),
        compiler_options=QUICK,
    )  # fmt: skip
    state = initialize(layout, step.optimizer, 0, abstract)
    before = {path: np.asarray(x) for path, x in paths(state["params"]).items()}
    batch = jax.device_put(batch, layout.batch_shardings(batch))
    state, metrics = compiled(state, batch)
    assert np.isfinite(float(metrics["grad_norm"]))
    for path, value in paths(state["params"]).items():
        assert np.array_equal(before[path], value) == path.startswith("vision/"), path
