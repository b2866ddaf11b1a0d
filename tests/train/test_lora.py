"""LoRA: adapters beside frozen weights, trained on any mesh, saved alone, merged with their base."""

import dataclasses
import functools
import json
import pathlib
import re
import shutil
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax.contrib
import pytest
import safetensors.numpy
from flax import nnx

import recipes.hf
from data.tokenizer import BYTES, from_files
from recipes.common import checkpoint, entries, hf
from recipes.common.checkpoint import adapters, card
from recipes.common.report import flops, report
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.abstract import nested, paths, variables_of
from recipes.common.sharding.layout import make_layout
from recipes.common.sharding.rules import used_axes
from recipes.common.sharding.shape import trace_shape
from recipes.common.train.optimizer import LearningRate, hidden_matrices
from recipes.common.train.resume import read_variables
from recipes.common.train.state import abstract_state, new_params, new_state
from recipes.common.train.step import TrainStep
from recipes.instruments.prove.comparison import GRADIENT_TOLERANCE, LOSS_TOLERANCE, difference
from recipes.instruments.prove.run import train
from tests.conftest import full_except
from tests.support.entries import BATCH, ENTRIES, OPTIMIZER, compile_step
from tests.support.golden_folders import GOLDEN
from tests.support.hf_families import ADAPTERS, FAMILIES, TOKENS_BT, TOLERANCE
from tests.support.hf_models import inputs, our_logits, params_of
from tests.support.quick import QUICK
from tests.support.quick import quick as quick
from tests.support.runs import TINY, assert_bit_equal, forget_hashes, saving, state_of
from tests.support.small_tokenizers import byte_level, metaspace
from zoo import moe
from zoo.core.layers import multiply
from zoo.llama_relatives import Config, Transformer
from zoo.options.lora import AdaptedWeight
from zoo.options.weights import EXPERT_TARGETS

pytestmark = pytest.mark.promise("lora")

PLAIN = Config.tiny()
ADAPTED = {"lora_rank": 4, "lora_alpha": 12.0}
LORA = dataclasses.replace(PLAIN, **ADAPTED)
ODD = Config(  # heads and vocabulary that no mesh axis divides
    331, 64, 2, num_heads=9, num_kv_heads=3, head_dim=8, mlp=200, qkv_bias=True, qk_norm=True,
    lora_rank=3, lora_targets=("q", "v", "o", "down"),
)  # fmt: skip
CONFIGS = {
    "tiny": LORA,
    "odd": ODD,
    "moe": dataclasses.replace(moe.Config.tiny(), **ADAPTED),
    "experts": dataclasses.replace(
        moe.Config.tiny(), lora_targets=("q", "o", *EXPERT_TARGETS), **ADAPTED
    ),
    # With a bias for each expert: buffers, which training moves beside the adapters.
    "biases": dataclasses.replace(moe.Config.tiny(), balance_rate=0.01, **ADAPTED),
}
CASES = [("tiny", "4x2"), ("tiny", "1x8"), ("tiny", "2x2x2"), ("odd", "1x8")]
CASES += [("biases", "data=2,expert=4")]
CASES += [("experts", "data=2,expert=2,model=2")]


def entry_of(config) -> str:
    return {Config: "transformer", moe.Config: "moe"}[type(config)]


def plain(config):
    """The config without adapters."""
    default = type(config).lora_targets
    return dataclasses.replace(config, lora_rank=0, lora_alpha=16.0, lora_targets=default)


def layout_of(config, mesh: str = "1x1", rules: str | None = None):
    model = entries.model(entry_of(config))
    return make_layout(model, config, make_mesh(mesh), rules, batch_size=BATCH)


@functools.cache
def variables(name: str) -> dict:
    """Variables of a model with non-zero adapters, on the host."""
    shapes, random = layout_of(CONFIGS[name]).model.shapes, np.random.default_rng(0)

    def value(path, leaf):
        fan = 1 if path[-1].key == "scale" else leaf.shape[1]
        noise = 0.3 * fan**-0.5 * random.normal(size=leaf.shape)
        return (noise + (path[-1].key == "scale")).astype(np.float32)

    return jax.tree_util.tree_map_with_path(value, shapes)


def products(a, b, stacked: int) -> np.ndarray:
    """A · B of each index of the first `stacked` dims."""
    if not stacked:
        return np.tensordot(a, b, 1)
    return np.stack([products(*pair, stacked - 1) for pair in zip(a, b, strict=True)])


@functools.cache
def merged(name: str) -> dict:
    """The variables of the plain model, with A·B added in NumPy."""
    config, found = CONFIGS[name], variables(name)
    params, factors = paths(found["base"]), paths(found["params"])
    for path, a in factors.items():
        if path.endswith("/a"):
            stacked = 1 + ("/experts/" in path)  # of layers, and of experts
            product = products(a, factors[f"{path[:-1]}b"], stacked)
            weight = path.removesuffix("/a").replace("/lora", "")
            params[weight] = params[weight] + product * (config.lora_alpha / config.lora_rank)
    return {"params": nested(params)} | buffers(found)


def buffers(variables: dict) -> dict:
    return {kind: tree for kind, tree in variables.items() if kind == "buffers"}


@functools.cache
def program(config):
    layout = layout_of(config)
    forward = lambda v, t: layout.model.merge(v)(t)  # noqa: E731
    return layout, layout.compile(
        forward, layout.variables(), jax.device_put(TOKENS_BT, layout.replicated),
        compiler_options=QUICK,
    )  # fmt: skip


def logits(config, variables: dict) -> np.ndarray:
    layout, forward = program(config)
    return np.asarray(forward(*jax.device_put((variables, TOKENS_BT), layout.replicated)))


# ---- the model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", full_except(["tiny", "biases"], ["tiny"]))
def test_step_0_is_the_base_exactly(name, quick):
    config, every = CONFIGS[name], variables(name)
    new = jax.device_get(new_params(layout_of(config)))
    assert paths(new).keys() == paths(every["params"]).keys()
    a = new["layers"]["attention"]["lora"]["o"]["a"]
    assert np.std(a) == pytest.approx(128**-0.5, rel=0.1), "of 16 heads of 8 dims"
    found = logits(config, every | {"params": new})
    base = {"params": every["base"]} | buffers(every)
    np.testing.assert_array_equal(found, logits(plain(config), base))


@pytest.mark.parametrize("name", full_except(["tiny", "biases", "experts"], ["tiny"]))
def test_merged_logits_are_those_of_base_and_adapter(name, strict):
    config, every = CONFIGS[name], variables(name)
    apart = logits(config, every)
    base = {"params": every["base"]} | buffers(every)
    assert np.abs(apart - logits(plain(config), base)).max() > 0.1
    np.testing.assert_allclose(logits(plain(config), merged(name)), apart, rtol=0, atol=TOLERANCE)


