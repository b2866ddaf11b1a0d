"""Context parallelism: how positions attend to those on other devices, where rules split `seq`.

Shapes: B batch, T positions on a device, N heads, K kv heads, H head dim.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ..kernels.shared import NOT_SEEN, Settings, joined
from ..core.attention import RowLayout
from ..core.sharding import Axis, constrain, mesh_axes, reshape, shards


def choose_exchange(context: str, num_heads: int) -> str | None:
    """How positions attend to those on other devices; None if the rules don't split T.

    all-to-all (Ulysses, Jacobs et al. 2023): while they attend, devices split heads instead of T.
    ring (Liu et al. 2023): keys and values visit every device. On many devices it sends more
    bytes, but it needs no more heads.

    Args:
      context: Config.context; "auto" is all-to-all if every device gets a head, else ring.
    """
    if shards("seq") == 1:
        return None
    enough = num_heads % shards(("heads", "seq")) == 0
    return ("all-to-all" if enough else "ring") if context == "auto" else context


def row_layout(config, seq_len: int) -> RowLayout:
    """The layout of rows of T positions that several devices share out."""
    exchange = choose_exchange(config.context, config.num_heads)
    if exchange == "all-to-all":
        return AllToAll()
    return Ring(striped=has_stripes(config, seq_len))


@dataclasses.dataclass(frozen=True)
class AllToAll(RowLayout):
    """While positions attend, devices split heads instead of T (Ulysses, Jacobs et al. 2023)."""

    exchange: str | None = "all-to-all"
    heads: Axis = ("heads", "seq")
    kv_heads: Axis = ("kv_heads", "seq")


@dataclasses.dataclass(frozen=True)
class Ring(RowLayout):
    """Keys and values visit one device after another (Liu et al. 2023).

    `striped`: device d of n has the positions d, d + n, d + 2n, …, so that all devices see equally
    many keys (Brandon et al. 2023); else each device has consecutive positions.
    """

    exchange: str | None = "ring"
    seq: str | None = "seq"
    striped: bool = False

    def positions(self, seq_len: int) -> jax.Array:
        position_T = jnp.arange(seq_len)
        if not self.striped:
            return position_T
        n = shards("seq")
        length = seq_len // n
        return position_T % length * n + position_T // length

    def reorder(self, x_BT, *axes: str, back: bool = False):
        if x_BT is None or not self.striped:
            return x_BT
        B, T, *rest = x_BT.shape
        n = shards("seq")
        parts = (n, n, T // n**2) if back else (n, T // n**2, n)
        split = ("batch", "seq", None, None)
        x = reshape(x_BT, (B, *parts, *rest), *split, *axes)
        x = constrain(jnp.moveaxis(x, 1, 3) if back else jnp.moveaxis(x, 3, 1), *split, *axes)
        return reshape(x, x_BT.shape, "batch", "seq", *axes)

    def on_device(self, settings: Settings) -> Settings:
        return dataclasses.replace(
            settings,
            positions=settings.positions // shards("seq"),
            ring=mesh_axes("seq"),
            devices=shards("seq"),
            striped=self.striped,
            around=around_ring,
        )


def has_stripes(config, seq_len: int) -> bool:
    """Whether a ring's positions are in stripes: not with windows, nor with layers that carry a state
    along T, which need consecutive positions on each device.
    """
    consecutive = config.carries_state or any(kind.window for kind in config.kinds)
    return not consecutive and seq_len % shards("seq") ** 2 == 0


# ---- a ring: keys and values visit one device after another --------------------------------------


def hops_of(settings: Settings) -> int:
    """How many devices back the earliest visible keys are; later ones are as far, around the ring."""
    back = (
        settings.devices
        if settings.window is None or not settings.causal
        else -(-(settings.window - 1) // settings.positions)
    )
    return min(back, settings.devices - 1)


def offset_of(settings: Settings, hop):
    """The offset between queries and keys that came `hop` devices, as in flash.flash."""
    here = jax.lax.axis_index(settings.ring)
    if settings.reverse:
        here = settings.devices - 1 - here
    there = (here - hop) % settings.devices
    if settings.striped:
        return -(there > here).astype(jnp.int32)
    return (here - there) * settings.positions - int(settings.reverse)


def send(settings: Settings, arrays, hops: int):
    """Sends arrays to the device that is `hops` further on the ring, or before on a reversed one."""
    hops = -hops if settings.reverse else hops
    pairs = [(i, (i + hops) % settings.devices) for i in range(settings.devices)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, settings.ring, pairs), arrays)


def around_ring(outputs, gradients):
    """The two functions of a kernel (one of choice.JOINABLE), for the keys and values of all devices."""
    return functools.partial(_outputs, outputs), functools.partial(_gradients, gradients)


def _outputs(kernel, settings: Settings, q_BNTH, own_kv, ids_BT, _):
    """Joins each device's output by its share in the softmax's denominator."""
    hops = hops_of(settings)

    def join(kv, hop, out, log_sum):
        return joined(out, log_sum, *kernel(settings, q_BNTH, kv, ids_BT, offset_of(settings, hop)))

    def hop_on(carry, hop):
        kv, *sums = carry
        return (send(settings, kv, 1), *join(kv, hop, *sums)), None

    if not hops:
        return kernel(settings, q_BNTH, own_kv, ids_BT, offset_of(settings, 0))
    out = jnp.zeros((*q_BNTH.shape[:3], own_kv[1].shape[-1]))
    start = own_kv, out, jnp.full(q_BNTH.shape[:3], NOT_SEEN)
    (kv, *sums), _ = jax.lax.scan(hop_on, start, jnp.arange(hops))
    return join(kv, hops, *sums)


def _gradients(kernel, settings: Settings, q_BNTH, own_kv, ids_BT, _, *saved):
    """Gradients of keys and values travel with them, in their dtype, and then home."""
    hops = hops_of(settings)

    def add(kv, hop, *sums):
        gradients = kernel(settings, q_BNTH, kv, ids_BT, offset_of(settings, hop), *saved)
        return [(x + y).astype(x.dtype) for x, y in zip(sums, gradients, strict=True)]

    def hop_on(carry, hop):
        kv, *sums = carry
        dq, *dkv = add(kv, hop, *sums)
        return (send(settings, kv, 1), dq, *send(settings, dkv, 1)), None

    carry = own_kv, jnp.zeros(q_BNTH.shape), *map(jnp.zeros_like, own_kv[:2])
    if hops:
        carry, _ = jax.lax.scan(hop_on, carry, jnp.arange(hops))
    dq, *dkv = add(carry[0], hops, *carry[1:])
    return dq, *(send(settings, dkv, -hops) if hops else dkv)
