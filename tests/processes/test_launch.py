"""The launchers in recipes/launch, and processes finding each other by the variables they set."""

import http.server
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import yaml

from recipes.common.runtime import cluster
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.mesh import parse
from recipes.instruments.plan import tpu_slice
from recipes.instruments.plan.hardware import parse_devices
from tests.conftest import ROOT
from tests.support.quick import XLA_FLAGS
from tests.support.runs import TINY

pytestmark = pytest.mark.promise("launchers")

LAUNCH = ROOT / "recipes" / "launch"
SCRIPTS = sorted(path.name for path in LAUNCH.iterdir() if path.suffix in (".sh", ".sbatch"))
JOBSETS = sorted(path.name for path in LAUNCH.glob("jobset_*.yaml"))


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
    limits = container["resources"]["limits"]
    each = limits["google.com/tpu" if "tpu" in name else "nvidia.com/gpu"]
    (mesh,) = (parse(flag[7:]) for flag in container["args"] if flag.startswith("--mesh="))
    assert math.prod(mesh.values()) == job["replicas"] * spec["parallelism"] * each
    groups = job["replicas"] if "tpu" in name else spec["parallelism"]
    assert groups == 1 or mesh["data"] == groups


def test_a_tpu_slice_is_the_one_that_the_planner_prints():
    """`recipes.plan --devices=v5p:64` prints what the JobSet and xpk.sh ask for."""
    planned = tpu_slice.find(parse_devices("v5p:64"))
    job, container = pod("jobset_tpu.yaml")
    spec = job["template"]["spec"]
    selector = spec["template"]["spec"]["nodeSelector"]
    assert planned
    assert selector == {
        "cloud.google.com/gke-tpu-accelerator": planned.accelerator,
        "cloud.google.com/gke-tpu-topology": planned.topology,
    }
    assert spec["parallelism"] == planned.hosts
    assert container["resources"]["limits"] == {"google.com/tpu": planned.chips}
    assert f"TYPE=${{TYPE:-{planned.type}}}" in (LAUNCH / "xpk.sh").read_text()


# What XPK 1.16 knows of the same slices (its UserFacingNameToSystemCharacteristics).
XPK = {
    "v4:8": ("tpu-v4-podslice", "2x2x2", 2, 4, "ct4p-hightpu-4t", "v4-16"),
    "v5e:256x2": ("tpu-v5-lite-podslice", "16x16", 64, 4, "ct5lp-hightpu-4t", "v5litepod-256"),
    "v5p:64": ("tpu-v5p-slice", "4x4x4", 16, 4, "ct5p-hightpu-4t", "v5p-128"),
    "v5p:1024": ("tpu-v5p-slice", "8x8x16", 256, 4, "ct5p-hightpu-4t", "v5p-2048"),
    "v6e:1": ("tpu-v6e-slice", "1x1", 1, 1, "ct6e-standard-1t", "v6e-1"),
    "tpu7x:128": ("tpu7x", "4x4x4", 16, 4, "tpu7x-standard-4t", "tpu7x-128"),
}


@pytest.mark.parametrize(("devices", "slice"), XPK.items(), ids=XPK)
def test_a_slice_has_the_topology_hosts_and_names_of_google_cloud(devices, slice):
    assert tpu_slice.find(parse_devices(devices)) == slice


@pytest.mark.parametrize("devices", ["h100:16", "cpu:8", "v5p:1"])
def test_other_devices_are_no_slice(devices):
    assert tpu_slice.find(parse_devices(devices)) is None
    assert tpu_slice.note(parse_devices(devices)) == ""


def test_the_planner_s_note_names_all_that_a_jobset_asks_for():
    assert tpu_slice.note(parse_devices("v5p:64x2")) == (
        "Each of the 2 slices is v5p-128 (4x4x4), 16 hosts of 4 chips (ct5p-hightpu-4t). On GKE: "
        "gke-tpu-accelerator: tpu-v5p-slice, gke-tpu-topology: 4x4x4, parallelism: 16, "
        "google.com/tpu: 4."
    )


