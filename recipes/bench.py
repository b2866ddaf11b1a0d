"""Benchmarks: each WORD prints a Markdown table with hardware and versions.

    python -m recipes.bench cpu           # the train step against the machine's own matmul
    python -m recipes.bench host          # overhead of the Python training loop
    python -m recipes.bench meshes        # every strategy on every mesh, against one device
    python -m recipes.bench collectives   # bytes sent per step against the textbook, for TPUs and GPUs
    python -m recipes.bench slices        # bytes sent between TPU slices, against the textbook
    python -m recipes.bench experts       # communication and FLOPs of a mixture of experts, for TPUs
    python -m recipes.bench memory        # compiled peak memory of a step, against an estimate
    python -m recipes.bench cycles        # cycles of a compiled TPU step, by operation
    python -m recipes.bench roofline      # least times of a compiled GPU step, by kind of kernel
    python -m recipes.bench depth         # compile time of 80 layers against 8
    python -m recipes.bench gpu           # kernel checks, tokens/s and MFU, with a sweep
    python -m recipes.bench data          # throughput of the input pipeline and of tokenizing
    python -m recipes.bench checkpoint    # cost of saving while training; restoring against reading
    python -m recipes.bench start         # time from the command to the first step

--help after the word lists its flags. Ratios come from interleaved measurements in one run.
"""

import sys

from recipes.common.runtime.start import choose, instrument

# Word → module and function. Modules are imported on demand: `gpu`, `collectives`, `slices` and
# `memory` also run without the libraries for data.
WORDS = {
    "cpu": "speed.cpu",
    "host": "running.host",
    "meshes": "speed.meshes",
    "collectives": "compiled.collectives",
    "slices": "slices.slices",
    "experts": "experts.experts",
    "memory": "memory.memory",
    "cycles": "cycles.cycles",
    "roofline": "roofline.roofline",
    "depth": "compiled.depth",
    "gpu": "gpu.gpu",
    "data": "running.data",
    "checkpoint": "running.checkpoints",
    "start": "running.start",
}

if __name__ == "__main__":
    asked = {
        word: instrument(*f"bench.{WORDS[word]}".rsplit(".", 1))
        for word in sys.argv[1:2]
        if word in WORDS
    }
    choose(asked, f"name a benchmark: python -m recipes.bench {'|'.join(WORDS)}")
