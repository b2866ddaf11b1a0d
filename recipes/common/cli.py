"""Dataclass fields → absl flags → main. A user's mistake is one sentence and exit code 2.

    @dataclasses.dataclass(frozen=True)
    class Flags:
        seq_len: int = flag(256, "tokens of context", at_least=1)

    def main(run: Run, flags: Flags): ...

    if __name__ == "__main__":
        start(main, Run(steps=600, ...), Flags())

Flags live in a FlagValues of their own, not in absl's global one, where two modules that define
`--mesh` collide.
"""

import dataclasses
import difflib
import logging
import math
import os
import sys
import traceback
from typing import Any

import jax
from absl import flags as absl_flags
from absl import logging as absl_logging

import data
from recipes.common import preemption, processes
from recipes.common.errors import Stopped, UserError


def flag(default, help: str, *, at_least=None, at_most=None, choices=(), may_change=False):
    """A dataclass field that becomes a flag.

    Args:
      help: one line, with the unit.
      at_least, at_most: bounds, inclusive.
      choices: the values there are; none: any.
      may_change: whether a run that goes on in its workdir may have another value than before.
    """
    limits = dict(help=help, at_least=at_least, at_most=at_most, choices=tuple(choices))
    return dataclasses.field(default=default, metadata=limits | dict(may_change=may_change))


@dataclasses.dataclass(frozen=True)
class Run:
    """The flags that every recipe has."""

    mesh: str = flag(
        "", "sizes (8, 4x2, 2x2x2) or names (data=2,model=4); empty: all on data", may_change=True
    )
    rules: str = flag(
        "", "strategy, a key of the zoo file's RULES; empty: by the mesh", may_change=True
    )
    steps: int = flag(100, "optimizer steps in all, also when resumed", at_least=0, may_change=True)
    batch_size: int = flag(32, "examples a step, over all devices", at_least=1)
    learning_rate: float = flag(1e-3, "peak learning rate", at_least=0.0)
    seed: int = flag(0, "of parameters, data order and samples", at_least=0, at_most=2**31 - 1)
    workdir: str = flag(
        "", "folder for checkpoints and metrics; empty: runs/<recipe>", may_change=True
    )
    log_every: int = flag(10, "steps between lines of metrics.jsonl", at_least=1, may_change=True)
    checkpoint_every: int = flag(
        200, "steps between checkpoints; the last step has one too", at_least=1, may_change=True
    )
    keep_checkpoints: int = flag(2, "newest checkpoints to keep", at_least=1, may_change=True)
    skip_nonfinite: int = flag(
        0, "updates in a row to skip where loss or gradient is not finite, before the run stops",
        at_least=0, may_change=True,
    )  # fmt: skip
    restore_from: str = flag(
        "", "start from the parameters of this run, checkpoint or published name, or hf:DIR",
        may_change=True,
    )  # fmt: skip
    verify: bool = flag(
        True, "compare a checkpoint's files with their hashes before it is read", may_change=True
    )
    num_processes: int = flag(
        0, "that share this run; 0: one, or as Slurm, Open MPI or a TPU pod says",
        at_least=0, may_change=True,
    )  # fmt: skip
    process_id: int = flag(
        -1, "of this one, from 0; only with --num_processes", at_least=-1, may_change=True
    )
    coordinator: str = flag(
        "", "HOST:PORT of process 0; only with --num_processes", may_change=True
    )