def test_only_chosen_weights_have_adapters():
    found = layout_of(ODD).model.shapes["params"]
    names = {path.split("/")[-2] for path in paths(found)}
    assert names == {"q", "v", "o", "down"}
    assert paths(found)["layers/attention/lora/o/a"].shape == (2, 9, 8, 3)
    assert layout_of(dataclasses.replace(ODD, lora_rank=0)).model.shapes.keys() == {"params"}


def test_experts_have_adapters_if_they_are_named():
    """By default none; then each expert has an A and a B of its own."""

    def adapted(name: str) -> set[str]:
        found = layout_of(CONFIGS[name]).model.shapes
        assert {*found["base"]["layers"]["experts"]} == {"router", "gate", "up", "down"}
        return {path for path in paths(found["params"]) if path.startswith("layers/experts")}

    assert not adapted("moe")
    names = {f"{name}/{factor}" for name in ("gate", "up", "down") for factor in "ab"}
    assert adapted("experts") == {f"layers/experts/lora/{name}" for name in names}
    factors = layout_of(CONFIGS["experts"]).model.shapes["params"]["layers"]["experts"]["lora"]
    assert factors["down"]["a"].shape == (2, 8, 64, 4)
    assert factors["down"]["b"].shape == (2, 8, 4, 64)
    for target in ("gate", "up", "down", "router"):
        said = f"lora_targets has {target!r}, which is not one of q, k, v, o, expert_gate, "
        with pytest.raises(ValueError, match=said):
            dataclasses.replace(CONFIGS["moe"], lora_targets=("q", target))
    with pytest.raises(ValueError, match="has 'expert_up', which is not one of q"):
        dataclasses.replace(PLAIN, lora_targets=("expert_up",))


def test_in_bfloat16_what_an_adapter_adds_is_not_lost_in_the_weight(strict):
    """A·B is a thousandth of W, which bfloat16's W + A·B would lose."""

    def weight(value, *axes, kind=nnx.Param, **attributes):
        value = jnp.asarray(value, jnp.bfloat16)
        return kind(value, out_sharding=axes, eager_sharding=False, **attributes)

    x, w = np.zeros((1, 1, 128)), np.ones((128, 64))
    x[..., 0], x[..., 1] = 1, -1  # x·W is 0
    a, b = np.eye(128, 4), np.full((4, 64), 1e-3)
    a[1] = 0
    assert (jnp.asarray(w + a @ b, jnp.bfloat16) == 1).all()
    factors = SimpleNamespace(a=weight(a, "mlp", "lora"), b=weight(b, "lora", "embed"), scale=3.0)
    down = weight(w, "mlp", "embed")
    adapted = weight(w, "mlp", "embed", kind=AdaptedWeight, weight=down, adapter=factors)
    found = multiply(jnp.asarray(x, jnp.bfloat16), adapted)
    np.testing.assert_allclose(found.astype(np.float32), 3e-3, rtol=1e-2)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *[("tiny", "4x2"), ("tiny", "2x2x2"), ("moe", "4x2"), ("moe", "data=2,expert=4")],
        ("experts", "data=2,expert=2,model=2"),
    ],
)
def test_adapters_are_sharded_as_reviewed(name, mesh, golden):
    lines, entry = [], entry_of(CONFIGS[name])
    there = {*make_mesh(mesh).axis_names}
    for strategy, table in entries.zoo_file(entry).RULES.items():
        if used_axes(table) <= there and there & {"fsdp", "expert"} <= used_axes(table):
            lines.append(strategy)
            layout = layout_of(CONFIGS[name], mesh, strategy)
            axes = paths(layout.model.axes["params"])
            for path, variable in paths(layout.variables()["params"]).items():
                spec = ", ".join("-" if x is None else str(x) for x in variable.sharding.spec)
                lines.append(f"  {path:<30} ({', '.join(axes[path])}) → ({spec})")
    golden(f"{entry}_lora_{mesh}_specs.txt", "\n".join(lines) + "\n")


def test_a_table_may_shard_the_rank():
    table = {"batch": "data", "lora": "model"}
    layout = make_layout(Transformer, LORA, make_mesh("4x2"), table, batch_size=BATCH)
    found = paths(layout.variables()["params"])["layers/attention/lora/q/a"]
    assert found.sharding.spec == jax.P(None, None, "model")


# ---- training ------------------------------------------------------------------------------------


@functools.cache
def trained(name: str, mesh: str):
    """(losses, gradients) of three steps, and the state after them, on the host."""
    layout = layout_of(CONFIGS[name], mesh)
    abstract = abstract_state(layout, OPTIMIZER)
    begin = new_state(layout, OPTIMIZER, 0, variables(name))
    entry = entry_of(CONFIGS[name])
    step = compile_step(entry, layout)
    training = train(layout, step, begin, abstract, ENTRIES[entry].batches[:3])
    losses = [means["loss"] for means in training.metrics]
    return losses, training.grads, jax.device_get(training.state), abstract


@pytest.mark.parametrize(("name", "mesh"), full_except(CASES, CASES[:1]))
def test_meshes_agree_on_losses_and_gradients(name, mesh):
    want_losses, want_grads, *_ = trained(name, "1x1")
    losses, grads, state, abstract = trained(name, mesh)
    np.testing.assert_allclose(losses, want_losses, rtol=LOSS_TOLERANCE)
    for got, want in zip(grads, want_grads, strict=True):
        assert got.keys() == {"layers"}, "of the adapters alone"
        for path, value in paths(got).items():
            assert np.linalg.norm(value) > 0, path
            assert difference(value, paths(want)[path]) < GRADIENT_TOLERANCE, path
    for path, value in paths(state["base"]).items():
        np.testing.assert_array_equal(value, paths(variables(name)["base"])[path], err_msg=path)
    for path, value in paths(buffers(state)).items():
        assert np.abs(value - paths(buffers(variables(name)))[path]).max() > 0, "moved by training"
    moments = {k for k in paths(state["opt_state"]) if "/mu/" in k}
    assert len(moments) == len(paths(state["params"]))
    where = paths(abstract["params"])
    for path, moment in paths(abstract["opt_state"]).items():
        if "/mu/" in path:
            assert moment.sharding == where[path.partition("/mu/")[2]].sharding


def test_the_report_says_what_is_trained():
    """Checks the numbers for SmolLM2-135M with rank 8."""
    smol = Config(49_152, 576, 30, num_heads=9, num_kv_heads=3, head_dim=64, mlp=1_536, lora_rank=8)
    layout = layout_of(smol)
    state = abstract_state(layout, OPTIMIZER)
    assert report.total(layout, state) == (
        "Trains 2,442,240 of 136,957,248 parameters. Per device: parameters 538.1 MB (base) + 9.8 MB "
        "(trained), gradients 9.8 MB, optimizer state 19.5 MB."
    )
    plain = dataclasses.replace(smol, lora_rank=0)
    shape = trace_shape(Transformer, smol)
    attention = flops.decoder(shape, 64)["causal"] - 4 * 64 * shape.multiplied
    assert (
        flops.decoder(trace_shape(Transformer, plain), 64)["causal"]
        == 6 * 64 * shape.multiplied + attention
    )


