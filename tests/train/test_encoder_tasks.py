"""recipes.bert --task=classify and --task=embed: new heads, losses on every mesh, runs."""

import dataclasses
import functools
import json
import re
import shutil

import jax
import numpy as np
import pytest

from data.tokenizer import BYTES
from recipes.common import checkpoint
from recipes.common.checkpoint import card, probe
from recipes.common.mesh import make_mesh
from recipes.common.sharding import make_layout, paths, shardings
from recipes.common.sharding.abstract import Phases, variables_of
from recipes.common.tasks.text_encoders import PairLoss, for_task
from recipes.common.train.new_parts import NewParts
from recipes.common.train.state import new_params
from recipes.common.train.step import gradients
from recipes.instruments.prove.comparison import compare_gradients, largest_relative
from tests.conftest import full_except
from tests.support.encoders import SMALL, written
from tests.support.models import built
from tests.support.quick import QUICK
from tests.support.quick import quick as quick
from tests.support.runs import assert_bit_equal, records, state_of
from zoo.bert import Bert, Config

pytestmark = pytest.mark.promise("all-pairs")

B, T = 16, 9


@pytest.mark.parametrize("modern", [False, True])
@pytest.mark.full
def test_a_new_task_keeps_what_both_models_have(modern, quick, tmp_path):
    """The rest has the values that a new model of this seed has, on any mesh."""
    plain = dataclasses.replace(Config.small(), num_layers=3, embed=64, mlp=64, remat="none")
    before = plain if modern else SMALL
    old = paths(variables_of(written(tmp_path / "fill", before))["params"])
    config = dataclasses.replace(for_task(before, "classify"), labels=("a", "b", "c"))
    layout = make_layout(Bert, config, make_mesh("4x2"), seed=3)
    source = NewParts(checkpoint.find(tmp_path / "fill"), layout)
    new = paths(new_params(make_layout(Bert, config, make_mesh("1"), seed=3)))
    read = paths(source.read(layout.variables())["params"])
    assert read.keys() == new.keys()
    parts = {"classifier", "classifier_bias"} | (set() if modern else {"pooler", "pooler_bias"})
    assert {*source.new()} == parts
    for path, value in read.items():
        wanted = new[path] if path in parts else old[path]
        np.testing.assert_array_equal(value, wanted, err_msg=path)


# ---- pairs ---------------------------------------------------------------------------------------


SIDES = ("", "other_", "negative_")


def batch(negatives: bool = False) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    of_texts = {}
    for side in SIDES[: 2 + negatives]:
        lengths_B1 = random.integers(2, T + 1, (B, 1))
        of_texts[f"{side}tokens"] = random.integers(0, 256, (B, T)).astype(np.int32)
        of_texts[f"{side}segment_ids"] = (np.arange(T) < lengths_B1).astype(np.int32)
    return of_texts | {"counted": np.arange(B) != 5}


@functools.cache
def model() -> Bert:
    return built(Bert, for_task(SMALL, "embed"))


@functools.cache
def step(mesh: str, strategy: str, accumulate: int, exchange: str, negatives: bool = False):
    """(loss, gradients by path) of a mean loss of pairs."""
    config = for_task(SMALL, "embed")
    layout = make_layout(Bert, config, make_mesh(mesh), strategy, batch_size=B)
    loss = PairLoss(5.0, exchange)
    phases = Phases(loss.embed, loss.compare)
    layout = dataclasses.replace(layout, model=layout.model._replace(loss=loss, phases=phases))

    def both(variables, batch):
        grads, _, means = gradients(layout, variables, batch, accumulate)
        return means["loss"], grads

    given = (
        jax.device_put(variables_of(model()), shardings(layout.variables())),
        jax.device_put(batch(negatives), layout.batch_shardings(batch(negatives))),
    )
    found, grads = layout.compile(both, *given, compiler_options=QUICK)(*given)
    return float(found), {path: np.asarray(x) for path, x in paths(grads).items()}


def definition(negatives: bool) -> float:
    """The mean loss, from vectors of texts one by one, in float64."""
    rows, vectors = batch(negatives), []
    encode = jax.jit(lambda *text: model().encode(*text), compiler_options=QUICK)
    for side in SIDES[: 2 + negatives]:
        x_BTD = np.float64(encode(rows[f"{side}tokens"], rows[f"{side}segment_ids"]))
        text_BT1 = rows[f"{side}segment_ids"][:, :, None]
        x_BD = (x_BTD * text_BT1).sum(axis=1)[rows["counted"]]
        vectors.append(x_BD / np.linalg.norm(x_BD, axis=1, keepdims=True))
    anchors, *candidates = vectors
    # Anchors find their positives among all positives and negatives, positives their anchors.
    scores = 5.0 * anchors @ np.concatenate(candidates).T
    back = 5.0 * candidates[0] @ anchors.T
    found = [np.log(np.exp(x).sum(axis=1)) - np.diag(x) for x in (scores, back)]
    return np.concatenate(found).mean()


