"""Sharding rules: which ones a run uses, your own rules, and errors in them."""

import dataclasses
import itertools
import json
import random

import jax
import numpy as np
import pytest
from flax import nnx

from recipes.common import checkpoint
from recipes.common.entries import ENTRIES, model, zoo_file
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.mesh import ORDER, make_mesh
from recipes.common.sharding.abstract import abstract_model
from recipes.common.sharding.layout import Layout, elsewhere, make_layout
from recipes.common.sharding.rules import default_strategy, select, used_axes
from recipes.common.train.step import gradients
from tests.conftest import full_except
from tests.support import entries as proof
from tests.support.quick import quick as quick
from tests.support.runs import TINY
from zoo.core.strategies import DECODER
from zoo.llama_relatives import RULES, Config, Transformer
from zoo.options import cache as zoo_cache

pytestmark = pytest.mark.promise("own-rules")

CP = {"batch": "data", "seq": "seq"}  # context parallelism: rows and their positions are split


def layout(rules=None, mesh="4x2", batch=16, seq_len=0, **changes) -> Layout:
    """The tiny Transformer under `rules`, or under fsdp_tp with changes."""
    table, sizes = rules or RULES["fsdp_tp"] | changes, {"batch_size": batch, "seq_len": seq_len}
    return make_layout(Transformer, Config.tiny(), make_mesh(mesh), table, **sizes)


# ---- which table ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        ("8", "fsdp"),
        ("4x2", "fsdp_tp"),
        ("2x2x2", "hsdp_tp"),
        ("fsdp=8", "dp"),  # none fits: the first, whose message says what it needs
        ("data=2,fsdp=4", "fsdp"),
        ("data=2,expert=4", "fsdp"),
        ("data=2,model=2,expert=2", "fsdp_tp"),
    ],
)
@pytest.mark.parametrize("entry", [name for name in ENTRIES if "hsdp_tp" in zoo_file(name).RULES])
def test_default_strategy_of_a_mesh(entry, mesh, strategy):
    if entry in EXPERTS and "expert" in mesh:
        strategy = strategy.replace("fsdp", "fsdp_ep")
    assert default_strategy(zoo_file(entry).RULES, make_mesh(mesh)) == strategy


@pytest.mark.parametrize(
    ("rules", "mesh", "wanted"),
    [
        ({"a": {"x": "data"}, "b": {"x": ("data", "model")}}, "4x2", "b"),  # most mesh axes
        ({"a": {"x": "data"}, "b": {"x": "data"}}, "8", "b"),  # the last
        ({"a": {"x": "expert"}, "b": {"x": "pipe"}}, "8", "a"),  # none fits: the first
    ],
)
def test_the_default_strategy_is_not_chosen_by_name(rules, mesh, wanted):
    assert default_strategy(rules, make_mesh(mesh)) == wanted


DENSE = ("transformer", "gpt2", "gemma3", "bert")
EXPERTS = ("moe", "gpt_oss", "gemma4", "gemma4_vision", "deepseek", "qwen3_next", "hybrid")
ALL_AXES = [axes for n in range(1, len(ORDER) + 1) for axes in itertools.combinations(ORDER, n)]


def default_on(rules, axes: tuple[str, ...], sizes: tuple[int, ...] = ()) -> str:
    sizes = sizes or (2,) * len(axes)
    return default_strategy(rules, jax.sharding.AbstractMesh(sizes, axes))


