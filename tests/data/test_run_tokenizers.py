"""A model is never fed the wrong tokens: its tokenizer is stored and moved with its weights."""

import errno
import json
import shutil

import jax
import numpy as np
import pytest

from data import tokenizer
from recipes.common import checkpoint
from recipes.common.checkpoint import integrity, store
from recipes.common.runtime.errors import Stopped
from tests.support import small_tokenizers
from tests.support.quick import quick as quick
from tests.support.runs import TINY, saving, steps_saved

pytestmark = pytest.mark.promise("right-tokens")

LONG = ("--seq_len=32", "--batch_size=16", "--mesh=1x1")
SHORT = (*TINY, "--mesh=1x1")


def every_file() -> dict[str, bytes]:
    """Every tokenizer file that a model folder may have."""
    template = small_tokenizers.TEMPLATE.encode()
    more = {
        "chat_template.jinja": template,
        "special_tokens_map.json": b'{"pad_token": "<|im_end|>"}',
        "added_tokens.json": b'{"<|im_end|>": 2}',
    }
    return small_tokenizers.byte_level() | more


def folder(path, files) -> str:
    path.mkdir(exist_ok=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return str(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("here")


@pytest.fixture
def here(place, inside, quick, book):
    """Tokenizers `tokens` and `other`, and a run and an export made with the first."""
    if any(place.iterdir()):
        return place
    files = every_file()
    tokens = folder(place / "tokens", files)
    folder(place / "other", small_tokenizers.metaspace())
    flags = (*SHORT, book, f"--workdir={place / 'run'}", f"--tokenizer={tokens}")
    done = inside("recipes.transformer", *flags, "--steps=2", "--checkpoint_every=1")
    assert (done.code, done.err) == (0, "")
    exported = (f"--source={place / 'run'}", f"--target={place / 'hf'}")
    assert inside("recipes.hf", "export", *exported).code == 0
    shutil.copytree(place / "hf", place / "bare")
    for name in files:
        (place / "bare" / name).unlink()
    shutil.copytree(place / "bare", place / "pieces")
    (place / "pieces" / "tokenizer.model").write_bytes(b"\x00")
    shutil.rmtree(place / "tokens")  # a checkpoint needs it no more
    lone = {"tokenizer.json": files["tokenizer.json"], "chat_template.jinja": b"hi"}
    folder(place / "same", lone)
    return place


def test_a_checkpoint_holds_its_tokenizer(here):
    files = every_file()
    for step in (1, 2):
        ck = here / "run" / "checkpoints" / str(step)
        assert {p.name: p.read_bytes() for p in (ck / "tokenizer").iterdir()} == files
        hashes = json.loads((ck / "hashes.json").read_text())
        assert {f"tokenizer/{name}" for name in files} <= hashes.keys()
        found = checkpoint.find(ck)
        assert found.metadata["tokenizer"] == found.tokenizer().sha256
        assert found.metadata["config"]["vocab_size"] == found.tokenizer().size == 512


def test_a_damaged_tokenizer_is_named(here, tmp_path):
    ck = shutil.copytree(here / "run" / "checkpoints" / "2", tmp_path / "ck")
    file = ck / "tokenizer" / "tokenizer_config.json"
    file.write_bytes(file.read_bytes().replace(b"user", b"uses", 1).replace(b"kind", b"mean", 1))
    assert "tokenizer/tokenizer_config.json differs" in integrity.verify(ck)
    file.unlink()
    assert integrity.verify(ck) == "tokenizer/tokenizer_config.json is missing"


def test_a_tokenizer_that_cannot_be_written_is_a_save_that_failed(tmp_path, monkeypatch, capfd):
    """The tokenizer is written before the commit, so no checkpoint lacks it."""

    def full(folder, files):
        raise OSError(errno.ENOSPC, "No space left on device")

    tokens = tokenizer.from_files(every_file())
    state = {"params": {"w": jax.numpy.ones(8)}}
    with saving(tmp_path, keep=3, tokenizer=tokens) as saver:
        with monkeypatch.context() as patch:
            patch.setattr(store, "write_tokenizer", full)
            saver.save(1, state)
            with pytest.raises(Stopped, match="No space left on device"):
                saver.wait()
        saver.save(2, state)
        saver.wait()
        assert steps_saved(tmp_path) == [2]
    assert (
        "checkpoint of step 1 could not be saved (No space left on device)"
        in capfd.readouterr().err
    )
    assert integrity.verify(tmp_path / "checkpoints" / "2") == ""
    assert store.open_checkpoint(tmp_path / "checkpoints" / "2").tokenizer() == tokens


@pytest.mark.full
def test_it_comes_along_by_itself(here, inside, book, tmp_path):
    """Covers resuming, restoring parameters, and model folders."""
    work = shutil.copytree(here / "run", tmp_path / "run")
    done = inside("recipes.transformer", *SHORT, book, f"--workdir={work}", "--steps=3")
    assert (done.code, done.err) == (0, "")
    assert checkpoint.find(work).step == 3
    assert checkpoint.find(work).tokenizer().files == every_file()
    shown = set()
    # Given by hand, it is the same one where its SHA-256 is.
    hand = [f"--restore_from=hf:{here / 'hf'}", f"--tokenizer={here / 'hf' / 'tokenizer.json'}"]
    for source in ([f"--restore_from={here / 'run'}"], hand):
        flags = (*LONG, book, *source, "--steps=0", "--prompt=Hi", "--chat")
        done = inside("recipes.transformer", *flags, "--sample_bytes=4", "--temperature=0")
        assert (done.code, done.err) == (0, "")
        shown.add(done.out[done.out.index("Held-out") : done.out.index("Took")])
    assert len(shown) == 1, "the same losses and text"


def test_files_given_by_hand_add_to_the_models_own(here):
    """The given folder has the same tokens and another template, but none of the other files."""
    found = checkpoint.tokenizer_for(str(here / "same"), checkpoint.find(here / "run"))
    assert found.files == every_file() | {"chat_template.jinja": b"hi"}
    assert found.end == (2, 0)


def test_export_and_import_carry_it_byte_for_byte(here, inside, tmp_path):
    files = every_file()
    for name, content in files.items():
        assert (here / "hf" / name).read_bytes() == content
    said = json.loads((here / "hf" / "config.json").read_text())
    assert (said["bos_token_id"], said["eos_token_id"], said["vocab_size"]) == (1, [2, 0], 512)
    back = tmp_path / "back"
    done = inside("recipes.hf", "import", f"--source={here / 'hf'}", f"--target={back}")
    assert (done.code, done.err) == (0, "")
    found = checkpoint.find(back)
    assert found.tokenizer().files == files
    assert found.metadata["tokenizer"] == found.tokenizer().sha256
    assert integrity.verify(back) == ""


def test_a_model_of_bytes_is_exported_with_its_bytes(inside, tmp_path):
    there, back = tmp_path / "hf", tmp_path / "back"
    ours = checkpoint.find("transformer.stdlib_3m")
    assert ours.tokenizer() is tokenizer.BYTES, "though it says nothing of it"
    exported = ("--source=transformer.stdlib_3m", f"--target={there}")
    assert inside("recipes.hf", "export", *exported).code == 0
    assert json.loads((there / "config.json").read_text())["bos_token_id"] == 256
    assert inside("recipes.hf", "import", f"--source={there}", f"--target={back}").code == 0
    for source in (f"hf:{there}", back):
        assert checkpoint.find(source).tokenizer() is tokenizer.BYTES
    assert not (back / "tokenizer").exists()


# (flags, part of the error that they cause)
ROWS = [
    (["--workdir={here}/run", "--size=tiny", "--tokenizer={here}/other"], "--tokenizer={here}/other (SHA-256 "),
    (["--workdir={here}/run", "--size=tiny", "--tokenizer=bytes"], "must be the tokenizer of {here}/run/checkpoints/2 ("),
    (["--restore_from={here}/run", "--tokenizer=bytes"], "which its model was trained with; leave it out"),
    (["--restore_from=hf:{here}/hf", "--tokenizer=bytes"], "--tokenizer=bytes (SHA-256 d817aeed…) must be the tokenizer of {here}/hf ("),
    (["--restore_from=transformer.stdlib_3m", "--tokenizer={here}/same"], "transformer.stdlib_3m (d817aeed…), which its model was trained with; leave it out"),
    (["--restore_from=hf:{here}/bare"], "{here}/bare has no tokenizer.json, so its model's tokens are unknown; use --tokenizer=FILE, ORG/NAME on the Hub, or bytes if it was trained on bytes"),
    (["--restore_from=hf:{here}/bare", "--tokenizer=bytes"], "--tokenizer=bytes has 257 tokens, but the model of {here}/bare has 512, so it was not trained on bytes; use its own tokenizer.json"),
    (["--restore_from=hf:{here}/pieces"], "{here}/pieces has its tokenizer only in tokenizer.model, which the zoo does not read"),
    (["--restore_from={here}/imported"], "{here}/imported has no tokenizer.json, so its model's tokens are unknown"),
    (["--restore_from=hf:{here}/bare", "--tokenizer={here}/large"], "the model has 512 tokens, but the tokenizer {here}/large has 513; use the tokenizer that it was trained with, or a model with a larger vocabulary"),
    (["--tokenizer={here}/no"], "--tokenizer={here}/no does not exist; use bytes, a tokenizer.json"),
    (["--chat"], "the tokenizer bytes has no chat template; use a chat model's, or leave out --chat"),
    (["--tokenizer={here}/strict", "--chat"], "the chat template of {here}/strict can't be rendered (only systems)"),
    (["--temperature=-1"], "--temperature=-1 must be ≥ 0.0; try 0.8"),
]  # fmt: skip


@pytest.fixture
def more(here):
    """Other files that the rows name."""
    if (here / "large").exists():
        return here
    files = every_file()
    content = json.loads(files["tokenizer.json"])
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 512, "content": "<more>"})
    folder(here / "large", {"tokenizer.json": json.dumps(content).encode()})
    shutil.copytree(here / "bare", here / "long")
    shutil.copy(here / "large" / "tokenizer.json", here / "long")
    template = b"{{ raise_exception('only systems') }}"
    folder(here / "strict", files | {"chat_template.jinja": template})
    shutil.copytree(here / "run" / "checkpoints" / "2", here / "imported")  # by an earlier version
    path = here / "imported" / "metadata" / "metadata"
    said = json.loads(path.read_text()) | {"data": {}}
    path.write_text(json.dumps({k: v for k, v in said.items() if k != "tokenizer"}))
    shutil.rmtree(here / "imported" / "tokenizer")
    integrity.hash_before_commit(here / "imported")
    return here


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row[0]))
def test_the_wrong_tokens_are_one_line_and_nothing_is_written(row, more, inside, book):
    before = {path: path.stat().st_mtime_ns for path in more.rglob("*") if path.is_file()}
    flags = [flag.replace("{here}", str(more)) for flag in row[0]]
    flags += [] if "--workdir" in flags[0] else [f"--workdir={more / 'new'}"]
    done = inside("recipes.transformer", *LONG, book, "--steps=4", *flags)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert row[1].replace("{here}", str(more)) in done.err
    after = {path: path.stat().st_mtime_ns for path in more.rglob("*") if path.is_file()}
    assert after == before


