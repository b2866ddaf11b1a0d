"""Meshes over several TPU slices, GPU nodes and processes: the outermost axes run across them."""

import itertools

import jax
import numpy as np
import pytest
from jax.experimental import mesh_utils

from recipes.common.runtime import slice_groups
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.mesh import arrange, make_mesh, parse, suggest
from recipes.common.sharding.layout import Layout
from tests.support.devices import cpus, gpus, tpus

pytestmark = pytest.mark.promise("slices")

# Devices, and for some meshes over them which group has the devices along each axis: a letter for
# each, in the order of the mesh. An axis that stays inside has one letter only.
ARRANGED = [
    ("2 slices of 16", tpus(2, 4, 4), "32", {"data": "a" * 16 + "b" * 16}),
    ("2 slices of 16", tpus(2, 4, 4), "8x4", {"data": "aaaabbbb", "model": "aaaa"}),
    ("2 slices of 16", tpus(2, 4, 4), "2x16x1", {"data": "ab", "fsdp": "a" * 16, "model": "a"}),
    ("4 slices of 16", tpus(4, 4, 4), "2x2x16", {"data": "ac", "fsdp": "ab", "model": "a" * 16}),
    ("4 slices of 16", tpus(4, 4, 4), "4x16x1", {"data": "abcd", "fsdp": "a" * 16, "model": "a"}),
    ("2 slices of 2x2x4", tpus(2, 2, 2, 4, "TPU v5p"), "4x8", {"data": "aabb", "model": "a" * 8}),
    ("2 nodes of 8", gpus(2, 8), "4x4", {"data": "aabb", "model": "aaaa"}),
    ("2 nodes of 8", gpus(2, 8, 1), "2x8", {"data": "ab", "model": "a" * 8}),
    ("4 processes of 2", cpus(4, 2), "4x2", {"data": "abcd", "model": "aa"}),
    ("4 processes of 2", cpus(4, 2), "2x2x2", {"data": "ac", "fsdp": "ab", "model": "aa"}),
    ("4 processes of 2", cpus(4, 2), "data=2,seq=4", {"data": "ac", "seq": "aabb"}),
    ("2 nodes of 8", gpus(2, 8), "data=1,seq=16", {"data": "a", "seq": "a" * 8 + "b" * 8}),
    (
        "2 slices of 16",
        tpus(2, 4, 4),
        "data=1,seq=8,model=4",
        {"data": "a", "seq": "aaaabbbb", "model": "aaaa"},
    ),
]


