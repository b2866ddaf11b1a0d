"""--profile=FIRST:LAST: a trace of some steps by JAX's profiler."""

import re

import jax

from recipes.common.checkpoint import RunFolder
from recipes.common.runtime import Run, UserError, print0
from recipes.common.sharding import Tree


class Profile:
    """Traces the steps that the flag names, and nothing where it is empty. Raises UserError."""

    def __init__(self, run: Run, folder: RunFolder):
        self._folder, self._shown = folder.path / "profile", folder.shown / "profile"
        self._first, self._last, self._running = 0, 0, False
        if not run.profile:
            return
        found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", run.profile, re.ASCII)
        if not found or int(found[1]) > int(found[2]):
            raise UserError(f"--profile={run.profile[:50]} is not FIRST:LAST; try --profile=10:15")
        self._first, self._last = int(found[1]), int(found[2])
        if self._first <= folder.step or self._last > run.steps:
            steps = f"takes steps {folder.step + 1} to {run.steps}" if run.steps > folder.step else (
                "takes no steps"
            )  # fmt: skip
            raise UserError(
                f"--profile={run.profile}: this run {steps}; profile steps that it takes"
            )

    def before(self, step: int, state: Tree) -> None:
        """Called before a step is started."""
        if step == self._first:
            jax.block_until_ready(state)  # the steps before it are not in the trace
            jax.profiler.start_trace(self._folder)
            self._running = True
        if self._running:
            self._named = jax.profiler.StepTraceAnnotation("step", step_num=step)
            self._named.__enter__()

    def after(self, step: int, state: Tree) -> None:
        """Called when a step is started."""
        if self._running:
            self._named.__exit__(None, None, None)
        if step == self._last:
            jax.block_until_ready(state)
            self.close()

    def close(self) -> None:
        """Ends a trace that is running, and says how to open it."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            print0(f"Profile of steps {self._first} to {self._last}: {self._shown}; to open it: "
                   f"pip install xprof && xprof --port=8791 {self._shown}")  # fmt: skip
