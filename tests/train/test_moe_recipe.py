"""recipes.moe: its flags and reports, and its run on other meshes and in other commands."""

import dataclasses
import json
import math
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zoo.moe
from data.tokenizer import BYTES
from recipes.common import checkpoint
from recipes.common.language import model_config
from recipes.common.language.messages import use_of_experts
from recipes.common.mesh import make_mesh
from recipes.common.report import flops
from recipes.common.sharding.abstract import abstract_model, paths
from recipes.common.sharding.layout import make_layout
from recipes.common.sharding.shape import trace_shape
from recipes.moe import MODEL
from tests.support.quick import quick as quick
from tests.support.runs import TINY, assert_bit_equal, records, state_of
from zoo.moe import Config, MoE
from zoo.sizes import MOE as SIZES

pytestmark = pytest.mark.promise("moe-runs")

EXPERTS = "--mesh=data=2,expert=4"


# ---- flags ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ({}, {}),
        ({"capacity": "none"}, {"capacity": None}),
        ({"capacity": "2"}, {"capacity": 2.0}),
        ({"num_experts": 16, "experts_per_token": 4}, {"num_experts": 16, "experts_per_token": 4}),
        ({"balance_weight": 0.0}, {"balance_weight": 0.0}),
        ({"balance_rate": 0.001}, {"balance_rate": 0.001}),
        (
            {"set": ("normalize=false", "router_z_weight=0")},
            {"normalize": False, "router_z_weight": 0.0},
        ),
        ({"remat": "dispatched"}, {"remat": "dispatched"}),
        ({"dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        (
            {"lora_rank": 4},
            {"lora_rank": 4, "lora_alpha": 8.0, "lora_targets": ("q", "k", "v", "o")},
        ),
        (
            {"lora_rank": 4, "lora_alpha": 2.0, "lora_targets": "o,q"},
            {"lora_rank": 4, "lora_alpha": 2.0, "lora_targets": ("q", "o")},
        ),
    ],
)
def test_flags_change_the_size_that_they_are_of(flags, changes):
    flags = dataclasses.replace(MODEL, size="tiny", **flags)
    config = model_config("moe", flags, None, BYTES, jax.devices()[0])
    assert config == dataclasses.replace(Config.tiny(), **changes)


@pytest.mark.parametrize("size", SIZES)
def test_flops_are_those_of_active_parameters(size):
    """Counts like a size's docstring, but without vectors and the table that is only looked up."""
    config = SIZES[size]()
    shapes = paths(abstract_model(lambda: MoE(config, rngs=nnx.Rngs(0))).shapes["params"])
    share = config.experts_per_token / config.num_experts
    sizes = {path: math.prod(leaf.shape) for path, leaf in shapes.items()}
    of_experts = ("experts/gate", "experts/up", "experts/down")
    active = sum(n * (share if path.endswith(of_experts) else 1) for path, n in sizes.items())
    assert SIZES[size].__doc__.split(". ")[1].startswith(f"{active:,.0f} of them active")
    vectors = ("scale", "bias", "mlp_gate")  # norms, biases, and the gate of the shared MLP
    vectors = sum(n for path, n in sizes.items() if path.endswith(vectors))
    lookup = 0 if config.tie_embeddings else sizes["embed"]
    shape = trace_shape(MoE, config)
    assert shape.multiplied == active - vectors - lookup
    per_token = flops.decoder(shape, 1)["full"] - 12 * config.num_layers * (
        config.num_heads * config.head_dim
    )
    assert per_token == 6 * shape.multiplied


def test_the_report_of_their_use():
    metrics = {f"load_{i}": (float(i + 1), 2.0) for i in range(3)} | {"dropped": (1.0, 8.0)}
    assert use_of_experts(metrics) == (
        "Use of the 3 experts, in even shares: 0.50 to 1.50 (0.50, 1.00, 1.50); no room for 12.50% of "
        "what was chosen."
    )
    many = {f"load_{i}": (1.0, 1.0) for i in range(128)} | {"dropped": (0.0, 8.0)}
    assert use_of_experts(many).startswith(
        "Use of the 128 experts, in even shares: 1.00 to 1.00; no room"
    )