def test_every_set_of_axes_has_one_default_for_decoders_of_a_kind(golden):
    """A reviewed table of all 63: the set, the default without experts, the default with experts."""
    assert len(ALL_AXES) == 63
    lines = []
    for axes in ALL_AXES:
        found = [
            {default_on(zoo_file(entry).RULES, axes) for entry in entries}
            for entries in (DENSE, EXPERTS)
        ]
        assert [len(names) for names in found] == [1, 1], (axes, found)
        lines.append(" ".join([",".join(axes), *(name for names in found for name in names)]))
    golden("default_strategies.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("entry", [name for name in ENTRIES if len(zoo_file(name).RULES) > 1])
def test_the_order_in_which_a_file_lists_its_strategies_decides_nothing(entry):
    rules = zoo_file(entry).RULES
    orders = [list(rules), list(reversed(rules)), sorted(rules)]
    orders += [random.Random(seed).sample(list(rules), len(rules)) for seed in range(8)]
    for axes in ALL_AXES:
        found = {default_on({name: rules[name] for name in order}, axes) for order in orders}
        assert len(found) == 1, (axes, found)


@pytest.mark.parametrize("entry", [*DENSE, *EXPERTS])
def test_axes_of_one_device_do_not_decide_the_default(entry):
    """fsdp_cp would leave the two devices along `pipe` the same work."""
    rules = zoo_file(entry).RULES
    assert default_on(rules, ("data", "pipe", "seq"), (4, 2, 1)) == "fsdp_pp"
    assert default_on(rules, ("data", "pipe", "seq"), (4, 1, 2)) == "fsdp_cp"


# ---- rules of your own around a copied model -----------------------------------------------------


def call_under(entry: str, rules, method: str = "loss") -> None:
    """Traces a call of a tiny model with these rules in force on 4x2, as a loop of one's own does."""
    facts = proof.ENTRIES[entry]
    abstract = abstract_model(facts.build)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), facts.batches[0])
    rows = jax.ShapeDtypeStruct((proof.BATCH,), np.int32)

    def call(variables, batch, rows):
        model = abstract.merge(variables)
        if method == "loss":
            return model.loss(**batch)[0]
        if method == "prefill":
            return zoo_cache.prefill(model, batch["tokens"], rows, 32)[0]
        return model(next(iter(batch.values())))

    mesh = jax.make_mesh((4, 2), ("data", "model"))
    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(rules.items())):
        jax.eval_shape(call, abstract.shapes, batch, rows)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_misspelt_axis_is_refused_by_complete_and_by_a_model_s_call(entry):
    """JAX would ignore the axis and replicate the weight."""
    zoo = zoo_file(entry)
    said = "^the model has no logical axis 'embd'; did you mean 'embed'\\?"
    with pytest.raises(ValueError, match=said):
        zoo.complete({"mine": {"batch": "data", "embd": "data"}})
    rules = zoo.complete({"mine": {"batch": "data", "embed": "data"}})["mine"]
    call_under(entry, rules)
    misspelt = {axis: target for axis, target in rules.items() if axis != "embed"}
    for wrong in (misspelt | {"embd": "data"}, rules | {"embd": "data"}):
        with pytest.raises(ValueError, match=said):
            call_under(entry, wrong)
    with pytest.raises(ValueError, match=r"no logical axis 'xyz'; it has .*batch, .*embed"):
        call_under(entry, rules | {"xyz": "data"})


@pytest.mark.parametrize("entry", ENTRIES)
def test_rules_that_lack_an_axis_are_refused_by_a_model_s_call(entry):
    """Those of another model lack axes too."""
    for axis in ("batch", "embed"):
        rules = {name: to for name, to in zoo_file(entry).RULES["fsdp_tp"].items() if name != axis}
        said = rf"^the sharding rules lack logical axis '{axis}'; complete\(...\), at the end of"
        with pytest.raises(ValueError, match=said):
            call_under(entry, rules)


def test_each_way_to_call_a_decoder_refuses_such_rules():
    for method in ("loss", "prefill", "__call__"):
        call_under("transformer", RULES["fsdp_tp"], method)
        with pytest.raises(ValueError, match="no logical axis 'embd'; did you mean 'embed'"):
            call_under("transformer", RULES["fsdp_tp"] | {"embd": "data"}, method)
    with pytest.raises(ValueError, match="lack logical axis 'expert'"):
        call_under("moe", RULES["fsdp_tp"])