def start(main, *groups) -> None:
    """Parses sys.argv into new instances of `groups`, and calls main with them. Exits the process.

    Exit codes: 0 done, or stopped by a signal and saved; 1 a failure; 2 a user's mistake; 130 stopped
    by a second SIGINT.
    """
    preemption.watch()
    try:
        parsed = parse(sys.argv[1:], *groups)
        if parsed is None:
            print(usage(sys.modules["__main__"].__doc__ or "", *groups))
        else:
            _settle_libraries()
            for run in parsed:
                if isinstance(run, Run):
                    processes.join(run.num_processes, run.process_id, run.coordinator)
            main(*parsed)
    except (UserError, data.DataError) as mistake:
        print(f"error: {mistake}", file=sys.stderr, flush=True)
        if processes.count() == 1:
            os._exit(2)  # at once: a reader's threads, left half-way, may abort an orderly exit
        sys.exit(2)
    except Stopped as stop:
        if stop.code:
            print(f"error: {stop}", file=sys.stderr)
        elif processes.is_first():
            print(stop)
        sys.exit(stop.code)
    except Exception as error:
        if processes.count() == 1:
            raise
        if not isinstance(error, jax.errors.JaxRuntimeError):
            traceback.print_exc()
        processes.leave(
            f"error: this process can't go on without the others ({str(error).splitlines()[0]}); "
            "start all of them again, and they go on from the newest checkpoint"
        )


def _settle_libraries() -> None:
    """Keeps the libraries' notices off the terminal, and compiled programs for the next run."""
    absl_flags.FLAGS.mark_as_parsed()  # Grain reads absl's global flags
    absl_logging.set_verbosity(absl_logging.FATAL)  # errors come back as exceptions
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # of a save: reported by Workdir
    sys.unraisablehook = _unraisable
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(data.cache_dir() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _unraisable(event) -> None:
    """When one write of a save fails, TensorStore's others report to an event loop that is gone."""
    if str(event.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(event)


def parse(argv: list[str], *groups) -> list[Any] | None:
    """Instances of `groups` with their fields set from argv; None if argv asks for help.

    Raises UserError for a flag that is unknown, of the wrong type or out of range.
    """
    if {"--help", "-help", "-h"} & set(argv):
        return None
    values = absl_flags.FlagValues()
    fields = {field.name: field for group in groups for field in dataclasses.fields(group)}
    for group in groups:
        for field in dataclasses.fields(group):
            default, help = getattr(group, field.name), field.metadata["help"]
            if isinstance(default, bool):
                absl_flags.DEFINE_bool(field.name, default, help, flag_values=values)
            else:  # parsed below, with a better message than absl's
                absl_flags.DEFINE_string(field.name, str(default), help, flag_values=values)
    try:
        extra = values(["recipe", *argv])[1:]
    except absl_flags.UnrecognizedFlagError as error:
        name = error.flagname
        near = difflib.get_close_matches(name, fields, n=1)
        hint = f"did you mean --{near[0]}?" if near else "--help lists the flags"
        raise UserError(f"--{name} is not a flag; {hint}") from None
    except absl_flags.Error as error:
        raise UserError(f"{str(error).rstrip('.')}; --help lists the flags") from None
    if extra:
        raise UserError(f"{extra[0]!r} is not a flag; flags are written --name=value")
    return [
        dataclasses.replace(
            group,
            **{
                field.name: _convert(field, getattr(group, field.name), values[field.name].value)
                for field in dataclasses.fields(group)
            },
        )
        for group in groups
    ]


def _convert(field, default, text):
    """The flag's value, of its default's type and within its limits."""
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
        most = 2**31 - 1 if kind is int and limits["at_most"] is None else limits["at_most"]
        for bound, wrong, word in (
            (limits["at_least"], lambda b: value < b, "below its least value"),
            (most, lambda b: value > b, "above its greatest value"),
        ):
            if bound is not None and wrong(bound):
                raise UserError(f"--{field.name}={text} is {word}, {bound}; try {default}")
    if limits["choices"] and value not in limits["choices"]:
        options = ", ".join(choice or '""' for choice in limits["choices"])
        raise UserError(f"--{field.name}={text} is not one of {options}")
    return value


def usage(doc: str, *groups) -> str:
    """What --help prints: the recipe's docstring, then every flag with its default and meaning."""
    lines = [doc.strip(), ""]
    for group in groups:
        for field in dataclasses.fields(group):
            choices = [choice for choice in field.metadata["choices"] if choice]
            options = f" ({', '.join(choices)})" if choices else ""
            shown = f"--{field.name}={getattr(group, field.name)}"
            lines.append(f"  {shown:<28} {field.metadata['help']}{options}")
    return "\n".join(lines)
