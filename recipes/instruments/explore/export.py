"""The sharding explorer: one HTML file that shows what every strategy does to every array.

The page holds, as data, what it shows: figures.py computes them by the formulas of reports and plans.
"""

import base64
import dataclasses
import json
import pathlib
import sys
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from flax import nnx

from recipes.common import entries
from recipes.common.runtime.mesh import parse
from recipes.common.sharding.abstract import abstract_model
from recipes.common.sharding.rules import Rules
from recipes.common.sharding.shape import Shape, shape_of
from recipes.instruments.explore.arrays import activations, cache, loss_batch
from recipes.instruments.explore.causes import causes
from recipes.instruments.explore.figures import Job, all_meshes, figures
from recipes.instruments.plan.hardware import HARDWARE, USABLE

ASSETS = pathlib.Path(__file__).parent
RUN = "run"  # the size of a run that is shown
SIZES = {  # of an entry, besides the default one; --size adds another
    "transformer": ["small", "70b"],
    "moe": ["mixtral_8x7b"],
    "gemma3": ["4b"],
}
DEVICES = (8, 16, 64, 256)
TIMES = (1, 8)  # of the flags' rows of a batch and tokens of a row


def default_size(entry: str) -> str:
    """8b if there is one, else the largest."""
    sizes = entries.sizes(entry)
    return "8b" if "8b" in sizes else next(reversed(sizes))


class Shown(NamedTuple):
    """The state that the page begins with (the first eight fields), and a run to add."""

    entry: str
    size: str  # a key of SIZES, or RUN
    device: str  # a key of HARDWARE
    devices: int
    mesh: str
    rules: str  # a key of RULES, or the name of a table to add
    batch_size: int
    seq_len: int
    table: Rules
    config: Any = None  # of RUN
    accumulate: int = 1
    offload: str = ""


def page(names: Iterable[str], shown: Shown, source: str) -> str:
    """The whole page.

    Args:
      names: the entries to choose from; `shown` has one of them.
      source: what links to lines of the zoo begin with.
    """
    platform = HARDWARE[shown.device].platform
    chips = {kind: x for kind, x in HARDWARE.items() if x.platform == platform}
    counts = sorted({*DEVICES, shown.devices})
    data = {
        "entries": {name: tables(name, shown, counts) for name in names},
        "chips": {
            kind: {
                "name": x.name,
                "memory": x.memory,
                "counts": [n for n in counts if n <= x.most or not x.torus],
            }
            for kind, x in chips.items()
        },
        "usable": USABLE,
        "rows": [shown.batch_size * n for n in TIMES],
        "source": source,
        "start": {name: str(getattr(shown, name)) for name in Shown._fields[:8]},
    }
    packed = zlib.compress(json.dumps(data, separators=(",", ":")).encode(), level=9)
    parts = {name: (ASSETS / name).read_text() for name in ("style.css", "data.js", "page.js")}
    html = (ASSETS / "page.html").read_text()
    for name, part in (parts | {"data": base64.b64encode(packed).decode()}).items():
        html = html.replace(f"{{{{{name}}}}}", part)
    return html


def tables(name: str, shown: Shown, counts: list[int]) -> dict[str, Any]:
    """An entry's rules and where they stand, and the arrays and figures of its sizes."""
    model = entries.model(name)
    zoo = sys.modules[model.__module__]
    sizes = entries.sizes(name)
    configs = {size: sizes[size]() for size in (*SIZES.get(name, ()), default_size(name))}
    rules, is_shown = dict(zoo.RULES), name == shown.entry
    if is_shown:
        configs |= {shown.size: shown.config or sizes[shown.size]()}
        rules |= {shown.rules: shown.table}
    meshes = all_meshes(rules, counts)
    if is_shown and parse(shown.mesh) not in meshes[shown.devices][shown.rules]:
        meshes[shown.devices][shown.rules].insert(0, parse(shown.mesh))
    return {
        "rules": rules,
        "in_use": model.axes.in_use,
        "uneven": model.axes.uneven,
        "causes": causes(zoo, model.axes),
        "sizes": {
            size: export_size(model, size, config, shown, rules, meshes)
            for size, config in configs.items()
        },
    }


def export_size(
    model: type,
    size: str,
    config: Any,
    shown: Shown,
    rules: dict[str, Rules],
    meshes: Mapping[int, Mapping[str, list[dict[str, int]]]],
) -> dict[str, Any]:
    """The logical axes and shapes of a size's arrays, and the figures of its layouts."""
    own = size == RUN
    if "dtype" in vars(config) and not own:
        on_cpu = HARDWARE[shown.device].platform == "cpu"
        config = dataclasses.replace(config, dtype="float32" if on_cpu else "bfloat16")
    abstract = abstract_model(lambda: model(config, rngs=nnx.Rngs(0)))
    shape = shape_of(abstract, config)
    lengths = _lengths(shape, shown.seq_len)
    job = Job(
        config,
        abstract,
        shape,
        rules,
        shown.device,
        rows=[shown.batch_size * n for n in TIMES],
        lengths=lengths,
        accumulate=shown.accumulate if own else 1,
        offload=shown.offload if own else "",
    )
    batch = loss_batch(model.__module__.rpartition(".")[2], config, shape)
    cached = shape.attention and shape.attention.cached
    return {
        "weights": [
            [path, leaf.array.shape, leaf.axes]
            for variables in abstract.variables.values() for path, leaf in variables.items()
        ],
        "activations": activations(abstract, batch),
        "cache": cache(abstract) if cached else [],
        "lengths": lengths,
        **figures(job, meshes),
    }  # fmt: skip


def _lengths(shape: Shape, seq_len: int) -> list[int]:
    """Tokens of a row to choose from; [0] for models without tokens."""
    if not shape.vocab_size:
        return [0]
    most = shape.max_positions or seq_len * max(TIMES)
    return sorted({min(seq_len * n, most) for n in TIMES})
