"""Hardware that the benchmarks compile for, and the mesh of a strategy on a number of chips."""

import dataclasses
import itertools
import math

from recipes.common import entries
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.flags import flag
from recipes.common.runtime.mesh import describe
from recipes.common.sharding.rules import used_axes
from recipes.common.sharding.shape import trace_shape
from recipes.instruments.bench.common import version
from recipes.instruments.plan.compilers import missing_compiler
from recipes.instruments.plan.hardware import NODE, USABLE

TPUS = {kind: (16, 256) for kind in ("v4", "v5e", "v5p", "v6e")}  # kind → numbers of chips
GPUS = ("h100", "h200")
KINDS = [*TPUS, *GPUS, "cpu"]
KINDS_HELP = "TPUs, NVIDIA GPUs, or cpu: simulated devices"


def check_targets(kinds: list[str], counts: list[int]) -> None:
    """Raises UserError if programs can't be compiled for these chips, before a table begins."""
    for kind, chips in itertools.product(kinds, counts):
        if kind == "cpu":
            continue
        gpu = kind in GPUS
        if missing_compiler(kind):
            whose, extra = ("NVIDIA GPU", "gpu") if gpu else ("TPU", "tpu")
            raise UserError(
                f"kind {kind} needs the {whose} compiler, which runs on any Linux machine; install "
                f"it with pip install -e '.[{extra}-aot]', or use kind cpu"
            )
        if not (chips <= NODE or chips % NODE == 0 if gpu else chips in TPUS[kind]):
            known = "1 to 8, or nodes of 8" if gpu else " or ".join(map(str, TPUS[kind]))
            raise UserError(f"--chips has {chips}, but {kind} needs {known}; use one of these")


@dataclasses.dataclass(frozen=True)
class MeshFlags:
    """Chips along each mesh axis but data, which has the rest."""

    model: int = flag(
        0, "Chips along model; 0: the largest of 8, 4 and 2 that divides the kv heads and fits next to "
        "pipe, seq or expert, or 1 if the rules have replica groups.", at_least=0,
    )  # fmt: skip
    group: int = flag(16, "Chips along fsdp, if the rules use it.", at_least=1)
    pipe: int = flag(4, "Chips along pipe, if the rules use it.", at_least=1)
    seq: int = flag(4, "Chips along seq, if the rules use it.", at_least=1)
    expert: int = flag(8, "Chips along expert, if the rules use it.", at_least=1)

    def axes(
        self, size: str, chips: int, strategy: str, entry: str = "transformer"
    ) -> dict[str, int]:
        """Mesh axis → chips along it. Raises UserError if the number of chips does not allow it."""
        zoo = entries.zoo_file(entry)
        used, inner, stated = used_axes(zoo.RULES[strategy]), {}, []
        groups = "fsdp" in used
        along = {axis: getattr(self, axis) for axis in ("pipe", "seq", "expert") if axis in used}
        shape = trace_shape(entries.model(entry), entries.sizes(entry)[size]())
        heads = shape.attention.kv_heads if shape.attention else 1
        model = self.model or (
            1 if groups else math.gcd(8, heads, max(chips // math.prod(along.values()), 1))
        )
        if groups:  # replica groups: each has one copy of the weights
            inner["fsdp"] = min(self.group, max(chips // model, 1))
            stated.append(f"--group={inner['fsdp']}")
        for axis, size in along.items():
            inner[axis] = size
            stated.append(f"--{axis}={size}")
        if "model" in used:
            inner["model"] = model
            stated.append(f"--model={model}")
        data, over = divmod(chips, math.prod(inner.values()))
        if over:
            wrong = "--model" if chips % model else stated[0].partition("=")[0]
            raise UserError(
                f"--chips={chips} is not divisible by {' times '.join(stated)} (rules {strategy!r}); "
                f"use a different {wrong}"
            )
        return {"data": data} | inner


def mesh_name(axes: dict[str, int]) -> str:
    """A mesh's sizes, with the names of its axes if `pipe`, `seq` or `expert` is one.

    >>> mesh_name({"data": 4, "model": 2}), mesh_name({"data": 2, "seq": 4})
    ('4x2', 'data=2,seq=4')
    """
    return (
        describe(axes) if {"pipe", "seq", "expert"} & {*axes} else "x".join(map(str, axes.values()))
    )


def caveats(kinds: list[str]) -> list[str]:
    """Limits of compiling without the hardware: at most one line, for the end of a table."""
    if not any(kind in GPUS for kind in kinds):
        return []
    return [
        f"GPU programs by jax-cuda13-plugin {version('jax-cuda13-plugin')} with no GPU there: not "
        "autotuned, without cuDNN's and cuBLAS's workspace, to read and not to run. A step is said to "
        f"fit if its peak is at most {USABLE:.0%} of the memory."
    ]