@pytest.mark.parametrize(
    ("devices", "text", "along"),
    [case[1:] for case in ARRANGED],
    ids=[f"{a}, {c}" for a, _, c, _ in ARRANGED],
)
def test_the_outermost_axes_run_across_and_the_others_stay_inside(devices, text, along):
    axes = parse(text)
    mesh = arrange(axes, devices)
    assert dict(mesh.shape) == axes
    assert {d.id for d in mesh.devices.flat} == {d.id for d in devices}
    names = {
        id(d): "abcd"[i] for i, group in enumerate(slice_groups.groups(devices)) for d in group
    }
    found = {}
    for place, axis in enumerate(axes):
        line = np.moveaxis(mesh.devices, place, 0).reshape(axes[axis], -1)[:, 0]
        found[axis] = "".join(names[id(device)] for device in line)
    assert found == along
    if devices[0].platform != "cpu" and len(set(names.values())) > 1:  # as JAX's own does it
        parts = slice_groups.across(axes, len(slice_groups.groups(devices)))
        inner = [size // part for size, part in zip(axes.values(), parts.values(), strict=True)]
        jaxs = mesh_utils.create_hybrid_device_mesh(
            inner,
            list(parts.values()),
            devices,
            allow_split_physical_axes="lite" in devices[0].device_kind,
        )
        assert (mesh.devices == jaxs).all()


@pytest.mark.parametrize(
    ("devices", "text", "message"),
    [
        (tpus(2, 4, 4), "1x32", "'model' between 2 slices of 16 devices, but only the outermost may be; try --mesh=2x16"),
        (tpus(4, 4, 4), "2x32x1", "'fsdp' between 4 slices of 16 devices, but only the outermost may be; try --mesh=4x16x1"),
        (gpus(2, 8), "data=1,fsdp=16", "'fsdp' between 2 nodes of 8 devices, but only the outermost may be; try --mesh=data=2,fsdp=8"),
        (gpus(3, 8), "2x12", "'model' between 3 nodes of 8 devices, but only the outermost may be; try --mesh=6x4"),
        (gpus(2, 3), "3x2", "'model' between 2 nodes of 3 devices, but only the outermost may be; try --mesh=6x1"),
        (gpus(2, 8), "data=1,seq=1,model=16", "'model' between 2 nodes of 8 devices, but only the outermost may be; try --mesh=data=2,seq=1,model=8"),
        (cpus(2, 4), "1x8", "'model' between 2 processes of 4 devices, but only the outermost may be; try --mesh=2x4"),
    ],
    ids=str,
)  # fmt: skip
def test_a_mesh_that_splits_an_inner_axis_is_refused_with_a_suggestion(devices, text, message):
    with pytest.raises(UserError) as caught:
        arrange(parse(text), devices)
    assert str(caught.value) == f"--mesh={text} would divide axis {message}"
    better = parse(message.rpartition("--mesh=")[2])
    assert dict(arrange(better, devices).shape) == better


def test_groups_of_unequal_sizes_are_refused():
    with pytest.raises(UserError, match=r"slices of 4 and 8 devices .* use slices of one size"):
        arrange({"data": 12}, tpus(2, 2, 4)[4:])


def test_suggested_meshes_can_be_arranged():
    for groups, each, axes in itertools.product((1, 2, 3, 4), (1, 3, 4, 8), (1, 2, 3)):
        arrange(parse(suggest(groups * each, axes, groups)), gpus(groups, each))


def test_local_devices_keep_their_order():
    """The order is jax.make_mesh's, so losses and checkpoints stay bit-equal."""
    for sizes in ((8,), (4, 2), (1, 8), (2, 2, 2)):
        names = ("data", "fsdp", "model")[: len(sizes)]
        mesh = make_mesh(",".join(f"{n}={s}" for n, s in zip(names, sizes, strict=True)))
        assert mesh == jax.make_mesh(sizes, names, devices=jax.devices())
    one = tpus(1, 4, 4)
    whole = jax.make_mesh((4, 4), ("data", "model"), devices=one).devices
    assert (arrange({"data": 4, "model": 4}, one).devices == whole).all()


# ---- what a process reads --------------------------------------------------------------------------


class Held:
    """The part of a layout that process_rows reads: each device's rows of a batch."""

    process_rows = Layout.process_rows

    def __init__(self, devices: np.ndarray, rows: int, process: int):
        self.batch_size, self._devices, self._process = rows, devices, process

    def sharding(self, axis: str) -> "Held":
        assert axis == "batch"
        return self

    def addressable_devices_indices_map(self, shape):
        step = shape[0] // len(self._devices)
        return {
            device: (slice(i * step, (i + 1) * step),)
            for i, line in enumerate(self._devices)
            for device in line
            if device.process_index == self._process
        }


@pytest.mark.parametrize(
    "devices",
    [tpus(1, 4, 4), tpus(2, 4, 4), tpus(1, 2, 2, 4, "TPU v5p"), gpus(2, 8)],
    ids=str,
)
def test_processes_on_rings_read_the_rows_of_their_devices(devices):
    for inner in (1, 2, 4):
        mesh = arrange({"data": len(devices) // inner, "model": inner}, devices).devices
        rows = {}
        for process in {device.process_index for device in devices}:
            mine = Held(mesh, 2 * len(devices), process).process_rows
            rows[process] = mine.tolist()
            assert rows[process] == sorted(set(rows[process]))
        each = 2 * inner  # rows of a shard
        for i, line in enumerate(mesh):
            for device in line:
                assert {*range(i * each, (i + 1) * each)} <= {*rows[device.process_index]}
        assert set(itertools.chain(*rows.values())) == set(range(2 * len(devices)))
