"""The card of a published checkpoint: what it is, how it was made, the SHA-256 of every file.

And that of an exported model folder, in the Hub's form. Both say only what the checkpoint says: a
fine-tuned model's base, its data, and its held-out figures before and after.
"""

import json
import pathlib
import re
import shlex
from typing import Any

from data import hub
from recipes.common.entries import ENTRIES
from recipes.common.runtime import describe, jsonl

FILE = "README.md"

LICENCES = {  # of the data that comes with the zoo or with Python
    "teacher": "CC0-1.0",
    "digits": "CC-BY-4.0 (E. Alpaydin and C. Kaynak, doi:10.24432/C50P49; see data/README.md)",
    "stdlib": "PSF-2.0",
}

# Flags that say where a run was and how it was watched, and change no result.
UNTOLD = {
    *("workdir", "log_every", "checkpoint_every", "keep_checkpoints", "verify"),
    *("num_processes", "process_id", "coordinator", "prompt", "sample_bytes", "chat"),
    *("temperature", "eval_every", "keep_best", "tensorboard", "profile"),
}
ROW = re.compile(r"^\| `(.+)` \| [\d,]+ \| `([0-9a-f]{64})` \|$", re.MULTILINE)


def digests(text: str) -> dict[str, str]:
    """File → SHA-256, as a card says."""
    return dict(ROW.findall(text))


def measured(checkpoint: pathlib.Path, step: int) -> dict[str, Any]:
    """Held-out figures and seconds of training, from metrics.jsonl of the checkpoint's run.

    "held_out_before" are those at step 0, of the model that a run began with, if it did.
    """
    held_out, seconds, before = {}, 0.0, 0
    for line in jsonl.read(checkpoint.parent.parent / "metrics.jsonl"):
        if line["step"] > step:
            break
        if "step_seconds" in line:  # the mean since the line before
            seconds += line["step_seconds"] * (line["step"] - before)
            before = line["step"]
        elif line["step"] in (0, step):
            figures = {k.removeprefix("held_out_"): v for k, v in line.items() if k != "step"}
            # null: not finite
            held_out[line["step"]] = {k: v for k, v in figures.items() if v is not None}
    began = {"held_out_before": held_out[0]} if step and 0 in held_out else {}
    return {"held_out": held_out.get(step, {}), **began, "train_seconds": seconds}


def facts(source, arrays: list, licence: str, note: str) -> dict[str, Any]:
    """What a card says besides the checkpoint's metadata.

    Args:
      source: a checkpoint's path, step and metadata.
      arrays: the parameters, or what has their sizes and dtypes.
    """
    began, known = base(source.metadata), source.metadata.get("published")
    if known:
        given = {"licence": licence, "note": " ".join(note.split())}
        return known | {name: value for name, value in given.items() if value}
    return {
        "parameters": sum(array.size for array in arrays),
        "dtype": " and ".join(sorted({str(array.dtype) for array in arrays})),
        "licence": licence,
        "note": " ".join(note.split()),
        "unit": ENTRIES[source.metadata["entry"]].unit,
        **(measured(source.path, source.step) if trained(source.metadata) else {}),
        **({"base": began} if began else {}),
    }


def base(metadata: dict[str, Any]) -> dict[str, str]:
    """{"path": …} of the model that a run began with, and its "sha256" if that is known; or {}.

    An imported model is called what it was imported from; any other as the command named it.
    """
    published = metadata.get("published", {}).get("base")
    if published:
        return published
    began = metadata.get("base", {})
    given = metadata.get("flags", {}).get("restore_from") or began.get("path")
    return began | {"path": metadata.get("imported", given)} if given else {}


def command(metadata: dict[str, Any]) -> str:
    """The command that trains this again."""
    told = {"mesh": describe(metadata["mesh"]), "rules": metadata["rules"]["name"]}
    flags = {name: value for name, value in metadata["flags"].items() if name not in UNTOLD} | told
    given = [f"--{name}={shlex.quote(str(value))}" for name, value in flags.items() if value != ""]
    return " ".join([f"python -m recipes.{metadata['entry']}", *given])


