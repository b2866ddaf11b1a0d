"""Layers of several kinds in one stack match their definition on any mesh and with a cache."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AxisType

from recipes.common import checkpoint, entries
from recipes.common.generation.generator import cap_windows
from recipes.common.mesh import make_mesh
from recipes.common.report import flops
from recipes.common.report.kernel import attention_kernel
from recipes.common.sharding.abstract import abstract_model, paths
from recipes.common.sharding.layout import make_layout, shardings
from recipes.common.sharding.shape import Shape, trace_shape
from recipes.common.train.step import gradients
from recipes.instruments.bench import common
from recipes.instruments.plan import step_memory
from tests.conftest import full_except
from tests.support.models import random_values
from tests.support.quick import QUICK
from zoo import llama_relatives as transformer
from zoo import moe
from zoo.core.attention import make_inputs
from zoo.core.layers import AttentionType, Llama3, rope_angles
from zoo.kernels.choice import Choice
from zoo.options import cache as zoo_cache
from zoo.options.periods import scan_periods
from zoo.options.rope_scaling import Linear, Yarn

pytestmark = [pytest.mark.promise("unlike-layers"), pytest.mark.usefixtures("strict")]

YARN = Yarn(4.0, 3.0, 1.0, 16, True, 1.2)
A, B, C = AttentionType(5, 1e4), AttentionType(None, 1e6, Linear(2.0)), AttentionType(9, 1e5, YARN)
TINY = transformer.Config.tiny()
BASE = {
    "transformer": dataclasses.replace(TINY, qk_norm=True, loss_chunk=8),
    "moe": dataclasses.replace(moe.Config.tiny(), capacity=None),
}
ROWS, T = 8, 24
TOKENS = np.random.default_rng(0).integers(0, 257, (ROWS, T + 1), np.int32)
SEGMENTS = np.cumsum(np.random.default_rng(1).random((ROWS, T)) < 2 / T, axis=1, dtype=np.int32)
BATCH = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:], "segment_ids": SEGMENTS}


def config_of(entry: str, layers: int, period: tuple[AttentionType, ...], **changes):
    return dataclasses.replace(BASE[entry], num_layers=layers, layer_kinds=period, **changes)


# ---- the definition ------------------------------------------------------------------------------


def turns(kind: AttentionType) -> np.ndarray:
    """[T, H/2]: the complex numbers that rotate pairs of dims, by frequencies in float64."""
    angles_TH = np.arange(T)[:, None] * frequencies(kind, TINY.head_dim)[None]
    return np.exp(1j * angles_TH).astype(np.complex64) * np.float32(kind.magnitude)


def seen(kind: AttentionType) -> np.ndarray:
    """[B, T, S]: whether a position attends to another."""
    age_TS = np.arange(T)[:, None] - np.arange(T)[None]
    near_TS = (age_TS >= 0) & (age_TS < (kind.window or T))
    return near_TS[None] & (SEGMENTS[:, :, None] == SEGMENTS[:, None])


def frequencies(kind: AttentionType, dim: int) -> np.ndarray:
    """[H/2], in float64."""
    base, scaling = kind.rope_theta, kind.rope_scaling
    plain = np.array([1 / base ** (2 * i / dim) for i in range(dim // 2)])
    if scaling is None:
        return plain
    if isinstance(scaling, Linear):
        return plain / scaling.factor
    if isinstance(scaling, Yarn):
        factor, fast, slow, original, truncate, _ = dataclasses.astuple(scaling)
        low, high = (
            dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (fast, slow)
        )
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        high += 0.001 if low == high else 0
        ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
        return plain / factor * ramp + plain * (1 - ramp)
    factor, low, high, original = dataclasses.astuple(scaling)
    found = []
    for f in plain:  # Llama 3's three cases
        length = 2 * math.pi / f
        smooth = (original / length - low) / (high - low)
        middle = (1 - smooth) * f / factor + smooth * f
        bounds = (original / high, original / low)
        found.append(f if length < bounds[0] else f / factor if length > bounds[1] else middle)
    return np.array(found)


def normed(x, norm):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + norm.eps) * norm.scale[...]


def projected(x, module, name: str):
    """The product with a weight, plus (x · A) · B · scale where it has an adapter."""
    contracted = 2 if name == "o" else 1
    y = jnp.tensordot(x, getattr(module, name)[...], contracted)
    adapters = vars(module).get("lora", {})  # only with adapters
    if name in adapters:
        lora = adapters[name]
        y += jnp.tensordot(jnp.tensordot(x, lora.a[...], contracted), lora.b[...], 1) * lora.scale
    return y


def turned(x_BTNH, turns_TH):
    first, second = jnp.split(x_BTNH, 2, axis=-1)
    both = jax.lax.complex(first, second) * turns_TH[None, :, None]
    return jnp.concatenate([both.real, both.imag], axis=-1)


def one_layer(x_BTD, layer, turns_TH, seen_BTS):
    """A layer's output, and the figures of its experts if it has any."""
    y, module = normed(x_BTD, layer.attention_norm), layer.attention
    q, k, v = (projected(y, module, name) for name in "qkv")
    if module.q_norm is not None:
        q, k = normed(q, module.q_norm), normed(k, module.k_norm)
    q, k = turned(q, turns_TH), turned(k, turns_TH)
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    logits_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(seen_BTS[:, None], logits_BNTS, -np.inf), axis=-1)
    x_BTD += projected(jnp.einsum("BNTS,BSNH->BTNH", weights, v), module, "o")
    y = normed(x_BTD, layer.mlp_norm)
    if hasattr(layer, "experts"):
        positions = make_inputs(layer.experts.config, jnp.zeros(y.shape[:2], jnp.int32))
        y, figures = layer.experts(y, positions)
        return x_BTD + y, figures
    hidden = jax.nn.silu(projected(y, layer.mlp, "gate")) * projected(y, layer.mlp, "up")
    return x_BTD + projected(hidden, layer.mlp, "down"), {}


