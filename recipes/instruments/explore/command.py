"""The command `python -m recipes.explore`."""

import dataclasses
import math
import os
import pathlib
import sys
import webbrowser
from collections.abc import Iterable

import jax
from jax.sharding import AbstractMesh

from recipes.common import checkpoint, entries
from recipes.common.runtime import UserError, describe, flag, print0
from recipes.common.runtime.flags import refuse_unused
from recipes.common.runtime.mesh import parse
from recipes.common.sharding import make_layout
from recipes.common.sharding import rules as sharding_rules
from recipes.common.sharding.shape import trace_shape
from recipes.common.storage import folders
from recipes.instruments.explore import export as explorer
from recipes.instruments.explore.causes import ROOT
from recipes.instruments.plan.hardware import HARDWARE

MOST_DEVICES = 512


@dataclasses.dataclass(frozen=True)
class Flags:
    entry: str = flag("transformer", "Zoo entry.", "model", choices=entries.ENTRIES)
    size: str = flag("", "Size of the model; empty: 8b if there is one, else the largest.", "model")
    mesh: str = flag("16", "Mesh, as sizes (8, 4x2, 2x2x2) or names (data=2,model=4).")
    rules: str = flag("", "A key of RULES or a .json file; empty: the mesh's default.")
    device: str = flag("v5p", "Kind of device whose memory to compare with.", choices=HARDWARE)
    batch_size: int = flag(32, "Rows.", "data", at_least=1)
    seq_len: int = flag(4096, "Tokens of a row.", "data", at_least=1)
    from_: str = flag("", "Begin with the layout of this run or checkpoint.", "checkpoints")
    html: str = flag("", "File to write; empty: runs/explore.html.")
    open: bool = flag(True, "Open the page in a browser, if there is one.")
    source: str = flag("", "Address before zoo/FILE in links to rules; empty: this clone.")


def main(flags: Flags) -> None:
    path = pathlib.Path(flags.html or "runs/explore.html").expanduser()
    if flags.html and not path.parent.is_dir():
        raise UserError(f"--html={flags.html}: there is no folder {path.parent}; make it first")
    shown = shown_from_run(flags) if flags.from_ else shown_by_flags(flags)
    write_page(path, shown=shown, source=flags.source)
    print0(f"The explorer: {path}")
    if flags.open and _has_display():
        webbrowser.open(path.resolve().as_uri())


def write_page(
    path: pathlib.Path,
    names: Iterable[str] = entries.ENTRIES,
    shown: explorer.Shown | None = None,
    source: str = "",
) -> None:
    """Writes the page.

    Args:
      names: the entries to choose from.
      shown: what it begins with; None: what it does without flags.
      source: see Flags.
    """
    jax.config.update("jax_platforms", "cpu")  # models are only traced
    shown = shown or shown_by_flags(Flags())
    text = explorer.page(names, shown, source or f"{ROOT.as_uri()}/")
    with folders.write_errors(str(path)):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def shown_by_flags(flags: Flags) -> explorer.Shown:
    """Returns the state of the flags. Raises UserError if there is no such layout."""
    zoo = entries.zoo_file(flags.entry)
    sizes = entries.sizes(flags.entry)
    size = flags.size or explorer.default_size(flags.entry)
    if size not in sizes:
        raise UserError(f"--size={size} is not one of {', '.join(sizes)}")
    axes = parse(flags.mesh)
    if (count := math.prod(axes.values())) > MOST_DEVICES:
        raise UserError(
            f"--mesh={flags.mesh} has {count} devices, and the page draws at most {MOST_DEVICES}; "
            f"try --mesh={MOST_DEVICES}"
        )
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    model = entries.model(flags.entry)
    rules, table = sharding_rules.select(zoo.RULES, model.axes, flags.rules, mesh)
    layout = make_layout(model, sizes[size](), mesh, flags.rules)
    sharding_rules.check_used(zoo.RULES, rules, layout.rules, mesh)
    batch = flags.batch_size, flags.seq_len
    mesh_text = describe(axes)
    return explorer.Shown(flags.entry, size, flags.device, count, mesh_text, rules, *batch, table)


def shown_from_run(flags: Flags) -> explorer.Shown:
    """The layout of the run in --from. Raises UserError if it can't be shown."""
    decided = ("entry", "size", "mesh", "rules")
    refuse_unused(flags, decided, f"a new layout, and --from={flags.from_} has its own")
    path = checkpoint.find(flags.from_, "--from", hash_files=False).path
    if not (path / "metadata").exists():  # a Hugging Face folder
        raise UserError(f"--from={flags.from_} is not a run of this project; use a run's workdir")
    source = checkpoint.open_checkpoint(path)  # an adapter as it was trained, not merged
    saved, config = source.metadata, checkpoint.config_of(source)
    table = dict.fromkeys(
        entries.model(saved["entry"]).axes.logical_axes
    )  # an older one lacks some
    table |= saved["rules"]["table"]
    shape = trace_shape(entries.model(saved["entry"]), config)
    on_cpu = shape.dtype in (None, "float32")
    return explorer.Shown(
        entry=saved["entry"],
        size=explorer.RUN,
        device="cpu" if on_cpu else flags.device,
        devices=math.prod(saved["mesh"].values()),
        mesh=describe(saved["mesh"]),
        rules=saved["rules"]["name"],
        batch_size=saved["flags"].get("batch_size", flags.batch_size),
        seq_len=saved["flags"].get("seq_len", flags.seq_len),
        table=table,
        config=config,
        accumulate=saved["flags"].get("accumulate", 1),
        offload=saved["flags"].get("offload", ""),
    )


def _has_display() -> bool:
    """Whether a browser would open a window, not take over the terminal."""
    if sys.platform.startswith("linux"):
        return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return True
