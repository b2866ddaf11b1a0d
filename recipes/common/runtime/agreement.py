"""Checks that all processes of a run have the same flags, code, libraries and data.

Otherwise they would wait for each other forever, or silently train something else.
"""

import dataclasses
import hashlib
import importlib.metadata
import pathlib
import platform
import socket
from typing import Any

from recipes.common.runtime import processes
from recipes.common.runtime.errors import UserError

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
OWN = ("process_id", "coordinator")  # flags that may differ between processes
ROOT = pathlib.Path(__file__).parents[3]


def check(*groups) -> None:
    """Raises UserError, on all processes, for the first one that differs from process 0.

    Args:
      groups: instances of flag dataclasses; a flag in several of them counts once.
    """
    if processes.count() > 1:
        processes.decide([socket.gethostname(), facts(*groups)], _check_facts)


def _check_facts(gathered: list[tuple[str, dict[str, Any]]]) -> None:
    for number, (host, other) in enumerate(gathered):
        if what := difference(gathered[0][1], other):
            raise UserError(f"process {number} ({host}) {what}")


def check_data(data: dict[str, Any]) -> None:
    """Raises UserError, on all processes, for the first one that reads different data.

    Args:
      data: facts of a Dataset.
    """
    processes.decide([socket.gethostname(), data], _check_data)


def _check_data(gathered: list[tuple[str, dict[str, Any]]]) -> None:
    first, expected = gathered[0]
    for number, (host, other) in enumerate(gathered):
        if other != expected:
            same_tokenizer = other.get("tokenizer") == expected.get("tokenizer")
            flag = "dataset" if same_tokenizer else "tokenizer"
            raise UserError(
                f"process {number} ({host}) reads different content from --{flag} than process 0 ({first}): "
                f"fingerprint {other['fingerprint'][:12]}, not {expected['fingerprint'][:12]}; give all "
                "of them the same files"
            )


def facts(*groups) -> dict[str, Any]:
    """Facts that must agree: flags, library versions and a fingerprint of the code, as JSON."""
    flags = {name: value for group in groups for name, value in dataclasses.asdict(group).items()}
    code = hashlib.sha256()
    for folder in ("zoo", "data", "recipes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            code.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return {
        "flags": {f"--{name}": value for name, value in flags.items() if name not in OWN},
        "versions": {"Python": platform.python_version(), **library_versions()},
        "code": code.hexdigest()[:12],
    }


def library_versions() -> dict[str, str]:
    """Library → installed version, or "none"."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    return versions


def difference(first: dict[str, Any], other: dict[str, Any]) -> str:
    """Describes how another process differs from process 0, as a predicate; "" if it doesn't."""
    for name, value in first["versions"].items():
        if other["versions"].get(name) != value:
            other_version = other["versions"].get(name)
            return f"has {name} {other_version}, and process 0 has {value}; install the same on all"
    for name in first["flags"] | other["flags"]:
        wanted, value = first["flags"].get(name), other["flags"].get(name)
        if value != wanted:
            return f"has {name}={value}, and process 0 has {wanted}; start all with the same flags"
    if first["code"] != other["code"]:
        return "runs different code than process 0; give all of them the same clone"
    return ""
