"""Grouped matmuls by the TPU compiler, for a table of recipes/instruments/results.

    python -m tests.by_hand.grouped_matmuls v5p 16 65536 2048 768

Args: kind of TPU, then E, M, D and F of [M, D] · [E, D, F]. Needs the extra tpu-aot.
"""

import pathlib
import re
import sys
import tempfile

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from recipes.instruments.plan.compilers import topology
from recipes.instruments.plan.hardware import HARDWARE
from recipes.instruments.plan.step_cycles import CORES, FLOPS_PER_CYCLE, Products, dump_bundles
from zoo.experts.matmul import product_in_blocks


def longest_branch(folder: pathlib.Path) -> int:
    """Bundles of the longest stretch of a kernel between control targets that has a matmul."""
    (path,) = (x for x in folder.glob("*ragged-dot-none*final_bundles.txt") if "anal" not in x.name)
    stretches = []
    for line in path.read_text().splitlines():
        if address := re.match(r"\s*(0x[0-9a-f]+|0)\s+(L[HBE]|P[BF]|CT)?\s*:", line):
            if address[2] or not stretches:
                stretches.append([])
            stretches[-1].append(line)
    return max(len(lines) for lines in stretches if any("vmatmul" in line for line in lines))


def traffic(rows: float, length: int, out: int, blocks: tuple[int, ...], by_rows: bool, E: int):
    """Bytes that a kernel reads and writes, as its blocks change; rows: with those read twice."""
    _, K, N = blocks
    parts, columns = -(-length // K), -(-out // N)
    if by_rows:
        return 2 * (rows * parts * K * columns + rows * columns * N * parts + E * length * out)
    reads = E if parts == 1 else rows / blocks[0]  # of a column of blocks of weights
    return 2 * (rows * parts * K * columns + columns * N * reads * parts * K + rows * out)


def main() -> None:
    kind = sys.argv[1]
    E, M, D, F = map(int, sys.argv[2:])
    folder = pathlib.Path(tempfile.mkdtemp())
    dump_bundles(folder)
    chips = topology(kind, {"data": 8 if kind == "tpu7x" else 4}).devices[:1]
    everywhere = NamedSharding(Mesh(chips, ("data",), axis_types=(AxisType.Auto,)), PartitionSpec())

    def array(*shape: int, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    x_MD, w_EDF, sizes_E = array(M, D), array(E, D, F), array(E, dtype=jnp.int32)
    clock = HARDWARE[kind].peak / FLOPS_PER_CYCLE[kind]
    fewest = 2 * M * D * F / FLOPS_PER_CYCLE[kind]
    for name, product in (("the compiler's", jax.lax.ragged_dot), ("ours", product_in_blocks)):

        def of_rows(x, w, sizes, grad, product=product):
            return jax.vjp(lambda x: product(x, w, sizes), x)[1](grad)

        def of_weights(x, w, sizes, grad, product=product):
            return jax.vjp(lambda w: product(x, w, sizes), w)[1](grad)

        for step, arrays, length, out in (
            (product, (x_MD, w_EDF, sizes_E), D, F),
            (of_rows, (x_MD, w_EDF, sizes_E, array(M, F)), F, D),
            (of_weights, (x_MD, w_EDF, sizes_E, array(M, F)), D, F),
        ):
            for path in folder.iterdir():
                path.unlink()
            text = jax.jit(step).lower(*arrays).compile().as_text()
            named = re.findall(r'ragged_dot_tiling="([\d,]+)"', text)[-1]
            blocks = tuple(map(int, named.split(",")))
            each = -(-length // blocks[1]) * -(-out // blocks[2])
            steps = Products(M, E, blocks[0], each, 1).steps()
            compute = steps * longest_branch(folder) / CORES.get(kind, 1)
            rows = steps / each * blocks[0]
            sent = traffic(rows, length, out, blocks, step is of_weights, E)
            memory = sent / HARDWARE[kind].bandwidth * clock
            print(f"{name}, {step.__name__}: blocks {named}, compute {compute / fewest:.2f} and "
                  f"memory {memory / fewest:.2f} of the fewest cycles", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