# ---- the model -----------------------------------------------------------------------------------


@functools.cache
def initial(entry: str, **changes):
    """Random variables, norms and adapters too, as a tree of NumPy arrays."""
    config = dataclasses.replace(BASE[entry], **changes)
    shapes = abstract_model(lambda: entries.model(entry)(config, rngs=nnx.Rngs(0))).shapes
    return random_values(shapes, seed=2)


def model_of(entry: str, config, variables) -> nnx.Module:
    return abstract_model(lambda: entries.model(entry)(config, rngs=nnx.Rngs(0))).merge(variables)


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def defined(entry: str, config, variables, turns_LTH, seen_LBTS):
    """(gradients, logits, mean of each figure of the loss); layers differ in these arrays alone."""

    def objective(params):
        model = model_of(entry, config, variables | {"params": params})
        x_BTD = model.embed[...][BATCH["tokens"]]
        layers = (model.layers, turns_LTH, seen_LBTS)
        x_BTD, figures = jax.lax.scan(lambda x, layer: one_layer(x, *layer), x_BTD, layers)
        logits = normed(x_BTD, model.final_norm) @ model.embed[...].T
        picked = jnp.take_along_axis(logits, BATCH["targets"][..., None], axis=-1)
        total = (jax.nn.logsumexp(logits, axis=-1) - picked[..., 0]).sum()
        means = {"loss": total} | {name: found.mean(axis=0) for name, found in figures.items()}
        if figures:
            total += config.balance_weight * means["balance"]
            total += config.router_z_weight * means["router_z"]
        means = {name: value / TOKENS[:, 1:].size for name, value in means.items()}
        return total / TOKENS[:, 1:].size, (logits, means)

    return jax.grad(objective, has_aux=True)(variables["params"])


