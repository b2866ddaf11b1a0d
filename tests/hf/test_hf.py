"""Hugging Face folders: logits against goldens, export → import, commands, errors.

The golden folders are models that `transformers` made and ran: python -m tests.by_hand.hf_parity.
"""

import dataclasses
import functools
import itertools
import json
import os
import re
import shutil
import struct

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
import tokenizers
from flax import nnx

import recipes.hf
from data import DataError, tokenizer
from recipes.common import checkpoint, hf
from recipes.common.hf import gemma
from recipes.common.hf import gpt_oss as oss
from recipes.common.mesh import make_mesh
from recipes.common.runtime.errors import UserError
from recipes.common.sharding.abstract import abstract_model, paths
from recipes.instruments.prove.comparison import (
    LOSS_TOLERANCE,
    STATE_TOLERANCE,
    compare_all,
    largest_relative,
)
from tests.conftest import ROOT, full_except
from tests.support.golden_folders import GOLDEN, config_of, keys_of
from tests.support.hf_families import FAMILIES as ALL_FAMILIES
from tests.support.hf_families import NOT_GOLDEN, TOKENS_BT, TOLERANCE
from tests.support.hf_models import export, our_logits, params_of
from tests.support.quick import QUICK
from tests.support.quick import quick as quick
from tests.support.runs import records
from zoo import gpt_oss, moe
from zoo.core.layers import AttentionType, Llama3, rope_angles
from zoo.gemma3 import SIZES
from zoo.llama_relatives import Config, Transformer
from zoo.options.compute_options import ComputeOptions
from zoo.options.llama_options import LlamaOptions
from zoo.options.rope_scaling import Linear, Yarn

pytestmark = pytest.mark.promise("hugging-face")

MODEL = "model.safetensors"
FAMILIES = [name for name in ALL_FAMILIES if name not in NOT_GOLDEN]


def assert_bit_equal(a, b):
    assert a.keys() == b.keys()
    for path, value in a.items():
        assert value.dtype == b[path].dtype == np.float32, path
        np.testing.assert_array_equal(value, b[path], err_msg=path)


@pytest.fixture
def folder(tmp_path):
    """Returns a function that copies a golden folder, to change the copy."""

    def copy(name="llama3"):
        target = tmp_path / name
        shutil.copytree(GOLDEN / name, target)
        return target

    return copy


def edit(folder, **changes):
    """Changes keys of config.json; ... removes a key."""
    file = folder / "config.json"
    theirs = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in theirs.items() if v is not ...}))


def json_of(config, context):
    """The config.json of an export."""
    entry = "moe" if isinstance(config, moe.Config) else "transformer"
    return hf.folder.family_of(entry, config).config_json(config, context)


def tensors_of(file):
    return dict(safetensors.numpy.load_file(file))


# ---- parity --------------------------------------------------------------------------------------


# On one device and on a mesh; in the fast tier a few families whose programs and tensors differ.
ON_A_MESH = ("gemma2", "gemma3_vision", "gpt_oss", "deepseek_v3")
PARITY = {
    family: [(family, *on) for on in ALL_FAMILIES[family].meshes[family in ON_A_MESH : 2]]
    for family in FAMILIES
}
FAST = ("qwen3", "gpt2", "gemma3_vision", "vit", "phi3", "glm4_moe")
FAST_EXPORTS = (
    *FAST,
    "qwen3_next",
    "qwen3_5_vision",
    "llama3",
    "mixtral",
    "granitemoe",
    "glm4",
    "deepseek_v3",
    "gpt_oss",
)


