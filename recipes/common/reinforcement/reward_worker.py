"""A process that computes rewards: python reward_worker.py FILE.py FUNCTION

Reads lines of JSON, {"prompts": […], "completions": […], "rows": […], "seconds": limit}, and answers each with
a line, {"rewards": […]} or {"error": "…", "number": n}. It imports only the standard library and the
user's file, so that it starts at once; what the function prints goes nowhere.

The process outlives neither its run nor its limit, whatever the function does. A thread reads the tasks,
so that the end of the run is noticed while a task is computed. If the function keeps the interpreter to
itself, as a regular expression does, that thread never runs; the limit is kept by another, which needs
no interpreter.
"""

import contextlib
import faulthandler
import importlib.util
import inspect
import json
import math
import os
import pathlib
import queue
import signal
import sys
import threading
from collections.abc import Iterator

BATCHED = "prompts"  # first argument of a function that takes lists
START_SECONDS = 60.0  # for the user's file to be imported
GRACE_SECONDS = 1.0  # beyond a limit, for the run to notice it first


def main(path: str, name: str) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    requests = os.fdopen(os.dup(sys.stdin.fileno()))
    with open(os.devnull, "r+") as nowhere:
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            os.dup2(nowhere.fileno(), stream.fileno())
    tasks: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, tasks), daemon=True).start()
    try:
        with _limited(START_SECONDS):
            sys.path.insert(0, str(pathlib.Path(path).parent))
            spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
            assert spec
            assert spec.loader
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            function = vars(module)[name]
            batched = next(iter(inspect.signature(function).parameters)) == BATCHED
    except BaseException as error:  # whatever the user's file raises
        print(json.dumps({"error": _reason(error)}), file=answers)
        return
    print(json.dumps({"batched": batched}), file=answers)
    while True:
        task = json.loads(tasks.get())
        with _limited(task["seconds"]):
            reply = _rewards(function, batched, task)
        print(json.dumps(reply), file=answers)


def _read(requests, tasks: queue.SimpleQueue) -> None:
    """Queues the tasks. When the run has ended, kills this process and those that the function started."""
    for line in requests:
        tasks.put(line)
    os.killpg(0, signal.SIGKILL)


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Ends the process if the block takes longer."""
    faulthandler.dump_traceback_later(seconds + GRACE_SECONDS, exit=True, file=sys.stderr.fileno())
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _rewards(function, batched: bool, task: dict) -> dict:
    rewards, columns = [], (task["prompts"], task["completions"], task["rows"])
    calls = [columns] if batched else [*zip(*columns, strict=True)]
    for arguments in calls:
        try:
            result = function(*arguments)
            rewards += [float(x) for x in result] if batched else [float(result)]
        except BaseException as error:
            return {"error": _reason(error), "number": len(rewards)}
    if len(rewards) != len(task["rows"]):
        return {"error": f"{len(rewards)} rewards for {len(task['rows'])} answers", "number": 0}
    for number, reward in enumerate(rewards):
        if not math.isfinite(reward):
            return {"error": f"the reward is {reward}", "number": number}
    return {"rewards": rewards}


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")


if __name__ == "__main__":
    main(*sys.argv[1:])
