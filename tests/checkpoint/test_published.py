"""Published checkpoints: their golden loss on every mesh, and damage is refused."""

import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import types

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from recipes import transformer
from recipes.common import checkpoint
from recipes.common.checkpoint import card, integrity, locate, probe
from recipes.common.entries import ENTRIES, zoo_file
from recipes.common.mesh import make_mesh
from recipes.common.runtime import quote, start
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.mesh import parse
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import make_layout
from recipes.common.sharding.rules import default_strategy
from recipes.copy import __main__ as copy
from tests.conftest import ROOT, full_except
from tests.support.entries import ENTRIES as PROVEN
from tests.support.entries import FAMILY_CASES, FAST
from tests.support.quick import quick as quick
from tests.support.runs import assert_bit_equal, state_of
from zoo.llama_relatives import Config, Transformer

pytestmark = pytest.mark.promise("published")

NAMES = checkpoint.published()


def every_mesh_and_table(name: str) -> list[tuple[str, str, str]]:
    """Each mesh with its default strategy, and each other strategy on the last mesh that fits it.

    All pairs are test_meshes.py's.
    """
    entry = PROVEN[name.split(".")[0]]
    found = {mesh: default_strategy(entry.rules, make_mesh(mesh)) for mesh in entry.meshes}
    others = {case[1]: case[2] for case in entry.cases if case[1] not in found.values()}
    pairs = [*((table, mesh) for mesh, table in found.items()), *others.items()]
    return [(name, *pair) for pair in pairs]


FITTING = [case for name in NAMES for case in every_mesh_and_table(name)]
ON_FAST = {  # the last of each
    name: (name, *case)
    for name, *case in FITTING
    if case[1] == FAST and name.split(".")[0] not in FAMILY_CASES
}
MIB = 2**20


