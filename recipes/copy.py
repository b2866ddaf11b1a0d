"""Copies an entry of the zoo, with the shared files that it needs, into your own project.

    python -m recipes.copy --entry=transformer --target=mine          # its files, into the folder mine
    python -m recipes.copy --entry=moe --one_file=src/my_moe.py       # all of them as a single file

The copy needs only jax and flax. Existing files are never overwritten.
"""

import dataclasses
import difflib
import keyword
import os
import pathlib
import re
import sys
import tempfile

import zoo
from recipes.common import entries
from recipes.common.runtime import UserError, flag, folders, preemption, print0
from recipes.common.runtime.start import start
from recipes.common.zoo_source import closure, one_file

ZOO = pathlib.Path(zoo.__file__).parent


@dataclasses.dataclass(frozen=True)
class Flags:
    entry: str = flag("transformer", "Zoo entry to copy.", group="model")
    target: str = flag("", "Folder to copy its files into; new, or without files of these names.")
    one_file: str = flag("", "New .py file to write instead, with all of the code.")


def main(flags: Flags) -> None:
    # ---- Check flags before anything is written --------------------------------------------------
    if flags.entry not in entries.ENTRIES:
        near = difflib.get_close_matches(flags.entry, entries.ENTRIES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(entries.ENTRIES)}"
        raise UserError(f"--entry={flags.entry} is not in the zoo; {hint}")
    if not flags.target and not flags.one_file:
        raise UserError("--target is missing; use --target=FOLDER, or --one_file=FILE.py")
    if flags.target and flags.one_file:
        raise UserError(
            f"--target={flags.target} and --one_file={flags.one_file} exclude each other; use one of "
            "them"
        )
    files = closure(ZOO / f"{flags.entry}.py", optional=True)
    names = ", ".join(path.name for path in files)

    # ---- The files as they are, or merged --------------------------------------------------------
    if flags.target:
        folder = place(flags.target, "target")
        write(folder, {path.name: path.read_bytes() for path in files}, flags.target, "target")
        print0(f"Wrote {names} to {folder}.")
        module = f"{folder.name}.{flags.entry}"
    else:
        path = place(flags.one_file, "one_file", suffix=".py")
        content = {path.name: one_file(files).encode()}
        write(path.parent, content, flags.one_file, "one_file")
        print0(f"Wrote {path}, made of {names}.")
        module = path.stem
    model = entries.ENTRIES[flags.entry].model
    print0("To use it:", f"  from {module} import RULES, Config, {model}")


def place(name: str, option: str, suffix: str = "") -> pathlib.Path:
    """The path in a flag's value.

    Args:
      suffix: suffix of the file; "": the path is a folder.

    Raises UserError if nothing can be created there, or if Python couldn't import it.
    """
    given = f"--{option}={name}"
    if folders.in_bucket(name):
        raise UserError(f"{given} is in a bucket; use a local path")
    path = folders.to_path(name, f"--{option}").resolve()
    if suffix and path.is_dir():
        raise UserError(f"{given} is a folder; use a name that ends with {suffix}")
    if not suffix and path.is_file():
        raise UserError(f"{given} is a file; use a folder")
    stem = path.name.removesuffix(suffix) if suffix else path.name
    if not importable(stem) or not path.name.endswith(suffix):
        better = re.sub(r"\W+", "_", stem.removesuffix(".py")).strip("_")
        better = better if importable(better) else f"my_{better or 'model'}"
        raise UserError(f"{given} can't be imported; use a name like {better}{suffix}")
    if not path.parent.is_dir():
        raise UserError(f"{given}: the folder {path.parent} doesn't exist; make it first")
    return path


def importable(name: str) -> bool:
    """Whether Python can import a module of this name, and the name hides no other module."""
    reserved = keyword.iskeyword(name) or name in sys.stdlib_module_names or name in ("jax", "flax")
    return name.isidentifier() and not reserved


def write(folder: pathlib.Path, files: dict[str, bytes], given: str, option: str) -> None:
    """Writes files into a folder, atomically: all of them or none.

    Args:
      given: the value of the flag `option`, which names the folder or its only file.

    Raises UserError if a file exists already or can't be written.
    """
    for name in files:
        if os.path.lexists(folder / name):
            problem = "already exists" if option == "one_file" else f"already has {name}"
            raise UserError(f"--{option}={given} {problem}; use a new name")
    new, done = not folder.exists(), []
    around = folder.parent if new else folder
    # Delays signals until all is written: outside of training they end the process at once.
    with preemption.training(), folders.write_errors(given, option):
        with tempfile.TemporaryDirectory(prefix=".copy.", dir=around) as hidden:
            beside = pathlib.Path(hidden) / "new"
            beside.mkdir()
            for name, content in files.items():
                (beside / name).write_bytes(content)
            folders.to_disk(beside)
            if new:
                folders.move(beside, folder)
                return
            try:
                for name in files:
                    move(beside / name, folder / name)
                    done.append(folder / name)
            except OSError:
                for path in done:
                    path.unlink()
                raise
            folders.sync(folder)


def move(source: pathlib.Path, target: pathlib.Path) -> None:
    """Moves a file without overwriting. Raises FileExistsError if the target exists by now."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        source.rename(target)


if __name__ == "__main__":
    start(main, Flags())
