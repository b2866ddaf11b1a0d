"""The READMEs are true: commands parse, code runs, links resolve, tables match the code."""

import ast
import csv
import dataclasses
import json
import os
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from recipes.common import entries
from recipes.common.mesh import make_mesh
from recipes.common.report import kernel, report
from recipes.common.runtime import flags, start
from recipes.common.sharding import rules
from recipes.common.sharding.layout import make_layout
from recipes.common.train.feed import to_devices
from recipes.common.train.optimizer import LearningRate, adamw
from recipes.common.train.state import abstract_state, initialize
from recipes.common.train.step import TrainStep
from tests.conftest import ROOT
from tests.support import runs
from tests.support.quick import XLA_FLAGS
from tests.support.quick import quick as quick
from zoo import deepseek
from zoo import llama_relatives as transformer
from zoo.core import strategies
from zoo.core.strategies import DECODER

pytestmark = pytest.mark.promise("readmes")

FRONT, ZOO, RECIPES = "README.md", "zoo/README.md", "recipes/README.md"
TABLES = ROOT / "recipes" / "instruments" / "results" / "tables"
FOLDERS = (
    ".",
    "data",
    "recipes",
    "recipes/docs",
    "recipes/instruments/bench",
    "recipes/instruments/results",
    "tests",
    "zoo",
)
READMES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for folder in FOLDERS
    for path in sorted((ROOT / folder).glob("*.md"))
    if path.name != "CHANGELOG.md"
}
PAGES = [path for path in READMES if path.startswith("recipes/docs/")]


def block(marker: str) -> str:
    """The code block, or the table, that follows <!-- marker -->, on whatever page it is."""
    found = set()
    for text in READMES.values():
        for after in text.split(f"<!-- {marker} -->\n")[1:]:
            if after.startswith("```"):
                found.add(after.split("\n", 1)[1].split("```", 1)[0])
            else:
                found.add(after.split("\n\n", 1)[0])
    assert len(found) == 1, f"{len(found)} different blocks follow <!-- {marker} -->"
    return found.pop()


def section(title: str, readme: str = FRONT) -> str:
    return READMES[readme].split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table in a text, its heading included."""
    found = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    split = [[line.strip("| \n").split(" | ") for line in t.splitlines()] for t in found]
    return [[head, *rows] for head, _, *rows in split]


def read_table(name: str) -> list[list[str]]:
    """A table of results; its first row is the heading."""
    return list(csv.reader((TABLES / f"{name}.csv").read_text().splitlines()))


def test_the_index_of_recipes_links_every_page():
    assert PAGES
    for page in PAGES:
        assert f"]({page.removeprefix('recipes/')})" in READMES[RECIPES], page
        assert "](../README.md)" in READMES[page], page


def test_the_oldest_python_is_named():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=")
    assert f"Python {oldest} or newer" in READMES[FRONT]


# ---- commands ------------------------------------------------------------------------------------


def commands(pattern: str) -> list[str]:
    """All matches of `pattern` in the READMEs, without comments and duplicates."""
    found = (
        re.findall(pattern, text.replace(" -->", "").replace("\\\n", ""), re.M)
        for text in READMES.values()
    )
    return sorted({command.strip() for listed in found for command in listed})


MODULES = commands(r"python -m ((?:recipes|tests)\.[^\n`#&|]+)")
INCOMPLETE = {"recipes.hf", "recipes.bench"}  # a word is missing: mentioned, not to be run


def test_commands_parse(monkeypatch):
    parsed, failures = [], []
    monkeypatch.setattr(
        start, "start", lambda main, *groups, **_: parsed.extend(flags.parse(sys.argv[1:], *groups))
    )
    for command in MODULES:
        module, *argv = shlex.split(command)
        if not module.startswith("recipes.") or command in INCOMPLETE or "WORD" in command:
            continue
        parsed.clear()
        monkeypatch.setattr(sys, "argv", [module, *argv])
        for imported in (module, f"{module}.__main__"):  # runpy warns of what is imported
            monkeypatch.delitem(sys.modules, imported, raising=False)
        try:
            runpy.run_module(module, run_name="__main__")
        except (Exception, SystemExit) as error:
            failures.append((command, error))
        else:
            failures += [] if parsed else [(command, "no flags")]
    assert not failures


def test_commands_of_the_tests_name_files_and_options_that_exist(request):
    for command in MODULES:
        if command.startswith("tests."):
            place = ROOT / command.split()[0].replace(".", "/")
            files = (place.with_suffix(".py"), place / "__main__.py")
            assert any(file.exists() for file in files), command
    for command in commands(r"(?:^|`)(pytest(?: [^\n`#]+)?)(?:`|$|#)"):
        for word in shlex.split(command)[1:]:
            if word.startswith("--"):
                request.config.getoption(word.split("=")[0])  # ValueError if it does not exist
            elif word.startswith("tests/"):
                assert (ROOT / word).exists(), command


def test_the_test_command_is_what_ci_runs():
    assert block("test command").splitlines()[-1] == "pytest"
    assert "<!-- test command -->" in (ROOT / ".ci" / "run").read_text()


# Entry → its row of the table of sizes: recipe and sizes.
LISTED = {
    re.search(r"\((\w+)\.py\)", entry)[1]: rest
    for entry, *rest in tables(section("Sizes", ZOO))[0][1:]
}


# ---- what is shown -------------------------------------------------------------------------------


def default_run(strategy: str, mesh: str):
    """Layout and state of the Transformer's default run, nothing allocated."""
    layout = make_layout(
        transformer.Transformer,
        transformer.Config.small(),
        make_mesh(mesh),
        strategy,
        batch_size=16,
    )
    return layout, abstract_state(layout, adamw(LearningRate(1e-3, 1, 10), 0.1, 1.0))


