"""Measures what starting a run costs one host, by part: at most linear in the number of devices.

    python -m tests.by_hand.startup_scale 64 128 256 512 1024              # devices of one process
    python -m tests.by_hand.startup_scale 64 256 1024 --processes=16       # of as many processes

Each number of devices is a new process, or so many: its own seconds of processor time, the least of
three, on process 0. Compiling is XLA's, and left out. "agree" is what a process for each device would
say at the start, all played here: that they are alike, and that their shares of the files are intact.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from tests.support.many_starts import played

PARTS = ("devices", "mesh", "layout", "state", "report", "rows", "to devices", "trace", "agree")


def measure(devices: int) -> dict[str, float]:
    """Part → seconds of processor time, in this process."""
    import jax
    import numpy as np

    from recipes.common.report import report
    from recipes.common.runtime import mesh, processes
    from recipes.common.train import feed
    from recipes.instruments.bench.common import make_step
    from zoo.llama_relatives import SIZES

    found: dict[str, float] = {}

    def timed(part: str, work: Callable, times: int = 3):
        best = float("inf")
        for _ in range(times):
            start = time.process_time()
            value = work()
            best = min(best, time.process_time() - start)
        found[part] = best
        return value

    jax.config.update("jax_num_cpu_devices", devices // processes.count())
    timed("devices", jax.devices, 1)
    inner = min(8, devices // processes.count())  # model stays inside a process
    axes = {"data": devices // inner, "model": inner}
    made = timed("mesh", lambda: mesh.arrange(axes, jax.devices()))

    def layout():
        return make_step(SIZES["small"](), "fsdp_tp", made, devices, 32)

    step = timed("layout", layout)
    timed("state", step.function.abstract_state)
    timed(
        "report", lambda: (report.headline(step.layout), report.table(step.layout, step.abstract))
    )
    rows = timed("rows", lambda: step.layout.process_rows)
    batch = {name: np.zeros((len(rows), 32), np.int32) for name in ("tokens", "targets")}
    timed("to devices", lambda: jax.block_until_ready(feed.to_devices(batch, step.layout)))
    timed("trace", step.lower, 1)
    if processes.is_first():
        timed("agree", played(devices), 1)
    return found


def child(devices: int, processes: int, number: int, port: int) -> None:
    from jax._src import distributed

    from recipes.common.runtime import processes as ours

    if processes > 1:
        ours.initialize(processes, number, f"localhost:{port}")
    else:  # the service that they talk by
        distributed.global_state.initialize(
            f"localhost:{port}", 1, 0, cluster_detection_method="deactivate"
        )
    found = measure(devices)
    if number == 0:
        print(json.dumps(found), flush=True)
    ours.decide("done", len)  # none leaves before the others


def parent(devices: int, processes: int) -> dict[str, float]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "4"}
    words = [
        sys.executable,
        "-m",
        "tests.by_hand.startup_scale",
        str(devices),
        f"--processes={processes}",
    ]
    started = [
        subprocess.Popen([*words, f"--child={i}", f"--port={port}"], env=env, text=True, stdout=subprocess.PIPE)
        for i in range(processes)
    ]  # fmt: skip
    outputs = [process.communicate()[0] for process in started]
    assert all(process.returncode == 0 for process in started)
    return json.loads(outputs[0].splitlines()[-1])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("devices", type=int, nargs="+")
    options.add_argument("--processes", type=int, default=1)
    options.add_argument("--child", type=int, default=-1)
    options.add_argument("--port", type=int, default=0)
    given = options.parse_args()
    if given.child >= 0:
        return child(given.devices[0], given.processes, given.child, given.port)
    print(f"| devices in {given.processes} processes |", " | ".join(PARTS), "| sum |")
    print("|---" + "|---:" * (len(PARTS) + 1) + "|")
    for devices in given.devices:
        found = parent(devices, given.processes)
        cells = [f"{found[part]:.3f}" for part in PARTS]
        print(f"| {devices} |", " | ".join(cells), f"| {sum(found.values()):.2f} |", flush=True)


if __name__ == "__main__":
    main()
