"""Gemma 2 and 3 compute their definitions on any mesh, with adapters and with a cache."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.common.generation.generator import cap_windows
from recipes.common.mesh import make_mesh
from recipes.common.report import flops
from recipes.common.report.kernel import attention_kernel
from recipes.common.sharding.abstract import abstract_model, paths
from recipes.common.sharding.layout import make_layout, shardings
from recipes.common.sharding.shape import trace_shape
from recipes.common.train.step import gradients
from tests.conftest import full_except
from tests.support.quick import QUICK
from tests.zoo.test_unlike_layers import BATCH, ROWS, T, projected, seen, turned, turns
from zoo.core.attention import make_inputs
from zoo.core.layers import AttentionType
from zoo.gemma3 import GEMMA2, SIZES, Config, Gemma3

pytestmark = [pytest.mark.promise("definitions"), pytest.mark.usefixtures("strict")]

GEMMA3 = Config.tiny()
OF_GEMMA2 = GEMMA2 | {"layer_kinds": (AttentionType(7, 1e4), AttentionType(None, 1e4))}
OF_GEMMA2 |= {"soft_cap": 1.5, "logits_soft_cap": 2.0}  # small enough to matter
CONFIGS = {
    "gemma3": GEMMA3,
    "gemma2": dataclasses.replace(GEMMA3, **OF_GEMMA2, tie_embeddings=False, lora_rank=3),
}


# ---- the definition ------------------------------------------------------------------------------


def capped(x, cap):
    return x if cap is None else jnp.tanh(x / cap) * cap


def normed(x, norm):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + norm.scale[...])


def gelu(x):
    return x / 2 * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def one_layer(x_BTD, layer, kind: AttentionType, config: Config):
    y, module = normed(x_BTD, layer.attention_norm), layer.attention
    q, k, v = (projected(y, module, name) for name in "qkv")
    if config.qk_norm:
        q, k = normed(q, module.q_norm), normed(k, module.k_norm)
    q, k = turned(q, turns(kind)), turned(k, turns(kind))
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(config.query_scalar)
    scores_BNTS = jnp.where(seen(kind)[:, None], capped(scores_BNTS, config.soft_cap), -np.inf)
    out_BTNH = jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores_BNTS, axis=-1), v)
    x_BTD += normed(projected(out_BTNH, module, "o"), layer.post_attention_norm)
    y, module = normed(x_BTD, layer.mlp_norm), layer.mlp
    hidden_BTF = gelu(projected(y, module, "gate")) * projected(y, module, "up")
    return x_BTD + normed(projected(hidden_BTF, module, "down"), layer.post_mlp_norm)


def logits_by_definition(model: Gemma3, config: Config):
    x_BTD = model.embed[...][BATCH["tokens"]] * math.sqrt(config.embed)
    for l in range(config.num_layers):
        layer = jax.tree.map(lambda x, l=l: x[l], model.layers)
        x_BTD = one_layer(x_BTD, layer, config.layer_kinds[l % len(config.layer_kinds)], config)
    table_VD = (model.embed if config.tie_embeddings else model.unembed)[...]
    return capped(normed(x_BTD, model.final_norm) @ table_VD.T, config.logits_soft_cap)


def shapes_of(config: Config):
    return abstract_model(lambda: Gemma3(config, rngs=nnx.Rngs(0)))


@functools.cache
def variables_of(config: Config):
    """Random variables, norms and adapters too."""
    rng, model = np.random.default_rng(2), shapes_of(config)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32) / 8, model.shapes)


@functools.cache
def wanted(name: str):
    """(mean loss, gradients) by the definition."""
    config, variables = CONFIGS[name], variables_of(CONFIGS[name])

    def mean(params):
        model = shapes_of(config).merge(variables | {"params": params})
        logits = logits_by_definition(model, config)
        picked = jnp.take_along_axis(logits, BATCH["targets"][..., None], axis=-1)[..., 0]
        return (jax.nn.logsumexp(logits, axis=-1) - picked).mean()

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        both = jax.jit(jax.value_and_grad(mean), compiler_options=QUICK)
        loss, grads = both(variables["params"])
    return loss, paths(grads)


CASES = [("gemma3", "1x1", "dp"), ("gemma2", "4x2", "fsdp_tp")]


@pytest.mark.parametrize(("name", "mesh", "rules"), full_except(CASES, CASES[:1]))
def test_loss_and_gradients_are_the_definition(name, mesh, rules):
    """Without caps; and with caps, adapters and an unembedding table, on a mesh."""
    config, variables = CONFIGS[name], variables_of(CONFIGS[name])
    layout = make_layout(Gemma3, config, make_mesh(mesh), rules, batch_size=ROWS)
    there = jax.device_put(variables, shardings(layout.variables()))
    batch = jax.device_put(BATCH, layout.batch_shardings(BATCH))

    def both(variables, batch):
        grads, _, means = gradients(layout, variables, batch)
        return means["loss"], grads

    run = layout.compile(both, there, batch, compiler_options=QUICK)
    loss, grads = run(there, batch)
    want_loss, want = wanted(name)
    np.testing.assert_allclose(loss, want_loss, rtol=2e-6)
    grads = paths(jax.tree.map(np.asarray, grads))
    assert grads.keys() == want.keys()
    for path, gradient in grads.items():
        most = np.abs(want[path]).max()
        assert most > 1e-5, path
        np.testing.assert_allclose(gradient, want[path], rtol=0, atol=5e-6 * most, err_msg=path)


@pytest.mark.full
def test_embeddings_are_scaled_in_the_compute_dtype():
    config = dataclasses.replace(GEMMA3, embed=72, dtype="bfloat16")  # whose root is rounded
    table_RVD = jnp.ones((1, 384, 72), jnp.bfloat16)
    model = shapes_of(config).merge(variables_of(config))
    positions = make_inputs(config, jnp.asarray(BATCH["tokens"]))
    x_BTD = model.embed_tokens([table_RVD], BATCH["tokens"], positions)
    assert x_BTD.dtype == jnp.bfloat16
    np.testing.assert_array_equal(x_BTD.astype(np.float32), np.float32(8.5))  # not 8.485


# ---- its settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_kinds": ()}, "layer_kinds is empty; it needs at least one AttentionType"),
        (
            {"layer_kinds": (AttentionType(0, 1e4),)},
            "layer_kinds has window=0, which must be ≥ 1, or None",
        ),
        ({"soft_cap": 0.0}, r"soft_cap=0.0 must be from 1e-06 to 1e\+06"),
        ({"logits_soft_cap": math.inf}, r"logits_soft_cap=inf must be from 1e-06 to 1e\+06"),
        ({"query_scalar": 0}, "query_scalar=0 must be ≥ 1"),
        ({"num_heads": 12}, "num_heads=12 is not divisible by num_kv_heads=8"),
        ({"remat": "dispatched"}, "remat='dispatched' is not one of none, dots"),
    ],
)
def test_an_invalid_config_is_an_error(changes, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(GEMMA3, **changes)


def test_sizes_have_five_local_layers_for_a_global_one():
    for size in ("1b", "4b", "12b", "27b"):
        config = SIZES[size]()
        windows = [kind.window for kind in config.layer_kinds]
        assert windows == [512 if size == "1b" else 1_024] * 5 + [None]
        assert [kind.rope_theta for kind in config.layer_kinds] == [1e4] * 5 + [1e6]
        assert (config.qk_norm, config.soft_cap, config.logits_soft_cap) == (True, None, None)
    for size in ("gemma2_2b", "gemma2_9b", "gemma2_27b"):
        config = SIZES[size]()
        assert config.layer_kinds == (AttentionType(4_096, 1e4), AttentionType(None, 1e4))
        assert (config.qk_norm, config.soft_cap, config.logits_soft_cap) == (False, 50.0, 30.0)


def test_flops_count_the_window_of_each_kind():
    """1b: a row of 2,048 has 22 local layers with a window of 512 and 4 global ones."""
    config, length = SIZES["1b"](), 2_048
    weights = sum(
        math.prod(x.shape)
        for path, x in paths(shapes_of(config).shapes["params"]).items()
        if "norm" not in path  # the embedding table counts once, for the logits
    )
    pairs = {None: length**2 / 2, 512: 512 * length - 512**2 / 2}
    attention = 12 * config.num_heads * config.head_dim * (22 * pairs[512] + 4 * pairs[None])
    assert flops.decoder(trace_shape(Gemma3, config), length)["causal"] == pytest.approx(
        6 * weights * length + attention
    )


def test_windows_are_capped_in_every_layer():
    capped_at = [kind.window for kind in cap_windows(SIZES["1b"](), 600).layer_kinds]
    assert capped_at == [512] * 5 + [600]


def test_the_report_names_a_kernel_that_computes_soft_caps():
    for name, kernel in (("gemma3", "xla"), ("gemma2", "flash")):
        layout = make_layout(Gemma3, CONFIGS[name], make_mesh("1x1"), "dp", batch_size=ROWS)
        with layout.trace():
            assert attention_kernel(layout.config, layout.shape.attention, T, True).kernel == kernel