@pytest.mark.parametrize("negatives", full_except([False, True], [False]))
def test_the_loss_of_pairs_is_its_definition(negatives):
    loss = step("1x1", "dp", 1, "gather", negatives)[0]
    assert loss == pytest.approx(definition(negatives), rel=2e-6)


CASES = [
    ("4x2", "fsdp_tp", 1, "ring", False), ("2x2x2", "hsdp_tp", 2, "gather", False),
    ("4x2", "fsdp_tp", 1, "ring", True), ("2x2x2", "hsdp_tp", 2, "gather", True), ("8", "dp", 1, "gather", True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mesh", "strategy", "accumulate", "exchange", "negatives"), full_except(CASES, ())
)
def test_pairs_have_one_device_s_loss_and_gradients(
    mesh, strategy, accumulate, exchange, negatives
):
    """In microbatches too: each text meets all of the whole batch."""
    want_loss, want = step("1x1", "dp", 1, "gather", negatives)
    found_loss, found = step(mesh, strategy, accumulate, exchange, negatives)
    assert found_loss == pytest.approx(want_loss, rel=4e-6)
    # A bias of keys changes no attention: its gradient is rounding alone.
    want, found = ({p: x for p, x in g.items() if "k_bias" not in p} for g in (want, found))
    assert largest_relative(compare_gradients(found, want)) < 2e-5


@pytest.mark.full
def test_the_nearest_may_be_a_negative():
    """An accuracy counts anchors whose positive is nearer than all others and all negatives."""
    rows = batch(negatives=True)
    rows["negative_tokens"], rows["negative_segment_ids"] = rows["tokens"], rows["segment_ids"]
    loss = PairLoss(5.0, "gather")
    count = jax.jit(lambda: loss.count_found(model(), rows)["accuracy"], compiler_options=QUICK)
    assert [float(x) for x in count()] == [0.0, B - 1], "each anchor is its own negative"


# ---- classes of two texts ------------------------------------------------------------------------


def class_gradients(mesh: str, strategy: str, types: bool):
    """(loss, gradients by path) of rows of two texts with a label."""
    config = dataclasses.replace(for_task(SMALL, "classify"), labels=("a", "b", "c"))
    layout = make_layout(Bert, config, make_mesh(mesh), strategy, batch_size=B)
    texts = {name: batch()[name] for name in ("tokens", "segment_ids")}
    rows = texts | {"label": (np.arange(B) % 4 - 1).astype(np.int32)}
    if types:
        rows["types"] = np.tile((np.arange(T) > 3).astype(np.int32), (B, 1))

    def both(variables, batch):
        grads, _, means = gradients(layout, variables, batch, 1)
        return means["loss"], grads

    given = (
        jax.device_put(variables_of(built(Bert, config)), shardings(layout.variables())),
        jax.device_put(rows, layout.batch_shardings(rows)),
    )
    found, grads = layout.compile(both, *given, compiler_options=QUICK)(*given)
    return float(found), {path: np.asarray(x) for path, x in paths(grads).items()}


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "strategy"), [("4x2", "fsdp_tp"), ("8", "fsdp")])
def test_types_of_tokens_reach_a_classifier_on_every_mesh(mesh, strategy):
    (want_loss, want), (plain_loss, plain) = (
        class_gradients("1x1", "dp", types) for types in (True, False)
    )
    assert abs(want_loss - plain_loss) > 1e-4
    assert np.abs(plain["token_types"][1]).max() == 0.0, "no token has the second type"
    assert np.abs(want["token_types"][1]).max() > 0.0
    found_loss, found = class_gradients(mesh, strategy, True)
    assert found_loss == pytest.approx(want_loss, rel=4e-6)
    want, found = ({p: x for p, x in g.items() if "k_bias" not in p} for g in (want, found))
    assert largest_relative(compare_gradients(found, want)) < 2e-5


# ---- runs ----------------------------------------------------------------------------------------

FLAGS = ("--seq_len=16", "--batch_size=16", "--warmup_steps=0", "--learning_rate=3e-3")


@pytest.fixture
def train(inside):
    def command(*flags):
        done = inside("recipes.bert", *FLAGS, *flags)
        assert done.code == 0, done.err
        return done.out

    return command


def good_and_bad(folder) -> str:
    texts = [f"{i} {word} {i}" for i in range(60) for word in ("good", "bad")]
    rows = [{"text": text, "label": int("good" in text)} for text in texts]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"--dataset={folder / 'a.jsonl'}"


def accuracy(out: str) -> str:
    return re.search(r"Held-out accuracy .*", out)[0]


