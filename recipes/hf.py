"""Imports Hugging Face model folders into the zoo, and exports them back.

    python -m recipes.hf import --source=DIR --target=DIR       # a checkpoint of the zoo
    python -m recipes.hf export --source=DIR --target=DIR       # a folder that transformers loads
    python -m recipes.hf export --source=DIR --target=DIR --adapter       # one that PEFT loads

The DIR to import is a folder with config.json and *.safetensors, or ORG/NAME on the Hub. The folder's
architecture decides the entry: a Llama becomes a zoo/transformer.py, a ViT a zoo/vit.py. The DIR to
export is a run's workdir or a checkpoint. Recipes also read model folders without an import:
--restore_from=hf:DIR.
Adapters (LoRA), also PEFT's, are merged with their base; --adapter exports them alone.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np

from data.tokenizer import FILES
from recipes.common import checkpoint, entries, hf
from recipes.common.checkpoint import card
from recipes.common.hf.sentence_transformers import MODULES
from recipes.common.report import report
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.flags import flag
from recipes.common.runtime.mesh import arrange, make_mesh
from recipes.common.runtime.start import choose
from recipes.common.runtime.terminal import print0
from recipes.common.sharding.abstract import nested, paths
from recipes.common.sharding.layout import Layout
from recipes.common.storage import folders
from recipes.common.tasks.text_encoders import sentences_of

# How names of transformers' classes end, by entry and by an encoder's task.
FOR = {
    "vit": "ForImageClassification",
    "siglip": "",
    "gemma3_vision": "ForImageTextToText",
    "gemma4_vision": "ForImageTextToText",
}
FOR_TASK = {"fill": "ForMaskedLM", "classify": "ForSequenceClassification", "embed": ""}


@dataclasses.dataclass(frozen=True)
class Folders:
    source: str = flag("", "Folder to read, as above.")
    target: str = flag("", "New folder to write.")
    base: str = flag("", "Path of an adapter's base model, if it has moved.")
    entry: str = flag(
        "", "Entry that reads a folder, or the base of PEFT's adapter, if several can: gemma3 and gemma4 "
        "read the text model of a Gemma that sees, gemma3_vision and gemma4_vision its tower too. "
        "Empty: the text model; a checkpoint has its own.",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Export(Folders):
    adapter: bool = flag(
        False, "Write an adapter (LoRA) alone, in PEFT's format, instead of merged."
    )
    licence: str = flag(
        "", "Licence of the parameters, for the card; empty: as published, if at all."
    )
    note: str = flag("", "A line for the card.")


@dataclasses.dataclass(frozen=True)
class Import(Folders):
    mesh: str = flag("", "Device mesh to read onto, as in every recipe; empty: all on data.")
    rules: str = flag("", "Sharding rules, as in every recipe; empty: chosen by the mesh.")


def import_(flags: Import) -> None:
    target = new_folder(flags)

    # ---- Check the folder, and its layout on the mesh, before any tensor is read ----------------
    name = flags.source.removeprefix("hf:")
    folder = find(flags, f"hf:{name}")
    layout = checkpoint.layout_of(folder, make_mesh(flags.mesh), flags.rules)
    tokens = folder.tokenizer()
    if tokens:
        checkpoint.check_vocabulary(tokens, folder)
    print0(report.headline(layout), *report.uneven(layout, layout.variables()))

    # ---- Read each shard onto its device, and save it from there --------------------------------
    variables, entry = checkpoint.restore_variables(folder, layout), folder.metadata["entry"]
    facts = checkpoint.metadata(entry, layout, dataclasses.asdict(flags)) | folder.metadata
    facts["tokenizer"] = tokens and tokens.sha256  # None: unknown
    local = pathlib.Path(name).exists()
    facts["imported"] = f"hf:{folder.path if local else name}"
    with folders.write_errors(flags.target):
        checkpoint.write(target, variables, facts, tokenizer=tokens)
    without, also = "", ""
    if not tokens and not reads_images(entry):
        without, also = left_out(folder.path), " --tokenizer=FILE"
    print0(
        f"Imported {parameters(layout)} into {flags.target}{without}; it can be trained or evaluated:",
        f"  python -m recipes.{entry} --restore_from={flags.target}{also}",
    )


def export(flags: Export) -> None:
    target = new_folder(flags)
    source = find(flags, flags.source)
    entry = source.metadata["entry"]
    if entry not in hf.EXPORTABLE:
        raise UserError(
            f"--source={flags.source} is a {entry!r} model, which Hugging Face has no architecture "
            f"for; use a checkpoint of {' or '.join(map(repr, hf.EXPORTABLE))}"
        )
    adapted = source if flags.adapter else None
    if adapted is not None and not isinstance(adapted, checkpoint.Adapted):
        raise UserError(f"--source={flags.source} is not an adapter; leave --adapter out")
    weights = adapted.adapter if adapted else source
    layout = checkpoint.layout_of(weights, arrange({"data": 1}, jax.devices()[:1]))
    if not adapted:
        checkpoint.check_variables(source, layout)
    tokens = source.tokenizer()
    variables = layout.variables()
    shards = {path: (kind, x) for kind in variables for path, x in paths(variables[kind]).items()}

    # ---- Read, rearrange and write one parameter at a time ---------------------------------------
    def read(path: str) -> np.ndarray:
        kind, shard = shards[path]
        return np.asarray(jax.tree.leaves(weights.read({kind: nested({path: shard})}))[0])

    facts = card.facts(source, jax.tree.leaves(variables["params"]), flags.licence, flags.note)
    picture = card.picture(source)
    architecture = source.metadata.get("architecture") or ""
    readme = card.for_hub(target.name, source.metadata, facts, flags.adapter, bool(picture))
    name = flags.target
    with folders.write_errors(name):
        if adapted:  # PEFT gets the base's name if it is a Hugging Face one
            where = adapted.where
            base = where.removeprefix("hf:") if where.startswith("hf:") else None
            hf.write_adapter(target, entry, layout.config, base, read, tokens, readme, architecture)
            loads = f'PEFT loads it:\n  PeftModel.from_pretrained(model, "{name}")'
        else:
            context = checkpoint.context(source)
            sentences = sentences_of(source) if entry == "bert" else None
            hf.write(
                target, entry, layout.config, context, read, tokens, readme, architecture, sentences
            )  # fmt: skip
            loads = f'transformers loads it:\n  {loader(entry, layout.config)}("{name}")'
            if (target / MODULES).exists():
                loads = f'sentence-transformers loads it:\n  SentenceTransformer("{name}")'
        if picture:
            (target / card.PICTURE).write_bytes(picture)
    print0(f"Exported {parameters(layout)} to {name}; {loads}")


def find(flags: Folders, path: str) -> checkpoint.WeightSource:
    """The model or adapter at the path of --source. Raises UserError if --entry is another's."""
    source = checkpoint.find(path, "--source", base=flags.base, entry=flags.entry)
    entry = source.metadata["entry"]
    if flags.entry not in ("", entry):
        raise UserError(
            f"--entry={flags.entry} does not read --source={flags.source}, a {entry!r} model; leave "
            f"--entry out, or use --entry={entry}"
        )
    return source


