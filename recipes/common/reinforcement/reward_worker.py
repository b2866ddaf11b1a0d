"""A process that computes rewards: python reward_worker.py FILE.py FUNCTION

Reads lines of JSON, {"prompts": […], "completions": […], "rows": […]}, and answers each with a line,
{"rewards": […]} or {"error": "…", "number": n}. It imports only the standard library and the user's
file, so that it starts at once; what the function prints goes nowhere.
"""

import importlib.util
import inspect
import json
import math
import os
import pathlib
import sys

BATCHED = "prompts"  # first argument of a function that takes lists


def main(path: str, name: str) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
    try:
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
    for line in sys.stdin:
        print(json.dumps(_rewards(function, batched, json.loads(line))), file=answers)


def _rewards(function, batched: bool, task: dict) -> dict:
    rewards, columns = [], (task["prompts"], task["completions"], task["rows"])
    calls = [columns] if batched else [*zip(*columns, strict=True)]
    for arguments in calls:
        try:
            found = function(*arguments)
            rewards += [float(x) for x in found] if batched else [float(found)]
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
