"""Parses the command line and calls a recipe's main; a user error is one line and exit code 2.

def main(run: Run, flags: Flags): ...

if __name__ == "__main__":
    start(main, Run(steps=600, ...), Flags())
"""

import importlib
import inspect
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import jax
from absl import flags as absl_flags
from absl import logging as absl_logging

import data
from data import buckets
from recipes.common.runtime import accelerators, agreement, flags, output, preemption, processes
from recipes.common.runtime.errors import Stopped, UserError, needs_instruments
from recipes.common.runtime.terminal import print0
from recipes.common.storage import folders, lock


def start(main, *groups, defaults: Callable | None = None) -> None:
    """Parses sys.argv into new instances of `groups`, and calls main with them. Exits the process.

    Args:
      main: what it returns, if anything, is for the planner: see `show_plan`.
      defaults: function of the parsed groups → groups with the defaults that suit them, for a
        second parse.

    Exit codes: 0 done, or a training run was stopped by a signal and saved; 1 failure; 2 user error;
    130 stopped by a second SIGINT; 128 + the signal's number for other commands.
    """
    preemption.watch(resumes=any(isinstance(group, flags.Run) for group in groups))
    output.outlive_readers()
    try:
        parsed = flags.parse(sys.argv[1:], *groups)
        if parsed and defaults:
            parsed = flags.parse(sys.argv[1:], *defaults(*parsed))
        if parsed is None:
            print(flags.usage(sys.modules["__main__"].__doc__ or "", *groups))
        else:
            _settle_libraries()
            for run in parsed:
                if isinstance(run, flags.Devices):
                    accelerators.choose(run.platform)
                    processes.initialize(run.num_processes, run.process_id, run.coordinator)
                    agreement.check(run, *parsed)
            planned = main(*parsed)
            if planned is not None:
                show_plan(planned)
    except UserError as mistake:
        print(f"error: {mistake}", file=sys.stderr, flush=True)
        lock.release_all()
        if processes.count() == 1:
            os._exit(2)  # an orderly exit may abort in a reader's unfinished threads
        processes.exit_unless_all_do(2)
        sys.exit(2)
    except Stopped as stop:
        if stop.code:
            print(f"error: {stop}", file=sys.stderr, flush=True)
            lock.release_all()
            processes.exit_unless_all_do(stop.code)
        elif processes.is_first():
            print(stop)
        sys.exit(stop.code)
    except Exception as error:
        if processes.count() == 1:
            raise
        if not isinstance(error, jax.errors.JaxRuntimeError):
            traceback.print_exc()
        lock.release_all()
        processes.exit_now(
            f"error: this process can't continue without the others ({folders.reason(error)}); "
            "start all of them again, and they resume from the newest checkpoint"
        )
    finally:
        lock.release_all()


def choose(commands: dict, missing: str) -> None:
    """Starts the command named by the first word of sys.argv.

    Args:
      commands: word → (main, its flags' defaults); need only have the given word, so that no other
        command is imported.
      missing: error message if the word is missing or unknown.
    """
    word = sys.argv.pop(1) if sys.argv[1:] and not sys.argv[1].startswith("-") else ""
    if word in commands:
        return start(*commands[word])
    sys.argv[1:] = [flag for flag in sys.argv[1:] if flag == "--help"]  # report only the word

    def no_command(*_) -> None:
        raise UserError(missing)

    start(no_command, *[defaults for _, defaults in commands.values()][:1])


def instrument(module: str, function: str = "main") -> tuple[Any, ...]:
    """A command in recipes/instruments and its flags' defaults, for `start`.

    If that folder was removed, the command is a function that raises UserError.
    """
    try:
        with needs_instruments("this command"):
            instruments = importlib.import_module(f"recipes.instruments.{module}")
    except UserError as missing:
        error = missing
        # Its flags are unknown; `choose` reads its word.
        sys.argv[1:] = [word for word in sys.argv[1:2] if not word.startswith("-")]

        def absent() -> None:
            raise error

        return (absent,)
    main = getattr(instruments, function)
    return main, inspect.signature(main).parameters["flags"].annotation()


def show_plan(planned: Any) -> None:
    """Prints the planner's answer to --plan. Raises UserError if recipes/instruments was removed.

    Args:
      planned: a train.planned.PlannedStep.
    """
    with needs_instruments("--plan"):
        planner = importlib.import_module("recipes.instruments.plan.answer")
    print0(*planner.describe_step(planned))


def _settle_libraries() -> None:
    """Silences libraries' notices, and turns on the cache of compiled programs."""
    absl_flags.FLAGS.mark_as_parsed()  # Grain reads absl's global flags
    absl_logging.set_verbosity(absl_logging.FATAL)  # errors come back as exceptions
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # the saver reports failed saves
    sys.unraisablehook = _unraisable
    # On a full disk: the next run compiles again. What must be saved has lines of its own.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
    if cache_dir := jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
        folders.to_path(cache_dir, "JAX_COMPILATION_CACHE_DIR")  # raises if a bucket is unreachable
        return
    cache = os.environ.get("ZOO_CACHE", "")
    cache = folders.to_path(cache, "ZOO_CACHE") if buckets.remote(cache) else data.cache_dir()
    jax.config.update("jax_compilation_cache_dir", str(cache / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _unraisable(event) -> None:
    """Hides what TensorStore's other writes of a failed save report to a closed event loop."""
    if str(event.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(event)