WIDE = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 64, "mlp": 1_024}


@pytest.mark.full
@pytest.mark.parametrize(
    "config",
    [
        Config(384, 256, 4, **WIDE, lora_rank=2),
        moe.Config(384, 256, 4, **WIDE, num_experts=2, experts_per_token=1, lora_rank=2),
    ],
    ids=entry_of,
)
def test_a_step_holds_no_gradient_of_a_frozen_weight(config, quick):
    """Nor does it copy the base: the state's memory is reused."""
    held = {}
    for rank in (0, 2):
        layout = layout_of(dataclasses.replace(config, lora_rank=rank))
        layout = dataclasses.replace(layout, batch_size=1)
        lr = LearningRate(1e-3, warmup=1, steps=10)
        step = TrainStep(layout, OPTIMIZER, lr)
        example = {"tokens": np.zeros(16, np.int32), "targets": np.zeros(16, np.int32)}
        held[rank] = step.lower(step.abstract_state(), example).compile().memory_analysis()
    experts = getattr(config, "num_experts", 1)
    layers = 4 * 4 * (4 * 256 * 256 + experts * 3 * 256 * 1_024)  # bytes of their matrices
    assert held[0].temp_size_in_bytes > layers
    assert held[2].temp_size_in_bytes < layers / 2
    assert held[2].alias_size_in_bytes > layers


def test_muon_takes_every_factor_as_a_matrix():
    layout = layout_of(LORA)
    found = hidden_matrices(layout)
    is_leaf = lambda x: isinstance(x, optax.contrib.MuonDimensionNumbers)  # noqa: E731
    leaves = jax.tree.leaves(found, is_leaf=is_leaf)
    assert len(leaves) == 14
    attention = found["layers"]["attention"]["lora"]
    assert [*map(list, attention["q"]["b"])] == [[1], [2, 3]], "rank × heads · head dim"
    assert sorted(map(list, attention["o"]["a"])) == [[1, 2], [3]]


# ---- on disk -------------------------------------------------------------------------------------


class Disk(NamedTuple):
    base: pathlib.Path
    run: pathlib.Path  # with the adapter's checkpoint of step 5
    state: dict


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns a function of a name in CONFIGS: its adapter on disk and the adapter's content."""

    @functools.cache
    def save(name: str) -> Disk:
        folder, config, found = tmp_path_factory.mktemp("lora"), CONFIGS[name], variables(name)
        base, run, entry = folder / "base", folder / "run", entry_of(config)
        facts = checkpoint.metadata(entry, layout_of(plain(config)), {"seq_len": 99})
        whole = {"params": found["base"]} | jax.tree.map(lambda x: x - 1, buffers(found))
        checkpoint.write(base, jax.device_put(whole), facts | {"step": 7})
        layout = layout_of(config)
        state = jax.device_put(new_state(layout, OPTIMIZER, 0, found), layout.replicated)
        facts = checkpoint.metadata(entry, layout, {"seq_len": 8})
        facts["base"] = adapters.describe_base(checkpoint.find(base), str(base))
        with saving(run, entry, facts) as saver:
            saver.save(5, state)
        return Disk(base, run, jax.device_get(state))

    return save


@pytest.fixture(scope="module")
def made(saved) -> Disk:
    return saved("tiny")


@pytest.fixture
def disk(made, tmp_path) -> Disk:
    """A copy to change; the adapter's base is still the original."""
    shutil.copytree(made.base.parent, tmp_path / "copy")
    return Disk(tmp_path / "copy" / "base", tmp_path / "copy" / "run", made.state)


@pytest.mark.parametrize("name", full_except(["tiny", "moe", "biases"], ["tiny"]))
def test_an_adapter_is_saved_alone(name, saved):
    made = saved(name)
    there = state_of(made.run, 5)
    assert there.keys() == paths({k: v for k, v in made.state.items() if k != "base"}).keys()
    assert all("/lora/" in path for path in there if path.startswith("params/"))
    found = checkpoint.find(made.run)
    assert found.metadata["base"]["path"] == str(made.base)
    assert len(found.metadata["base"]["sha256"]) == 64
    assert found.metadata["config"].get("lora_rank", 0) == 0, "what is found is merged"
    assert found.metadata["context"] == 99, "the base's, not that of the adapter's data"


RESTORED = [
    ("tiny", "4x2", "fsdp_tp"),
    ("tiny", "1x8", "tp"),
    ("moe", "data=2,expert=4", "fsdp_ep"),
    ("biases", "data=2,expert=2,model=2", "fsdp_ep_tp"),
]


@pytest.mark.parametrize(("name", "mesh", "rules"), full_except(RESTORED, RESTORED[1:2]))
def test_it_is_restored_merged_on_any_mesh(name, mesh, rules, saved):
    made = saved(name)
    model, metadata = checkpoint.restore(made.run, make_mesh(mesh), rules)
    assert (metadata["step"], model.config.lora_rank) == (5, 0)
    layout, want = layout_of(plain(CONFIGS[name]), mesh, rules), merged(name)
    found, want = variables_of(model), paths(want)
    assert paths(found).keys() == want.keys()
    for path, leaf in paths(layout.variables()).items():
        assert paths(found)[path].sharding == leaf.sharding, path
        np.testing.assert_allclose(paths(found)[path], want[path], rtol=0, atol=1e-6, err_msg=path)
    # On a mesh with Auto axes, and one parameter at a time, as export reads them.
    auto = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    leaf = jax.ShapeDtypeStruct(
        (2, 64, 16, 8), np.float32, sharding=jax.NamedSharding(auto, jax.P(None, None, "model"))
    )
    only = checkpoint.find(made.run).read({"params": nested({"layers/attention/q": leaf})})
    assert paths(only).keys() == {"params/layers/attention/q"}
    want = want["params/layers/attention/q"]
    np.testing.assert_allclose(only["params"]["layers"]["attention"]["q"], want, atol=1e-6)


def test_merged_weights_are_rounded_once_to_the_dtype_that_is_asked_for(made):
    layout, want = layout_of(PLAIN, "4x2"), paths(merged("tiny")["params"])
    found = checkpoint.restore_variables(checkpoint.find(made.run), layout, "bfloat16")
    for path, array in paths(found["params"]).items():
        assert array.dtype == (jnp.float32 if path.endswith("scale") else jnp.bfloat16), path
        rounded = np.asarray(want[path], array.dtype).astype(np.float32)
        ours = np.asarray(array, np.float32)
        np.testing.assert_allclose(ours, rounded, rtol=2**-7, atol=1e-6, err_msg=path)
        assert (ours == rounded).mean() > 0.99, path