COMMANDS = {  # whose model is {here}/bare, of 512 tokens, and whose tokenizer has 513
    "generate": ("--restore_from=hf:{here}/bare", "--tokenizer={here}/large", "--mesh=1x1"),
    "evaluate": ("--restore_from=hf:{here}/long", "--dataset={here}/same/tokenizer.json", "--mesh=1x1"),
    "hf": ("import", "--source={here}/long", "--target={here}/new", "--mesh=1x1"),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_too_many_tokens(command, more, inside):
    """Looking up a token beyond the model's table would silently return another one's row."""
    flags = (flag.replace("{here}", str(more)) for flag in COMMANDS[command])
    done = inside(f"recipes.{command}", *flags)
    assert (done.code, done.out) == (2, "")
    which = more / ("large" if command == "generate" else "long")
    assert done.err == (
        f"error: the model has 512 tokens, but the tokenizer {which} has 513; use the tokenizer that "
        "it was trained with, or a model with a larger vocabulary\n"
    )
    assert not (more / "new").exists()


def test_import_refuses_pieces_alone(here, inside, tmp_path):
    done = inside(
        "recipes.hf", "import", f"--source={here / 'pieces'}", f"--target={tmp_path / 'x'}"
    )
    assert done.code == 2
    assert "has its tokenizer only in tokenizer.model" in done.err
    assert not (tmp_path / "x").exists()


def test_a_model_without_a_tokenizer_is_imported_and_asks_for_one(here, inside, book, tmp_path):
    source, target = shutil.copytree(here / "bare", tmp_path / "hf"), tmp_path / "ck"
    folder(
        source,
        {name: every_file()[name] for name in ("generation_config.json", "chat_template.jinja")},
    )
    done = inside("recipes.hf", "import", f"--source={source}", f"--target={target}")
    assert (done.code, done.err) == (0, "")
    assert (
        ", without a tokenizer (it has no tokenizer.json), and so without its chat_template.jinja and "
        "generation_config.json; it can be trained or evaluated:\n"
    ) in done.out
    assert checkpoint.find(target).tokenizer() is None
    flags = (*SHORT, book, f"--restore_from={target}", "--steps=0")
    done = inside("recipes.transformer", *flags)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "its model's tokens are unknown" in done.err
    assert inside("recipes.transformer", *flags, f"--tokenizer={here / 'same'}").code == 0


def test_an_answer_ends_where_the_model_ends_it(here, inside, book, tmp_path):
    """All tokens end an answer, so it has one; tokens beyond the tokenizer's are never sampled."""
    files = every_file()
    said = json.loads(files["generation_config.json"]) | {"eos_token_id": list(range(512))}
    tokens = folder(tmp_path / "all", files | {"generation_config.json": json.dumps(said).encode()})
    flags = (
        *LONG,
        book,
        f"--restore_from=hf:{here / 'bare'}",
        f"--tokenizer={tokens}",
        "--steps=0",
    )
    done = inside("recipes.transformer", *flags, "--prompt=def", "--sample_bytes=9")
    assert (done.code, done.err) == (0, "")
    shown = done.out[done.out.index("Sample, ended by the model:\n  | def") :].splitlines()[1]
    assert len(shown.removeprefix("  | def")) <= max(
        map(len, tokenizer.find(tokens)._library.get_vocab())
    )


@pytest.mark.full
def test_it_is_published_with_the_model(here, inside, book, tmp_path):
    target = tmp_path / "published"
    flags = (f"--source={here / 'run'}", f"--target={target}", "--licence=x")
    done = inside("recipes.publish", *flags)
    assert (done.code, done.err) == (0, "")
    assert integrity.verify(target) == ""
    assert checkpoint.find(target).tokenizer().files == every_file()
    assert "tokenizer/tokenizer.json" in (target / "README.md").read_text()
    assert (
        inside("recipes.transformer", *SHORT, book, f"--restore_from={target}", "--steps=0").code
        == 0
    )


def test_an_empty_prompt_begins_as_a_document_does():
    from recipes.common.language import Sample

    for files, wanted in (
        ({}, [256]),
        (small_tokenizers.metaspace(), [1]),
        (small_tokenizers.byte_level(), [2]),
        ({"tokenizer.json": small_tokenizers.byte_level()["tokenizer.json"]}, [0]),
    ):
        found = Sample().begin(tokenizer.from_files(files))
        np.testing.assert_array_equal(found, wanted)
        assert found.dtype == np.int32