@pytest.mark.parametrize(
    ("family", "mesh", "rules"),
    full_except(
        itertools.chain(*PARITY.values()),
        [
            *(PARITY[name][0] for name in ("llama3", "deepseek_odd_head")),
            *(PARITY[name][-1] for name in FAST),
        ],
    ),
)
def test_logits_match_transformers(family, mesh, rules, strict, quick):
    wanted = np.load(GOLDEN / family / "logits.npy")
    assert np.abs(wanted).max() > 1, "a tolerance means nothing beside logits near 0"
    found = our_logits(f"hf:{GOLDEN / family}", mesh, rules)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_a_restored_model_can_be_called_without_a_mesh_context(family):
    """Called outside any mesh context, although biases are split at rest and it is dropless."""
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    model, _ = checkpoint.restore(f"hf:{GOLDEN / family}", mesh)
    tokens_BT = jax.device_put(TOKENS_BT, jax.NamedSharding(mesh, jax.P("data")))
    assert len(tokens_BT.addressable_shards[0].data) < len(TOKENS_BT)
    compiled = functools.partial(jax.jit, compiler_options=QUICK)
    logits = compiled(lambda m, t: m(t))(model, tokens_BT)
    wanted = np.load(GOLDEN / family / "logits.npy")
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=TOLERANCE)
    model.config = dataclasses.replace(model.config, loss_chunk=8)  # several of them
    total, _ = compiled(lambda m, t: m.loss(t, t)[2]["loss"])(model, tokens_BT)
    picked = np.take_along_axis(wanted, TOKENS_BT[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(total, (jax.nn.logsumexp(wanted, axis=-1) - picked).sum(), rtol=1e-5)


@pytest.mark.full
def test_a_mixtral_is_fine_tuned_alike_where_rows_travel_to_its_experts(
    folder, inside, quick, tmp_path
):
    """Imports are dropless, and four devices share out experts of which a position has two."""
    theirs, text = folder("mixtral"), tmp_path / "text.txt"
    words = {f"w{i}": i for i in range(64)}
    of_words = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    of_words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    of_words.save(str(theirs / "tokenizer.json"))
    text.write_text(" ".join([*words] * 30))
    flags = (f"--restore_from=hf:{theirs}", f"--dataset={text}", "--seq_len=16", "--batch_size=16",
             "--steps=5", "--log_every=1", "--sample_bytes=0", "--learning_rate=3e-3",
             "--warmup_steps=0")  # fmt: skip

    def fine_tune(mesh: str):
        work, back = tmp_path / mesh, tmp_path / f"exported {mesh}"
        done = inside("recipes.moe", *flags, f"--mesh={mesh}", f"--workdir={work}")
        assert (done.code, done.err) == (0, "")
        assert ("rows travel to at most 2 of 4 devices" in done.out) == (mesh != "1")
        done = inside("recipes.hf", "export", f"--source={work}", f"--target={back}")
        assert (done.code, done.err) == (0, "")
        return dict(records(work, "step", "loss")), tensors_of(back / MODEL)

    (wanted_losses, wanted), (losses, found) = fine_tune("1"), fine_tune("data=2,expert=4")
    assert losses == pytest.approx(wanted_losses, rel=LOSS_TOLERANCE)
    assert losses[5] < losses[1] - 1, "it learns"
    assert largest_relative(compare_all(found, wanted)) < STATE_TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt_oss", "gemma3", "deepseek_v3"])
def test_a_restored_model_can_be_called_eagerly_without_a_mesh_context(family):
    """Neither jit nor a mesh: layers that are left over after the scan run one operation at a time."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    model, _ = checkpoint.restore(f"hf:{GOLDEN / family}", mesh)
    config = hf.Folder(GOLDEN / family).config
    assert family == "deepseek_v3" or config.num_layers % len(config.layer_kinds)
    wanted = np.load(GOLDEN / family / "logits.npy")
    np.testing.assert_allclose(model(TOKENS_BT), wanted, rtol=0, atol=TOLERANCE)


def test_a_restored_model_shares_its_work_where_its_heads_do_not_divide(strict):
    """With 4 kv heads on 8 devices, the layout adjusts the rules."""
    path, mesh = f"hf:{GOLDEN / 'llama3'}", jax.make_mesh((1, 8), ("data", "model"))
    model, _ = checkpoint.restore(path, mesh, "tp")
    rules = checkpoint.layout_of(checkpoint.find(path), mesh, "tp").rules
    assert (rules["heads"], rules["kv_heads"]) == ("model", None)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(rules.items())):
        logits = jax.jit(lambda m, t: m(t), compiler_options=QUICK)(model, TOKENS_BT)
    assert jax.typeof(logits).sharding.spec[-1] == "model"
    np.testing.assert_allclose(logits, np.load(GOLDEN / "llama3" / "logits.npy"), atol=TOLERANCE)


@pytest.mark.parametrize(
    "family", full_except([name for name in FAMILIES if "odd_" not in name], FAST_EXPORTS)
)
def test_export_is_read_back_bit_equal_with_the_same_config(family, tmp_path):
    export(f"hf:{GOLDEN / family}", tmp_path / "back")
    a, b = hf.Folder(GOLDEN / family), hf.Folder(tmp_path / "back")
    assert a.metadata["config"] == b.metadata["config"]
    assert a.metadata["context"] == b.metadata["context"]
    assert_bit_equal(params_of(f"hf:{a.path}"), params_of(f"hf:{b.path}"))
    theirs, ours = (json.loads((f.path / "config.json").read_text()) for f in (a, b))
    if "vision_config" in theirs:
        text = {"gemma3": ("Gemma3ForCausalLM", "gemma3_text")}
        text |= {"gemma4": ("Gemma4ForCausalLM", "gemma4_text")}
        text |= {"gemma4_unified": ("Gemma4UnifiedForCausalLM", "gemma4_unified_text")}
        text |= {"mistral3": ("MistralForCausalLM", "mistral")}
        text |= {"qwen3_5": ("Qwen3_5ForCausalLM", "qwen3_5_text")}
        text |= {"qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text")}
        kind = theirs["model_type"]  # two towers stay both
        name, kind = text.get(kind, (theirs["architectures"][0], kind))
        theirs = {"architectures": [name], "model_type": kind}
    for key in ("architectures", "model_type"):
        assert theirs[key] == ours[key]


def test_every_option_of_config_is_read():
    """Options of the Llama family and of MoE occur in their golden models and in no other."""
    every = {name: config_of(keys_of(name), GOLDEN / name / "config.json") for name in FAMILIES}
    kinds = (Config, moe.Config)
    found = {n: c for n, c in every.items() if type(c) in kinds and n not in RELATIVES}
    assert found["llama3"].rope_scaling == Llama3(8.0, 1.0, 4.0, 16)
    assert found["llama_linear"].rope_scaling == Linear(3.0)
    assert found["ministral"].layer_kinds == (AttentionType(5, 1e4), AttentionType(None, 1e4))
    assert found["ministral"].num_layers == 5, "two periods and a layer"
    scaling = Yarn(4.0, 32.0, 1.0, 16, True, (0.15 * np.log(4) + 1) / (0.05 * np.log(4) + 1))
    assert found["qwen3_yarn"].layer_kinds == (
        AttentionType(None, 30.0, scaling),
        AttentionType(5, 30.0, scaling),
    )
    assert found["llama3"].rope_theta == 5e5
    assert found["mistral"].sliding_window == 5
    assert found["qwen3"].head_dim == 6
    assert [n for n in found if found[n].qkv_bias] == ["qwen2"]
    qwen3 = ["qwen3", "qwen3_moe", "odd_qwen3", "qwen3_yarn"]
    assert [n for n in found if found[n].qk_norm] == qwen3
    assert not found["qwen3_moe"].normalize
    assert found["mixtral"].normalize
    assert (found["mixtral"].rope_theta, found["mixtral"].capacity) == (1e6, None)
    assert (found["qwen3_moe"].mlp, found["qwen3_moe"].experts_per_token) == (16, 3)
    assert [n for n in found if found[n].tie_embeddings] == ["smollm"]
    assert [n for n in found if found[n].sliding_window] == ["mistral"]
    assert [n for n in found if found[n].rope_scaling] == ["llama3", "llama_linear"]
    assert [n for n in found if found[n].layer_kinds] == ["ministral", "qwen3_yarn"]
    gemma = [every[n] for n in ("gemma3", "gemma2", "gemma3_vision")]
    assert [c.qk_norm for c in gemma] == [True, False, True]
    assert [(c.soft_cap, c.logits_soft_cap) for c in gemma[:2]] == [(None, None), (2.0, 3.0)]
    assert [c.query_scalar for c in gemma] == [12, 9, 12]
    local, wide = AttentionType(5, 1e3), AttentionType(None, 1e5, Linear(8.0))
    assert [c.layer_kinds for c in gemma[::2]] == [(local,) * 5 + (wide,), (local, wide)]
    assert (gemma[0].num_layers, gemma[1].layer_kinds) == (
        7,
        (AttentionType(5, 1e4), AttentionType(None, 1e4)),
    )
    dtypes = {n: {str(v.dtype) for f in (GOLDEN / n).glob("*.safetensors")
                  for v in tensors_of(f).values()} for n in found}  # fmt: skip
    assert dtypes["llama2"] == {"float16"}
    assert dtypes["llama3"] == dtypes["smollm"] == {"bfloat16"}
    assert dtypes["qwen3"] == {"float32"}


OLMO = {"norms": "after", "qk_norm": True, "joint_qk_norm": True}
ALL_BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
GRANITE = {"embed_scale": 3.0, "residual_scale": 0.4, "attention_scale": 0.2, "logits_divisor": 0.5}
RELATIVES = {  # golden model → the switches that it sets
    "llama_biases": ALL_BIASES,
    "olmo2": OLMO,
    "olmo3": OLMO,
    "phi3": {"rotary_dims": 6},
    "smollm3": {},
    "granite": GRANITE | ALL_BIASES,
    "glm4": {"norms": "both", "qkv_bias": True, "rotary_dims": 6},
    "seed_oss": ALL_BIASES,
    "mistral3": {},
    "ministral3": {"query_growth": 0.4},
    "llama_dynamic": {},
    "qwen2_moe": {"qkv_bias": True, "normalize": False, "shared_mlp": 24, "shared_gate": True},
    "olmoe": {"qk_norm": True, "joint_qk_norm": True, "normalize": False},
    "granitemoe": GRANITE,
    "minimax_m2": {"qk_norm": True, "joint_qk_norm": True, "sigmoid": True, "rotary_dims": 6},
    "glm4_moe": {"qkv_bias": True, "qk_norm": True, "sigmoid": True, "rotary_dims": 6}
    | {"shared_mlp": 40, "route_scale": 2.5, "groups": 4, "top_groups": 2}
    | {"dense_layers": 1, "dense_mlp": 40},
}


@pytest.mark.parametrize("name", RELATIVES)
def test_a_relative_of_llama_sets_its_switches_and_no_other(name):
    config = hf.Folder(GOLDEN / name).config
    switches = {*LlamaOptions.__dataclass_fields__} - {*ComputeOptions.__dataclass_fields__}
    routing = {"normalize", "shared_mlp", "shared_gate", "sigmoid", "route_scale", "groups"}
    switches |= (routing | {"top_groups", "dense_layers", "dense_mlp"}) & {*vars(config)}
    fields = type(config).__dataclass_fields__
    found = {n: getattr(config, n) for n in switches if getattr(config, n) != fields[n].default}
    assert found == RELATIVES[name]
    kinds = {
        "olmo3": (
            *[AttentionType(5, 5e5)] * 3,
            AttentionType(None, 5e5, Yarn(4.0, 2.0, 1.0, 16, True, MAGNITUDE)),
        ),
        "smollm3": (AttentionType(None, 2e6), AttentionType(7, None)),
        "qwen2_moe": (AttentionType(5, 1e4), AttentionType(None, 1e4), AttentionType(None, 1e4)),
    }
    assert config.layer_kinds == kinds.get(name, ())


def test_a_model_without_rotary_layers_is_exported_without_a_theta():
    """Null is refused by transformers."""
    for kinds in (
        (AttentionType(None, None),),
        (AttentionType(5, None), AttentionType(None, None)),
    ):
        config = dataclasses.replace(hf.Folder(GOLDEN / "smollm3").config, layer_kinds=kinds)
        family = hf.folder.family_of("transformer", config, "SmolLM3ForCausalLM")
        keys = family.config_json(config, 64)
        assert "rope_theta" not in keys
        assert family.config_from(keys, GOLDEN).layer_kinds == kinds


@pytest.mark.parametrize("rules", [None, "tp", {"head_dim": "model", "heads": None}])
@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3"])
def test_each_shard_is_the_part_of_the_parameter_that_the_rules_say(family, rules):
    whole = params_of(f"hf:{GOLDEN / family}")
    table = rules
    if isinstance(rules, dict):  # H inside of their dim N·H: what is read first, is cut again
        from zoo.llama_relatives import RULES

        table = RULES["fsdp_tp"] | {"kv_heads": None, "vocab": "model"} | rules
    model, metadata = checkpoint.restore(f"hf:{GOLDEN / family}", make_mesh("4x2"), table)
    for path, array in paths(nnx.to_pure_dict(nnx.state(model, nnx.Param))).items():
        np.testing.assert_array_equal(array, whole[path], err_msg=path)
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[path][shard.index], err_msg=path)
    assert metadata["entry"] == "transformer"


def test_a_shard_is_read_once_and_alone(monkeypatch):
    """At most one shard is in memory, and replicas don't read it again."""
    reads = []
    read_shard = hf.tensors.read_shard

    def spy(stored, stack, dtype, bounds):
        values = read_shard(stored, stack, dtype, bounds)
        reads.append((stack[0].path, bounds, values.size))
        return values

    monkeypatch.setattr(hf.tensors, "read_shard", spy)
    model, _ = checkpoint.restore(f"hf:{GOLDEN / 'qwen3'}", make_mesh("2x4"), "fsdp_tp")
    assert len(reads) == len({(path, bounds) for path, bounds, _ in reads})
    sizes = {path: size for path, _, size in reads}
    for path, array in paths(nnx.to_pure_dict(nnx.state(model, nnx.Param))).items():
        assert sizes[path] == array.addressable_shards[0].data.size, path
    assert sum(size for *_, size in reads) == sum(
        v.size for v in jax.tree.leaves(nnx.state(model, nnx.Param))
    )


@pytest.mark.parametrize("first", [0, 7])
def test_rotary_pairs_are_neighbors_in_the_folder_and_half_the_dims_apart_here(first):
    """6 rotary dims: an order and its inverse are the same for 2 and 4."""
    shape = {"layers/q": jax.ShapeDtypeStruct((1, 2, first + 6), np.float32)}
    (tensor,) = hf.tensors.expand({"layers/q": ("q.{}", "DH", "H D H~6")}, shape)
    assert tensor.shape == (first + 6, 2)
    pairs = ["a0", "a1", "b0", "b1", "c0", "c1"]
    number = {name: 10.0 + i for i, name in enumerate(sorted(pairs))}
    rest = [float(i) for i in range(first)]
    theirs = np.array([rest + [number[name] for name in pairs]] * 2).T * [1, 100]
    ours = np.array([rest + [number[x] for x in ("a0", "b0", "c0", "a1", "b1", "c1")]] * 2)
    ours *= [[1], [100]]
    whole = {"D": slice(0, 2), "H": slice(0, first + 6)}
    np.testing.assert_array_equal(tensor.to_ours(lambda where: theirs[where], whole), ours)
    part = {"D": slice(1, 2), "H": slice(first + 1, first + 4)}
    found = tensor.to_ours(lambda where: theirs[where], part)
    np.testing.assert_array_equal(found, ours[1:, first + 1 : first + 4])
    written = np.zeros(tensor.shape)
    tensor.put(ours, written)
    np.testing.assert_array_equal(written, theirs)


def test_a_parameter_s_rows_may_be_in_several_blocks_of_a_tensor():
    """Qwen3-Next's v: 2 heads for each of 3 key heads, after 4 rows of q and k, before 2 of z."""
    shape = {"v": jax.ShapeDtypeStruct((5, 6, 2), np.float32)}
    (tensor,) = hf.tensors.expand({"v": ("v", "DNV", "NV D +4/10x3")}, shape)
    assert tensor.shape == (30, 5)
    theirs = np.random.default_rng(0).normal(size=tensor.shape)
    blocks = [theirs[start : start + 4].reshape(2, 2, 5) for start in (4, 14, 24)]
    ours = np.concatenate(blocks).transpose(2, 0, 1)
    for heads in (slice(0, 6), slice(1, 2), slice(1, 5), slice(4, 6)):
        part = {"D": slice(1, 4), "N": heads, "V": slice(0, 1)}
        found = tensor.to_ours(lambda where: theirs[where], part)
        np.testing.assert_array_equal(found, ours[1:4, heads, :1])
    written = np.zeros(tensor.shape)
    tensor.put(ours, written)
    of_others = [row for row in range(30) if row % 10 not in (4, 5, 6, 7)]
    assert not written[of_others].any()
    written[of_others] = theirs[of_others]
    np.testing.assert_array_equal(written, theirs)


@pytest.mark.parametrize(
    ("layers", "numbers"),
    [
        ("{}", [0, 1, 2, 3, 4]),
        ("{:2}", [2, 3, 4, 5, 6]),
        ("{:0,1,2/4}", [0, 1, 2, 4, 5]),
        ("{:3/4}", [3, 7, 11, 15, 19]),
    ],
)
def test_a_stack_s_layers_may_be_some_of_each_period(layers, numbers):
    shape = {"w": jax.ShapeDtypeStruct((5, 2), np.float32)}
    expanded = hf.tensors.expand({"w": (f"layers.{layers}.w", "D", "D")}, shape)
    assert [tensor.name for tensor in expanded] == [f"layers.{n}.w" for n in numbers]


# ---- what folders look like ----------------------------------------------------------------------


def test_older_keys_mean_what_newer_ones_mean(folder):
    new = folder()
    before = hf.Folder(new).config
    rope = json.loads((new / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    edit(new, rope_parameters=..., rope_theta=theta, rope_scaling=rope)
    assert hf.Folder(new).config == before
    rope["type"] = rope.pop("rope_type")
    edit(new, rope_scaling=rope)
    assert hf.Folder(new).config == before


def test_absent_keys_mean_what_they_mean_to_transformers(folder):
    theirs = folder("llama2")
    edit(theirs, head_dim=..., rope_parameters=..., rms_norm_eps=..., hidden_act=...)
    edit(theirs, tie_word_embeddings=..., num_key_value_heads=None, architectures=...)
    config = hf.Folder(theirs).config
    assert (config.head_dim, config.rope_theta, config.norm_eps) == (4, 1e4, 1e-6)
    assert (config.tie_embeddings, config.num_kv_heads) == (False, 8)
    theirs = folder("mistral")
    edit(theirs, sliding_window=...)
    assert hf.Folder(theirs).config.sliding_window == 4096
    edit(theirs, sliding_window=None)
    assert hf.Folder(theirs).config.sliding_window is None
    theirs = folder("qwen2")
    edit(theirs, layer_types=..., sliding_window=9)
    assert hf.Folder(theirs).config.sliding_window is None
    edit(theirs, use_sliding_window=True)  # and max_window_layers, 28, leaves none of the layers
    assert hf.Folder(theirs).config.sliding_window is None
    edit(theirs, max_window_layers=0)
    assert hf.Folder(theirs).config.sliding_window == 9
    edit(theirs, layer_types=["sliding_attention"] * 2, max_window_layers=1)
    assert hf.Folder(theirs).config.sliding_window == 9
    edit(theirs, layer_types=["full_attention"] * 2)
    assert hf.Folder(theirs).config.sliding_window is None
    edit(theirs, layer_types=..., max_window_layers=1)
    kinds = hf.Folder(theirs).config.layer_kinds
    assert [kind.window for kind in kinds] == [None, 9]
    assert {kind.rope_theta for kind in kinds} == {1e6}


S, F = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("types", "windows"),
    [
        ([S, F, S, F], [5, None]),
        ([S, S, F, S, S, F, S], [5, 5, None]),  # one left over
        ([F, F, S, F], [None, None, 5]),
        ([F, F, F, S], [None, None, None, 5]),  # no shorter period gives the last
        ([S, S, S], []),
        ([F, F], []),
    ],
)
def test_a_list_of_layers_is_its_shortest_period(types, windows):
    """Export gives back the list, and max_window_layers where that can say it to older versions."""
    theirs = json.loads((GOLDEN / "qwen2" / "config.json").read_text())
    theirs |= {"use_sliding_window": True, "sliding_window": 5, "num_hidden_layers": len(types)}
    ours = config_of(theirs | {"layer_types": types})
    assert [kind.window for kind in ours.layer_kinds] == windows
    assert ours.sliding_window == (5 if types == [S, S, S] else None)
    back = json_of(ours, 64)
    assert config_of(back) == ours
    assert ("layer_types" in back) == bool(windows), "config.json of a uniform model is as it was"
    if windows:
        assert (back["layer_types"], back["max_window_layers"]) == (types, types.index(S))
        mistral = json_of(dataclasses.replace(ours, qkv_bias=False), 64)
        assert mistral["architectures"] == ["MinistralForCausalLM"], "theirs ignores layer_types"
        assert config_of(mistral).layer_kinds == ours.layer_kinds


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MAGNITUDE = 0.1 * np.log(4.0) + 1


@pytest.mark.parametrize(
    ("rope", "others", "scaling"),
    [
        ({"type": "linear", "factor": 2}, {}, Linear(2.0)),
        ({"rope_type": "linear", "factor": 2, "attention_factor": 3.0}, {}, Linear(2.0)),
        (YARN, {}, Yarn(4.0, 32.0, 1.0, 16, True, MAGNITUDE)),
        (YARN | {"attention_factor": 0.7, "mscale": 2.0, "mscale_all_dim": 1.0}, {},
         Yarn(4.0, 32.0, 1.0, 16, True, 0.7)),
        (YARN | {"mscale": 2.0, "mscale_all_dim": 1.0}, {},
         Yarn(4.0, 32.0, 1.0, 16, True, (0.2 * np.log(4.0) + 1) / MAGNITUDE)),
        (YARN | {"mscale": 2.0, "mscale_all_dim": 0}, {},
         Yarn(4.0, 32.0, 1.0, 16, True, MAGNITUDE)),
        (YARN | {"beta_fast": 8, "beta_slow": 2, "truncate": False}, {},
         Yarn(4.0, 8.0, 2.0, 16, False, MAGNITUDE)),
        (YARN | {"factor": 1.0}, {}, Yarn(1.0, 32.0, 1.0, 16, True, 1.0)),
        (YARN | {"factor": None}, {}, Yarn(4.0, 32.0, 1.0, 16, True, MAGNITUDE)),
        ({"type": "yarn", "factor": 4.0}, {}, Yarn(4.0, 32.0, 1.0, 64, True, MAGNITUDE)),
        (YARN, {"original_max_position_embeddings": 8}, Yarn(4.0, 32.0, 1.0, 8, True, MAGNITUDE)),
    ],
)  # fmt: skip
def test_rotary_scalings_mean_what_they_mean_to_transformers(rope, others, scaling):
    """Covers older and newer keys, and export."""
    theirs = json.loads((GOLDEN / "llama2" / "config.json").read_text())
    del theirs["rope_parameters"]
    for keys in (
        {"rope_scaling": rope, "rope_theta": 2e4},
        {"rope_parameters": rope | {"rope_theta": 2e4}},
    ):
        ours = config_of(theirs | keys | others)
        assert (ours.rope_theta, type(ours.rope_scaling)) == (2e4, type(scaling))
        numbers = dataclasses.astuple(ours.rope_scaling)
        assert numbers == pytest.approx(dataclasses.astuple(scaling))
    assert config_of(json_of(ours, 64)) == ours


def test_a_mistral_with_unlike_layers_is_theirs(folder):
    """With a list of layer types, transformers calls it Ministral."""
    theirs = folder("ministral")
    before = hf.Folder(theirs).config
    edit(theirs, architectures=["MistralForCausalLM"], model_type="mistral")
    assert hf.Folder(theirs).config == before
    edit(theirs, layer_types=...)
    assert (hf.Folder(theirs).config.sliding_window, before.sliding_window) == (5, None)


def test_a_model_type_that_contradicts_the_architecture_is_refused(folder):
    """A Mistral's window would be ignored; without a window, both mean the same."""
    theirs = folder("mistral")
    edit(theirs, architectures=["LlamaForCausalLM"])
    wanted = (
        "architecture LlamaForCausalLM and model_type mistral, which read it differently; correct"
    )
    with pytest.raises(UserError, match=wanted):
        hf.Folder(theirs)
    edit(theirs, sliding_window=None)
    assert hf.Folder(theirs).config.sliding_window is None
    edit(theirs, sliding_window=5, model_type="a name of their own")
    assert hf.Folder(theirs).config.sliding_window is None


def test_files_without_an_index_and_tensors_that_are_computed(folder):
    theirs = folder("llama3")
    whole = params_of(f"hf:{theirs}")
    (theirs / "model.safetensors.index.json").unlink()
    assert_bit_equal(params_of(f"hf:{theirs}"), whole)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    safetensors.numpy.save_file(buffer, theirs / "model-00003-of-00003.safetensors")
    assert_bit_equal(params_of(f"hf:{theirs}"), whole)


def test_the_single_file_counts_beside_shards_as_in_transformers(folder, capfd):
    """The index and its shards are those of an older save, and of other values."""
    theirs = folder("llama3")
    whole = params_of(f"hf:{theirs}")
    tensors = {}
    for file in sorted(theirs.glob("*.safetensors")):
        tensors |= tensors_of(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + ml_dtypes.bfloat16(1)
    safetensors.numpy.save_file(tensors, theirs / "model.safetensors")
    capfd.readouterr()
    found = params_of(f"hf:{theirs}")
    wanted = tensors["model.norm.weight"].astype(np.float32)
    np.testing.assert_array_equal(found.pop("final_norm/scale"), wanted)
    assert np.abs(wanted - whole.pop("final_norm/scale")).min() > 0.5
    assert_bit_equal(found, whole)
    assert capfd.readouterr().out == (
        f"Reads {theirs}/model.safetensors alone, as transformers does; "
        "model-00001-of-00002.safetensors and other files beside it are left out.\n"
    )
    for shard in theirs.glob("model-*.safetensors"):
        shard.unlink()
    assert hf.Folder(theirs).files == [theirs / "config.json", theirs / "model.safetensors"]
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("family", ["llama3", "smollm", "vit", "deepseek_v3"])
def test_weights_of_a_model_that_was_saved_without_its_head_s_prefix(folder, family):
    """AutoModel's names begin with `layers.`, not `model.layers.`."""
    theirs = folder(family)
    whole = params_of(f"hf:{theirs}")
    for file in theirs.glob("*.safetensors"):
        tensors = {re.sub("^(model|vit)[.]", "", n): x for n, x in tensors_of(file).items()}
        safetensors.numpy.save_file(tensors, file)
    assert_bit_equal(params_of(f"hf:{theirs}"), whole)


def test_a_tensor_under_two_names_is_refused(folder):
    theirs = folder("gpt2")
    tensors = tensors_of(theirs / MODEL)
    tensors["ln_f.bias"] = tensors["transformer.ln_f.bias"] + ml_dtypes.bfloat16(1)
    safetensors.numpy.save_file(tensors, theirs / MODEL)
    with pytest.raises(UserError, match=r"has both ln_f.bias and transformer.ln_f.bias, which are"):
        hf.Folder(theirs)
    theirs = folder("smollm")
    tensors = tensors_of(theirs / MODEL)
    tensors["norm.weight"] = tensors["model.norm.weight"]
    safetensors.numpy.save_file(tensors, theirs / MODEL)
    with pytest.raises(UserError, match=r"has both model.norm.weight and norm.weight, which are"):
        hf.Folder(theirs)


def test_names_of_another_program_are_named(folder):
    """Missing files would not help: torch.compile put a prefix before all names."""
    theirs = folder("smollm")
    tensors = {f"_orig_mod.{name}": x for name, x in tensors_of(theirs / MODEL).items()}
    safetensors.numpy.save_file(tensors, theirs / MODEL)
    with pytest.raises(UserError) as caught:
        hf.Folder(theirs)
    assert str(caught.value) == (
        f"{theirs} is missing tensor model.embed_tokens.weight and 19 more, and has "
        "_orig_mod.model.embed_tokens.weight and 19 more that the model lacks; rename them, or use "
        "this model's config.json"
    )


def test_a_llama3_scaling_whose_low_factor_is_above_its_high_one_is_a_step():
    """The frequencies are those that transformers computes: those below the low factor by 8."""
    keys = json.loads((GOLDEN / "llama3" / "config.json").read_text())
    keys["rope_parameters"] |= {"low_freq_factor": 4.0, "high_freq_factor": 1.0}
    keys["rope_parameters"] |= {"rope_theta": 30.0, "original_max_position_embeddings": 64}
    config = config_of(keys | {"head_dim": 16})
    kind = AttentionType(None, config.rope_theta, config.rope_scaling)
    found = rope_angles(kind, 16, np.ones((1, 1), np.int32))[0, 0]
    plain = 30.0 ** -(np.arange(8) / 8)
    assert 1 < 64 * plain[4] / (2 * np.pi) < 4, "between the factors, where a ramp would differ"
    np.testing.assert_allclose(found, plain / [1, 1, 1, 8, 8, 8, 8, 8], rtol=1e-6)


def test_a_head_beside_tied_embeddings_must_be_the_same(folder):
    theirs = folder("smollm")
    file = theirs / "model.safetensors"
    whole, tensors = params_of(f"hf:{theirs}"), tensors_of(file)
    head = tensors["model.embed_tokens.weight"].copy()
    safetensors.numpy.save_file(tensors | {"lm_head.weight": head}, file)
    assert_bit_equal(params_of(f"hf:{theirs}"), whole)
    head[5, 5] += ml_dtypes.bfloat16(1)
    safetensors.numpy.save_file(tensors | {"lm_head.weight": head}, file)
    with pytest.raises(UserError, match="ties them; if they should differ, set tie_word_emb"):
        hf.Folder(theirs)
    edit(theirs, tie_word_embeddings=False)
    np.testing.assert_array_equal(params_of(f"hf:{theirs}")["unembed"], head.astype(np.float32))
    edit(theirs, tie_word_embeddings=True)
    del tensors["model.embed_tokens.weight"]
    safetensors.numpy.save_file(tensors | {"lm_head.weight": head}, file)
    with pytest.raises(UserError, match=re.escape("is missing tensor model.embed_tokens.weight;")):
        hf.Folder(theirs)


def test_a_tied_head_is_that_of_the_family_s_embeddings():
    """A folder may store a head beside the embeddings that it is tied to, under the family's own names."""
    missing = {}
    for file in sorted(GOLDEN.glob("*/config.json")):
        keys = json.loads(file.read_text())
        config = config_of(keys, file)
        if "tie_embeddings" not in {field.name for field in dataclasses.fields(config)}:
            continue
        (name,) = keys["architectures"]
        family = next(family for family in hf.folder.FAMILIES if name in family.architectures)
        table = family.tensors(dataclasses.replace(config, tie_embeddings=True))
        names = {row[0] for row in table.values() if isinstance(row[0], str)}
        missing[file.parent.name] = {*family.tied.values()} - names
    assert len(missing) > 40
    assert not [name for name, tables in missing.items() if tables]


def test_a_large_model_is_written_in_files_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(hf.tensors, "FILE_BYTES", 20_000)
    source = GOLDEN / "qwen2"
    export(f"hf:{source}", tmp_path / "back")
    files = sorted(p.name for p in (tmp_path / "back").iterdir())
    number = len(files) - 2
    assert number > 2
    shards = [f"model-{i:05}-of-{number:05}.safetensors" for i in range(1, number + 1)]
    assert files == ["config.json", *shards, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    sizes = [sum(v.nbytes for v in tensors_of(tmp_path / "back" / f).values()) for f in shards]
    assert max(sizes) <= 20_000
    assert index["metadata"]["total_size"] == sum(sizes)
    assert_bit_equal(params_of(f"hf:{tmp_path / 'back'}"), params_of(f"hf:{source}"))


def test_options_without_an_architecture_in_transformers_are_not_exported(tmp_path):
    config = Config(64, 32, 2, 8, 4, 4, 32, qkv_bias=True, qk_norm=True)
    with pytest.raises(UserError, match="Qwen2ForCausalLM, can't have qk_norm=True; use"):
        hf.write(tmp_path / "out", "transformer", config, 64, lambda path: pytest.fail("read"))
    assert list(tmp_path.iterdir()) == []
    for kinds, said in (
        (
            (AttentionType(4, 1e4), AttentionType(5, 1e4)),
            "AttentionType.window=4.*AttentionType.window=5",
        ),
        ((AttentionType(4, 1e4), AttentionType(4, 1e6)), "rope_theta=1000000"),
    ):
        unlike = Config(64, 32, 2, 8, 4, 4, 32, layer_kinds=kinds)
        with pytest.raises(UserError, match=f"can't have layer_kinds=.*{said}.*; use"):
            hf.write(tmp_path / "out", "transformer", unlike, 64, lambda path: pytest.fail("read"))
    alike = Config(
        64, 32, 2, 8, 4, 4, 32, layer_kinds=(AttentionType(5, 1e4), AttentionType(5, 1e4))
    )
    assert config_of(json_of(alike, 64)).sliding_window == 5
    # Their Llama needs its embed to be divisible by its heads; their Mistral doesn't.
    theirs = json_of(Config(64, 32, 2, 6, 2, 4, 32), 64)
    assert (theirs["model_type"], theirs["sliding_window"]) == ("mistral", None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"balance_rate": 1e-3}, "layers/experts/bias"),
        ({"qkv_bias": True}, "qkv_bias=True"),
        ({"layer_kinds": (AttentionType(5, 1e4), AttentionType(None, 1e4))}, "layer_kinds="),
    ],
)
def test_experts_without_an_architecture_in_transformers_are_not_exported(fields, said, tmp_path):
    config = dataclasses.replace(moe.Config.tiny(), **fields)
    with pytest.raises(UserError, match=f"can't have {said}.*; use a model without"):
        hf.write(tmp_path / "out", "moe", config, 64, lambda path: pytest.fail("read"))
    assert list(tmp_path.iterdir()) == []


def test_older_names_of_transformers_experts_are_known(folder):
    """Newer versions of transformers call Qwen3-MoE's `num_experts` `num_local_experts`."""
    theirs = folder("qwen3_moe")
    before = hf.Folder(theirs).config
    edit(theirs, num_local_experts=..., num_experts=8, norm_topk_prob=True)
    assert hf.Folder(theirs).config == dataclasses.replace(before, normalize=True)
    edit(theirs, sliding_window=5)
    assert hf.Folder(theirs).config.sliding_window is None
    edit(theirs, use_sliding_window=True)
    assert hf.Folder(theirs).config.sliding_window == 5
    theirs = folder("mixtral")
    edit(theirs, rope_parameters=..., rms_norm_eps=..., sliding_window=6)
    config = hf.Folder(theirs).config
    assert (config.rope_theta, config.norm_eps, config.sliding_window) == (1e6, 1e-5, 6)


def test_layers_without_experts_are_the_first_ones():
    """Layers that the model lacks change nothing; an export lists the dense ones."""
    before = config_of(keys_of("qwen3_moe"))
    assert config_of(keys_of("qwen3_moe") | {"mlp_only_layers": [2, 9]}) == before
    assert config_of(keys_of("olmoe") | {"clip_qkv": None}) == config_of(keys_of("olmoe"))
    dense = config_of(keys_of("qwen3_moe") | {"mlp_only_layers": [0], "intermediate_size": 24})
    assert dense == dataclasses.replace(before, dense_layers=1, dense_mlp=24)
    written = json_of(dense, 64)
    assert written["architectures"] == ["Qwen3MoeForCausalLM"]
    assert written["mlp_only_layers"] == [0]
    assert "first_k_dense_replace" not in written
    assert config_of(written) == dense


@pytest.mark.parametrize(
    ("name", "layer"), [("glm4_moe", "model.layers.3"), ("nemotron3_latent", "mtp")]
)
def test_layers_for_further_tokens_are_left_out(folder, name, layer, capfd):
    theirs = folder(name)
    whole = params_of(f"hf:{theirs}")
    edit(theirs, num_nextn_predict_layers=1)
    more = {f"{layer}.enorm.weight": np.ones(48, np.float32)}
    safetensors.numpy.save_file(tensors_of(theirs / MODEL) | more, theirs / MODEL)
    capfd.readouterr()
    assert_bit_equal(params_of(f"hf:{theirs}"), whole)
    assert capfd.readouterr().out.startswith(f"Left out {layer}, for multi-token prediction; ")


def test_convolutions_of_olmo_hybrid_are_read_in_any_parts(folder):
    """Transformers cuts the rows of queries, keys and values in three parts of one length, whatever
    their sizes are; the last part is shorter if 3 doesn't divide the rows.
    """
    theirs = folder("olmo_hybrid")
    whole = params_of(f"hf:{theirs}")
    tensors = tensors_of(theirs / MODEL)
    for name in [name for name in tensors if ".q_conv1d." in name]:
        names = [name.replace(".q_conv1d.", f".{x}_conv1d.") for x in "qkv"]
        rows = np.concatenate([tensors[each] for each in names])
        parts = np.split(rows, [32, 64])
        tensors |= dict(zip(names, map(np.ascontiguousarray, parts), strict=True))
    safetensors.numpy.save_file(tensors, theirs / MODEL)
    assert_bit_equal(params_of(f"hf:{theirs}"), whole)


def add_head(theirs, attends: int) -> dict[str, np.ndarray]:
    """Adds an MTP head to a golden Qwen. Its layer has twice the weights of layer `attends`.

    Returns the head's tensors.
    """
    stored = tensors_of(theirs / MODEL)
    random = np.random.default_rng(0)
    pattern = re.compile(rf"model\.(?:language_model\.)?layers\.{attends}\.(.*)")
    matches = [(pattern.match(name), tensor) for name, tensor in stored.items()]
    head = {f"mtp.layers.0.{m[1]}": np.asarray(2 * x, np.float32) for m, x in matches if m}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        head[f"mtp.{name}.weight"] = random.normal(size=48).astype(np.float32)
    head["mtp.fc.weight"] = random.normal(size=(48, 96)).astype(np.float32)
    safetensors.numpy.save_file(stored | head, theirs / MODEL)
    return head


@pytest.mark.parametrize(
    ("name", "attends", "key"),
    full_except(
        [
            ("qwen3_next", 2, "num_nextn_predict_layers"),
            ("qwen3_5", 3, "mtp_num_hidden_layers"),
            ("qwen3_5_moe", 1, "mtp_num_hidden_layers"),
            ("qwen3_5_vision", 1, "mtp_num_hidden_layers"),
            ("qwen3_5_moe_vision", 1, "mtp_num_hidden_layers"),
        ],
        fast=[("qwen3_next", 2, "num_nextn_predict_layers")],
    ),
)
def test_qwen_s_head_for_the_second_next_token(name, attends, key, folder, tmp_path):
    """Its layer is read as one that attends, and an export has the folder's tensors."""
    theirs = folder(name)
    without = params_of(f"hf:{theirs}")
    head = add_head(theirs, attends)
    params = params_of(f"hf:{theirs}")
    stack = "layers/attention/"
    ours = {
        path.replace(stack, "mtp/layer/"): 2 * weight[0]
        for path, weight in without.items()
        if path.startswith(stack)
    }
    ours |= {
        "mtp/token_norm/scale": head["mtp.pre_fc_norm_embedding.weight"],
        "mtp/hidden_norm/scale": head["mtp.pre_fc_norm_hidden.weight"],
        "mtp/final_norm/scale": head["mtp.norm.weight"],
        "mtp/join": head["mtp.fc.weight"].T,
    }
    assert_bit_equal(params, without | ours)
    source = checkpoint.find(f"hf:{theirs}")
    layout = checkpoint.layout_of(source, make_mesh("1"), "dp", mtp_depth=0)
    assert_bit_equal(paths(checkpoint.restore_variables(source, layout)["params"]), without)
    assert checkpoint.leaves_out_head(source, layout)
    assert not checkpoint.leaves_out_head(
        source, checkpoint.layout_of(source, make_mesh("1"), "dp")
    )
    export(f"hf:{theirs}", tmp_path / "out")
    written = tensors_of(tmp_path / "out" / MODEL)
    assert_bit_equal({n: x for n, x in written.items() if n.startswith("mtp.")}, head)
    assert json.loads((tmp_path / "out" / "config.json").read_text())[key] == 1
    assert hf.Folder(tmp_path / "out").config == hf.Folder(theirs).config


def test_the_tensors_say_whether_qwen_has_a_head(folder, capfd):
    """Further layers of it are left out with a line; a tensor that it lacks is refused by name."""
    theirs = folder("qwen3_5_vision")
    text = keys_of("qwen3_5_vision")["text_config"]
    edit(theirs, text_config=text | {"mtp_num_hidden_layers": 2})
    assert hf.Folder(theirs).config.mtp_depth == 0
    head = add_head(theirs, 1)
    layer = {n.replace("layers.0", "layers.1"): x for n, x in head.items() if "layers" in n}
    stored = tensors_of(theirs / MODEL)
    safetensors.numpy.save_file(stored | layer, theirs / MODEL)
    capfd.readouterr()
    assert hf.Folder(theirs).config.mtp_depth == 1
    said = capfd.readouterr().out
    assert "The vision tower was left out" in said
    assert "Left out mtp.layers.1, for multi-token prediction; " in said
    table = {"mtp.embed_tokens.weight": np.ones((67, 48), np.float32)}
    safetensors.numpy.save_file(stored | table, theirs / MODEL)
    with pytest.raises(UserError, match=r"has an unexpected tensor mtp\.embed_tokens\.weight; use"):
        hf.Folder(theirs)


@pytest.mark.parametrize(
    ("family", "alone"),
    [
        ("qwen3_5_vision", "Qwen3_5ForCausalLM"),
        ("qwen3_5_moe_vision", "Qwen3_5MoeForCausalLM"),
    ],
)
def test_a_text_model_beside_a_tower_is_the_one_alone(family, alone):
    """Except that the outer keys say whether its embeddings are tied."""
    keys = keys_of(family)
    text = keys["text_config"]
    for tied in (True, False):
        inner = text | {"tie_word_embeddings": not tied}
        found = config_of(keys | {"text_config": inner, "tie_word_embeddings": tied})
        assert found == config_of(text | {"architectures": [alone], "tie_word_embeddings": tied})
        assert found.tie_embeddings == tied


def test_fused_experts_are_read_as_separate_ones(folder):
    theirs = folder("qwen3_5_moe_vision")
    add_head(theirs, 1)
    wanted = params_of(f"hf:{theirs}")
    stored = tensors_of(theirs / MODEL)
    for layer in ("model.language_model.layers.0", "model.language_model.layers.1", "mtp.layers.0"):
        at = f"{layer}.mlp.experts"
        gate, up, down = (
            np.stack([stored.pop(f"{at}.{expert}.{name}_proj.weight") for expert in range(8)])
            for name in ("gate", "up", "down")
        )
        stored[f"{at}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        stored[f"{at}.down_proj"] = down
    safetensors.numpy.save_file(stored, theirs / MODEL)
    assert_bit_equal(params_of(f"hf:{theirs}"), wanted)


def test_qwen_s_layers_are_of_a_period():
    keys = keys_of("qwen3_next")
    assert config_of(keys).attention_every == 3
    older = {key: value for key, value in keys.items() if key != "layer_types"}
    assert config_of(older | {"full_attention_interval": 3}) == config_of(keys)
    assert config_of(older).attention_every == 4


def test_a_write_that_fails_leaves_nothing(tmp_path):
    def read(path):
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        hf.write(tmp_path / "out", "transformer", Config(64, 32, 2, 8, 4, 4, 32), 64, read)
    assert list(tmp_path.iterdir()) == []


# ---- Gemma ---------------------------------------------------------------------------------------


def gemma_config(keys, **changes):
    """Our Config for config.json's keys; ... removes a key."""
    return config_of({k: v for k, v in (keys | changes).items() if v is not ...})


def test_older_keys_of_gemma_mean_what_newer_ones_mean():
    """Older: a base and a scaling for global layers, a base for local ones, a pattern."""
    keys, scaling = keys_of("gemma3"), {"rope_type": "linear", "factor": 8.0}
    older = {"rope_theta": 1e5, "rope_local_base_freq": 1e3, "rope_scaling": scaling}
    older |= {"rope_parameters": ..., "layer_types": ..., "sliding_window_pattern": 6}
    assert gemma_config(keys, **older) == gemma_config(keys)
    # As in the published 1b: no scaling.
    assert gemma_config(keys, **older | {"rope_scaling": None}).layer_kinds[-1] == AttentionType(
        None, 1e5
    )
    of_three = gemma_config(keys, layer_types=..., sliding_window_pattern=3)
    assert [kind.window for kind in of_three.layer_kinds] == [5, 5, None]
    # Local layers may have a scaling too; only the newer keys can say so.
    both = {S: {"rope_theta": 1e3} | scaling, F: {"rope_theta": 1e5}}
    ours = gemma_config(keys, rope_parameters=both)
    assert ours.layer_kinds[0] == AttentionType(5, 1e3, Linear(8.0))
    assert gemma_config(gemma.config_json(ours, 64)) == ours
    for one_kind in ([S] * 7, [F] * 7):
        ours = gemma_config(keys, layer_types=one_kind)
        assert len(ours.layer_kinds) == 1
        assert gemma_config(gemma.config_json(ours, 64)) == ours


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("gemma3", {"num_hidden_layers": 8}, [5, 5, 5, 5, 5, None, 5, 5]),
        ("gemma2", {"num_hidden_layers": 5}, [5, None, 5, None, 5]),
        (
            "qwen2_moe",
            {"num_hidden_layers": 5, "use_sliding_window": True, "max_window_layers": 3},
            [5, None, 5, None, None],
        ),
        (
            "qwen2",
            {"num_hidden_layers": 5, "use_sliding_window": True, "max_window_layers": 3},
            [None, None, None, 5, 5],
        ),
    ],
)
def test_files_without_layer_types_have_their_family_s_windows(family, changes, windows):
    keys = keys_of(family) | changes | {"sliding_window": 5}
    ours = gemma_config(keys, layer_types=..., sliding_window_pattern=...)
    kinds = ours.kinds
    assert [kinds[n % len(kinds)].window for n in range(ours.num_layers)] == windows


def test_published_gemmas_are_their_named_sizes():
    """Their config.json leave out what transformers has defaults for."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text"}
    text |= {"num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}}
    assert gemma_config(whole | {"text_config": text}) == SIZES["4b"]()
    text |= {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62}
    text |= {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128}
    text |= {"query_pre_attn_scalar": 168}
    assert gemma_config(whole | {"text_config": text}) == SIZES["27b"]()
    assert gemma_config({"architectures": ["Gemma2ForCausalLM"]}) == SIZES["gemma2_2b"]()
    for size in ("1b", "12b", "gemma2_9b", "gemma2_27b"):
        config = SIZES[size]()
        assert gemma_config(gemma.config_json(config, 64)) == config


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_the_text_model_is_read_from_under_its_prefix(folder, prefix, capfd):
    """Older files say language_model.model.…, newer ones model.language_model.…"""
    theirs = folder("gemma3_vision")
    file, whole = theirs / "model.safetensors", params_of(f"hf:{theirs}")
    tensors = tensors_of(file)
    head = tensors["language_model.model.embed_tokens.weight"]
    if prefix.startswith("model."):
        tensors = {
            name.replace("language_model.model.", prefix)
            if "language" in name
            else f"model.{name}": x
            for name, x in tensors.items()
        }
    tensors["lm_head.weight" if prefix.startswith("model.") else f"{prefix}lm_head.weight"] = head
    safetensors.numpy.save_file(tensors, file)
    capfd.readouterr()
    assert_bit_equal(params_of(f"hf:{theirs}"), whole)
    said = "The vision tower was left out; --entry=gemma3_vision of recipes.hf reads it too.\n"
    assert capfd.readouterr().out == said
    assert hf.Folder(theirs).metadata["context"] == 64
    edit(theirs, tie_word_embeddings=False)
    with pytest.raises(UserError, match="has tie_word_embeddings false, which"):
        hf.Folder(theirs)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"layer_kinds": (AttentionType(4, 1e4), AttentionType(5, 1e4))},
            "windows of different lengths",
        ),
        (
            {"layer_kinds": (AttentionType(4, 1e4), AttentionType(4, 1e5))},
            "different rotary embeddings in layers of one kind",
        ),
        ({"qk_norm": False}, "different rotary embeddings"),
        (
            {"layer_kinds": (AttentionType(4, 1e4), AttentionType(None, None))},
            "layers without rotary embeddings",
        ),
        ({"soft_cap": 5.0}, "both qk_norm and soft_cap"),
        ({"embed": 72}, "an embed that num_heads does not divide"),
    ],
)
def test_a_gemma_without_an_architecture_is_not_exported(changes, said, tmp_path):
    config = dataclasses.replace(SIZES["tiny"](), **changes)
    with pytest.raises(UserError, match=f"no Hugging Face Gemma has {said}; use a model without"):
        hf.write(tmp_path / "out", "gemma3", config, 64, lambda path: pytest.fail("read"))
    assert list(tmp_path.iterdir()) == []


# ---- GPT-OSS -------------------------------------------------------------------------------------

OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
OSS_YARN |= {"truncate": False, "original_max_position_embeddings": 4_096}
OSS_20B = {  # what the published config.json says about the architecture
    "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2_880, "initial_context_length": 4_096, "intermediate_size": 2_880,
    "layer_types": [S, F] * 12, "max_position_embeddings": 131_072, "model_type": "gpt_oss",
    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-5,
    "rope_scaling": OSS_YARN, "rope_theta": 150_000, "router_aux_loss_coef": 0.9,
    "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201_088,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": [S, F] * 18},
        # Newer keys; and what transformers takes where keys are absent.
        {"rope_scaling": ..., "rope_theta": ..., "rope_parameters": OSS_YARN | {"rope_theta": 150_000}},
        {"rope_scaling": ..., "rope_theta": ..., "layer_types": ..., "sliding_window": ...},
    ],
    ids=["20b", "120b", "newer", "absent"],
)  # fmt: skip
def test_published_gpt_oss_are_their_named_sizes(changes):
    keys = {key: value for key, value in (OSS_20B | changes).items() if value is not ...}
    size = "120b" if "num_hidden_layers" in changes else "20b"
    ours = dataclasses.replace(gpt_oss.SIZES[size](), capacity=None, remat="full")
    assert oss.config_from(keys, ROOT) == ours
    assert oss.config_from(oss.config_json(ours, 131_072) | {"model_type": "gpt_oss"}, ROOT) == ours


# ---- what is wrong with them ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama3", {"architectures": ["GemmaForCausalLM"]}, "is for GemmaForCausalLM, which the zoo"),
        ("llama3", {"architectures": ["MixtralForCausalLM"]}, "has num_experts_per_tok null, which must be a number"),
        ("mixtral", {"num_experts_per_tok": 9}, "has num_experts_per_tok 9, which zoo/moe.py does not"),
        ("mixtral", {"num_local_experts": 9}, "is missing tensor model.layers.0.block_sparse_moe.experts.8.w1.weight"),
        ("mixtral", {"num_local_experts": 7}, "has an unexpected tensor model.layers.0.block_sparse_moe.experts.7"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "has decoder_sparse_step 2, which zoo/moe.py does not"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "has mlp_only_layers [1], which"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "has mlp_only_layers 1, which zoo/moe.py"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "is missing tensor model.layers.0.mlp.down_proj.weight"),
        ("qwen3_next", {"mlp_only_layers": [1]}, "has mlp_only_layers [1], which zoo/qwen3_next.py does not"),
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"] + ["linear_attention"] * 3}, "has layer_types ["),
        ("qwen3_next", {"linear_num_key_heads": 4}, "makes no sense: delta_heads=6 is not divisible by delta_key_heads=4"),
        ("qwen3_next", {"linear_key_head_dim": 8}, "linear_attn.in_proj_qkvz.weight"),
        ("qwen3_5", {"num_experts": 8}, "has num_experts 8, which zoo/qwen3_next.py does not"),
        ("qwen3_5", {"mtp_use_dedicated_embeddings": True}, "has mtp_use_dedicated_embeddings true, which zoo/qwen3_next.py does not"),
        ("qwen3_next", {"num_nextn_predict_layers": -1}, "has num_nextn_predict_layers -1, which must be a number > 0"),
        ("olmoe", {"clip_qkv": 8.0}, "has clip_qkv 8.0, which zoo/moe.py does not implement; use"),
        ("glm4_moe", {"first_k_dense_replace": 3}, "makes no sense: dense_layers=3 must be less than num_layers=3"),
        ("glm4_moe", {"n_group": 3}, "makes no sense: groups=3 must divide num_experts=8"),
        ("glm4_moe", {"n_shared_experts": 0}, "has n_shared_experts 0, which must be a number > 0"),
        ("qwen3_moe", {"attention_bias": 1}, "has attention_bias 1, which"),
        ("mixtral", {"attention_bias": True}, "has attention_bias true, which"),
        ("llama3", {"architectures": ["LlamaForCausalLM", "X"]}, "is for LlamaForCausalLM, X, which"),
        ("llama3", {"architectures": ..., "model_type": "opt"}, "is for opt, which the zoo does not"),
        ("llama3", {"architectures": 7}, "is for 7, which the zoo does not"),
        ("llama3", {"architectures": [["LlamaForCausalLM"]]}, "which the zoo does not"),
        ("llama3", {"architectures": ["OlmoForCausalLM"], "hidden_act": "relu"}, "the nearest is LlamaForCausalLM, which differs in hidden_act; use one of those that recipes/docs/architectures.md lists"),
        ("gpt2", {"architectures": ["GPTX"], "alibi": True}, "the nearest is GPT2LMHeadModel, which differs in"),
        ("vit", {"architectures": ["DeiTForImageClassification"], "qkv_bias": False}, "the nearest is ViTForImageClassification, which differs in qkv_bias; use"),
        ("llama3", {"hidden_act": "gelu"}, 'has hidden_act "gelu", which zoo/transformer.py does not'),
        ("llama3", {"attention_bias": True}, "is missing tensor model.layers.0.self_attn.k_proj.bias"),
        ("qwen2", {"attention_bias": True}, "has attention_bias true, which"),
        ("mistral", {"mlp_bias": True}, "has mlp_bias true, which"),
        ("llama3", {"partial_rotary_factor": 0.5}, "has partial_rotary_factor 0.5, which"),
        ("llama3", {"quantization_config": {"bits": 4}}, 'has weights in {"bits": 4}, which the zoo does not read; use a folder that is not quantized'),
        ("llama3", {"quantization_config": {"quant_method": "gptq"}}, "has weights in gptq, which"),
        ("llama3", {"quantization_config": {"quant_method": "mxfp4"}}, "has weights in mxfp4, which"),
        ("llama3", {"num_local_experts": 8}, "has num_local_experts 8, which"),
        ("llama3", {"auto_map": {"AutoModel": "x.Y"}}, 'has auto_map {"AutoModel": "x.Y"}, which'),
        ("llama3", {"head_dim": 5}, "has head_dim 5, which"),
        ("llama3", {"num_key_value_heads": 3}, "has num_key_value_heads 3, which"),
        ("llama3", {"rope_scaling": {"type": "linear"}}, "has factor null, which must be a number > 0"),
        ("qwen2", {"rope_scaling": {"rope_type": "yarn"}}, "has factor null, which must be a number > 0"),
        ("qwen2", {"rope_scaling": YARN | {"truncate": "no"}}, 'has truncate "no", which'),
        ("qwen2", {"rope_scaling": YARN | {"beta_fast": -1}}, "has beta_fast -1, which must be a number > 0"),
        ("qwen2", {"rope_scaling": {"rope_type": "longrope"}}, "has short_factor null, which"),
        ("qwen2", {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
         "1 factors, and a head has 2 rotary pairs; use its own config.json"),
        ("qwen2", {"rope_scaling": {"type": "dynamic"}, "rope_parameters": ...}, "has factor null, which"),
        ("qwen2", {"rope_scaling": {"type": "ntk"}, "rope_parameters": ...}, 'has rope_type "ntk", which'),
        ("qwen2", {"rope_parameters": {"full_attention": {}}}, "has rope_parameters {"),
        ("qwen2", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5, which"),
        ("llama3", {"rope_parameters": {"rope_type": "llama3"}}, "has factor null, which must be a number > 0"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, 'has layer_types "sliding_attention"'),
        ("qwen2", {"layer_types": 2}, "has layer_types 2, which"),
        ("qwen2", {"layer_types": ["full_attention"]}, 'has layer_types ["full'),
        ("qwen2", {"layer_types": ["chunked_attention"] * 2}, 'has layer_types "chunked_attention", which'),
        ("qwen2", {"layer_types": [{}, {}]}, "has layer_types {}, which"),
        ("qwen2", {"layer_types": ..., "use_sliding_window": True, "sliding_window": 4,
                   "max_window_layers": -1}, "has max_window_layers -1, which must be a number > 0"),
        ("llama3", {"layer_types": [F, S], "sliding_window": 4}, 'has layer_types "sliding_attention", which'),
        ("mixtral", {"layer_types": [F, S], "sliding_window": 4}, 'has layer_types ["full'),
        ("qwen3_moe", {"layer_types": [S, F], "sliding_window": 4, "use_sliding_window": True},
         'has layer_types ["sliding'),
        ("llama3", {"hidden_size": ...}, "has hidden_size null, which must be a number > 0"),
        ("llama3", {"vocab_size": "64"}, 'has vocab_size "64", which must be a number > 0'),
        ("llama3", {"num_hidden_layers": True}, "has num_hidden_layers true, which must be a number"),
        ("llama3", {"rms_norm_eps": -1}, "has rms_norm_eps -1, which must be a number > 0"),
        ("llama3", {"intermediate_size": 48}, "mlp.gate_proj.weight in "),
        ("llama3", {"vocab_size": 65}, "embed_tokens.weight in "),
        ("llama3", {"num_hidden_layers": 3}, "is missing tensor model.layers.2.input_layernorm.weight and 8 more"),
        ("llama3", {"num_hidden_layers": 1}, "has an unexpected tensor model.layers.1.input_layernorm"),
        ("qwen3", {"architectures": ["LlamaForCausalLM"]}, "unexpected tensor model.layers.0.self_attn.k_norm"),
        ("llama3", {"architectures": ["Qwen2ForCausalLM"]}, "is missing tensor model.layers.0.self_attn.k_proj.bias"),
        ("smollm", {"tie_word_embeddings": False}, "is missing tensor lm_head.weight;"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "has attn_logit_softcapping 50.0, which zoo/gemma3.py"),
        ("gemma3", {"use_bidirectional_attention": True}, "has use_bidirectional_attention true, which"),
        ("gemma3", {"hidden_activation": "gelu"}, 'has hidden_activation "gelu", which'),
        ("gemma3", {"sliding_window": None}, 'has layer_types "sliding_attention", which'),
        ("gemma3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "has rope_scaling {"),
        ("gemma3", {"rope_scaling": {"rope_type": "dynamic"}}, 'has rope_type "dynamic", which'),
        ("gemma3", {"rope_scaling": "linear"}, 'has rope_scaling "linear", which'),
        ("gemma3", {"rope_parameters": {"rope_theta": 1e4}}, "has rope_parameters {"),
        ("gemma3", {"rope_parameters": {F: 7}}, "has rope_parameters {"),
        ("gemma3", {"query_pre_attn_scalar": -1}, "has query_pre_attn_scalar -1, which must be a number"),
        ("gemma3", {"architectures": ["Gemma2ForCausalLM"]}, "has rope_parameters {"),
        ("gemma2", {"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None},
         "has rope_parameters {"),
        ("gemma2", {"final_logit_softcapping": 0}, "has final_logit_softcapping 0, which must be a number"),
        ("gemma2", {"attention_bias": True}, "has attention_bias true, which"),
        ("gemma3_vision", {"text_config": None}, "has text_config null, which"),
        ("gemma3_vision", {"quantization_config": {"bits": 4}}, "has weights in {"),
        ("gpt_oss", {"attention_bias": False}, "has attention_bias false, which zoo/gpt_oss.py does not"),
        ("gpt_oss", {"num_experts_per_tok": 9}, "has num_experts_per_tok 9, which"),
        ("gpt_oss", {"rope_parameters": {"rope_type": "longrope"}}, 'has rope_type "longrope", which'),
        ("gpt_oss", {"swiglu_limit": 0}, "has swiglu_limit 0, which must be a number > 0"),
        ("vit", {"hidden_act": "gelu_new"}, 'has hidden_act "gelu_new", which zoo/vit.py does not'),
        ("vit", {"qkv_bias": False}, "has qkv_bias false, which"),
        ("vit", {"patch_size": 5}, "has patch_size 5, which"),
        ("vit", {"num_attention_heads": 5}, "has num_attention_heads 5, which"),
        ("vit", {"image_size": 16}, 'has size {"height": 12, "width": 12}, which'),
        ("vit", {"id2label": {"1": "cat"}}, "has an id2label without a name for each class from 0; "),
        ("vit", {"id2label": {"0": "cat", "1": "dog"}}, "classifier.weight in "),
    ],
)  # fmt: skip
def test_unsupported_architectures_are_refused_by_name(folder, family, changes, said):
    theirs = folder(family)
    edit(theirs, **changes)
    with pytest.raises(UserError) as caught:
        hf.Folder(theirs)
    sentence = str(caught.value)
    assert said in sentence
    assert "; " in sentence, "the fix is missing"
    assert "\n" not in sentence


def test_a_preprocessor_config_says_how_pictures_become_inputs(folder):
    theirs = folder("vit")
    file = theirs / "preprocessor_config.json"
    found, given = hf.Folder(theirs).config, json.loads(file.read_text())
    assert (found.mean, found.std, found.resample) == ((0.4, 0.5, 0.6), (0.4, 0.5, 0.6), "bicubic")

    def read(**changes):
        file.write_text(json.dumps({k: v for k, v in (given | changes).items() if v is not ...}))
        config = hf.Folder(theirs).config
        return config.mean, config.std, config.resample

    half = (0.5,) * 3
    assert read(image_mean=..., image_std=0.5, resample=...) == (half, half, "bilinear")
    assert read(size=12)[2] == "bicubic"
    assert read(do_normalize=False)[:2] == ((0.0,) * 3, (1.0,) * 3)
    # Pixels from 0 to 2 without a normalization are pixels from 0 to 1 over a deviation of 1/2.
    assert read(do_normalize=False, rescale_factor=2 / 255)[:2] == ((0.0,) * 3, half)
    assert read(do_rescale=False)[1] == pytest.approx((0.4 / 255, 0.5 / 255, 0.6 / 255))
    for changes, said in (
        ({"size": {"shortest_edge": 12}}, 'has size {"shortest_edge": 12}, which'),
        ({"size": 24}, "has size 24, which"),
        ({"resample": 9}, "has resample 9, which"),
        ({"do_center_crop": True}, "has do_center_crop true, which"),
        ({"image_mean": [0.5]}, "has image_mean [0.5], which"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            read(**changes)
    file.unlink()
    assert hf.Folder(theirs).config.mean == ()


def test_classes_of_one_name_are_told_apart(folder):
    theirs = folder("vit")
    edit(theirs, id2label={"0": "crane", "1": "owl", "2": "crane", "3": "cat", "4": "dog"})
    assert hf.Folder(theirs).config.labels == ("crane (0)", "owl", "crane (2)", "cat", "dog")
    edit(theirs, id2label=..., num_labels=5)
    assert hf.Folder(theirs).config.labels[4] == "LABEL_4"


def header(file, change):
    """Rewrites a file with its header changed by a function of the JSON text."""
    whole = file.read_bytes()
    (size,) = struct.unpack("<Q", whole[:8])
    text = change(whole[8 : 8 + size])
    file.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + size :])


FIRST = "model-00001-of-00002.safetensors"
DAMAGE = {
    "no config": (lambda d: (d / "config.json").unlink(), "config.json does not exist"),
    "broken config": (lambda d: (d / "config.json").write_text("{"), "config.json can't be read"),
    "binary config": (lambda d: (d / "config.json").write_bytes(b"\xff\xfe"), "config.json can't be"),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), "is not a JSON object"),
    "no shard": (lambda d: (d / FIRST).unlink(), f"{FIRST} does not exist; use a complete"),
    "broken index": (
        lambda d: (d / "model.safetensors.index.json").write_text("{}"), "does not list files"),
    "index of numbers": (
        lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": []}}'),
        "does not list files in its folder"),
    "index leads outside": (
        lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}'),
        "does not list files in its folder"),
    "truncated": (lambda d: os.truncate(d / FIRST, 9_000), f"{FIRST} can't be read"),
    "empty file": (lambda d: os.truncate(d / FIRST, 0), f"{FIRST} can't be read"),
    "too long": (lambda d: (d / FIRST).write_bytes((d / FIRST).read_bytes() + b"x"), f"{FIRST} can't be read"),
    "broken header": (
        lambda d: header(d / FIRST, lambda t: b"?" + t[1:]), f"{FIRST} can't be read"),
    "endless header": (
        lambda d: (d / FIRST).write_bytes(struct.pack("<Q", 2**60) + b"{}"), f"{FIRST} can't be"),
    "whole numbers": (
        lambda d: header(d / FIRST, lambda t: t.replace(b'"BF16"', b'"I16"')), "has dtype I16; use"),
    "twice": (
        lambda d: ((d / "model.safetensors.index.json").unlink(), shutil.copy(d / FIRST, d / "z.safetensors")),
        "is in both"),
    "pickles": (
        lambda d: [p.rename(p.with_suffix(".bin")) for p in d.glob("model*")],
        "model-00001-of-00002.bin, a pickle, which can execute code when loaded; use a model with"),
    "no weights": (lambda d: [p.unlink() for p in d.glob("model*")], "has no *.safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folders(folder, damage):
    theirs = folder()
    do, said = DAMAGE[damage]
    do(theirs)
    with pytest.raises(UserError) as caught:
        checkpoint.restore(f"hf:{theirs}", make_mesh("8"))
    assert said in str(caught.value)
    assert str(theirs) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_that_lead_nowhere(tmp_path, monkeypatch):
    for name, said in (
        ("hf:/no/such/dir", "'/no/such/dir' does not exist; use a model folder, or ORG/NAME"),
        ("hf:", "'' does not exist; use a model folder"),
        (f"hf:{GOLDEN / 'llama2' / 'config.json'}", "is a file; use its folder"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            checkpoint.find(name)
    folder = GOLDEN / "llama2"
    with pytest.raises(UserError) as caught:
        checkpoint.find(folder)
    assert str(caught.value) == (
        f"--restore_from={folder} is a Hugging Face model folder, not a checkpoint; use hf:{folder}"
    )
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError) as caught:  # conftest.py keeps the client offline
        checkpoint.find("hf:no-org/no-model")
    assert str(caught.value).startswith("no-org/no-model is no local folder, and HF_HUB_OFFLINE ")
    assert "\n" not in str(caught.value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match="hf:runs/x does not exist, and runs does"):
        checkpoint.find("hf:runs/x")


def test_a_name_of_the_hub_is_resolved_by_its_client(monkeypatch):
    import huggingface_hub

    asked = []

    def download(name, **options):
        asked.append((name, options))
        return str(GOLDEN / "qwen3")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert checkpoint.find("hf:some-org/some.model-1").config.qk_norm
    ((name, options),) = asked
    assert name == "some-org/some.model-1"
    assert not any(".bin" in p or "*.py" in p for p in options["allow_patterns"])


# ---- commands ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder of unlike layers whose vocabulary holds the recipe's bytes."""
    target, rng = tmp_path_factory.mktemp("hf") / "tiny", np.random.default_rng(3)
    config = dataclasses.replace(
        Config.tiny(), layer_kinds=(AttentionType(24, 1e4), AttentionType(None, 1e4))
    )
    shapes = paths(abstract_model(lambda: Transformer(config, rngs=nnx.Rngs(0))).shapes["params"])

    def read(path):
        return rng.normal(0, 0.1, shapes[path].shape).astype(np.float32)

    hf.write(target, "transformer", config, 64, read, tokenizer.BYTES)
    return target


@pytest.mark.full
def test_import_and_export_commands(run, tiny, tmp_path):
    ck, back = tmp_path / "ck", tmp_path / "back"
    done = run("recipes.hf", "import", f"--source={tiny}", f"--target={ck}", "--mesh=4x2")
    assert (done.code, done.err) == (0, "")
    assert "mesh 4x2 (data 4 × model 2) · rules fsdp_tp" in done.out
    assert f"Imported 123,200 parameters into {ck};" in done.out
    # Just like one of ours: plain Orbax reads it, restore puts it on any mesh.
    plain = paths(ocp.StandardCheckpointer().restore(ck / "state"))
    wanted = params_of(f"hf:{tiny}")
    assert_bit_equal({path.removeprefix("params/"): v for path, v in plain.items()}, wanted)
    model, metadata = checkpoint.restore(ck, make_mesh("1x8"), "tp")
    assert model.layers.mlp.up[...].sharding.spec == jax.P(None, None, "model")
    assert (metadata["entry"], metadata["step"], metadata["mesh"]["data"]) == ("transformer", 0, 4)
    assert metadata["logical_axes"]["layers/mlp/up"] == ["layers", "embed", "mlp"]
    assert set(metadata["versions"]) >= {"jax", "flax", "python"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ck"], "nothing is left beside it"

    done = run("recipes.hf", "export", f"--source={ck}", f"--target={back}")
    assert (done.code, done.err) == (0, "")
    assert f"Exported 123,200 parameters to {back};" in done.out
    assert (back / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert (back / "config.json").read_text() == (tiny / "config.json").read_text()

    for command, source in (("import", tiny), ("export", ck)):
        done = run("recipes.hf", command, f"--source={source}", f"--target={back}")
        assert done.code == 2
        assert done.err == f"error: --target={back} already exists; use a new name\n"


@pytest.mark.full
def test_a_recipe_trains_from_a_folder_and_its_run_is_exported(run, tiny, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text((ROOT / "zoo" / "core" / "attention.py").read_text())
    work, back = tmp_path / "run", tmp_path / "back"
    flags = (f"--restore_from=hf:{tiny}", f"--dataset={book}", "--seq_len=32", "--batch_size=16",
             "--mesh=4x2", "--sample_bytes=40", f"--workdir={work}")  # fmt: skip
    done = run("recipes.transformer", *flags, "--steps=0")
    assert (done.code, done.err) == (0, "")
    assert f"Evaluates {tiny}, step 0." in done.out
    done = run("recipes.transformer", *flags, "--steps=2")
    assert (done.code, done.err) == (0, "")
    assert f"Starts at step 0 from the parameters of {tiny}." in done.out

    done = run("recipes.hf", "export", f"--source={work}", f"--target={back}")
    assert (done.code, done.err) == (0, "")
    trained, _ = checkpoint.restore(work, make_mesh("1"), "dp")
    trained = paths(nnx.to_pure_dict(nnx.state(trained, nnx.Param)))
    assert_bit_equal(params_of(f"hf:{back}"), trained)
    assert np.abs(trained["embed"] - params_of(f"hf:{tiny}")["embed"]).max() > 0
    # Training on 32 positions took none of those that it was made for.
    assert hf.Folder(back).metadata["context"] == 64
    assert [kind.window for kind in hf.Folder(back).config.layer_kinds] == [24, None]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["improt"], "use python -m recipes.hf import … or python -m recipes.hf export …"),
        (["export", "--mesh=8"], "--mesh is not a flag; --help lists the flags"),
        (["import", "--source=tests/golden/hf/llama2", "--target=x", "--mesh=1x3"], "rules 'fsdp_tp' split dim 'mlp' of layers/mlp/down [2, 32, 32] over 3 devices"),
    ],
)  # fmt: skip
def test_mistakes_on_the_command_line(argv, sentence, inside, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = inside("recipes.hf", *argv)
    assert done.code == 2
    assert done.err.startswith(f"error: {sentence}")
    assert done.err.count("\n") == 1
    assert not (ROOT / "x").exists()


@pytest.mark.parametrize(
    ("command", "flags", "sentence"),
    [
        ("import", dict(target="x"), "--source is missing; use --source=DIR"),
        ("export", dict(source="x"), "--target is missing; use --target=DIR"),
        ("export", dict(source="no", target="x"), "--source=no does not exist; use a run's workdir"),
        ("import", dict(source=str(ROOT / "zoo"), target="x"), "config.json does not exist; use a complete"),
        ("import", dict(source="no", target="zoo"), "/zoo already exists; use a new name"),
        ("import", dict(source="no", target="README.md/x"), "/README.md/x can't be written (Not a directory); use a different"),
    ],
)  # fmt: skip
def test_mistakes_in_flags(command, flags, sentence, monkeypatch):
    monkeypatch.chdir(ROOT)
    main, defaults = recipes.hf.COMMANDS[command]
    with pytest.raises(UserError, match=re.escape(sentence)):
        main(dataclasses.replace(defaults, **flags))
    assert not (ROOT / "x").exists()


@pytest.mark.full
def test_help_names_both_commands(run):
    done = run("recipes.hf", "--help")
    assert done.code == 0
    for said in ("recipes.hf import", "recipes.hf export", "--source", "--mesh"):
        assert said in done.out


# ---- GPT-2's older files -------------------------------------------------------------------------


def test_gpt2_is_read_without_the_prefix_of_its_tensors(folder):
    """The published files have no prefix, but masks and a copy of the embeddings."""
    new, old = GOLDEN / "gpt2", folder("gpt2")
    tensors = {n.removeprefix("transformer."): t for n, t in tensors_of(new / MODEL).items()}
    tensors |= {f"h.{i}.attn.bias": np.tri(64, dtype=np.float32)[None, None] for i in range(2)}
    safetensors.numpy.save_file(tensors | {"lm_head.weight": tensors["wte.weight"]}, old / MODEL)
    assert_bit_equal(params_of(f"hf:{new}"), params_of(f"hf:{old}"))


def test_gpt2_s_vocabulary_and_merges_are_its_tokenizer(folder):
    """Old repositories have no tokenizer.json; `transformers` makes the same one of the two files."""
    target, words = folder("gpt2"), ["<|endoftext|>", "h", "e", "l", "o", "Ġ", "he", "ll", "Ġhe"]
    (target / "vocab.json").write_text(json.dumps({w: i for i, w in enumerate(words)}))
    (target / "merges.txt").write_text("#version: 0.2\nh e\nl l\nĠ he\n")
    edit(target, eos_token_id=0, bos_token_id=0)
    found = hf.Folder(target).tokenizer()
    assert list(found.encode(["hello hello"])[0]) == [6, 7, 4, 8, 7, 4]
    assert found.end == (0,)
    assert list(found.encode_rendered("he<|endoftext|>")) == [6, 0]
    (target / "merges.txt").write_text("#version: 0.2\nh z\n")
    with pytest.raises(DataError, match=r"a vocab.json and merges.txt that can't be read \("):
        hf.Folder(target).tokenizer()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_head": 7}, "has n_head 7, which zoo/gpt2.py does not implement"),
        ({"activation_function": "relu"}, 'has activation_function "relu", which zoo/gpt2.py'),
        ({"scale_attn_by_inverse_layer_idx": True}, "has scale_attn_by_inverse_layer_idx true"),
        ({"add_cross_attention": True}, "has add_cross_attention true"),
        ({"n_positions": ...}, "has n_positions null, which must be a number > 0"),
    ],
)
def test_gpt2_s_features_that_we_lack_are_named(folder, changes, message):
    edit(target := folder("gpt2"), **changes)
    with pytest.raises(UserError, match=re.escape(message)):
        hf.Folder(target)