@pytest.mark.parametrize("mesh", ["data=2,seq=4", "data=1,seq=8"])
def test_a_mesh_with_seq_gets_rules_that_split_positions(mesh):
    found = make_layout(Transformer, Config.tiny(), make_mesh(mesh), batch_size=16)
    assert used_axes(found.rules) == {"data", "seq"}
    assert (found.rules["batch"], found.seq_shards) == ("data", found.mesh.shape["seq"])


def test_a_table_states_only_what_it_shards():
    name, table = select(RULES, DECODER, {"mlp": "model"}, make_mesh("4x2"))
    assert name == "(yours)"
    assert list(table) == list(DECODER.logical_axes)
    assert {axis for axis, target in table.items() if target} == {"mlp"}
    found = layout({"batch": "data", "mlp": "model"})
    assert found.sharding("embed", "mlp").spec == jax.P(None, "model")
    for strategy in RULES:
        assert RULES[strategy].keys() >= DECODER.logical_axes.keys(), "ours are complete"


# ---- a table of your own, from a file ------------------------------------------------------------

MINE = {"batch": ["data", "fsdp"], "embed": "fsdp", "hidden": None}


@pytest.fixture
def mine(tmp_path):
    """Returns a function that writes a JSON value or a text to a file and returns its path."""

    def write(content) -> str:
        path = tmp_path / "mine.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def test_a_run_uses_and_reports_your_own_rules(inside, quick, mine, tmp_path):
    path, workdir = mine(MINE), tmp_path / "run"
    flags = ("--steps=2", "--embed=16", "--hidden=64", f"--workdir={workdir}", f"--rules={path}")
    done = inside("recipes.dot_relu_dot", "--mesh=2x2x2", *flags)
    assert (done.code, done.err) == (0, "")
    assert f"· rules {path} ·" in done.out
    assert "(fsdp, -)" in done.out
    saved = checkpoint.find(workdir).metadata["rules"]
    assert saved["name"] == path
    assert saved["table"] == dict.fromkeys(model("dot_relu_dot").axes.logical_axes) | MINE
    again = inside("recipes.dot_relu_dot", "--mesh=2x2x2", *flags)  # resumes, as with any table
    assert (again.code, again.err) == (0, "")
    assert "Resumes at step 2" in again.out


def test_restore_accepts_a_file_of_rules(mine):
    model, _ = checkpoint.restore("dot_relu_dot.teacher", make_mesh("2x2x2"), mine(MINE))
    assert model.w1[...].sharding.spec == jax.P("fsdp", None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "can't be read (No such file or directory); fix the path"),
        ("", "is not JSON (Expecting value: line 1 column 1 (char 0)); fix the file"),
        ('{"batch": "data"', "is not JSON (Expecting ',' delimiter: line 1 column 17 (char 16)); fix"),
        ("[1]", 'is not a JSON object; write {"batch": "data", ...}'),
        ({"embed": 4}, "maps 'embed' to 4; use the name of a mesh axis, a list of names, or null"),
        ({"embed": ["data", 2]}, "maps 'embed' to [\"data\", 2]; use the name of a mesh axis"),
        ({"embed": {"data": 1}}, "maps 'embed' to {\"data\": 1}; use the name of a mesh axis"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_line_and_leaves_nothing(content, message, mine, inside, tmp_path):
    path = mine(content if content is not None else "")
    if content is None:
        (tmp_path / "mine.json").unlink()
    workdir = tmp_path / "run"
    done = inside("recipes.dot_relu_dot", f"--rules={path}", "--mesh=8", f"--workdir={workdir}")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: --rules={path} {message}")
    assert done.err.count("\n") == 1
    assert not workdir.exists()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"embd": "data"}, "rules '{}' name logical axis 'embd', unknown to the model; did you mean 'embed'?"),
        ({"embed": "model"}, "rules '{}' need mesh axis 'model' (for 'embed'), and --mesh=8 has 'data'; try --mesh=4x2"),
        ({"embed": "data", "hidden": "data"}, "rules '{}' use mesh axis 'data' twice on w1, for 'embed' and 'hidden'; replicate one of the two (None, or null in JSON)"),
    ],
)  # fmt: skip
def test_a_file_of_rules_is_checked_like_the_zoo_s(table, message, mine, inside, tmp_path):
    path, workdir = mine(table), tmp_path / "run"
    done = inside("recipes.dot_relu_dot", f"--rules={path}", "--mesh=8", f"--workdir={workdir}")
    assert (done.code, done.out, done.err) == (2, "", f"error: {message.format(path)}\n")
    assert not workdir.exists()


