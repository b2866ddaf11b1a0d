"""Evaluates a language model on text, in bits per byte, and on lm-evaluation-harness tasks.

    python -m recipes.evaluate --restore_from=hf:DIR --labels=cat,dog --dataset=pets   # SigLIP, CLIP

    python -m recipes.evaluate --restore_from=transformer.stdlib_3m --dataset=notes.txt,more.jsonl
    python -m recipes.evaluate --restore_from=hf:DIR --mesh=1x8 --tasks=arc_easy,hellaswag --limit=100
    python -m recipes.evaluate --restore_from=runs/bert_classify --dataset=labelled.jsonl   # an encoder
    python -m recipes.evaluate --restore_from=runs/gemma3_vision --dataset=rows.jsonl     # with pictures

The model may have been trained on any mesh. All of a text is evaluated: every token of a document but
the first, exactly once, with at most --seq_len tokens of the same document in front of it.
--part=held_out takes only the documents that a training run on the same --dataset holds out.
"""

import dataclasses
import json
from typing import Any

from data import sources, text
from data.batches import Dataset
from data.captions import Texts
from data.tokenizer import Tokenizer
from recipes.common import checkpoint, entries
from recipes.common.entries import ENTRIES
from recipes.common.flags.config_flags import Settings, default_dtype, describe_set, read_set
from recipes.common.generation import picture_prompts
from recipes.common.generation.int8_weights import to_int8, weights_flag
from recipes.common.report import kernel, report
from recipes.common.runtime import Devices, UserError, describe, flag, make_mesh, print0
from recipes.common.runtime.errors import needs_instruments
from recipes.common.runtime.flags import refuse_unused, split
from recipes.common.runtime.processes import is_first
from recipes.common.runtime.start import start
from recipes.common.storage import folders
from recipes.common.tasks import encoder_evaluation, picture_answers, zero_shot
from recipes.common.tasks.classification import few
from recipes.common.train.evaluation import Evaluation, in_words

ENCODER = "bert"  # the entry of text encoders


@dataclasses.dataclass(frozen=True)
class Evaluate(Settings):
    restore_from: str = flag("", "The model: a run, checkpoint or published name, or hf:DIR.")
    base: str = flag("", "Path of an adapter's base model, if it has moved.")
    tasks: str = flag("", "Tasks of lm-evaluation-harness, comma-separated; patterns are allowed.")
    include_path: str = flag("", "Folder with your own task files; functions in them are executed.")
    num_fewshot: int = flag(
        -1, "Examples in front of a task's question; -1: each task's default.", at_least=-1
    )
    labels: str = flag(
        "",
        "Classes for two towers to sort pictures into, comma-separated, or a file with one a line.",
    )
    templates: str = flag(
        "",
        "Captions of a class, comma-separated, or a file with one a line, with {} for its name; empty: "
        "built-in ones.",
    )
    limit: float = flag(0.0, "Questions per task, or a fraction if below 1; 0: all.", at_least=0.0)
    apply_chat_template: bool = flag(
        False, "Ask a task's questions as user messages, in the model's chat template."
    )
    out: str = flag("", "New JSON file for the metrics; empty: terminal only.")
    dataset: str = flag("", "Texts, comma-separated; each as in recipes.transformer.", "data")
    part: str = flag(
        "all", "Part of a text to evaluate: all, or what a training run on it holds out.",
        "data", choices=["all", "held_out"],
    )  # fmt: skip
    text_column: str = flag("text", "Text column of .jsonl, .parquet and hf: datasets.", "data")
    pair_column: str = flag(
        "", "Column of a second text, for classifiers of two; empty: as in recipes.bert.", "data"
    )
    label_column: str = flag("label", "Column of labels, of classified texts or pictures.", "data")
    image_column: str = flag("image", "Column of pictures, for --labels.", "data")
    pack: bool = flag(
        True, "Rows of whole documents; false: windows that cut them, as byte-level runs use, or with "
        "pictures a row for each.", "data",
    )  # fmt: skip
    tokenizer: str = flag(
        "", "Tokenizer, if the model has none of its own: bytes, a tokenizer.json, ORG/NAME.",
        "data",
    )  # fmt: skip
    seq_len: int = flag(
        0, "Tokens of context; 0: the model's context, for texts at most 1,024.",
        "data", at_least=0,
    )  # fmt: skip
    batch_size: int = flag(
        16, "Sequences at a time, over all devices; rounded up to suit the mesh.", "data",
        at_least=1,
    )  # fmt: skip
    dtype: str = flag(
        "", "Type of activations and weights; empty: bfloat16 on accelerators, else float32.",
        "model", choices=["", "float32", "bfloat16"],
    )  # fmt: skip
    weights: str = weights_flag("model")
    verify: bool = flag(
        True, "Check a checkpoint's files against their SHA-256 before reading it.", "checkpoints"
    )


