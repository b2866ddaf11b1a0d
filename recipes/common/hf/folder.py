"""Locates, checks, reads and writes model folders."""

import contextlib
import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
from flax import nnx

from data import buckets, hub, old_tokenizers, tokenizer
from recipes.common import entries
from recipes.common.hf import (
    bert,
    deepseek,
    float8,
    gemma,
    gemma3_vision,
    gemma4,
    gemma4_vision,
    gpt2,
    gpt_oss,
    hybrid_delta,
    hybrid_lfm2,
    hybrid_mamba,
    hybrid_nemotron,
    llama,
    moe,
    mxfp4,
    qwen3_next,
    sentence_transformers,
    siglip,
    tensors,
    vit,
)
from recipes.common.hf.family import Family
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.terminal import print0
from recipes.common.sharding.abstract import Tree, abstract_model, paths
from recipes.common.storage import folders

# Parts of keys of a config.json that don't change what a model computes.
UNIMPORTANT = ("architectures", "model_type", "_name_or_path", "version", "dtype", "use_cache")
UNIMPORTANT += ("token_id", "initializer_range", "drop", "summary")
FAMILIES = (
    *(*llama.FAMILIES, *moe.FAMILIES, gpt2.FAMILY, gemma.FAMILY, gemma.WITH_VISION),
    gemma3_vision.FAMILY,
    *gemma4.FAMILIES,
    *gemma4_vision.FAMILIES,
    *(gpt_oss.FAMILY, deepseek.FAMILY, *qwen3_next.FAMILIES),
    *(*hybrid_lfm2.FAMILIES, *hybrid_mamba.FAMILIES, *hybrid_nemotron.FAMILIES),
    *hybrid_delta.FAMILIES,
    vit.FAMILY,
    *bert.FAMILIES,
    *(siglip.FAMILY, siglip.CLIP_FAMILY),
)
UNPACK = {"mxfp4": mxfp4.unpack, "fp8": float8.unpack}  # format → what reads it
EXPORTABLE = {*(family.entry for family in FAMILIES)}  # those that can be exported


def locate(name: str) -> pathlib.Path:
    """The local path of a model folder: a folder, one in a bucket, or ORG/NAME on the Hub.

    Folders in buckets and on the Hub are downloaded. Raises UserError if there is no such folder.
    """
    folder = buckets.local(name, f"hf:{name}")
    if name and folder.exists():
        return folder.absolute()
    if not re.fullmatch(hub.MODEL_NAME, name):
        raise UserError(f"{name!r} does not exist; use a model folder, or ORG/NAME on the Hub")
    parent = pathlib.Path(name).parent
    if parent.is_dir() and parent != pathlib.Path():  # no ORG is a folder here
        raise UserError(f"hf:{name} does not exist, and {parent} does; use a model folder in it")
    wanted = ["config.json", "adapter_config.json", "*.safetensors", "*.safetensors.index.json"]
    wanted += [*vit.PROCESSORS, *sentence_transformers.FILES, "*/config.json"]
    files = (*tokenizer.FILES, *old_tokenizers.FILES, *tokenizer.PIECES)
    return hub.snapshot(name, [*wanted, *files], name)


