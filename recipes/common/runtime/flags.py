"""Dataclass fields as absl flags.

    @dataclasses.dataclass(frozen=True)
    class Flags:
        seq_len: int = flag(256, "Tokens of context.", group="data", at_least=1)

Bounds, choices and messages are checked here because absl's validators print a multi-line usage text
and have no "did you mean". The flags live in their own FlagValues, because two modules that define
`--mesh` would collide in absl's global one.
"""

import dataclasses
import difflib
import math
from typing import Any

from absl import flags as absl_flags

from recipes.common.runtime.errors import UserError

SCHEDULES = ("cosine", "linear", "wsd", "constant")  # learning rate after warmup
GROUPS = ("run", "data", "model", "optimizer", "checkpoints", "processes")  # in the order of --help


def flag(
    default, help: str, group="run", *, at_least=None, at_most=None, choices=(), may_change=False
):
    """Makes a dataclass field that becomes a flag.

    Args:
      help: a phrase with the unit.
      group: heading under which --help lists it, one of GROUPS.
      at_least, at_most: inclusive bounds.
      choices: allowed values; empty: any.
      may_change: whether a resumed run may use a different value than the original run.
    """
    limits = dict(help=help, group=group, at_least=at_least, at_most=at_most)
    limits |= dict(choices=tuple(choices), may_change=may_change)
    return dataclasses.field(default=default, metadata=limits)


@dataclasses.dataclass(frozen=True)
class Devices:
    """Flags of commands that run on a mesh."""

    mesh: str = flag(
        "", "Device mesh, as sizes (8, 4x2, 2x2x2) or names (data=2,model=4); empty: all on data.",
        may_change=True,
    )  # fmt: skip
    rules: str = flag(
        "", "Sharding rules: a key of the zoo file's RULES, or a .json file with your own table; "
        "empty: chosen by the mesh.", may_change=True,
    )  # fmt: skip
    num_processes: int = flag(
        0, "Processes that share this run; 0: one, or found from Slurm, Open MPI or a TPU pod.",
        "processes", at_least=0, may_change=True,
    )  # fmt: skip
    process_id: int = flag(
        -1, "This process's number, from 0; only with --num_processes.", "processes",
        at_least=-1, may_change=True,
    )  # fmt: skip
    coordinator: str = flag(
        "", "HOST:PORT of process 0; only with --num_processes.", "processes", may_change=True
    )


@dataclasses.dataclass(frozen=True)
class Run(Devices):
    """Flags of every recipe that trains."""

    steps: int = flag(
        100, "Optimizer steps in total, also when resumed.", at_least=0, may_change=True
    )
    plan: bool = flag(
        False, "Only estimate memory, bytes sent and time of a step; nothing is allocated or written.",
        may_change=True,
    )  # fmt: skip
    seed: int = flag(
        0, "Seed of parameters, data order and samples.", at_least=0, at_most=2**31 - 1
    )
    workdir: str = flag(
        "", "Folder for checkpoints and metrics; empty: runs/<recipe>.", may_change=True
    )
    log_every: int = flag(10, "Steps between lines of metrics.jsonl.", at_least=1, may_change=True)
    eval_every: int = flag(
        0, "Steps between evaluations on the held-out data; 0: only at the end.",
        at_least=0, may_change=True,
    )  # fmt: skip
    tensorboard: bool = flag(
        False, "Also write TensorBoard's event files, to WORKDIR/tensorboard.", may_change=True
    )
    wandb: str = flag("", "Project of Weights & Biases to log to; empty: none.", may_change=True)
    profile: str = flag(
        "", "Steps to profile, FIRST:LAST; the trace is in WORKDIR/profile.", may_change=True
    )
    batch_size: int = flag(32, "Examples a step, over all devices.", "data", at_least=1)
    learning_rate: float = flag(1e-3, "Peak learning rate.", "optimizer", at_least=0.0)
    schedule: str = flag(
        "cosine", "Learning rate schedule after warmup.", "optimizer", choices=SCHEDULES
    )
    skip_nonfinite: int = flag(
        0, "Consecutive updates with a non-finite loss or gradient to skip before the run stops.",
        "optimizer", at_least=0, may_change=True,
    )  # fmt: skip
    checkpoint_every: int = flag(
        200, "Steps between checkpoints; the last step is always saved.", "checkpoints",
        at_least=1, may_change=True,
    )  # fmt: skip
    keep_checkpoints: int = flag(
        2, "Newest checkpoints to keep.", "checkpoints", at_least=1, may_change=True
    )
    keep_best: bool = flag(
        False, "Also keep the checkpoint with the lowest held-out loss; needs --eval_every.",
        "checkpoints", may_change=True,
    )  # fmt: skip
    restore_from: str = flag(
        "", "Start from the parameters of this run, checkpoint or published name, or hf:DIR.",
        "checkpoints", may_change=True,
    )  # fmt: skip
    verify: bool = flag(
        True, "Check a checkpoint's files against their SHA-256 before reading it.",
        "checkpoints", may_change=True,
    )  # fmt: skip


