"""Several processes, one run: how they find each other, and what only process 0 does.

By hand, the same command on each host except for the id:

    python -m recipes.transformer --num_processes=2 --process_id=0 --coordinator=host0:9876
    python -m recipes.transformer --num_processes=2 --process_id=1 --coordinator=host0:9876

Under Slurm, Open MPI and on TPUs no flags are needed, see cluster.py; recipes/launch has scripts.
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
import numpy as np
from jax._src import distributed  # the coordination service's client has no public name
from jax.experimental import multihost_utils

from recipes.common.runtime import cluster
from recipes.common.runtime.errors import UserError

HEARTBEAT_SECONDS = 30  # a process silent for this long is considered dead, and the others exit
PATIENCE_SECONDS = 120  # to wait for the coordinator, which may start later
START_SECONDS = 300  # to wait for all others, which may start later, too

DECIDE_SECONDS = 600  # to wait for a process that is slower to start
PUBLISH_SECONDS = 6 * 3600  # to wait for another's part of work; that it has died is told sooner
ALONE_SECONDS = 5  # to wait for the user error that is all processes'

_id, _count, _decided = 0, 1, 0


def count() -> int:
    return _count


def index() -> int:
    return _id


def is_first() -> bool:
    return _id == 0


def initialize(num_processes: int, process_id: int, coordinator: str) -> None:
    """Makes this process one of several, if flags or a cluster say so. Call it before JAX has devices.

    Args:
      num_processes: 0 leaves it to the cluster; without one, this process is alone.
      process_id: -1 if not given.

    Raises UserError.
    """
    global _id, _count
    given = {"num_processes": num_processes, "process_id": process_id, "coordinator": coordinator}
    if not num_processes:
        if process_id >= 0 or coordinator:
            name = "process_id" if process_id >= 0 else "coordinator"
            raise UserError(f"--{name}={given[name]} needs --num_processes; add it")
        several, given = cluster.find(os.environ)
    else:
        several = num_processes
        given["coordinator_address"] = given.pop("coordinator")
    if "coordinator_address" in given:  # else JAX finds it
        _check(
            several, given["process_id"], given["coordinator_address"], by_flags=num_processes > 0
        )
    if several == 1:
        return
    _free_stdout()
    given["initialization_timeout"] = 2 * START_SECONDS  # at which JAX aborts with a stack trace
    given["heartbeat_timeout_seconds"] = HEARTBEAT_SECONDS
    try:
        # In a thread: this one hears signals while JAX waits for the others.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            connected = pool.submit(jax.distributed.initialize, **given)
            if not concurrent.futures.wait([connected], START_SECONDS).done:
                leave(
                    f"error: fewer than {several} processes have started within {START_SECONDS} s; see "
                    "what each of them printed, and start all of them again"
                )
            connected.result()
    finally:
        _count = several  # before that, a signal is this process's alone
    # To ask JAX would make its devices, before a mesh says how many to simulate.
    _id = given["process_id"] if "process_id" in given else jax.process_index()


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
    found = re.fullmatch(r"(.+):([0-9]{1,5})", coordinator)
    if not found or not 0 < int(found[2]) < 2**16:
        raise UserError(
            f"{where}={coordinator} is not HOST:PORT; use process 0's host and a free port"
        )
    # JAX would abort with a stack trace where these two fail.
    if process_id == 0:
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(("", int(found[2])))
            except OSError as error:
                raise UserError(
                    f"{where}={coordinator} can't be used ({error.strerror}); use a different port"
                ) from None
        return
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            socket.create_connection((found[1], int(found[2])), timeout=5).close()
            return
        except OSError as error:
            # A cluster may name a host only when it has started.
            if time.monotonic() > until or (by_flags and isinstance(error, socket.gaierror)):
                raise UserError(
                    f"{where}={coordinator} does not answer ({error.strerror or error}); check "
                    "that it is process 0's host and that process 0 has started"
                ) from None
            time.sleep(0.2)


def _free_stdout() -> None:
    """Gloo writes notices to file descriptor 1: Python's standard output moves to another one."""
    sys.stdout.flush()
    mine = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    sys.stdout = os.fdopen(mine, "w", buffering=1, encoding=sys.stdout.encoding)


