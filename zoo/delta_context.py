"""Context parallelism of gated delta networks: a state that travels from device to device.

delta.py uses this file if the rules split the positions of a row (`seq`), so a model can be copied
without it. Each device computes what its positions do to any state: an affine map, as each step is
one. Devices compose the maps in log(n) steps, so each learns the state that it starts from. What is
sent doesn't grow with T.

Shapes: B batch, T positions on a device, N heads, K key dim, V value dim of a head.
"""

import jax
import jax.numpy as jnp


def any_state(state_BNKV) -> jax.Array:
    """The state [B, N, K, K + V] to start from, if the one that comes in isn't known yet.

    Its first K columns, the identity, become the matrix of the device's map; the others its offset.
    """
    B, N, K, V = state_BNKV.shape
    identity_KX = jnp.eye(K, K + V, dtype=state_BNKV.dtype)
    return jnp.broadcast_to(identity_KX, (B, N, K, K + V))


def from_previous(state_BNKX, out_BTNX, seq) -> tuple[jax.Array, jax.Array]:
    """The state [B, N, K, V] after this device's positions and their outputs [B, T, N, V].

    Args:
      state_BNKX, out_BTNX: the same of a device that starts from `any_state`.
    """
    K = state_BNKX.shape[-2]
    matrix, offset = state_BNKX[..., :K], state_BNKX[..., K:]
    incoming = incoming_state(matrix, offset, seq)
    out = out_BTNX[..., K:] + jnp.einsum("btnk,bnkv->btnv", out_BTNX[..., :K], incoming)
    return matrix @ incoming + offset, out


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