class Folder:
    """A checked model folder: a source of parameters, like a checkpoint at step 0."""

    step = 0

    def __init__(self, path: pathlib.Path, entry: str = ""):
        """Reads config.json and the headers of the tensor files, but no tensors.

        Args:
          entry: of several that read such folders, the one to read it, or the module of its data; empty:
            the first in FAMILIES.

        Raises UserError if the folder is not a complete model that the zoo implements.
        """
        self.path = path
        if not path.is_dir():
            raise UserError(f"{path} is a file; use its folder")
        file = path / "config.json"
        theirs = tensors.read_json(file)
        self.family, kind = _family(theirs, file, entry)
        _check_format(theirs, self.family, file)
        contents = theirs
        theirs = self.family.text_keys(theirs | {"model_type": kind}, file)
        stored = tensors.find(path)
        config = config_from(self.family, theirs, file)
        if self.family.entry == bert.ENTRY and bert.lacks_head(self.family, config, stored):
            self.family = _headless(self.family, kind, file)
            config = config_from(self.family, theirs, file)
        selection = self.family.select(stored, config)
        self.config = selection.config
        self.metadata = {
            "entry": self.family.entry,
            "config": entries.config_json(self.config),
            "step": self.step,
            # For exporting it again:
            "context": theirs.get(self.family.context),
            "architecture": next(iter(self.family.architectures)),
        }
        makes_vectors = self.family.entry == bert.ENTRY and self.config.task == "embed"
        if makes_vectors and (path / sentence_transformers.MODULES).exists():
            self.metadata["sentences"] = dataclasses.asdict(sentence_transformers.sentences(path))
        stored = selection.stored
        self._files = {tensor.file for tensor in stored.values()}
        if method := _format_of(theirs):  # families that do not read it refused it
            stored = UNPACK[method](stored)
        self._stored = tensors.rename(stored, self.family.canonical, path)
        self._check()
        if contents.get("model_type") != kind:
            _check_model_type(contents, self.config, file)
        if selection.left_out:
            print0(selection.left_out)

    def shapes(self) -> Tree:
        """{"params": …}, and "buffers" if there are any: nested dicts of ShapeDtypeStructs."""
        return shapes_of(self.family.entry, self.config)

    def read(self, abstract: Tree) -> Tree:
        """Reads the variables in kind → nested dict of ShapeDtypeStructs with shardings."""
        return read_onto(self._stored, self.family.tensors(self.config), abstract)

    @property
    def files(self) -> list[pathlib.Path]:
        """The files that determine the parameters."""
        return [self.path / "config.json", *sorted(self._files)]

    def tokenizer(self) -> tokenizer.Tokenizer | None:
        """The folder's tokenizer; None if it has none. Raises DataError if it can't be read."""
        files = tokenizer.read(self.path)
        if files and sentence_transformers.lowercases(self.path):
            files[tokenizer.MAIN] = sentence_transformers.lowercased(files[tokenizer.MAIN])
        return tokenizer.from_files(files, str(self.path)) if files else None

    def _check(self) -> None:
        table = self.family.tensors(self.config)
        expanded = tensors.expand(table, stored_paths(self.shapes()))
        wanted = {tensor.name: tensor.shape for tensor in expanded}
        # A model that was saved without its head lacks the prefix of the other names.
        self._stored = tensors.rename(self._stored, add_prefix(wanted), self.path)
        computed = self.family.computed
        stored = {
            name: tensor
            for name, tensor in self._stored.items()
            if name in wanted or not name.endswith(computed)
        }
        tied = self.family.tied | self.family.copies(self.config)
        tied = {a: b for a, b in tied.items() if a in stored.keys() - wanted.keys()}
        wanted |= {a: wanted[b] for a, b in tied.items()}
        tensors.check(self.path, stored, wanted, "config.json implies", "this model's config.json")
        for a, b in tied.items():
            # If the two differ, versions of transformers disagree on which one counts.
            if not tensors.equal(self._stored[a], self._stored[b]):
                raise UserError(
                    f"{self.path} has a tensor {a} that differs from {b}, but its config.json ties "
                    "them; if they should differ, set tie_word_embeddings to false in config.json"
                )


def write(
    folder: pathlib.Path,
    entry: str,
    config,
    context: int,
    read,
    tokens: tokenizer.Tokenizer | None = None,
    card: str = "",
    architecture: str = "",
    sentences: sentence_transformers.Sentences | None = None,
) -> None:
    """Writes a model folder next to its destination, then moves it into place.

    The host holds one parameter and FILE_BYTES of tensors at a time. Raises UserError if no
    architecture computes this model.

    Args:
      context: positions that the model was trained on.
      architecture: see `family_of`.
      read: a function from a variable's path to its value, a float32 NumPy array.
      tokens: the model's tokenizer, whose files are copied unchanged; None if unknown.
      card: text of README.md; empty: none.
      sentences: of a model that makes vectors of texts.
    """
    family = family_of(entry, config, architecture)
    theirs = family.config_json(config, context)
    if family not in (vit.FAMILY, siglip.FAMILY, siglip.CLIP_FAMILY):
        # Absent ids mean 1 and 2 to transformers, or more, but every vocabulary has its own.
        ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        theirs |= {name: None for name in ids if name not in theirs}
        theirs |= tokens.config_ids() if tokens else {}
    expanded = tensors.expand(family.tensors(config), stored_paths(shapes_of(entry, config)))
    with new_folder(folder, tokens, card) as beside:
        tensors.write(beside, expanded, read)
        files = {"config.json": theirs, **family.other_files(config)}
        files |= sentences.files() if sentences and sentence_transformers.MODULES in files else {}
        for name, content in files.items():
            (beside / name).parent.mkdir(exist_ok=True)
            (beside / name).write_text(json.dumps(content, indent=2) + "\n")


