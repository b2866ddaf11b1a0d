"""Describes a slice of TPUs for launchers: its topology, hosts and names on Google Cloud."""

import math
from typing import NamedTuple

from recipes.instruments.plan.hardware import Devices

HOST = 4  # chips of a host, in a slice of several hosts

# kind → (GKE's label of the accelerator, the TPU VM's type without its number, devices by which that
# counts a chip, the machine type without its number of chips). docs.cloud.google.com/tpu/docs, and
# docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
NAMES = {
    "v4": ("tpu-v4-podslice", "v4", 2, "ct4p-hightpu"),
    "v5e": ("tpu-v5-lite-podslice", "v5litepod", 1, "ct5lp-hightpu"),
    "v5p": ("tpu-v5p-slice", "v5p", 2, "ct5p-hightpu"),
    "v6e": ("tpu-v6e-slice", "v6e", 1, "ct6e-standard"),
    "tpu7x": ("tpu7x", "tpu7x", 2, "tpu7x-standard"),
}


class Slice(NamedTuple):
    """One slice, in the words of GKE, XPK and TPU VMs."""

    accelerator: str  # nodeSelector cloud.google.com/gke-tpu-accelerator
    topology: str  # nodeSelector cloud.google.com/gke-tpu-topology
    hosts: int  # a Job's parallelism and completions
    chips: int  # of a host: limit google.com/tpu
    machine: str  # of a node pool
    type: str  # xpk --tpu-type, gcloud --accelerator-type


def find(devices: Devices) -> Slice | None:
    """The slice that `devices` has one or several of; None if there is none on Google Cloud.

    >>> from recipes.instruments.plan.hardware import parse_devices
    >>> find(parse_devices("v5p:64"))[:4]
    ('tpu-v5p-slice', '4x4x4', 16, 4)
    """
    if devices.kind not in NAMES:
        return None
    accelerator, prefix, counted, machine = NAMES[devices.kind]
    chips = math.prod(devices.shape)
    if devices.kind in ("v4", "v5p") and chips < HOST:
        return None
    of_host = min(chips, HOST)
    return Slice(
        accelerator=accelerator,
        topology="x".join(map(str, devices.shape)),
        hosts=chips // of_host,
        chips=of_host,
        machine=f"{machine}-{of_host}t",
        type=f"{prefix}-{chips * counted}",
    )


def note(devices: Devices) -> str:
    """A sentence with all that the launchers in recipes/launch ask for; "" if there is no slice."""
    tpu = find(devices)
    if not tpu:
        return ""
    which = f"Each of the {devices.groups} slices" if devices.groups > 1 else "The slice"
    hosts = "one host" if tpu.hosts == 1 else f"{tpu.hosts} hosts"
    chips = "one chip" if tpu.chips == 1 else f"{tpu.chips} chips"
    return (
        f"{which} is {tpu.type} ({tpu.topology}), {hosts} of {chips} "
        f"({tpu.machine}). On GKE: gke-tpu-accelerator: {tpu.accelerator}, gke-tpu-topology: "
        f"{tpu.topology}, parallelism: {tpu.hosts}, google.com/tpu: {tpu.chips}."
    )
