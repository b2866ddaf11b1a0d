"""SigLIP B/16 with a global batch of 32,768 pairs, compiled for 64 v5e chips. Needs the extra `tpu-aot`.

python -m tests.by_hand.long_batch   # takes five minutes
"""

import dataclasses

from recipes.common import entries
from recipes.common.report import report
from recipes.common.report.hlo import sent_by_kind
from recipes.instruments.bench.common import make_step
from recipes.instruments.plan.compilers import TooLarge, compile_step, topology
from zoo.siglip import Config, Siglip

CHIPS = 64
PAIRS = 32_768


def main() -> None:
    mesh = topology("v5e", {"data": CHIPS})
    for exchange in ("gather", "ring"):
        config = dataclasses.replace(Config.b16(), dtype="bfloat16", pairs=exchange)
        step = make_step(
            config, "fsdp", mesh, PAIRS, 0,
            model=Siglip, example=entries.example("siglip", config),
        )  # fmt: skip
        compiled = compile_step(step, "v5e", f"b16 {exchange}")
        if isinstance(compiled, TooLarge):
            print(exchange, compiled.text)
            continue
        sent = sent_by_kind(compiled.as_text(), CHIPS)
        print(
            exchange, "peak", report.size(report.peak_memory(compiled)),
            {kind: report.size(count) for kind, count in sent.items()},
            "total", report.size(sum(sent.values())),
        )  # fmt: skip


if __name__ == "__main__":
    main()