def test_the_report_is_what_is_printed():
    layout, state = default_run("fsdp_tp", "4x2")
    whole = block("full output: python -m recipes.transformer --mesh=4x2")
    assert whole.startswith(f"{report.headline(layout)}\n{report.table(layout, state)}\n")
    lines = iter(whole.splitlines())
    for shown in block("output: python -m recipes.transformer --mesh=4x2").splitlines():
        assert shown == "…" or shown in lines  # in the same order


def test_a_long_row_is_reported_as_is_printed():
    command = "python -m recipes.transformer --mesh=data=2,seq=4 --seq_len=1024 --batch_size=2"
    way, headline, *_ = block(f"output: {command} --steps=100").splitlines()
    layout, _ = default_run("", "data=2,seq=4")
    assert [way] == kernel.report(layout, 1024, segments=False)
    assert headline == report.headline(layout)


def test_meshes_that_are_compared_hold_what_the_table_says():
    """The columns that no compiler changes; `python -m recipes.meshes` makes the others."""
    _, *rows = read_table("meshes")
    assert {row[0] for row in rows} == set(transformer.RULES)
    failures = []
    for strategy, mesh, params, optimizer, *_ in rows:
        _, state = default_run(strategy, mesh)
        held = [report.size(report.bytes_per_device(state[k])) for k in ("params", "opt_state")]
        failures += [] if [params, optimizer] == held else [(strategy, mesh, held)]
    assert not failures


def test_every_table_of_results_is_described_and_linked():
    """Rows as long as their heading; index.csv names each table, and a page links it."""
    pages = "".join(READMES.values())
    named = [row[0] for row in read_table("index")][1:]
    assert sorted(named) == sorted(
        path.stem for path in TABLES.glob("*.csv") if path.stem != "index"
    )
    failures = [name for name in named if f"tables/{name}.csv)" not in pages]
    for path in TABLES.glob("*.csv"):
        failures += [path.name] if len({len(row) for row in read_table(path.stem)}) > 1 else []
    assert not failures


def test_the_guide_to_meshes_has_numbers_of_the_whole_comparison():
    _, *rows = read_table("meshes")
    sent = {(strategy, mesh): more[4] for strategy, mesh, *more in rows}  # its all-reduces
    guide = READMES["recipes/docs/meshes.md"].replace("\n ", "")
    shown = re.search(r"`tp` on 1x8 sends ([\d.]+ MB) a step and `dp` on 8x1 ([\d.]+ MB)", guide)
    assert [*shown.groups()] == [
        sent[pair].partition(" (")[0] for pair in (("tp", "1x8"), ("dp", "8x1"))
    ]


