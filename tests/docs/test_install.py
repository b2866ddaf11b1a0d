"""`pip install -e .`: recipes run and programs of one's own import the zoo, in any folder."""

import pathlib
import subprocess
import sys
import sysconfig
import textwrap
import venv
import zipfile

import pytest
import setuptools

from tests.conftest import ROOT

pytestmark = pytest.mark.promise("readmes")

BUILD = (
    "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The files that pip builds from, without those that an earlier build may have left."""
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip("pyproject.toml requires setuptools 77")
    folder = tmp_path_factory.mktemp("clone")
    for name in ("pyproject.toml", "README.md", "LICENSE", "zoo", "recipes", "data", "tests"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def wheel(clone: pathlib.Path, hook: str, target: pathlib.Path) -> zipfile.ZipFile:
    """Builds a wheel offline, with this Python's setuptools."""
    command = [sys.executable, "-c", BUILD, hook, str(target)]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (built,) = target.glob("*.whl")
    return zipfile.ZipFile(built)


@pytest.fixture(scope="module")
def python(clone, tmp_path_factory):
    """A new environment's Python: this one's libraries, and the editable installation."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    wheel(clone, "build_editable", tmp_path_factory.mktemp("editable")).extractall(site)
    return folder / "bin" / "python"


def call(python, folder: pathlib.Path, files: dict[str, str], *command: str):
    """Runs a command in a folder that has these files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
    return subprocess.run(
        [python, *command], cwd=folder, env={}, capture_output=True, text=True, timeout=100
    )


def test_a_wheel_has_no_modules(clone, tmp_path):
    """`data` and `zoo` are too common as names for anyone's site-packages."""
    names = wheel(clone, "build_wheel", tmp_path).namelist()
    assert names
    assert all(name.split("/")[0].endswith(".dist-info") for name in names)


@pytest.mark.parametrize(
    "files",
    [
        {"data/corpus.jsonl": "", "zoo/lion.txt": "", "recipes/soup.md": ""},
        {"data/__init__.py": "", "data/text.py": "", "zoo.py": "raise SystemExit(3)"},
    ],
    ids=["folders", "packages"],
)
def test_a_recipe_runs_beside_folders_and_packages_of_the_same_names(python, files, tmp_path):
    done = call(python, tmp_path, files, "-m", "recipes.plan", "--size=tiny", "--top=1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "python -m recipes.transformer --size=tiny" in done.stdout


@pytest.mark.full
def test_a_run_writes_its_folder_where_it_is_started(python, tmp_path):
    command = ["-m", "recipes.dot_relu_dot", "--mesh=2x4", "--steps=2"]
    done = call(python, tmp_path, {}, *command)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "runs" / "dot_relu_dot" / "checkpoints" / "2").is_dir()


def test_a_program_of_ones_own_imports_the_zoo_and_keeps_its_modules(python, tmp_path):
    program = """
        import data.loader, recipes.soup  # folders without an __init__.py
        import data.text, recipes.common.mesh, zoo.transformer
        print(data.loader.NAME, recipes.soup.NAME)
        print(zoo.transformer.__file__)
    """
    files = {"data/loader.py": "NAME = 'mine'", "recipes/soup.py": "NAME = 'mine too'"}
    files |= {"train.py": textwrap.dedent(program)}
    done = call(python, tmp_path, files, "train.py")
    assert (done.returncode, done.stderr) == (0, "")
    own, path = done.stdout.splitlines()
    assert own == "mine mine too"
    assert pathlib.Path(path).resolve() == ROOT / "zoo" / "transformer.py"


def test_a_package_in_the_way_is_named_where_the_program_is_someone_else_s(python, clone, tmp_path):
    files = {"data/__init__.py": "NAME = 'mine'"}
    files |= {"train.py": "import data, zoo.mlp\nprint(data.NAME)\nimport recipes"}
    done = call(python, tmp_path, files, "train.py")
    assert (done.returncode, done.stdout) == (1, "mine\n")
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: recipes need the package 'data' of {clone}, and Python finds "
        f"{tmp_path / 'data' / '__init__.py'}; rename that, or put {clone} before it on sys.path"
    )
