"""Finds a launcher's processes from the environment: Slurm, Open MPI, TPUs, and others.

Any launcher can set these three variables, as recipes/launch/jobset_gpu.yaml and ssh.sh do:

    JAX_COORDINATOR_ADDRESS=host0:9876 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0
"""

import glob
import re
import urllib.request
from collections.abc import Mapping
from typing import Any

from recipes.common.runtime.errors import UserError

OURS = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def find(environment: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
    """Number of processes, and arguments for jax.distributed.initialize, which finds the rest.

    Returns (1, {}) without a launcher. Raises UserError if the variables are incomplete.
    """
    if "JAX_NUM_PROCESSES" in environment or "JAX_PROCESS_ID" in environment:
        return _ours(environment)
    # Before Slurm, as in JAX: under mpirun in Slurm, Slurm's variables describe mpirun's own step.
    if {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"} <= environment.keys():
        process = {"process_id": int(environment["OMPI_COMM_WORLD_RANK"])}
        return int(environment["OMPI_COMM_WORLD_SIZE"]), process | _open_mpi(environment)
    # SLURM_STEP_* is set for a job step, but not for a mere allocation or an interactive shell.
    if {"SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST"} <= environment.keys():
        process = {"process_id": int(environment["SLURM_PROCID"])}
        return int(environment["SLURM_NTASKS"]), process | _slurm_gpus(environment)
    hosts = _tpu_hosts(environment)
    return _ours(environment) if hosts == 1 and environment.get(OURS[0]) else (hosts, {})


def _ours(environment: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
    address, *numbers = (environment.get(name, "") for name in OURS)
    if not address or not all(n.isdecimal() for n in numbers) or not int(numbers[0]):
        settings = " ".join(f"{name}={environment.get(name, '')}" for name in OURS)
        raise UserError(
            f"{settings} do not describe a process; set HOST:PORT, the number of processes and this "
            "one's number, or none of the three"
        )
    count, number = map(int, numbers)
    settings = {"coordinator_address": address, "num_processes": count, "process_id": number}
    return count, settings | {"cluster_detection_method": "deactivate"}


def _slurm_gpus(environment: Mapping[str, str]) -> dict[str, Any]:
    """All GPUs of the node for a task that is alone on it; by default JAX gives each task one."""
    alone = environment["SLURM_NTASKS"] == environment.get("SLURM_STEP_NUM_NODES")
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    return {"local_device_ids": range(int(gpus))} if alone and gpus.isdecimal() else {}


def _open_mpi(environment: Mapping[str, str]) -> dict[str, Any]:
    """Arguments that JAX can't find itself: Open MPI 5, unlike 4, doesn't name process 0's host."""
    if "OMPI_MCA_orte_hnp_uri" in environment:
        return {}
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    if not address:
        raise UserError(
            "Open MPI 5 does not say where process 0 is; start with "
            "mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT, process 0's host and a free port"
        )
    return {
        "coordinator_address": address,
        "num_processes": int(environment["OMPI_COMM_WORLD_SIZE"]),
        "local_device_ids": [int(environment.get("OMPI_COMM_WORLD_LOCAL_RANK", 0))],
        "cluster_detection_method": "deactivate",
    }


def _tpu_hosts(environment: Mapping[str, str]) -> int:
    """Number of hosts of all slices, from GKE's environment or the TPU VM's metadata server.

    Returns 1 if JAX_PLATFORMS excludes TPUs, as for a test on the CPU of a TPU host.
    """
    if "tpu" not in (environment.get("JAX_PLATFORMS") or "tpu"):
        return 1
    names = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    slices = environment.get("MEGASCALE_NUM_SLICES")
    if not names and has_tpu() and "TPU_SKIP_MDS_QUERY" not in environment:
        names = _metadata("worker-network-endpoints", environment)
        match = re.search(r"MEGASCALE_NUM_SLICES: *'?(\d+)", _metadata("tpu-env", environment))
        slices = slices or (match[1] if match else None)
    return len((names or "").split(",")) * int(slices or 1)


def has_tpu() -> bool:
    """Whether this machine has TPU chips, before JAX takes them."""
    return bool(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"))


def _metadata(key: str, environment: Mapping[str, str]) -> str:
    """Reads an attribute of this virtual machine; "" if it or the metadata server is missing."""
    host = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    address = f"http://{host}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(address, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.read().decode()
    except OSError:
        return ""
