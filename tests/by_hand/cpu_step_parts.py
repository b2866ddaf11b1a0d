"""Where the time of a step on CPU devices goes, for recipes/instruments/results/cpu.md.

    python -m tests.by_hand.cpu_step_parts --mesh=4x2

Prints milliseconds of threads by kind of operation, as JAX's profiler times them: the sum over threads,
with their waiting for each other and for a core.
"""

import collections
import dataclasses
import pathlib
import re
import tempfile

import jax

from recipes.common.runtime import UserError, make_mesh
from recipes.common.runtime.flags import flag
from recipes.common.runtime.start import start
from recipes.instruments.bench.common import ONE_DEVICE, Table, Training, machine, make_step
from zoo.llama_relatives import RULES
from zoo.sizes import TRANSFORMER

STEPS = 10


@dataclasses.dataclass(frozen=True)
class Flags:
    mesh: str = flag("1x1", "Mesh of simulated devices.")
    rules: str = flag("fsdp_tp", "Sharding rules.", choices=RULES)


def main(flags: Flags) -> None:
    mesh = make_mesh(flags.mesh)
    rules = flags.rules if mesh.size > 1 else ONE_DEVICE
    training = Training(make_step(TRANSFORMER["small"](), rules, mesh, 16, 128, segments=True))
    for _ in range(3):
        training()
    kinds = kinds_of_operations(training.compiled.as_text())
    milliseconds: dict[str, float] = collections.Counter()
    for name, duration in traced(training):
        if name in kinds:
            milliseconds[kinds[name]] += duration / STEPS
    if not milliseconds:
        raise UserError("JAX's profiler shows no operations here; run it on CPU devices")
    table = Table("kind of operation", "thread ms a step", "share")
    for kind, duration in sorted(milliseconds.items(), key=lambda item: -item[1]):
        share = duration / sum(milliseconds.values())
        table.row(kind, f"{duration:.0f}", f"{share:.0%}")
    print(machine())


def traced(training: Training):
    """Yields (name, milliseconds) of each event of STEPS steps."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                training()
        (path,) = pathlib.Path(folder).glob("**/*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for event in line.events:
                    yield event.name, event.duration_ns / 1e6


def kinds_of_operations(hlo: str) -> dict[str, str]:
    """Name → kind, of the operations of a compiled program."""
    bodies = dict(re.findall(r"^(?:%|ENTRY %)?([\w.\-]+) \(.*?\{\n(.*?)^\}", hlo, re.S | re.M))
    kinds = {}
    for match in re.finditer(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\S+ ([\w\-]+)\(.*)$", hlo, re.M):
        name, line, operation = match.groups()
        if operation in ("while", "conditional", "call", "tuple", "parameter"):
            continue  # has others inside, or takes no time
        called = re.search(r"calls=%?([\w.\-]+)", line)
        body = bodies.get(called[1], "") if called else ""
        kinds.setdefault(name, kind_of(name, operation, line, body))
    return kinds


def kind_of(name: str, operation: str, line: str, body: str) -> str:
    shapes = line.split("metadata")[0] + body
    scores = "BKM" in line or re.search(r"\[\d+,\d+,(1,)?128,128\]", shapes)
    product = operation == "dot" or " dot(" in body
    if operation.startswith(("all-", "collective", "reduce-scatter")):
        return "collectives, and waiting for other devices"
    if scores:
        return "attention: products" if product else "attention: softmax and masks"
    if product:
        return "products with weights"
    if "broadcast" in name and "wrapped" in name:
        return "zeros for what layers keep"
    if re.search("copy|transpose|dynamic-slice|dynamic-update-slice", name):
        return "copies"
    return "norms, rotary embeddings, activations, the loss, AdamW"


if __name__ == "__main__":
    start(main, Flags())