def test_accumulation_that_leaves_too_few_rows_is_one_line(inside, tmp_path):
    workdir = tmp_path / "run"
    flags = ("--mesh=4x2", "--accumulate=16", "--batch_size=16", f"--workdir={workdir}")
    done = inside("recipes.transformer", *TINY, *flags)
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        "error: --batch_size=16 in --accumulate=16 parts leaves 1 to each, not divisible by the "
        "4 shards of 'batch' (rules 'fsdp_tp' on --mesh=4x2); try --batch_size=64\n"
    )
    assert not workdir.exists()
    layout(mesh="4x2", batch=64)


# ---- what does not fit ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (dict(rules="fdsp"), "--rules=fdsp is not a strategy of this entry; did you mean 'fsdp'?"),
        (dict(rules="x"), "--rules=x is not a strategy of this entry; it has dp, zero1, fsdp, tp_sp, fsdp_tp_sp, hsdp_tp_sp, tp, fsdp_tp, hsdp_tp, cp, fsdp_cp, fsdp_cp_tp, pp, pp_zero1, fsdp_pp, fsdp_pp_tp"),
        (dict(embd="data"), "rules '(yours)' name logical axis 'embd', unknown to the model; did you mean 'embed'?"),
        (dict(mlp="expert"), "rules '(yours)' need mesh axis 'expert' (for 'mlp'), and --mesh=4x2 has 'data' and 'model'; try --mesh=data=2,expert=2,model=2"),
        (dict(rules="tp", mesh="8"), "rules 'tp' need mesh axis 'model' (for 'heads'), and --mesh=8 has 'data'; try --mesh=4x2"),
        (dict(rules="hsdp_tp"), "rules 'hsdp_tp' need mesh axis 'fsdp' (for 'batch'), and --mesh=4x2 has 'data' and 'model'; try --mesh=2x2x2"),
        (dict(mlp="data"), "rules '(yours)' use mesh axis 'data' twice on layers/mlp/down, for 'mlp' and 'embed'; replicate one of the two (None, or null in JSON)"),
        (dict(act_embed="data"), "rules '(yours)' use mesh axis 'data' twice on an activation, for 'batch' and 'act_embed'; replicate one of the two (None, or null in JSON)"),
        (dict(seq="model"), "rules '(yours)' use mesh axis 'model' twice on an activation, for 'seq' and 'heads'; replicate one of the two (None, or null in JSON)"),
        (dict(act_embed="model"), "rules '(yours)' use mesh axis 'model' twice on embed in use, for 'vocab' and 'act_embed'; replicate one of the two (None, or null in JSON)"),
        (dict(layers="data", embed=None, mesh="2x4"), "rules '(yours)' use mesh axis 'data' twice on a pipeline, for 'layers' and 'batch'; replicate one of the two (None, or null in JSON)"),
        (dict(rules=dict(batch="data", layers="pipe", seq="seq"), mesh="data=2,pipe=2,seq=2"), "rules '(yours)' split 'layers' and 'seq', and the stages of a pipeline need whole rows; replicate one of the two (None, or null in JSON)"),
        (dict(rules="tp", mesh="2x3"), "rules 'tp' split dim 'mlp' of layers/mlp/down [2, 128, 64] over 3 devices (mesh axis 'model' of --mesh=2x3), and 128 is not divisible by 3; meshes that fit: --mesh=2x2"),
        (dict(batch=6), "--batch_size=6 is not divisible by the 4 shards of 'batch' (rules '(yours)' on --mesh=4x2); try --batch_size=8"),
        (dict(rules=CP, mesh="data=2,seq=4", seq_len=30), "rows of 30 tokens are not divisible by the 4 shards of 'seq' (rules '(yours)' on --mesh=data=2,seq=4); try --seq_len=32"),
        (dict(rules=CP, mesh="data=1,seq=8", seq_len=1_027, batch=0), "rows of 1,027 tokens are not divisible by the 8 shards of 'seq' (rules '(yours)' on --mesh=data=1,seq=8); try --seq_len=1024"),
        (dict(rules=CP, mesh="data=1,seq=8", seq_len=3), "rows of 3 tokens are not divisible by the 8 shards of 'seq' (rules '(yours)' on --mesh=data=1,seq=8); try --seq_len=8"),
        (dict(rules="fsdp", mesh="data=2,seq=4"), "rules 'fsdp' use no mesh axis 'seq', so the 4 devices along it (--mesh=data=2,seq=4) would all do the same work; use --rules="),
        (dict(batch=2), "--batch_size=2 is not divisible by the 4 shards of 'batch' (rules '(yours)' on --mesh=4x2); try --batch_size=4"),
    ],
)  # fmt: skip
def test_bad_tables(case, message):
    with pytest.raises(UserError) as caught:
        layout(**case)
    assert str(caught.value).startswith(message)


