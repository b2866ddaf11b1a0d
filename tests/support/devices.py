"""Stand-ins for the devices of TPU slices, GPU nodes and several processes."""

import itertools


class Device:
    """The attributes of a device that arranging a mesh reads."""

    def __init__(self, number: int, **facts):
        self.id, self.core_on_chip = number, 0
        self.__dict__.update(facts)

    def __repr__(self):
        return f"{self.platform} {self.id}"


def tpus(count: int, x: int, y: int, z: int = 1, kind: str = "TPU v5 lite") -> list[Device]:
    """Slices of chips wired x × y × z, four chips a process, as the TPU compiler lists them."""
    found = []
    for number in range(count):
        chips = [(i, j, k) for k, j, i in itertools.product(range(z), range(y), range(x))]
        hosts = sorted({(i // 2, j // 2, k) for i, j, k in chips}, key=lambda at: at[::-1])
        for i, j, k in chips:
            process = len(hosts) * number + hosts.index((i // 2, j // 2, k))
            facts = {"slice_index": number} if count > 1 else {}
            found.append(
                Device(len(found), platform="tpu", device_kind=kind, coords=[i, j, k],
                       process_index=process, **facts)
            )  # fmt: skip
    return found


def gpus(nodes: int, each: int, processes: int = 0) -> list[Device]:
    """Nodes of GPUs, with one process for each node or for each `processes` GPUs (Slurm's way)."""
    return [
        Device(i, platform="gpu", device_kind="NVIDIA H100", slice_index=i // each,
               process_index=i // (processes or each))
        for i in range(nodes * each)
    ]  # fmt: skip


def cpus(count: int, each: int) -> list[Device]:
    """Simulated devices of processes on one machine, which JAX reports as one slice."""
    return [
        Device(i, platform="cpu", device_kind="cpu", slice_index=0, process_index=i // each)
        for i in range(count * each)
    ]
