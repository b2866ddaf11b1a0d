"""The card of a published checkpoint: what it is, how it was made, the SHA-256 of every file."""

import pathlib
import re
import shlex
from typing import Any

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
    """Held-out figures and seconds of training, from metrics.jsonl of the checkpoint's run."""
    held_out, seconds, before = {}, 0.0, 0
    for line in jsonl.read(checkpoint.parent.parent / "metrics.jsonl"):
        if line["step"] > step:
            break
        if "step_seconds" in line:  # the mean since the line before
            seconds += line["step_seconds"] * (line["step"] - before)
            before = line["step"]
        elif line["step"] == step:
            figures = {k.removeprefix("held_out_"): v for k, v in line.items() if k != "step"}
            held_out = {k: v for k, v in figures.items() if v is not None}  # null: not finite
    return {"held_out": held_out, "train_seconds": seconds}


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
    facts, data = metadata["published"], metadata["data"]
    count, dtype = facts["parameters"], facts["dtype"]
    # What its held-out figure depends on.
    given = [f"--{k}={shlex.quote(str(v))}" for k, v in metadata["flags"].items()
             if k in ("dataset", "seq_len")]  # fmt: skip
    restore_from = f"--restore_from={'' if ours else 'path/to/'}{name}"
    evaluate = " ".join([f"python -m recipes.{metadata['entry']} {restore_from} --steps=0", *given])
    asked = metadata["flags"].get("steps", metadata["step"])
    minutes, seconds = divmod(round(facts["train_seconds"]), 60)
    held_out = ", ".join(f"{key} {value:,.7g}" for key, value in facts["held_out"].items())
    versions = ", ".join(f"{name} {version}" for name, version in metadata["versions"].items())
    rows = {
        "Parameters": f"{count:,}, {dtype}",
        "Made by": f"`{command(metadata)}`",
        "Mesh": f"{describe(metadata['mesh'])}, rules {metadata['rules']['name']}",
        "Data": f"{data['dataset']}, fingerprint `{data['fingerprint']}`",
        "Steps": f"{metadata['step']:,}" + (f" of {asked:,}" if asked != metadata["step"] else ""),
        "Time": f"{minutes} min {seconds} s for the steps" if facts["train_seconds"] else "unknown",
        "Held out": f"{held_out} ({facts['unit']})" if held_out else "not measured",
        "Probe": f"`probe.json` has a batch and its loss, {facts['probe_loss']:.6f} {facts['unit']}: "
        "every mesh and table gives it to 1e-5 in float32",
        "Versions": versions,
        "Licence": facts["licence"],
        "Note": facts["note"],
    }
    return "\n".join(
        [
            f"# {name}",
            "",
            f"A trained `zoo/{metadata['entry']}.py`, to be restored onto any mesh:",
            "",
            f"    {evaluate}",
            "",
            "| | |",
            "| --- | --- |",
            *(f"| {key} | {value} |" for key, value in rows.items() if value),
            "",
            "| File | Bytes | SHA-256 |",
            "| --- | ---: | --- |",
            *(f"| `{name}` | {size:,} | `{sha}` |" for name, (size, sha) in hashes.items()),
            "",
        ]
    )
