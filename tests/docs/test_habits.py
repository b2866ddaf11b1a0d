"""CI and the commit hooks do what CONTRIBUTING.md says, with the versions that the project supports."""

import re
import tomllib

import pytest
import yaml

from tests.conftest import ROOT

pytestmark = pytest.mark.promise("structure")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHONS = re.search(r"^for version in (.+); do$", (ROOT / ".ci/run").read_text(), re.M)[1].split()


def test_the_workflow_runs_the_whole_of_ci_on_both_pythons():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    triggers = workflow[True]  # YAML 1.1 reads the key `on` as a boolean
    assert {"push", "pull_request"} <= triggers.keys()
    (job,) = workflow["jobs"].values()
    assert "if" not in job
    steps = job["steps"]
    assert not any({"if", "continue-on-error"} & step.keys() for step in steps)
    (installed,) = (
        s["with"] for s in steps if s.get("uses", "").startswith("actions/setup-python")
    )
    assert installed["python-version"].split() == PYTHONS
    # .ci/run goes on if one of them is missing; this step does not.
    *_, both, last = (step["run"] for step in steps if "run" in step)
    assert both == " && ".join(f"python{version} --version" for version in PYTHONS)
    assert last == ".ci/run"
    assert (ROOT / ".ci/run").stat().st_mode & 0o100


def test_the_oldest_python_is_the_same_everywhere():
    oldest = PYTHONS[0]
    assert PROJECT["project"]["requires-python"] == f">={oldest}"
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + oldest.replace(".", "")
    assert PROJECT["tool"]["pyright"]["pythonVersion"] == oldest
    assert f"Python {oldest} or newer" in (ROOT / "README.md").read_text()


def test_commit_hooks_lint_and_format():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = {hook["id"]: hook for repo in config["repos"] for hook in repo["hooks"]}
    assert hooks.keys() == {"ruff-check", "ruff-format"}
    (least,) = (
        line for line in PROJECT["project"]["optional-dependencies"]["test"] if "ruff" in line
    )
    for name, hook in hooks.items():
        assert hook["entry"].startswith(name.replace("-", " "))
        (pinned,) = hook["additional_dependencies"]
        version, minimum = (re.fullmatch(r"ruff[=>]=([\d.]+)", x)[1] for x in (pinned, least))
        assert [*map(int, version.split("."))] >= [*map(int, minimum.split("."))]
