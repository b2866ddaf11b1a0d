"""Rewards of answers: a user's functions, run in a pool of processes with a time limit.

    def reward(prompt, completion, row) -> float           # of one answer
    def reward(prompts, completions, rows) -> list[float]   # of a step's answers at once

`prompt` is the row's text or messages, `completion` the answer's text, `row` all columns of the row.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
from typing import Any

import numpy as np

from recipes.common.reinforcement import parses, reward_worker
from recipes.common.runtime import Stopped, UserError, flag, processes, warn
from recipes.common.runtime.flags import split

STOP, ZERO = "stop", "zero"
# The rewards without --reward.
QUESTIONS = (parses.parses, parses.uses_parameter, parses.names_known, parses.two_kinds)


@dataclasses.dataclass(frozen=True)
class RewardFlags:
    """Flags of the rewards."""

    reward: tuple[str, ...] = flag(
        (), "FILE.py:FUNCTION of (prompt, completion, row) → number, or of lists (prompts, completions, rows); "
        "may be repeated; none: four questions about whether the prompt with the answer is Python.", "optimizer",
    )  # fmt: skip
    reward_weights: str = flag(
        "",
        "Weights of the rewards in their sum, comma-separated; empty: 1 each, or a quarter without --reward.",
        "optimizer",
    )
    reward_seconds: float = flag(
        10.0, "Seconds that the reward of an answer may take, or of a step's answers if it takes lists.",
        "optimizer", at_least=0.001, may_change=True,
    )  # fmt: skip
    reward_errors: str = flag(
        STOP, "An exception, NaN or time-out in a reward stops the run, or counts as a reward of 0.",
        "optimizer", choices=[STOP, ZERO],
    )  # fmt: skip

    @property
    def weights(self) -> list[float]:
        """Raises UserError if they are not one number for each reward."""
        count = len(self.reward) or len(QUESTIONS)
        if not self.reward_weights:
            return [1.0 if self.reward else 1 / count] * count
        try:
            weights = [float(text) for text in split(self.reward_weights)]
        except ValueError:
            raise UserError(
                f"--reward_weights={self.reward_weights} are not numbers; write 1,0.5"
            ) from None
        if len(weights) != count or not np.isfinite(weights).all():
            raise UserError(
                f"--reward_weights={self.reward_weights} are {len(weights)} numbers for {count} rewards; "
                "give a finite one for each"
            )
        return weights


@dataclasses.dataclass(frozen=True)
class Answered:
    """An answer to reward."""

    prompt: Any  # the row's text or messages
    completion: str
    row: dict[str, Any]
    where: str  # the row's place, for messages


class Worker:
    """A process that computes one function's rewards; it is started again after a time-out."""

    def __init__(self, path: str, function: str, named: str):
        self._path, self._function, self._named = path, function, named
        self._start()

    def _start(self) -> None:
        # -P: the folder of the worker's own file must not hide the user's modules.
        command = [sys.executable, "-P", reward_worker.__file__, self._path, self._function]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        greeting = self._answer(reward_worker.START_SECONDS)
        if "error" in greeting:
            self.close()
            raise UserError(f"--reward={self._named} can't be used ({greeting['error']}); fix it")
        self.is_batched: bool = greeting["batched"]

    def __call__(self, answers: list[Answered], seconds: float) -> dict[str, Any]:
        """{"rewards": […]}, or {"error": …, "number": of the answer}."""
        task = {
            "prompts": [x.prompt for x in answers],
            "completions": [x.completion for x in answers],
            "rows": [x.row for x in answers],
            "seconds": seconds,
        }
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it died, which the answer reports
            self._process.stdin.write(json.dumps(task, default=str).encode() + b"\n")
            self._process.stdin.flush()
        reply = self._answer(seconds)
        if reply.get("died"):
            self.close()
            self._start()
        return reply

    def _answer(self, seconds: float) -> dict[str, Any]:
        out = self._process.stdout
        assert out
        ready, _, _ = select.select([out], [], [], seconds)
        if not ready:
            return {"error": f"more than {seconds:g} s", "number": 0, "died": True}
        line = out.readline()  # the worker writes whole lines
        if not line:
            return {"error": "its process ended", "number": 0, "died": True}
        return json.loads(line)

    def close(self) -> None:
        """Kills the process, and those that the function started."""
        if self._process.returncode is None:  # else its number may be another's by now
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe
                pipe.close()


class Rewards:
    """Computes rewards: answers → [answers, functions]. Raises UserError if a function can't be used."""

    def __init__(self, flags: RewardFlags):
        self._flags = flags
        self.weights = flags.weights
        files = [_located(named) for named in flags.reward]
        files = files or [(parses.__file__, question.__name__) for question in QUESTIONS]
        names = [name for _, name in files]
        self.names = [
            name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names)
        ]
        self.failed = 0  # rewards that were 0 because of an error
        self._workers: list[list[Worker]] = []  # of each function
        # Others than process 0 only find mistakes, all at once.
        count = min(os.cpu_count() or 1, 8) if processes.is_first() else 1
        try:
            for i, (path, name) in enumerate(files):
                named = flags.reward[i] if flags.reward else name
                first = Worker(path, name, named)
                self._workers.append([first])
                if not first.is_batched:
                    self._workers[-1] += [Worker(path, name, named) for _ in range(count - 1)]
        except UserError:
            self.close()
            raise

    def __call__(self, answers: list[Answered]) -> np.ndarray:
        """[answers, functions] in float64. Raises Stopped if one fails and --reward_errors=stop."""
        columns = []
        for workers, name in zip(self._workers, self.names, strict=True):
            if workers[0].is_batched:
                columns.append(self._computed(workers[0], answers, name))
                continue
            parts = [answers[i :: len(workers)] for i in range(len(workers))]
            with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
                jobs = [
                    pool.submit(self._one_by_one, worker, part, name)
                    for worker, part in zip(workers, parts, strict=True)
                ]
                column = np.zeros(len(answers))
                for i, job in enumerate(jobs):
                    column[i :: len(workers)] = job.result()
            columns.append(column)
        return np.stack(columns, axis=1)

    def _one_by_one(self, worker: Worker, answers: list[Answered], name: str) -> np.ndarray:
        rewards = [self._computed(worker, [answer], name) for answer in answers]
        return np.concatenate([np.zeros(0), *rewards])

    def _computed(self, worker: Worker, answers: list[Answered], name: str) -> np.ndarray:
        reply = worker(answers, self._flags.reward_seconds)
        if "rewards" in reply:
            return np.array(reply["rewards"], np.float64)
        what = f"the reward {name!r} of an answer to {answers[reply['number']].where} failed"
        if self._flags.reward_errors == STOP:
            raise Stopped(
                f"{what} ({reply['error']}); fix it, or use --reward_errors=zero: the same command resumes"
            )
        self.failed += len(answers)
        if self.failed == len(answers):  # the first time
            warn(f"{what} ({reply['error']}); such rewards are 0, and counted as reward_errors")
        return np.zeros(len(answers))

    def close(self) -> None:
        for workers in self._workers:
            for worker in workers:
                worker.close()


def _located(named: str) -> tuple[str, str]:
    """(path, function) of FILE.py:FUNCTION. Raises UserError."""
    file, _, name = named.rpartition(":")
    path = pathlib.Path(file).expanduser().absolute()
    if not file.endswith(".py") or not name.isidentifier():
        raise UserError(f"--reward={named} is not FILE.py:FUNCTION; try --reward=reward.py:reward")
    if not path.is_file():
        raise UserError(f"--reward={named}: there is no file {file}; fix the path")
    return str(path), name
