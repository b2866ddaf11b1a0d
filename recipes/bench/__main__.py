"""Figures, measured here and now: each word prints a Markdown table with hardware and versions.

    python -m recipes.bench cpu           # the step against the machine's own matmul
    python -m recipes.bench host          # the loop's own cost
    python -m recipes.bench meshes        # every table on every mesh, against one device
    python -m recipes.bench collectives   # bytes sent a step against the textbook, for TPU slices
    python -m recipes.bench memory        # compiled peak of a step, and the sum that explains it
    python -m recipes.bench depth         # compile time of 80 layers against 8
    python -m recipes.bench gpu           # tokens/s and MFU, with a sweep
    python -m recipes.bench data          # the input pipeline alone
    python -m recipes.bench checkpoint    # what a save costs training; restoring against reading
    python -m recipes.bench start         # from the command to the first step

--help after the word lists its flags. Ratios are of figures taken in turn in one run.
"""

import dataclasses
import sys

from recipes.bench import compiled, running, speed
from recipes.common.cli import start
from recipes.common.errors import UserError

COMMANDS = {
    "cpu": (speed.cpu, speed.CpuFlags()),
    "host": (running.host, running.HostFlags()),
    "meshes": (speed.meshes, speed.MeshesFlags()),
    "collectives": (compiled.collectives, compiled.CollectivesFlags()),
    "memory": (compiled.memory, compiled.MemoryFlags()),
    "depth": (compiled.depth, compiled.DepthFlags()),
    "gpu": (speed.gpu, speed.GpuFlags()),
    "data": (running.data, running.DataFlags()),
    "checkpoint": (running.checkpoints, running.CheckpointFlags()),
    "start": (running.start, running.StartFlags()),
}


@dataclasses.dataclass(frozen=True)
class NoFlags:
    pass


def no_command(_) -> None:
    raise UserError(f"say what to measure: python -m recipes.bench {'|'.join(COMMANDS)}")


if __name__ == "__main__":
    word = sys.argv.pop(1) if sys.argv[1:] and not sys.argv[1].startswith("-") else ""
    start(*COMMANDS.get(word, (no_command, NoFlags())))
