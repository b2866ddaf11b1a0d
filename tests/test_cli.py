"""Flags, meshes and rule tables: what is wrong is said in one sentence, before anything is made."""

import dataclasses

import jax
import pytest
from flax import nnx

from recipes.common import cli, mesh, sharding
from recipes.common.cli import Run, UserError, flag, parse
from recipes.common.mesh import describe, make_mesh
from zoo.transformer import RULES, Config, Transformer


@dataclasses.dataclass(frozen=True)
class Flags:
    fast: bool = flag(False, "go fast")
    kind: str = flag("a", "which", choices=["a", "b"])


def test_flags_become_fields_of_their_types():
    run, flags = parse(
        ["--steps=7", "--learning_rate=1e-2", "--fast", "--kind", "b"], Run(), Flags()
    )
    assert (run.steps, run.learning_rate, flags.fast, flags.kind) == (7, 0.01, True, "b")
    assert run == dataclasses.replace(Run(), steps=7, learning_rate=0.01)
    assert parse([], Run(steps=3), Flags()) == [Run(steps=3), Flags()]


def test_help_shows_every_flag_with_its_default_and_unit():
    text = cli.usage("Doc.", Run(steps=9), Flags())
    for group in (Run(), Flags()):
        for field in dataclasses.fields(group):
            assert f"--{field.name}=" in text
            assert field.metadata["help"] in text
    assert "--steps=9" in text
    assert parse(["--help"], Run()) is None


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--step=7"], "--step is not a flag; did you mean --steps?"),
        (["--zzz=7"], "--zzz is not a flag; --help lists the flags"),
        (["seven"], "'seven' is not a flag; flags are written --name=value"),
        (["--steps=x"], "--steps=x is not a whole number; try 100"),
        (["--steps=1.5"], "--steps=1.5 is not a whole number; try 100"),
        (["--steps=-1"], "--steps=-1 is below its least value, 0; try 100"),
        (["--batch_size=0"], "--batch_size=0 is below its least value, 1; try 32"),
        (["--learning_rate=fast"], "--learning_rate=fast is not a number; try 0.001"),
        (["--learning_rate=nan"], "--learning_rate=nan is not a finite number; try 0.001"),
        (["--seed=9999999999"], "--seed=9999999999 is above its greatest value, 2147483647; try 0"),
        (["--kind=c"], "--kind=c is not one of a, b"),
        (["--steps"], "Missing value for flag --steps; --help lists the flags"),
    ],
)
def test_bad_flags(argv, sentence):
    with pytest.raises(UserError) as caught:
        parse(argv, Run(), Flags())
    assert str(caught.value) == sentence


# ---- meshes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("8", {"data": 8}),
        ("4x2", {"data": 4, "model": 2}),
        ("1x1", {"data": 1, "model": 1}),
        ("2x2x2", {"data": 2, "fsdp": 2, "model": 2}),
        ("data=2,model=4", {"data": 2, "model": 4}),
        ("fsdp=8", {"fsdp": 8}),
        ("data=4,expert=2", {"data": 4, "expert": 2}),
    ],
)
def test_a_mesh_is_what_it_says(text, axes):
    made = make_mesh(text)
    assert dict(made.shape) == axes
    assert set(made.axis_types) == {jax.sharding.AxisType.Auto}
    assert mesh.parse(describe(axes)) == axes


@pytest.mark.parametrize(
    "text", ["model=2,data=2,fsdp=2", "fsdp=2,model=2,data=2", "data=2,fsdp=2,model=2"]
)
def test_order_of_names_does_not_matter(text):
    assert make_mesh(text) == make_mesh("2x2x2")


def test_axes_may_share_a_ring_of_a_tpu_slice(monkeypatch):
    """What jax.make_mesh will not lay out (16x16 on chips wired 4x8x8) is laid out all the same."""
    axes = {"data": 2, "fsdp": 2, "model": 2}
    plain = mesh.arrange(axes, jax.devices())

    def refuse(*_, **__):
        raise NotImplementedError("the size of each axis must be a product of some physical ones")

    monkeypatch.setattr(jax, "make_mesh", refuse)
    assert mesh.arrange(axes, jax.devices()) == plain


