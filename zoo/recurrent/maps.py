"""What positions do to any state, S → A · S + b, where A is a number for each head.

Where A is a matrix, its map is a wider state; see state_context.py.

Shapes: B batch, T positions, N heads, G groups of heads, K key dim, V value dim of a head's state.
"""

from typing import NamedTuple

import jax


class ScalarMap(NamedTuple):
    """S → scale · S + offset."""

    scale: jax.Array  # [B, N, 1, 1]
    offset: jax.Array  # [B, N, K, V]


class ScalarOutputs(NamedTuple):
    """The outputs of positions that start from zeros, and how they read an incoming state."""

    out: jax.Array  # [B, T, N, V]
    read: jax.Array  # [B, T, G, K]: queries
    scale: jax.Array  # [B, T, N], by which A has scaled the incoming state so far