def test_the_tokenizer_is_the_adapters_with_what_the_base_knows():
    """PEFT's folders often lack generation_config.json."""
    whole = byte_level()
    less = {name: text for name, text in whole.items() if not name.startswith("generation")}

    def source(files):
        return SimpleNamespace(tokenizer=lambda: from_files(files) if files else None)

    def ends(own, base):
        return adapters.Adapted(source(own), source(base), "").tokenizer().end

    assert ends(less, whole) == ends({}, whole) == ends(whole, {}) == (2, 0)
    assert ends(less, {}) == ends(less, metaspace()) == (2,)


@pytest.mark.parametrize(
    ("name", "mesh"),
    full_except([("tiny", "1x8"), ("biases", "data=2,expert=4")], [("tiny", "1x8")]),
)
def test_a_run_resumes_with_its_base_on_another_mesh(name, mesh, saved):
    made = saved(name)
    abstract = abstract_state(layout_of(CONFIGS[name], mesh), OPTIMIZER)
    state = checkpoint.find(made.run).read(abstract)
    assert_bit_equal(paths(state), paths(made.state))
    for path, array in paths(state).items():
        assert array.sharding == paths(abstract)[path].sharding, path


@pytest.mark.full
def test_a_new_adapter_begins_with_all_of_its_base(saved):
    layout = layout_of(CONFIGS["biases"], "data=2,expert=4")
    begin = read_variables(checkpoint.find(saved("biases").base), layout)
    assert_bit_equal(paths(begin["base"]), paths(variables("biases")["base"]))
    want = jax.tree.map(lambda x: x - 1, buffers(variables("biases")))
    assert_bit_equal(paths(buffers(begin)), paths(want))
    for path, leaf in paths(layout.variables()).items():
        assert paths(begin)[path].sharding == leaf.sharding, path


def refused(path, said: str, **more) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        checkpoint.find(path, **more)
    assert "\n" not in str(caught.value)
    assert "; " in str(caught.value), "the fix is missing"


def test_a_base_that_moved_is_found_by_a_flag(disk, made, monkeypatch):
    want = checkpoint.find(made.run).shapes()
    moved = disk.base.rename(disk.base.with_name("moved"))
    shutil.move(made.base, made.base.with_name("away"))
    try:
        refused(disk.run, f"is an adapter without its base (--base={made.base} does not exist)")
        found = checkpoint.find(disk.run, base=str(moved))
    finally:
        shutil.move(made.base.with_name("away"), made.base)
    assert paths(found.shapes()).keys() == paths(want).keys()
    assert found.metadata["base"]["path"] == str(moved), "the next checkpoint says so"
    monkeypatch.chdir(moved.parent)
    assert checkpoint.find(disk.run, base="moved").metadata["base"]["path"] == str(moved)


def test_an_unsuitable_base_of_an_adapter_is_refused(disk, tmp_path):
    other = tmp_path / "other"
    facts = checkpoint.metadata("transformer", layout_of(PLAIN), {}) | {"step": 7}
    changed = jax.tree.map(lambda x: x + 1, variables("tiny")["base"])
    checkpoint.write(other, {"params": jax.device_put(changed)}, facts)
    for hash_files in (True, False):  # --verify=False reads less, but notices this too
        said = "so it has changed or is a different model; use --base=PATH"
        refused(disk.run, said, base=str(other), hash_files=hash_files)
    refused(disk.run, "without its base (--base=nowhere does not exist)", base="nowhere")
    refused(disk.run, "and its base --base=", base=str(disk.run))
    refused(disk.base, "--base=x is for adapters, and --restore_from=", base="x")
    forget_hashes(disk.base)  # of a base whose content nothing names but its files
    refused(disk.run, "so it has changed or is a different model", base=str(disk.base))
    # An adapter that says that another model is its base.
    file = disk.run / "checkpoints" / "5" / "metadata" / "metadata"
    small = dataclasses.replace(PLAIN, mlp=64)
    shapes = layout_of(small).model.shapes["params"]
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    facts = checkpoint.metadata("transformer", layout_of(small), {}) | {"step": 0}
    checkpoint.write(tmp_path / "small", {"params": jax.device_put(zeros)}, facts)
    said = json.loads(file.read_text())
    said["base"] = adapters.describe_base(
        checkpoint.find(tmp_path / "small"), str(tmp_path / "small")
    )
    file.write_text(json.dumps(said))
    forget_hashes(disk.run / "checkpoints" / "5")
    refused(disk.run, "adapts layers/mlp/down by [2, 128, 4] · [2, 4, 64], and its base")


@pytest.mark.parametrize(
    ("named", "imported", "shown"),
    [
        ("base", None, "{base}"),  # as a relative path it means nothing elsewhere
        ("{base}", None, "{base}"),
        ("/runs/adapter", None, "{base}"),  # trained further
        ("transformer.tiny", "hf:org/name", "hf:org/name"),
        ("runs/x", "hf:/models/llama", "hf:/models/llama"),
        ("{base}", "llama", "{base}"),  # imported by an early version
    ],
)
def test_the_card_of_an_adapter_names_its_base_and_the_alpha_that_was_used(
    named, imported, shown, made
):
    """The flag --lora_alpha=0 stands for a value that depends on the rank."""
    facts = checkpoint.find(made.run).metadata
    named = named.format(base=made.base)
    facts["flags"] = {"restore_from": named, "lora_rank": 4, "lora_alpha": 0.0, "seq_len": 8}
    facts |= {"imported": imported} if imported else {}
    assert card.base(facts)["path"] == shown.format(base=made.base)
    assert card.command(facts).endswith(" --lora_rank=4 --lora_alpha=12.0 --seq_len=8")


def test_a_damaged_adapter_is_refused_by_the_name_of_the_file(disk):
    file = max(
        (disk.run / "checkpoints" / "5" / "state" / "d").iterdir(), key=lambda f: f.stat().st_size
    )
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    refused(disk.run, f"state/d/{file.name} differs from what was saved")