def files_of(folder: pathlib.Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


# ---- the zoo's own ---------------------------------------------------------------------------------


def test_there_is_one_for_each_of_ours_and_together_they_are_small():
    names = {"dot_relu_dot.teacher", "mlp.digits", "siglip.digits", "transformer.stdlib_3m"}
    assert {*NAMES} == names
    assert {name.split(".")[0] for name in NAMES} <= set(ENTRIES)
    sizes = [path.stat().st_size for path in checkpoint.PUBLISHED.rglob("*") if path.is_file()]
    assert sum(sizes) < 12.25 * MIB


@pytest.mark.parametrize(("name", "strategy", "mesh"), full_except(FITTING, ON_FAST.values()))
def test_the_golden_loss_on_every_mesh_and_table(name, strategy, mesh, quick):
    # Its hashes are another test's; as XLA optimizes it, the next one's.
    source = checkpoint.find(name, hash_files=False)
    golden, batch = probe.loads((source.path / "probe.json").read_text())
    layout = checkpoint.layout_of(source, make_mesh(mesh), strategy)
    loss = probe.loss(layout, checkpoint.restore_variables(source, layout), batch)
    assert loss == pytest.approx(golden, abs=1e-5, rel=0)


KINDS = {"default": None, "Auto": (jax.sharding.AxisType.Auto,) * 2}


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("name", full_except(NAMES, ["mlp.digits"]))
def test_a_restored_model_can_be_called_on_any_kind_of_mesh(name, kinds):
    """The loss is the same without a mesh context, under the mesh, and under mesh and rules."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), KINDS[kinds])
    model, metadata = checkpoint.restore(name, mesh, verify=False)
    golden, on_host = probe.loads((checkpoint.PUBLISHED / name / "probe.json").read_text())
    on_mesh = jax.device_put(on_host, jax.NamedSharding(mesh, jax.P("data")))
    table = zoo_file(metadata["entry"]).RULES["fsdp_tp"]
    calls = {"nothing": on_mesh, "mesh": on_host, "mesh and rules": on_mesh}
    for in_force, batch in calls.items():
        with contextlib.ExitStack() as stack:
            if "mesh" in in_force:
                stack.enter_context(jax.set_mesh(mesh))
            if "rules" in in_force:
                stack.enter_context(nnx.logical_axis_rules(tuple(table.items())))
            total, count = jax.jit(lambda m, b: m.loss(**b)[2]["loss"])(model, batch)
        assert total / count == pytest.approx(golden, abs=1e-5, rel=0), in_force


def test_the_golden_loss_notices_what_was_restored_wrong():
    source = checkpoint.find("mlp.digits")
    golden, batch = probe.loads((source.path / "probe.json").read_text())
    layout = checkpoint.layout_of(source, make_mesh("1x1"))
    variables = checkpoint.restore_variables(source, layout)
    head = variables["params"]["head"]
    head["bias"] = head["bias"][::-1]
    assert abs(probe.loss(layout, variables, batch) - golden) > 1e-3


@pytest.mark.promise("user-errors")
@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("16", "tokens [8, 20], and 8 is not divisible by 16 (--mesh=16); use --mesh=1"),
        ("data=1,seq=8", "tokens [8, 20], and 20 is not divisible by 8 (--mesh=data=1,seq=8); use"),
    ],
)
def test_a_probe_that_the_mesh_does_not_divide_is_one_line(mesh, message):
    axes = parse(mesh)
    abstract = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
    rules = {"batch": "data"} | ({"seq": "seq"} if "seq" in axes else {})
    layout = make_layout(Transformer, Config.tiny(), abstract, rules)
    with pytest.raises(UserError, match=re.escape(f"a published checkpoint's probe has {message}")):
        probe.loss(layout, {}, {"tokens": np.zeros((8, 20), np.int32)})


def test_a_card_leaves_out_flags_that_change_no_result():
    """A new flag that may change when a run resumes has to be sorted into one of these."""
    groups = transformer.NEW
    fields = [field for group in groups for field in dataclasses.fields(group)]
    may_change = {field.name for field in fields if field.metadata["may_change"]}
    shown = {"mesh", "rules", "steps", "skip_nonfinite", "restore_from", "base", "tokenizer"}
    shown |= {"dtype", "remat", "context", "pipeline", "pipe_rounds", "pipe_microbatches"}
    shown |= {"matmul", "matmul_backward", "matmul_emulate", "reduce_dtype", "offload", "set"}
    assert may_change - card.OMITTED_FLAGS == shown
    flags = dict.fromkeys(may_change, "x") | {"learning_rate": 0.1}
    facts = {"entry": "mlp", "mesh": {"data": 8}, "rules": {"name": "fsdp"}, "flags": flags}
    written = {word.partition("=")[0] for word in shlex.split(card.command(facts))[3:]}
    assert written == {f"--{name}" for name in (*shown, "learning_rate")}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/tmp/pytest-7/book.txt", "path/to/book.txt"),
        ("~/corpus", "path/to/corpus"),
        ("hf:/data/models/mine", "hf:path/to/mine"),
        ("hf:org/name", "hf:org/name"),
        ("my/corpus", "my/corpus"),
        ("gs://bucket/corpus", "gs://bucket/corpus"),
        (0.1, "0.1"),
        ("/", "/"),
    ],
)
def test_a_card_shows_no_folders_of_this_machine(value, shown):
    assert card.shown(value) == shown
    flags = {"dataset": value, "seed": 0}
    metadata = {"entry": "mlp", "mesh": {"data": 8}, "rules": {"name": "fsdp"}, "flags": flags}
    metadata["not_default"] = ["dataset"]
    assert card.command(metadata) == f"python -m recipes.mlp --mesh=8 --dataset={shown}"


def test_a_card_has_the_text_of_its_own_step_in_a_block_that_no_text_ends(tmp_path):
    sample = {"step": 2, "prompt": "im", "temperature": 0.8, "text": "im\n```\n| x\x1b"}
    (tmp_path / "sample.json").write_text(json.dumps(sample))
    metadata = {"entry": "transformer", "data": {"dataset": "stdlib"}, "flags": {}}
    found = {
        step: card.facts(
            types.SimpleNamespace(
                metadata=metadata, step=step, path=tmp_path / "checkpoints" / str(step)
            ), [], "", "",
        )
        for step in (1, 2)
    }  # fmt: skip
    assert card.in_its_words(found[1]) == []
    assert card.in_its_words(found[2]) == [
        'A sample after the prompt "im", at temperature 0.8:', "", "    im", "    ```", "    | x\ufffd", "",
    ]  # fmt: skip
    (tmp_path / "sample.json").write_text("torn")
    source = types.SimpleNamespace(metadata=metadata, step=2, path=tmp_path / "checkpoints" / "2")
    assert "sample" not in card.facts(source, [], "", "")


@pytest.mark.full
def test_a_language_model_is_published_with_its_text_and_a_short_command(inside, book, tmp_path):
    work, target = tmp_path / "work", tmp_path / "pub"
    run = ("--size=tiny", "--steps=2", book, "--seq_len=32", f"--workdir={work}",
           "--sample_bytes=8", "--prompt=im", "--mesh=4x2")  # fmt: skip
    done = inside("recipes.transformer", *run)
    assert (done.code, done.err) == (0, "")
    sample = json.loads((work / "sample.json").read_text())
    assert (sample["step"], sample["prompt"], sample["temperature"]) == (2, "im", 0.8)
    assert sample["text"].startswith("im")
    assert "\n".join(quote(sample["text"])) in done.out
    done = inside("recipes.publish", f"--source={work}", f"--target={target}", "--licence=mit")
    assert (done.code, done.err) == (0, "")
    text = (target / integrity.CARD).read_text()
    assert 'A sample after the prompt "im", at temperature 0.8:\n\n    im' in text
    assert str(tmp_path) not in text
    assert checkpoint.verify(target) == ""
    command = re.search(r"Made by \| `(.*?)`", text)[1]
    name = pathlib.Path(book.partition("=")[2]).name
    assert set(command.split()[3:]) == {
        "--mesh=4x2", "--steps=2", "--size=tiny", "--seq_len=32", f"--dataset=path/to/{name}"
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_card_says_what_is_there(name):
    folder = checkpoint.PUBLISHED / name
    text, metadata = (folder / integrity.CARD).read_text(), checkpoint.find(name).metadata
    arrays = paths(ocp.StandardCheckpointer().restore(folder / "state"))
    assert set(arrays) == {f"params/{path}" for path in metadata["logical_axes"]}
    assert {str(array.dtype) for array in arrays.values()} == {"float32"}
    assert f"| Parameters | {sum(array.size for array in arrays.values()):,}, float32 |" in text
    assert "| Rounded |" not in text
    assert f"`python -m recipes.{metadata['entry']} --mesh=" in text
    evaluates = re.search(
        r"^    python -m recipes.* --restore_from=(\S+) --steps=0(.*)$", text, re.M
    )
    assert evaluates[1] == name
    assert ("--seq_len=256" in evaluates[2]) == (name == "transformer.stdlib_3m")
    assert f"| Steps | {metadata['step']:,} |" in text
    assert metadata["step"] == metadata["flags"]["steps"], "of the end of its run"
    assert re.search(r"\| Time \| \d+ min \d+ s for the steps \|", text)
    for fact in ("dataset", "fingerprint"):
        assert metadata["data"][fact] in text
    assert f"loss {metadata['published']['held_out']['loss']:.7g}" in text
    assert f"| Licence | {card.LICENCES[metadata['data']['dataset']]} |" in text
    assert sorted([*integrity.card_digests(text), integrity.CARD, "hashes.json"]) == files_of(
        folder
    )
    for file in files_of(folder):  # nobody's home
        assert not re.search(rb"/(tmp|home|root|Users|work)/", (folder / file).read_bytes()), file


def test_the_transformer_has_learned():
    """Its loss is clearly below that of the recipe's bare command, 1.58 nats a byte."""
    facts = checkpoint.find("transformer.stdlib_3m", hash_files=False).metadata["published"]
    assert 2_500_000 < facts["parameters"] < 3_500_000
    assert facts["held_out"]["loss"] < 1.5


def test_git_keeps_every_byte():
    """No line ending is changed on any system, and no ignore rule leaves a file out."""
    files = [str(path) for path in checkpoint.PUBLISHED.rglob("*") if path.is_file()]

    def ask(*words: str) -> str:
        command = ["git", *words, "--stdin"]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, input="\n".join(files)
        ).stdout

    assert ask("check-ignore", "--no-index") == ""
    assert ask("check-attr", "text").count(": text: unset") == len(files)