@pytest.mark.full
def test_a_classifier_learns_from_a_model_that_fills_masks(train, quick, tmp_path):
    """A run that lost its last step repeats it bit for bit."""
    written(tmp_path / "fill")
    work, data = f"--workdir={tmp_path / 'run'}", good_and_bad(tmp_path)
    first = ("--task=classify", f"--restore_from={tmp_path / 'fill'}", work, data, "--mesh=4x2")
    out = train(*first, "--steps=20", "--checkpoint_every=19")
    finished = state_of(tmp_path / "run", 20)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "20")
    assert "Resumes at step 19" in train(*first, "--steps=20")
    assert_bit_equal(state_of(tmp_path / "run", 20), finished)
    assert "New: classifier, classifier_bias, pooler, pooler_bias.\n" in out
    assert accuracy(out).startswith("Held-out accuracy 1.0000: 6 of 6 texts; loss 0.")
    (start,), (end,) = records(tmp_path / "run", "held_out_loss")
    assert start > 0.5 > 0.2 > end
    assert (tmp_path / "run" / "learning.png").stat().st_size > 5_000
    # Its own task and classes are known, also on another mesh.
    again = train(f"--restore_from={tmp_path / 'run'}", data, "--steps=0", "--mesh=2x2x2")
    assert "New:" not in again
    assert accuracy(again).split(";")[0] == accuracy(out).split(";")[0]
    source = checkpoint.find(tmp_path / "run")
    config = checkpoint.config_of(source)
    assert config.task == "classify"
    assert config.labels == ("0", "1")
    assert for_task(config, "embed").labels == ()
    # It can be given on.
    facts = card.facts(source, [], "", "")
    assert facts["unit"] == "nats a text"
    assert 'pipeline_tag: "text-classification"' in card.for_hub("x", source.metadata, facts)
    assert {*probe.batch(source.metadata, BYTES)} == {"tokens", "segment_ids", "label"}


@pytest.mark.full
def test_two_texts_are_classified_by_what_both_say(inside, train, quick, tmp_path):
    """Labels that neither text decides alone; recipes.evaluate reads the rows alike."""
    rows = [
        {"premise": f"{a}{i}", "hypothesis": f"{b}{i}", "label": "ab"[a == b], "id": i}
        for i in range(40)
        for a in "xy"
        for b in "xy"
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"--dataset={tmp_path / 'a.jsonl'}"
    flags = ("--task=classify", f"--workdir={tmp_path / 'run'}", data, "--size=tiny", "--mesh=4x2")
    out = train(*flags, "--steps=120", "--eval_every=60")
    assert "Two texts a row: 'premise' and 'hypothesis', told apart by types" in out
    assert "Columns that are not used: 1 ('id')." in out
    assert re.search(r"warning: \d+ held-out texts are too few", out)
    (start, *_, end) = [loss for (loss,) in records(tmp_path / "run", "loss")]
    assert end < 0.3 < start, "0.69 is the loss of either text alone"
    done = inside(
        "recipes.evaluate", f"--restore_from={tmp_path / 'run'}", data, "--mesh=8", "--seq_len=16"
    )
    assert done.code == 0, done.err
    assert "160 texts" in done.out
    assert float(re.search(r"([\d.]+)% right", done.out)[1]) > 90


@pytest.mark.full
def test_negatives_that_devices_keep_to_themselves_are_refused(inside, tmp_path):
    rows = [{"anchor": f"<{i}>", "positive": f"{i}", "negative": f"{i + 1}"} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = (*FLAGS, "--task=embed", f"--dataset={tmp_path / 'a.jsonl'}", "--size=tiny")
    done = inside("recipes.bert", *flags, "--pairs=local", f"--workdir={tmp_path / 'run'}")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "--pairs=local" in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_texts_find_their_partners(train, quick, tmp_path):
    """A run that lost its last steps repeats them bit for bit."""
    rows = [{"anchor": f"<{i:03d}>", "positive": f"it is {i:03d}"} for i in range(400)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--task=embed", f"--workdir={tmp_path / 'run'}", f"--dataset={tmp_path / 'a.jsonl'}")
    flags += ("--size=tiny", "--mesh=4x2", "--pairs=ring", "--accumulate=2")
    out = train(*flags, "--steps=40", "--checkpoint_every=38")
    assert "20 texts are nearest to their own partner among 16" in out
    finished = state_of(tmp_path / "run", 40)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "40")
    assert "Resumes at step 38" in train(*flags, "--steps=40")
    assert_bit_equal(state_of(tmp_path / "run", 40), finished)
    (start, *_, end) = [loss for (loss,) in records(tmp_path / "run", "loss")]
    assert end < 0.8 * start
    config = checkpoint.config_of(checkpoint.find(tmp_path / "run"))
    assert config.task == "embed"
    assert (config.pooling, config.normalize) == ("mean", True)


def test_adapters_do_not_train_a_new_head(inside, tmp_path):
    written(tmp_path / "fill")
    done = inside(
        "recipes.bert", *FLAGS, "--task=classify", f"--restore_from={tmp_path / 'fill'}",
        "--lora_rank=2", f"--workdir={tmp_path / 'run'}", good_and_bad(tmp_path),
    )  # fmt: skip
    assert done.code == 2
    assert done.err.startswith("error: --lora_rank=2 trains adapters alone, and classifier, classi")
    assert not (tmp_path / "run").exists()