def test_another_adapter_can_not_be_trained_on(made):
    found = checkpoint.find(made.run)
    for changes, said in (
        ({"lora_rank": 8}, "--lora_rank=8 must match the adapter"),
        ({"lora_alpha": 8.0}, "--lora_alpha=8.0 must match the adapter"),
        ({"lora_targets": ("q",)}, "--lora_targets=q must match the adapter"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            checkpoint.check_variables(found, layout_of(dataclasses.replace(LORA, **changes)))
    checkpoint.check_variables(found, layout_of(LORA))
    checkpoint.check_variables(found, layout_of(PLAIN))


def test_the_content_of_a_model_folder_is_hashed_once(tmp_path, monkeypatch):
    shutil.copytree(GOLDEN / "smollm", tmp_path / "m")
    folder = hf.Folder(tmp_path / "m")
    digest = adapters.content_sha256(folder)
    monkeypatch.setattr(adapters.integrity, "sha256", lambda *_: pytest.fail("read again"))
    assert adapters.content_sha256(hf.Folder(tmp_path / "m")) == digest
    monkeypatch.undo()
    (tmp_path / "m" / "README.md").write_text("not what its parameters depend on")
    assert adapters.content_sha256(hf.Folder(tmp_path / "m")) == digest
    config = tmp_path / "m" / "config.json"
    config.write_text(config.read_text() + " ")
    assert adapters.content_sha256(hf.Folder(tmp_path / "m")) != digest


@pytest.mark.full
def test_a_run_trains_an_adapter_resumes_and_is_given_on(inside, book, quick, tmp_path):
    """Trains on a model folder on 4x2, resumes on 1x8; evaluates, publishes and exports merged."""

    def train(*flags):
        done = inside("recipes.transformer", *TINY[1:], book, *flags)
        assert (done.code, done.err) == (0, ""), done.err
        return done.out

    hf.write(
        tmp_path / "hf",
        "transformer",
        PLAIN,
        64,
        lambda path: paths(variables("tiny")["base"])[path],
        BYTES,
    )
    flags = (f"--restore_from=hf:{tmp_path / 'hf'}", "--lora_rank=2", "--mesh=4x2", "--steps=4",
             "--checkpoint_every=2", "--lora_targets=q,down")  # fmt: skip
    out = train(*flags, f"--workdir={tmp_path / 'whole'}", "--sample_bytes=4")
    assert "Trains 1,536 of 124,736 parameters." in out
    (tmp_path / "parts" / "checkpoints").mkdir(parents=True)
    shutil.copytree(*(tmp_path / x / "checkpoints" / "2" for x in ("whole", "parts")))
    assert "Resumes at step 2" in train(*flags, f"--workdir={tmp_path / 'parts'}")
    assert_bit_equal(state_of(tmp_path / "parts", 4), state_of(tmp_path / "whole", 4))

    loss = re.compile(r"Held-out loss (\S+) nats")
    there = train(f"--restore_from={tmp_path / 'whole'}", "--steps=0", "--mesh=1x8")
    assert abs(float(loss.search(there)[1]) - float(loss.search(out)[1])) <= 1e-4
    assert "Evaluates" in there
    assert "123,200 parameters." in there
    # Trained on, from its own factors, on another mesh.
    more = train(f"--restore_from={tmp_path / 'whole'}", *flags[1:2], "--lora_targets=q,down",
                 "--mesh=1x8", "--steps=1", f"--workdir={tmp_path / 'more'}")  # fmt: skip
    assert "Trains 1,536 of 124,736 parameters." in more
    base = checkpoint.find(tmp_path / "more").metadata["base"]
    assert base["path"] == f"hf:{tmp_path / 'hf'}"
    assert base == checkpoint.find(tmp_path / "whole").metadata["base"]

    done = inside("recipes.publish", f"--source={tmp_path / 'whole'}", "--licence=X",
                  f"--target={tmp_path / 'pub'}")  # fmt: skip
    assert (done.code, done.err) == (0, "")
    recipes.hf.export(recipes.hf.Export(str(tmp_path / "whole"), str(tmp_path / "out")))
    shutil.rmtree(tmp_path / "hf")  # what was given on needs no base
    want = params_of(f"hf:{tmp_path / 'out'}")
    for path, value in params_of(tmp_path / "pub").items():
        np.testing.assert_allclose(value, want[path], atol=1e-6, err_msg=path)
    assert "base" not in checkpoint.find(tmp_path / "pub").metadata


# ---- PEFT ----------------------------------------------------------------------------------------


FAMILY = ("gpt2", "gemma3", "gpt_oss", "deepseek_v3", "vit", "gemma4_moe")
ON_MESHES = [
    (name, mesh) for name in ("llama3", "qwen3", "mixtral") for mesh in FAMILIES[name].meshes[:2]
]
RELATIVES = [name for name in ADAPTERS if name not in (*FAMILY, "llama3", "qwen3", "mixtral")]


@pytest.mark.parametrize(
    ("name", "mesh"), full_except(ON_MESHES, [("llama3", FAMILIES["llama3"].meshes[0])])
)
def test_logits_with_a_peft_adapter_match_peft(name, mesh):
    wanted = np.load(GOLDEN / f"{name}_lora" / "logits.npy")
    assert np.abs(wanted - np.load(GOLDEN / name / "logits.npy")).max() > 1
    found = our_logits(GOLDEN / f"{name}_lora", *mesh, base=f"hf:{GOLDEN / name}")
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILY)
def test_a_family_s_adapter_beside_its_base_matches_peft(name):
    """Nothing is merged, on a mesh. GPT-2's q, k and v share an A; ViT has a head of its own; Gemma 4's
    experts have adapters.
    """
    wanted = np.load(GOLDEN / f"{name}_lora" / "logits.npy")
    source = checkpoint.find(GOLDEN / f"{name}_lora", base=f"hf:{GOLDEN / name}")
    config, (mesh, rules) = source.adapter.config, FAMILIES[name].meshes[1]
    layout = make_layout(entries.model(source.metadata["entry"]), config, make_mesh(mesh), rules)
    variables, given = source.read(layout.variables()), inputs(config)
    assert any("/lora/" in path for path in paths(variables["params"]))
    rows = np.resize(given, (layout.batch_shards, *given.shape[1:]))
    forward = layout.compile(lambda v, x: layout.model.merge(v)(x), variables, rows)
    found = np.asarray(forward(variables, rows))
    np.testing.assert_allclose(found[: len(given)], wanted[: len(found)], rtol=0, atol=TOLERANCE)


def tensors_of(folder):
    return safetensors.numpy.load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("base", "name"), full_except([("llama3", "tiny"), ("mixtral", "moe")], [("llama3", "tiny")])
)
def test_exported_adapters_equal_peft_s(base, name, tmp_path, saved):
    """A PEFT adapter survives import and export; one of our runs survives export and import."""
    golden, made, lora = GOLDEN / f"{base}_lora", saved(name), CONFIGS[name]
    path = f"hf:{GOLDEN / base}"
    recipes.hf.export(recipes.hf.Export(str(golden), str(tmp_path / "back"), path, adapter=True))
    want, found = tensors_of(golden), tensors_of(tmp_path / "back")
    assert found.keys() == want.keys()
    for tensor in want:
        np.testing.assert_array_equal(found[tensor], want[tensor], err_msg=tensor)
    theirs, ours = (
        json.loads((folder / "adapter_config.json").read_text())
        for folder in (golden, tmp_path / "back")
    )
    for key in ("peft_type", "r", "lora_alpha", "bias", "task_type", "use_dora", "use_rslora"):
        assert theirs[key] == ours[key], key
    assert {*theirs["target_modules"]} == {*ours["target_modules"]}
    assert ours["base_model_name_or_path"] == str(GOLDEN / base)
    assert checkpoint.find(tmp_path / "back").base.path == GOLDEN / base, "found by its name"

    recipes.hf.export(recipes.hf.Export(str(made.run), str(tmp_path / "run"), adapter=True))
    read = checkpoint.find(tmp_path / "run", base=str(made.base))
    config = checkpoint.store.config_from(type(lora), read.adapter)
    assert (config.lora_rank, config.lora_alpha, config.lora_targets) == (
        4,
        12.0,
        lora.lora_targets,
    )
    state = read.read(layout_of(lora).variables())
    assert_bit_equal(paths(state["params"]), paths(made.state["params"]))