def test_a_mesh_of_two_kinds_of_axes():
    kinds = (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto)
    mesh = jax.make_mesh((4, 2), ("data", "model"), kinds)
    with pytest.raises(UserError) as caught:
        make_layout(Transformer, Config.tiny(), mesh)
    assert str(caught.value) == (
        "the mesh has axes of two kinds ('data' Explicit, 'model' Auto); make all Explicit, JAX's "
        "default, or all Auto"
    )


ODD = [  # those that none of our tables splits
    (entry, axis)
    for entry in ENTRIES
    for axis, on in model(entry).axes.logical_axes.items()
    if on != "stack" and not any(table[axis] for table in zoo_file(entry).RULES.values())
]


# The full tier takes each axis once, of the first entry that has it, and all that have experts.
AGAIN = [(e, a) for e, a in ODD if e != "moe" and (e, a) != next(x for x in ODD if x[1] == a)]


@pytest.mark.parametrize(("entry", "axis"), full_except(ODD, [("moe", "act_embed")], AGAIN))
def test_an_axis_that_may_be_split_can_be_computed(entry, axis):
    table = dict.fromkeys(model(entry).axes.logical_axes) | {"batch": "data", axis: "model"}
    config, rows = proof.ENTRIES[entry].config, proof.BATCH
    found = make_layout(model(entry), config, make_mesh("4x2"), table, batch_size=rows)
    batch = jax.tree.map(lambda x: x[0], proof.ENTRIES[entry].batches[0])
    lowered = found.lower(
        lambda state, batch: gradients(found, state, batch)[0],
        found.variables(), found.abstract_batch(batch),
    )  # fmt: skip
    shapes = found.model.shapes["params"]
    assert jax.tree.map(lambda x: x.shape, lowered.out_info) == jax.tree.map(
        lambda x: x.shape, shapes
    )


def test_a_model_that_does_not_declare_an_axis(monkeypatch):
    less = {k: v for k, v in DECODER.logical_axes.items() if k != "mlp"}
    monkeypatch.setattr(Transformer, "axes", dataclasses.replace(DECODER, logical_axes=less))
    with pytest.raises(UserError) as caught:
        layout({"batch": "data"})
    assert str(caught.value) == (
        "rules '(yours)' are missing logical axis 'mlp' of layers/mlp/down; add it to the model's "
        "logical_axes"
    )