@functools.cache
def wanted(entry: str, config):
    """(logits of all tokens, mean of each figure of the loss, gradients) by the definition."""
    L, period = config.num_layers, config.kinds
    one_kind = dataclasses.replace(config, layer_kinds=())  # so that its program is shared
    given = (np.stack([of(period[l % len(period)]) for l in range(L)]) for of in (turns, seen))
    variables = initial(entry, num_layers=L, lora_rank=config.lora_rank)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        grads, (logits, means) = defined(entry, one_kind, variables, *given)
    return logits, means, paths(grads)


def found(entry: str, config, mesh: str, rules: str):
    """(mean of each figure of the loss, gradients), as a train step computes them on a mesh."""
    layout = make_layout(entries.model(entry), config, make_mesh(mesh), rules, batch_size=ROWS)
    values = initial(entry, num_layers=config.num_layers, lora_rank=config.lora_rank)
    variables = jax.device_put(values, shardings(layout.variables()))
    batch = jax.device_put(BATCH, layout.batch_shardings(BATCH))

    def both(variables, batch):
        grads, _, means = gradients(layout, variables, batch)
        return means, grads

    run = layout.compile(both, variables, batch, compiler_options=QUICK)
    means, grads = run(variables, batch)
    return means, paths(jax.tree.map(np.asarray, grads))


def assert_equal(ours, theirs, atol=2e-6):
    (means, grads), (_, wanted_means, wanted_grads) = ours, theirs
    for name, value in wanted_means.items():
        mean = [means[f"load_{e}"] for e in range(len(value))] if name == "load" else means[name]
        np.testing.assert_allclose(mean, value, rtol=2e-6, atol=atol, err_msg=name)
    assert grads.keys() <= wanted_grads.keys()
    for path, gradient in grads.items():
        np.testing.assert_allclose(gradient, wanted_grads[path], atol=atol, err_msg=path)


CASES = [  # each with another remat policy
    # Two trips of the scan.
    ("transformer", 4, (C, A), {}, "2x2x2", "hsdp_tp"),
    # Two trips, and two layers left over.
    ("transformer", 8, (A, B, C), {"remat": "dots"}, "4x2", "fsdp_tp"),
    # Four trips.
    ("transformer", 8, (A, B), {"remat": "sublayers", "lora_rank": 3}, "1x8", "tp"),
    # No two periods: each layer stands alone.
    ("transformer", 3, (A, B), {"remat": "none"}, "8", "fsdp"),
    ("moe", 5, (A, C), {"remat": "dispatched", "lora_rank": 3}, "4x2", "fsdp_tp"),
    ("moe", 3, (A, B, C), {"remat": "offload"}, "data=2,expert=2,model=2", "fsdp_ep_tp"),
]


@pytest.mark.parametrize(
    ("entry", "layers", "period", "changes", "mesh", "rules"), full_except(CASES, CASES[:1])
)
def test_loss_and_gradients_are_the_definition(entry, layers, period, changes, mesh, rules):
    """Covers several meshes, all remat policies, and adapters."""
    config = config_of(entry, layers, period, **changes)
    means, grads = found(entry, config, mesh, rules)
    _, wanted_means, wanted_grads = wanted(entry, dataclasses.replace(config, remat="full"))
    for name, value in wanted_means.items():
        mean = [means[f"load_{e}"] for e in range(len(value))] if name == "load" else means[name]
        np.testing.assert_allclose(mean, value, rtol=2e-6, atol=2e-6, err_msg=name)
    assert grads.keys() == wanted_grads.keys()
    for path, gradient in grads.items():
        assert np.abs(gradient).max() > 1e-4, path
        np.testing.assert_allclose(gradient, wanted_grads[path], atol=2e-6, err_msg=path)


