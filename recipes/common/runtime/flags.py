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
import re
from collections.abc import Collection, Iterable
from typing import Any

from absl import flags as absl_flags

from recipes.common.runtime.errors import UserError

SCHEDULES = ("cosine", "linear", "wsd", "constant")  # learning rate after warmup
# What other programs call a flag → what it is called here.
SYNONYMS = {
    "lr": "learning_rate", "max_lr": "learning_rate", "lr_scheduler": "schedule",
    "lr_scheduler_type": "schedule", "warmup": "warmup_steps", "wd": "weight_decay",
    "epochs": "steps", "num_train_epochs": "steps", "iters": "steps", "max_iters": "steps",
    "output_dir": "workdir", "out_dir": "workdir", "log_dir": "workdir", "checkpoint_dir": "workdir",
    "bs": "batch_size", "bsz": "batch_size", "block_size": "seq_len", "context_length": "seq_len",
    "max_length": "seq_len", "max_seq_length": "seq_len", "data": "dataset", "data_path": "dataset",
    "grad_accum": "accumulate", "gradient_accumulation_steps": "accumulate",
    "grad_clip": "clip_norm", "max_grad_norm": "clip_norm", "precision": "dtype", "bf16": "dtype",
    "fp8": "matmul", "quantization": "matmul", "gradient_checkpointing": "remat",
    "save_every": "checkpoint_every", "save_steps": "checkpoint_every",
    "save_total_limit": "keep_checkpoints", "eval_steps": "eval_every",
    "eval_interval": "eval_every", "logging_steps": "log_every", "log_interval": "log_every",
    "model": "restore_from", "model_name_or_path": "restore_from", "checkpoint": "restore_from",
    "resume_from_checkpoint": "restore_from", "tp": "mesh", "fsdp": "mesh", "gpus": "mesh",
    "num_devices": "mesh", "strategy": "rules", "sharding": "rules", "rank": "process_id",
    "world_size": "num_processes", "max_tokens": "max_new_tokens", "lora_r": "lora_rank",
    "target_modules": "lora_targets", "temp": "temperature",
}  # fmt: skip
GROUPS = ("run", "data", "model", "optimizer", "checkpoints", "processes")  # in the order of --help


def flag(
    default, help: str, group="run", *, at_least=None, at_most=None, choices=(), may_change=False,
    fields=(),
):  # fmt: skip
    """Makes a dataclass field that becomes a flag.

    Args:
      help: a phrase with the unit.
      group: heading under which --help lists it, one of GROUPS.
      at_least, at_most: inclusive bounds.
      choices: allowed values; empty: any.
      may_change: whether a resumed run may use a different value than the original run.
      fields: of --set, the names that it takes, if they are known.
    """
    limits = dict(help=help, group=group, at_least=at_least, at_most=at_most)
    limits |= dict(choices=tuple(choices), may_change=may_change, fields=tuple(fields))
    return dataclasses.field(default=default, metadata=limits)


