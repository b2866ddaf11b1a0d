"""--profile=FIRST:LAST traces these steps with JAX's profiler."""

import itertools
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable

import jax

from recipes.common.checkpoint import RunFolder
from recipes.common.runtime import Run, UserError, print0, warn
from recipes.common.sharding import Tree
from recipes.common.storage import folders


class Profile:
    """A context manager that traces the flag's steps, if any. Raises UserError for a bad flag."""

    def __init__(self, run: Run, folder: RunFolder):
        self._folder, self._shown = folder.path / "profile", folder.shown / "profile"
        self._first, self._last, self._running = 0, 0, False
        if not run.profile:
            return
        self._trace = pathlib.Path(tempfile.mkdtemp())  # JAX can't write to a bucket
        match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", run.profile, re.ASCII)
        if not match or int(match[1]) > int(match[2]):
            raise UserError(f"--profile={run.profile[:50]} is not FIRST:LAST; try --profile=10:15")
        self._first, self._last = int(match[1]), int(match[2])
        if self._first <= folder.step or self._last > run.steps:
            steps = f"takes steps {folder.step + 1} to {run.steps}" if run.steps > folder.step else (
                "takes no steps"
            )  # fmt: skip
            raise UserError(
                f"--profile={run.profile}: this run {steps}; profile steps that it takes"
            )

    def around(self, step: Callable, first: int) -> Callable:
        """Wraps a step, (state, batch) → …, so that it starts and ends the trace.

        Args:
          first: steps done so far.
        """
        numbers = itertools.count(first + 1)

        def traced(state: Tree, batch: Tree):
            number = next(numbers)
            if number == self._first:
                jax.block_until_ready(state)  # keeps the steps before it out of the trace
                jax.profiler.start_trace(self._trace)
                self._running = True
            with jax.profiler.StepTraceAnnotation("step", step_num=number):
                after = step(state, batch)
            if number == self._last:
                jax.block_until_ready(after)
                self._end()
            return after

        return traced if self._last else step

    def __enter__(self) -> None: ...

    def __exit__(self, *_) -> None:
        self._end()

    def _end(self) -> None:
        """Ends a running trace, and prints how to open it."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            try:
                folders.at(self._folder).add(self._trace)
            except folders.errors() as error:
                warn(
                    f"{self._shown} could not be written ({folders.reason(error)}); training "
                    f"continues, and the profile is in {self._trace}"
                )
                return
            shutil.rmtree(self._trace)
            print0(f"Profile of steps {self._first} to {self._last}: {self._shown}; to open it: "
                   f"pip install xprof && xprof --port=8791 {self._shown}")  # fmt: skip
