"""Writes a vector for each text, with a text encoder; the texts are spread over all devices.

    python -m recipes.embed --restore_from=runs/bert_embed --dataset=texts.txt --out=vectors.npy
    python -m recipes.embed --restore_from=hf:ORG/NAME --mesh=8 --dataset=docs.jsonl --out=vectors.parquet

The model may have been trained on any mesh, and may be a folder of sentence-transformers, whose pooling
and normalization it keeps. A .txt file has a text on each line; .jsonl, .parquet and .csv files have
them in --text_column. vectors.npy is float32 [texts, width]; vectors.parquet has the texts, too.
"""

import dataclasses
import io
import pathlib
import time
from collections.abc import Iterator

import numpy as np

from data import DataError, hub, sources, whole_texts
from data.whole_texts import Texts
from recipes.common import checkpoint
from recipes.common.flags.config_flags import Settings, default_dtype, describe_set, read_set
from recipes.common.hf.sentence_transformers import Sentences
from recipes.common.report import kernel, report
from recipes.common.runtime import Devices, UserError, flag, make_mesh, print0
from recipes.common.runtime.flags import refuse_unused
from recipes.common.runtime.processes import is_first
from recipes.common.runtime.start import start
from recipes.common.sharding import Layout, Tree
from recipes.common.storage import folders
from recipes.common.tasks.text_encoders import LONGEST, sentences_of
from recipes.common.train.feed import to_devices

KINDS = (".npy", ".parquet")  # of --out
SECONDS = 10  # between lines of progress


@dataclasses.dataclass(frozen=True)
class Embed(Settings):
    restore_from: str = flag("", "The encoder: a run, checkpoint or published name, or hf:DIR.")
    base: str = flag("", "Path of an adapter's base model, if it has moved.")
    dataset: str = flag(
        "", "Texts: a .txt file with one on each line, .jsonl, .parquet, .csv, hf:NAME."
    )
    text_column: str = flag("text", "Text column of .jsonl, .parquet, .csv and hf: datasets.")
    out: str = flag("", "New file for the vectors, .npy or .parquet.")
    tokenizer: str = flag(
        "", "Tokenizer, if the model has none of its own: bytes, a tokenizer.json, ORG/NAME."
    )
    prompt: str = flag(
        "",
        "Name of one of the model's prompts, which precedes each text; empty: its default, if any.",
    )
    seq_len: int = flag(
        0,
        f"Most tokens of a text; 0: as the model's folder says, or its context, at most {LONGEST}.",
        at_least=0,
    )
    batch_size: int = flag(
        64, "Texts at a time, over all devices; rounded up to suit the mesh.", at_least=1
    )
    dtype: str = flag(
        "", "Type of activations and weights; empty: bfloat16 on accelerators, else float32.",
        choices=["", "float32", "bfloat16"],
    )  # fmt: skip
    verify: bool = flag(True, "Check a checkpoint's files against their SHA-256 before reading it.")


