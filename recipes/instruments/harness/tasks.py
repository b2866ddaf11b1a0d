"""Finds tasks of lm-evaluation-harness by name, runs them with a zoo model, and prints tables."""

import contextlib
import difflib
import importlib.util
import logging
import os
import pathlib
import sys
from typing import Any, NamedTuple

from data import buckets, hub
from recipes.common.runtime import UserError
from recipes.common.runtime.flags import split

# Bootstrap samples for standard errors without a formula. A tenth of the harness's default, because
# they are drawn in this process: a fork of a process with JAX's threads may hang.
BOOTSTRAP = 10_000


class Tasks(NamedTuple):
    manager: Any  # lm_eval's TaskManager
    chosen: list[Any]  # tasks and groups of tasks, with their data


def load(names: str, include_path: str = "") -> Tasks:
    """Loads the harness's tasks and groups by name.

    Args:
      names: comma-separated names, patterns such as `arc_*`, or YAML files.
      include_path: a folder with your own task files; code in them is executed.

    Raises UserError if the harness is not installed, a name does not exist, or its data can't be
    loaded.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            f"--tasks={names} needs lm-evaluation-harness; run pip install -e '.[eval]'"
        )
    if include_path and not pathlib.Path(include_path).is_dir():
        raise UserError(f"--include_path={include_path} is not a folder; use one with task files")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # warnings are for authors of tasks
    from lm_eval.tasks import TaskManager

    hub.library()  # quiet
    wanted = [name for name in split(names) if name]
    # The harness's own 14,000 task files take a while to read: try include_path alone first.
    for defaults in (False, True) if include_path else (True,):
        manager = TaskManager(include_path=include_path or None, include_defaults=defaults)
        unknown = [name for name in wanted if not _matches(manager, name)]
        if not unknown:
            break
    if unknown or not wanted:
        name = unknown[0] if unknown else ""
        near = difflib.get_close_matches(name, manager.all_tasks, n=1)
        hint = f"did you mean {near[0]}?" if near else "python -m lm_eval ls tasks lists them"
        raise UserError(f"--tasks={names}: there is no task {name!r}; {hint}")
    matches = sorted({match for name in wanted for match in _matches(manager, name)})
    try:
        loaded = manager.load(matches)
    except Exception as error:  # from YAML, datasets or the task's own code
        raise UserError(
            f"--tasks={names} can't be loaded ({buckets.reason(error)}); check the name, and that its "
            "data is here or the Hub can be reached"
        ) from None
    for name, task in loaded["tasks"].items():
        for what in ("UNSAFE_CODE", "MULTIMODAL"):
            if getattr(task, what, False):
                why = "runs code that the model writes" if what == "UNSAFE_CODE" else "has images"
                raise UserError(
                    f"task {name} {why}, which is not supported; leave it out of --tasks"
                )
    groups = loaded["groups"].values()
    inner = {name for group in groups for name in group.child_names}
    inner |= {task.task_name for group in groups for task in group.get_all_tasks()}
    outer = [group for group in groups if group.name not in inner]
    outer += [task for name, task in loaded["tasks"].items() if name not in inner]
    return Tasks(manager, outer)


def _matches(manager, name: str) -> list[str]:
    if name.endswith((".yaml", ".yml")):
        return [name] if pathlib.Path(name).is_file() else []
    return manager.match_tasks([name])


def run(model, tasks: Tasks, fewshot: int, limit: float, chat: bool) -> dict[str, Any]:
    """Runs tasks and returns the harness's results, without samples.

    Args:
      model: a model.Model.
      fewshot: examples before each question; -1: each task's default.
      limit: questions per task, or a fraction of them if below 1; 0: all.
      chat: whether to render questions with the model's chat template.
    """
    os.environ["DISABLE_MULTIPROC"] = "1"
    from lm_eval import simple_evaluate
    from lm_eval.api import task

    task.tqdm = lambda documents, **_: documents  # no progress bar for milliseconds of work
    with contextlib.redirect_stdout(sys.stderr):
        return simple_evaluate(
            model=model,
            tasks=tasks.chosen,
            task_manager=tasks.manager,
            num_fewshot=None if fewshot < 0 else fewshot,
            limit=limit or None,
            apply_chat_template=chat,
            bootstrap_iters=BOOTSTRAP,
            log_samples=False,
            torch_random_seed=None,
        )


def tables(results: dict[str, Any]) -> list[str]:
    """The harness's table of tasks and, if there are groups, its table of groups."""
    from lm_eval.utils import make_table

    kinds = ("results", "groups") if results.get("groups") else ("results",)
    return [make_table(results, kind).rstrip() for kind in kinds]


def plain(value: Any) -> Any:
    """The harness's conversion of values that JSON lacks, for json.dumps's `default`."""
    from lm_eval.utils import handle_non_serializable

    return handle_non_serializable(value)