def test_the_front_page_has_the_proof_s_numbers():
    proven = section("What is proven")
    pairs, loss, gradient = re.search(
        r"\*\*(\d+) pairs .*: ([\d.e-]+) of a\nloss, ([\d.e-]+) of a gradient",
        READMES["tests/PROOF.md"],
    ).groups()
    for number in (f"[{pairs} pairs", f"at most {loss}", f"gradients by {gradient}"):
        assert number in proven.replace("\n  ", " "), number


def test_the_front_page_shows_lines_of_the_zoo():
    weights, shown = block("code: zoo").split("\n\n")
    code = "".join(path.read_text() for path in sorted((ROOT / "zoo").rglob("*.py")))
    assert [line for line in weights.splitlines() if line not in code] == []
    *parallelisms, rules = shown.splitlines()
    values = {}
    exec("\n".join(parallelisms), values)
    assert all(values[name] == getattr(strategies, name) for name in ("DP", "FSDP", "TP"))
    assert re.search(r"\{(.+), …", rules)[1] in code


def test_the_site_lists_every_page():
    text = re.sub(r"!ENV \[.*\]", "''", (ROOT / "mkdocs.yml").read_text())
    listed = re.findall(r"([\w/]+\.(?:md|ipynb))$", text.split("\nnav:\n")[1], re.M)
    generated = {page for page in listed if page.startswith("reference/")}
    assert len(listed) == len(set(listed))
    assert {*listed} - generated == {*READMES, "CHANGELOG.md", "recipes/tour.ipynb"} - {FRONT}


@pytest.mark.full
def test_the_site_builds_without_a_broken_link(tmp_path):
    """mkdocs.yml is strict: a link or an anchor that leads nowhere is an error."""
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", f"--site-dir={site}"],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "explorer.html" in (site / "index.html").read_text()
    assert (site / "explorer.html").stat().st_size > 100_000
    assert 'id="L100"' in (site / "zoo" / "transformer.py" / "index.html").read_text()
    assert "make_mesh" in (site / "recipes" / "tour.html").read_text()
    assert "--steps=600" in (site / "reference" / "flags.html").read_text()
    assert "| qwen3_next | fsdp_cp |" not in (ROOT / "tests" / "PROOF.md").read_text()
    assert "<td>fsdp_cp</td>" in (site / "tests" / "PROOF.html").read_text(), "every pair"
    tables = site / "recipes" / "instruments" / "results" / "tables"
    assert "<td>483,775</td>" in (tables / "gpu_steps.csv.html").read_text()
    models = (site / "reference" / "models.html").read_text()
    assert all(f'id="zoo.{name}' in models for name in entries.ENTRIES)


def test_the_zoo_lists_sizes_and_strategies():
    assert {*LISTED} == {*entries.ENTRIES}
    for name, (recipe, sizes_cell) in LISTED.items():
        assert re.fullmatch(rf"`python -m recipes\.{name} --mesh=\S+`", recipe)
        zoo, model, sizes = entries.zoo_file(name), entries.model(name), entries.sizes(name)
        shown = [size.replace("`", "").split() for size in sizes_cell.split(", ")]
        assert [size for size, *_ in shown] == [*sizes]
        for size, parameters in shown[:2]:
            config = sizes[size]
            shapes = nnx.eval_shape(lambda m=model, c=config: m(c(), rngs=nnx.Rngs(0)))
            leaves = jax.tree.leaves(nnx.state(shapes, nnx.Param))
            assert parameters == f"{sum(leaf.size for leaf in leaves):,}"
        assert f"](zoo/{name}.py)" in READMES[FRONT]
        assert all(f"`{strategy}`" in section("Strategies", ZOO) for strategy in zoo.RULES)


def test_strategies_and_parts_of_a_zoo_file_are_explained():
    pages = READMES[ZOO], READMES["recipes/docs/rules.md"]
    explained = {row[0] for page in pages for table in tables(page) for row in table}
    code = (ROOT / "zoo" / "transformer.py").read_text()
    for strategy in transformer.RULES:
        assert any(cell.startswith(f"`{strategy}`") for cell in explained), strategy
    for helper in re.findall(
        r"^def ([a-z]\w+)\(", (ROOT / "zoo" / "core" / "sharding.py").read_text(), re.M
    ):
        assert any(f"`{helper}(" in cell for cell in explained), helper
    for part in ["Config", "SIZES", "Layer", "complete", "RULES"]:
        assert any(f"`{part}`" in cell for cell in explained), part
        assert re.search(rf"^(class )?{part}\b", code, re.M), part
    rooms = {path.parent.name for path in (ROOT / "zoo").glob("*/__init__.py")}
    for room in rooms:
        assert any(f"[{room}/]({room})" in cell for cell in explained), room


