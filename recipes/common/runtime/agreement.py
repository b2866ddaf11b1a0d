"""Whether all processes of a run were started alike: same flags, same code, same libraries.

Compared before anything is computed: else they would wait for each other, or train something else.
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
OWN = ("process_id", "coordinator")  # flags that each process has its own of
ROOT = pathlib.Path(__file__).parents[3]


def check(*groups) -> None:
    """Raises UserError, on all processes, for the first that differs from process 0 and in what.

    Args:
      groups: the instances of flags; what several have counts once.
    """
    if processes.count() > 1:
        processes.decide([socket.gethostname(), facts(*groups)], _all_alike)


def _all_alike(told: list[tuple[str, dict[str, Any]]]) -> None:
    for number, (host, other) in enumerate(told):
        if what := difference(told[0][1], other):
            raise UserError(f"process {number} ({host}) {what}")


def check_data(data: dict[str, Any]) -> None:
    """The same for what they have read.

    Args:
      data: facts of a Dataset.
    """
    processes.decide([socket.gethostname(), data], _same_data)


def _same_data(told: list[tuple[str, dict[str, Any]]]) -> None:
    first, ours = told[0]
    for number, (host, theirs) in enumerate(told):
        if theirs != ours:
            flag = "dataset" if theirs.get("tokenizer") == ours.get("tokenizer") else "tokenizer"
            raise UserError(
                f"process {number} ({host}) reads other content by --{flag} than process 0 ({first}): "
                f"fingerprint {theirs['fingerprint'][:12]}, not {ours['fingerprint'][:12]}; give all "
                "of them the same files"
            )


def facts(*groups) -> dict[str, Any]:
    """What must be alike: flags, versions of libraries, a fingerprint of the code; JSON."""
    flags = {name: value for group in groups for name, value in dataclasses.asdict(group).items()}
    versions = {"Python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    code = hashlib.sha256()
    for folder in ("zoo", "data", "recipes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            code.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    flags = {f"--{name}": value for name, value in flags.items() if name not in OWN}
    return {"flags": flags, "versions": versions, "code": code.hexdigest()[:12]}


def difference(first: dict[str, Any], other: dict[str, Any]) -> str:
    """What another process has, in words that follow its name; "" if it is as the first."""
    for name, value in first["versions"].items():
        if other["versions"].get(name) != value:
            theirs = other["versions"].get(name)
            return f"has {name} {theirs}, and process 0 has {value}; install the same on all"
    for name in first["flags"] | other["flags"]:
        ours, theirs = first["flags"].get(name), other["flags"].get(name)
        if ours != theirs:
            return f"has {name}={theirs}, and process 0 has {ours}; start all with the same flags"
    if first["code"] != other["code"]:
        return "runs other code than process 0; give all of them the same clone"
    return ""
