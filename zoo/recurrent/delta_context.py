"""Context parallelism of gated delta networks: a state that travels from device to device.

delta.py needs it if rules split the positions of a row (`seq`). What a device's positions do to a state, and what they read of it, is affine: a device
computes both before it knows its state, as columns of a wider one. Devices compose their maps in
log(n) steps, so each learns the state that it starts from. What is sent doesn't grow with T.

Shapes: B batch, T positions on a device, N heads, K key dim, V value dim of a head, X = K + V.
"""

import jax
import jax.numpy as jnp


def identity(state_BNKV) -> jax.Array:
    """The map of no positions, S → 1 · S + 0: a matrix and an offset as a state of K + V columns."""
    B, N, K, V = state_BNKV.shape
    return jnp.broadcast_to(jnp.eye(K, K + V, dtype=state_BNKV.dtype), (B, N, K, K + V))


def apply_incoming(map_BNKX, out_BTNX, seq) -> tuple[jax.Array, jax.Array]:
    """Returns the state [B, N, K, V] after this device's positions, and their outputs [B, T, N, V].

    Args:
      map_BNKX, out_BTNX: the state and the outputs if the device starts from `identity`.
    """
    K = map_BNKX.shape[-2]
    matrix, offset = map_BNKX[..., :K], map_BNKX[..., K:]
    with jax.default_matmul_precision("highest"):  # by default, TPUs round the state to bfloat16
        incoming = incoming_state(matrix, offset, seq)
        state = matrix @ incoming + offset
    read = jnp.einsum("btnk,bnkv->btnv", out_BTNX[..., :K], incoming)
    return state, out_BTNX[..., K:] + read


def incoming_state(matrix, offset, seq) -> jax.Array:
    """The state that a device starts from: the maps of all devices before it, applied to zeros.

    Each step doubles the number of devices whose maps are composed (Hillis & Steele 1986). The last
    step and the final hop send offsets alone, so n devices receive less than log2(n) + 1 maps each;
    an all-gather would bring n - 1 of them, which is never less. Where no device sends, zeros arrive:
    then the map begins at the first device, whose incoming state is zero.
    """
    devices = jax.lax.axis_size(seq)
    hops = 1
    while hops < devices - 1:
        offset += matrix @ send(offset, hops, seq)
        if 2 * hops < devices - 1:
            matrix = matrix @ send(matrix, hops, seq)
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
