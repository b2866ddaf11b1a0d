"""Cycles of a compiled TPU program: what each operation takes, by the compiler's own estimates.

The TPU compiler notes the cycles that it expects of each operation, except of kernels and
collectives. A kernel takes a cycle per bundle (an instruction of all units of a core) and grid step;
the compiler writes the bundles to files, see `dump_bundles`. A collective takes its bytes at the
links' rate, and the core waits for what it doesn't compute meanwhile.
"""

import dataclasses
import math
import os
import pathlib
import re
from typing import NamedTuple

import numpy as np

from recipes.common.report import hlo, program
from recipes.instruments.plan.hardware import Devices
from recipes.instruments.plan.instructions import executed, source, traffic
from zoo.kernels.splash import may_see

# Kind of TPU → cores of a device that share an operation.
CORES = {"v4": 2, "v5p": 2}
# Kind of TPU → FLOPs of a device's matrix units in a cycle. The peak divided by it is the clock rate.
FLOPS_PER_CYCLE = {"v4": 2**18, "v5e": 2**17, "v5p": 2**18, "v6e": 2**19, "tpu7x": 2**19}

EXPOSED = "exposed"  # the core waits for it
OVERLAPPED = "overlapped"  # started and awaited by separate operations
FUSED = "fused with a matmul"


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective of a program."""

    kind: str
    overlap: str  # EXPOSED, OVERLAPPED or FUSED
    sent: float  # bytes that a device sends per step
    group: int  # devices that take part
    times: int  # executions per step
    source: str  # the operation it comes from, as JAX names it
    # Cycles that the core computes from the start to the end of one execution; infinite if it is
    # fused with what is computed.
    meanwhile: float
    rows: int = 0  # of the buffer of a ragged-all-to-all, which data fills


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation that a core executes by itself: an instruction, or a fusion of several."""

    name: str
    kind: str  # "matmul", "copy", "fusion", …
    source: str  # the operation it comes from, as JAX names it
    times: int  # executions per step
    cycles: float  # of one execution
    flops: float  # of its matmuls
    bytes: float  # of operands and results in the device's memory