def family_of(entry: str, config, architecture: str = "") -> Family:
    """The family that exports a model: the first that says all of its Config and variables.

    Args:
      architecture: see `nearest_family`.

    Raises UserError if there is none.
    """
    family, lost = nearest_family(entry, config, architecture)
    if lost:
        raise UserError(
            "no Hugging Face architecture computes this model; the nearest, "
            f"{next(iter(family.architectures))}, can't have {' and '.join(lost)}; use a model without"
        )
    return family


def nearest_family(entry: str, config, architecture: str = "") -> tuple[Family, list[str]]:
    """The family that says most of a model, and what of its Config and variables it can't say.

    Args:
      architecture: of the folder that the model was imported from: its family is the first to try.
    """
    families = [family for family in FAMILIES if family.entry == entry]
    families.sort(key=lambda family: architecture not in family.architectures)
    plain = dataclasses.replace(config, lora_rank=0)
    variables = stored_paths(shapes_of(entry, plain))
    candidates = [
        (family, [*family.lost(plain), *(variables.keys() - family.tensors(plain).keys())])
        for family in families
    ]
    return min(candidates, key=lambda candidate: len(candidate[1]))


@contextlib.contextmanager
def new_folder(
    folder: pathlib.Path,
    tokens: tokenizer.Tokenizer | None = None,
    card: str = "",
    config: str = "config.json",
) -> Iterator[pathlib.Path]:
    """Yields a temporary folder to fill; adds a tokenizer and a card, then moves it into place.

    Args:
      config: name of its config file. In a bucket this is uploaded last, to mark a complete folder.
    """
    with folders.at(folder, mark=config).filled() as beside:
        yield beside
        for name, content in (tokens.shared() if tokens else {}).items():
            (beside / name).write_bytes(content)
        if card:
            (beside / "README.md").write_text(card)


def read_onto(stored: dict[str, tensors.Stored], table, abstract: Tree) -> Tree:
    """Reads the arrays of kind → nested dict of ShapeDtypeStructs with shardings.

    Shards are read one at a time and put onto their devices before the next is read.

    Args:
      table: a family's tensors, as in tensors.py.
    """
    arrays = []
    for path, leaf in stored_paths(abstract).items():
        stack = list(tensors.expand(table, {path: leaf}))
        shard = functools.partial(tensors.read_shard, stored, stack, leaf.dtype)
        arrays.append(tensors.place(leaf, shard))
    return jax.tree.unflatten(jax.tree.structure(abstract), arrays)


def add_prefix(wanted: Collection[str]) -> Callable[[str], str]:
    """A function of a name that adds a prefix, such as "model.", if only that makes it wanted."""
    prefixes = sorted({name.partition(".")[0] for name in wanted})

    def full_name(name: str) -> str:
        with_prefix = [f"{prefix}.{name}" for prefix in prefixes if name not in wanted]
        return next((full for full in with_prefix if full in wanted), name)

    return full_name


def config_from(family: Family, keys: dict[str, Any], file: pathlib.Path) -> Any:
    """The Config of a family for the keys of a config.json. Raises UserError if its bounds forbid it."""
    try:
        return family.config_from(keys, file)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{file} makes no sense: {error}; use this model's config.json") from None


def _family(theirs: dict[str, Any], file: pathlib.Path, entry: str = "") -> tuple[Family, str]:
    """The (family, model_type) of a config.json, from its architecture. Raises UserError.

    Args:
      entry: as in Folder.
    """
    known = {}

    def is_wanted(family: Family) -> bool:
        return entry in (family.entry, entries.ENTRIES[family.entry].data)

    # What is known last counts.
    for family in sorted(reversed(FAMILIES), key=is_wanted):
        for name, kind in family.architectures.items():
            known[name] = known[kind] = family, kind
    names = theirs.get("architectures") or [theirs.get("model_type")]
    if names not in [[name] for name in known]:
        shown = ", ".join(map(str, names)) if isinstance(names, list) else names
        raise UserError(
            f"{file} is for {shown}, which the zoo does not implement; the nearest is "
            f"{_nearest(theirs, file)}; use one of those that recipes/docs/architectures.md lists"
        )
    return known[names[0]]


