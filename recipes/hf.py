"""Brings a Hugging Face model folder of the Llama family into the zoo, and back.

    python -m recipes.hf import --source=DIR --target=DIR       # a checkpoint of zoo/transformer.py
    python -m recipes.hf export --source=DIR --target=DIR       # a folder that transformers loads

DIR to import is a folder with config.json and *.safetensors, or ORG/NAME of the Hub; DIR to export
is a run's workdir or a checkpoint. A recipe reads a model folder itself, too: --restore_from=hf:DIR.
"""

import dataclasses
import functools
import pathlib
import sys

import jax
import numpy as np
from flax import nnx

from recipes.common import checkpoint, folders, hf, report, sharding
from recipes.common.cli import flag, start
from recipes.common.errors import UserError
from recipes.common.mesh import make_mesh
from recipes.common.metrics import say
from zoo.transformer import RULES, Config, Transformer


@dataclasses.dataclass(frozen=True)
class Export:
    source: str = flag("", "folder to read, as above")
    target: str = flag("", "new folder to write")


@dataclasses.dataclass(frozen=True)
class Import(Export):
    mesh: str = flag("", "devices to read onto, as of every recipe; empty: all on data")
    rules: str = flag("", "strategy, a key of RULES in zoo/transformer.py; empty: by the mesh")


def import_(flags: Import) -> None:
    target = new_folder(flags)

    # ---- Their folder is checked whole, and laid out on the mesh, before a tensor is read -------
    folder = hf.Folder(hf.locate(flags.source.removeprefix("hf:")))
    layout = lay_out(folder.config, flags.rules, flags.mesh)
    say(report.headline(layout))

    # ---- Each shard is read for itself, onto its device, and saved from there -------------------
    params = checkpoint.restore_params(folder, layout)
    facts = checkpoint.metadata("transformer", folder.config, layout, dataclasses.asdict(flags))
    checkpoint.write(target, params, facts | folder.metadata)
    say(
        f"Imported {parameters(layout)} into {flags.target}; it can be trained or evaluated:",
        f"  python -m recipes.transformer --restore_from={flags.target}",
    )


def export(flags: Export) -> None:
    target = new_folder(flags)
    source = checkpoint.find(flags.source, "--source")
    if source.metadata["entry"] != "transformer":
        raise UserError(
            f"--source={flags.source} is of {source.metadata['entry']!r}, and the Llama family is "
            "'transformer'; give a checkpoint of that"
        )
    config = checkpoint.config_from(Config, source)
    layout = lay_out(config, "dp", "")
    checkpoint.check_params(source, layout)

    # ---- One parameter at a time: read, rearranged, written -------------------------------------
    hf.write(target, config, context(source), functools.partial(read_one, source, layout))
    say(
        f"Exported {parameters(layout)} to {flags.target}; transformers loads it:",
        f'  AutoModelForCausalLM.from_pretrained("{flags.target}")',
    )


def new_folder(flags: Export) -> pathlib.Path:
    """--target, where nothing is yet. Raises UserError."""
    for name in ("source", "target"):
        if not getattr(flags, name):
            raise UserError(f"--{name} is missing; give --{name}=DIR")
    return folders.new(flags.target)


def lay_out(config: Config, rules: str, mesh: str) -> sharding.Layout:
    build = lambda: Transformer(config, rngs=nnx.Rngs(0))  # noqa: E731
    return sharding.lay_out(build, RULES, rules, make_mesh(mesh))


def read_one(source: checkpoint.Source, layout: sharding.Layout, path: str) -> np.ndarray:
    """One parameter of a checkpoint."""
    shape, where = (sharding.paths(tree)[path] for tree in (layout.plan.shapes, layout.params()))
    leaf = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where)
    only = nnx.traversals.unflatten_mapping({("params", *path.split("/")): leaf})
    return np.asarray(jax.tree.leaves(checkpoint.restore_tree(source, only))[0])


def context(source: checkpoint.Source) -> int:
    """Positions that the model was made for: as its folder said, or those of its training."""
    facts = source.metadata
    return facts.get("context") or facts.get("flags", {}).get("seq_len") or 2_048


def parameters(layout: sharding.Layout) -> str:
    sizes = [shape.size for shape in sharding.paths(layout.plan.shapes).values()]
    return f"{sum(sizes):,} parameters"


COMMANDS = {"import": (import_, Import()), "export": (export, Export())}


def no_command(_) -> None:
    raise UserError(
        "say what to do: python -m recipes.hf import … or python -m recipes.hf export …"
    )


if __name__ == "__main__":
    word = sys.argv.pop(1) if sys.argv[1:] and not sys.argv[1].startswith("-") else ""
    start(*COMMANDS.get(word, (no_command, Import())))
