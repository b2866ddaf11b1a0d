"""Cards (README.md) of published checkpoints and, in the Hub's form, of exported model folders.

A card lists how the model was made and, for a checkpoint, the SHA-256 of every file. All of its facts
come from the checkpoint: the base of a fine-tuned model, its data, held-out metrics before and after.
"""

import json
import pathlib
import re
import shlex
from typing import Any

from data import hub
from recipes.common.checkpoint import integrity, probe
from recipes.common.entries import ENTRIES
from recipes.common.runtime import describe, quote
from recipes.common.storage import folders, jsonl

PICTURE = "loss.png"

LICENCES = {  # for datasets that come with the zoo or with Python
    "teacher": "CC0-1.0",
    "digits": "CC-BY-4.0 (E. Alpaydin and C. Kaynak, doi:10.24432/C50P49; see data/README.md)",
    "stdlib": "PSF-2.0",
}

# Flags that change no result: locations, logging, sampling.
OMITTED_FLAGS = {
    *("workdir", "log_every", "checkpoint_every", "keep_checkpoints", "verify"),
    *(
        "num_processes",
        "process_id",
        "coordinator",
        "prompt",
        "sample_bytes",
        "sample_rules",
        "chat",
    ),
    *("temperature", "eval_every", "keep_best", "tensorboard", "wandb", "profile", "plan"),
    "platform",
}


def measured(checkpoint: pathlib.Path, step: int) -> dict[str, Any]:
    """Held-out metrics and seconds of training, from metrics.jsonl of the checkpoint's run.

    "held_out_before" has the metrics at step 0, if the run started from a trained model.
    """
    held_out, seconds, before = {}, 0.0, 0
    for line in jsonl.read(checkpoint.parent.parent / "metrics.jsonl"):
        if line["step"] > step:
            break
        if "step_seconds" in line:  # the mean since the line before
            seconds += line["step_seconds"] * (line["step"] - before)
            before = line["step"]
        elif line["step"] in (0, step):
            metrics = {k.removeprefix("held_out_"): v for k, v in line.items() if k != "step"}
            # null stands for a non-finite number
            held_out[line["step"]] = {k: v for k, v in metrics.items() if v is not None}
    began = {"held_out_before": held_out[0]} if step and 0 in held_out else {}
    return {"held_out": held_out.get(step, {}), **began, "train_seconds": seconds}


# A text encoder's task → the Hub's name for it, and the unit of its loss.
ENCODERS = {
    "fill": ("fill-mask", "nats a masked token"),
    "classify": ("text-classification", "nats a text"),
    "embed": ("sentence-similarity", "nats a pair of texts"),
}

# Data of models of images → the Hub's name for their task.
OF_IMAGES = {
    "data.images": "image-classification",
    "data.captions": "zero-shot-image-classification",
}


def task_of(metadata: dict[str, Any]) -> str:
    """A text encoder's task; empty for other models."""
    return metadata.get("config", {}).get("task", "")


def facts(source, arrays: list, licence: str, note: str) -> dict[str, Any]:
    """Facts for a card that the checkpoint's metadata lacks.

    Args:
      source: a checkpoint's path, step and metadata.
      arrays: the parameters, or ShapeDtypeStructs of them.
    """
    began, published = base(source.metadata), source.metadata.get("published")
    if published:
        flags = {"licence": licence, "note": " ".join(note.split())}
        return published | {name: value for name, value in flags.items() if value}
    usual = ENTRIES[source.metadata["entry"]].unit
    return {
        "parameters": sum(array.size for array in arrays),
        "dtype": " and ".join(sorted({str(array.dtype) for array in arrays})),
        "licence": licence,
        "note": " ".join(note.split()),
        "unit": ENCODERS.get(task_of(source.metadata), ("", usual))[1],
        **(measured(source.path, source.step) if trained(source.metadata) else {}),
        **({"base": began} if began else {}),
        **({"sample": sample} if (sample := _sample(source)) else {}),
    }


def _sample(source) -> dict[str, Any]:
    """The text that the run printed at its end, if it is this checkpoint's: sample.json."""
    if not trained(source.metadata):
        return {}
    try:
        sample = json.loads((source.path.parent.parent / "sample.json").read_text())
        return sample if sample["step"] == source.step else {}
    except (*folders.errors(), ValueError, LookupError, TypeError):
        return {}  # an older run, or one that printed none


def picture(source) -> bytes:
    """The picture of the losses of a checkpoint's run; empty if there is none."""
    if "published" in source.metadata or not trained(source.metadata):
        return b""
    try:
        return (source.path.parent.parent / "pictures" / PICTURE).read_bytes()
    except folders.errors():
        return b""