def main(devices: Devices, flags: Embed) -> None:
    # ---- Check the flags and read the texts before anything is computed --------------------------
    source, out = find_model(flags), new_file(flags.out)
    mesh, tokenizer = make_mesh(devices.mesh), checkpoint.tokenizer_for(flags.tokenizer, source)
    dtype = flags.dtype or default_dtype(mesh.devices.flat[0])
    config = checkpoint.config_of(source)
    compute = {"dtype": dtype} | read_set(type(config), flags.set, ("dtype",))
    if config.task == "fill":  # without a vector of its own
        compute = {"pooling": "mean"} | compute
    sentences = sentences_of(source)
    most, prompt = flags.seq_len or sentences.max_seq_length, prompt_of(flags, sentences)
    strings = read(flags)
    texts = whole_texts.encode([prompt + text for text in strings], tokenizer, most)
    layout = checkpoint.layout_of(source, mesh, devices.rules, seq_len=most, **compute)
    if layout.seq_shards == 1:  # rows need be no longer than the longest text
        texts.length = min(-(-texts.longest // 8) * 8, most)
    layout.check_whole("embedding")
    kernel.check(layout)

    # ---- Read the model, each shard onto its own device ------------------------------------------
    print0(report.headline(layout), *describe_set(flags), *texts.notes())
    if sentences.prompts:
        named = ", ".join(f"{name} {text!r}" for name, text in sentences.prompts.items())
        print0(f"prompts: {named}; {repr(prompt) if prompt else 'none'} precedes each text")
    variables = checkpoint.restore_variables(source, layout, dtype)
    print0(*report.uneven(layout, variables))

    # ---- One program for all batches; every device has whole rows of vectors ---------------------
    rows = -(-min(flags.batch_size, len(texts)) // layout.batch_shards) * layout.batch_shards
    layout = dataclasses.replace(layout, batch_size=rows)
    width = min(sentences.truncate_dim or layout.config.embed, layout.config.embed)
    vectors, begun = np.zeros((len(texts), width), np.float32), time.perf_counter()
    for first, part in embedded(layout, variables, texts):
        vectors[first : first + len(part)] = part[:, :width]
    took = time.perf_counter() - begun
    if is_first():
        with folders.write_errors(flags.out):
            write(out, strings, vectors)
    way = f"{layout.config.pooling}{', of length 1' if layout.config.normalize else ''}"
    way += f", the first of {layout.config.embed}" if width < layout.config.embed else ""
    print0(
        f"{len(texts):,} vectors of {vectors.shape[1]} numbers ({way}) in {took:.1f} s: {flags.out}"
    )


def embedded(layout: Layout, variables: Tree, texts: Texts) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (number of the first text, vectors of it and the next ones)."""

    def pool(variables: Tree, batch: Tree):
        return layout.model.merge(variables).pool(batch["tokens"], batch["segment_ids"])

    program, shown, begun = None, time.perf_counter(), time.perf_counter()
    for first in range(0, len(texts), layout.batch_size):
        numbers = np.minimum(first + layout.process_rows, len(texts) - 1)  # the last one pads
        batch = to_devices(texts.take(numbers), layout)
        if program is None:
            program = layout.compile(pool, variables, batch, out_shardings=layout.replicated)
        yield first, np.asarray(program(variables, batch))[: len(texts) - first]
        if time.perf_counter() - shown > SECONDS:
            shown, done = time.perf_counter(), min(first + layout.batch_size, len(texts))
            print0(f"{done:,} of {len(texts):,} texts, {done / (shown - begun):,.0f} texts/s")


def read(flags: Embed) -> list[str]:
    """The texts. Raises DataError if there are none, or one is empty."""
    path = pathlib.Path(flags.dataset).expanduser()
    if not flags.dataset.startswith("hf:") and path.is_file() and sources.kind(path) == "text":
        use = f"rows, and --dataset={flags.dataset} has a text on each line"
        refuse_unused(flags, ("text_column",), use)
        with sources.reading(flags.dataset), hub.text_file(path, "utf-8-sig") as file:
            lines = hub.without_nul(file, f"--dataset={flags.dataset}")
            rows = [
                (f"--dataset={flags.dataset} line {number}", {flags.text_column: line.rstrip("\n")})
                for number, line in enumerate(lines, start=1)
            ]
    else:
        train, held_out = sources.rows(flags.dataset)
        rows = [*train, *(held_out or ())]
    if not rows:
        raise DataError(f"--dataset={flags.dataset} has no texts; use another file")
    texts = whole_texts.column(rows, flags.text_column, "text_column")
    print0(*whole_texts.unused([rows], [flags.text_column]))
    return texts


def prompt_of(flags: Embed, sentences: Sentences) -> str:
    """What precedes each text. Raises UserError if the model has no such prompt."""
    if flags.prompt and flags.prompt not in sentences.prompts:
        raise UserError(
            f"--prompt={flags.prompt} is not one of the model's prompts, "
            f"{', '.join(sentences.prompts) or 'of which it has none'}; use one of them, or leave it out"
        )
    prompt = sentences.prompts.get(flags.prompt or sentences.default_prompt_name or "", "")
    if prompt and not sentences.include_prompt:
        raise UserError(
            f"the model's pooling leaves out the tokens of a prompt ({prompt!r}, include_prompt false), "
            "which zoo/bert.py does not implement; use a different model, or no --prompt"
        )
    return prompt


def write(out: pathlib.Path, texts: list[str], vectors: np.ndarray) -> None:
    file = io.BytesIO()
    if out.suffix == ".npy":
        np.save(file, vectors)
    else:
        hub.library().Dataset.from_dict({"text": texts, "vector": vectors}).to_parquet(file)
    folders.write(out, file.getvalue())


def find_model(flags: Embed) -> checkpoint.WeightSource:
    """The model. Raises UserError if it, the texts or the file to write are missing."""
    for name in ("restore_from", "dataset", "out"):
        if not getattr(flags, name):
            raise UserError(f"--{name} is missing; use --{name}=…")
    source = checkpoint.find(flags.restore_from, hash_files=flags.verify, base=flags.base)
    entry = source.metadata["entry"]
    if entry != "bert":
        raise UserError(
            f"--restore_from={flags.restore_from} is a {entry!r} model, which makes no vectors of texts; "
            "use a text encoder"
        )
    return source


def new_file(name: str) -> pathlib.Path:
    """The path of --out. Raises UserError if it exists or has another suffix."""
    path = folders.new_path(name, "out")
    if path.suffix not in KINDS:
        raise UserError(f"--out={name} is of no kind that is written; use {' or '.join(KINDS)}")
    return path


if __name__ == "__main__":
    start(main, Devices(), Embed())
