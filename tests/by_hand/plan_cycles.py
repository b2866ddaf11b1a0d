"""Compares the planner's step times with the TPU compiler's cycles; an hour, no devices.

    python -m tests.by_hand.plan_cycles tests/golden/plan_cycles.jsonl  # does what the file lacks

Needs the extra tpu-aot. Prints the table of recipes/instruments/results/planner.md from all lines of the file.
"""

import json
import pathlib
import sys
import tempfile

import jax

from recipes.common import entries
from recipes.instruments.plan import step_cycles
from recipes.instruments.plan.calibration import FACTORS, Factors
from recipes.instruments.plan.command import make_program
from recipes.instruments.plan.compilers import TooLarge, compile_step
from recipes.instruments.plan.hardware import Devices
from tests.support.plan_estimates import Case, estimated, ratio

CASES = [
    Case("transformer", "8b", "v5p:16", "fsdp", "16", 8_192),
    Case("transformer", "8b", "v5p:16", "fsdp", "16", 8_192, layers=4),
    Case("transformer", "8b", "v5p:16", "fsdp_tp", "4x4", 8_192, rows=16),
    Case("transformer", "8b", "v5p:16", "fsdp_tp_sp", "4x4", 8_192, rows=16),
    Case("transformer", "8b", "v6e:16", "fsdp", "16", 8_192, layers=4),
    Case("transformer", "8b", "tpu7x:16", "fsdp", "16", 8_192, layers=4),
    Case("transformer", "1b", "v5e:16", "fsdp", "16", 8_192),
    Case("transformer", "124m", "v5p:16", "fsdp", "16", 1_024, rows=128),
    Case("transformer", "124m", "v5e:16", "fsdp", "16", 2_048, rows=64),
    Case("transformer", "8b", "v5p:64", "fsdp", "64", 8_192, layers=4),
    Case("transformer", "8b", "v5p:256", "fsdp", "256", 8_192, layers=4),
    Case("moe", "mixtral_8x7b", "v5p:16", "fsdp_ep", "data=2,expert=8", 8_192, layers=4),
    Case("moe", "mixtral_8x7b", "v5p:16", "fsdp", "16", 8_192, layers=4),
    Case("transformer", "70b", "v5p:256", "fsdp", "256", 8_192, layers=2),
    Case("transformer", "8b", "v5p:16", "fsdp_cp", "data=1,seq=16", 131_072, rows=1, layers=4),
]

KINDS = [name for name in Factors._fields if name != "fill"]


def by_kind(reading: step_cycles.Reading, devices: Devices) -> dict[str, float]:
    """A field of Factors, or "waiting" for collectives → cycles of a step."""
    counted = step_cycles.count(reading, devices)
    sums = {"attention": counted.kernels, "waiting": counted.exposed}
    for kind, executed in counted.operations.items():
        name = kind if kind in ("matmul", "copy") else "elementwise"
        sums[name] = sums.get(name, 0) + executed
    return sums


def measure(case: Case, folder: pathlib.Path) -> dict[str, float]:
    plan = estimated(case)
    compiled = compile_step(
        make_program(entries.model(case.entry), plan), plan.devices.kind, f"{case}"
    )
    assert not isinstance(compiled, TooLarge), compiled
    bundles = step_cycles.read_bundles(folder)
    return by_kind(step_cycles.read_hlo(compiled.as_text(), plan.devices, bundles), plan.devices)


def main(path: pathlib.Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    lines = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
    done = [x["case"] for x in lines]
    folder = pathlib.Path(tempfile.mkdtemp())
    step_cycles.dump_bundles(folder)
    for case in CASES:
        if [*case] not in done:
            lines.append({"case": [*case], "cycles": measure(case, folder)})
            with path.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    table(lines)


def table(lines: list[dict]) -> None:
    print("| model, devices, rules and mesh | row |", " | ".join(KINDS), "| step |")
    print("|---|---:" + "|---:" * len(KINDS) + "|---:|")
    for line in lines:
        case, counted = Case(*line["case"]), line["cycles"]
        plan = estimated(case)
        name = f"{case.size}, {case.layers} layers" if case.layers else case.size
        cells = [f"{name}, {case.devices}, `{case.rules}` on {case.mesh}", f"{case.seq_len:,}"]
        factors = FACTORS[plan.devices.kind]._asdict()
        for kind in plan.operations:
            least = plan.operations[kind] / factors[kind] * step_cycles.clock(plan.devices)
            cells.append(f"{counted[kind] / least:.2f}")
        print(f"| {' | '.join(cells)} | {ratio(plan, counted):.2f} |", flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
