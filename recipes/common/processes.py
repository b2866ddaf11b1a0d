"""Several processes, one run: who they are, and what only the first one does."""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from recipes.common.errors import UserError


def count() -> int:
    return jax.process_count()


def is_first() -> bool:
    return jax.process_index() == 0


def from_first(work: Callable[[], Any]) -> Any:
    """What `work` returns on the first process, where alone it runs; a UserError is raised on all.

    The value goes through JSON: tuples come back as lists.
    """
    if count() == 1:
        return work()
    answer: dict[str, Any] = {}
    if is_first():
        try:
            answer = {"value": work()}
        except UserError as mistake:
            answer = {"mistake": str(mistake)}
    text = np.frombuffer(json.dumps(answer).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(text.size)))
    text = np.resize(text, size)
    answer = json.loads(bytes(multihost_utils.broadcast_one_to_all(text)))
    if "mistake" in answer:
        raise UserError(answer["mistake"])
    return answer["value"]