def test_advice_is_good():
    """The mesh and batch size that a message proposes work."""
    layout("tp", "2x2")
    layout(batch=8)
    layout("hsdp_tp", "2x2x2")
    for length in (8, 1_024):
        layout(CP, "data=1,seq=8", seq_len=length)


def test_elsewhere_finds_the_meshes_that_fit():
    here = layout("fsdp_tp")
    assert elsewhere(here, "hsdp_tp") is None
    assert elsewhere(here, "", make_mesh("2x3")) is None
    assert elsewhere(here, "hsdp_tp", make_mesh("2x2x2")).strategy == "hsdp_tp"
    split = [
        elsewhere(layout(seq_len=length), "cp", make_mesh("data=2,seq=4")) for length in (32, 30)
    ]
    assert [found and found.seq_shards for found in split] == [4, None]


# ---- what a batch's arrays follow ----------------------------------------------------------------


def test_positions_are_split_and_arrays_without_them_are_not():
    found = layout(CP, "data=2,seq=4", seq_len=32)
    batch = {"tokens": np.zeros((16, 32), np.int32), "lengths": np.zeros(16, np.int32)}
    where = found.batch_shardings(batch)
    assert where["tokens"].spec == jax.P("data", "seq")
    assert where["lengths"].spec == jax.P("data")
    rows = found.abstract_batch(jax.tree.map(lambda x: x[0], batch))
    assert jax.tree.map(lambda x: (x.shape, x.sharding), rows) == {
        name: (x.shape, where[name]) for name, x in batch.items()
    }
    assert (found.batch_shards, found.seq_shards) == (2, 4)


@pytest.mark.parametrize("entry", ENTRIES)
def test_only_entries_with_positions_split_the_second_dim(entry):
    """A second dim of features, such as pixels, is whole on each device whatever the rules."""
    found = proof.ENTRIES[entry].layout("4x2")
    of_text = ENTRIES[entry].data in (*proof.OF_TEXT, "data.pictured")
    for axis in found.names.logical_axes.keys() - {*found.batch_axes}:
        table = dataclasses.replace(found, rules=dict.fromkeys(found.rules) | {axis: "model"})
        assert table.batch_shardings(np.zeros((16, 32))).is_fully_replicated
    assert (found.batch_axes == ("batch", "seq")) == of_text
    assert found.batch_shardings(np.zeros((16, 32))).shard_shape((16, 32)) == (4, 32)


def test_the_residual_stream_may_be_split_differently_from_other_activations():
    table = {"batch": "data", "mlp": "model", "residual_seq": "model"}  # Megatron's
    layout(table, seq_len=32)
    layout(table, seq_len=33, batch=0)  # not trained: a model may replicate it
    layout(CP | {"residual_seq": "seq"}, "data=2,seq=4", seq_len=32)
    both = {"batch": "data", "seq": "seq", "residual_seq": ("seq", "model")}
    for case, message in (
        ((table, "4x2", 16, 33), "rows of 33 tokens are not divisible by the 2 shards of 'residual_seq' (rules '(yours)' on --mesh=4x2); try --seq_len=32"),
        ((both, "data=2,seq=2,model=2", 16, 18), "rows of 18 tokens are not divisible by the 4 shards of 'residual_seq' (rules '(yours)' on --mesh=data=2,seq=2,model=2); try --seq_len=16"),
        ((CP | {"residual_seq": "data"}, "data=2,seq=4"), "rules '(yours)' use mesh axis 'data' twice on an activation, for 'batch' and 'residual_seq'; replicate one of the two (None, or null in JSON)"),
    ):  # fmt: skip
        with pytest.raises(UserError) as caught:
            layout(*case)
        assert str(caught.value) == message
