"""The flag --offload, and the check that a device can copy to its host's memory."""

from recipes.common.runtime import UserError, describe, flag
from recipes.common.sharding import Layout
from recipes.common.sharding.host_memory import KIND, has_host_memory


def offload_flag() -> str:
    return flag(
        "", "What to keep in the host's memory: the optimizer's state, which a step brings to the "
        "device layer by layer; empty: nothing.", "optimizer", choices=["", "optimizer"],
        may_change=True,
    )  # fmt: skip


def check_offload(layout: Layout, offload: str) -> None:
    """Raises UserError if something is to be in the host's memory that can't be.

    Args:
      offload: the flag.
    """
    device, remat = layout.mesh.devices.flat[0], layout.shape.remat
    check_remat(layout)
    asked = {"offload": offload} if offload else {}
    asked |= {"remat": remat} if remat == "offload" else {}
    for name, value in asked.items():
        if not has_host_memory(device):
            kinds = " and ".join(memory.kind for memory in device.addressable_memories())
            fix = "leave it out" if name == "offload" else "use --remat=full"
            raise UserError(
                f"--{name}={value} needs devices with the memory kind {KIND!r}, and "
                f"{device.device_kind} has {kinds or 'none'}; {fix}"
            )


def check_remat(layout: Layout) -> None:
    """Raises UserError if layers in stages are to keep their inputs in the host's memory.

    A stage keeps what JAX's derivative of its layers returns in buffers of its own, on the device.
    """
    if layout.shape.remat == "offload" and layout.stages > 1:
        raise UserError(
            f"--remat=offload is not for a pipeline, and rules {layout.strategy!r} on "
            f"--mesh={describe(layout.mesh.shape)} have {layout.stages} stages; use --remat=full"
        )
