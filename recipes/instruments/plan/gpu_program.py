"""Least times of a compiled GPU program: what each kernel must compute, read and write.

A kernel takes at least its matmuls' FLOPs at the peak of their format, and its operands and results
at the memory's bandwidth. Both are in the program, so neither needs a GPU.
"""

import dataclasses
import math
import pathlib
import re

from recipes.common.report import program
from recipes.common.report.hlo import Frame, source_frames
from recipes.instruments.plan.hardware import Hardware
from recipes.instruments.plan.instructions import executed, traffic

# Kind of kernel → names of functions that its operations come from; the innermost call decides.
FUNCTIONS = {
    "norms": r"apply_norm|RMSNorm|LayerNorm",
    "rotary embeddings": r"rotate|Decoder\.tables",
    "around attention": r"attend\b|cudnn|Attention\.__call__",
    "MLPs' activations": r"MLP\.__call__",
    "loss": r"cross_entrop|_nats|_sums_and_gradients",
    "embeddings": r"look_up|Decoder\.(begin|embed_tokens)",
    "residual stream": r"add_output",
    "weights in use": r"in_use|use_layer|use_weights|table_copies",
    "optimizer": r"apply_gradients|apply_updates|update_fn|TrainStep",
}
RECURRENCES = "recurrences"  # of layers with a state, by the folder of their functions
STACKS = "stacks of a scan"  # slices of weights and activations, read and written
# Operations that launch no kernel.
FREE = "parameter|constant|tuple|get-tuple-element|bitcast|after-all|partition-id"
# FLOPs of the matmuls of attention, in multiples of those of its scores and values.
PASSES = {"fmhaSoftmax": (1, 1), "fmhaSoftmaxBackward": (3, 2)}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of a program."""

    name: str
    # A key of FUNCTIONS, RECURRENCES, STACKS, "attention", "matmuls of bfloat16", "copies", "others".
    kind: str
    times: int  # executions per step
    flops: float  # of the matmuls of one execution
    rate: float  # FLOP/s of their format
    bytes: float  # that one execution reads and writes

    def least(self, hardware: Hardware) -> float:
        """The fewest seconds of all executions."""
        compute = self.flops / self.rate if self.flops else 0.0
        return self.times * max(compute, self.bytes / hardware.bandwidth)


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a compiled GPU program executes in a step."""

    kernels: list[Kernel]
    waits: int  # times that the host waits for the GPU to say whether a loop goes on


def read_hlo(text: str | None, hardware: Hardware) -> Reading:
    """Reads all kernels that one execution of a compiled program launches.

    A loop whose length depends on data (further documents than one pass of attention takes) counts as
    not entered, and a branch as its longest one. Attention counts as for one document a row.
    """
    assert text is not None, "this backend has no HLO text"
    computations, entry = program.computations(text)
    frames = source_frames(text)

    def visit(name: str, times: int) -> Reading:
        reading = Reading([], 0)
        lines = computations.get(name, [])
        results = {m[1]: m[2] for m in map(program.INSTRUCTION.match, lines) if m}
        for line in lines:
            match = program.INSTRUCTION.match(line)
            if not match or re.fullmatch(FREE, match[3]) or match[3].endswith("-done"):
                continue
            called = dict(program.called(line))
            if match[3] == "while" and "known_trip_count" in line:
                trips = program.trips(line, lines, computations)
                inner = [visit(called["body"], times * trips)]
            elif match[3] == "while":
                inner = [Reading([], times)]
            elif match[3] == "conditional":
                branches = [visit(branch, times) for _, branch in program.called(line)]
                longest = max(branches, key=lambda x: sum(y.least(hardware) for y in x.kernels))
                inner = [longest, Reading([], times)]
            elif match[3] in ("call", "async-start"):
                inner = [visit(branch, times) for _, branch in program.called(line)]
            else:
                kernel = _kernel(match, times, results, computations, frames, hardware)
                inner = [Reading([kernel], 0)]
            kernels = [kernel for part in inner for kernel in part.kernels]
            waits = reading.waits + sum(part.waits for part in inner)
            reading = Reading(reading.kernels + kernels, waits)
        return reading

    return visit(entry, 1)