@pytest.mark.full
def test_logits_are_the_definition_on_auto_axes():
    config = config_of("transformer", 8, (A, B, C))
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rules = transformer.RULES["fsdp_tp"]
    model = model_of("transformer", config, initial("transformer", num_layers=8))
    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(rules.items())):
        graph, state = nnx.split(model)
        state = jax.device_put(state, nnx.get_named_sharding(state, mesh))
        run = jax.jit(lambda s, *b: nnx.merge(graph, s)(*b), compiler_options=QUICK)
        logits = run(state, BATCH["tokens"], SEGMENTS)
    # Logits go up to 4, so their tolerance is wider than the 2e-6 for losses and gradients.
    np.testing.assert_allclose(logits, wanted("transformer", config)[0], atol=1e-5)


@functools.cache
def logits_of(config) -> np.ndarray:
    model = model_of("transformer", config, initial("transformer", num_layers=config.num_layers))
    return jax.jit(lambda *b: model(*b), compiler_options=QUICK)(BATCH["tokens"], SEGMENTS)


@pytest.mark.full
def test_kinds_that_are_all_equal_are_the_uniform_model():
    alike = dataclasses.replace(BASE["transformer"], num_layers=5, sliding_window=A.window)
    np.testing.assert_array_equal(logits_of(config_of("transformer", 5, (A, A))), logits_of(alike))
    assert (logits_of(config_of("transformer", 5, (A, C))) != logits_of(alike)).any()


def traced(config) -> jax.extend.core.ClosedJaxpr:
    shapes = abstract_model(lambda: transformer.Transformer(config, rngs=nnx.Rngs(0)))
    return jax.make_jaxpr(lambda v, b: shapes.merge(v).loss(**b)[0])(shapes.shapes, BATCH)


def test_one_kind_is_the_uniform_program():
    alike = dataclasses.replace(BASE["transformer"], sliding_window=9, rope_scaling=YARN)
    one = config_of("transformer", 2, (AttentionType(9, 1e4, YARN),))
    assert str(traced(one)) == str(traced(alike))


def test_compile_time_grows_with_the_period_and_not_with_depth():
    """Each place in a period and each leftover layer is traced once."""

    def layers_in(layers, period):
        text = str(traced(config_of("transformer", layers, period)))
        return text.count("prevent_cse"), text.count("\n")

    (of_7, lines), (uniform, _) = layers_in(7, (A, B, C)), layers_in(7, ())
    assert of_7 - uniform == 3 + 1 - 1
    assert layers_in(19, (A, B, C)) == (of_7, lines)


@pytest.mark.full
def test_no_parameter_and_no_cache_is_copied():
    """Compared with the uniform model's program, only one period's weights in use are added."""
    changes = dict(num_layers=12, embed=256, mlp=1024, remat="full")

    def temporary_bytes(period):
        config = dataclasses.replace(BASE["transformer"], layer_kinds=period, **changes)
        model = abstract_model(lambda: transformer.Transformer(config, rngs=nnx.Rngs(0)))
        compiled = functools.partial(jax.jit, compiler_options=QUICK)
        step = compiled(jax.grad(lambda p, b: model.merge({"params": p}).loss(**b)[0]))
        params = model.shapes["params"]
        step = step.lower(params, BATCH).compile().memory_analysis()
        lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
        tokens = jax.ShapeDtypeStruct((1, 16), jnp.int32)
        prefill = lambda p, t, n: zoo_cache.prefill(model.merge({"params": p}), t, n, 8192)[1]  # noqa: E731
        cache = jax.eval_shape(prefill, params, tokens, lengths)
        decode = compiled(
            lambda p, t, c: zoo_cache.decode(model.merge({"params": p}), t, c), donate_argnums=2
        )
        decode = decode.lower(params, lengths, cache).compile().memory_analysis()
        sizes = (sum(4 * x.size for x in jax.tree.leaves(tree)) for tree in (params, cache.k))
        return step.temp_size_in_bytes, decode.temp_size_in_bytes, *sizes

    (train, decode, *_), (more_train, more_decode, params, cache) = map(
        temporary_bytes, ((A,), (A, B))
    )
    assert more_train - train < 0.3 * params
    assert more_decode - decode < 0.5 * cache


