"""The launchers in recipes/launch, and processes finding each other by the variables they set."""

import http.server
import json
import os
import pathlib
import random
import re
import shutil
import socket
import subprocess
import sys
import threading

import pytest
import yaml

from recipes.common.runtime import cluster
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.mesh import parse
from tests.conftest import ROOT
from tests.support.quick import XLA_FLAGS
from tests.support.runs import TINY

pytestmark = pytest.mark.promise("launchers")

LAUNCH = ROOT / "recipes" / "launch"
SCRIPTS = sorted(path.name for path in LAUNCH.iterdir() if path.suffix in (".sh", ".sbatch"))
JOBSETS = sorted(path.name for path in LAUNCH.glob("*.yaml"))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


# ---- the files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_shell(name):
    checks = [
        ["bash", "-n"],
        *([["shellcheck", "--severity=warning"]] if shutil.which("shellcheck") else []),
    ]
    for check in checks:
        done = subprocess.run([*check, LAUNCH / name], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


# JobSet v1alpha2's own schema, https://github.com/kubernetes-sigs/jobset, without descriptions. What is
# inside of fields that we leave out is not in it: there is "type": "object" alone.
SCHEMA = json.loads((ROOT / "tests" / "golden" / "jobset.json").read_text())
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def mistakes(value, schema: dict, path: str = "") -> list[str]:
    """Where a YAML document violates its schema."""
    if "type" in schema and type(value) is not TYPES[schema["type"]]:
        return [f"{path} is no {schema['type']}"]
    if schema.get("x-kubernetes-int-or-string"):
        fits = type(value) in (int, str) and re.search(schema["pattern"], str(value))
        return [] if fits else [f"{path} is no quantity"]
    found = [f"{path} is {value}"] * (value not in schema.get("enum", [value]))
    if type(value) is int:
        bounds = schema.get("minimum", value), schema.get("maximum", value)
        found += [f"{path} is {value}"] * (not bounds[0] <= value <= bounds[1])
    if isinstance(value, list):
        for i, item in enumerate(value):
            found += mistakes(item, schema["items"], f"{path}[{i}]")
    if isinstance(value, dict):
        found += [
            f"{path} lacks {name}" for name in schema.get("required", ()) if name not in value
        ]
        known, other = schema.get("properties"), schema.get("additionalProperties", {})
        for name, item in value.items():
            if known and name not in known:
                found.append(f"{path} has {name}")
            else:
                found += mistakes(item, known[name] if known else other, f"{path}.{name}")
    return found


def pod(name: str) -> tuple[dict, dict]:
    """A JobSet's only job and that job's only container."""
    jobset = yaml.safe_load((LAUNCH / name).read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return job, container


@pytest.mark.parametrize("name", JOBSETS)
def test_a_jobset_has_fields_that_there_are(name):
    jobset = yaml.safe_load((LAUNCH / name).read_text())
    assert mistakes(jobset, SCHEMA) == []
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    job, container = pod(name)
    spec = job["template"]["spec"]
    assert spec["parallelism"] == spec["completions"]
    assert spec["completionMode"] == "Indexed"
    assert spec["backoffLimit"] == 0, "JobSet restarts all, not Kubernetes one"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    # The mesh has all the chips that are asked for, and `data` one part for each slice or node.
    (each,) = container["resources"]["limits"].values()
    (mesh,) = (parse(flag[7:]) for flag in container["args"] if flag.startswith("--mesh="))
    sizes = list(mesh.values())
    assert sizes[0] * sizes[1] * sizes[2] == job["replicas"] * spec["parallelism"] * each
    assert sizes[0] == (job["replicas"] if "tpu" in name else spec["parallelism"])


@pytest.mark.parametrize(
    ("line", "other", "message"),
    [
        ("parallelism: 2", 'parallelism: "2"', ".parallelism is no integer"),
        ('value: "2"', "value: 2", ".env[1].value is no string"),
        ("nvidia.com/gpu: 8", "nvidia.com/gpu: eight", ".limits.nvidia.com/gpu is no quantity"),
        ("workingDir:", "workdir:", ".containers[0] has workdir"),
        ("- name: run", "- args: []", ".containers[0] lacks name"),
        ("replicas: 1", "replicas: -1", ".replicatedJobs[0].replicas is -1"),
    ],
    ids=str,
)
def test_a_field_that_kubernetes_would_refuse_is_seen(line, other, message):
    text = (LAUNCH / "jobset_gpu.yaml").read_text()
    (found,) = mistakes(yaml.safe_load(text.replace(line, other, 1)), SCHEMA)
    assert found.endswith(message)


def test_the_first_pod_of_the_jobset_is_the_coordinator():
    job, container = pod("jobset_gpu.yaml")
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    name = yaml.safe_load((LAUNCH / "jobset_gpu.yaml").read_text())["metadata"]["name"]
    host, _, port = env["JAX_COORDINATOR_ADDRESS"].partition(":")
    assert host == f"{name}-{job['name']}-0-0.{name}", "JobSet's name of its first pod"
    assert {"containerPort": int(port)} in container["ports"]
    assert env["JAX_NUM_PROCESSES"] == str(job["template"]["spec"]["parallelism"])


# ---- what launchers set --------------------------------------------------------------------------

SLURM = {"SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "a[1-4]", "SLURM_PROCID": "1"}
OMPI = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1"}
GIVEN = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
ALL = {"coordinator_address": "a:1", "process_id": 1, "cluster_detection_method": "deactivate"}


@pytest.mark.parametrize(
    ("environment", "count", "given"),
    [
        ({}, 1, {}),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, 1, {}),  # an allocation's shell: no step
        (SLURM, 4, {"process_id": 1}),
        # One task on each node: it has all GPUs, not the one of its number.
        (SLURM | {"SLURM_STEP_NUM_NODES": "4", "SLURM_GPUS_ON_NODE": "8"}, 4, {"process_id": 1, "local_device_ids": range(8)}),
        (SLURM | {"SLURM_STEP_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "2"}, 4, {"process_id": 1}),
        (OMPI | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp://10.0.0.1:1"}, 3, {"process_id": 1}),
        (OMPI | {"JAX_COORDINATOR_ADDRESS": "a:1"}, 3, ALL | {"num_processes": 3, "local_device_ids": [0]}),
        # mpirun inside of Slurm: the ranks have the variables of the step that started its daemons.
        (SLURM | OMPI | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp://10.0.0.1:1"}, 3, {"process_id": 1}),
        (SLURM | OMPI | {"JAX_COORDINATOR_ADDRESS": "a:1"}, 3, ALL | {"num_processes": 3, "local_device_ids": [0]}),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "a:1"}, 4, {"process_id": 1}),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_COORDINATOR_ADDRESS": "a:1"}, 2, {}),
        (GIVEN, 2, ALL | {"num_processes": 2}),
        (GIVEN | SLURM, 2, ALL | {"num_processes": 2}),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, 1, {}),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, 2, {}),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "MEGASCALE_NUM_SLICES": "4"}, 8, {}),
        ({"TPU_PROCESS_ADDRESSES": "a:1", "MEGASCALE_NUM_SLICES": "2"}, 2, {}),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "cpu"}, 1, {}),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "tpu,cpu"}, 2, {}),
    ],
)  # fmt: skip
def test_a_cluster_is_recognized_by_what_its_launcher_sets(environment, count, given):
    assert cluster.find(environment) == (count, given)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (OMPI, "Open MPI 5 does not say where process 0 is; start with mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT"),
        (GIVEN | {"JAX_PROCESS_ID": ""}, "JAX_COORDINATOR_ADDRESS=a:1 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID= do not describe a process"),
        ({"JAX_PROCESS_ID": "1"}, "JAX_COORDINATOR_ADDRESS= JAX_NUM_PROCESSES= JAX_PROCESS_ID=1 do not describe a process"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "JAX_COORDINATOR_ADDRESS=a:1 JAX_NUM_PROCESSES= JAX_PROCESS_ID= do not describe a process"),
        (GIVEN | {"JAX_NUM_PROCESSES": "0"}, "JAX_COORDINATOR_ADDRESS=a:1 JAX_NUM_PROCESSES=0 JAX_PROCESS_ID=1 do not describe a process"),
    ],
)  # fmt: skip
def test_half_a_description_is_one_line(environment, message):
    with pytest.raises(UserError, match="^" + re.escape(message)):
        cluster.find(environment)