# ---- by name ---------------------------------------------------------------------------------------


def test_a_bare_name_is_a_published_one_wherever_one_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, metadata = checkpoint.restore("mlp.digits", make_mesh("1x8"), "tp")
    assert metadata["entry"] == "mlp"
    assert model.head.kernel[...].sharding.mesh.shape == {"data": 1, "model": 8}
    for path in ("./mlp.digits", tmp_path / "mlp.digits"):
        with pytest.raises(UserError, match="does not exist; use a run's workdir or a checkpoint"):
            checkpoint.find(path)
    (tmp_path / "mlp.digits").mkdir()  # what is here comes first
    with pytest.raises(UserError, match=r"=mlp\.digits holds no checkpoint"):
        checkpoint.find("mlp.digits")


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(UserError) as caught:
        checkpoint.restore("mlp.digit", make_mesh("8"))
    assert str(caught.value) == (
        "--restore_from=mlp.digit does not exist; use a run's workdir or a checkpoint; "
        "the zoo has dot_relu_dot.teacher, mlp.digits, siglip.digits, transformer.stdlib_3m"
    )


@pytest.mark.promise("user-errors")
@pytest.mark.parametrize("name", locate.MADE_BY)
def test_a_name_that_is_not_shipped_is_answered_with_the_run_that_makes_it(name, inside):
    with pytest.raises(UserError) as caught:
        checkpoint.find(name, "--teacher")
    start = f"--teacher={name} does not come with the zoo; make it with `python -m recipes."
    assert str(caught.value).startswith(start)
    assert str(caught.value).endswith(f"--workdir=runs/{name}`, then use --teacher=runs/{name}")
    done = inside(*locate.MADE_BY[name].split(), "--plan")
    assert (done.code, done.err) == (0, ""), "its flags fit together"