# ---- code that runs ------------------------------------------------------------------------------


@pytest.fixture
def shown(monkeypatch, tmp_path, capfd):
    """A function of a marker: what the code block after it prints, run in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def execute(marker: str) -> str:
        capfd.readouterr()
        exec(block(f"python: {marker}"), {})
        return capfd.readouterr().out

    return execute


def copy_as_shown(folder: pathlib.Path) -> None:
    """Runs README.md's command in a folder that has the zoo, which then goes."""
    (command,) = re.findall(r"^cp -r zoo .+$", READMES[FRONT], re.M)
    ignored = shutil.ignore_patterns("checkpoints", "pictures", "__pycache__")
    shutil.copytree(ROOT / "zoo", folder / "zoo", ignore=ignored)
    subprocess.run(command, shell=True, cwd=folder, check=True)
    shutil.rmtree(folder / "zoo")


def run_beside_a_copy(folder: pathlib.Path, code: str) -> list[str]:
    """The lines that `code` prints beside a copy, and nothing of ours is imported."""
    copy_as_shown(folder)
    code += 'import sys\nassert not {"zoo", "recipes", "data"} & set(sys.modules)\n'
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder, env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": XLA_FLAGS},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_front_page_imports_what_the_loop_does():
    assert block("python: import") in block("python: copy")


@pytest.mark.full
@pytest.mark.promise("copy")
def test_a_copied_model_trains_as_shown(tmp_path):
    check = """
print(sorted({str(w.sharding.spec) for w in jax.tree.leaves(state[0].layers.mlp)}))
assert jax.tree.map(lambda x: x.sharding, state) == pinned[0]
assert jax.tree.leaves(pinned[0][2][0].mu) == jax.tree.leaves(pinned[0][0])
assert train_step._cache_size() == 1, "it is compiled once"
"""
    printed = run_beside_a_copy(tmp_path, block("python: copy") + block("python: generate") + check)
    *lines, a, b, c, d, specs = printed
    losses = [float(line.split("loss ")[1]) for line in lines]
    assert len(losses) == 20
    begins = [b"def ", b"import", b"x_BTD", b"return "]
    for text, begin in zip(map(ast.literal_eval, (a, b, c, d)), begins, strict=True):
        assert text.startswith(begin)
        assert len(text) == len(begin) + 24
    assert losses[-1] < losses[0] - 1
    assert specs == "[\"P(None, 'data', 'model')\", \"P(None, 'model', 'data')\"]"


