"""Copies the files of the zoo that an entry imports; they need only jax and flax.

    python -m recipes.copy --entry=moe --target=mine --without=pipeline,context

`cp -r zoo mine` copies everything.
"""

import contextlib
import dataclasses
import keyword
import pathlib
import re
import sys
from importlib import util

from data import buckets
from recipes.common.entries import ENTRIES
from recipes.common.runtime import UserError, flag, print0
from recipes.common.runtime.flags import split
from recipes.common.runtime.start import start
from recipes.common.storage import folders

# No copy.py, nor an __init__.py here: either would hide Python's `copy` from scripts and notebooks in
# recipes/.
ZOO = pathlib.Path(__file__).parents[2] / "zoo"
OPTIONAL = {  # file that is imported inside functions → what needs it
    "context": "rings and all-to-alls (rules with cp)",
    "cudnn": "the attention kernel of NVIDIA GPUs",
    "flash": "attention on any platform, and on rings of devices",
    "float32_sums": "sums of gradients over devices in float32 (reduce_dtype)",
    "gpipe": "logits, and losses of one's own, in pipelines (rules with pp)",
    "gpu_loss": "the loss on GPUs",
    "lora": "adapters (lora_rank)",
    "low_precision": "low precision (matmul)",
    "maps": "a state that travels between devices (rules with cp)",
    "pipeline": "pipelines (rules with pp)",
    "quantization": "low precision (matmul)",
    "rope_scaling": "rotary scalings other than Llama 3's, and those of saved configs",
    "splash": "the attention kernel of TPUs",
    "state_context": "a state that travels between devices (rules with cp)",
    "triton": "attention on NVIDIA GPUs where cuDNN has no kernel",
}

# Zoo file → the model in it; of an entry with a file of its own for recipes, both.
MODELS = {name: entry.model for name, entry in ENTRIES.items()}
MODELS |= {entry.file: entry.model for entry in ENTRIES.values() if entry.file}


@dataclasses.dataclass(frozen=True)
class Flags:
    entry: str = flag("transformer", "Zoo entry to copy.", group="model")
    target: str = flag(
        "", "Folder to copy its files into; new, or without files with the same names."
    )
    without: str = flag("", "Optional files to leave out, such as pipeline,cache.")


def main(flags: Flags) -> None:
    entry, target = flags.entry, flags.target
    if entry not in MODELS:
        raise UserError(f"--entry={entry} is not in the zoo; it has {', '.join(MODELS)}")
    optional = {pathlib.Path(path).stem: path for path in optional_files(entry)}
    names = split(flags.without) if flags.without else []
    for name in set(names).difference(optional):
        hint = f"use {', '.join(optional)}" if optional else "it needs all its files"
        raise UserError(f"--without={flags.without}: {entry} has no optional {name!r}; {hint}")
    without = [optional[name] for name in names]
    if not target or buckets.remote(target):
        raise UserError(f"--target={target} is no local folder; use --target=FOLDER")
    folder = folders.to_path(target, "--target").absolute()
    taken = {*keyword.kwlist, *sys.stdlib_module_names, "__main__"}
    if not folder.name.isidentifier() or folder.name in taken:
        raise UserError(f"--target={target} can't be imported; use a name like my_models")
    # The copy has no __init__.py, so Python prefers any other module of its name.
    spec = util.find_spec(folder.name)
    first = (spec and spec.origin) or ""
    if first and pathlib.Path(first).parent != folder:
        raise UserError(
            f"--target={target} can't be imported, as Python finds {first} first; use a name like "
            "my_models"
        )

    copied = imported(entry, without=without)
    files = {name: (ZOO / name).read_text() for name in copied}
    for name, path in optional.items():
        if path not in copied:
            error = f"{path} was left out; for {OPTIONAL[name]}, copy zoo/{path} over this file"
            files[path] = f'raise ImportError("{error}")\n'
    for path in [folder / name for name in files] if folder.is_dir() else [folder]:
        if path.exists() or path.is_symlink():  # a link to nothing too
            raise UserError(f"--target={target}: {path} already exists; use a new name")
    # All files or none: what was written is removed if something fails.
    with folders.write_errors(target), contextlib.ExitStack() as undo:
        for place in sorted({folder, *((folder / path).parent for path in files)}):
            if not place.exists():
                place.mkdir()
                undo.callback(place.rmdir)
        for name, text in files.items():
            with open(folder / name, "x") as file:  # "x": not over one that has come since
                undo.callback((folder / name).unlink)
                file.write(text)
        undo.pop_all()
    print0(f"Copied to {folder}: {', '.join(copied)}")
    for name, path in optional.items():
        print0(f"  {'added' if path in copied else 'left out':8}  {path}: {OPTIONAL[name]}")
    print0(f"To use it:\n  from {folder.name}.{entry} import RULES, Config, {MODELS[entry]}")


def optional_files(entry: str) -> list[str]:
    """Files that an entry imports only inside functions, and what only these import."""
    return sorted({*imported(entry)} - {*imported(entry, nested=False)})


def imported(entry: str, nested: bool = True, without=()) -> list[str]:
    """Files that an entry imports, relative to the zoo, itself last; `nested`: inside functions too.

    Args:
      without: files to leave out, with what only they import.
    """
    files: list[str] = []

    def visit(path: pathlib.Path) -> None:
        if (name := path.relative_to(ZOO).as_posix()) in (*files, *without):
            return
        waiting.append(name)
        for indent, target in _imports(path):
            if target.relative_to(ZOO).as_posix() not in waiting and (nested or not indent):
                visit(target)
        files.append(name)

    waiting: list[str] = []  # files on the way; those of one circle of imports come once
    visit(ZOO / f"{entry}.py")
    return files


def _imports(path: pathlib.Path) -> list[tuple[str, pathlib.Path]]:
    """(indent, file) of each relative import in a file of the zoo."""
    files = []
    statement = r"^( *)from (\.+)([\w.]*) import (\([^)]*\)|.*)"
    for indent, dots, module, names in re.findall(statement, path.read_text(), re.MULTILINE):
        place = path.parents[len(dots) - 1].joinpath(*module.split("."))
        if place.with_suffix(".py").exists():
            files.append((indent, place.with_suffix(".py")))
        else:  # a folder
            files += [(indent, place / f"{name}.py") for name in re.findall(r"\w+", names)]
    return files


if __name__ == "__main__":
    start(main, Flags())