def test_no_mesh_puts_all_devices_on_data():
    assert dict(make_mesh().shape) == {"data": 8}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("4x", "--mesh=4x is not a mesh; write sizes"),
        ("axb", "--mesh=axb is not a mesh; write sizes"),
        ("-1x2", "--mesh=-1x2 is not a mesh; write sizes"),
        ("4 x 2", "--mesh=4 x 2 is not a mesh; write sizes"),
        ("0x8", "--mesh=0x8 has an axis of size 0; an axis that is not used has size 1"),
        ("4x2x2x2", "--mesh=4x2x2x2 has 4 sizes and 3 have names; write sizes"),
        ("data=2,data=4", "--mesh=data=2,data=4 names axis 'data' twice; name each once"),
        ("data=two", "--mesh=data=two: 'data=two' is not name=size; write sizes"),
        ("data=2,", "--mesh=data=2,: '' is not name=size; write sizes"),
        ("16", "--mesh=16 needs 16 devices, found 8; try --mesh=8"),
        ("4x4", "--mesh=4x4 needs 16 devices, found 8; try --mesh=4x2"),
        ("4x4x4", "--mesh=4x4x4 needs 64 devices, found 8; try --mesh=2x2x2"),
        (
            "100x100",
            "--mesh=100x100 needs 10000 devices, at most 1024 are simulated; try --mesh=4x2",
        ),
    ],
)
def test_bad_meshes(text, sentence):
    with pytest.raises(UserError) as caught:
        make_mesh(text)
    assert str(caught.value).startswith(sentence)


# ---- rule tables ---------------------------------------------------------------------------------


def lay_out(strategy="mine", text="4x2", batch=16, **changes):
    table = {k: v for k, v in (RULES["fsdp_tp"] | changes).items() if v != "forget"}
    build = lambda: Transformer(Config.tiny(), rngs=nnx.Rngs(0))  # noqa: E731
    dims = {"batch": ("--batch_size", batch)}
    return sharding.lay_out(build, RULES | {"mine": table}, strategy, make_mesh(text), dims)


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        (dict(strategy="fdsp"), "--rules=fdsp is not a strategy of this entry; did you mean 'fsdp'?"),
        (dict(strategy="x"), "--rules=x is not a strategy of this entry; there are dp, fsdp, tp, fsdp_tp, hsdp_tp"),
        (dict(embd="data"), "rules 'mine' name logical axis 'embd', which the model lacks; did you mean 'embed'?"),
        (dict(mlp="forget"), "rules 'mine' forget logical axis 'mlp' of layers/mlp/down (10 of 11 are there); add 'mlp': None to replicate it"),
        (dict(seq="forget"), "rules 'mine' forget logical axis 'seq' (10 of 11 are there); add 'seq': None to replicate it"),
        (dict(mlp="expert"), "rules 'mine' need mesh axis 'expert' (for 'mlp'), and --mesh=4x2 has 'data' and 'model'; try --mesh=data=4,model=2,expert=1"),
        (dict(strategy="tp", text="8"), "rules 'tp' need mesh axis 'model' (for 'heads'), and --mesh=8 has 'data'; try --mesh=4x2"),
        (dict(strategy="hsdp_tp"), "rules 'hsdp_tp' need mesh axis 'fsdp' (for 'batch'), and --mesh=4x2 has 'data' and 'model'; try --mesh=2x2x2"),
        (dict(mlp="data"), "rules 'mine' put mesh axis 'data' twice on layers/mlp/down, for 'mlp' and 'embed'; map one of the two to None"),
        (dict(act_embed="data"), "rules 'mine' put mesh axis 'data' twice on an activation, for 'batch' and 'act_embed'; map one of the two to None"),
        (dict(seq="model"), "rules 'mine' put mesh axis 'model' twice on an activation, for 'seq' and 'heads'; map one of the two to None"),
        (dict(act_embed="model"), "rules 'mine' put mesh axis 'model' twice on embed in use, for 'vocab' and 'act_embed'; map one of the two to None"),
        (dict(strategy="tp", text="2x3"), "rules 'tp' split dim 'kv_heads' of layers/attention/k [2, 64, 8, 8] over 3 devices (mesh axis 'model' of --mesh=2x3), and 8 does not divide by 3; meshes that fit: --mesh=2x2"),
        (dict(batch=6), "--batch_size=6 does not divide over the 4 shards of 'batch' (rules 'mine' on --mesh=4x2); try --batch_size=8"),
        (dict(batch=2), "--batch_size=2 does not divide over the 4 shards of 'batch' (rules 'mine' on --mesh=4x2); try --batch_size=4"),
    ],
)  # fmt: skip
def test_bad_tables(case, sentence):
    with pytest.raises(UserError) as caught:
        lay_out(**case)
    assert str(caught.value).startswith(sentence)


def test_advice_is_good():
    """The mesh and the batch size that a message proposes do work."""
    lay_out("tp", "2x2")
    lay_out(batch=8)
    lay_out("hsdp_tp", "2x2x2")


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("8", "fsdp"),
        ("4x2", "fsdp_tp"),
        ("2x2x2", "hsdp_tp"),
        ("fsdp=8", "dp"),
        ("data=2,fsdp=4", "fsdp"),
    ],
)
def test_rules_that_suit_a_mesh(text, strategy):
    assert sharding.choose(RULES, "", make_mesh(text)) == strategy
