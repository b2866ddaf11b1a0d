"""Shows what sharding does to every array: opens a page for all entries, sizes, meshes and strategies.

    python -m recipes.explore
    python -m recipes.explore --entry=moe --size=mixtral_8x7b --mesh=data=8,expert=4 --rules=fsdp_ep
    python -m recipes.explore --from=runs/transformer            # the layout of a run

The page is one file, which needs no server, no network and no Python. docs/explore.md explains it.
"""

import dataclasses
import math
import os
import pathlib
import sys
import webbrowser
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import AbstractMesh

from recipes.common import checkpoint, entries
from recipes.common.analysis import explorer
from recipes.common.analysis.hardware import HARDWARE
from recipes.common.runtime import UserError, flag, folders, print0
from recipes.common.runtime.mesh import parse
from recipes.common.runtime.start import start
from recipes.common.sharding import rules as sharding_rules

MOST_DEVICES = 512


@dataclasses.dataclass(frozen=True)
class Flags:
    entry: str = flag("transformer", "Zoo entry to begin with.", "model", choices=entries.ENTRIES)
    size: str = flag(
        "", "Size of the model, a key of its zoo file's SIZES; empty: 8b if there is one.", "model"
    )
    mesh: str = flag("16", "Mesh, as sizes (8, 4x2, 2x2x2) or names (data=2,model=4).")
    rules: str = flag(
        "", "Sharding rules: a key of RULES or a .json file; empty: the mesh's default."
    )
    device: str = flag("v5p", "Kind of device whose memory to compare with.", choices=HARDWARE)
    batch_size: int = flag(
        32, "Rows of a batch.", "data", at_least=1, at_most=explorer.MOST_ROWS
    )  # fmt: skip
    seq_len: int = flag(
        4096, "Tokens of a row.", "data", at_least=1, at_most=explorer.MOST_TOKENS
    )  # fmt: skip
    from_: str = flag("", "Begin with the layout of this run or checkpoint.", "checkpoints")
    html: str = flag("", "File to write; empty: runs/explore.html.")
    open: bool = flag(True, "Open the page in a browser, if there is one.")
    source: str = flag("", "Address before zoo/FILE in links to rules; empty: this clone.")


def main(flags: Flags) -> None:
    path = pathlib.Path(flags.html or "runs/explore.html").expanduser()
    if flags.html and not path.parent.is_dir():
        raise UserError(f"--html={flags.html}: there is no folder {path.parent}; make it first")
    shown = of_run(flags) if flags.from_ else of_flags(flags)
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
      shown: what it begins with.
      source: see Flags.
    """
    jax.config.update("jax_platforms", "cpu")  # models are only traced
    models = {name: entries.model(name) for name in names}
    text = explorer.page(models, shown, source or f"{explorer.ROOT.as_uri()}/")
    with folders.write_errors(str(path)):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def of_flags(flags: Flags) -> explorer.Shown:
    """What the flags ask for. Raises UserError if there is no such size, mesh or strategy."""
    zoo = entries.zoo_file(flags.entry)
    size = flags.size or ("8b" if "8b" in zoo.SIZES else next(reversed(zoo.SIZES)))
    if size not in zoo.SIZES:
        raise UserError(f"--size={size} is not one of {', '.join(zoo.SIZES)}")
    axes = parse(flags.mesh)
    if (count := math.prod(axes.values())) > MOST_DEVICES:
        raise UserError(
            f"--mesh={flags.mesh} has {count} devices, and the page draws at most {MOST_DEVICES}; "
            f"try --mesh={MOST_DEVICES}"
        )
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    strategy, rules = sharding_rules.select(zoo, flags.rules, mesh)
    return explorer.Shown(
        flags.entry,
        size,
        None,
        strategy,
        rules,
        axes,
        flags.device,
        flags.batch_size,
        flags.seq_len,
    )


def of_run(flags: Flags) -> explorer.Shown:
    """The layout of the run in --from. Raises UserError if it can't be shown."""
    found = checkpoint.find(flags.from_, "--from", hash_files=False)
    if not (found.path / "metadata").exists():  # a Hugging Face folder
        raise UserError(f"--from={flags.from_} is not a run of this project; use a run's workdir")
    source = checkpoint.open_checkpoint(found.path)  # an adapter as it was trained, not merged
    facts, config = source.metadata, checkpoint.config_of(source)
    saved: dict[str, Any] = facts["flags"]
    table = facts["rules"]["table"]  # an older version's may lack axes
    rules = dict.fromkeys(entries.zoo_file(facts["entry"]).LOGICAL_AXES) | table
    device = "cpu" if getattr(config, "dtype", "float32") == "float32" else flags.device
    return explorer.Shown(
        facts["entry"], explorer.RUN, config, facts["rules"]["name"], rules, facts["mesh"], device,
        saved.get("batch_size", flags.batch_size), saved.get("seq_len", flags.seq_len),
        saved.get("accumulate", 1), saved.get("offload", ""),
    )  # fmt: skip


def _has_display() -> bool:
    """Whether a browser would open a window, not take over the terminal."""
    if sys.platform.startswith("linux"):
        return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return True


if __name__ == "__main__":
    start(main, Flags())
