"""Spans that see in both directions: every kernel that has them, alone and on a ring, by the definition."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.common.mesh import make_mesh
from tests.conftest import full_except
from tests.support.quick import QUICK
from zoo.core.attention import make_inputs
from zoo.core.layers import AttentionType
from zoo.gemma3 import RULES, Config
from zoo.kernels.choice import SPANS, Request, choose_kernel
from zoo.options.spans import CODES, with_spans

pytestmark = [pytest.mark.promise("pictures"), pytest.mark.usefixtures("strict")]

K, H, LENGTH = 2, 16, 5  # kv heads, their dims, positions of a span
RANDOM = np.random.default_rng(0)


def spans_of(starts: list[int], T: int) -> np.ndarray:
    """The span of each position, from 0 on; -1: none."""
    spans_T = np.full(T, -1, np.int32)
    for number, start in enumerate(starts):
        spans_T[start : start + LENGTH] = number
    return spans_T


def by_definition(heads: Any, ids_BT, spans_BT, window: int | None) -> np.ndarray:
    """In float64: what is not before a window is seen if it is not later, or of the same span."""
    q, k, v = (np.asarray(x, np.float64) for x in heads)
    T, G = q.shape[1], q.shape[2] // K
    age_TS = np.arange(T)[:, None] - np.arange(T)
    same_BTS = (spans_BT[:, :, None] == spans_BT[:, None]) & (spans_BT >= 0)[:, None]
    seen_BTS = ((age_TS >= 0) | same_BTS) & (age_TS < (window or T))
    seen_BTS &= ids_BT[:, :, None] == ids_BT[:, None]
    scores = np.einsum("BTNH,BSNH->BNTS", q, np.repeat(k, G, 2)) / H**0.5
    weights = np.exp(np.where(seen_BTS[:, None], scores, -np.inf))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("BNTS,BSNH->BTNH", weights, np.repeat(v, G, 2))


def rows(T: int) -> Any:
    """(queries, keys, values), segment ids, and spans: at both ends, side by side, across T / 2."""
    heads = [RANDOM.normal(size=(2, T, n, H)).astype(np.float32) for n in (2 * K, K, K)]
    ids_BT = np.stack([np.zeros(T, np.int32), (np.arange(T) >= T // 2 + LENGTH).astype(np.int32)])
    starts = [0, 10, 10 + LENGTH, T // 2 - 2, T - LENGTH]
    spans_BT = np.stack([spans_of(starts, T), spans_of([T // 2], T)])
    # Numbers of another row's spans, and of spans far away, may be equal.
    return heads, ids_BT, np.where(spans_BT < 0, -1, spans_BT + CODES - 3).astype(np.int32)


def attend(config, heads: Any, ids_BT, spans_BT, window):
    kind = AttentionType(window, None)
    config = dataclasses.replace(config, layer_kinds=(kind,))
    inputs = make_inputs(config, jnp.asarray(spans_BT), jnp.asarray(ids_BT))
    inputs = with_spans(inputs, jnp.asarray(spans_BT), LENGTH)
    q_BTNH, k_BTKH, v_BTKH = heads
    return inputs.attend(q_BTNH, k_BTKH, v_BTKH, kind)


TINY = dataclasses.replace(
    Config.tiny(), num_heads=2 * K, num_kv_heads=K, head_dim=H, num_layers=1, layer_kinds=(AttentionType(None, None),)
)  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "T", "window", "mesh"),
    full_except(
        [
            ("auto", 40, None, ""),
            ("auto", 40, 3, ""),  # less than a span
            ("flash", 600, 30, ""),  # two tiles, and a span across them
            ("splash", 256, None, ""),
            ("splash", 256, 3, ""),
            ("triton", 128, 30, ""),
            ("ring", 40, None, "data=1,seq=4"),
            ("ring", 40, 3, "data=1,seq=4"),
            ("ring", 24, 12, "data=1,seq=8"),  # spans over three devices
            ("auto", 40, 3, "data=1,seq=4"),  # all-to-all
        ],
        fast=[("auto", 40, 3, "")],
    ),
)
def test_spans_see_in_both_directions(kernel, T, window, mesh):
    heads, ids_BT, spans_BT = rows(T)
    ring = kernel == "ring"
    own = {"context": "ring"} if ring else {"attention": kernel}
    config = dataclasses.replace(TINY, **own)
    scale = RANDOM.normal(size=heads[0].shape).astype(np.float32)

    def total(heads: Any, ids_BT, spans_BT):
        out = attend(config, heads, ids_BT, spans_BT, window)
        return (out * scale).sum(), out

    both = jax.value_and_grad(total, has_aux=True)
    rules = tuple(RULES["cp" if mesh else "dp"].items())
    with jax.set_mesh(make_mesh(mesh or "1x1")), nnx.logical_axis_rules(rules):
        (_, out), gradients = jax.jit(both, compiler_options=QUICK)(heads, ids_BT, spans_BT)
    wanted = by_definition(heads, ids_BT, spans_BT, window)
    np.testing.assert_allclose(out, wanted, atol=2e-5)
    for number, gradient in enumerate(gradients):  # along a direction, by a difference in float64
        step = RANDOM.normal(size=gradient.shape)
        ends = []
        for sign in (1, -1):
            moved = [np.asarray(x, np.float64) for x in heads]
            moved[number] = moved[number] + sign * 1e-5 * step
            ends.append((by_definition(moved, ids_BT, spans_BT, window) * scale).sum())
        slope = (ends[0] - ends[1]) / 2e-5
        assert (np.asarray(gradient) * step).sum() == pytest.approx(slope, rel=2e-4, abs=2e-4)


@pytest.mark.parametrize("name", ["auto", "cudnn", "xla"])
def test_a_kernel_without_spans_is_not_chosen(name):
    request = Request(seq_len=64, head_dim=64, dtype="bfloat16", segments=True, exchange=SPANS)
    assert choose_kernel(name, request).kernel == "flash"
