"""The attention kernels of every entry, strategy and dtype in steps compiled for 8 H100s; no GPU needed.

    python -m tests.by_hand.gpu_kernels rows.jsonl            # the same command again does what is left
    python -m tests.by_hand.gpu_kernels rows.jsonl moe bert   # these entries alone
    python -m tests.by_hand.gpu_kernels rows.jsonl --lower    # no more than lowered, which takes a tenth of the time

Needs the extra gpu-aot. Rows are packed, sizes real, and layers all there. Prints a table; a program
without a kernel, or with a tile of zoo/kernels/flash.py, fails (exit code 1).
"""

import collections
import dataclasses
import json
import pathlib
import re
import sys
import time
from typing import Any, NamedTuple

import jax

from recipes.common import entries
from recipes.common.report import report
from recipes.common.runtime import UserError
from recipes.common.sharding.rules import used_axes
from recipes.common.sharding.shape import trace_shape
from recipes.instruments.bench.common import Step, make_step
from recipes.instruments.bench.targets import mesh_name
from recipes.instruments.plan.compilers import topology

# The smallest published size of each entry, and more where attention differs: soft caps, windows to
# both sides.
SIZES = [
    ("transformer", "124m"),
    ("gpt2", "124m"),
    ("gemma3", "4b"),
    ("gemma3", "gemma2_2b"),
    ("bert", "bert_base"),
    ("bert", "modern_base"),
    ("vit", "s16"),
    ("siglip", "b16"),
    ("gpt_oss", "20b"),
    ("deepseek", "16b"),
    ("moe", "olmoe_7b_a1b"),
    ("qwen3_next", "qwen35_35b_a3b"),
    ("mlp", "small"),
    ("dot_relu_dot", "small"),
]
FIRST = ("fsdp", "fsdp_tp", "fsdp_cp", "fsdp_ep", "fsdp_pp", "hsdp_tp")  # defaults of their meshes
WITHOUT_ATTENTION = ("mlp", "dot_relu_dot")
WITHOUT_KERNEL = ("vit", *WITHOUT_ATTENTION)  # ViT computes the scores of its 197 positions at once
ROWS, SEQ_LEN = 16, 512
KERNELS = {  # name → what a program calls; of flash, a product of its tiles
    "cudnn": r"__cudnn\$fmhaSoftmaxBackward",
    "triton": "_attention_dkv",
    "flash": "XTGH,XSH->XTGS",
}


class Case(NamedTuple):
    entry: str
    size: str
    dtype: str
    rules: str
    context: str = "auto"


def cases() -> list[Case]:
    """All cases, those of default strategies first."""
    every = []
    for entry, size in SIZES:
        for rules in entries.zoo_file(entry).RULES:
            ways = ["auto", "ring"] if rules in ("cp", "fsdp_cp") else ["auto"]
            dtypes = ("float32",) if entry in WITHOUT_ATTENTION else ("bfloat16", "float32")
            every += [
                Case(entry, size, dtype, rules, context) for dtype in dtypes for context in ways
            ]

    def rank(case: Case) -> int:
        return FIRST.index(case.rules) if case.rules in FIRST else len(FIRST)

    return sorted(every, key=lambda x: (rank(x), x.dtype, x.rules, x.context))


def make(case: Case) -> Step:
    model = entries.model(case.entry)
    config = entries.sizes(case.entry)[case.size]()
    shape = trace_shape(model, config)
    if case.entry not in WITHOUT_ATTENTION:
        config = dataclasses.replace(config, dtype=case.dtype)
    if case.context != "auto":
        config = dataclasses.replace(config, context=case.context)
    rules = entries.zoo_file(case.entry).RULES[case.rules]
    inner = {
        axis: 2 for axis in ("fsdp", "pipe", "seq", "expert", "model") if axis in used_axes(rules)
    }
    mesh = topology("h100", {"data": 8 // 2 ** len(inner)} | inner)
    text = shape.vocab_size > 0
    example = None if text else entries.example(case.entry, config)
    length = SEQ_LEN if text else 0
    return make_step(config, case.rules, mesh, ROWS, length, text, model, example=example)


def measure(case: Case, lower: bool) -> dict[str, Any]:
    start = time.process_time()
    step = make(case)
    row: dict[str, Any] = {"mesh": mesh_name(dict(step.layout.mesh.shape))}
    if lower:
        text = step.lower().as_text(debug_info=True)
    else:
        compiled = step.compile()
        row["peak"] = report.peak_memory(compiled)
        text = compiled.as_text()
    kernels = [name for name, called in KERNELS.items() if re.search(called, text)]
    return row | {"kernels": kernels, "cpu_s": time.process_time() - start}


def fault(case: Case, row: dict[str, Any]) -> str:
    """What is wrong with a measured row; "" if nothing is."""
    if "failed" in row:
        return row["failed"]
    if "refused" in row:
        return ""
    if "flash" in row["kernels"] or not (row["kernels"] or case.entry in WITHOUT_KERNEL):
        return f"has {' and '.join(row['kernels']) or 'no kernel'}"
    return ""


def main(path: pathlib.Path, only: list[str], lower: bool) -> int:
    jax.config.update("jax_platforms", "cpu")
    rows = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
    done = {tuple(x["case"]) for x in rows if lower or "kernels" not in x or "peak" in x}
    for case in cases():
        if case in done or (only and case.entry not in only):
            continue
        try:
            row = measure(case, lower)
        except UserError as error:  # modern_base has 21 like layers, which no two stages share
            row = {"refused": str(error)[:200]}
        except Exception as error:  # one case must not end the others
            row = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        rows.append({"case": list(case)} | row)
        with path.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        print(*case, row, file=sys.stderr, flush=True)
    return table({Case(*row["case"]): row for row in rows})


def table(rows: dict[Case, dict[str, Any]]) -> int:
    """Prints a line for each entry, size and dtype, then the faults. Returns the exit code."""
    print(
        "| entry | dtype | kernel | strategies | of them compiled | CPU s of one | largest peak |"
    )
    print("|---|---|---|---:|---:|---:|---:|")
    groups = collections.defaultdict(list)
    for case, row in rows.items():
        if not fault(case, row) and "refused" not in row:
            ring = " (ring)" if case.context == "ring" else ""
            kernel = f"{' '.join(row['kernels']) or '-'}{ring}"
            groups[f"{case.entry} {case.size}", case.dtype, kernel].append(row)
    for key, group in groups.items():
        compiled = [row for row in group if "peak" in row]
        seconds = [row["cpu_s"] for row in compiled]
        cells = [*key, len(group), len(compiled), "-", "-"]
        if compiled:
            cells[-2] = f"{min(seconds):.0f} to {max(seconds):.0f}"
            cells[-1] = report.size(max(row["peak"] for row in compiled))
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    faults = [(*case, why) for case, row in rows.items() if (why := fault(case, row))]
    for line in faults:
        print(*line, flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--lower"]
    sys.exit(main(pathlib.Path(words[0]), words[1:], "--lower" in sys.argv))
