"""Any mesh, rules and config give a layout, with nothing allocated, or a one-line user error.

Other exceptions are failures. The examples are the same every time.
"""

import dataclasses
import functools
import json
import math

import jax
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from recipes.common.runtime import flags, mesh
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.flags import Run
from recipes.common.sharding import rules as sharding_rules
from recipes.common.sharding.abstract import abstract_model, paths
from recipes.common.sharding.rules import partition_spec, select
from zoo.core.layers import AttentionType
from zoo.core.strategies import DECODER
from zoo.llama_relatives import RULES, Config, Transformer
from zoo.options.rope_scaling import Linear, Yarn

pytestmark = pytest.mark.promise("user-errors")

fuzz = functools.partial(
    settings, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip

MESH_AXES = ("data", "fsdp", "model", "expert")
MODEL = abstract_model(lambda: Transformer(Config.tiny(), rngs=nnx.Rngs(0)))


def attempt(work, mistakes=UserError):
    """Returns (result, ""), or (None, the message of a user error)."""
    try:
        return work(), ""
    except mistakes as mistake:
        return None, str(mistake)


near_meshes = st.text("0123456789x=,-+ ²adtmoel_.", max_size=30)
whole_meshes = st.dictionaries(
    st.sampled_from(MESH_AXES), st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=4
)  # fmt: skip


@fuzz(max_examples=200)
@given(st.one_of(near_meshes, st.text(max_size=20)))
def test_mesh_strings(text):
    axes, message = attempt(lambda: mesh.parse(text))
    if message:
        assert message.startswith(f"--mesh={text}")
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
    parsed, message = attempt(lambda: flags.parse(argv, Run()))
    assert message or parsed is None or isinstance(parsed[0], Run)


targets = st.one_of(
    st.none(),
    st.sampled_from([*MESH_AXES, "nowhere"]),
    st.lists(st.sampled_from(MESH_AXES), max_size=3).map(tuple),
)
changes = st.dictionaries(st.sampled_from([*RULES["dp"], "embd"]), targets, max_size=6)


@fuzz(max_examples=150)
@given(st.sampled_from(list(RULES)), changes, st.sets(st.sampled_from(list(RULES["dp"])), max_size=1),
       whole_meshes, st.integers(1, 64), st.sampled_from([1, 1, 2, 3, 4]), st.integers(1, 64))  # fmt: skip
def test_rule_tables(strategy, changed, left_out, axes, batch, microbatches, seq_len):
    mine = {k: v for k, v in (RULES[strategy] | changed).items() if k not in left_out}
    abstract = AbstractMesh(tuple(axes.values()), tuple(axes))
    name, table = select(RULES, DECODER, mine, abstract)

    def check():
        sharding_rules.fit(name, table, MODEL, abstract)
        sharding_rules.check_batch(name, table, abstract, batch, microbatches)
        sharding_rules.check_positions(DECODER, name, table, abstract, seq_len, trains=True)

    _, message = attempt(check)
    if message:
        return
    for path, names in paths(MODEL.axes["params"]).items():  # then JAX accepts it as well
        where = jax.sharding.NamedSharding(abstract, partition_spec(names, table))
        where.shard_shape(paths(MODEL.shapes["params"])[path].shape)
    rows = jax.sharding.NamedSharding(abstract, partition_spec(("batch", "seq"), table))
    rows.shard_shape((batch // microbatches, seq_len))


json_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.sampled_from(MESH_AXES)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from([*RULES["dp"], "embd"]), inner, max_size=3),
    ),
    max_leaves=8,
)


@fuzz(max_examples=100)
@given(st.one_of(json_values.map(json.dumps), st.text(max_size=20)), whole_meshes)
def test_files_of_rules(tmp_path_factory, content, axes):
    path = tmp_path_factory.getbasetemp() / "mine.json"
    path.write_text(content, errors="surrogatepass")
    abstract = AbstractMesh(tuple(axes.values()), tuple(axes))
    found, message = attempt(lambda: select(RULES, DECODER, str(path), abstract))
    if found:
        _, message = attempt(lambda: sharding_rules.fit(*found, MODEL, abstract))
    assert "\n" not in message


sizes = st.sampled_from([*[2, 4, 8] * 8, 1, 3, 6, 16, 0, -1])  # some configs are valid
scalings = st.sampled_from([None, Linear(2.0), Yarn(4.0, 32.0, 1.0, 16, True, 1.1)])
kinds = st.builds(AttentionType, st.one_of(st.none(), sizes), st.sampled_from([1e4, 1e6]), scalings)


@fuzz(max_examples=80)
@given(st.builds(dict, vocab_size=sizes, embed=sizes, num_heads=sizes,
                 num_layers=st.sampled_from([0, 1, 2, 3, 3, 4]),
                 num_kv_heads=st.sampled_from([1, 2, 2, 3]), head_dim=st.sampled_from([2, 4, 6, 8, 7]),
                 mlp=sizes, qkv_bias=st.booleans(), qk_norm=st.booleans(),
                 tie_embeddings=st.booleans(), sliding_window=st.one_of(st.none(), st.none(), sizes),
                 layer_kinds=st.lists(kinds, max_size=3).map(tuple),
                 remat=st.sampled_from(["full", "full", "none", "dots", "some"])))  # fmt: skip
def test_configs(values):
    config, message = attempt(lambda: Config(**values), ValueError)
    if message:
        assert any(name in message for name in values)
        return
    model = abstract_model(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    assert all(math.prod(shape.shape) > 0 for shape in jax.tree.leaves(model.shapes))
    tokens = jax.ShapeDtypeStruct((2, 5), "int32")
    logits = jax.eval_shape(lambda v, t: model.merge(v)(t), model.shapes, tokens)
    assert logits.shape == (2, 5, config.vocab_size)