def test_a_number_that_no_process_has_is_one_line(run):
    env = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}
    done = run("recipes.mlp", **env)
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        "error: JAX_PROCESS_ID=2 with JAX_NUM_PROCESSES=2; give each process a number from 0 to 1\n"
    )


def test_hosts_of_tpu_slices_are_those_that_the_metadata_server_lists(monkeypatch):
    """`gcloud … ssh --worker=all` sets no variables; JAX asks the same server for the rest."""
    answers = {
        "worker-network-endpoints": "a,b,c,d",
        "tpu-env": "ZONE: 'z'\nMEGASCALE_NUM_SLICES: '2'\n",
    }

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            text = answers.get(self.path.removeprefix("/computeMetadata/v1/instance/attributes/"))
            self.send_response(200 if text and self.headers["Metadata-Flavor"] == "Google" else 404)
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("localhost", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever).start()
        environment = {"GCE_METADATA_IP": f"localhost:{server.server_port}"}
        assert cluster.find(environment) == (1, {}), "no TPU: nobody is asked"
        monkeypatch.setattr(cluster, "has_tpu", lambda: True)
        assert cluster.find(environment) == (8, {})
        del answers["tpu-env"]
        assert cluster.find(environment) == (4, {})
        del answers["worker-network-endpoints"]
        assert cluster.find(environment) == (1, {})
        server.shutdown()
    assert cluster.find(environment) == (1, {}), "nobody answers"


