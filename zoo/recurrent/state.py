"""The contract of layers with a state: what travels along a row, what ends with a document, what a
cache keeps.

A recurrence reads a row's positions in order. Each changes the state S and reads it:

    S ← A · S + b;   out = read(S)

A, b and `read` depend on the position alone, after a short causal convolution over the positions
before it. The rest follows from that, once for all recurrences:

- The state belongs to heads, which tensor parallelism splits. Its size doesn't depend on T.
- At the first position of a segment A is zero, and the convolution sees nothing before it.
- Positions on several devices (`seq`): each device computes what its positions do to any state,
  the map (A, b), and devices compose these; see state_context.py. The convolution reads the last
  W - 1 positions of the device before, its halo.
- A cache keeps the state and the last W - 1 inputs of the convolution.

A layer states its recurrence as a Rule and its costs as a Recurrence: delta.py has a matrix A for
each head, mamba.py a number. short_convolution.py has a halo and no state.

Shapes: B batch, T positions, S = W - 1 + T positions with those before, N heads, G groups of heads, K
key dim, V value dim of a head's state, W width of the convolution, F channels of it.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..core.sharding import AxisNames, constrain, explicit, shards

KEY_HEADS = "key_heads"  # the logical axis of G
GROUP = 512  # positions computed at once: the backward pass keeps one group's intermediates


class Recurrence(NamedTuple):
    """What a recurrence computes and keeps, in numbers: elements of arrays."""

    work: int  # multiplications per position of the recurrence itself
    width: int  # numbers per position that its derivative needs; rules split them as heads
    chunks: int  # float32 numbers per position at work in its derivative; likewise
    group: int  # positions of a row at work at once
    state: int  # numbers per row that it carries along T; rules split them as heads
    erase: int  # numbers per row of A for a part of T; likewise
    halo: int  # numbers per row of the positions before a part of T that it also needs


class Rule(NamedTuple):
    """How a group of positions changes a state and reads it, on one device."""

    # (state, inputs after the convolution, arrays by position, starts_BT) → (state, outputs). The
    # state may also be a map of state_context.py; outputs then say how they read the incoming state.
    step: Callable
    state_shape: tuple[int, ...]  # of a row: heads and the dims of a head's state
    map: str  # what A is, for each head: "matrix" or "scalar"


class Positions(NamedTuple):
    """What a device has of its positions."""

    x_BTF: jax.Array  # inputs of the convolution
    kernel_WF: jax.Array
    bias_F: jax.Array | None  # of the convolution
    by_position: tuple  # other arrays [B, T, …] of the recurrence, at least float32
    ids_BT: jax.Array | None  # int: segments; None: one per row
    state: Any = None  # from a cache
    inputs: Any = None  # [B, W - 1, F], likewise: of the convolution


def run_positions(
    rule: Rule, positions: Positions, seq: tuple[str, ...] = (), generates: bool = False
) -> list:
    """One device's part of a recurrence, from the inputs of its convolution to [outputs], float32.

    If it `generates`, also the last state and the last inputs of the convolution.

    Args:
      seq: the mesh axes that split T.
    """
    x_BTF, kernel_WF, bias_F, by_position, ids_BT, state, _ = positions
    B, T, _ = x_BTF.shape
    width = len(kernel_WF) - 1
    is_split = in_parts(seq)
    inputs, ids_before, ids_BT = before_first(positions, seq)
    if state is None:
        state = jnp.zeros((B, *rule.state_shape), by_position[0].dtype)
    if is_split:
        from .state_context import apply_incoming, identity

        state = identity(rule.map, state)
    groups = math.ceil(T / GROUP)

    def split(x, mode="constant"):  # [B, T, ...] → [groups, B, positions of a group, ...]
        x = jnp.pad(x, ((0, 0), (0, -T % groups), *[(0, 0)] * (x.ndim - 2)), mode=mode)
        return x.reshape(B, groups, -1, *x.shape[2:]).swapaxes(0, 1)

    def join(out):  # back
        return out.swapaxes(0, 1).reshape(B, -1, *out.shape[3:])[:, :T]

    def run_group(before, group):
        state, inputs, ids_before = before
        x_BTF, by_position, ids_BT = group
        x_BSF = jnp.concatenate((inputs, x_BTF), axis=1)
        ids_BS = jnp.concatenate((ids_before, ids_BT), axis=1)
        mixed_BTF = jax.nn.silu(convolve(x_BSF, kernel_WF, ids_BS, bias_F))
        starts_BT = ids_BT != ids_BS[:, width - 1 : -1]
        state, out = rule.step(state, mixed_BTF, by_position, starts_BT)
        return (state, x_BSF[:, -width:], ids_BS[:, -width:]), out

    if groups > 1:
        run_group = jax.checkpoint(run_group, prevent_cse=False)
    by_group = split(x_BTF), tuple(map(split, by_position)), split(ids_BT, "edge")
    (state, *_), out = jax.lax.scan(run_group, (state, inputs, ids_before), by_group)
    out = jax.tree.map(join, out)
    if is_split:
        state, out = apply_incoming(rule.map, state, out, seq)
    if not generates:
        return [out]
    if is_split:
        from .state_context import from_last

        state = from_last(state, seq)
    return [out, state, last_inputs(x_BTF, ids_BT, inputs, ids_before, seq)]


# ---- the convolution before a recurrence ---------------------------------------------------------


def in_parts(seq: tuple[str, ...]) -> bool:
    """Whether devices share out the positions of a row, inside jax.shard_map."""
    return bool(seq) and jax.lax.axis_size(seq) > 1


def before_first(positions: Positions, seq: tuple[str, ...]) -> tuple:
    """The W - 1 inputs before a device's first position, their segment ids, and the device's ids."""
    x_BTF, kernel_WF, _, _, ids_BT, _, inputs = positions
    B, T, F = x_BTF.shape
    width = len(kernel_WF) - 1
    if ids_BT is None:
        ids_BT = jnp.zeros((B, T), jnp.int32)
    if inputs is None:
        inputs = jnp.zeros((B, width, F), x_BTF.dtype)
    ids_before = jnp.broadcast_to(ids_BT[:, :1], (B, width))
    if in_parts(seq):
        from .state_context import halo

        inputs, ids_before = halo((x_BTF, ids_BT), width, seq)
    return inputs, ids_before, ids_BT


def last_inputs(x_BTF, ids_BT, inputs, ids_before, seq: tuple[str, ...]) -> jax.Array:
    """The last W - 1 inputs of a row's convolution, those of its last segment; for a cache."""
    width = inputs.shape[1]
    x_BSF = jnp.concatenate((inputs, x_BTF), axis=1)
    ids_BS = jnp.concatenate((ids_before, ids_BT), axis=1)
    ids, x = ids_BS[:, -width:], x_BSF[:, -width:]
    last = jnp.where((ids == ids[:, -1:])[..., None], x, 0)
    if in_parts(seq):
        from .state_context import from_last

        last = from_last(last, seq)
    return last