@dataclasses.dataclass(frozen=True)
class Grid:
    """The blocks of a splash kernel."""

    rows: int  # of a batch, which visit the same blocks
    heads: int
    query: int  # positions of a block
    key: int
    seen: np.ndarray  # bool [blocks of queries, of keys]: what the kernel computes of one document

    def blocks(self, ids_BT: np.ndarray | None = None) -> float:
        """Blocks that a head computes of a row of one document, or of rows with these segment ids."""
        if ids_BT is None or self.query != self.key or ids_BT.shape[1] != self.length:
            return int(self.seen.sum())
        groups = ids_BT[: len(ids_BT) // self.rows * self.rows].reshape(-1, self.rows, self.length)
        share = [np.asarray(may_see(None, ids, ids, 0, self.query)) for ids in groups]
        return float((share & self.seen).sum() / len(groups))

    @property
    def length(self) -> int:
        """Positions of a row."""
        return len(self.seen) * self.query


@dataclasses.dataclass(frozen=True)
class Products:
    """The blocks of a grouped matmul, jax.lax.ragged_dot."""

    rows: int  # of its buffer
    experts: int
    block: int  # rows of a block
    each: int  # steps for a block of rows
    branches: int  # versions of a step in the kernel, of which one runs

    def steps(self, rows: float = math.inf) -> int:
        """Steps for an even load of so many rows; the first of an expert are seldom a block's first."""
        return (math.ceil(min(rows, self.rows) / self.block) + self.experts - 1) * self.each


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A Pallas kernel of a program."""

    name: str
    times: int  # executions per step
    steps: float  # of its grid that compute something
    bundles: int  # of the compiled kernel; 0: unknown
    grid: Grid | None = None  # of splash attention
    products: Products | None = None  # of a grouped matmul


class Reading(NamedTuple):
    """What a compiled program executes in a step."""

    operations: list[Operation]
    kernels: list[Kernel]
    transfers: list[Transfer]


class Cycles(NamedTuple):
    """Cycles of a step on one device."""

    operations: dict[str, float]  # kind → cycles
    kernels: float
    exposed: float  # waiting for collectives

    @property
    def total(self) -> float:
        return sum(self.operations.values()) + self.kernels + self.exposed


def has_cycles(devices: Devices) -> bool:
    """Whether there is a compiler that estimates cycles for these devices."""
    return devices.kind in FLOPS_PER_CYCLE and devices.groups == 1


def clock(devices: Devices) -> float:
    """Cycles per second."""
    return devices.hardware.peak / FLOPS_PER_CYCLE[devices.kind]


def count(reading: Reading, devices: Devices) -> Cycles:
    """Adds up a program's cycles on these devices."""
    by_kind: dict[str, float] = {}
    for operation in reading.operations:
        executed = operation.times * operation.cycles
        by_kind[operation.kind] = by_kind.get(operation.kind, 0) + executed
    kernels = sum(kernel_cycles(kernel, devices) for kernel in reading.kernels)
    waited = sum(waiting(transfer, devices) for transfer in reading.transfers)
    return Cycles(by_kind, kernels, waited)


def kernel_cycles(kernel: Kernel, devices: Devices) -> float:
    """Cycles of all executions of a kernel, whose grid the cores of a device share."""
    return kernel.times * kernel.steps * kernel.bundles / CORES.get(devices.kind, 1)


def transfer_cycles(transfer: Transfer, devices: Devices) -> float:
    """Cycles of all executions of a transfer at the links' rate."""
    return transfer.sent / devices.send_rate(transfer.group) * clock(devices)


def waiting(transfer: Transfer, devices: Devices) -> float:
    """Cycles in which the core waits for all executions of a transfer."""
    return max(0.0, transfer_cycles(transfer, devices) - transfer.times * transfer.meanwhile)


def roofline(operation: Operation, devices: Devices) -> tuple[float, str]:
    """The fewest cycles of an execution of an operation, and its bound: "compute" or "memory"."""
    compute = operation.flops / FLOPS_PER_CYCLE[devices.kind]
    memory = operation.bytes / devices.hardware.bandwidth * clock(devices)
    return max((compute, "compute"), (memory, "memory"))


# ---- bundles -------------------------------------------------------------------------------------


def dump_bundles(folder: pathlib.Path) -> None:
    """Makes the TPU compiler write bundles to a folder; call it before the first compilation."""
    flags = (
        f"--xla_jf_dump_to={folder}",
        "--xla_jf_dump_llo_text=true",
        "--xla_jf_dump_hlo_text=false",
        "--xla_jf_dump_llo_pass_label_regex=final_bundles",
    )
    already = os.environ.get("LIBTPU_INIT_ARGS", "")
    os.environ["LIBTPU_INIT_ARGS"] = " ".join((already, *flags)).strip()


def read_bundles(folder: pathlib.Path) -> dict[str, int]:
    """Name of an instruction → its bundles, from files that `dump_bundles` asked for.

    Removes them: programs call their kernels alike, so the next one's must not mix with these.
    """
    bundles = {}
    for path in folder.glob("*-schedule-analysis_final_bundles.txt"):
        name = re.fullmatch(r"\d+-(.*)-\d+-schedule-analysis_final_bundles.txt", path.name)
        number = re.search(r"total scheduled bundles:\s*(\d+)", path.read_text())
        if name and number:
            bundles[name[1]] = int(number[1])
        path.unlink()
    return bundles


def write_program(text: str | None, path: pathlib.Path, bundles: dict[str, int]) -> None:
    """Writes a program's HLO text, with its kernels' bundles as comments before it."""
    assert text is not None, "this backend has no HLO text"
    kernels = (f"// {name}: {n} bundles\n" for name, n in bundles.items() if name in text)
    path.write_text("".join(kernels) + text)


def read_program(path: pathlib.Path) -> tuple[str, dict[str, int]]:
    """(HLO text, bundles of its kernels) from a file that `write_program` wrote, or any HLO text."""
    text = path.read_text()
    bundles = re.findall(r"^// (\S+): (\d+) bundles$", text, re.M)
    return text, {name: int(n) for name, n in bundles}


# ---- the program's text --------------------------------------------------------------------------


def read_hlo(text: str | None, devices: Devices, bundles: dict[str, int]) -> Reading:
    """Reads all that one execution of a compiled TPU program executes.

    Args:
      text: the program's HLO, in the order of its schedule.
      devices: that it is compiled for.
      bundles: name of a kernel's instruction → its bundles.
    """
    assert text is not None, "this backend has no HLO text"
    computations, entry = program.computations(text)
    kernels = _kernels(computations, bundles)
    reading = Reading([], [], [])

    def visit(name: str, times: int) -> float:
        """Reads a computation that a step executes so often; the cycles of one execution."""
        now = 0.0
        started: dict[str, _Started] = {}  # by the name of the start or update
        lines = computations.get(name, [])
        results = {m[1]: m[2] for m in map(program.INSTRUCTION.match, lines) if m}
        for line in lines:
            match = program.INSTRUCTION.match(line)
            if not match:
                continue
            operation = match[3]
            if operation == "while":
                body = dict(program.called(line))["body"]
                trips = program.trips(line, lines, computations)
                now += trips * visit(body, times * trips)
            elif operation in ("conditional", "call"):
                for _, branch in program.called(line):
                    now += visit(branch, times)
            elif match[1] in kernels:
                once = kernels[match[1]]
                reading.kernels.append(dataclasses.replace(once, times=times))
                now += kernel_cycles(once, devices)
            elif operation.endswith(("-update", "-done")):
                transfer = started.pop(program.operands(line)[0], None)
                if transfer and operation.endswith("-update"):  # the operands are there only now
                    started[match[1]] = transfer._replace(since=now)
                elif transfer:
                    transfer.end(reading, now)
            else:
                inside = executed(line, computations)
                is_matmul = any(x[3] in ("convolution", "dot") for x, _ in inside)
                performed = _transfers(match, lines, inside, is_matmul, times, devices.count)
                if operation.endswith("-start"):
                    started[match[1]] = _Started(len(reading.transfers), len(performed), now)
                reading.transfers.extend(performed)
                if cycles := re.search(r'"estimated_cycles":"(\d+)"', line):
                    now += int(cycles[1])
                    reading.operations.append(
                        Operation(
                            name=match[1],
                            kind=_kind(operation, is_matmul, inside),
                            source=source(line),
                            times=times,
                            cycles=int(cycles[1]),
                            flops=sum(_flops(x, within) for x, within in inside),
                            bytes=traffic(match, results, computations),
                        )
                    )
        return now

    visit(entry, 1)
    return reading


class _Started(NamedTuple):
    """Transfers of a reading that go on."""

    first: int  # their index among all
    count: int
    since: float  # cycles of the computation until they start

    def end(self, reading: Reading, now: float) -> None:
        """Notes the cycles that the core has computed since they started."""
        for i in range(self.first, self.first + self.count):
            meanwhile = (now - self.since) / self.count
            reading.transfers[i] = dataclasses.replace(reading.transfers[i], meanwhile=meanwhile)


def _kernels(computations: dict[str, list[str]], bundles: dict[str, int]) -> dict[str, Kernel]:
    """Name of an instruction → its kernel, executed once, with the bundles of an equal one if it has
    none: the compiler writes these only once.
    """
    calls = {
        match[1]: match
        for lines in computations.values()
        for match in map(program.INSTRUCTION.match, lines)
        if match and "tpu_custom_call" in match.string
    }
    kernels, of_equal = {}, {}
    for name, match in calls.items():
        grid, products = _grid(match.string), _products(match)
        steps, count = 1, bundles.get(name, 0)
        if grid:
            steps = grid.rows * grid.heads * grid.blocks()
        if products:
            steps, count = products.steps(), count // products.branches
        kernels[name] = Kernel(name, 1, steps, count, grid, products)
        equal = _unnumbered(name), steps, products
        of_equal[equal] = max(of_equal.get(equal, 0), count)
    return {
        name: dataclasses.replace(
            x, bundles=x.bundles or of_equal[_unnumbered(name), x.steps, x.products]
        )
        for name, x in kernels.items()
    }


def _unnumbered(name: str) -> str:
    """An instruction's name without the number by which it differs from others."""
    return re.sub(r"\.\d+$", "", name)


def with_even_load(reading: Reading, choices: float, rows: float) -> Reading:
    """What a step executes if each expert gets equally many rows.

    Args:
      choices: rows of all experts of a device; rows: that each device sends and receives for them.
    """
    kernels = [
        dataclasses.replace(kernel, steps=products.steps(choices))
        if (products := kernel.products)
        else kernel
        for kernel in reading.kernels
    ]
    transfers = [
        dataclasses.replace(transfer, sent=transfer.sent * min(1.0, rows / transfer.rows))
        if transfer.rows
        else transfer
        for transfer in reading.transfers
    ]
    return reading._replace(kernels=kernels, transfers=transfers)


def with_documents(reading: Reading, ids_BT: np.ndarray) -> Reading:
    """What a step executes of rows with these segment ids: our kernels skip blocks without a pair."""
    kernels = [
        dataclasses.replace(kernel, steps=grid.rows * grid.heads * grid.blocks(ids_BT))
        if (grid := kernel.grid)
        else kernel
        for kernel in reading.kernels
    ]
    return reading._replace(kernels=kernels)


def _kind(operation: str, is_matmul: bool, inside: list[tuple[re.Match, list[str]]]) -> str:
    if is_matmul:
        return "matmul"
    gathered = [x[3] for x, _ in inside if re.fullmatch(hlo.KINDS, x[3])]
    return gathered[0] if gathered else operation.removesuffix("-start").removesuffix("-done")


def _transfers(
    match: re.Match,
    lines: list[str],
    inside: list[tuple[re.Match, list[str]]],
    is_matmul: bool,
    times: int,
    devices: int,
) -> list[Transfer]:
    """The collectives that an instruction, or the computation that it calls, performs or starts."""
    name, result, operation = match.groups()
    started = operation.endswith("-start") or "AsyncCollectiveStart" in str(inside)
    scatters = "calls=%all-reduce-scatter" in match.string
    transfers = []
    for inner, within in inside:
        collective = hlo.performed(inner, lines if inner[1] == name else within)
        if collective is None:
            continue
        if scatters:  # an all-reduce fused with a slice
            size, shapes = program.size(result)
            collective = collective._replace(kind="reduce-scatter", bytes=size, shapes=shapes)
        overlap = FUSED if is_matmul else OVERLAPPED if started else EXPOSED
        collective = collective._replace(times=times)
        transfers.append(
            Transfer(
                kind=collective.kind,
                overlap=overlap,
                sent=hlo.sent(collective, devices),
                group=_group(collective, devices),
                times=times,
                source=collective.source or source(match.string),
                meanwhile=0.0 if overlap == EXPOSED else math.inf,
                rows=collective.shapes[0][0] if collective.kind == "ragged-all-to-all" else 0,
            )
        )
    return transfers


def _group(collective: hlo.Collective, devices: int) -> int:
    """Devices that take part; a permute names pairs, not the ring that they form."""
    if collective.kind == "collective-permute":
        return devices
    return hlo.group_size(collective.groups, devices)


def _flops(match: re.Match, lines: list[str]) -> float:
    """FLOPs of a matmul, which the TPU compiler writes as a convolution; 0 for other instructions."""
    if match[3] != "convolution":
        return 0.0
    line = match.string
    sides = [program.size(program.result_of(x, lines))[1] for x in program.operands(line)[:2]]
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line)
    (out,) = program.size(match[2])[1]
    if not labels or not all(sides):
        return 0.0
    (data,), (weights,) = sides
    total = 2.0 * math.prod(n for n, x in zip(out, labels[3], strict=True) if not x.isdecimal())
    total *= weights[labels[2].index("i")]
    window = dict(
        re.findall(r"(\w+)=([\dx_\-]+)", (re.search(r"window=\{(.*?)\}", line) or [""] * 2)[1])
    )
    for i in range(len(labels[3]) - 2):
        part = {name: text.split("x")[i] for name, text in window.items()}
        total *= _window_products(
            positions=out[labels[3].index(str(i))],
            taps=weights[labels[2].index(str(i))],
            length=data[labels[1].index(str(i))],
            stride=int(part.get("stride", 1)),
            pad=int(part.get("pad", "0_0").rpartition("_")[0]),
            lhs_dilate=int(part.get("lhs_dilate", 1)),
            rhs_dilate=int(part.get("rhs_dilate", 1)),
        )
    return total


