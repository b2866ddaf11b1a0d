"""README.md is true: its commands parse, its code runs, what it shows and names is there."""

import os
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import jax
import pytest
from flax import nnx

from recipes.common import cli, report, sharding
from recipes.common.mesh import make_mesh
from recipes.common.optimizer import adamw, schedule
from tests.entries import ENTRIES
from zoo import dot_relu_dot, mlp, transformer

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def block(marker: str) -> str:
    """The code block, or the table, that follows <!-- marker -->."""
    after = README.split(f"<!-- {marker} -->\n", 1)[1]
    if after.startswith("```"):
        return after.split("\n", 1)[1].split("```", 1)[0]
    return after.split("\n\n", 1)[0]


def section(title: str) -> str:
    return README.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


COMMANDS = re.findall(r"python -m (recipes\.[^\n`#&|]+)", README.replace(" -->", ""))


@pytest.mark.parametrize("command", sorted({c.strip() for c in COMMANDS} - {"recipes.hf"}))
def test_commands_parse(command, monkeypatch):
    module, *argv = shlex.split(command)
    parsed = []
    monkeypatch.setattr(sys, "argv", [module, *argv])
    monkeypatch.setattr(
        cli, "start", lambda main, *groups: parsed.extend(cli.parse(sys.argv[1:], *groups))
    )
    monkeypatch.delitem(sys.modules, module, raising=False)  # runpy warns of what is imported
    runpy.run_module(module, run_name="__main__")
    assert parsed


def test_the_tests_run_as_it_says():
    assert block("test command").splitlines()[-1] == "pytest"
    assert "<!-- test command -->" in (ROOT / ".ci" / "run").read_text()


def abstract(config, strategy: str, mesh: str):
    def build():
        return transformer.Transformer(config, rngs=nnx.Rngs(0))

    layout = sharding.lay_out(build, transformer.RULES, strategy, make_mesh(mesh))
    return layout, sharding.abstract_state(layout, adamw(schedule(1e-3, 1, 10), 0.1, 1.0))


def test_the_report_that_it_shows_is_what_is_printed():
    shown = block("output: python -m recipes.transformer --mesh=4x2")
    layout, state = abstract(transformer.Config.small(), "fsdp_tp", "4x2")
    printed = f"{report.headline(layout)}\n{report.table(layout, state)}\n"
    assert shown.startswith(printed)


def test_the_meshes_that_it_compares_hold_what_it_says():
    """The columns that no compiler changes; `python -m recipes.meshes` makes the others."""
    lines = block("output: python -m recipes.meshes").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines[2:]]
    assert {row[1] for row in rows} == {"8x1", "4x2", "2x4", "1x8", "2x2x2"}
    assert {row[0] for row in rows} == set(transformer.RULES)
    for strategy, mesh, params, optimizer, *_ in rows:
        _, state = abstract(transformer.Config.small(), strategy, mesh)
        held = [report.size(report.bytes_per_device(state[k])) for k in ("params", "opt_state")]
        assert [params, optimizer] == held, (strategy, mesh)


def test_sizes_of_the_zoo():
    lines = section("The zoo").splitlines()
    zoo = {"dot_relu_dot": dot_relu_dot, "mlp": mlp, "transformer": transformer}
    for name, module in zoo.items():
        line = next(line for line in lines if f"(zoo/{name}.py)" in line)
        for size in ("tiny", "small", "medium")[: 3 if name == "transformer" else 2]:
            model = getattr(module, {"mlp": "MLP"}.get(name, name.title().replace("_", "")))
            config = getattr(module.Config, size)()
            state = nnx.state(nnx.eval_shape(lambda m=model, c=config: m(c, rngs=nnx.Rngs(0))))
            count = sum(leaf.size for leaf in jax.tree.leaves(state))
            assert f"{size} {count:,}" in line
    assert all(f"`{strategy}`" in section("The zoo") for strategy in ENTRIES["mlp"].rules)


def run_python(name: str, folder: pathlib.Path, **environment: str) -> str:
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"} | environment
    done = subprocess.run(
        [sys.executable, "-c", block(f"python: {name}")],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_copied_file_does_what_it_says(tmp_path):
    shutil.copy(ROOT / "zoo" / "transformer.py", tmp_path)
    assert run_python("copy", tmp_path).splitlines() == [
        "(8, 32, 384)",
        "P('data', None, 'model')",
    ]


def test_a_run_restores_as_it_says(run, tmp_path):
    command = section("Restore elsewhere").split("```sh\n")[1].splitlines()[0]
    module, *flags = shlex.split(command)[2:]
    assert run(module, *flags, cwd=tmp_path, PYTHONPATH=str(ROOT)).code == 0
    out = run_python("restore", tmp_path, PYTHONPATH=str(ROOT))
    assert out == "mlp 400 P('data', None)\n"
    assert run_python("raw", tmp_path) == "(64, 10)\n"


def test_models_of_hugging_face_go_in_and_out_as_it_says(run, tmp_path):
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    printed = ""
    for command in section("Models from Hugging Face").split("```sh\n")[1].splitlines()[:2]:
        module, *flags = shlex.split(command)[2:]
        printed += run(module, *flags, cwd=tmp_path, PYTHONPATH=str(ROOT)).out
    assert printed == block("output: python -m recipes.hf")


GUIDES = [line for line in section("From the guides").splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize("row", GUIDES)
def test_what_the_guides_ask_for_is_where_it_says(row):
    here = row.rsplit(" | ", 1)[1]
    found = re.findall(r"([\w/]+\.py): ((?:`[^`]+`(?:, )?)+)", here)
    assert found or "Choose a mesh" in here or "not needed" in here
    for path, fragments in found:
        for fragment in re.findall("`([^`]+)`", fragments):
            assert fragment in (ROOT / path).read_text(), (path, fragment)


def test_every_promise_names_tests_that_are_there():
    named = re.findall(r"`(?:(test_\w+\.py)::)?(test_\w+)`", section("What you can rely on"))
    assert len(named) > 30
    for file, test in named:
        code = (ROOT / "tests" / (file or "test_nothing_lost.py")).read_text()
        assert f"\ndef {test}(" in code, (file, test)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):
            titles = [t.lower().replace(" ", "-") for t in re.findall(r"^## (.+)$", README, re.M)]
            assert target[1:] in titles
        else:
            assert (ROOT / target).exists(), target