# ---- processes that find each other --------------------------------------------------------------

FLAGS = (*TINY, "--steps=0", "--mesh=2")


def job_id() -> int:
    """A job id for Slurm or Open MPI from which JAX derives a free port."""
    while True:
        number = random.randrange(1, 1_000_000)
        with socket.socket() as trial:
            try:
                trial.bind(("", number % 4096 + 65536 - 4096))
                return number
            except OSError:
                continue


# A fake launcher that starts the rest of its command here: `srun --flag… command…`.
SRUN = """#!{python}
import os, subprocess, sys
command = [word for i, word in enumerate(sys.argv[1:]) if i or not word.startswith("--")]
shared = dict(SLURM_JOB_ID="{job}", SLURM_STEP_NODELIST="localhost", SLURM_NTASKS="2", SLURM_STEP_NUM_NODES="1")
started = [
    subprocess.Popen(command, env=os.environ | shared | dict(SLURM_PROCID=str(i), SLURM_LOCALID=str(i)))
    for i in range(2)
]
sys.exit(max(process.wait() for process in started))
"""
SSH = """#!{python}
import subprocess, sys
assert sys.argv[1:3] == ["-tt", "localhost"], sys.argv
sys.exit(subprocess.run(["bash", "-c", sys.argv[3]]).returncode)
"""
GCLOUD = """#!{python}
import subprocess, sys
assert sys.argv[1:5] == ["compute", "tpus", "tpu-vm", "ssh"] and "--worker=all" in sys.argv, sys.argv
(command,) = (word[10:] for word in sys.argv if word.startswith("--command="))
sys.exit(subprocess.run(["bash", "-c", command]).returncode)
"""
# In place of Python: what each process is given.
SAYS = """#!{python}
import json, os, sys
with open("said", "a") as file:
    file.write(json.dumps([sys.argv[1:], dict(os.environ)]) + "\\n")
"""


@pytest.fixture
def clone(tmp_path):
    """A folder like a user's clone: .venv is this Python, and PATH has fake launchers."""
    for name in ("recipes", "zoo", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    (tools / "activate").write_text(f"export PATH={tools}:$PATH\n")
    for name, text in (
        ("srun", SRUN),
        ("ssh", SSH),
        ("gcloud", GCLOUD),
        ("python", '#!/bin/sh\nexec {python} "$@"\n'),
    ):
        (tools / name).write_text(text.format(python=sys.executable, job=job_id()))
        (tools / name).chmod(0o755)
    return tmp_path


def launch(script: str, clone: pathlib.Path, *words: str, **env: str):
    env = os.environ | {"HOSTS": "localhost localhost", "PORT": str(free_port())} | env
    env["PATH"] = f"{clone}/.venv/bin:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", LAUNCH / script, *words], cwd=clone, env=env, capture_output=True, text=True, timeout=200
    )  # fmt: skip


