"""data/synthetic.py and data/digits.py: exact examples, exact order, on any number of processes.

Also checks each entry's loss on batches of its data.
"""

import functools
import io
import json

import jax
import numpy as np
import pytest
from flax import nnx

from data import DataError, digits, synthetic
from data.batches import Dataset, held_out_batches, train_batches
from recipes.common import entries
from tests.conftest import ROOT, full_except
from tests.support.entries import FAMILY_CASES

pytestmark = pytest.mark.promise("batches")

DATA = {"synthetic": lambda: synthetic.load(16, 32, seed=5), "digits": digits.load}


def take(data: Dataset, count, **options):
    feed = iter(train_batches(data, 8, seed=3, **options))
    return [next(feed) for _ in range(count)]


@pytest.mark.parametrize("name", DATA)
def test_batch_k_is_a_function_of_seed_and_k_on_any_number_of_processes(name):
    data = DATA[name]()
    whole = take(data, 5)
    assert whole[0].keys() == data.filler.keys()
    for field, want in whole[3].items():
        np.testing.assert_array_equal(take(data, 1, first=3)[0][field], want)
        for shards in (2, 4):
            parts = [
                take(data, 1, first=3, rows=rows)[0][field]
                for rows in np.split(np.arange(8), shards)
            ]
            np.testing.assert_array_equal(np.concatenate(parts), want)
    field = "x" if name == "synthetic" else "image"
    assert not any(np.array_equal(whole[0][field], other[field]) for other in whole[1:])


def test_the_teacher_answers_as_documented():
    data = synthetic.load(16, 32, seed=5)
    again, other = synthetic.load(16, 32, seed=5), synthetic.load(16, 32, seed=6)
    assert data.facts == again.facts != other.facts
    assert data.facts["dataset"] == "teacher"
    teacher, example = data.train, data.train[123_456]
    np.testing.assert_array_equal(example["y"], again.train[123_456]["y"])
    want_D = np.maximum(np.float64(example["x"]) @ teacher._w1_DF, 0) @ teacher._w2_FD
    np.testing.assert_allclose(example["y"], want_D, rtol=1e-5, atol=1e-6)
    assert example["weight"] == 1
    x_ND = np.stack([teacher[i]["x"] for i in range(1000)])
    assert abs(x_ND.mean()) < 0.05
    assert abs(x_ND.std() - 1) < 0.05


def test_held_out_questions_are_not_in_the_training_set():
    teacher, held_out = (getattr(synthetic.load(16, 32, 5), part) for part in ("train", "held_out"))
    asked = {teacher[i]["x"].tobytes() for i in range(2000)}
    assert len(asked) == 2000
    assert not asked & {held_out[i]["x"].tobytes() for i in range(2000)}
    np.testing.assert_array_equal(teacher._w1_DF, held_out._w1_DF)


@pytest.mark.parametrize("shards", [1, 4])
def test_evaluation_covers_every_image_once(shards):
    images = digits.load()
    parts = [held_out_batches(images, 64, rows) for rows in np.split(np.arange(64), shards)]
    rows = [np.concatenate([p["label"] for p in batch]) for batch in zip(*parts, strict=True)]
    labels = np.concatenate(rows)
    assert [len(row) for row in rows] == [64] * 6
    np.testing.assert_array_equal(labels[:360], images.held_out.label_N)
    assert (labels[360:] == -1).all()


def test_evaluation_weighs_each_example_once():
    weights = [b["weight"] for b in held_out_batches(synthetic.load(16, 32, 5), 1000)]
    assert [len(w) for w in weights] == [1000] * 5
    assert sum(w.sum() for w in weights) == synthetic.HELD_OUT


# ---- the loss of a batch ---------------------------------------------------------------------------

ROWS = 8
# Entry → the part of a batch that marks padding.
PADDING = {"dot_relu_dot": "weight", "mlp": "label", "vit": "label"}
TOKENS = (
    "transformer",
    "moe",
    "gpt2",
    "gemma3",
    "gemma4",
    "gpt_oss",
    "deepseek",
    "qwen3_next",
    "hybrid",
)
TOKENS += ("bert",)
PADDING["siglip"] = "label"
PADDING |= dict.fromkeys(TOKENS, "targets")