def test_restoring_never_drops_biases_silently(inside, book, tmp_path):
    """--size=tiny has no biases, and the checkpoint's choose the experts, too."""
    config = dataclasses.replace(Config.tiny(), balance_rate=0.01)
    layout = make_layout(MoE, config, make_mesh("1"))
    variables = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), layout.model.shapes)
    metadata = checkpoint.metadata("moe", layout, {}) | {"step": 0}
    checkpoint.write(tmp_path / "biased", variables, metadata)
    flags = (*TINY, book, "--mesh=1", "--tokenizer=bytes", "--steps=0")
    flags = (*flags, f"--restore_from={tmp_path / 'biased'}")
    done = inside("recipes.moe", *flags)
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"error: the model has no buffer layers/experts/bias, and checkpoint {tmp_path / 'biased'} has "
        "one; leave out the flags of the model, or use those that the checkpoint was made with\n"
    )


# ---- runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("moe")


@pytest.fixture
def trained(place, inside, quick, book):
    """A run of four steps on a mesh with an axis for experts; its workdir and what it printed."""
    work = place / "run"
    if not work.exists():
        flags = (*TINY, book, EXPERTS, "--log_every=1", "--eval_every=2", f"--workdir={work}")
        done = inside("recipes.moe", *flags, "--steps=4", "--checkpoint_every=2")
        assert (done.code, done.err) == (0, "")
        (place / "out").write_text(done.out)
    return work, (place / "out").read_text()


@pytest.mark.full
def test_a_run_reports_how_its_experts_are_used(trained):
    work, out = trained
    assert "mesh data=2,expert=4 (data 2 × expert 4) · rules fsdp_ep · 8 simulated" in out
    names = [f"load_{i}" for i in range(8)]
    for prefix in ("", "held_out_"):
        rows = np.array(records(work, *(prefix + name for name in names)))
        np.testing.assert_allclose(rows.mean(axis=1), 1, rtol=1e-5)
        for name in ("balance", "router_z", "dropped", "loss"):
            assert records(work, prefix + name), prefix + name
    *_, (last, dropped) = records(work, "held_out_load_7", "held_out_dropped")
    line = re.search(r"^Use of the 8 experts, in even shares: .*$", out, re.M)[0]
    assert line.endswith(f", {last:.2f}); no room for {dropped:.2%} of what was chosen.")
    assert "held-out balance" in out
    assert "load 0" not in out, "one figure of many stands in metrics.jsonl alone"


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["1x1", "4x2", "1x8", "data=1,expert=8"])
def test_it_is_restored_on_other_meshes(trained, inside, quick, book, mesh):
    work, out = trained
    flags = (*TINY, book, f"--mesh={mesh}", f"--restore_from={work}", "--steps=0")
    done = inside("recipes.moe", *flags)
    assert (done.code, done.err) == (0, "")
    for what in ("Held-out loss ", "Use of the 8 experts"):
        lines = [next(x for x in text.splitlines() if what in x) for text in (out, done.out)]
        assert lines[0] == lines[1]