def loader(entry: str, config: Any) -> str:
    """The function of `transformers` that loads an export."""
    kind = FOR_TASK[config.task] if entry == "bert" else FOR.get(entry, "ForCausalLM")
    return f"AutoModel{kind}.from_pretrained"


def reads_images(entry: str) -> bool:
    """Whether an entry's models read images, so that its recipe takes no tokenizer."""
    return entries.ENTRIES[entry].data in ("data.images", "data.captions")


def left_out(folder: pathlib.Path) -> str:
    """Describes what an import leaves out if the folder has no tokenizer.json."""
    others = [name for name in FILES if (folder / name).is_file()]
    also = f", and so without its {' and '.join(others)}" if others else ""
    return f", without a tokenizer (it has no tokenizer.json){also}"


def new_folder(flags: Folders) -> pathlib.Path:
    """The path of --target. Raises UserError if it exists, or a flag is missing."""
    for name in ("source", "target"):
        if not getattr(flags, name):
            raise UserError(f"--{name} is missing; use --{name}=DIR")
    return folders.new_path(flags.target)


def parameters(layout: Layout) -> str:
    return f"{sum(x.size for x in jax.tree.leaves(layout.model.shapes['params'])):,} parameters"


COMMANDS = {"import": (import_, Import()), "export": (export, Export())}

if __name__ == "__main__":
    choose(COMMANDS, "use python -m recipes.hf import … or python -m recipes.hf export …")