def decide(mine: Any, work: Callable[[list[Any]], Any]) -> Any:
    """Calls `work` on process 0 with the values, JSON, that all call this with, by number.

    Returns what it does, JSON, or raises its UserError, on all; each must call this. It goes through
    JAX's coordination service: no devices, nothing compiled, so that processes which could not compute
    together can still say so. Only process 0 reads the values: what is sent is linear in their number.
    """
    global _decided
    if count() == 1:
        return work([mine])
    client, key = distributed.global_state.client, f"zoo/{_decided}"
    _decided += 1
    client.key_value_set(f"{key}/{_id}", json.dumps(mine))
    if is_first():
        values = [json.loads(_wait_for(f"{key}/{number}")) for number in range(count())]
        client.key_value_set(f"{key}/all", json.dumps(_outcome(lambda: work(values))))
    return _value(json.loads(_wait_for(f"{key}/all")))


def _outcome(work: Callable[[], Any]) -> dict[str, Any]:
    """What to tell the others of its value, or of its UserError."""
    try:
        return {"value": work()}
    except UserError as mistake:
        return {"mistake": str(mistake)}


def _value(outcome: dict[str, Any]) -> Any:
    if "mistake" in outcome:
        raise UserError(outcome["mistake"])
    return outcome["value"]


def _wait_for(key: str) -> str:
    client = distributed.global_state.client
    return client.blocking_key_value_get(key, DECIDE_SECONDS * 1000)


def publish(key: str, value: Any) -> None:
    """Tells the other processes a value, JSON, as `decide` does. A key is told once."""
    distributed.global_state.client.key_value_set(f"zoo/told/{key}", json.dumps(value))


def await_published(key: str) -> Any:
    """Waits for a value that one of the processes publishes."""
    client = distributed.global_state.client
    return json.loads(client.blocking_key_value_get(f"zoo/told/{key}", PUBLISH_SECONDS * 1000))


def forget(key: str) -> None:
    """Frees what was published as `key` and below it, KEY/…: process 0 keeps it for all."""
    distributed.global_state.client.key_value_delete(f"zoo/told/{key}")


def together(work: Callable[[], Any]) -> Any:
    """Runs `work` on each process and returns its value; raises the first UserError of any on all."""

    def first_mistake(mistakes: list[str]) -> None:
        found = {number: text for number, text in enumerate(mistakes) if text}
        if found:
            number, text = min(found.items())
            which = f" (process {number}, as {len(found)} of {count()})"
            raise UserError(text + which * (len(found) < count()))

    outcome = _outcome(work)
    decide(outcome.get("mistake", ""), first_mistake)
    return outcome["value"]


def leave_unless_all_do(code: int) -> None:
    """Returns if all processes call this, so that they can end in order; else ends this one at once.

    After an error that the others do not have they would wait for this process, and it for them.
    """
    client = distributed.global_state.client
    if client is None:
        return
    with contextlib.suppress(Exception):  # the service is gone, or the others are at work
        client.wait_at_barrier("zoo/mistake", ALONE_SECONDS * 1000)
        return
    sys.stdout.flush()
    os._exit(code)


def leave(message: str) -> None:
    """Exits at once after another process was lost: no barrier, no destructors."""
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def broadcast_from_first(work: Callable[[], Any]) -> Any:
    """Runs `work` on process 0 only, and returns its value, or raises its UserError, on all.

    The value goes through JSON: tuples come back as lists.
    """
    if count() == 1:
        return work()
    outcome = _outcome(work) if is_first() else {}
    text = np.frombuffer(json.dumps(outcome).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(text.size)))
    text = np.resize(text, size)
    return _value(json.loads(bytes(multihost_utils.broadcast_one_to_all(text))))