def base(metadata: dict[str, Any]) -> dict[str, str]:
    """{"path": …} of the model that a run started from, with "sha256" if known; {} if none.

    An imported model is named by its origin, any other by --restore_from.
    """
    published = metadata.get("published", {}).get("base")
    if published:
        return published
    began = metadata.get("base", {})
    restore_from = metadata.get("flags", {}).get("restore_from") or ""
    path = began.get("path", restore_from)
    # --restore_from may be a relative path, or an adapter that was trained further.
    if restore_from and path.startswith(restore_from):
        path = restore_from
    origin = metadata.get("imported", "")
    # Early versions named a local folder without its path.
    return began | {"path": origin if origin.startswith("hf:") else path} if path else {}


def command(metadata: dict[str, Any]) -> str:
    """The command that repeats this training run, without flags that have their defaults.

    Older runs did not record which those are: then all flags are in it.
    """
    kept = metadata.get("not_default", metadata["flags"])
    flags = {"mesh": describe(metadata["mesh"])}
    if "rules" in kept:
        flags["rules"] = metadata["flags"].get("rules") or metadata["rules"]["name"]
    # The default of --lora_alpha, 0, stands for a value that depends on the rank.
    derived = {"lora_alpha": metadata["lora_alpha"]} if "lora_alpha" in metadata else {}
    for name, value in (metadata["flags"] | derived).items():
        shows = name in kept or name in derived
        if shows and name not in OMITTED_FLAGS and name not in ("mesh", "rules"):
            flags[name] = value
    words = [
        f"--{name}={shlex.quote(shown(one))}"
        for name, value in flags.items()
        for one in (value if isinstance(value, (list, tuple)) else [value])  # --set may be repeated
        if one != ""
    ]
    recipe = metadata.get("recipe", metadata["entry"])
    return " ".join([f"python -m recipes.{recipe}", *words])


def shown(value: Any) -> str:
    """A flag's value for a card: of an absolute path, which means nothing elsewhere, only its name."""
    prefix = "hf:" if str(value).startswith("hf:/") else ""
    text = str(value).removeprefix(prefix)
    is_local = text.startswith(("/", "~")) and len(text) > 1
    return f"{prefix}path/to/{pathlib.PurePath(text).name}" if is_local else f"{prefix}{text}"


def text(name: str, ours: bool, metadata: dict[str, Any], hashes: dict[str, list]) -> str:
    """The card of a published checkpoint, in Markdown.

    Args:
      ours: whether it is one of the zoo's own, which are found by name.
      hashes: file → [bytes, SHA-256], of all files but the card.
    """
    facts = metadata["published"]
    # The flags that determine its held-out metrics.
    words = [f"--{k}={shlex.quote(shown(v))}" for k, v in metadata["flags"].items()
             if k in ("dataset", "eval_dataset", "seq_len") and v and not has_no_unit(metadata)]  # fmt: skip
    restore_from = f"--restore_from={'' if ours else 'path/to/'}{name}"
    evaluate = " ".join([f"python -m recipes.{metadata['entry']} {restore_from} --steps=0", *words])
    rounded = "matmul weights, when published; held-out figures are from before"
    rows = origin(metadata, facts) | {
        "Rounded": rounded if facts["dtype"] != "float32" else "",
        "Probe": f"`probe.json` has a batch and its loss, {facts['probe_loss']:.6f} {facts['unit']}: "
        "every mesh with any sharding rules reproduces it to 1e-5 in float32",
        "Versions": ", ".join(f"{name} {v}" for name, v in metadata["versions"].items()),
        "Licence": facts["licence"],
        "Note": facts["note"],
    }
    return "\n".join(
        [
            f"# {name}",
            "",
            f"A {kind(metadata)} `zoo/{metadata['entry']}.py`, to be restored onto any mesh:",
            "",
            f"    {evaluate}",
            "",
            *table(rows),
            *(["![Losses of the run](loss.png)", ""] if PICTURE in hashes else []),
            *in_its_words(facts),
            *integrity.card_rows(hashes),
            "",
        ]
    )


def kind(metadata: dict[str, Any]) -> str:
    return "fine-tuned" if base(metadata) else "trained" if trained(metadata) else "language"


def trained(metadata: dict[str, Any]) -> bool:
    """Whether the checkpoint comes from a training run of the zoo."""
    return "dataset" in metadata.get("data", {})


