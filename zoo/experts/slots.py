"""Rows in slots: how they get there and come back, and rounds where slots are too few.

These functions run on one device, inside jax.shard_map.

Shapes: B batch, D embed, J experts per row, M slots, N rows before `scatter_rows`.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

CAPACITY = (
    1.5  # choices that a device, or an expert, computes in a round, as a multiple of an even load
)


def take_rows(x_BND, index_BM):
    """Rows of each x_ND by index, [B, M, D]; zeros where the index is negative."""
    get = jax.vmap(lambda x_ND, index_M: x_ND.at[index_M].get(mode="promise_in_bounds"))
    return jnp.where(index_BM[..., None] < 0, 0, get(x_BND, jnp.maximum(index_BM, 0)))


@jax.custom_vjp
def scatter_rows(x_BND, source_BM, target_BNJ):
    """Returns [B, M, D]: row m is row source[m] of x, or 0. `target` says where x's rows go.

    `scatter_rows` and `combine` are each other's transposes, so their gradients are gathers. XLA's would be
    scatters, which took five times as long to compile for TPUs.
    """
    return take_rows(x_BND, source_BM)


@jax.custom_vjp
def combine(y_BMD, target_BNJ, source_BM):
    """Returns [B, N, D]: row n is the sum of the rows target[n, :] of y, without negative ones."""
    return jnp.asarray(
        sum(take_rows(y_BMD, target_BNJ[..., j]) for j in range(target_BNJ.shape[-1]))
    )


scatter_rows.defvjp(
    lambda x, *at: (scatter_rows(x, *at), at),
    lambda at, grad: (combine(grad, *at[::-1]), None, None),
)
combine.defvjp(
    lambda y, *at: (combine(y, *at), at),
    lambda at, grad: (scatter_rows(grad, *at[::-1]), None, None),
)


def weighted(out, weight):
    """Out · weight [..., 1]. In float32, so that the weight's gradient is summed over D in float32."""
    return (out.astype(jnp.float32) * weight.astype(jnp.float32)).astype(out.dtype)


def before(x):
    """The sum of the earlier elements along the first dim."""
    return jnp.cumsum(x, axis=0) - x


def on_all_devices(rounds) -> jax.Array:
    """The largest number of rounds, because devices have to send in as many."""
    axes = tuple(sorted(jax.sharding.get_abstract_mesh().manual_axes))
    (rounds,) = varying(axes, rounds)
    return jax.lax.pmax(rounds, axes) if axes else rounds


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def further_rounds(run_round, route, x_ND, weight_NJ, weights) -> Any:
    """The sum of all rounds but the first, added in float32; saves no more than its inputs.

    Args:
      run_round: (round, route, x_ND, weight_NJ, weights) → a round's part of the sum, [N, D].
      route: a NamedTuple whose `rounds` is their number.
    """

    def add_round(carry):
        round, sum_ND = carry
        out_ND = run_round(round, route, x_ND, weight_NJ, weights)
        return round + 1, sum_ND + out_ND.astype(jnp.float32)

    (zero_ND,) = varying(varying_axes(x_ND), jnp.zeros(x_ND.shape))
    sums = jax.lax.while_loop(lambda carry: carry[0] < route.rounds, add_round, (1, zero_ND))
    return sums[1].astype(x_ND.dtype)


def _rounds_backward(run_round, saved, grad_ND):
    route = saved[0]
    inputs, tree = jax.tree.flatten(saved[1:])
    # Rounded weights, of a byte for each number, get no gradients.
    trained = [i for i, x in enumerate(inputs) if x.dtype.itemsize > 1]

    def run(round, *values):
        leaves = inputs.copy()
        for i, value in zip(trained, values, strict=True):
            leaves[i] = value
        return run_round(round, route, *jax.tree.unflatten(tree, leaves))

    def add_round(carry):
        round, sums = carry
        _, pull = jax.vjp(functools.partial(run, round), *(inputs[i] for i in trained))
        return round + 1, [total + new for total, new in zip(sums, pull(grad_ND), strict=True)]

    def zeros(x):  # the gradients of all rounds are added in float32
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        return varying(varying_axes(x), jnp.zeros(x.shape, dtype))[0]

    start = (jnp.int32(1), [zeros(inputs[i]) for i in trained])
    _, sums = jax.lax.while_loop(lambda carry: carry[0] < route.rounds, add_round, start)
    grads: list[Any] = [None] * len(inputs)
    for i, total in zip(trained, sums, strict=True):
        grads[i] = total.astype(inputs[i].dtype)
    return None, *jax.tree.unflatten(tree, grads)


further_rounds.defvjp(
    lambda run_round, *inputs: (further_rounds(run_round, *inputs), inputs), _rounds_backward
)


def count_devices(axes: tuple[str, ...]) -> int:
    return math.prod(jax.lax.axis_size(axis) for axis in axes)


def varying(axes: Iterable[str], *arrays):
    """Marks arrays as varying along mesh axes, so that their partial gradients are summed here."""
    missing = [tuple(sorted({*axes} - varying_axes(x))) for x in arrays]
    pairs = zip(arrays, missing, strict=True)
    return [jax.lax.pcast(x, names, to="varying") if names else x for x, names in pairs]


def varying_axes(x) -> frozenset[str]:
    """The mesh axes along which an array varies; none if JAX doesn't check that."""
    return jax.typeof(x).mat.varying