def refuse_unused(flags: Any, names: Iterable[str], use: str, fix: str = "leave it out") -> None:
    """Raises UserError if one of these flags has another value than its default.

    Args:
      use: what the flags are for, and why that is not the case.
    """
    for name in names:
        value = vars(flags)[name]
        if value != type(flags).__dataclass_fields__[name].default:
            shown = str(value).lower() if isinstance(value, bool) else value
            raise UserError(f"--{name}={shown} is for {use}; {fix}")


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
    platform: str = flag(
        "", "Devices to use: cpu, simulated even where there is an accelerator; empty: accelerators, if "
        "there are any.", may_change=True,
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


DEFAULTS: dict[str, Any] = {}  # of the command that was parsed last; a process has one command


def parse(argv: list[str], *groups) -> list[Any] | None:
    """Returns copies of `groups` with fields set from argv; None if argv asks for help.

    Raises UserError for a flag that is unknown, of the wrong type or out of range.
    """
    if {"--help", "-help", "-h"} & set(argv):
        return None
    DEFAULTS.clear()
    DEFAULTS.update({name: value for group in groups for name, value in vars(group).items()})
    values = absl_flags.FlagValues()
    fields = {_name(field): field for group in groups for field in dataclasses.fields(group)}
    for group in groups:
        for field in dataclasses.fields(group):
            default, help = getattr(group, field.name), field.metadata["help"]
            if isinstance(default, bool):
                absl_flags.DEFINE_bool(_name(field), default, help, flag_values=values)
            elif isinstance(default, tuple):  # may be repeated
                absl_flags.DEFINE_multi_string(_name(field), default, help, flag_values=values)
            else:  # converted below, with better messages than absl's
                absl_flags.DEFINE_string(_name(field), str(default), help, flag_values=values)
    try:
        extra = values(["recipe", *argv])[1:]
    except absl_flags.UnrecognizedFlagError as error:
        near = similar_flag(error.flagname, [*fields])
        hint = f"did you mean --{near}?" if near else "--help lists the flags"
        if "set" in fields and error.flagname in fields["set"].metadata["fields"]:
            hint = f"use --set={error.flagname}=…"
        raise UserError(f"--{error.flagname} is not a flag; {hint}") from None
    except absl_flags.IllegalFlagValueError as error:  # a bool; absl sees others as strings
        assignment = str(error).partition(": ")[0].removeprefix("flag ")
        raise UserError(f"{assignment} is not a boolean; use true or false") from None
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


def similar_flag(name: str, flags: list[str]) -> str:
    """The flag that an unknown name most likely means; "" if none is similar.

    A synonym from another program, a misspelling, initials ("lr"), or a word of it ("decay").
    """
    name = name.lower().replace("-", "_")
    if (synonym := SYNONYMS.get(name)) in flags:
        return str(synonym)
    if near := nearest(name, flags):
        return near
    words = {*name.split("_")} - {"num", "size", "steps"}
    for flag_ in flags:
        initials = "".join(word[0] for word in flag_.split("_"))
        if name == initials and len(name) > 1:
            return flag_
    return next((flag_ for flag_ in flags if words & {*flag_.split("_")}), "")


def choose(name: str, text: str, choices: Collection[str], subject: str = "") -> str:
    """The choice that the text of flag `name` means, in whatever case. Raises UserError.

    Args:
      subject: subject of the message; "": the flag with its text.
    """
    if text in choices:
        return text
    by_case = {choice.lower(): choice for choice in choices if choice}
    if text.lower() in by_case:
        return by_case[text.lower()]
    near = nearest(text.lower(), by_case)
    hint = f"; did you mean {by_case[near]}?" if near else ""
    subject = subject or f"--{name}={text[:50]}"
    raise UserError(f"{subject} is not one of {', '.join(by_case.values())}{hint}")


def nearest(text: str, choices: Iterable[str]) -> str:
    """The choice of which `text` may be a misspelling, or "". Another number is none: 7b isn't 70b."""
    alike = [choice for choice in choices if re.findall(r"\d+", choice) == re.findall(r"\d+", text)]
    return next(iter(difflib.get_close_matches(text, alike, n=1, cutoff=0.7)), "")


def split(text: str, separator: str = ",") -> list[str]:
    """The parts of a flag's text, without spaces around them."""
    return [part.strip() for part in text.split(separator)]


def _convert(field, default, text):
    """Converts a flag to its default's type. Raises UserError if it is out of its limits."""
    if isinstance(default, bool):
        return text
    if isinstance(default, tuple):
        return tuple(text)
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
    if limits["choices"]:
        return choose(field.name, text, limits["choices"])
    return value


def usage(doc: str, *groups) -> str:
    """The text of --help: the recipe's docstring, then flags, defaults and meanings by heading."""
    lines = [doc.strip()]
    for heading in GROUPS:
        fields = [
            (field, getattr(group, field.name))
            for group in groups
            for field in dataclasses.fields(group)
            if field.metadata["group"] == heading
        ]
        lines += ["", f"{heading}:"] if fields else []
        for field, default in fields:
            assignment = f"--{_name(field)}={'' if default == () else default}"
            choices = [choice for choice in field.metadata["choices"] if choice]
            options = f" ({', '.join(choices)})" if choices else ""
            lines.append(f"  {assignment:<28} {field.metadata['help']}{options}")
    return "\n".join(lines)


def _name(field) -> str:
    """The name of a field's flag: --from is the field `from_`, since `from` is a word of Python."""
    return field.name.removesuffix("_")