# ---- generation ----------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("entry", "layers", "period", "mesh", "rules"),
    [
        ("transformer", 5, (C, A), "2x4", "fsdp_tp"),
        ("moe", 5, (A, B), "4x2", "fsdp_tp"),
    ],
)
def test_a_cache_gives_the_whole_model_s_logits(entry, layers, period, mesh, rules):
    """Covers prompts longer and shorter than the windows, and more tokens than a window holds."""
    config = config_of(entry, layers, period)
    layout = make_layout(entries.model(entry), config, make_mesh(mesh), rules, batch_size=ROWS)
    values = initial(entry, num_layers=layers)
    variables = jax.device_put(values, shardings(layout.variables()))
    lengths, first, more = np.array([12, 3] * 4, np.int32), 12, 8
    rows = BATCH["tokens"]
    prompts = np.zeros((ROWS, first), np.int32)
    for b, n in enumerate(lengths):
        prompts[b, first - n :] = rows[b, :n]
    given = np.stack([rows[np.arange(ROWS), lengths + i] for i in range(more)])
    given = jax.device_put((rows, prompts, lengths, given), layout.replicated)

    def run(variables, rows, prompts, lengths, given):
        model = layout.model.merge(variables)
        logits, cache = zoo_cache.prefill(model, prompts, lengths, first + more)

        def step(cache, tokens):
            logits, cache = zoo_cache.decode(model, tokens, cache)
            return cache, logits

        _, later = jax.lax.scan(step, cache, given)
        whole = (model(rows), logits[None], later)
        whole, *parts = (jax.sharding.reshard(x, jax.P()) for x in whole)
        return whole, jnp.concatenate(parts).swapaxes(0, 1)

    run = layout.compile(run, variables, *given, compiler_options=QUICK)
    whole, cached = map(np.asarray, run(variables, *given))
    for b, n in enumerate(lengths):
        np.testing.assert_allclose(cached[b], whole[b, n - 1 : n + more], atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "names", "strategy"),
    [((8, 1), ("data", "model"), "fsdp_tp"), ((8, 1), ("data", "seq"), "fsdp_cp")],
)
def test_mesh_axes_of_one_device_and_a_single_kv_head(shape, names, strategy):
    """As in Gemma 3 1B: JAX's types keep mesh axes of size 1, and forget those of dims of size 1."""
    changes = {"num_layers": 5, "num_kv_heads": 1, "layer_kinds": (A, B)}  # a layer is left over
    config = dataclasses.replace(transformer.Config.tiny(), **changes)
    model = nnx.eval_shape(lambda: transformer.Transformer(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    mesh, rules = jax.make_mesh(shape, names), transformer.RULES[strategy]
    tokens = jax.ShapeDtypeStruct((8, 16), "int32")
    lengths = jax.ShapeDtypeStruct((8,), "int32")

    def call(state, tokens, lengths):
        _, cache = zoo_cache.prefill(nnx.merge(graph, state), tokens, lengths, 32)
        return cache, nnx.merge(graph, state).loss(tokens, tokens, tokens)[0]

    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(rules.items())):
        cache, loss = jax.eval_shape(call, state, tokens, lengths)
    assert cache.k.sharding.spec[:2] == (None, "data")
    assert (cache.k.shape, loss.shape) == ((5, 8, 32, 1, 8), ())


def test_a_sample_s_windows_are_capped():
    """Caps each kind's window at the number of tokens that the run has trained on."""
    kind = lambda window: A._replace(window=window)  # noqa: E731
    config = config_of("transformer", 3, (kind(5), kind(None), kind(64)))
    assert cap_windows(config, 32).kinds == (kind(5), kind(32), kind(32))
    for window, capped in ((None, 32), (64, 32), (5, 5)):
        alike = dataclasses.replace(TINY, sliding_window=window)
        assert cap_windows(alike, 32) == dataclasses.replace(TINY, sliding_window=capped)


# ---- what follows the kinds ----------------------------------------------------------------------


def shape(config) -> Shape:
    return trace_shape(transformer.Transformer, config)


def test_flops_are_each_layer_s():
    """Layers 0, 2 and 4 have one window, 1 and 3 the other."""
    parts = {}
    for window in (5, 9, None):
        alike = dataclasses.replace(TINY, num_layers=1, sliding_window=window)
        parts[window] = flops.decoder(shape(alike), 24)
    weights = shape(config_of("transformer", 5, (A, C))).multiplied * 6 * 24
    one = shape(dataclasses.replace(TINY, num_layers=1)).multiplied * 6 * 24
    for period, windows in (((A, C), [5, 9, 5, 9, 5]), ((B, A, C), [None, 5, 9, None, 5])):
        mixed = flops.decoder(shape(config_of("transformer", 5, period)), 24)
        for kind in ("causal", "full"):
            attention = sum(parts[window][kind] - one for window in windows)
            assert mixed[kind] == pytest.approx(weights + attention)


def test_kernels_and_memory_are_each_kind_s():
    """Layers with a window save fewer keys, where XLA computes them block by block."""
    saved = {}
    for name, period in {"A": (A,), "B": (B,), "AAB": (A, A, B)}.items():
        config = dataclasses.replace(TINY, num_layers=7, layer_kinds=period, remat="none")
        step = common.make_step(config, "dp", make_mesh("1"), 1, 2_048, segments=True)
        assert step_memory.kernel(step.layout) == "xla"
        saved[name] = step_memory.memory_parts(step.layout)["saved activations"]
    assert saved["A"] < saved["B"]
    assert saved["AAB"] == pytest.approx(saved["A"] * 5 / 7 + saved["B"] * 2 / 7, rel=1e-3)
    mesh = jax.sharding.AbstractMesh(
        (1,), ("data",), axis_types=(AxisType.Explicit,),
        abstract_device=AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu"),
    )  # fmt: skip
    config = dataclasses.replace(config, dtype="bfloat16")
    layout = make_layout(transformer.Transformer, config, mesh, "dp", batch_size=1)
    with layout.trace():
        found = attention_kernel(config, layout.shape.attention, 2_048, True)
    assert found == Choice("cudnn")


# ---- checkpoints ---------------------------------------------------------------------------------


def test_parameters_are_the_uniform_model_s():
    def shapes(config):
        model = abstract_model(lambda: transformer.Transformer(config, rngs=nnx.Rngs(0)))
        return jax.tree.map(lambda x: (x.shape, x.dtype), model.shapes), model.axes

    alike = dataclasses.replace(BASE["transformer"], num_layers=5)
    assert shapes(config_of("transformer", 5, (A, B, C))) == shapes(alike)


def test_a_checkpoint_restores_with_its_kinds(tmp_path):
    """JSON makes tuples into lists; a uniform model's parameters are a mixed model's."""
    config = config_of("transformer", 5, (A, B, C))
    model = transformer.Transformer
    layout = make_layout(model, config, make_mesh("4x2"), "fsdp_tp")
    values = initial("transformer", num_layers=5)
    variables = jax.device_put(values, shardings(layout.variables()))
    facts = checkpoint.metadata("transformer", layout, {}) | {"step": 0, "data": None}
    checkpoint.write(tmp_path / "mixed", variables, facts)
    restored, metadata = checkpoint.restore(tmp_path / "mixed", make_mesh("1x8"))
    assert restored.config == config
    assert hash(restored.config) == hash(config)
    assert restored.config.kinds == (A, B, C)
    assert json.loads(json.dumps(metadata)) == metadata
    for path, value in paths(nnx.to_pure_dict(nnx.state(restored, nnx.Param))).items():
        np.testing.assert_array_equal(value, paths(values["params"])[path], err_msg=path)

    # Saved by an older version, which has no kinds.
    source = checkpoint.find(tmp_path / "mixed")
    older = source.metadata["config"] | {"rope_scaling": [8.0, 1.0, 4.0, 16]}
    del older["layer_kinds"]
    older = dataclasses.replace(source, metadata=source.metadata | {"config": older})
    found = checkpoint.config_of(older)
    assert (found.layer_kinds, found.rope_scaling) == ((), Llama3(8.0, 1.0, 4.0, 16))
    assert checkpoint.restore_variables(older, layout).keys() == {"params"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(layer_kinds=(A, B, C)), "layer_kinds has 3 kinds, more than num_layers=2"),
        (dict(layer_kinds=(A,), sliding_window=3), "sliding_window=3 and layer_kinds exclude"),
        (
            dict(layer_kinds=(A, AttentionType(0, 1e4))),
            "layer_kinds has window=0, which must be ≥ 1, or",
        ),
    ],
)
def test_kinds_that_no_model_can_have(fields, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(TINY, **fields)


# ---- rotary embeddings ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        Linear(4.0),
        Llama3(8.0, 1.0, 4.0, 64),
        Yarn(4.0, 32.0, 1.0, 4_096, True, 1.1386),
        Yarn(40.0, 32.0, 1.0, 4_096, False, 1.0),
        Yarn(8.0, 4.0, 4.0, 64, True, 1.0),  # no ramp between the two
    ],
)
@pytest.mark.parametrize(("theta", "dim"), [(1e4, 64), (1e6, 6)])
def test_frequencies_are_those_of_transformers(scaling, theta, dim):
    kind = AttentionType(None, theta, scaling)
    (ours,) = rope_angles(kind, dim, jnp.array([[1]]))[0]
    np.testing.assert_allclose(ours, frequencies(kind, dim), rtol=2e-6)