def origin(metadata: dict[str, Any], facts: dict[str, Any]) -> dict[str, str]:
    """Rows of a card about a training run; `table` skips empty values.

    Args:
      facts: parameters, dtype, unit, and the result of `measured`.
    """
    data, began = metadata["data"], base(metadata)
    asked = metadata["flags"].get("steps", metadata["step"])
    minutes, seconds = divmod(round(facts["train_seconds"]), 60)
    unit = "" if has_no_unit(metadata) else f" ({facts['unit']})"
    return {
        "Parameters": f"{facts['parameters']:,}, {facts['dtype']}",
        "Base model": in_words(began),
        "Made by": f"`{command(metadata)}`",
        "Mesh": f"{describe(metadata['mesh'])}, rules {metadata['rules']['name']}",
        "Data": f"{shown(data['dataset'])}, fingerprint `{data['fingerprint']}`",
        "Steps": f"{metadata['step']:,}" + (f" of {asked:,}" if asked != metadata["step"] else ""),
        "Time": f"{minutes} min {seconds} s for the steps" if facts["train_seconds"] else "unknown",
        "Held out before": in_numbers(facts, "held_out_before", unit) if began else "",
        "Held out": in_numbers(facts, "held_out", unit),
    }


def has_no_unit(metadata: dict[str, Any]) -> bool:
    """Whether its metrics are those of pairs or of rewards, and in no unit."""
    return metadata.get("recipe") in (probe.PAIRS, probe.ANSWERS)


def in_numbers(facts: dict[str, Any], which: str, unit: str) -> str:
    """Formats held-out metrics, without numbered ones such as load_7."""
    metrics = {key: value for key, value in facts.get(which, {}).items() if not key[-1].isdigit()}
    listed = ", ".join(f"{key} {value:,.7g}" for key, value in metrics.items())
    return f"{listed}{unit}" if listed else "not measured"


def in_its_words(facts: dict[str, Any]) -> list[str]:
    """Lines with the sample of the model's text, and an empty line; none if there is no sample.

    An indented block, which no text of a model can end.
    """
    sample = facts.get("sample")
    if not sample:
        return []
    prompt = f" after the prompt {json.dumps(sample['prompt'])}" if sample["prompt"] else ""
    lines = [line.removeprefix("  | ") for line in quote(sample["text"])]
    title = f"A sample{prompt}, at temperature {sample['temperature']}:"
    return [title, "", *(f"    {line}" for line in lines), ""]


def table(rows: dict[str, str]) -> list[str]:
    """Lines of a Markdown table, and an empty line."""
    lines = [f"| {key} | {value} |" for key, value in rows.items() if value]
    return ["| | |", "| --- | --- |", *lines, ""]


# ---- Hugging Face Hub ----------------------------------------------------------------------------

# Licences that the Hub knows by name; the others need "other" and a name.
HUB_LICENCES = {"apache-2.0", "mit", "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "bsd-3-clause"}
HUB_LICENCES |= {"llama2", "llama3", "llama3.1", "llama3.2", "llama3.3", "gemma", "openrail"}
HUB_LICENCES |= {"gpl-3.0"}


def for_hub(
    name: str,
    metadata: dict[str, Any],
    facts: dict[str, Any],
    adapter: bool = False,
    has_picture: bool = False,
) -> str:
    """The README.md of an exported model or adapter; the Hub reads its front matter.

    Args:
      facts: the result of `facts`; an empty licence is left out.
    """
    began, licence = base(metadata), facts["licence"].lower()
    library = "peft" if adapter else "transformers"
    task = OF_IMAGES.get(ENTRIES[metadata["entry"]].data, "text-generation")
    task = ENCODERS.get(task_of(metadata), (task, ""))[0]
    front = {"library_name": library, "pipeline_tag": task}
    if licence:
        other = {"license": "other", "license_name": licence}
        front |= {"license": licence} if licence in HUB_LICENCES else other
    if began and on_the_hub(began["path"]):
        relation = "adapter" if adapter else "finetune"
        front |= {"base_model": began["path"].removeprefix("hf:"), "base_model_relation": relation}
    rows = {"Parameters": f"{facts['parameters']:,}", "Base model": in_words(began)}
    rows |= origin(metadata, facts) if trained(metadata) else {}
    rows |= {"Licence": facts["licence"], "Note": facts["note"]}
    what = "An adapter (LoRA)" if adapter else f"A {kind(metadata)} model"
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in front.items()),
        "tags:",
        "- sharded-model-zoo",
        "---",
        "",
        f"# {name}",
        "",
        f"{what}, exported from a checkpoint of the sharded model zoo's `zoo/{metadata['entry']}.py`.",
        "",
        *table(rows),
        *(["![Losses of the run](loss.png)", ""] * has_picture),
        *in_its_words(facts),
    ]
    return "\n".join(lines)


def in_words(began: dict[str, str]) -> str:
    """Formats a base model for a card."""
    digest = f", SHA-256 `{began['sha256']}`" if began.get("sha256") else ""
    return f"`{began['path']}`{digest}" if began else ""


def on_the_hub(path: str) -> bool:
    """Whether a base is hf:ORG/NAME, and not hf:FOLDER."""
    name = path.removeprefix("hf:")
    return (
        path != name
        and bool(re.fullmatch(hub.MODEL_NAME, name))
        and not pathlib.Path(name).exists()
    )
