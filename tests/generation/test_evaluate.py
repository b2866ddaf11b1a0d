"""recipes.evaluate: bits per byte of whole texts, and results for lm-evaluation-harness."""

import dataclasses
import importlib.util
import json
import math
import re

import jax
import numpy as np
import pytest
from flax import nnx
from huggingface_hub import ModelCard

from data.tokenizer import BYTES
from recipes.common import checkpoint
from recipes.common.checkpoint import card, integrity, probe
from recipes.common.mesh import make_mesh
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import make_layout
from recipes.instruments.harness import scoring
from recipes.instruments.harness.scoring import SHORTEST, Row, Scorer
from tests.conftest import full_except
from tests.support import small_tasks, small_tokenizers
from tests.support.models import random_variables
from tests.support.quick import quick as quick
from tests.support.runs import TINY, records
from zoo.llama_relatives import Config, Transformer
from zoo.options.rope_scaling import Dynamic, LongRope

pytestmark = pytest.mark.promise("evaluation")

FORWARD = nnx.jit(lambda model, tokens: model(tokens))
HARNESS = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="the extra eval is not installed"
)
DOCUMENTS = ["Ünïcödé, and a second line.\n", "x", "A longer one, of more than a row. " * 4]
SHORT = ("--seq_len=32", "--batch_size=8")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("here")


@pytest.fixture
def here(place, inside, quick, book):
    """`base`, a tiny run on bytes; `tuned`, which started from it; and documents.jsonl."""
    if any(place.iterdir()):
        return place
    lines = [json.dumps({"text": document}) + "\n" for document in DOCUMENTS]
    (place / "documents.jsonl").write_text("".join(lines))
    flags = (*TINY, book, "--mesh=1x1", "--log_every=1")
    done = inside("recipes.transformer", *flags, "--steps=2", f"--workdir={place / 'base'}")
    assert (done.code, done.err) == (0, "")
    began = (f"--restore_from={place / 'base'}", f"--workdir={place / 'tuned'}", "--seq_len=16")
    done = inside("recipes.transformer", *flags, *began, "--steps=3")
    assert (done.code, done.err) == (0, "")
    return place


def logprobs(model, tokens: list[int]) -> np.ndarray:
    """[tokens - 1, vocabulary], by one forward pass, float64; of any length by one program."""
    padded = np.zeros((1, 512), np.int32)
    padded[0, : len(tokens) - 1] = tokens[:-1]
    logits_TV = np.asarray(FORWARD(model, padded)[0], np.float64)[: len(tokens) - 1]
    return logits_TV - np.logaddexp.reduce(logits_TV, axis=-1, keepdims=True)


def of_targets(model, tokens: list[int]) -> np.ndarray:
    return logprobs(model, tokens)[np.arange(len(tokens) - 1), tokens[1:]]


def metrics(out: str) -> list[float]:
    """Loss and bits per byte of each line about a text."""
    found = re.findall(r": loss ([\d.]+) nats/\w+.*?, ([\d.]+) bits/byte", out)
    return [float(number) for line in found for number in line]


# ---- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", full_except(["1x1", "4x2", "8"], ["8"]))
def test_all_of_a_text_counts_each_document_alone(mesh, here, inside):
    """Compares with logits of single documents, each byte given the bytes before it in its row."""
    model, _ = checkpoint.restore(here / "base", make_mesh("1x1"))
    nats = 0.0
    for document in DOCUMENTS:
        tokens = [*BYTES.start, *document.encode()]
        for first in range(0, len(tokens) - 1, 32):  # a row begins with the token before its first
            nats -= of_targets(model, tokens[first : first + 33]).sum()
    size = sum(len(document.encode()) for document in DOCUMENTS)
    flags = (f"--restore_from={here / 'base'}", f"--mesh={mesh}", *SHORT)
    out = here / f"{mesh}.json"
    name = str(here / "documents.jsonl")
    done = inside("recipes.evaluate", *flags, f"--dataset={name}", f"--out={out}")
    assert (done.code, done.err) == (0, "")
    assert f"{size} bytes; all, 32 tokens of context." in done.out
    found = json.loads(out.read_text())
    assert (found["mesh"], found["step"], found["dtype"]) == (mesh, 2, "float32")
    found = found["datasets"][name]
    assert (found["bytes"], found["targets"], found["part"]) == (size, size, "all")
    assert found["loss"] == pytest.approx(nats / size, rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / size / math.log(2), rel=1e-5)
    assert metrics(done.out) == pytest.approx([found["loss"], found["bits_per_byte"]], abs=1e-4)


