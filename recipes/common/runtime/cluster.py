"""Which processes a launcher has started, as it says in the environment: Slurm, Open MPI, TPUs, others.

Any launcher can set these three, as recipes/launch/jobset_gpu.yaml and ssh.sh do:

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
    """How many processes there are, and what jax.distributed.initialize shall be told about them.

    It finds the rest itself. 1 where no launcher says anything. Raises UserError for half of a
    description.
    """
    if "JAX_NUM_PROCESSES" in environment or "JAX_PROCESS_ID" in environment:
        return _ours(environment)
    # First, as JAX asks: under mpirun inside Slurm, its variables are those of mpirun's own step.
    if {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"} <= environment.keys():
        given = {"process_id": int(environment["OMPI_COMM_WORLD_RANK"])}
        return int(environment["OMPI_COMM_WORLD_SIZE"]), given | _open_mpi(environment)
    # Set by the launcher of a step, not by a mere allocation or an interactive shell.
    if {"SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST"} <= environment.keys():
        given = {"process_id": int(environment["SLURM_PROCID"])}
        return int(environment["SLURM_NTASKS"]), given | _slurm_gpus(environment)
    hosts = _tpu_hosts(environment)
    return _ours(environment) if hosts == 1 and environment.get(OURS[0]) else (hosts, {})


def _ours(environment: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
    address, *numbers = (environment.get(name, "") for name in OURS)
    if not address or not all(n.isdecimal() for n in numbers) or not int(numbers[0]):
        given = " ".join(f"{name}={environment.get(name, '')}" for name in OURS)
        raise UserError(
            f"{given} do not describe a process; set HOST:PORT, how many there are and which "
            "one this is, or none"
        )
    count, number = map(int, numbers)
    given = {"coordinator_address": address, "num_processes": count, "process_id": number}
    return count, given | {"cluster_detection_method": "deactivate"}


def _slurm_gpus(environment: Mapping[str, str]) -> dict[str, Any]:
    """JAX gives each task one GPU of its node, which is right if there are as many; else all."""
    alone = environment["SLURM_NTASKS"] == environment.get("SLURM_STEP_NUM_NODES")
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    return {"local_device_ids": range(int(gpus))} if alone and gpus.isdecimal() else {}


def _open_mpi(environment: Mapping[str, str]) -> dict[str, Any]:
    """Open MPI 4 says where its first process is; 5 does not."""
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
    """Hosts of all slices: as GKE says in the environment, else as the TPU VM's metadata server.

    One if JAX is not to use TPUs: a host of a slice where something is tried on its CPU.
    """
    if "tpu" not in (environment.get("JAX_PLATFORMS") or "tpu"):
        return 1
    names = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    slices = environment.get("MEGASCALE_NUM_SLICES")
    if not names and has_tpu() and "TPU_SKIP_MDS_QUERY" not in environment:
        names = _metadata("worker-network-endpoints", environment)
        found = re.search(r"MEGASCALE_NUM_SLICES: *'?(\d+)", _metadata("tpu-env", environment))
        slices = slices or (found[1] if found else None)
    return len((names or "").split(",")) * int(slices or 1)


def has_tpu() -> bool:
    """Whether this machine has TPU chips, before JAX takes them."""
    return bool(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"))


def _metadata(key: str, environment: Mapping[str, str]) -> str:
    """An attribute of this virtual machine; "" where it has none or there is no such server."""
    host = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    address = f"http://{host}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(address, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.read().decode()
    except OSError:
        return ""
