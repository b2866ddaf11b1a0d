"""Compares the planner's memory and bytes with the TPU and GPU compilers'; 30 minutes, no devices.

    python -m tests.by_hand.plan_cases cases.jsonl      # the same command again does what is left

Needs the extra tpu-aot or gpu-aot, and compiles the cases of those that are there. Prints the table of recipes/instruments/results/planner.md from all lines of the file.
"""

import json
import pathlib
import sys

import jax

from recipes.common import entries
from recipes.common.report import report
from recipes.common.report.hlo import sent_by_kind
from recipes.instruments.plan.command import make_program
from recipes.instruments.plan.compilers import TooLarge, compile_step, missing_compiler
from recipes.instruments.plan.hardware import parse_devices
from tests.support.plan_estimates import Case, estimated

DENSE = [  # rules, mesh on 16, mesh on 256
    ("dp", "16", "256"),
    ("fsdp", "16", "256"),
    ("tp", "4x4", "32x8"),
    ("fsdp_tp", "4x4", "32x8"),
    ("hsdp_tp", "2x4x2", "8x16x2"),
    ("tp_sp", "4x4", "32x8"),
    ("fsdp_tp_sp", "4x4", "32x8"),
    ("cp", "data=4,seq=4", "data=64,seq=4"),
    ("fsdp_cp", "data=4,seq=4", "data=64,seq=4"),
    ("fsdp_cp_tp", "data=2,seq=4,model=2", "data=16,seq=4,model=4"),
    ("pp", "data=4,pipe=4", "data=64,pipe=4"),
    ("fsdp_pp", "data=4,pipe=4", "data=64,pipe=4"),
    ("fsdp_pp_tp", "data=2,pipe=4,model=2", "data=16,pipe=4,model=4"),
]
EXPERTS = [
    ("ep", "data=2,expert=8"),
    ("fsdp", "16"),
    ("fsdp_ep", "data=2,expert=8"),
    ("fsdp_ep_tp", "data=2,expert=4,model=2"),
    ("fsdp_ep_cp", "data=2,seq=2,expert=4"),
    ("fsdp_ep_pp", "data=2,pipe=2,expert=4"),
]
# Compiled until they were scheduled: recipes/instruments/results/tpu.md.
DROPLESS = [
    *(Case(entry, size, "v5p:16", "fsdp_ep", "data=2,expert=8", 8_192, layers=4, dropless=True)
      for entry, size in (("moe", "mixtral_8x7b"), ("moe", "qwen3_30b_a3b"),
                          ("qwen3_next", "80b_a3b"))),
    *(Case("moe", size, "v5p:256", "fsdp_ep", "data=32,expert=8", 8_192, dropless=True)
      for size in ("qwen3_30b_a3b", "glm45_air")),
    Case("deepseek", "671b", "v5p:256", "fsdp_ep", "data=4,expert=64", 4_096, dropless=True),
    *(Case("moe", "mixtral_8x7b", "v5p:16", rules, mesh, T, remat, rows, 1, 2, dropless=True)
      for rules, mesh, T, remat, rows in (
          ("fsdp_ep", "data=2,expert=8", 4_096, "dispatched", 16),
          ("fsdp_ep_tp", "data=2,expert=4,model=2", 4_096, "sublayers", 16),
          ("fsdp_ep_cp", "data=2,seq=2,expert=4", 8_192, "dispatched", 8),
          ("fsdp_ep_pp", "data=2,pipe=2,expert=4", 4_096, "dispatched", 16))),
    Case("moe", "mixtral_8x7b", "v5p:256", "fsdp_ep_tp", "data=16,expert=8,model=2", 4_096,
         "sublayers", 256, 1, 2, dropless=True),
]  # fmt: skip
CASES = [
    *(Case("transformer", "1b", "v5p:16", rules, mesh, 4_096) for rules, mesh, _ in DENSE),
    *(Case("moe", "mixtral_8x7b", "v5p:16", rules, mesh, 4_096, "dispatched", layers=4)
      for rules, mesh in EXPERTS),
    *(Case("transformer", "8b", "v5p:256", rules, mesh, 8_192) for rules, _, mesh in DENSE
      if rules != "dp" and rules != "cp"),
    *(Case("transformer", "8b", kind, "fsdp", mesh, 8_192, remat)
      for kind, mesh in (("v5e:64", "64"), ("v6e:64", "64"), ("v5p:8", "8"))
      for remat in ("full", "dots")),
    Case("transformer", "1b", "v6e:8", "fsdp_tp", "4x2", 8_192),
    Case("transformer", "1b", "v5e:8", "tp_sp", "4x2", 4_096, "gathered"),
    Case("transformer", "124m", "v5e:8", "dp", "8", 1_024, "dots", rows=64),
    Case("transformer", "124m", "v5e:16", "fsdp_tp", "8x2", 1_024, "none", rows=64),
    Case("transformer", "8b", "v5p:64", "fsdp", "64", 8_192, "dots", rows=512, accumulate=4),
    Case("transformer", "70b", "v5p:256", "fsdp", "256", 4_096),
    Case("transformer", "70b", "v5p:256", "fsdp_tp", "64x4", 4_096),
    Case("gemma3", "1b", "v5e:16", "fsdp", "16", 4_096),
    Case("qwen3_next", "80b_a3b", "v5p:16", "fsdp_cp", "data=1,seq=16", 131_072, rows=1, layers=4),
    *DROPLESS,
    *(Case("transformer", "1b", "h100:8", rules, mesh, 4_096)
      for rules, mesh in (("dp", "8"), ("fsdp", "8"), ("tp", "2x4"), ("fsdp_tp", "4x2"),
                          ("fsdp_cp", "data=2,seq=4"))),
    Case("transformer", "8b", "h100:16", "fsdp", "16", 8_192),
]  # fmt: skip


def measure(case: Case) -> dict:
    found = estimated(case)
    compiled = compile_step(
        make_program(entries.model(case.entry), found), found.devices.kind, f"{case}"
    )
    if isinstance(compiled, TooLarge):
        return {"compiled_memory": compiled.bytes, "compiled_sent": None}
    sent = sent_by_kind(compiled.as_text(), found.devices.count)
    return {
        "compiled_memory": report.peak_memory(compiled),
        "compiled_sent": sum(sent.values()),
        "compiled_by": sent,
    }


def main(path: pathlib.Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    lines = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
    done = {Case(*x["case"]) for x in lines}
    for case in CASES:
        kind = parse_devices(case.devices).kind
        if case in done or missing_compiler(kind):
            continue
        try:
            found = measure(case)
        except Exception as error:  # one case must not end the others
            found = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        lines.append({"case": list(case)} | found)
        with path.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
    table(lines)


def table(lines: list[dict]) -> None:
    print(
        "| model | devices | rules | mesh | row | remat | memory | compiled | ratio | sent | compiled | ratio |"
    )
    print("|---|---|---|---|---:|---|---:|---:|---:|---:|---:|---:|")
    for line in lines:
        case = Case(*line["case"])
        name = f"{case.size}, {case.layers} layers" if case.layers else case.size
        if "failed" in line:
            print(case, line["failed"], file=sys.stderr)
            continue
        found = estimated(case)
        memory, peak = found.peak, line["compiled_memory"]
        cells = [name, case.devices, case.rules, case.mesh, f"{case.seq_len:,}", case.remat]
        cells += [report.size(memory), report.size(peak), f"{memory / peak:.2f}"]
        sent, real = found.links + found.network, line["compiled_sent"]
        cells += [report.size(sent), report.size(real), f"{sent / real:.2f}"] if real else ["-"] * 3
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