def _kernel(
    match: re.Match,
    times: int,
    results: dict[str, str],
    computations: dict[str, list[str]],
    frames: dict[str, list[Frame]],
    hardware: Hardware,
) -> Kernel:
    """The kernel that an instruction launches."""
    line = match.string
    products = [_product(x, lines) for x, lines in executed(line, computations)]
    products = [x for x in products if x]
    attention = re.search(r'custom_call_target="__cudnn\$(fmha\w+)"', line)
    if attention:
        kind, flops, rate = "attention", _attention(line, attention[1]), hardware.peak
    elif products:
        formats = {name for _, name in products}
        name = "float32" if "float32" in formats else min(formats)
        kind, flops = f"matmuls of {name}", sum(flops for flops, _ in products)
        rate = _rate(name, hardware)
    else:
        kind, flops, rate = _kind(match, frames), 0.0, hardware.peak
    return Kernel(match[1], kind, times, flops, rate, traffic(match, results, computations))


def _rate(name: str, hardware: Hardware) -> float:
    """FLOP/s of matmuls of this format. NVIDIA's data sheets give TF32 half of bfloat16's."""
    if name == "float32":
        return hardware.peak / 2
    return hardware.rate({"int8": "int8", "float8": "fp8"}.get(name, ""))


def _kind(match: re.Match, frames: dict[str, list[Frame]]) -> str:
    """The kind of a kernel without matmuls: by its own name, or by the calls that led to it."""
    called = dict(program.called(match.string)).get("calls", "")
    if re.search(r"dynamic[_\-](update[_\-])?slice", f"{match[1]} {called}"):
        return STACKS
    if re.match(r"(loop_|input_)?(copy|transpose)", match[1]) or match[3].startswith("copy"):
        return "copies"
    frame = re.search(r"stack_frame_id=(\d+)", match.string)
    for call in frames.get(frame[1] if frame else "", []):
        if pathlib.PurePath(call.file).parent.parts[-2:] == ("zoo", "recurrent"):
            return RECURRENCES
        for kind, functions in FUNCTIONS.items():
            if re.search(functions, call.function):
                return kind
    return "others"


def _product(match: re.Match, lines: list[str]) -> tuple[float, str] | None:
    """(FLOPs, format of the operands) of a matmul; None for other instructions."""
    if match[3] != "dot" and "__cublas$" not in match.string:
        return None
    left = program.result_of(program.operands(match.string)[0], lines)
    dims = re.search(r'lhs_contracting_dim(?:s=|ension\w*": ?)[\[{]([\d,"]*)', match.string)
    if not left or not dims:
        return None
    ((*sizes,),) = program.size(left)[1]
    inner = math.prod(sizes[int(i)] for i in re.findall(r"\d+", dims[1]))
    made = program.arrays(match[2])[0]
    name = left.partition("[")[0]
    short = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "s8": "int8"}
    return 2.0 * math.prod(program.size(made)[1][0]) * inner, short.get(name, name.rstrip("mfnuz"))


def _attention(line: str, pass_: str) -> float:
    """FLOPs of cuDNN's attention over the positions that its mask leaves, for one document a row."""
    shapes = re.search(r"operand_layout_constraints=\{(.*?\})\}", line)
    assert shapes, "cuDNN's attention without its operands' shapes"
    query, _, value = (program.size(x)[1][0] for x in program.arrays(shapes[1])[:3])
    batch, length, heads, width = query
    keys = value[1]
    window = int((re.search(r'"sliding_window_length": ?"?(\d+)', line) or [0, 0])[1])
    pairs = length * keys
    if "CAUSAL" in line:
        pairs = sum(min(i + 1, window or keys, keys) for i in range(length))
    scores, values = PASSES[pass_]
    return 2.0 * batch * heads * pairs * (scores * width + values * value[3])