@pytest.mark.parametrize("more", [(), ("--size=1b", "--prompt=it's a $HOME")], ids=["bare", "more"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_gives_each_process_its_flags(script, more, clone):
    (clone / ".venv" / "bin" / "python").write_text(SAYS.format(python=sys.executable))
    words, env = more, {"SLURM_CPUS_PER_TASK": "8"}
    if script == "tpu.sh":
        (clone / "zoo").unlink()
        (clone / "zoo").symlink_to(clone)  # where `tpu.sh install` has the clone
        words = ("run", *more)
    done = launch(script, clone, *words, **env)
    assert (done.returncode, done.stderr) == (0, "")
    said = [json.loads(line) for line in (clone / "said").read_text().splitlines()]
    for given, _ in said:
        assert given[:2] == ["-m", "recipes.transformer"]
        assert given[2].startswith("--mesh=")
        assert given[3] in ("--workdir=runs/mine", "--workdir=gs://my-bucket/runs/mine")
        assert given[4:] == list(more)
    numbers = [] if script == "tpu.sh" else [0, 1]  # TPU hosts ask the metadata server
    found = [cluster.find(env) for _, env in said]
    assert sorted(given["process_id"] for _, given in found if given) == numbers
    if script == "slurm_gpu.sbatch":
        assert all(env["SRUN_CPUS_PER_TASK"] == "8" for _, env in said), "srun asks for as many"


def test_a_word_that_tpu_sh_does_not_know_is_one_line(clone):
    done = launch("tpu.sh", clone, "bogus")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: bogus is not one of create, install, run and delete\n"


def assert_two_found_each_other(done: subprocess.CompletedProcess) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    found = "mesh 2 (data 2) · rules fsdp · 2 simulated CPU devices in 2 processes"
    assert done.stdout.count(found) == 1, "the first process prints"
    assert done.stdout.count("Held-out loss") == 1


@pytest.mark.parametrize(
    "script",
    [pytest.param(name, marks=pytest.mark.full) for name in ("slurm_cpu.sbatch", "ssh.sh")],
)
def test_a_script_starts_processes_that_find_each_other(script, clone, book):
    assert_two_found_each_other(launch(script, clone, *FLAGS, book, XLA_FLAGS=XLA_FLAGS))


def started(folder: pathlib.Path, command: list[str], environments: list[dict[str, str]]):
    """Waits for all to succeed; returns the first one's output."""
    env = os.environ | {"XLA_FLAGS": XLA_FLAGS}
    processes = [
        subprocess.Popen(
            command, cwd=folder, env=env | its, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for its in environments
    ]  # fmt: skip
    ends = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ends
    return subprocess.CompletedProcess(command, 0, *ends[0])


@pytest.mark.full
def test_the_pods_of_a_jobset_find_each_other(clone, book):
    """Uses the manifest's environment as Kubernetes would fill it in, with this machine as host."""
    _, container = pod("jobset_gpu.yaml")
    environments = []
    for index in range(2):
        env = {}
        for variable in container["env"]:
            where = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            assert not where or where.endswith("['batch.kubernetes.io/job-completion-index']")
            env[variable["name"]] = str(index) if where else variable["value"]
        env["JAX_COORDINATOR_ADDRESS"] = f"localhost:{free_port()}"
        environments.append(
            env | {"JAX_COORDINATOR_ADDRESS": environments[0]["JAX_COORDINATOR_ADDRESS"]}
            if environments
            else env
        )
    command = [sys.executable, *container["command"][1:], *container["args"], *FLAGS, book]
    command.append("--workdir=runs/mine")
    assert_two_found_each_other(started(clone, command, environments))


# Less than a recipe: who each one is, and how many devices they have together.
MEET = """
import jax
from recipes.common.runtime import processes
processes.initialize(0, -1, "")
print(processes.decide(processes.index(), list), jax.process_index(), jax.device_count())
"""


@pytest.mark.full
@pytest.mark.parametrize("version", [4, 5])
def test_processes_of_open_mpi_find_each_other(version, clone):
    """Also inside Slurm, whose variables each process inherits from the one that started it."""
    shared = SLURM | {
        "OMPI_COMM_WORLD_SIZE": "2",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
    }
    if version == 4:
        shared["OMPI_MCA_orte_hnp_uri"] = f"{job_id() * 4096}.0;tcp://127.0.0.1:1"
    else:
        shared["JAX_COORDINATOR_ADDRESS"] = f"localhost:{free_port()}"
    environments = [
        shared | {"OMPI_COMM_WORLD_RANK": str(i), "OMPI_COMM_WORLD_LOCAL_RANK": str(i)}
        for i in range(2)
    ]
    done = started(clone, [sys.executable, "-c", MEET], environments)
    assert done.stdout == "[0, 1] 0 2\n"
