"""Flags of low-precision matmuls (zoo/quantization.py), and what a device makes of them."""

from typing import Any

from recipes.common.runtime import UserError, flag
from recipes.common.sharding import Layout
from zoo.quantization import FLOAT8_DEVICES, has_float8


def matmul_flag() -> str:
    """--matmul: Config.matmul."""
    return flag(
        "", "Number format of the layers' matmuls: int8 or fp8, with scales; empty: --dtype.", "model",
        choices=["", "int8", "fp8"], may_change=True,
    )  # fmt: skip


def matmul_backward_flag() -> str:
    """--matmul_backward: Config.matmul_backward."""
    return flag(
        "", "Number format of gradients in these matmuls: bfloat16; empty: as --matmul.", "model",
        choices=["", "bfloat16"], may_change=True,
    )  # fmt: skip


def matmul_emulate_flag() -> bool:
    """--matmul_emulate, which is no field of a Config."""
    return flag(
        False, "Allow --matmul=fp8 on devices without float8 matmuls, at no gain in speed.", "model",
        may_change=True,
    )  # fmt: skip


def matmul_fields(flags: Any, device: Any) -> dict[str, str]:
    """Config's fields for --matmul. Raises UserError if the flags don't fit together or the device.

    Args:
      flags: has the three flags above, or only the first.
      device: one of the mesh's, with its platform and device_kind.
    """
    for name in ("matmul_backward", "matmul_emulate"):
        if (value := getattr(flags, name, "")) and not flags.matmul:
            raise UserError(
                f"--{name}={value} is for low-precision matmuls, and --matmul is empty; add "
                "--matmul=int8 or --matmul=fp8"
            )
    lacks = device.platform != "cpu" and not has_float8(device.device_kind)
    if flags.matmul == "fp8" and lacks and not getattr(flags, "matmul_emulate", False):
        how = ", or add --matmul_emulate, which rounds alike but is not faster"
        emulate = how if hasattr(flags, "matmul_emulate") else ""
        raise UserError(
            f"--matmul=fp8 needs float8 matmuls, which {device.device_kind} lacks and "
            f"{', '.join(FLOAT8_DEVICES)} have; use --matmul=int8{emulate}"
        )
    return {"matmul": flags.matmul, "matmul_backward": getattr(flags, "matmul_backward", "")}


def describe_matmul(layout: Layout) -> list[str]:
    """A line of the report about low-precision matmuls, if there are any."""
    shape, device = layout.shape, layout.mesh.devices.flat[0]
    if not shape.matmul:
        return []
    backward = shape.matmul_backward or shape.matmul
    if device.platform == "cpu":
        how = ", emulated: numbers are rounded, and multiplied in float32"
    elif shape.matmul == "fp8" and not has_float8(device.device_kind):
        how = ", emulated: numbers are rounded, and multiplied in bfloat16"
    else:
        how = ""
    return [f"matmul: layers in {shape.matmul}, their gradients in {backward}{how}"]