def test_the_held_out_part_is_what_a_run_evaluates(here, inside, book):
    flags = (f"--restore_from={here / 'base'}", "--mesh=8", *SHORT, book)
    done = inside("recipes.evaluate", *flags, "--part=held_out", "--pack=false")
    assert (done.code, done.err) == (0, "")
    ((loss, bits),) = records(here / "base", "held_out_loss", "held_out_bits_per_byte")
    assert metrics(done.out) == pytest.approx([loss, bits], abs=6e-5)
    rounded = inside("recipes.evaluate", *flags[:-2], "--batch_size=3", book, "--part=held_out",
                     "--pack=false")  # fmt: skip
    assert metrics(rounded.out) == metrics(done.out), "the batch is rounded up"


def test_several_texts_with_their_own_context(here, inside):
    """The context defaults to the model's; a file name may contain a comma."""
    (here / "a,b.txt").write_text("Only a few words.")
    flags = (f"--restore_from={here / 'tuned'}", "--mesh=1x1")
    done = inside("recipes.evaluate", *flags, f"--dataset={here / 'a,b.txt'}")
    assert done.err == ""
    assert "17 bytes; all, 32 tokens of context." in done.out, "of base's 32 and tuned's 16"
    both = f"--dataset={here / 'documents.jsonl'},{here / 'a,b.txt'}"
    done = inside("recipes.evaluate", *flags, both)
    assert (done.code, done.out) == (2, ""), "split at every comma"


ROWS = [
    ([], "--restore_from is missing; use --restore_from=RUN, or hf:DIR"),
    (["--restore_from={here}/base"], "there is nothing to evaluate on; use --dataset=FILE or --tasks=NAME"),
    (["--restore_from=mlp.digits", "--dataset=stdlib"], "--restore_from=mlp.digits is a 'mlp' model, which its own recipe evaluates; use python -m recipes.mlp --restore_from=mlp.digits --steps=0"),
    (["--restore_from={here}/base", "--dataset={here}/no.txt"], "--dataset={here}/no.txt does not exist"),
    (["--restore_from={here}/base", "--dataset=stdlib", "--out={here}/documents.jsonl"], "--out={here}/documents.jsonl already exists; use a new name"),
    (["--restore_from={here}/base", "--dataset=stdlib", "--part=train"], "--part=train is not one of all, held_out"),
    (["--restore_from={here}/base", "--dataset=stdlib", "--mesh=3x1"], "over 3 devices"),
    (["--restore_from={here}/base", "--dataset=stdlib", "--mesh=data=1,seq=3", "--rules=cp"], "rows of 32 tokens are not divisible by the 3 shards of 'seq' (rules 'cp' on --mesh=data=1,seq=3); try --seq_len=33"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row[0]))
def test_a_mistake_is_one_line(row, here, inside):
    done = inside("recipes.evaluate", *[flag.replace("{here}", str(here)) for flag in row[0]])
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert row[1].replace("{here}", str(here)) in done.err


def test_a_missing_extra_is_one_line(here, inside, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "lm_eval" else find(n, *a))  # fmt: skip
    done = inside("recipes.evaluate", f"--restore_from={here / 'base'}", "--tasks=arc_easy")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        "error: --tasks=arc_easy needs lm-evaluation-harness; run pip install -e '.[eval]'\n"
    )


# ---- log-likelihoods -----------------------------------------------------------------------------


