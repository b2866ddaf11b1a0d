"""Arrays in the host's memory: JAX's memory kind "pinned_host", from which a device can copy."""

import jax
from jax.sharding import NamedSharding

KIND = "pinned_host"


def on_host(sharding: NamedSharding) -> NamedSharding:
    """Returns this sharding with its arrays in the host's memory."""
    there = sharding.with_memory_kind(KIND)
    return there if there.memory_kind == KIND else _OnHostOfAbsentGpu(sharding.mesh, sharding.spec)


def result(sharding: NamedSharding) -> NamedSharding:
    """Returns this sharding for the result of a program."""
    return NamedSharding(sharding.mesh, sharding.spec, memory_kind=sharding.memory_kind)


def is_on_host(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether an array is in the host's memory."""
    return leaf.sharding.memory_kind == KIND


def has_host_memory(device: jax.Device) -> bool:
    """Whether a device can copy from its host's memory."""
    return any(memory.kind == KIND for memory in device.addressable_memories())


class _OnHostOfAbsentGpu(NamedSharding):
    """Keeps the memory kind for GPUs to compile for, whose memories JAX doesn't know.

    NamedSharding drops it there. For arguments only: JAX would compare that of a result with the
    compiler's, which is unknown; see `result`.
    """

    memory_kind = property(lambda self: KIND)  # pyright: ignore

    def __eq__(self, other):
        return isinstance(other, _OnHostOfAbsentGpu) and super().__eq__(other)

    def __hash__(self):
        return hash((KIND, super().__hash__()))