def _window_products(
    positions: int, taps: int, length: int, stride: int, pad: int, lhs_dilate: int, rhs_dilate: int
) -> int:
    """Products along one dim of a convolution, without those with padding or holes.

    The compiler writes batch dims of matmuls as windows that meet one number each.
    """
    at = np.arange(positions)[:, None] * stride + np.arange(taps)[None] * rhs_dilate - pad
    inside = (at >= 0) & (at < (length - 1) * lhs_dilate + 1) & (at % lhs_dilate == 0)
    return int(inside.sum())


def _grid(line: str) -> Grid | None:
    """The grid of a splash kernel; None for other kernels.

    The kernel's first operand says for each block of queries and visited block of keys whether to
    compute. Its values are not in the program, so this takes a causal mask.
    """
    kernel = re.search(r"splash_mha_(fwd|dkv|dq)", line)
    shapes = re.search(r"operand_layout_constraints=\{(.*?\})\}", line)
    if not kernel or not shapes:
        return None
    masks, tensors = [], []
    for array in program.arrays(shapes[1]):
        ((*dims,),) = program.size(array)[1]
        (masks if re.match(r"s(8|16|32)\[\d+,\d+,\d+\]", array) else tensors).append(dims)
    dims = max(tensors, key=lambda dims: math.prod(dims[:-2]))
    length = max(dims[-2] for dims in tensors)
    suffix = "" if kernel[1] == "fwd" else f"_{kernel[1]}"
    query = _block(line, f"block_q{suffix}")
    key = _block(line, f"block_kv{suffix}")
    q = np.arange(length // query)[:, None]
    k = np.arange(length // key)[None]
    last = ((q + 1) * query - 1) // key
    first = k * key // query
    seen = (q >= first) & (q < first + masks[0][-2])
    if kernel[1] != "dkv":
        seen = (k <= last) & (k > last - masks[0][-1])
    return Grid(math.prod(dims[:-3]), dims[-3], query, key, seen)


def _products(match: re.Match) -> Products | None:
    """The blocks of a grouped matmul [M, K] · [E, K, N], or of [M, K] · [M, N] for each expert; None
    for other kernels.
    """
    tiling = re.search(r'ragged_dot_tiling="(\d+),(\d+),(\d+)"', match.string)
    layouts = re.search(r"operand_layout_constraints=\{(.*?\})\}", match.string)
    if not tiling or not layouts:
        return None
    block, *blocks = map(int, tiling.groups())
    *_, x, other = (program.size(array)[1][0] for array in program.arrays(layouts[1]))
    by_rows = len(other) == 2
    E, *dims = program.size(match[2])[1][0] if by_rows else other
    along = [-(-size // length) for size, length in zip(dims, blocks, strict=True)]
    branches = 2 if along[0] > 1 and not by_rows else 1  # the last part of K is masked
    return Products(x[0], E, block, math.prod(along), branches)


def _block(line: str, name: str) -> int:
    number = re.search(rf"\W{name}\W+(\d+)", line)
    assert number, f"a splash kernel without {name}"
    return int(number[1])
