"""Evaluates a language model: on text, in bits per byte, and by tasks of lm-evaluation-harness.

    python -m recipes.evaluate --restore_from=transformer.stdlib_3m --dataset=notes.txt,more.jsonl
    python -m recipes.evaluate --restore_from=hf:DIR --mesh=1x8 --tasks=arc_easy,hellaswag --limit=100

The model may have been trained on any mesh. All of a text is evaluated: each document alone, each of
its tokens but the first once, with at most --seq_len tokens in front of it. --part=held_out takes only
the documents that a training run on the same --dataset holds out.
"""

import dataclasses
import itertools
import json
from typing import Any

from data import sources, text
from data.batches import Dataset
from data.tokenizer import Tokenizer
from recipes.common import checkpoint
from recipes.common.analysis import report
from recipes.common.entries import ENTRIES
from recipes.common.harness import tasks
from recipes.common.runtime import Devices, UserError, describe, flag, folders, make_mesh, print0
from recipes.common.runtime.processes import is_first
from recipes.common.runtime.start import start
from recipes.common.train.evaluation import Evaluation, in_words


@dataclasses.dataclass(frozen=True)
class Evaluate:
    restore_from: str = flag("", "The model: a run, checkpoint or published name, or hf:DIR.")
    base: str = flag("", "Where the base model of an adapter is now, if it has moved.")
    tasks: str = flag(
        "", "Tasks of lm-evaluation-harness, with commas between them; patterns are fine."
    )
    include_path: str = flag("", "Folder with task files of your own, whose functions are run.")
    num_fewshot: int = flag(
        -1, "Examples in front of a task's question; -1: as each task says.", at_least=-1
    )
    limit: float = flag(
        0.0, "Questions of each task, or their share if it is below 1; 0: all.", at_least=0.0
    )
    apply_chat_template: bool = flag(
        False, "Put a task's questions to the model as a user's messages, by its chat template."
    )
    out: str = flag("", "New JSON file for the figures; empty: the terminal alone.")
    dataset: str = flag(
        "", "Texts, with commas between them; each as in recipes.transformer.", "data"
    )
    part: str = flag(
        "all", "What of a text is evaluated: all of it, or what a training run on it holds out.",
        "data", choices=["all", "held_out"],
    )  # fmt: skip
    text_column: str = flag(
        "text", "Column of .jsonl, .parquet and hf: datasets that has the text.", "data"
    )
    pack: bool = flag(
        True, "Rows of whole documents; false: windows that cut them, as runs in bytes have them.",
        "data",
    )  # fmt: skip
    tokenizer: str = flag(
        "", "Tokenizer, where the model has none of its own: bytes, a tokenizer.json, ORG/NAME.",
        "data",
    )  # fmt: skip
    seq_len: int = flag(
        0, "Tokens of context; 0: as many as the model was made for, and of a text at most 1,024.",
        "data", at_least=0,
    )  # fmt: skip
    batch_size: int = flag(
        16, "Sequences at a time, over all devices; rounded up to what the mesh wants.", "data",
        at_least=1,
    )  # fmt: skip
    dtype: str = flag(
        "", "Type of activations and weights; empty: bfloat16 on accelerators, else float32.",
        "model", choices=["", "float32", "bfloat16"],
    )  # fmt: skip
    verify: bool = flag(
        True, "Check a checkpoint's files against their SHA-256 before reading it.", "checkpoints"
    )


def main(devices: Devices, flags: Evaluate) -> None:
    # ---- What is asked, checked before anything is computed --------------------------------------
    mesh, out = make_mesh(devices.mesh), folders.new_path(flags.out, "out") if flags.out else None
    source = given(flags)
    asked = tasks.load(flags.tasks, flags.include_path) if flags.tasks else None
    tokenizer = checkpoint.tokenizer_for(flags.tokenizer, source)
    dtype = flags.dtype or ("float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16")
    layout = checkpoint.layout_of(source, mesh, devices.rules, dtype=dtype)
    context = flags.seq_len or checkpoint.context(source)
    length = flags.seq_len or min(context, 1_024)
    texts = {name: load(name, flags, length, tokenizer) for name in names(flags.dataset)}

    # ---- The model, each shard read onto its own device ------------------------------------------
    print0(report.headline(layout))
    variables = checkpoint.restore_variables(source, layout, dtype)
    print0(*report.uneven(layout, variables))
    about = {"model": flags.restore_from, "step": source.step, "dtype": dtype}
    about |= {"mesh": describe(mesh.shape), "rules": layout.strategy}
    found: dict[str, Any] = dict(about)

    # ---- Figures ---------------------------------------------------------------------------------
    for name, data in texts.items():
        rows = min(flags.batch_size, len(data.held_out))
        evaluation = Evaluation(layout.with_room_for(rows), data)
        totals = evaluation(variables)
        told = in_words(totals, data.held_out_bytes)
        print0(f"{name}: {told}; {flags.part}, {length:,} tokens of context.")
        facts = {"bytes": data.held_out_bytes, "part": flags.part, "seq_len": length}
        found.setdefault("datasets", {})[name] = evaluation.figures(totals) | facts
    if asked:
        from recipes.common.harness.adapter import Model

        model = Model(layout, variables, tokenizer, flags.batch_size, context, about)
        found["tasks"] = tasks.run(
            model, asked, flags.num_fewshot, flags.limit, flags.apply_chat_template
        )
        print0(*tasks.tables(found["tasks"]))
    if out and is_first():
        out.write_text(json.dumps(found, indent=2, default=tasks.plain) + "\n")
        print0(f"Figures: {flags.out}")


def names(dataset: str) -> list[str]:
    """--dataset as one or more; a comma may also be part of a file's name."""
    if dataset and sources.exists(dataset):
        return [dataset]
    return [name for name in dataset.split(",") if name]


def load(name: str, flags: Evaluate, length: int, tokenizer: Tokenizer) -> Dataset:
    """Text whose held-out part is what to evaluate. Raises DataError."""
    pack = "true" if flags.pack else "false"
    whole = name if flags.part == "all" else ""  # held out, whatever it is that is trained on
    data = text.load(name, flags.text_column, length, tokenizer, pack, whole)
    for note in itertools.dropwhile(lambda note: not note.startswith("Held out: "), data.notes):
        print0(note.replace("Held out: ", "Evaluates ", 1))
    return data


def given(flags: Evaluate) -> checkpoint.Source:
    """The model to evaluate. Raises UserError if it, or what to evaluate it on, is missing."""
    if not flags.restore_from:
        raise UserError("--restore_from is missing; use --restore_from=RUN, or hf:DIR")
    if not (flags.dataset or flags.tasks):
        raise UserError("there is nothing to evaluate on; use --dataset=FILE or --tasks=NAME")
    source = checkpoint.find_on_all_processes(flags.restore_from, flags.verify, flags.base)
    entry = source.metadata["entry"]
    if entry in ENTRIES and ENTRIES[entry].data != text.__name__:
        raise UserError(
            f"--restore_from={flags.restore_from} is a {entry!r} model, which its own recipe "
            f"evaluates; use python -m recipes.{entry} --restore_from={flags.restore_from} --steps=0"
        )
    return source


if __name__ == "__main__":
    start(main, Devices(), Evaluate())