FAST = entries.ENTRIES.keys() - FAMILY_CASES
# Without families whose losses are the functions of the Transformer and the MoE.
OF_OTHERS = ("gpt2", "gemma3", "gemma4", "gpt_oss", "deepseek", "qwen3_next", "hybrid", "bert")
OF_OTHERS += ("siglip",)  # whose loss is no sum over rows: tests/zoo/test_pairs.py
LOSSES = [name for name in entries.ENTRIES if name not in OF_OTHERS]


@functools.cache
def of_entry(name: str):
    """An entry's data; the names in its aux; a function of examples: (sum, count, aux), gradients.

    Everything runs in one shape: twice ROWS rows, the last of them filler.
    """
    config = entries.zoo_file(name).Config.tiny()
    length = 64 if "vision" in name else 32  # room for two pictures
    known = vars(config) | {"seed": 0, "seq_len": length}
    if entries.ENTRIES[name].data == "data.text":
        known["dataset"] = str(ROOT / "LICENSE")  # short
    data, names = entries.dataset(name, known), []
    model = nnx.eval_shape(lambda: entries.model(name)(config, rngs=nnx.Rngs(0)))
    graph, shapes = nnx.split(model)
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(x.dtype), shapes)

    def objective(state, batch):
        total, count, aux = nnx.merge(graph, state).loss(**batch)
        names[:] = aux  # in order; jax.jit sorts the keys of what it returns
        return total, (total, count, aux)

    options = {"xla_backend_optimization_level": 0}  # compiles in half the time
    gradient = jax.jit(jax.grad(objective, has_aux=True), compiler_options=options)

    def metrics(examples):
        examples = examples + [data.filler] * (2 * ROWS - len(examples))
        batch = {name: np.stack([example[name] for example in examples]) for name in data.filler}
        grads, loss = gradient(state, batch)
        return loss, grads

    return data, names, metrics


@pytest.mark.parametrize("name", full_except(LOSSES, FAST))
def test_a_loss_is_a_sum_a_count_and_aux_that_begins_with_both(name, strict):
    data, names, metrics = of_entry(name)
    (total, count, aux), _ = metrics([data.held_out[i] for i in range(2 * ROWS)])
    assert names[0] == "loss"
    plain, number = aux["loss"]
    assert number == count
    assert total > plain if name == "moe" else total == plain, (
        "auxiliary losses are in the objective"
    )
    for part in jax.tree.leaves((total, count, aux)):
        assert (part.shape, part.dtype) == ((), np.float32)
    assert 0 < total / count < 10


@pytest.mark.parametrize("name", ["mlp", "vit", "transformer"])
def test_class_0_counts_like_any_other(name):
    """The loss by its definition, of the classes 0, 0, 3 and -1, of which the last is padding."""
    config = entries.zoo_file(name).Config.tiny()
    model = nnx.eval_shape(lambda: entries.model(name)(config, rngs=nnx.Rngs(0)))
    graph, shapes = nnx.split(model)
    random = np.random.default_rng(0)
    state = jax.tree.map(lambda x: random.normal(0, 0.2, x.shape).astype(x.dtype), shapes)
    classes = np.array([0, 0, 3, -1], np.int32)
    if PADDING[name] == "targets":
        batch = {"tokens": np.array([[5, 0, 0, 3]], np.int32), "targets": classes[None]}
    else:
        size = (config.inputs,) if name == "mlp" else (config.image_size,) * 2 + (config.channels,)
        image = random.standard_normal((4, *size), np.float32)
        batch = {"image": image, "label": classes}

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def both(state):
        model = nnx.merge(graph, state)
        return model.loss(**batch), model(next(iter(batch.values())))

    (total, count, aux), logits = jax.device_get(both(state))
    logits = np.float64(logits).reshape(4, -1)[:3]
    log_sums = np.log(np.exp(logits).sum(axis=1))
    assert count == aux["loss"][1] == 3
    np.testing.assert_allclose(total, (log_sums - logits[range(3), classes[:3]]).sum(), rtol=1e-5)
    if "accuracy" in aux:
        assert aux["accuracy"] == ((logits.argmax(axis=1) == classes[:3]).sum(), 3)