@pytest.mark.full
def test_it_is_resumed_on_another_mesh(trained, inside, quick, book, place):
    work, _ = trained
    flags = (*TINY, book, f"--workdir={place / 'again'}", "--steps=4", "--checkpoint_every=2")
    assert inside("recipes.moe", *flags, EXPERTS, "--keep_checkpoints=9", "--log_every=1").code == 0
    shutil.rmtree(place / "again" / "checkpoints" / "4")
    done = inside("recipes.moe", *flags, "--mesh=4x2", "--log_every=1")
    assert (done.code, done.err) == (0, "")
    assert "Resumes at step 2" in done.out
    wanted, found = (
        records(folder, "step", "loss", "dropped") for folder in (work, place / "again")
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.full
def test_an_adapter_of_its_attention_is_trained_and_saved_alone(
    trained, inside, quick, book, place
):
    """Trains on its run with split experts; resumes and evaluates merged on another mesh."""
    work, _ = trained
    tuned, adapter = place / "tuned", ("--lora_rank=2", "--lora_targets=q,o")
    flags = (*TINY, book, f"--workdir={tuned}", f"--restore_from={work}", *adapter)
    flags = (*flags, EXPERTS, "--steps=4", "--checkpoint_every=2", "--log_every=1")
    done = inside("recipes.moe", *flags)
    assert (done.code, done.err) == (0, "")
    assert "\nTrains 1,536 of 273,216 parameters. " in done.out
    assert "\nUse of the 8 experts" in done.out
    given = checkpoint.find(tuned).metadata["flags"]
    assert (given["learning_rate"], given["warmup_steps"]) == (5e-4, 0)
    (base,) = records(work, "step", "held_out_loss")[-1:]
    before, after = records(tuned, "step", "held_out_loss")
    assert before == (0, base[1]), "it begins as its base"
    assert after[0] == 4
    assert after[1] < before[1]

    saved = state_of(tuned, 4)
    params = {path: value for path, value in saved.items() if path.startswith("params/")}
    factors = {f"{weight}/{factor}" for weight in "qo" for factor in "ab"}
    assert params.keys() == {f"params/layers/attention/lora/{factor}" for factor in factors}
    assert sum(value.size for value in params.values()) == 1_536
    assert not [path for path in saved if "expert" in path or "embed" in path]

    shutil.rmtree(tuned / "checkpoints" / "4")
    assert "Resumes at step 2" in inside("recipes.moe", *flags).out
    assert_bit_equal(state_of(tuned, 4), saved)
    flags = (*TINY, book, f"--restore_from={tuned}", "--steps=0", "--mesh=4x2")
    there = inside("recipes.moe", *flags)
    assert (there.code, there.err) == (0, "")
    assert "\n271,680 parameters. " in there.out
    loss = float(re.search(r"Held-out loss (\S+) nats", there.out)[1])
    assert loss == pytest.approx(after[1], abs=1e-4)


@pytest.mark.full
def test_other_commands_take_it(trained, inside, quick, book, place):
    work, out = trained
    loss = re.search(r"Held-out loss \S+ nats/byte, (\S+ bits/byte)", out)[1]
    published, folder, back = place / "published", place / "folder", place / "back"
    for module, flags in (
        ("recipes.publish", (f"--source={work}", f"--target={published}", "--licence=x", EXPERTS)),
        ("recipes.hf", ("export", f"--source={work}", f"--target={folder}")),
        ("recipes.hf", ("import", f"--source={folder}", f"--target={back}", EXPERTS)),
    ):
        done = inside(module, *flags)
        assert (done.code, done.err) == (0, ""), module
    a, b = (paths(checkpoint.find(path).read(_whole(path))) for path in (work, back))
    assert a.keys() == b.keys()
    for path, value in a.items():
        np.testing.assert_array_equal(value, b[path], err_msg=path)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "mixtral"
    assert checkpoint.find(back).metadata["config"]["capacity"] is None

    flags = (f"--restore_from={published}", book, "--part=held_out", "--seq_len=32", "--pack=false")
    done = inside("recipes.evaluate", *flags, EXPERTS)
    assert (done.code, done.err) == (0, "")
    assert loss in done.out
    written = []
    for mesh in ("1x1", "data=2,expert=4"):
        flags = (f"--restore_from={published}", "--prompt=def ", "--temperature=0")
        done = inside("recipes.generate", *flags, f"--mesh={mesh}", "--max_new_tokens=12")
        assert (done.code, done.err) == (0, "")
        written.append(next(x for x in done.out.splitlines() if x.startswith("def ")))
    assert written[0] == written[1]


def _whole(path):
    layout = checkpoint.layout_of(checkpoint.find(path), make_mesh("1"))
    return {"params": layout.variables()["params"]}


@pytest.mark.full
def test_meshes_with_names_are_compared(inside, quick, monkeypatch):
    monkeypatch.setattr(zoo.moe, "RULES", {k: zoo.moe.RULES[k] for k in ("dp", "fsdp_ep")})
    flags = ("--entry=moe", "--size=tiny", "--seq_len=16", "--meshes=data=2,expert=4")
    done = inside("recipes.meshes", *flags)
    assert (done.code, done.err) == (0, "")
    rows = [line.split(" | ")[0] for line in done.out.splitlines() if line.startswith("| ")]
    assert rows[1:] == ["| fsdp_ep"]
    assert "rules 'dp' use no mesh axis 'expert'" in done.out
