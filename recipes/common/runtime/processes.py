"""One run on several processes: connecting them, and exchanging small values between them.

To start one by hand, run the same command on each host with a different id:

    python -m recipes.transformer --num_processes=2 --process_id=0 --coordinator=host0:9876
    python -m recipes.transformer --num_processes=2 --process_id=1 --coordinator=host0:9876

Slurm, Open MPI and TPUs need no flags (cluster.py); recipes/launch has scripts.
"""

import concurrent.futures
import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed  # the coordination service's client has no public name

from recipes.common.runtime import cluster, output
from recipes.common.runtime.errors import UserError

HEARTBEAT_SECONDS = 30  # a process silent for this long is considered dead, and the others exit
PATIENCE_SECONDS = 120  # wait for the coordinator, which may start later
START_SECONDS = 300  # wait for all other processes to start
DECIDE_SECONDS = 600  # wait for a process that is slower to start
PUBLISH_SECONDS = 6 * 3600  # wait for work of another process; its death is noticed sooner
ALONE_SECONDS = 5  # wait for the others to hit the same error

_id, _count = 0, 1
_calls = 0  # to `decide` and `broadcast_from_first`, in the same order on all processes


def count() -> int:
    return _count


def index() -> int:
    return _id


def is_first() -> bool:
    return _id == 0


def initialize(num_processes: int, process_id: int, coordinator: str) -> None:
    """Connects this process to the others, if flags or a cluster's environment name any.

    Call it before JAX creates its devices.

    Args:
      num_processes: 0: as the cluster says, or one if there is no cluster.
      process_id: -1 if not given.

    Raises UserError if the flags or the environment are inconsistent, or nobody answers.
    """
    global _id, _count
    settings = {
        "num_processes": num_processes,
        "process_id": process_id,
        "coordinator": coordinator,
    }
    if not num_processes:
        if process_id >= 0 or coordinator:
            name = "process_id" if process_id >= 0 else "coordinator"
            raise UserError(f"--{name}={settings[name]} needs --num_processes; add it")
        several, settings = cluster.find(os.environ)
    else:
        several = num_processes
        settings["coordinator_address"] = settings.pop("coordinator")
    if "coordinator_address" in settings:  # else JAX finds it
        _check(
            several,
            settings["process_id"],
            settings["coordinator_address"],
            by_flags=num_processes > 0,
        )
    if several == 1:
        return
    _free_stdout()
    settings["initialization_timeout"] = 2 * START_SECONDS  # at which JAX aborts with a stack trace
    settings["heartbeat_timeout_seconds"] = HEARTBEAT_SECONDS
    try:
        # In a thread, so that this one can handle signals while JAX waits for the others.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            connected = pool.submit(jax.distributed.initialize, **settings)
            if not concurrent.futures.wait([connected], START_SECONDS).done:
                exit_now(
                    f"error: fewer than {several} processes started within {START_SECONDS} s; check "
                    "the output of each, and start all of them again"
                )
            connected.result()
    finally:
        _count = several  # before this line, a signal ends only this process
    # Asking JAX would create its devices before a mesh says how many to simulate.
    _id = settings["process_id"] if "process_id" in settings else jax.process_index()


def _check(num_processes: int, process_id: int, coordinator: str, by_flags: bool) -> None:
    flags = ("--coordinator", "--num_processes", "--process_id")
    where, count, number = flags if by_flags else cluster.OURS
    if num_processes == 1 and process_id in (-1, 0):
        return
    if not 0 <= process_id < num_processes:
        what = f"{number}={process_id}" if process_id >= 0 else f"{number} is not given"
        raise UserError(
            f"{what} with {count}={num_processes}; give each process a number from 0 to "
            f"{num_processes - 1}"
        )
    match = re.fullmatch(r"(.+):([0-9]{1,5})", coordinator)
    if not match or not 0 < int(match[2]) < 2**16:
        raise UserError(
            f"{where}={coordinator} is not HOST:PORT; use process 0's host and a free port"
        )
    # JAX would abort with a stack trace if either of these failed.
    if process_id == 0:
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(("", int(match[2])))
            except OSError as error:
                raise UserError(
                    f"{where}={coordinator} can't be used ({error.strerror}); use a different port"
                ) from None
        return
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            socket.create_connection((match[1], int(match[2])), timeout=5).close()
            return
        except OSError as error:
            # A cluster's DNS may know a host only once it has started.
            if time.monotonic() > until or (by_flags and isinstance(error, socket.gaierror)):
                raise UserError(
                    f"{where}={coordinator} does not answer ({error.strerror or error}); check "
                    "that it is process 0's host and that process 0 has started"
                ) from None
            time.sleep(0.2)


