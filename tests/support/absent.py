"""Layouts on accelerators that this machine lacks."""

import functools

from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from recipes.common.sharding.layout import Layout, make_layout
from zoo.llama_relatives import Config, Transformer

TPU, H100, MI300 = (
    ("tpu", "TPU v5e"),
    ("gpu", "NVIDIA H100 80GB HBM3"),
    ("gpu", "AMD Instinct MI300X"),
)


@functools.cache
def on(platform: str, kind: str) -> Layout:
    """Layout of the tiny model on 4x2 devices of this kind, which need not exist."""
    mesh = AbstractMesh(
        (4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2,
        abstract_device=AbstractDevice(device_kind=kind, num_cores=None, platform=platform),
    )  # fmt: skip
    return make_layout(Transformer, Config.tiny(), mesh, "fsdp_tp", batch_size=8)