MESHES = [("1x1", "dp"), ("2x4", "fsdp_tp"), ("8", "fsdp"), ("1x8", "tp"), ("data=2,seq=3", "cp")]


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "rules"), MESHES)
def test_rows_of_any_length_are_scored_as_alone(mesh, rules, here, quick, monkeypatch):
    """Each power-of-two length has one program; a row's length doesn't affect other rows."""
    plain, _ = checkpoint.restore(here / "base", make_mesh("1x1"))
    numbers = np.random.default_rng(0)
    rows = [Row(numbers.integers(0, 257, size).tolist(), scored)
            for size, scored in ((2, 1), (33, 32), (34, 1), (65, 7), (90, 89), (5, 0), (40, 3))]  # fmt: skip
    likely = [256, 1, 2, 3]
    for _ in range(5):
        likely.append(int(logprobs(plain, [*likely, 0])[-1].argmax()))
    rows += [Row(likely, 5), Row(likely, 6), Row([*likely[:-1], 7], 5)]
    source = checkpoint.find(here / "base", hash_files=False)
    layout = checkpoint.layout_of(source, make_mesh(mesh), rules)
    scorer = Scorer(layout, checkpoint.restore_variables(source, layout), 3, context=100)
    found = scorer(rows)
    for (tokens, scored), (nats, greedy) in zip(rows, found, strict=True):
        log_TV = logprobs(plain, tokens)[len(tokens) - 1 - scored :]
        targets = np.array(tokens[len(tokens) - scored :], int)
        want = log_TV[np.arange(scored), targets].sum()
        assert nats == pytest.approx(want, abs=1e-4 * max(scored, 1))
        assert greedy == bool((log_TV.argmax(axis=1) == targets).all())
    assert [greedy for _, greedy in found[-3:]] == [True, False, False]
    n = layout.seq_shards
    lengths = [-(-length // n) * n for length in (SHORTEST, 64, 100)]  # what the mesh divides
    assert sorted(scorer._programs) == lengths, "the longest is the context"
    assert scorer.rows(64) % layout.batch_shards == 0
    with monkeypatch.context() as patch:
        patch.setattr(scoring, "LOGITS", 64 * 384 // n)
        assert scorer.rows(64) == layout.batch_shards, "of logits no more than fit"
    before = dict(scorer._programs)
    alone = [nats for nats, _ in scorer(rows[:3])]
    assert alone == pytest.approx([nats for nats, _ in found[:3]]), "whatever else is scored"
    assert scorer._programs == before, "compiled once"


@pytest.mark.parametrize(
    "scaling",
    full_except(
        [Dynamic(4.0, 40), LongRope((1.0, 1.5, 2.0, 3.0), (2.0, 9.0, 5.0, 30.0), 40, 1.2)],
        [Dynamic(4.0, 40)],
    ),
)
def test_scores_don_t_depend_on_padding_where_a_rotary_scaling_depends_on_the_length(scaling):
    """Rows on both sides of the original length, which is no power of two."""
    config = dataclasses.replace(Config.tiny(), num_layers=1, rope_scaling=scaling)
    layout = make_layout(Transformer, config, make_mesh("1x1"))
    variables = random_variables(layout)
    variables["params"]["layers"]["attention"]["q"] *= 8  # positions matter
    random = np.random.default_rng(0)
    rows = [Row(random.integers(0, 384, size).tolist(), 5) for size in (11, 39, 51)]
    alone = jax.jit(lambda variables, tokens: layout.model.merge(variables)(tokens))
    for (nats, _), row in zip(Scorer(layout, variables, 4, 64)(rows), rows, strict=True):
        tokens = np.array(row.tokens, np.int32)
        log_TV = jax.nn.log_softmax(alone(variables, tokens[None, :-1])[0])
        wanted = np.asarray(log_TV)[np.arange(len(tokens) - 1), tokens[1:]][-5:].sum()
        assert nats == pytest.approx(wanted, abs=1e-4), len(tokens)


# ---- tasks ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_tasks.write(tmp_path_factory.mktemp("tasks"))


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@HARNESS
@pytest.mark.filterwarnings("ignore")  # the harness's own libraries'
@pytest.mark.parametrize("mesh", full_except(["1x1", "4x2", "8"], ["4x2"]))
def test_tasks_give_the_same_results_on_every_mesh(mesh, here, folder, inside, offline, tmp_path):
    flags = (f"--restore_from={here / 'base'}", f"--mesh={mesh}", "--seq_len=200", "--batch_size=3")
    given = (f"--include_path={folder}", f"--tasks={','.join(small_tasks.TASKS)}")
    out = tmp_path / "out.json"
    done = inside("recipes.evaluate", *flags, *given, f"--out={out}")
    assert done.code == 0, done.err
    found = json.loads(out.read_text())["tasks"]
    assert {name: row["sample_len"] for name, row in found["results"].items()} == {
        "zoo_answer": 2, "zoo_choice": 6, "zoo_text": 3,
    }  # fmt: skip
    acc = found["results"]["zoo_choice"]["acc,none"]
    assert re.search(rf"^\|zoo_choice *\|.*\|acc +\|.*\| *{acc:.4f}\|", done.out, re.MULTILINE)
    # By hand: every token of a text, its start included, from at most 200 before it.
    model, _ = checkpoint.restore(here / "base", make_mesh("1x1"))
    nats = sum(rolling(model, row["text"], 200) for row in small_tasks.TEXTS)
    size = sum(len(row["text"].encode()) for row in small_tasks.TEXTS)
    assert found["results"]["zoo_text"]["bits_per_byte,none"] == pytest.approx(
        nats / size / math.log(2), rel=1e-5
    )
    right = [choice(model, row, 200) == row["gold"] for row in small_tasks.CHOICES]
    assert acc == pytest.approx(np.mean(right))
    assert found["config"]["mesh"] == mesh


def rolling(model, document: str, context: int) -> float:
    tokens, nats = [256, *document.encode()], 0.0
    for first in range(0, len(tokens), context):
        last = min(first + context, len(tokens))
        begin = max(0, last - context)  # the last window is as long as the others
        whole = [256, *tokens][begin : last + 1]
        nats -= of_targets(model, whole)[first - begin :].sum()
    return nats


def choice(model, row: dict, context: int) -> int:
    """The likeliest continuation after a space, as the harness forms it."""
    scores = []
    for answer in row["choices"]:
        question = row["q"].rstrip()
        more = row["q"][len(question) :] + " " + answer
        tokens = [256, *question.encode(), *more.encode()][-(context + 1) :]
        scores.append(of_targets(model, tokens)[-len(more.encode()) :].sum())
    return int(np.argmax(scores))


TASK_ROWS = [
    (["--tasks=zoo_choise", "--include_path={tasks}"], "--tasks=zoo_choise: there is no task 'zoo_choise'; did you mean zoo_choice?"),
    (["--tasks=,"], "--tasks=,: there is no task ''"),
    (["--tasks=zoo_choice", "--include_path={tasks}/no"], "--include_path={tasks}/no is not a folder; use one with task files"),
    (["--tasks=broken", "--include_path={tasks}"], "--tasks=broken can't be loaded ("),
    (["--tasks=zoo_answer", "--include_path={tasks}", "--seq_len=12"], "an answer of 12 tokens leaves no room for its question in the 12 that the model sees"),
    (["--tasks=zoo_choice", "--include_path={tasks}", "--seq_len=4"], "a continuation has 6 tokens and the model sees 4; use a larger --seq_len"),
    (["--tasks=beams", "--include_path={tasks}", "--seq_len=200"], "a task sets num_beams=4 in its generation_kwargs, which is not supported"),
    (["--tasks=zoo_choice", "--include_path={tasks}", "--apply_chat_template"], "has no chat template"),
]  # fmt: skip


@HARNESS
@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", TASK_ROWS, ids=lambda row: " ".join(row[0]))
def test_a_mistake_about_tasks_is_one_line(row, here, folder, inside, offline):
    one = (folder / "zoo_answer.yaml").read_text()
    beams = one.replace("zoo_answer\n", "beams\n", 1).replace("do_sample: false", "num_beams: 4")
    (folder / "beams.yaml").write_text(beams)
    broken = one.replace("zoo_answer\n", "broken\n", 1).replace(".jsonl", ".no")
    (folder / "broken.yaml").write_text(broken)
    flags = [flag.replace("{tasks}", str(folder)) for flag in row[0]]
    done = inside("recipes.evaluate", f"--restore_from={here / 'base'}", "--mesh=1x1", *flags)
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert row[1].replace("{tasks}", str(folder)) in done.err


# ---- cards of fine-tuned models ------------------------------------------------------------------


def test_a_fine_tuning_run_evaluates_what_it_begins_with(here, inside, book):
    """Its metrics at step 0 equal the base's on the same data."""
    before, after = records(here / "tuned", "step", "held_out_loss", "held_out_bits_per_byte")
    assert (before[0], after[0]) == (0, 3)
    flags = (*TINY, book, "--mesh=1x1", f"--restore_from={here / 'base'}", "--seq_len=16")
    done = inside("recipes.transformer", *flags, "--steps=0")
    assert f"Held-out loss {before[1]:.4f} nats/byte, {before[2]:.4f} bits/byte" in done.out
    assert [step for step, *_ in records(here / "base", "step", "held_out_loss")] == [2]


@pytest.mark.full
def test_it_is_there_once_after_a_kill_before_the_first_checkpoint(here, inside, book, tmp_path):
    lines = (here / "tuned" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "metrics.jsonl").write_text("".join(lines[:2]))
    flags = (*TINY, book, "--mesh=1x1", f"--restore_from={here / 'base'}", "--seq_len=16")
    again = inside("recipes.transformer", *flags, "--log_every=1", "--steps=3", f"--workdir={tmp_path / 'w'}")  # fmt: skip
    assert (again.code, again.err) == (0, "")
    fields = ("step", "held_out_loss")
    assert records(tmp_path / "w", *fields) == records(here / "tuned", *fields)


def test_the_card_of_a_fine_tuned_model_has_its_base_and_figures_before_and_after(here, inside):
    target = here / "published"
    done = inside("recipes.publish", f"--source={here / 'tuned'}", f"--target={target}")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "--licence is missing, and the zoo knows none for --restore_from=" in done.err
    flags = (f"--source={here / 'tuned'}", f"--target={target}", "--licence=MIT")
    done = inside("recipes.publish", *flags)
    assert (done.code, done.err) == (0, "")
    text, base = (target / integrity.CARD).read_text(), here / "base"
    before, after = records(here / "tuned", "held_out_loss", "held_out_bits_per_byte")
    assert "A fine-tuned `zoo/transformer.py`" in text
    assert f"| Base model | `{base}` |" in text
    assert re.search(
        rf"\| Held out before \| loss {before[0]:.7g},.* bits_per_byte {before[1]:.7g} ", text
    )
    assert re.search(rf"\| Held out \| loss {after[0]:.7g},.* bits_per_byte {after[1]:.7g} ", text)
    assert "| Licence | MIT |" in text
    facts = checkpoint.find(target).metadata
    assert facts["published"]["base"] == {"path": str(base)}
    assert facts["context"] == 32


def test_an_exported_folder_has_a_card_in_the_hubs_form(here, inside):
    """The Hub's library reads the card, which says only what the checkpoint says."""
    done = inside("recipes.hf", "export", f"--source={here / 'tuned'}", f"--target={here / 'hf'}")
    assert (done.code, done.err) == (0, "")
    found = ModelCard((here / "hf" / "README.md").read_text())
    assert found.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["sharded-model-zoo"],
    }
    before, after = records(here / "tuned", "held_out_loss", "held_out_bits_per_byte")
    assert f"| Held out before | loss {before[0]:.7g}," in found.text
    assert f"| Held out | loss {after[0]:.7g}," in found.text
    assert json.loads((here / "hf" / "config.json").read_text())["max_position_embeddings"] == 32

    source = checkpoint.find(here / "tuned")
    source.metadata["flags"]["restore_from"] = "hf:org/name"
    for licence, wanted in (
        ("Apache-2.0", {"license": "apache-2.0"}),
        ("PSF-2.0", {"license": "other", "license_name": "psf-2.0"}),
    ):
        facts = card.facts(source, [], licence, "")
        found = ModelCard(card.for_hub("x", source.metadata, facts))
        said = found.data.to_dict()
        assert said["base_model"] == "org/name"
        assert {k: v for k, v in said.items() if k.startswith("license")} == wanted


@pytest.mark.full
def test_an_adapter_trained_on_conversations_is_evaluated_and_given_on(
    inside, quick, book, tmp_path
):
    """Published merged or alone; its card has the base's name and metrics on the same answers."""
    (tmp_path / "tokens").mkdir()
    for name, content in small_tokenizers.byte_level().items():
        (tmp_path / "tokens" / name).write_bytes(content)
    chats = [{"messages": [{"role": "user", "content": f"Say {n}. " * 20},
                           {"role": "assistant", "content": f"License {n}."}]}
             for n in range(40)]  # fmt: skip
    name = tmp_path / "chats.jsonl"
    name.write_text("".join(json.dumps(chat) + "\n" for chat in chats))

    def run(recipe: str, *flags: str) -> str:
        done = inside(f"recipes.{recipe}", *flags)
        assert (done.code, done.err) == (0, ""), done.err
        return done.out

    base, tuned, pub = (tmp_path / part for part in ("base", "tuned", "pub"))
    run("transformer", *TINY, book, "--mesh=1x1", "--steps=1", f"--workdir={base}",
        f"--tokenizer={tmp_path / 'tokens'}")  # fmt: skip
    lora = (
        "--sample_bytes=0",
        "--batch_size=8",
        "--seq_len=256",
        f"--dataset={name}",
        "--mesh=1x1",
    )
    began = (f"--restore_from={base}", "--lora_rank=2", f"--workdir={tuned}", "--steps=2")
    run("transformer", *lora, *began)
    before, after = records(tuned, "held_out_loss", "held_out_bits_per_byte")
    given = (f"--dataset={name}", "--part=held_out", "--seq_len=256", "--mesh=4x2")
    for path, wanted in ((base, before), (tuned, after)):
        out = run("evaluate", f"--restore_from={path}", *given)
        assert metrics(out) == pytest.approx(wanted, abs=6e-5)
        assert "Evaluates the answers in 1 row of" in out

    run("publish", f"--source={tuned}", f"--target={pub}", "--licence=MIT")
    text, found = (pub / integrity.CARD).read_text(), checkpoint.find(pub)
    where, digest = checkpoint.find(tuned).metadata["base"].values()
    assert where.startswith(str(base))
    assert f"| Base model | `{base}`, SHA-256 `{digest}` |" in text, "as the command named it"
    assert "--lora_rank=2 --lora_alpha=4.0" in text, "the flag's 0 stands for twice the rank"
    assert f"| Held out before | loss {before[0]:.7g}," in text
    assert {*found.metadata["logical_axes"]} == {*paths(found.shapes()["params"])}
    golden, batch = probe.loads((pub / "probe.json").read_text())
    assert math.isfinite(golden)
    assert (batch["targets"] >= 0).any(), "however far into a row the answers are"
    out = run("transformer", *lora, f"--restore_from={pub}", "--steps=0")
    assert f"Held-out loss {after[0]:.4f} nats/token" in out

    run("hf", "export", "--adapter", f"--source={tuned}", f"--target={tmp_path / 'peft'}")
    run("hf", "export", f"--source={tuned}", f"--target={tmp_path / 'hf'}", "--licence=MIT")
    for folder, library in (("peft", "peft"), ("hf", "transformers")):
        found = ModelCard((tmp_path / folder / "README.md").read_text())
        assert found.data.library_name == library
        assert "base_model" not in found.data.to_dict(), "no name on the Hub"
        assert digest in found.text
