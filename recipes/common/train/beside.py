"""Work beside the main thread: programs compile while others do, or while the first steps run."""

import concurrent.futures
import functools
import threading
from collections.abc import Callable
from typing import TypeVar

from jax.sharding import Mesh

from recipes.common.runtime import processes

Value = TypeVar("Value")


def beside(mesh: Mesh, work: Callable[[], Value]) -> Callable[[], Value]:
    """Begins `work` in a thread. Returns a function that waits for its value, or raises its exception.

    Only on CPU devices of one process. Elsewhere, the first call of that function does the work: a
    GPU's compiler times kernels on the GPU, and processes must compile in the same order.

    Args:
      mesh: that of the programs.
      work: runs no program with collectives; simulated devices have threads for two of them.
    """
    if mesh.devices.flat[0].platform != "cpu" or processes.count() > 1:
        return functools.cache(work)
    future: concurrent.futures.Future[Value] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised where the value is asked for
            future.set_exception(error)

    # Not a daemon: Python would end in the middle of a compilation.
    threading.Thread(target=run, name="beside").start()
    return future.result