@pytest.mark.full
@pytest.mark.promise("copy")
def test_a_copy_is_described_as_shown(tmp_path):
    code = block("python: copy").replace("range(20)", "range(1)")
    code += textwrap.indent(block("python: describe"), "    ")
    copy_as_shown(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": XLA_FLAGS},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, headline, *lines = done.stdout.splitlines()
    layout = make_layout(
        transformer.Transformer, transformer.Config.tiny(), make_mesh("4x2"), "fsdp_tp"
    )
    assert headline == report.headline(layout).replace("rules fsdp_tp", "rules (yours)")
    shown = report.table(layout, abstract_state(layout, adamw(LearningRate(1e-3, 1, 10), 0.1, 1.0)))
    assert lines[: len(shown.splitlines()) - 1] == shown.splitlines()[:-1]
    assert lines[-2].startswith("Compiled step, per device: ")
    assert "all-gather of" in lines[-1]
    assert "all-reduce of" in lines[-1]


@pytest.mark.full
@pytest.mark.promise("copy")
def test_a_loop_with_buffers_prints_what_is_shown(tmp_path):
    printed = run_beside_a_copy(tmp_path, block("python: buffers"))
    assert "".join(f"{line}\n" for line in printed) == block("output: buffers")


FEWER = {"num_layers": 1, "dense_layers": 0}  # compiles faster


@pytest.mark.full
@pytest.mark.promise("copy")
def test_the_loop_that_is_shown_moves_buffers_as_the_recipe_does(tmp_path, quick):
    """With DeepSeek, whose biases even the load of its experts by 1e-3 a step."""
    shown = block("python: copy").replace("mine.transformer", "mine.deepseek")
    shown = shown.replace("Transformer", "DeepSeek").replace("range(20)", "range(10)")
    shown = shown.replace("Config.tiny()", "Config(**Config.tiny().__dict__ | FEWER)")
    save = 'np.savez("buffers.npz", *jax.tree.leaves(jax.device_get(state[1])))\n'
    run_beside_a_copy(tmp_path, f"FEWER = {FEWER}\n{shown}{save}")
    (bias_LE,) = np.load(tmp_path / "buffers.npz").values()
    assert np.abs(bias_LE).max() == pytest.approx(0.01)

    config = dataclasses.replace(deepseek.Config.tiny(), **FEWER)
    layout = make_layout(deepseek.DeepSeek, config, make_mesh("4x2"), "fsdp_tp", batch_size=16)
    optimizer = optax.adamw(3e-3)
    step = TrainStep(layout, optimizer, LearningRate(3e-3, 0, 10))
    text = np.fromfile(ROOT / "zoo" / "core" / "attention.py", np.uint8).astype(np.int32)
    state = initialize(layout, optimizer, 0, step.abstract_state())
    row = np.zeros(64, np.int32)
    compiled = step.lower(step.abstract_state(), {"tokens": row, "targets": row}).compile()
    for seed in range(10):
        starts = np.random.default_rng(seed).integers(len(text) - 64, size=(16, 1))
        window_BT = text[starts + np.arange(65)]
        batch = {"tokens": window_BT[:, :-1], "targets": window_BT[:, 1:]}
        state, _ = compiled(state, to_devices(batch, layout))
    np.testing.assert_allclose(bias_LE, *jax.tree.leaves(state["buffers"]), atol=1e-7)


@pytest.mark.full
@pytest.mark.promise("copy")
def test_the_loop_that_is_shown_trains_adapters_alone(tmp_path):
    """copying.md: split by nnx.LoRAParam instead of nnx.Param."""
    shown = block("python: copy").replace("nnx.Param", "nnx.LoRAParam")
    shown = shown.replace("mine.transformer", "mine.llama_relatives")  # which has the options
    shown = shown.replace("Config.tiny()", "Config(**Config.tiny().__dict__ | {'lora_rank': 2})")
    check = """
first = nnx.merge(*build()).layers.attention.q[...]
after = nnx.merge(graph, *state[:2]).layers.attention
assert (jax.device_get(first) == jax.device_get(after.q[...])).all(), "frozen"
print(abs(jax.device_get(after.lora["q"].b[...])).max())
print(len(jax.tree.leaves(state[0])), len(jax.tree.leaves(state[2][0].mu)))
"""
    *lines, moved, counts = run_beside_a_copy(tmp_path, shown + check)
    losses = [float(line.split("loss ")[1]) for line in lines]
    assert losses[-1] < losses[0]
    assert float(moved) > 0
    assert counts == "14 14"  # A and B of seven weights


def test_rules_of_your_own_work_as_shown(shown, tmp_path):
    assert shown("rules") == "P(None, 'data', 'model') None\n"
    _, given, *_ = shlex.split(block("rules: mine.json"))
    given = json.loads(given)
    assert f'complete({{"mine": {json.dumps(given)}}})' in block("python: rules")
    write, _ = block("rules: mine.json").splitlines()
    subprocess.run(write, shell=True, cwd=tmp_path, check=True)
    name, table = rules.select(transformer.RULES, DECODER, "mine.json", make_mesh("2x4"))
    assert (name, table) == ("mine.json", transformer.complete({"mine": given})["mine"])


@pytest.mark.parametrize("marker", ["typeof", "call"])
def test_types_are_as_shown(marker, shown):
    assert shown(marker) == block(f"output: {marker}")


@pytest.mark.full  # the MLP's whole default run
def test_a_run_restores_as_shown(inside, shown):
    command, *_ = block("commands: restore").splitlines()
    assert inside(*shlex.split(command)[2:]).code == 0
    assert shown("restore") == "mlp 400 P('data', None)\n"
    assert shown("raw") == "(64, 10)\n"


def test_hugging_face_models_are_imported_and_exported_as_shown(inside, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    lines = block("commands: python -m recipes.hf").splitlines()
    printed = "".join(inside(*shlex.split(command)[2:]).out for command in lines)
    assert printed == block("output: python -m recipes.hf")


@pytest.mark.full
@pytest.mark.parametrize("module", ["recipes.evaluate", "recipes.generate"])
def test_a_published_model_prints_what_is_shown(module, inside, monkeypatch):
    """Compares all but the lines with speeds."""
    monkeypatch.chdir(ROOT)
    command, *_ = block(f"commands: python -m {module}").splitlines()
    given = shlex.split(command)[2:]
    if "--mesh" not in command:  # a process of its own simulates one device, this one eight
        given.append("--mesh=1")
    printed = inside(*given).out.splitlines()
    expected = block(f"output: python -m {module}").splitlines()
    assert len(printed) == len(expected)
    for line, shown in zip(printed, expected, strict=True):
        assert line == shown or re.search(r"(tokens|B)/s\b", line)


# ---- references ----------------------------------------------------------------------------------

IDEAS = [row for table in tables(READMES["recipes/docs/guides.md"]) for row in table[1:]]


def test_what_the_guides_ask_for_is_where_the_table_says():
    failures = []
    for *_, answer in IDEAS:
        found = re.findall(r"([\w/]+\.py): ((?:`[^`]+`(?:, )?)+)", answer)
        if not found and "Choose a mesh" not in answer and "not needed" not in answer:
            failures.append(answer)
        for path, fragments in found:
            for fragment in re.findall("`([^`]+)`", fragments):
                if fragment not in (ROOT / path).read_text():
                    failures.append((path, fragment))
    assert not failures


def anchors(path: pathlib.Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


def test_links_resolve():
    failures = []
    for readme, text in READMES.items():
        folder = (ROOT / readme).parent
        links = re.findall(r"\]\(([^)]+)\)", text)
        for link in links + re.findall(r'(?:src|srcset)="([^"]+)"', text):
            if link.startswith("https://"):
                continue  # tests use no network
            path, _, anchor = link.partition("#")
            target = folder / path if path else ROOT / readme
            if not target.exists() or (anchor and anchor not in anchors(target)):
                failures.append((readme, link))
    assert not failures


def test_files_that_are_named_exist():
    failures = []
    for readme, text in READMES.items():
        for path in re.findall(r"(?:zoo|recipes|data|tests)/[\w/]+\.py\b", text):
            known = (ROOT / path).exists() or (ROOT / readme).parent.joinpath(path).exists()
            if not known and "/NAME.py" not in path and "/SOURCE.py" not in path:
                failures.append((readme, path))
    assert not failures


def test_the_licence_is_named_everywhere():
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert "[Apache-2.0](LICENSE)" in READMES[FRONT]


@pytest.mark.full
def test_a_model_is_made_ones_own_as_shown(inside, quick, monkeypatch, tmp_path):
    """The section's commands in their order, with a small model in place of the Hub's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(ROOT / "data")
    runs.talker(tmp_path / "made", context=96)
    assert inside("recipes.hf", "export", "--source=made", "--target=small").code == 0
    printed = []
    for part in range(1, 5):
        lines = block(f"commands: yours {part}").replace("\\\n", "").splitlines()
        for command in lines:
            module, *given = shlex.split(command)[2:]
            given = [f.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "small") for f in given]
            done = inside(module, *given)
            assert (done.code, done.err) == (0, ""), command
            printed.append(done.out)
    before, after = (float(re.search(r"loss ([\d.]+)", printed[i])[1]) for i in (1, 3))
    assert after < before
    card = (tmp_path / "runs" / "published" / "README.md").read_text()
    assert f"| Base model | `hf:{tmp_path / 'small'}`, SHA-256 `" in card
    assert "| Held out before | " in card
    assert "| Licence | apache-2.0 |" in card
    assert 'license: "apache-2.0"' in (tmp_path / "runs" / "hf" / "README.md").read_text()
    assert (tmp_path / "runs" / "hf" / "tokenizer.json").exists()