def parse(argv: list[str], *groups) -> list[Any] | None:
    """Returns copies of `groups` with fields set from argv; None if argv asks for help.

    Raises UserError for a flag that is unknown, of the wrong type or out of range.
    """
    if {"--help", "-help", "-h"} & set(argv):
        return None
    values = absl_flags.FlagValues()
    fields = {_name(field): field for group in groups for field in dataclasses.fields(group)}
    for group in groups:
        for field in dataclasses.fields(group):
            default, help = getattr(group, field.name), field.metadata["help"]
            if isinstance(default, bool):
                absl_flags.DEFINE_bool(_name(field), default, help, flag_values=values)
            else:  # converted below, with better messages than absl's
                absl_flags.DEFINE_string(_name(field), str(default), help, flag_values=values)
    try:
        extra = values(["recipe", *argv])[1:]
    except absl_flags.UnrecognizedFlagError as error:
        name = error.flagname
        near = difflib.get_close_matches(name, fields, n=1)
        hint = f"did you mean --{near[0]}?" if near else "--help lists the flags"
        raise UserError(f"--{name} is not a flag; {hint}") from None
    except absl_flags.IllegalFlagValueError as error:  # a bool; absl sees others as strings
        given = str(error).partition(": ")[0].removeprefix("flag ")
        raise UserError(f"{given} is not a boolean; use true or false") from None
    except absl_flags.Error as error:
        raise UserError(f"{str(error).rstrip('.')}; --help lists the flags") from None
    if extra:
        raise UserError(f"{extra[0]!r} is not a flag; write flags as --name=value")
    return [
        dataclasses.replace(
            group,
            **{
                field.name: _convert(field, getattr(group, field.name), values[_name(field)].value)
                for field in dataclasses.fields(group)
            },
        )
        for group in groups
    ]


def _convert(field, default, text):
    """Converts a flag to its default's type. Raises UserError if it is out of its limits."""
    if isinstance(default, bool):
        return text
    limits, value = field.metadata, text
    if not isinstance(default, str):
        kind, name = (int, "a whole number") if isinstance(default, int) else (float, "a number")
        try:
            value = kind(text)
        except ValueError:
            raise UserError(f"--{field.name}={text[:50]} is not {name}; try {default}") from None
        if not math.isfinite(value):
            raise UserError(f"--{field.name}={text} is not a finite number; try {default}")
        least, most = limits["at_least"], limits["at_most"]
        most = 2**31 - 1 if kind is int and most is None else most
        if least is not None and value < least:
            raise UserError(f"--{field.name}={text} must be ≥ {least}; try {default}")
        if most is not None and value > most:
            raise UserError(f"--{field.name}={text} must be ≤ {most}; try {default}")
    if limits["choices"] and value not in limits["choices"]:
        options = ", ".join(choice or '""' for choice in limits["choices"])
        raise UserError(f"--{field.name}={text} is not one of {options}")
    return value


def usage(doc: str, *groups) -> str:
    """The text of --help: the recipe's docstring, then flags, defaults and meanings by heading."""
    lines = [doc.strip()]
    for heading in GROUPS:
        found = [
            (f"--{_name(field)}={getattr(group, field.name)}", field.metadata)
            for group in groups
            for field in dataclasses.fields(group)
            if field.metadata["group"] == heading
        ]
        lines += ["", f"{heading}:"] if found else []
        for shown, about in found:
            choices = [choice for choice in about["choices"] if choice]
            options = f" ({', '.join(choices)})" if choices else ""
            lines.append(f"  {shown:<28} {about['help']}{options}")
    return "\n".join(lines)


def _name(field) -> str:
    """The name of a field's flag: --from is the field `from_`, since `from` is a word of Python."""
    return field.name.removesuffix("_")