@pytest.mark.parametrize("name", FAMILY)
def test_a_family_s_peft_adapter_is_exported_bit_equal(name, tmp_path):
    golden, base = GOLDEN / f"{name}_lora", f"hf:{GOLDEN / name}"
    recipes.hf.export(recipes.hf.Export(str(golden), str(tmp_path / "back"), base, adapter=True))
    assert_bit_equal(tensors_of(tmp_path / "back"), tensors_of(golden))
    theirs, ours = (
        json.loads((folder / "adapter_config.json").read_text())
        for folder in (golden, tmp_path / "back")
    )
    for key in ("target_modules", "target_parameters"):
        assert {*(theirs[key] or ())} == {*ours.get(key, ())}, key
    for key in ("r", "lora_alpha", "task_type"):
        assert theirs[key] == ours[key], key
    assert theirs["modules_to_save"] == ours.get("modules_to_save")
    assert ours["fan_in_fan_out"] is (name == "gpt2"), "PEFT would warn"


@pytest.mark.full
@pytest.mark.parametrize("name", RELATIVES)
def test_a_relative_s_peft_adapter_matches_peft_and_is_exported_bit_equal(name, tmp_path):
    golden, base = GOLDEN / f"{name}_lora", GOLDEN / name
    wanted = np.load(golden / "logits.npy")
    assert np.abs(wanted - np.load(base / "logits.npy")).max() > 0.1
    found = our_logits(golden, *FAMILIES[name].meshes[1], base=f"hf:{base}")
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)
    recipes.hf.export(
        recipes.hf.Export(str(golden), str(tmp_path / "b"), f"hf:{base}", adapter=True)
    )
    assert_bit_equal(tensors_of(tmp_path / "b"), tensors_of(golden))
    theirs, ours = (
        json.loads((folder / "adapter_config.json").read_text())
        for folder in (golden, tmp_path / "b")
    )
    # A list may have last words or whole names: what counts is which modules they choose. Nemotron's
    # modules begin with `model`, its tensors with `backbone`.
    weights = safetensors.numpy.load_file(base / "model.safetensors")
    modules = [
        tensor.removesuffix(".weight").replace("backbone.", "model.", 1) for tensor in weights
    ]
    chosen = [
        {m for m in modules for t in keys["target_modules"] if f".{m}".endswith(f".{t}")}
        for keys in (theirs, ours)
    ]
    assert chosen[0] == chosen[1]
    assert chosen[0] or theirs["target_parameters"]