@pytest.mark.parametrize(
    ("line", "other", "message"),
    [
        ("add: [IPC_LOCK]", "add: IPC_LOCK", ".securityContext.capabilities.add is no array"),
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


# The directives that we use, in the grammar of `man sbatch`; sbatch ignores those after a command.
DIRECTIVES = {
    "job-name": r"\w+",
    "nodes": r"[1-9]\d*(-[1-9]\d*)?",
    "ntasks-per-node": r"[1-9]\d*",
    "gpus-per-node": r"(\w+:)?[1-9]\d*",
    "cpus-per-task": r"[1-9]\d*",
    "exclusive": None,  # takes no value
    "requeue": None,
    "time": r"(\d+-)?\d+(:[0-5]\d){0,2}",
    "signal": r"(R?B?:)?(TERM|USR1|USR2|INT|\d+)(@\d{1,5})?",
    "output": r"[\w%.-]+",
    "open-mode": r"append|truncate",
}


def directive_mistakes(text: str) -> list[str]:
    mistaken = []
    has_begun = False  # the script's first command
    for line in text.splitlines()[1:]:
        if not line.startswith("#SBATCH "):
            has_begun |= not line.startswith("#") and bool(line)
            continue
        name, _, value = line.removeprefix("#SBATCH --").partition("=")
        grammar = DIRECTIVES.get(name, "")
        fits = re.fullmatch(grammar, value) if grammar else grammar is None and not value
        mistaken += [line] * (has_begun or not fits)
    return mistaken


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name.endswith(".sbatch")])
def test_directives_are_in_sbatch_s_grammar(name):
    text = (LAUNCH / name).read_text()
    assert text.startswith("#!/bin/bash\n")
    assert directive_mistakes(text) == []


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("#SBATCH --signal=B:USR1@300", "#SBATCH --signal=B:USR9@300"),
        ("#SBATCH --time=24:00:00", "#SBATCH --time=24h"),
        ("#SBATCH --nodes=4", "#SBATCH --node=4"),
        ("#SBATCH --requeue", "#SBATCH --requeue=yes"),
        ("#SBATCH --requeue", "true\n#SBATCH --requeue"),
    ],
)
def test_a_directive_that_sbatch_would_refuse_or_ignore_is_seen(line, other):
    text = (LAUNCH / "slurm_gpu.sbatch").read_text()
    assert other.splitlines()[-1] in directive_mistakes(text.replace(line, other, 1))


def test_the_gpus_of_slurm_s_nodes_are_those_of_the_mesh():
    text = (LAUNCH / "slurm_gpu.sbatch").read_text()
    nodes, tasks, gpus = (
        int(re.search(rf"^#SBATCH --{name}=(\d+)$", text, re.MULTILINE)[1])
        for name in ("nodes", "ntasks-per-node", "gpus-per-node")
    )
    mesh = parse(re.search(r"--mesh=(\S+)", text)[1])
    assert tasks == gpus, "a process for each GPU"
    assert (mesh["data"], math.prod(mesh.values())) == (nodes, nodes * gpus)


def instructions(text: str) -> list[tuple[str, str]]:
    """A Dockerfile's instructions and their arguments, continued lines joined."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(" ", 1)) for line in joined.splitlines()]


def test_the_image_has_what_the_jobsets_start():
    steps = instructions((LAUNCH / "Dockerfile").read_text())
    names = [name for name, _ in steps]
    assert names[0] == "FROM"
    assert set(names) == {"FROM", "RUN", "WORKDIR", "COPY", "ARG"}
    (image,) = (argument for name, argument in steps if name == "FROM")
    (version,) = re.findall(r"^python:3\.(\d+)-slim$", image)
    assert 11 <= int(version) <= 13, "the Pythons that the tests run on"
    (folder,) = (argument for name, argument in steps if name == "WORKDIR")
    assert {pod(name)[1]["workingDir"] for name in JOBSETS} == {folder}
    sources = [argument.split()[:-1] for name, argument in steps if name == "COPY"]
    assert {"zoo", "data", "recipes", "pyproject.toml"} <= {x for group in sources for x in group}
    assert all((ROOT / source).exists() for group in sources for source in group)
    # An ARG before its use, and after FROM, which ends the scope of earlier ones.
    install = next(i for i, (_, argument) in enumerate(steps) if "jax[${JAX}]" in argument)
    assert ("ARG", "JAX=cuda13") in steps[1:install]
    for name, argument in steps:
        if name == "RUN":
            subprocess.run(["bash", "-n", "-c", argument], check=True)


# The fields of SkyPilot 0.14's schemas (sky/utils/schemas.py) that we use, and their types.
SKYPILOT = {"name": str, "num_nodes": int, "resources": dict, "workdir": str, "envs": dict}
SKYPILOT |= {"setup": str, "run": str}
RESOURCES = {"infra": str, "accelerators": str, "use_spot": bool, "network_tier": str}
RESOURCES |= {"job_recovery": dict}


def test_skypilot_s_file_has_fields_that_there_are():
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert {name: type(value) for name, value in task.items()} == SKYPILOT
    resources = task["resources"]
    assert {name: type(value) for name, value in resources.items()} == RESOURCES
    assert re.fullmatch(r"[\w*]+(/[\w*-]+){0,2}", resources["infra"])
    assert resources["network_tier"] in ("standard", "best")
    assert resources["job_recovery"] == {"max_restarts_on_errors": 3}
    assert all(type(value) is str for value in task["envs"].values())
    gpus = int(resources["accelerators"].removeprefix("H100:"))
    mesh = parse(re.search(r"--mesh=(\S+)", task["run"])[1])
    assert (mesh["data"], math.prod(mesh.values())) == (task["num_nodes"], task["num_nodes"] * gpus)
    for script in ("setup", "run"):
        subprocess.run(["bash", "-n", "-c", task[script]], check=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_skypilot_s_nodes_find_each_other(rank, clone):
    """SkyPilot sets these variables on each node; see its page on distributed jobs."""
    (clone / ".venv" / "bin" / "python").write_text(SAYS.format(python=sys.executable))
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    env = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2"}
    env |= task["envs"] | {"SKYPILOT_NODE_RANK": str(rank), "PATH": os.environ["PATH"]}
    subprocess.run(["bash", "-c", task["run"]], cwd=clone, env=env, check=True)
    ((given, its),) = map(json.loads, (clone / "said").read_text().splitlines())
    assert given[:3] == ["-m", "recipes.transformer", "--mesh=2x8x1"]
    assert given[3:] == ["--workdir=gs://my-bucket/runs/mine"]
    address = {"coordinator_address": "10.0.0.1:9876", "process_id": rank}
    assert cluster.find(its) == (2, ALL | address | {"num_processes": 2})


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
# `xpk workload create --flag=value…`, with the flags of its 1.16.
XPK_SCRIPT = """#!{python}
import argparse, subprocess, sys
parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("cluster", "project", "zone", "workload", "tpu-type", "docker-image", "command"):
    parser.add_argument(f"--{{name}}", required=True)
