"""Least times of a GPU's kernels, from a program whose numbers are worked out by hand."""

import pytest

from recipes.instruments.plan.gpu_program import read_hlo
from recipes.instruments.plan.hardware import HARDWARE
from tests.conftest import ROOT

pytestmark = pytest.mark.promise("bench")
H100 = HARDWARE["h100"]

# As the compiler writes it: a matmul, a loop of three that cuts a layer's weights from a stack and
# writes a row of another, attention of 256 positions, a loop and a branch that depend on data.
PROGRAM = (ROOT / "tests" / "golden" / "gpu_kernels.hlo").read_text()


def read(window: int = 0):
    reading = read_hlo(
        PROGRAM.replace('"sliding_window_length": 0', f'"sliding_window_length": {window}'), H100
    )
    return {kernel.name: kernel for kernel in reading.kernels}, reading.waits


def test_kernels_by_hand():
    kernels, waits = read()
    read_and_written = {name: (x.kind, x.times, x.bytes) for name, x in kernels.items()}
    assert read_and_written == {
        "gemm": ("matmuls of bfloat16", 1, 2 * (64 * 32 + 32 * 16) + 4 * 64 * 16),
        "norm": ("norms", 1, 4 * 64 * 16 + 2 * 64 * 16),
        "fmha": (
            "attention",
            1,
            2 * 2 * 256 * (4 * 64 + 2 * 64 + 2 * 32 + 4 * 32) + 4 * 2 * 4 * 256,
        ),
        # One layer of the stack is read, not the stack; its index too. The loop runs three times.
        "weights": ("stacks of a scan", 3, 4 * 100 + 4 + 4 * 100),
        # The row is written to its place; the rest of the stack stays where it is.
        "loop_dynamic_update_slice_fusion": ("stacks of a scan", 3, 4 * 100 + 4 + 4 * 100),
        "copy.1": ("copies", 1, 2 * 4 * 64 * 16),
    }
    assert waits == 2  # the loop over data, and the branch


def test_a_recurrence_is_known_by_its_folder():
    """Its backward pass runs inside the loss's, whose functions would decide."""
    text = PROGRAM.replace('"zoo/layers.py"', '"clone/zoo/recurrent/ssd.py"')
    text = text.replace("RMSNorm.__call__", "run").replace("Layer.__call__", "cross_entropy")
    kinds = {kernel.name: kernel.kind for kernel in read_hlo(text, H100).kernels}
    assert kinds["norm"] == "recurrences"
    text = text.replace("zoo/recurrent/ssd.py", "recurrent/zoo/ssd.py")
    kinds = {kernel.name: kernel.kind for kernel in read_hlo(text, H100).kernels}
    assert kinds["norm"] == "loss"


def test_least_times_by_hand():
    kernels, _ = read()
    pairs = 256 * 257 / 2
    flops = {"gemm": 2 * 64 * 16 * 32, "fmha": 2 * 2 * 4 * pairs * (64 + 32)}
    for name, kernel in kernels.items():
        assert kernel.flops == flops.get(name, 0)
        compute = flops.get(name, 0) / 989e12
        assert kernel.least(H100) == kernel.times * max(compute, kernel.bytes / 3.35232e12)


def test_a_window_leaves_fewer_pairs():
    every, _ = read()
    windowed, _ = read(window=16)
    pairs = 256 * 16 - 15 * 16 / 2
    assert windowed["fmha"].flops == every["fmha"].flops * pairs / (256 * 257 / 2)