def _free_stdout() -> None:
    """Moves Python's standard output off file descriptor 1, where Gloo writes notices."""
    sys.stdout.flush()
    descriptor = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    sys.stdout = output.unfailing(descriptor, sys.stdout.encoding, line_buffering=True)


def decide(facts: Any, work: Callable[[list[Any]], Any], seconds: float = DECIDE_SECONDS) -> Any:
    """Calls `work` on process 0 with every process's `facts`, and returns its value on all of them.

    Every process must call this; values are JSON, and a UserError of `work` is raised on all.
    Goes through JAX's coordination service, which needs no devices and no compiling, so that even
    processes that can't compute together can report it. Only process 0 reads every value: traffic
    is linear in the number of processes.

    Args:
      seconds: limit for each process's wait.
    """
    if count() == 1:
        return work([facts])
    key = _next_key()
    publish(f"{key}/{_id}", facts)

    def gather_and_work() -> Any:
        keys = [f"{key}/{number}" for number in range(count())]
        return work([await_published(one, seconds) for one in keys])

    return _broadcast(f"{key}/all", gather_and_work, seconds)


def broadcast_from_first(work: Callable[[], Any]) -> Any:
    """Runs `work` on process 0 only; returns its value, or raises its UserError, on all processes.

    The value goes through JSON: tuples come back as lists.
    """
    return work() if count() == 1 else _broadcast(_next_key(), work, PUBLISH_SECONDS)


def run_on_all(work: Callable[[], Any]) -> Any:
    """Runs `work` on each process and returns its own value; one's UserError is raised on all."""

    def raise_first(mistakes: list[str]) -> None:
        named_mistakes = {number: text for number, text in enumerate(mistakes) if text}
        if named_mistakes:
            number, text = min(named_mistakes.items())
            which = f" (process {number}, as {len(named_mistakes)} of {count()})"
            raise UserError(text + which * (len(named_mistakes) < count()))

    outcome = _outcome(work)
    decide(outcome.get("mistake", ""), raise_first)
    return outcome["value"]


def _next_key() -> str:
    global _calls
    _calls += 1
    return f"call/{_calls}"


def _broadcast(key: str, work: Callable[[], Any], seconds: float) -> Any:
    if is_first():
        publish(key, _outcome(work))
    outcome = await_published(key, seconds)
    if "mistake" in outcome:
        raise UserError(outcome["mistake"])
    return outcome["value"]


def _outcome(work: Callable[[], Any]) -> dict[str, Any]:
    """{"value": what `work` returns}, or {"mistake": the text of its UserError}."""
    try:
        return {"value": work()}
    except UserError as mistake:
        return {"mistake": str(mistake)}


def publish(key: str, value: Any) -> None:
    """Sends a JSON value to the coordination service; each key can be published once."""
    _service().key_value_set(f"zoo/{key}", json.dumps(value))


def await_published(key: str, seconds: float = PUBLISH_SECONDS) -> Any:
    """Waits for the value that some process publishes under `key`."""
    return json.loads(_service().blocking_key_value_get(f"zoo/{key}", int(seconds * 1000)))


def unpublish(key: str) -> None:
    """Frees what is published under `key` and `key`/…, which process 0 stores."""
    _service().key_value_delete(f"zoo/{key}")


def _service() -> Any:
    return distributed.global_state.client


def exit_unless_all_do(code: int) -> None:
    """Returns if all processes call this, so that they can end in order; else exits at once.

    If only this process has an error, the others wait for it in a collective, and an orderly exit
    would wait for them.
    """
    if _service() is None:
        return
    with contextlib.suppress(Exception):  # the service is gone, or the others are busy
        _service().wait_at_barrier("zoo/mistake", ALONE_SECONDS * 1000)
        return
    sys.stdout.flush()
    os._exit(code)


def exit_now(message: str) -> None:
    """Exits at once after another process was lost: no barrier, no destructors."""
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)
