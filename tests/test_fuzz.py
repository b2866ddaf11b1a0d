"""Any mesh, any table, any config: a layout made without allocating anything, or one sentence.

Never another exception. The examples are the same every time.
"""

import dataclasses
import functools
import math

import jax
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from recipes.common import cli, mesh, sharding
from recipes.common.cli import Run
from recipes.common.errors import UserError
from zoo.transformer import RULES, Config, Transformer

fuzz = functools.partial(
    settings, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip

MESH_AXES = ("data", "fsdp", "model", "expert")
PLAN = sharding.blueprint(lambda: Transformer(Config.tiny(), rngs=nnx.Rngs(0)))


def attempt(work, mistakes=UserError):
    """(what it returns, ""), or (None, the one sentence of a mistake)."""
    try:
        return work(), ""
    except mistakes as mistake:
        return None, str(mistake)


near_meshes = st.text("0123456789x=,-+ ²adtmoel_.", max_size=30)
whole_meshes = st.dictionaries(
    st.sampled_from(MESH_AXES), st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=4
)  # fmt: skip


@fuzz(max_examples=400)
@given(st.one_of(near_meshes, st.text(max_size=20)))
def test_mesh_strings(text):
    axes, sentence = attempt(lambda: mesh.parse(text))
    if sentence:
        assert sentence.startswith(f"--mesh={text}")
        return
    assert all(size > 0 for size in axes.values())
    assert mesh.parse(mesh.describe(axes)) == axes


@fuzz(max_examples=200)
@given(whole_meshes)
def test_a_described_mesh_is_that_mesh(axes):
    assert mesh.parse(mesh.describe(mesh.parse(mesh.describe(axes)))) == mesh.parse(
        ",".join(f"{axis}={size}" for axis, size in axes.items())
    )


@fuzz(max_examples=200)
@given(st.lists(st.one_of(st.text(max_size=12), st.builds(
    "--{}={}".format, st.sampled_from([f.name for f in dataclasses.fields(Run)]), st.text(max_size=8)
)), max_size=3))  # fmt: skip
def test_command_lines(argv):
    parsed, sentence = attempt(lambda: cli.parse(argv, Run()))
    assert sentence or parsed is None or isinstance(parsed[0], Run)


targets = st.one_of(
    st.none(),
    st.sampled_from([*MESH_AXES, "nowhere"]),
    st.lists(st.sampled_from(MESH_AXES), max_size=3).map(tuple),
)
changes = st.dictionaries(st.sampled_from([*RULES["dp"], "embd"]), targets, max_size=6)


@fuzz(max_examples=150)
@given(st.sampled_from(list(RULES)), changes, st.sets(st.sampled_from(list(RULES["dp"])), max_size=1),
       whole_meshes, st.integers(1, 64))  # fmt: skip
def test_rule_tables(strategy, changed, forgotten, axes, batch):
    table = {k: v for k, v in (RULES[strategy] | changed).items() if k not in forgotten}
    abstract = AbstractMesh(tuple(axes.values()), tuple(axes))
    rules = RULES | {"mine": table}
    dims = {"batch": ("--batch_size", batch)}
    _, sentence = attempt(lambda: sharding.check(rules, "mine", PLAN, abstract, dims))
    if sentence:
        return
    for path, names in sharding.paths(PLAN.axes).items():  # then JAX accepts it as well
        spec = sharding.partition_spec(names, table)
        where = jax.sharding.NamedSharding(abstract, spec)
        where.shard_shape(sharding.paths(PLAN.shapes)[path].shape)


sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 8, 16, 0, -1])


@fuzz(max_examples=80)
@given(st.builds(dict, vocab_size=sizes, embed=sizes, num_layers=st.integers(0, 3), num_heads=sizes,
                 num_kv_heads=st.sampled_from([1, 2, 2, 3]), head_dim=st.sampled_from([2, 4, 6, 7]),
                 mlp=sizes, qkv_bias=st.booleans(), qk_norm=st.booleans(),
                 tie_embeddings=st.booleans(), sliding_window=st.one_of(st.none(), sizes),
                 remat=st.sampled_from(["full", "none", "dots", "some"])))  # fmt: skip
def test_configs(values):
    config, sentence = attempt(lambda: Config(**values), ValueError)
    if sentence:
        assert any(name in sentence for name in values)
        return
    plan = sharding.blueprint(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    assert all(math.prod(shape.shape) > 0 for shape in jax.tree.leaves(plan.shapes))
    tokens = jax.ShapeDtypeStruct((2, 5), "int32")
    logits = jax.eval_shape(lambda p, t: plan.bind(p)(t), plan.shapes, tokens)
    assert logits.shape == (2, 5, config.vocab_size)