@pytest.mark.full
def test_it_evaluates_and_writes_text(inside, quick, book, tmp_path):
    done = inside(
        "recipes.transformer", "--mesh=1x8", "--rules=tp", "--restore_from=transformer.stdlib_3m",
        "--steps=0", "--prompt=import ", "--sample_bytes=40", book, f"--workdir={tmp_path / 'no'}",
    )  # fmt: skip
    assert (done.code, done.err) == (0, "")
    assert "zoo/checkpoints/transformer.stdlib_3m, step" in done.out
    assert "  | import " in done.out
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_the_readmes_lines_for_plain_orbax_work_beside_a_copy(tmp_path):
    readme = (ROOT / "zoo" / "README.md").read_text()
    block = re.search(r"<!-- plain orbax -->\n+```python\n(.*?)```", readme, re.DOTALL)[1]
    for name in copy.imported("transformer", nested=False):
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "zoo" / name, tmp_path / "mine" / name)
    (tmp_path / "transformer.stdlib_3m").symlink_to(checkpoint.PUBLISHED / "transformer.stdlib_3m")
    golden = checkpoint.PUBLISHED / "transformer.stdlib_3m" / "probe.json"
    check = f"""
import json
import jax.numpy as jnp

probe = json.load(open({str(golden)!r}))
window_BT = jnp.array(probe["batch"]["window"])
tokens_BT, targets_BT = window_BT[:, :-1], window_BT[:, 1:]
with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(RULES["fsdp_tp"].items())):
    loss = jax.jit(lambda m: m.loss(tokens_BT, targets_BT, (tokens_BT == 256).cumsum(1)))
    nats, count = loss(model)[2]["loss"]
assert abs(float(nats / count) - probe["loss"]) < 1e-5, (nats / count, probe["loss"])
assert len(mesh.devices.flat) == 8
assert tuple(model.layers.mlp.up[...].sharding.spec) == (None, "data", "model")
import sys
assert not {{"zoo", "recipes", "data"}} & set(sys.modules)
"""
    (tmp_path / "use.py").write_text(block + check)
    done = subprocess.run(
        [sys.executable, "-W", "error", "use.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# ---- publishing ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder for a run and its published checkpoint."""
    return tmp_path_factory.mktemp("runs")


def held_out_loss(out: str) -> float:
    return float(re.search(r"Held-out loss (\d\.\d{6})", out)[1])


def test_a_run_is_published_and_evaluated_elsewhere(inside, runs):
    work, target = runs / "m", runs / "pub"
    tiny = ("--embed=16", "--hidden=64", "--steps=12", f"--workdir={work}")
    done = inside("recipes.dot_relu_dot", "--mesh=4x2", *tiny)
    assert (done.code, done.err) == (0, "")
    loss = held_out_loss(done.out)
    before = (work / "metrics.jsonl").read_bytes()

    done = inside("recipes.publish", f"--source={work}", f"--target={target}", "--note=by\nhand")
    assert (done.code, done.err) == (0, "")
    assert f"python -m recipes.dot_relu_dot --restore_from={target} --steps=0" in done.out
    assert (work / "metrics.jsonl").read_bytes() == before
    assert sorted(path.name for path in runs.iterdir()) == ["m", "pub"], "nothing is left beside it"
    assert checkpoint.verify(target) == ""
    trained = {k: v for k, v in state_of(work, 12).items() if k.startswith("params/")}
    assert_bit_equal(paths(ocp.StandardCheckpointer().restore(target / "state")), trained)

    theirs = checkpoint.find(work).metadata
    ours = checkpoint.find(target).metadata
    for fact in ("entry", "config", "rules", "mesh", "logical_axes", "data", "versions", "step"):
        assert ours[fact] == theirs[fact], fact
    assert ours["flags"]["learning_rate"] == theirs["flags"]["learning_rate"]
    text = (target / integrity.CARD).read_text()
    command = re.search(r"\| Made by \| `python -m recipes\.dot_relu_dot (.*)` \|", text)
    assert command[1] == "--mesh=4x2 --steps=12 --embed=16 --hidden=64", "no flag of a default"
    assert "| Note | by hand |" in text
    assert (target / "loss.png").read_bytes() == (work / "pictures" / "loss.png").read_bytes()
    assert "\n![Losses of the run](loss.png)\n" in text
    assert "A sample" not in text, "it writes no text"
    assert str(runs) not in text

    done = inside("recipes.dot_relu_dot", "--mesh=8x1", f"--restore_from={target}", "--steps=0")
    assert (done.code, done.err) == (0, "")
    assert held_out_loss(done.out) == pytest.approx(loss, abs=1.5e-6)  # the last digit shown

    # And rounded, in half the bytes; who restores it has float32 again, and the probe's loss.
    rounded = runs / "rounded"
    done = inside("recipes.publish", f"--source={work}", f"--target={rounded}", "--dtype=bfloat16")
    assert (done.code, done.err) == (0, "")
    written = paths(ocp.StandardCheckpointer().restore(rounded / "state"))
    halves = {path: value.astype(jax.numpy.bfloat16) for path, value in trained.items()}
    assert {value.dtype for value in written.values()} == {jax.numpy.bfloat16.dtype}
    assert_bit_equal(written, halves)
    text = (rounded / integrity.CARD).read_text()
    assert "bfloat16 |\n| Made by" in text
    assert "| Rounded | matmul weights, when published; held-out" in text
    layout = checkpoint.layout_of(source := checkpoint.find(rounded), make_mesh("2x4"))
    variables = checkpoint.restore_variables(source, layout)
    assert_bit_equal(
        {f"params/{path}": value for path, value in paths(variables["params"]).items()},
        {path: value.astype(np.float32) for path, value in halves.items()},
    )
    golden, batch = probe.loads((rounded / "probe.json").read_text())
    assert probe.loss(layout, variables, batch) == pytest.approx(golden, abs=1e-5, rel=0)


def test_a_published_card_has_the_figures_of_its_step(tmp_path):
    folder = tmp_path / "checkpoints" / "20"
    lines = [
        {"step": 10, "step_seconds": 2.0}, {"step": 20, "step_seconds": 1.0},
        {"step": 20, "held_out_loss": 3.0, "held_out_x": None}, {"step": 30, "step_seconds": 9.0},
        {"step": 30, "held_out_loss": 1.0},
    ]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"torn'
    (tmp_path / "metrics.jsonl").write_text(text)
    found = card.measured(folder, 20)
    assert found == {"held_out": {"loss": 3.0}, "train_seconds": 30.0}
    (tmp_path / "metrics.jsonl").unlink()
    found = card.measured(folder, 20)
    assert found == {"held_out": {}, "train_seconds": 0.0}


def test_a_probe_is_exact_in_json():
    batch = {"x": np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)}
    batch["n"] = np.arange(-1, 7, dtype=np.int32)
    loss, again = probe.loads(probe.dumps(0.1, batch))
    assert loss == 0.1
    for name, array in batch.items():
        assert again[name].dtype == array.dtype
        np.testing.assert_array_equal(again[name], array)


# ---- damage ----------------------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path):
    """A copy of a published checkpoint, to damage."""
    return pathlib.Path(
        shutil.copytree(checkpoint.PUBLISHED / "dot_relu_dot.teacher", tmp_path / "ck")
    )


FILES = files_of(checkpoint.PUBLISHED / "dot_relu_dot.teacher")


def refused(folder: pathlib.Path) -> str:
    with pytest.raises(UserError) as caught:
        checkpoint.restore(folder, make_mesh("8"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_a_cut_and_a_lost_file_are_named(name, copied):
    path = copied / name
    whole = path.read_bytes()
    place = whole.index(b'"') + 1 if name == "hashes.json" else len(whole) // 2
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    # A list of hashes with a wrong name in it says that this file is missing, or that itself is bad.
    assert name in refused(copied) or name == "hashes.json"
    path.write_bytes(whole[:-1])
    assert name in refused(copied)
    path.unlink()
    assert f"{name} is missing" in refused(copied)
    path.write_bytes(whole)
    checkpoint.restore(copied, make_mesh("8"))


@pytest.mark.parametrize("count", range(len(FILES)))
def test_a_folder_copied_in_part_is_refused(count, copied):
    for name in FILES[count:]:
        (copied / name).unlink()
    if not list(copied.glob("*/*")):
        shutil.rmtree(copied / "metadata"), shutil.rmtree(copied / "state")
        assert "holds no checkpoint" in refused(copied)
    else:
        assert " is missing" in refused(copied)


def test_a_card_that_disagrees_is_refused_even_where_its_own_hash_is_right(copied):
    text = (copied / integrity.CARD).read_text()
    name, digest = next(iter(integrity.card_digests(text).items()))
    (copied / integrity.CARD).write_text(text.replace(digest, "0" * 64, 1))
    hashes = json.loads((copied / "hashes.json").read_text())
    hashes |= integrity.hashes_of(
        copied, {integrity.CARD: (copied / integrity.CARD).stat().st_size}
    )
    (copied / "hashes.json").write_text(json.dumps(hashes))
    for whole in (True, False):
        assert checkpoint.verify(copied, whole) == (
            f"README.md and hashes.json disagree on the SHA-256 of {name}"
        )


def test_a_changed_array_that_has_its_new_hash_is_refused_by_the_card(copied):
    array = max((copied / "state").rglob("*"), key=lambda path: path.stat().st_size)
    name = array.relative_to(copied).as_posix()
    array.write_bytes(array.read_bytes()[:-1] + b"x")
    hashes = json.loads((copied / "hashes.json").read_text())
    hashes |= integrity.hashes_of(copied, {name: array.stat().st_size})
    (copied / "hashes.json").write_text(json.dumps(hashes))
    assert f"README.md and hashes.json disagree on the SHA-256 of {name}" in refused(copied)


def test_a_file_missing_in_its_hashes_is_named(copied):
    hashes = json.loads((copied / "hashes.json").read_text())
    del hashes["probe.json"]
    (copied / "hashes.json").write_text(json.dumps(hashes))
    assert "probe.json is missing in hashes.json" in refused(copied)


def test_a_changed_byte_as_a_command_and_the_flag_that_does_not_look(inside, copied):
    array = max((copied / "state").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(array.read_bytes())
    content[100] ^= 1
    array.write_bytes(content)
    flags = ("--mesh=4x2", f"--restore_from={copied}", "--steps=0")
    done = inside("recipes.dot_relu_dot", *flags)
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"error: --restore_from={copied}: {array.relative_to(copied)} differs from what was saved "
        f"(its SHA-256 does not match) in {copied}; use an intact checkpoint\n"
    )
    read = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integrity, "sha256", lambda _, names: read.extend(names) or {})
        for _ in range(2):
            inside("recipes.dot_relu_dot", *flags, "--verify=false")
        checkpoint.find(copied, hash_files=False)
    assert read == [], "nothing is hashed"


# ---- nothing in a checkpoint is run --------------------------------------------------------------------


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_is_unpickled(copied, tmp_path, monkeypatch):
    """Holds with and without hashes, whichever file a pickle replaces."""
    for module, function in ((pickle, "load"), (pickle, "loads"), (np, "load")):
        monkeypatch.setattr(module, function, lambda *_, **__: pytest.fail("unpickled"))
    monkeypatch.setattr(sys, "unraisablehook", start._unraisable)
    evil = pickle.dumps(Evil(tmp_path / "ran"))
    for name in FILES:
        whole = (copied / name).read_bytes()
        (copied / name).write_bytes(evil)
        assert name in refused(copied)
        # It has as many bytes as before, so it passes where hashes are not checked.
        (copied / name).write_bytes(evil[: len(whole)].ljust(len(whole), b"."))
        with contextlib.suppress(UserError):
            checkpoint.restore(copied, make_mesh("8"), verify=False)
        (copied / name).write_bytes(whole)
    gc.collect()
    assert not (tmp_path / "ran").exists()
    monkeypatch.undo()
    pickle.loads(evil)
    assert (tmp_path / "ran").exists(), "and the pickle is one that does run"


def test_a_class_that_a_checkpoint_names_is_not_looked_up(copied):
    """Orbax writes names of Python classes into its JSON; restore ignores them."""
    path = copied / "_CHECKPOINT_METADATA"
    text = path.read_text()
    assert "orbax.checkpoint._src" in text
    path.write_text(text.replace("orbax.checkpoint._src", "no.such.place.on.any."))
    model, _ = checkpoint.restore(copied, make_mesh("8"), verify=False)
    assert len(jax.tree.leaves(nnx.state(model))) == 2