@pytest.mark.parametrize("name", full_except(LOSSES, FAST))
def test_every_figure_adds_up_over_batches_and_filler_adds_nothing(name, strict):
    data, _, metrics = of_entry(name)
    examples = [data.held_out[i] for i in range(2 * ROWS)]
    first, second, whole = map(metrics, (examples[:ROWS], examples[ROWS:], examples))

    def same(a, b, both):
        np.testing.assert_allclose(a + b, both, rtol=2e-6, atol=2e-6 * np.abs(both).max())

    jax.tree.map(same, first, second, whole)  # sums, counts and gradients
    assert not any(np.any(part) for part in jax.tree.leaves(metrics([])))
    if marker := PADDING.get(name):  # whatever else stands in the row
        padding = [example | {marker: data.filler[marker]} for example in examples]
        assert not any(np.any(part) for part in jax.tree.leaves(metrics(padding)))


# ---- images --------------------------------------------------------------------------------------


def test_digits_that_come_with_the_repository():
    found = digits.load()
    assert (len(found.train), len(found.held_out)) == (1437, 360)
    assert found.config == {"inputs": 64, "classes": 10}
    counts = np.bincount(np.concatenate([found.train.label_N, found.held_out.label_N]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert abs(found.train.image_NI.mean()) < 1e-5
    assert abs(found.train.image_NI.std() - 1) < 1e-5
    # Every fifth image of the source, first to last, is held out: its first is a zero.
    assert found.held_out.label_N[:3].tolist() == [0, 5, 0]


def write(folder, train, test):
    folder.mkdir()
    for name, rows in (("train", train), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"--dataset={folder}", str(folder)


IMAGE = {"image": [[0, 1], [2, 3]], "label": 1}


def test_your_own_images(tmp_path):
    _, folder = write(tmp_path / "d", [IMAGE, IMAGE | {"label": 2}], [IMAGE])
    found = digits.load(folder)
    assert found.config == {"inputs": 4, "classes": 3}
    np.testing.assert_allclose(found.train[0]["image"], (np.arange(4) - 1.5) / np.std(np.arange(4)))
    assert found.facts["fingerprint"] == digits.load(f"hf:{folder}").facts["fingerprint"]


def test_pictures_are_arrays_too(tmp_path):
    """Image datasets of the Hub decode to PIL images."""
    import datasets
    from PIL import Image

    pixels = np.arange(16, dtype=np.uint8).reshape(4, 4)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    row = {"image": {"bytes": buffer.getvalue(), "path": None}, "label": 0}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    for split in ("train", "test"):
        table = datasets.Dataset.from_list([row], features=features)
        table.to_parquet(tmp_path / f"{split}.parquet")
    image_I = digits.load(str(tmp_path)).train[0]["image"]
    np.testing.assert_allclose(image_I, (np.arange(16) - 7.5) / np.std(np.arange(16)), rtol=1e-5)


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ([{"picture": 1, "label": 0}], [{"picture": 1, "label": 0}], "has no column 'image'; set --image_column to one of 'picture', 'label'"),
        ([IMAGE | {"label": -3}], [IMAGE], "has the label -3; use whole numbers from 0"),
        ([IMAGE | {"label": "one"}], [IMAGE | {"label": "two"}], "has the label 'one'; use whole numbers from 0"),
        ([IMAGE, IMAGE | {"image": [[0]]}], [IMAGE], "has images of 4 and of 1 pixels; "),
        ([IMAGE], [IMAGE | {"image": [[0]]}], "has training images of 4 pixels and held-out images of 1; "),
        ([IMAGE], [{"picture": 1, "label": 0}], "could not be read (Couldn't cast)"),
    ],
)  # fmt: skip
def test_bad_images(train, test, message, tmp_path):
    dataset, folder = write(tmp_path / "d", train, test)
    with pytest.raises(DataError) as caught:
        digits.load(folder)
    assert str(caught.value).startswith(f"{dataset} {message}")


def test_no_held_out_split(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps(IMAGE) + "\n")
    with pytest.raises(DataError, match="has no held-out split; name one test or validation"):
        digits.load(str(tmp_path))