def test_factors_of_experts_lie_side_by_side_in_peft_s(tmp_path):
    """PEFT has one A for an expert's gate and up, and names a module's second weight by its wrapper."""
    plain = hf.Folder(GOLDEN / "gemma4_moe").config
    targets = {"lora_targets": ("expert_gate", "expert_up", "expert_down")}
    config = dataclasses.replace(plain, lora_rank=2, lora_alpha=6.0, **targets)
    shapes, random = hf.folder.shapes_of("gemma4", config), np.random.default_rng(0)
    ours = {p: np.float32(random.normal(size=x.shape)) for p, x in paths(shapes["params"]).items()}
    hf.write_adapter(tmp_path / "out", "gemma4", config, None, ours.__getitem__)
    keys = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (keys["r"], keys["lora_alpha"], keys["target_modules"]) == (4, 12.0, [])
    assert keys["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]
    experts = "base_model.model.model.layers.0.experts"
    E, D, F = plain.num_experts, plain.embed, plain.expert_mlp
    stored = tensors_of(tmp_path / "out")
    assert stored[f"{experts}.base_layer.lora_A.weight"].shape == (E * 4, D)
    assert stored[f"{experts}.base_layer.lora_B.weight"].shape == (2 * F, E * 4)
    assert stored[f"{experts}.lora_A.weight"].shape == (E * 4, F)
    read = read_adapter(tmp_path / "out", "gemma4_moe")
    assert read.keys() == ours.keys()
    for a in [path for path in ours if path.endswith("/a")]:
        theirs, want = (products(x[a], x[f"{a[:-1]}b"], stacked=2) for x in (read, ours))
        np.testing.assert_allclose(theirs, want, rtol=0, atol=1e-5, err_msg=a)


def test_an_adapter_of_experts_that_a_folder_has_apart_is_written_back_bit_equal(tmp_path):
    """The folder has a tensor for each expert, and PEFT adapts one for all, as they are in memory."""
    golden, base = GOLDEN / "qwen3_moe_lora", GOLDEN / "qwen3_moe"
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in safetensors.numpy.load_file(
        base / "model.safetensors"
    )
    back = tmp_path / "back"
    recipes.hf.export(recipes.hf.Export(str(golden), str(back), f"hf:{base}", adapter=True))
    stored = tensors_of(golden)
    assert_bit_equal(tensors_of(back), stored)
    ours = read_adapter(golden, "qwen3_moe")["layers/experts/lora/up/b"][1]  # [E, r, F]
    E, r, F = ours.shape
    theirs = stored["base_model.model.model.layers.1.mlp.experts.base_layer.lora_B.weight"]
    half = theirs.reshape(2, F, r, E)[1]  # the first is the gate's
    np.testing.assert_array_equal(ours, half.transpose(2, 1, 0))
    keys = json.loads((back / "adapter_config.json").read_text())
    assert keys["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]


WHOLE = "model.language_model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "module", "target"),
    [
        ("gemma3_vision", WHOLE, WHOLE),  # the tower has a q_proj too
        ("mistral3", WHOLE, WHOLE),
        # AutoModelForCausalLM makes a text model of this folder.
        ("qwen3_5_vision", "model.layers.1.self_attn.q_proj", "q_proj"),
    ],
    ids=["gemma3", "mistral3", "qwen3_5"],
)
def test_an_adapter_on_a_folder_that_sees_fits_the_class_that_loads_it(
    name, module, target, tmp_path
):
    base = hf.Folder(GOLDEN / name)
    config = dataclasses.replace(base.config, lora_rank=2, lora_targets=("q",))
    shapes = paths(hf.folder.shapes_of(base.family.entry, config)["params"])
    hf.write_adapter(
        tmp_path / "out", base.family.entry, config, "org/name",
        lambda path: np.zeros(shapes[path].shape, np.float32),
        architecture=base.metadata["architecture"],
    )  # fmt: skip
    assert f"base_model.model.{module}.lora_A.weight" in tensors_of(tmp_path / "out")
    keys = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert target in keys["target_modules"]


def test_gpt2_s_factors_lie_side_by_side_in_peft_s(tmp_path):
    """PEFT has one A for q, k and v: ours, which differ, as three times the rank."""
    plain = hf.Folder(GOLDEN / "gpt2").config
    config = dataclasses.replace(plain, lora_rank=2, lora_alpha=6.0, lora_targets=("q", "v", "o"))
    shapes, random = hf.folder.shapes_of("gpt2", config), np.random.default_rng(0)
    ours = {path: random.normal(size=x.shape) for path, x in paths(shapes["params"]).items()}
    hf.write_adapter(tmp_path / "out", "gpt2", config, None, lambda path: np.float32(ours[path]))
    keys = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (keys["r"], keys["lora_alpha"]) == (4, 12.0)
    # Not c_proj, which would be the MLP's too.
    projections = [f"transformer.h.{layer}.attn.c_proj" for layer in (0, 1)]
    assert keys["target_modules"] == ["c_attn", *projections]
    read = read_adapter(tmp_path / "out", "gpt2")
    for name in ("q", "k", "v", "o"):
        products = [
            [np.tensordot(a, b, 1) for a, b in zip(x[f"{at}/a"], x[f"{at}/b"], strict=True)]
            for x in (read, ours)
            for at in [f"layers/attention/lora/{name}"]
            if f"{at}/a" in x
        ]
        want = products[1] if name != "k" else 0
        np.testing.assert_allclose(products[0], want, rtol=0, atol=1e-5, err_msg=name)


def renamed(folder, *pairs) -> pathlib.Path:
    """Renames the tensors of an adapter's folder."""
    tensors = tensors_of(folder)
    for old, new in pairs:
        tensors = {name.replace(old, new): x for name, x in tensors.items()}
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    modules = {name.partition(".lora_")[0].rpartition(".")[2] for name in tensors}
    return targeting(folder, *sorted(modules))


def targeting(folder, *modules: str) -> pathlib.Path:
    """Writes these modules into adapter_config.json."""
    file = folder / "adapter_config.json"
    keys = json.loads(file.read_text())
    file.write_text(json.dumps(keys | {"target_modules": modules}))
    return folder


def read_adapter(folder, base: str) -> dict:
    found = checkpoint.find(folder, base=f"hf:{GOLDEN / base}").adapter
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    where = jax.tree.map(lambda x: x.update(sharding=one), found.shapes())
    return paths(found.read(where)["params"])


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("vit", [(".layers.", ".encoder.layer."), ("attention.q_proj", "attention.attention.query"),
                 ("attention.v_proj", "attention.attention.value"),
                 ("attention.o_proj", "attention.output.dense"), ("mlp.fc2", "output.dense")]),
        ("gemma3", [("model.layers", "model.language_model.layers")]),
        ("gemma3", [("model.layers", "language_model.model.layers")]),
    ],
)  # fmt: skip
def test_other_names_of_the_same_modules_are_known(name, pairs, tmp_path):
    """Older versions of transformers, and Gemma's text model under a model with vision."""
    folder = shutil.copytree(GOLDEN / f"{name}_lora", tmp_path / "peft")
    want = read_adapter(folder, name)
    assert_bit_equal(read_adapter(renamed(folder, *pairs), name), want)


def test_an_adapter_of_a_vision_tower_is_refused(tmp_path):
    folder = shutil.copytree(GOLDEN / "gemma3_lora", tmp_path / "peft")
    tower = "base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_A.weight"
    tensors = tensors_of(folder) | {tower: np.zeros((3, 16), np.float32)}
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    said = f"adapts {tower.removeprefix('base_model.model.').removesuffix('.lora_A.weight')}, and the zoo"
    refused(folder, said, base=f"hf:{GOLDEN / 'gemma3'}")


def test_a_vit_adapter_without_a_head_keeps_its_base_s(tmp_path):
    folder, base = shutil.copytree(GOLDEN / "vit_lora", tmp_path / "peft"), f"hf:{GOLDEN / 'vit'}"
    factors = {name: x for name, x in tensors_of(folder).items() if ".lora_" in name}
    assert params_of_merged(folder, base)["head"].shape == (32, 3)
    safetensors.numpy.save_file(factors, folder / "adapter_model.safetensors")
    found = params_of_merged(folder, base)
    want = params_of(base)
    np.testing.assert_array_equal(found["head"], want["head"])
    assert np.abs(found["layers/attention/q"] - want["layers/attention/q"]).max() > 0.1


def params_of_merged(folder, base: str) -> dict:
    model, _ = checkpoint.restore(folder, make_mesh("1"), "dp", base=base)
    return paths(nnx.to_pure_dict(nnx.state(model, nnx.Param)))


@pytest.mark.full
def test_a_peft_adapter_takes_buffers_from_its_base(saved, tmp_path):
    """These are experts' biases. No Hugging Face architecture has them, so export refuses them."""
    moe_run, run = saved("moe"), saved("biases")
    recipes.hf.export(recipes.hf.Export(str(moe_run.run), str(tmp_path / "peft"), adapter=True))
    found = checkpoint.find(tmp_path / "peft", base=str(run.base))
    want = jax.tree.map(lambda x: x - 1, buffers(variables("biases")))
    for config in (CONFIGS["biases"], plain(CONFIGS["biases"])):  # beside its base, and merged
        read = found.read(layout_of(config, "data=2,expert=4").variables())
        assert_bit_equal(paths(buffers(read)), paths(want))
    with pytest.raises(UserError, match="can't have layers/experts/bias; use a model without"):
        recipes.hf.export(recipes.hf.Export(str(run.run), str(tmp_path / "x"), adapter=True))
    assert not (tmp_path / "x").exists()


REFUSED = {
    "use_rslora": True, "use_dora": True, "bias": "all", "modules_to_save": ["lm_head"],
    "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2}, "layers_to_transform": ["0"],
    "lora_bias": True, "init_lora_weights": "pissa", "peft_type": "IA3",
    "trainable_token_indices": [1], "some_future_option": 1, "r": 0, "lora_alpha": "8",
    "target_modules": "q_proj(", "exclude_modules": [1],
}  # fmt: skip