def _headless(family: Family, kind: str, file: pathlib.Path) -> Family:
    """An encoder's family without a head, for weights that lack it and make vectors of texts.

    Raises UserError if no modules.json says that they do.
    """
    (headless,) = (
        other
        for other in FAMILIES
        if kind in other.architectures.values() and other.fixed.get("task") == "embed"
    )
    named, name = next(iter(family.architectures)), next(iter(headless.architectures))
    if not file.with_name(sentence_transformers.MODULES).exists():
        raise UserError(
            f"{file} has architecture {named}, and the weights beside it lack its head; to make vectors "
            f'of texts, or to train a new head, set architectures to ["{name}"] there'
        )
    print0(f"Read as {name}: the weights lack the head of {named}, and modules.json needs none.")
    return headless


def _check_model_type(theirs: dict[str, Any], config: Any, file: pathlib.Path) -> None:
    """Raises UserError if the model_type means another model than the architecture, which `config` has.

    vLLM goes by the architecture, the Auto classes of `transformers` by the model_type. It may be
    absent, or a name of its own: Kimi K2 has V3's architecture.
    """
    kind = theirs.get("model_type")

    def same(family: Family) -> bool:
        try:
            return config_from(family, family.text_keys(theirs, file), file) == config
        except UserError:
            return False

    families = [family for family in FAMILIES if kind in family.architectures.values()]
    if families and not any(map(same, families)):
        raise UserError(
            f"{file} has architecture {theirs['architectures'][0]} and model_type {kind}, which "
            "read it differently; correct the wrong one"
        )


def _nearest(theirs: dict[str, Any], file: pathlib.Path) -> str:
    """The architecture whose config.json has most keys in common, and the first that differs."""
    written = [
        family.config_json(
            dataclasses.replace(entries.zoo_file(family.entry).SIZES["small"](), **family.fixed), 1
        )
        for family in FAMILIES
    ]
    read = {key for key in theirs if not any(part in key for part in UNIMPORTANT)}
    shares = [len(keys.keys() & read) / len(keys.keys() | read) for keys in written]
    nearest = shares.index(max(shares))
    family = FAMILIES[nearest]
    name, kind = next(iter(family.architectures.items()))
    known = {*written[nearest], *family.checked}
    others = [key for key in theirs if key not in known]
    differs = [key for key in others if not any(part in key for part in UNIMPORTANT)]
    try:
        family.config_from(written[nearest] | theirs | {"model_type": kind}, file)
    except UserError as error:
        differs = re.findall(r" has (?:an )?(\w+) ", str(error)) or differs
    return f"{name}, which differs in {differs[0]}" if differs else name


def _format_of(theirs: dict[str, Any]) -> str:
    """The format of quantized weights, or all of its settings if it has no name; "" if none."""
    quantized = theirs.get("quantization_config")
    if not quantized:
        return ""
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    return method or json.dumps(quantized)


def _check_format(theirs: dict[str, Any], family: Family, file: pathlib.Path) -> None:
    """Raises UserError if weights are quantized in a format that the family is not published in."""
    method = _format_of(theirs)
    formats = family.formats
    if method and method not in formats:
        raise UserError(
            f"{file} has weights in {method}, which the zoo does not read; use a folder "
            f"{'in ' if formats else ''}{' or '.join((*formats, 'that is not quantized'))}"
        )
    if method == "fp8":
        float8.check(theirs["quantization_config"], file)


def stored_paths(variables: Tree) -> dict[str, Any]:
    """Path → leaf of parameters and buffers, in the order of their leaves."""
    return {
        path: leaf for kind in sorted(variables) for path, leaf in paths(variables[kind]).items()
    }


@functools.lru_cache(maxsize=8)  # tracing a model takes a while, and a folder asks several times
def shapes_of(entry: str, config) -> Tree:
    """Kind → nested dict of ShapeDtypeStructs of an entry's model."""
    model = entries.model(entry)
    return abstract_model(lambda: model(config, rngs=nnx.Rngs(0))).shapes
