"""The cache of compiled programs that outlives a run returns what the compiler would."""

import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache

from recipes.common.runtime.mesh import make_mesh
from tests.conftest import ROOT
from tests.support import programs

pytestmark = pytest.mark.promise("meshes-agree")


class CountedCache(programs.ProgramCache):
    hits = 0

    def get(self, key):
        program = super().get(key)
        self.hits += program is not None
        return program


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, for every program that this process compiles."""
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    cache = CountedCache(str(tmp_path))
    monkeypatch.setattr(compilation_cache, "_cache", cache)
    monkeypatch.setattr(compilation_cache, "_cache_initialized", True)
    yield cache
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)


def compile_step(scope: str = "layer", factor: float = 2.0) -> jax.stages.Compiled:
    def step(x, w):
        with jax.named_scope(scope):
            y = factor * jnp.tanh(x @ jax.sharding.reshard(w, jax.P()))
        return y, (y * y).sum()

    mesh = make_mesh("8")
    where = jax.NamedSharding(mesh, jax.P("data", None))
    shapes = [jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=where)] * 2
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(step).lower(*shapes).compile()


def test_a_program_that_is_read_is_the_one_compiled(cache):
    """Its text with names and collectives, the memory that it takes, its costs and results."""
    compiled = compile_step()
    assert cache.hits == 0
    read = compile_step()
    assert cache.hits == 1
    assert read.as_text() == compiled.as_text()
    assert "all-gather" in read.as_text()
    assert "layer" in read.as_text()
    assert str(read.memory_analysis()) == str(compiled.memory_analysis())
    assert read.memory_analysis().temp_size_in_bytes > 0
    assert read.cost_analysis()["flops"] == compiled.cost_analysis()["flops"] > 0
    x = jax.device_put(jnp.eye(8), read.input_shardings[0][0])
    assert all(map(jnp.array_equal, read(x, x), compiled(x, x)))


@pytest.mark.parametrize("change", [{"scope": "renamed"}, {"factor": 3.0}])
def test_a_change_is_compiled_anew(cache, change):
    """Also one of names alone, which tests read in the program's text."""
    compile_step()
    changed = compile_step(**change)
    assert cache.hits == 0
    assert change.get("scope", "layer") in changed.as_text()


def test_a_changed_line_is_compiled_anew(cache, named_lines):
    """Where programs name lines of code, those of before an edit would be wrong."""
    source = "def f(x):\n    return x * 3 + 1\n"
    for code in (source, source, "\n" + source):
        names = {}
        exec(compile(code, str(ROOT / "zoo" / "some.py"), "exec"), names)
        jax.jit(names["f"]).lower(1.0).compile()
    assert cache.hits == 1


def test_half_of_a_program_is_compiled_anew(cache, tmp_path):
    compile_step()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    compile_step()
    assert cache.hits == 0
    compile_step()
    assert cache.hits == 1, "and kept again"


def test_a_folder_that_cant_be_written_is_no_cache(tmp_path):
    file = tmp_path / "file"
    file.touch()
    cache = programs.ProgramCache(str(file / "folder"))
    cache.put("key", b"program")
    assert cache.get("key") is None


@pytest.mark.full
def test_a_killed_process_leaves_whole_programs(tmp_path):
    """While two write the same ones."""
    code = """
import sys
from tests.support.programs import ProgramCache
cache = ProgramCache(sys.argv[1])
while True:
    for i in range(20):
        cache.put(str(i), bytes([i]) * 1_000_000)
        print("put", flush=True)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    writers = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(2)]
    for writer in writers:
        for _ in range(30):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    cache = programs.ProgramCache(str(tmp_path))
    for i in range(20):
        content = (tmp_path / str(i)).read_bytes()
        assert cache.get(str(i)) == bytes([i]) * 1_000_000
        assert len(content) == 1_000_000 + programs.DIGEST


def test_old_programs_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "elsewhere"))  # as .ci/run does
    cache = programs.ProgramCache(str(programs.root() / "jax1-processor"))
    for key, days in {"used": 20, "unused": 20, "new": 0}.items():
        cache.put(key, key.encode())
        then = time.time() - days * 24 * 3600
        os.utime(programs.root() / "jax1-processor" / key, (then, then))
    assert cache.get("used") == b"used"
    programs.clear_old()
    assert [cache.get(key) for key in ("used", "unused", "new")] == [b"used", None, b"new"]
    assert str(tmp_path / "sharded-model-zoo") in str(programs.root())
