"""The card of a published checkpoint: what it is, how it was made, the SHA-256 of every file."""

import re
import shlex
from typing import Any

from recipes.common.mesh import describe

FILE = "README.md"

# Flags that say where a run was and how it was watched, not what came of it.
UNTOLD = {
    *("workdir", "log_every", "checkpoint_every", "keep_checkpoints", "verify"),
    *("num_processes", "process_id", "coordinator", "prompt", "sample_bytes"),
}
ROW = re.compile(r"^\| `(.+)` \| [\d,]+ \| `([0-9a-f]{64})` \|$", re.MULTILINE)


def digests(text: str) -> dict[str, str]:
    """File → SHA-256, as a card says."""
    return dict(ROW.findall(text))


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
    minutes, seconds = divmod(round(facts["train_seconds"]), 60)
    held_out = ", ".join(f"{key} {value:,.7g}" for key, value in facts["held_out"].items())
    versions = ", ".join(f"{name} {version}" for name, version in metadata["versions"].items())
    rows = {
        "Parameters": f"{count:,}, {dtype}",
        "Made by": f"`{command(metadata)}`",
        "Mesh": f"{describe(metadata['mesh'])}, rules {metadata['rules']['name']}",
        "Data": f"{data['dataset']}, fingerprint `{data['fingerprint']}`",
        "Steps": f"{metadata['step']:,}",
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
            f"    python -m recipes.{metadata['entry']} --restore_from={'' if ours else 'path/to/'}{name} --steps=0",
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