for name in ("num-slices", "max-restarts", "termination-grace-period-seconds"):
    parser.add_argument(f"--{{name}}", type=int)
assert sys.argv[1:3] == ["workload", "create"], sys.argv
sys.exit(subprocess.run(["bash", "-c", parser.parse_args(sys.argv[3:]).command]).returncode)
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
        ("xpk", XPK_SCRIPT),
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
    numbers = [] if script in ("tpu.sh", "xpk.sh") else [0, 1]  # TPU hosts are told by Google
    found = [cluster.find(env) for _, env in said]
    assert sorted(given["process_id"] for _, given in found if given) == numbers
    if script == "slurm_gpu.sbatch":
        assert all(env["SRUN_CPUS_PER_TASK"] == "8" for _, env in said), "srun asks for as many"


# An srun that runs until a signal, or ends with $CODE at once; and what Slurm's controller is told.
WAITING_SRUN = """#!/bin/sh
[ -z "$CODE" ] || exit "$CODE"
trap 'echo saved >> said; exit "${AFTER:-0}"' TERM
echo started >> said
while :; do sleep 0.05; done
"""
SCONTROL = """#!/bin/sh
echo "scontrol $*" >> said
"""


@pytest.mark.parametrize("script", ["slurm_gpu.sbatch", "slurm_cpu.sbatch"])
@pytest.mark.parametrize(
    ("code", "after", "exit_code", "said"),
    [
        ("", "0", 0, ["started", "saved", "scontrol requeue 7"]),
        ("", "1", 1, ["started", "saved"]),  # it could not save: no endless repetition
        ("0", "", 0, []),
        ("3", "", 3, []),
    ],
    ids=["time is up", "fails while it saves", "is done", "fails"],
)
def test_a_slurm_job_goes_back_to_the_queue_when_its_time_is_up(
    code, after, exit_code, said, script, clone
):
    for name, text in (("srun", WAITING_SRUN), ("scontrol", SCONTROL)):
        (clone / ".venv" / "bin" / name).write_text(text)
        (clone / ".venv" / "bin" / name).chmod(0o755)
    env = os.environ | {"SLURM_JOB_ID": "7", "CODE": code, "AFTER": after}
    env["PATH"] = f"{clone}/.venv/bin:{os.environ['PATH']}"
    text = (LAUNCH / script).read_text()
    assert "#SBATCH --signal=B:USR1@" in text, "B: to the script, not to its processes"
    process = subprocess.Popen(["bash", LAUNCH / script], cwd=clone, env=env)
    path = clone / "said"
    deadline = time.monotonic() + 30
    while not code and not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    if not code:
        process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=30) == exit_code
    assert (path.read_text().splitlines() if path.exists() else []) == said


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