def main(devices: Devices, flags: Evaluate) -> None:
    # ---- Check the flags before anything is computed ---------------------------------------------
    mesh, out = make_mesh(devices.mesh), folders.new_path(flags.out, "out") if flags.out else None
    source = find_model(flags)
    asked = load_tasks(flags) if flags.tasks else None
    tokenizer = checkpoint.tokenizer_for(flags.tokenizer, source)
    if flags.labels:
        return write(out, flags, classify(devices, flags, mesh, source, tokenizer))
    dtype = flags.dtype or default_dtype(mesh.devices.flat[0])
    compute = {"dtype": dtype} | read_set(type(checkpoint.config_of(source)), flags.set, ("dtype",))
    context = flags.seq_len or checkpoint.context(source)
    length = flags.seq_len or min(context, 1_024)
    rows = length if flags.dataset else 0  # tasks pad their rows to what the mesh divides
    layout = checkpoint.layout_of(source, mesh, devices.rules, seq_len=rows, **compute)
    kernel.check(layout)
    encoder = layout.config if source.metadata["entry"] == ENCODER else None
    sees = picture_prompts.sees(source.metadata["entry"])
    if not sees and (not encoder or encoder.task == "fill"):
        sources.check_column(flags.text_column, flags.dataset)
    texts: dict[str, Dataset] = {}
    for name in names(flags.dataset):
        if sees:
            texts[name] = picture_answers.load(
                name, length, layout.config, tokenizer, part=flags.part, pack=flags.pack
            )
        else:
            texts[name] = load(name, flags, length, tokenizer, encoder)

    # ---- Read the model, each shard onto its own device ------------------------------------------
    print0(report.headline(layout), *describe_set(flags))
    variables = checkpoint.restore_variables(source, layout, dtype)
    if flags.weights:
        layout, variables = to_int8(entries.model(source.metadata["entry"]), layout, variables)
    print0(*report.uneven(layout, variables))
    about = {"model": flags.restore_from, "step": source.step, "dtype": dtype}
    about |= {"weights": flags.weights} if flags.weights else {}
    about |= {"mesh": describe(mesh.shape), "rules": layout.strategy}
    results: dict[str, Any] = dict(about)

    # ---- Evaluate --------------------------------------------------------------------------------
    for name, data in texts.items():
        rows = min(flags.batch_size, len(data.held_out))
        rows = -(-rows // layout.batch_shards) * layout.batch_shards  # a multiple of the shards
        extra = encoder_evaluation.extra(encoder) if encoder else None
        extra = picture_answers.right_answers if sees else extra
        evaluation = Evaluation(dataclasses.replace(layout, batch_size=rows), data, extra)
        totals = evaluation(variables)
        facts: dict[str, Any] = {"bytes": data.held_out_bytes, "part": flags.part}
        facts |= {"seq_len": length}
        if encoder:
            summary = encoder_evaluation.in_words(totals, encoder)
            facts |= encoder_evaluation.metrics(totals, encoder)
        else:
            summary = in_words(totals, data.held_out_bytes)
        print0(f"{name}: {summary}; {flags.part}, {length:,} tokens of context.")
        print0(*(picture_answers.in_words(totals) if sees else ()))
        results.setdefault("datasets", {})[name] = evaluation.metrics(totals) | facts
    to_json = None
    if asked:
        from recipes.instruments.harness import tasks
        from recipes.instruments.harness.model import Model

        to_json = tasks.plain
        model = Model(layout, variables, tokenizer, flags.batch_size, context, about)
        results["tasks"] = tasks.run(
            model, asked, flags.num_fewshot, flags.limit, flags.apply_chat_template
        )
        print0(*tasks.tables(results["tasks"]))
    write(out, flags, results, to_json)


def write(out: Any, flags: Evaluate, results: dict[str, Any], to_json: Any = None) -> None:
    """Writes --out, if it is given."""
    if out and is_first():
        out.write_text(json.dumps(results, indent=2, default=to_json) + "\n")
        print0(f"Figures: {flags.out}")


def classify(
    devices: Devices,
    flags: Evaluate,
    mesh: Any,
    source: checkpoint.WeightSource,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Classifies pictures by captions of their classes. Returns the results. Raises UserError."""
    dtype = flags.dtype or default_dtype(mesh.devices.flat[0])
    config = checkpoint.config_of(source)
    compute: dict[str, Any] = {"dtype": dtype} | read_set(type(config), flags.set, ("dtype",))
    classes = zero_shot.read_labels(flags.labels)
    texts = Texts(config.max_positions, tokenizer, end=config.clip)
    by_captions = zero_shot.Classes(classes, texts, zero_shot.read_templates(flags.templates))
    layout = checkpoint.layout_of(source, mesh, devices.rules, **compute)
    columns = {"image_column": flags.image_column, "label_column": flags.label_column}
    parts = {
        name: zero_shot.pictures(name, classes, config, flags.part, **columns)
        for name in names(flags.dataset)
    }
    print0(report.headline(layout), *describe_set(flags))
    variables = checkpoint.restore_variables(source, layout, dtype)
    results = {"model": flags.restore_from, "step": source.step, "dtype": dtype}
    results |= {"mesh": describe(mesh.shape), "rules": layout.strategy, "datasets": {}}
    rows = -(-flags.batch_size // layout.batch_shards) * layout.batch_shards
    layout = dataclasses.replace(layout, batch_size=rows)
    for name, data in parts.items():
        right, count = zero_shot.evaluate(data, by_captions, layout, variables)
        print0(f"{name}: zero-shot accuracy {right / count:.4f}: {right:.0f} of {count:.0f} images by the "
               f"captions of {len(classes)} classes; {flags.part}.", *few(count, "images"))  # fmt: skip
        facts = {"accuracy": right / count, "images": count, "part": flags.part}
        results["datasets"][name] = facts
    return results


def load_tasks(flags: Evaluate) -> Any:
    """The harness's tasks. Raises UserError if the harness or a task is missing."""
    with needs_instruments("--tasks"):
        from recipes.instruments.harness import tasks
    return tasks.load(flags.tasks, flags.include_path)


def names(dataset: str) -> list[str]:
    """Splits --dataset at commas, unless it is a file with a comma in its name."""
    if dataset and sources.exists(dataset):
        return [dataset]
    return [name for name in split(dataset) if name]


def load(
    name: str, flags: Evaluate, length: int, tokenizer: Tokenizer, encoder: Any = None
) -> Dataset:
    """A dataset whose held-out part is the text to evaluate. Raises DataError.

    Args:
      encoder: the Config of a text encoder.
    """
    if encoder:
        return encoder_evaluation.load(name, flags, length, tokenizer, encoder)
    pack = "true" if flags.pack else "false"
    held_out = name if flags.part == "all" else ""  # as --eval_dataset: all of it is held out
    data = text.load(name, flags.text_column, length, tokenizer, pack, held_out, training=False)
    print0(*(note.replace("Held out: ", "Evaluates ", 1) for note in data.notes))
    return data


def check_used(flags: Evaluate, entry: str, task: str) -> None:
    """Raises UserError for flags that would have no effect.

    Args:
      task: of a text encoder; else empty.
    """
    missing = {
        "tasks": ("include_path", "num_fewshot", "limit", "apply_chat_template"),
        "labels": ("templates", "image_column"),
        "dataset": ("part", "text_column", "pair_column", "label_column", "pack"),
    }
    for name, of_it in missing.items():
        if not vars(flags)[name]:
            refuse_unused(flags, of_it, f"--{name}, and there is none")
    if flags.labels:
        of_texts = ("text_column", "pair_column", "pack", "seq_len")
        refuse_unused(flags, of_texts, "texts, and not for --labels")
    elif task != "classify":
        refuse_unused(flags, ("pair_column", "label_column"), "classifiers, and this is none")
    if task:
        refuse_unused(flags, ("pack",), f"models that write, and not for a {entry!r} model")


def find_model(flags: Evaluate) -> checkpoint.WeightSource:
    """The model to evaluate. Raises UserError if it, or a text or task, is missing."""
    if not flags.restore_from:
        raise UserError("--restore_from is missing; use --restore_from=RUN, or hf:DIR")
    if flags.labels and (flags.tasks or flags.weights or not flags.dataset):
        raise UserError("--labels needs --dataset=PICTURES, and neither --tasks nor --weights")
    zero_shot.read_templates(flags.templates)
    if not (flags.dataset or flags.tasks):
        raise UserError("there is nothing to evaluate on; use --dataset=FILE or --tasks=NAME")
    reads_pictures = not flags.labels and picture_prompts.any_pictures(names(flags.dataset))
    source = checkpoint.find(
        flags.restore_from,
        hash_files=flags.verify,
        base=flags.base,
        entry=picture_prompts.SEEING if reads_pictures else "",
    )
    entry = source.metadata["entry"]
    check_used(flags, entry, checkpoint.config_of(source).task if entry == ENCODER else "")
    if flags.labels:
        if entry != "siglip":
            raise UserError(f"--labels is for models of two towers, and this is a {entry!r} model")
        return source
    if entry == ENCODER:
        task = checkpoint.config_of(source).task
        if flags.tasks:
            raise UserError(
                f"--tasks={flags.tasks} is for models that write, and --restore_from={flags.restore_from} "
                "is a text encoder; use --dataset=FILE"
            )
        if task == "embed":
            raise UserError(
                f"--restore_from={flags.restore_from} makes vectors of texts; python -m recipes.embed "
                "writes them"
            )
    elif picture_prompts.sees(entry):
        refuse_unused(flags, ("text_column",), f"texts, and a {entry!r} model is evaluated on rows")
        if flags.tasks or not flags.dataset:
            raise UserError(
                f"--tasks={flags.tasks} is for models of text, and --restore_from={flags.restore_from} is a "
                f"{entry!r} model; use --dataset=FILE with rows"
            )
    elif reads_pictures and ENTRIES[entry].data == text.__name__:
        raise picture_prompts.refuse(flags.restore_from, entry, f"--dataset={flags.dataset}")
    elif entry in ENTRIES and ENTRIES[entry].data != text.__name__:
        raise UserError(
            f"--restore_from={flags.restore_from} is a {entry!r} model, which its own recipe "
            f"evaluates; use python -m recipes.{entry} --restore_from={flags.restore_from} --steps=0"
        )
    return source


if __name__ == "__main__":
    start(main, Devices(), Evaluate())