def text(name: str, ours: bool, metadata: dict[str, Any], hashes: dict[str, list]) -> str:
    """A card in Markdown.

    Args:
      ours: whether it travels with the zoo, where its name is enough to find it.
      hashes: file → [bytes, SHA-256], of all files but the card.
    """
    facts = metadata["published"]
    # What its held-out figure depends on.
    given = [f"--{k}={shlex.quote(str(v))}" for k, v in metadata["flags"].items()
             if k in ("dataset", "eval_dataset", "seq_len") and v]  # fmt: skip
    restore_from = f"--restore_from={'' if ours else 'path/to/'}{name}"
    evaluate = " ".join([f"python -m recipes.{metadata['entry']} {restore_from} --steps=0", *given])
    # What is trained is float32.
    rounded = "matmuls' weights, when published; held-out figures are from before"
    rows = origin(metadata, facts) | {
        "Rounded": rounded if facts["dtype"] != "float32" else "",
        "Probe": f"`probe.json` has a batch and its loss, {facts['probe_loss']:.6f} {facts['unit']}: "
        "every mesh and table gives it to 1e-5 in float32",
        "Versions": ", ".join(
            f"{name} {version}" for name, version in metadata["versions"].items()
        ),
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
            "| File | Bytes | SHA-256 |",
            "| --- | ---: | --- |",
            *(f"| `{name}` | {size:,} | `{sha}` |" for name, (size, sha) in hashes.items()),
            "",
        ]
    )


def kind(metadata: dict[str, Any]) -> str:
    return "fine-tuned" if base(metadata) else "trained" if trained(metadata) else "language"


def trained(metadata: dict[str, Any]) -> bool:
    """Whether it comes from a training run of the zoo."""
    return "dataset" in metadata.get("data", {})


def origin(metadata: dict[str, Any], facts: dict[str, Any]) -> dict[str, str]:
    """What it was made of, how, and what came of it; an empty value is no row.

    Args:
      facts: parameters, dtype, unit, and what `measured` found.
    """
    data, began = metadata["data"], base(metadata)
    asked = metadata["flags"].get("steps", metadata["step"])
    minutes, seconds = divmod(round(facts["train_seconds"]), 60)
    return {
        "Parameters": f"{facts['parameters']:,}, {facts['dtype']}",
        "Base model": in_words(began),
        "Made by": f"`{command(metadata)}`",
        "Mesh": f"{describe(metadata['mesh'])}, rules {metadata['rules']['name']}",
        "Data": f"{data['dataset']}, fingerprint `{data['fingerprint']}`",
        "Steps": f"{metadata['step']:,}" + (f" of {asked:,}" if asked != metadata["step"] else ""),
        "Time": f"{minutes} min {seconds} s for the steps" if facts["train_seconds"] else "unknown",
        "Held out before": figures(facts, "held_out_before") if began else "",
        "Held out": figures(facts, "held_out"),
    }


def figures(facts: dict[str, Any], which: str) -> str:
    """Held-out figures in words, but for those of which there are many, as load_7."""
    found = {key: value for key, value in facts.get(which, {}).items() if not key[-1].isdigit()}
    told = ", ".join(f"{key} {value:,.7g}" for key, value in found.items())
    return f"{told} ({facts['unit']})" if told else "not measured"


def table(rows: dict[str, str]) -> list[str]:
    """Lines of Markdown, and an empty one."""
    lines = [f"| {key} | {value} |" for key, value in rows.items() if value]
    return ["| | |", "| --- | --- |", *lines, ""]


# ---- in the Hub's form ---------------------------------------------------------------------------

# Names that the Hub knows; others are licence "other", by their name.
HUB_LICENCES = {
    "apache-2.0",
    "mit",
    "cc0-1.0",
    "cc-by-4.0",
    "cc-by-sa-4.0",
    "bsd-3-clause",
    "gpl-3.0",
}
HUB_LICENCES |= {"llama2", "llama3", "llama3.1", "llama3.2", "llama3.3", "gemma", "openrail"}


def for_hub(
    name: str, metadata: dict[str, Any], facts: dict[str, Any], adapter: bool = False
) -> str:
    """The README.md of a model folder, or of an adapter's; the Hub reads its front matter.

    Args:
      facts: as `facts` gives them; a licence of "" is not told.
    """
    began, licence = base(metadata), facts["licence"].lower()
    library = "peft" if adapter else "transformers"
    front = {"library_name": library, "pipeline_tag": "text-generation"}
    if licence:
        known = licence in HUB_LICENCES
        front |= {"license": licence} if known else {"license": "other", "license_name": licence}
    if began and on_the_hub(began["path"]):
        relation = "adapter" if adapter else "finetune"
        front |= {"base_model": began["path"].removeprefix("hf:")}
        front |= {"base_model_relation": relation}
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
    ]
    return "\n".join(lines)


def in_words(began: dict[str, str]) -> str:
    """A base model in words."""
    digest = f", SHA-256 `{began['sha256']}`" if began.get("sha256") else ""
    return f"`{began['path']}`{digest}" if began else ""


def on_the_hub(path: str) -> bool:
    """Whether a base is ORG/NAME there: "hf:" may also be of a folder."""
    name = path.removeprefix("hf:")
    return (
        path != name
        and bool(re.fullmatch(hub.MODEL_NAME, name))
        and not pathlib.Path(name).exists()
    )
