"""Context parallelism of layers with a state: a state that travels from device to device.

state.py needs it if rules split the positions of a row (`seq`). What a device's positions do to a
state, and what they read of it, is affine: a device computes both, its map, before it knows its state.
Devices compose their maps in log(n) steps, so each learns the state that it starts from. What is sent
doesn't grow with T.

The map of a recurrence whose A is a matrix is a state of K + V columns: A, then b. It is computed
like a state, and its outputs have K more columns: what a position reads of the incoming state. Where A
is a number a head, the map is the pair (A, b).

Shapes: B batch, T positions on a device, N heads, G groups of heads, K key dim, V value dim of a head, X
= K + V.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .maps import ScalarMap, ScalarOutputs


def identity(kind: str, state_BNKV) -> Any:
    """The map of no positions, S → 1 · S + 0; kind: see `Rule.map`."""
    B, N, K, V = state_BNKV.shape
    if kind == "scalar":
        return ScalarMap(jnp.ones((B, N, 1, 1), state_BNKV.dtype), state_BNKV)
    return jnp.broadcast_to(jnp.eye(K, K + V, dtype=state_BNKV.dtype), (B, N, K, K + V))


def apply_incoming(kind: str, map_, outputs, seq) -> tuple[jax.Array, jax.Array]:
    """Returns the state [B, N, K, V] after this device's positions, and their outputs [B, T, N, V].

    Args:
      map_, outputs: what positions return that start from `identity`.
    """
    if kind == "scalar":
        return apply_to_scalars(map_, outputs, seq)
    return apply_to_matrices(map_, outputs, seq)


def apply_to_matrices(map_BNKX, out_BTNX, seq) -> tuple[jax.Array, jax.Array]:
    """`apply_incoming` where A is a matrix."""
    K = map_BNKX.shape[-2]
    matrix, offset = map_BNKX[..., :K], map_BNKX[..., K:]
    with jax.default_matmul_precision("highest"):  # by default, TPUs round the state to bfloat16
        incoming = incoming_state(matrix, offset, seq)
        state = matrix @ incoming + offset
    read = jnp.einsum("btnk,bnkv->btnv", out_BTNX[..., :K], incoming)
    return state, out_BTNX[..., K:] + read


def apply_to_scalars(map_: ScalarMap, outputs: ScalarOutputs, seq) -> tuple[jax.Array, jax.Array]:
    """`apply_incoming` where A is a number."""
    incoming = incoming_state(map_.scale, map_.offset, seq, product=jnp.multiply)
    state = map_.scale * incoming + map_.offset
    B, N, K, V = state.shape
    G = outputs.read.shape[2]
    by_group = incoming.reshape(B, G, N // G, K, V)
    read = jnp.einsum("btgk,bghkv->btghv", outputs.read, by_group).reshape(outputs.out.shape)
    return state, outputs.out + outputs.scale[..., None] * read


def incoming_state(matrix, offset, seq, product=jnp.matmul) -> jax.Array:
    """The state that a device starts from: the maps of all devices before it, applied to zeros.

    Each step doubles the number of devices whose maps are composed (Hillis & Steele 1986). The last
    step and the final hop send offsets alone, so n devices receive less than log2(n) + 1 maps each;
    an all-gather would bring n - 1 of them, which is never less. Where no device sends, zeros arrive:
    then the map begins at the first device, whose incoming state is zero.

    Args:
      product: of A with a state, or with another A.
    """
    devices = jax.lax.axis_size(seq)
    hops = 1
    while hops < devices - 1:
        offset += product(matrix, send(offset, hops, seq))
        if 2 * hops < devices - 1:
            matrix = product(matrix, send(matrix, hops, seq))
        hops *= 2
    return send(offset, 1, seq)


def send(x, hops: int, seq):
    """Sends to the device that is `hops` further along T; the first ones receive zeros."""
    devices = jax.lax.axis_size(seq)
    return jax.lax.ppermute(x, seq, [(i, i + hops) for i in range(devices - hops)])


def halo(arrays, width: int, seq):
    """The `width` positions before this device's own, of arrays [B, T, ...]."""
    last = [x[:, -width:] for x in arrays]
    before = [x[:, :0] for x in arrays]
    for hops in range(1, -(-width // last[0].shape[1]) + 1):
        if hops < jax.lax.axis_size(seq):
            last_sent = [send(x, hops, seq) for x in last]
        else:
            last_sent = [jnp.zeros_like(x) for x in last]
        before = [jnp.concatenate(pair, axis=1) for pair in zip(last_sent, before, strict=True)]
    return [x[:, -width:] for x in before]


def from_last(x, seq):
    """The last device's x, on all devices along T."""
    is_last = jax.lax.axis_index(seq) == jax.lax.axis_size(seq) - 1
    return jax.lax.psum(jnp.where(is_last, x, 0), seq)
