"""Context parallelism: how positions attend to those on other devices.

attention.py and layers.py use this file if the rules split the positions of a row (`seq`), so a model
can be copied without it.

Shapes: B batch, T positions on a device, N heads, K kv heads, H head dim.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .attention import NOT_SEEN, How, kinds
from .sharding import constrain, mesh_axes, reshape, shards


def way_to_attend(context: str, num_heads: int) -> str | None:
    """How positions attend to those on other devices; None if the rules don't split T.

    all-to-all (Ulysses, Jacobs et al. 2023): while they attend, devices split heads instead of T.
    ring (Liu et al. 2023): keys and values visit every device. On many devices it sends more
    bytes, but it needs no more heads.

    "auto" is all-to-all if every device gets a head; another `context` is returned unchanged.
    """
    if shards("seq") == 1:
        return None
    enough = num_heads % shards(("heads", "seq")) == 0
    return ("all-to-all" if enough else "ring") if context == "auto" else context


def on_devices(how: How, context: str, num_heads: int, striped: bool) -> tuple[str | None, How]:
    """The way to attend, and the settings of a kernel on one device."""
    way = way_to_attend(context, num_heads)
    if way == "ring":
        ring = mesh_axes("seq"), shards("seq"), striped
        how = How(how.T // shards("seq"), how.window, how.soft_cap, *ring)
    return way, how


# ---- stripes -------------------------------------------------------------------------------------


def has_stripes(config, seq_len: int) -> bool:
    """Whether, on a ring, device d of n has each nth position from d on, so that all devices see
    equally many keys (Brandon et al. 2023). With windows, keys are near, and parts are consecutive.
    """
    on_ring = way_to_attend(config.context, config.num_heads) == "ring"
    windows = any(kind.window for kind in kinds(config))
    return on_ring and not windows and seq_len % shards("seq") ** 2 == 0


def in_stripes(config, at_T) -> tuple[bool, jax.Array]:
    """(whether the model `has_stripes`, the positions 0 to T - 1 in their order)."""
    striped, T, n = has_stripes(config, len(at_T)), len(at_T), shards("seq")
    return striped, (at_T % (T // n) * n + at_T // (T // n) if striped else at_T)


def reorder(config, x_BT, *axes: str, back: bool = False) -> Any:
    """Brings [B, T, ...] into stripes, or `back`, if the model `has_stripes`; else returns it."""
    if not has_stripes(config, x_BT.shape[1]):
        return x_BT
    (B, T, *rest), n = x_BT.shape, shards("seq")
    parts, split = (n, n, T // n**2) if back else (n, T // n**2, n), ("batch", "seq", None, None)
    x = reshape(x_BT, (B, *parts, *rest), *split, *axes)
    x = constrain(jnp.moveaxis(x, 1, 3) if back else jnp.moveaxis(x, 3, 1), *split, *axes)
    return reshape(x, x_BT.shape, "batch", "seq", *axes)


# ---- a ring: keys and values visit one device after another --------------------------------------


def hops_of(how: How) -> int:
    """How many devices back the earliest visible keys are."""
    back = how.devices if how.window is None else -(-(how.window - 1) // how.T)
    return min(back, how.devices - 1)


def offset_of(how: How, hop):
    """Query i sees key j, which came `hop` devices, if 0 ≤ i + offset - j < window."""
    here = jax.lax.axis_index(how.ring)
    there = (here - hop) % how.devices
    return -(there > here).astype(jnp.int32) if how.striped else (here - there) * how.T


def send(how: How, arrays, hops: int):
    """Sends arrays to the device that is `hops` further on the ring."""
    pairs = [(i, (i + hops) % how.devices) for i in range(how.devices)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, how.ring, pairs), arrays)


def around_ring(outputs, gradients):
    """A kernel's two functions (attention.PARTS), for the keys and values of all devices."""
    return functools.partial(_outputs, outputs), functools.partial(_gradients, gradients)


def _outputs(kernel, how: How, q_BNTH, own_kv, ids_BT, _):
    """Joins each device's output by its share in the softmax's denominator."""
    hops = hops_of(how)

    def join(kv, hop, out, log_sum):
        more, log_more = kernel(how, q_BNTH, kv, ids_BT, offset_of(how, hop))
        total = jnp.logaddexp(log_sum, log_more)
        old, new = jnp.exp(log_sum - total)[..., None], jnp.exp(log_more - total)[..., None]
        return out * old + more * new, total

    def hop_on(carry, hop):
        kv, *so_far = carry
        return (send(how, kv, 1), *join(kv, hop, *so_far)), None

    if not hops:
        return kernel(how, q_BNTH, own_kv, ids_BT, offset_of(how, 0))
    out = jnp.zeros((*q_BNTH.shape[:3], own_kv[1].shape[-1]))
    start = own_kv, out, jnp.full(q_BNTH.shape[:3], NOT_SEEN)
    (kv, *so_far), _ = jax.lax.scan(hop_on, start, jnp.arange(hops))
    return join(kv, hops, *so_far)


def _gradients(kernel, how: How, q_BNTH, own_kv, ids_BT, _, *saved):
    """Gradients of keys and values travel with them, in their dtype, and then home."""
    hops = hops_of(how)

    def add(kv, hop, *sums):
        found = kernel(how, q_BNTH, kv, ids_BT, offset_of(how, hop), *saved)
        return [(x + y).astype(x.dtype) for x, y in zip(sums, found, strict=True)]

    def hop_on(carry, hop):
        kv, *sums = carry
        dq, *dkv = add(kv, hop, *sums)
        return (send(how, kv, 1), dq, *send(how, dkv, 1)), None

    carry = own_kv, jnp.zeros(q_BNTH.shape), *map(jnp.zeros_like, own_kv[:2])
    if hops:
        carry, _ = jax.lax.scan(hop_on, carry, jnp.arange(hops))
    dq, *dkv = add(carry[0], hops, *carry[1:])
    return dq, *(send(how, dkv, -hops) if hops else dkv)