@pytest.mark.parametrize(("low", "high"), [(4.0, 1.0), (3.0, 3.0), (1.0, 4.0)])
def test_llama_3_s_factors_in_any_order_are_those_of_transformers(low, high):
    """Its formula, step by step: where low is above high, no wavelength is smoothed."""
    factor, original, theta, dim = 8.0, 64, 500.0, 64
    wanted = []
    for i in range(dim // 2):
        frequency = theta ** (-2 * i / dim)
        wavelength = 2 * math.pi / frequency
        scaled = frequency / factor if wavelength > original / low else frequency
        if original / high <= wavelength <= original / low:  # neither short nor long
            smooth = (original / wavelength - low) / (high - low) if high != low else 1.0
            scaled = (1 - smooth) * frequency / factor + smooth * frequency
        wanted.append(scaled)
    kind = AttentionType(None, theta, Llama3(factor, low, high, original))
    (ours,) = rope_angles(kind, dim, jnp.array([[1]]))[0]
    np.testing.assert_allclose(ours, wanted, rtol=2e-6)
    ratios = np.array(wanted) * theta ** (2 * np.arange(dim // 2) / dim)
    smoothed = ((ratios > 0.126) & (ratios < 0.999)).any()
    assert smoothed == (low < high), "the case has wavelengths on both sides and between"
    assert ratios.min() < 0.126
    assert ratios.max() > 0.999


def test_unlike_stacks_run_in_the_order_of_their_period():
    """Layers are digits, and x is the number that they write."""
    stacks = {"a": jnp.arange(1, 6), "b": jnp.array([8, 9])}
    kinds = tuple(AttentionType(window, None) for window in (1, 2, 3))
    seen = []

    def write(x, digit, kind):
        seen.append(kind.window)
        return x * 10 + digit, digit

    x, outputs = jax.jit(
        lambda: scan_periods(write, jnp.int32(0), stacks, kinds, None, ("a", "a", "b"))
    )()
    assert int(x) == 1_283_495
    assert {name: output.tolist() for name, output in outputs.items()} == {
        "a": [1, 2, 3, 4, 5], "b": [8, 9],
    }  # fmt: skip
    assert set(seen) == {1, 2, 3}