def convolve(x_BSF, kernel_WF, ids_BS, bias_F=None) -> jax.Array:
    """A causal convolution of each channel within its segment: [B, T, F], in the kernel's dtype.

    x and ids have the W - 1 positions before the first one too: S = W - 1 + T.
    """
    W = len(kernel_WF)
    T = x_BSF.shape[1] - W + 1
    own_BT = ids_BS[:, W - 1 :]
    x_BSF = x_BSF.astype(kernel_WF.dtype)
    total_BTF = jnp.zeros_like(x_BSF[:, W - 1 :])
    for w in range(W):
        same_BT1 = (ids_BS[:, w : w + T] == own_BT)[..., None]
        total_BTF += jnp.where(same_BT1, x_BSF[:, w : w + T], 0) * kernel_WF[w][None, None]
    return total_BTF if bias_F is None else total_BTF + bias_F[None, None]


# ---- logical axes --------------------------------------------------------------------------------


def with_states(axes: AxisNames) -> AxisNames:
    """A decoder's AxisNames with those of layers with a state."""
    return dataclasses.replace(
        axes,
        logical_axes=axes.logical_axes
        | {
            KEY_HEADS: "both",  # G, of queries and keys that heads share
            "conv_width": "weights",  # W
        },
        uneven=axes.uneven | {KEY_HEADS: "replicated", "conv_width": "replicated"},
    )


# ---- heads in groups -----------------------------------------------------------------------------


def copies_of_groups(groups: int) -> int:
    """How often arrays of G groups are repeated so that each device has those of its own heads."""
    return math.lcm(groups, shards("heads")) // groups


def repeat_groups(x, *axes, times: int) -> jax.Array:
    """[..., G, K] → [..., G · times, K], split as `heads`; axes: of the dims before G."""
    split = (*axes, "key_heads", None)
    repeated = jnp.repeat(constrain(x, *split), times, axis=-2, out_sharding=explicit(*split))
    return constrain(repeated, *axes, "heads", None)