@pytest.fixture
def peft(tmp_path):
    """A copy of a golden adapter."""
    return shutil.copytree(GOLDEN / "llama3_lora", tmp_path / "peft")


@pytest.mark.parametrize("key", REFUSED)
def test_unsupported_peft_options_are_refused_by_name(key, peft):
    file = peft / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: REFUSED[key]}))
    refused(peft, f"adapter_config.json has {key} {json.dumps(REFUSED[key])}, which ", base="x")


def test_an_adapter_of_peft_that_does_not_fit_is_refused(peft):
    base = f"hf:{GOLDEN / 'llama3'}"
    refused(peft, "is an adapter without its base ('llama3' does not exist)")
    refused(peft, "k_proj.lora_B.weight in", base=f"hf:{GOLDEN / 'llama2'}")
    refused(peft, "is not an adapter for 'mlp' models", base="mlp.digits")
    tensors = tensors_of(peft)
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    file = peft / "adapter_model.safetensors"
    safetensors.numpy.save_file({k: v for k, v in tensors.items() if k != first}, file)
    refused(peft, f"is missing tensor {first};", base=base)
    for module, factor in {
        "lm_head": "lora_A.weight",
        "model.embed_tokens": "lora_embedding_A",
    }.items():
        more = {f"base_model.model.{module}.{factor}": np.zeros((3, 4), np.float32)}
        said = f"adapts {module}, and the zoo adapts only down_proj, gate_proj, k_proj, o_proj, q_proj, "
        for stored in (tensors | more, more):
            safetensors.numpy.save_file(stored, file)
            refused(targeting(peft), said, base=base)
    safetensors.numpy.save_file({}, file)
    refused(peft, "has no factors of projections that the zoo adapts;", base=base)
    file.write_bytes(b"cut")
    refused(peft, "adapter_model.safetensors can't be read", base=base)
    file.rename(peft / "adapter_model.bin")
    refused(peft, "a pickle, which can execute code", base=base)


LAYER_0 = "base_model.model.model.layers.0."


@pytest.mark.parametrize(
    "changes",
    [
        {"layers_to_transform": [1]},
        {"layers_to_transform": 1, "layers_pattern": "layers"},
        {"target_modules": r".*\.layers\.1\.(self_attn|mlp)\..*_proj"},
        {"exclude_modules": r"model\.layers\.0\..*", "target_modules": "all-linear"},
        {"target_modules": [f"model.layers.1.self_attn.{x}_proj" for x in "qkvo"]
         + [f"layers.1.mlp.{x}_proj" for x in ("gate", "up", "down")]},
    ],
    ids=["layers", "layer", "pattern", "exclude", "names"],
)  # fmt: skip
def test_an_adapter_of_some_layers_leaves_the_others_alone(changes, peft):
    base = f"hf:{GOLDEN / 'llama3'}"
    whole, plain = params_of_merged(peft, base), params_of(base)
    of_layer_1 = {name: x for name, x in tensors_of(peft).items() if not name.startswith(LAYER_0)}
    safetensors.numpy.save_file(of_layer_1, peft / "adapter_model.safetensors")
    refused(peft, f"is missing tensor {LAYER_0}mlp.down_proj.lora_A.weight; copy the", base=base)
    file = peft / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    found = params_of_merged(peft, base)
    for path in ("layers/attention/q", "layers/attention/o", "layers/mlp/down"):
        np.testing.assert_array_equal(found[path][0], plain[path][0], err_msg=path)
        np.testing.assert_array_equal(found[path][1], whole[path][1], err_msg=path)
        assert all(np.abs(whole[path][l] - plain[path][l]).max() > 0.1 for l in (0, 1))


@pytest.mark.parametrize(
    ("entry", "name", "layers", "weight"),
    [
        ("deepseek", "deepseek_v3", "layers", "attention/o"),
        ("qwen3_next", "qwen3_5", "layers/attention", "mixer/q"),
    ],
)
def test_peft_s_adapter_leaves_the_further_layer_alone(entry, name, layers, weight, tmp_path):
    """The layer for multi-token prediction is no part of the model that PEFT adapts."""
    config = dataclasses.replace(hf.Folder(GOLDEN / name).config, mtp_depth=1)
    shapes, random = hf.folder.stored_paths(hf.folder.shapes_of(entry, config)), np.random
    values = {p: random.default_rng(0).normal(size=x.shape) for p, x in shapes.items()}
    hf.write(tmp_path / "base", entry, config, 64, lambda path: np.float32(values[path]))
    base = f"hf:{tmp_path / 'base'}"
    merged, plain = params_of_merged(GOLDEN / f"{name}_lora", base), params_of(base)
    of_head = f"mtp/layer/{weight}"
    np.testing.assert_array_equal(merged[of_head], plain[of_head])
    adapted = f"{layers}/{weight}"
    assert np.abs(merged[adapted] - plain[adapted]).max() > 0.1


def test_a_layer_that_adapter_config_json_leaves_out_has_no_tensors(peft):
    file = peft / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"layers_to_transform": [1]}))
    said = r"has a tensor base_model.*layers\.0.*, which layers_to_transform \[1\] leaves out; use"
    with pytest.raises(UserError, match=said):
        checkpoint.find(peft, base=f"hf:{GOLDEN / 'llama3'}")


def test_an_adapter_of_a_model_without_its_head_s_prefix_is_read(peft):
    """Trained on AutoModel, whose modules are `layers.…`, not `model.layers.…`."""
    want = read_adapter(peft, "llama3")
    assert_bit_equal(read_adapter(renamed(peft, ("model.model.", "model.")), "llama3"), want)


def test_an_adapter_of_single_experts_is_refused(tmp_path):
    """As PEFT made them with `transformers` 4, whose experts were modules."""
    folder = shutil.copytree(GOLDEN / "mixtral_lora", tmp_path / "peft")
    file, layer = folder / "adapter_model.safetensors", "base_model.model.model.layers.0"
    head = np.zeros((3, 32), np.float32)
    expert = f"{layer}.block_sparse_moe.experts.0.w1.lora_A.weight"
    safetensors.numpy.save_file(tensors_of(targeting(folder)) | {expert: head}, file)
    said = "adapts model.layers.0.block_sparse_moe.experts.0.w1, and the zoo adapts only down_proj, gate_up_proj, k_proj, "
    refused(folder, said, base=f"hf:{GOLDEN / 'mixtral'}")
    safetensors.numpy.save_file({f"{layer}.mlp.experts.0.gate_proj.lora_A.weight": head}, file)
    said = "adapts model.layers.0.mlp.experts.0.gate_proj, and the zoo adapts only down_proj, gate_up_proj, k_proj, "
    refused(folder, said, base=f"hf:{GOLDEN / 'qwen3_moe'}")
