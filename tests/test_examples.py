"""data/synthetic.py and data/digits.py: exact examples, exact order, on any number of processes."""

import io
import json

import grain
import numpy as np
import pytest

from data import DataError, batches, digits, synthetic

SOURCES = {
    "synthetic": lambda: synthetic.train(16, 32, seed=5),
    "digits": lambda: digits.load().train,
}


def take(source, count, **options):
    feed = iter(batches.train_batches(source, 8, 3, **options))
    return [next(feed) for _ in range(count)]


@pytest.mark.parametrize("name", SOURCES)
def test_batch_k_is_a_function_of_seed_and_k_on_any_number_of_processes(name):
    source = SOURCES[name]()
    whole = take(source, 5)
    for field, want in whole[3].items():
        np.testing.assert_array_equal(take(source, 1, first=3)[0][field], want)
        for shards in (2, 4):
            parts = [
                take(source, 1, first=3, shard=grain.sharding.ShardOptions(i, shards))[0][field]
                for i in range(shards)
            ]
            np.testing.assert_array_equal(np.concatenate(parts), want)
    field = "x" if name == "synthetic" else "image"
    assert not any(np.array_equal(whole[0][field], other[field]) for other in whole[1:])


def test_the_teacher_answers_as_it_says():
    teacher = synthetic.train(16, 32, seed=5)
    again, other = synthetic.train(16, 32, seed=5), synthetic.train(16, 32, seed=6)
    assert teacher.fingerprint() == again.fingerprint() != other.fingerprint()
    example = teacher[123_456]
    np.testing.assert_array_equal(example["y"], again[123_456]["y"])
    w1_DF, w2_FD = teacher._w1_DF, teacher._w2_FD
    want_D = np.maximum(np.float64(example["x"]) @ w1_DF, 0) @ w2_FD
    np.testing.assert_allclose(example["y"], want_D, rtol=1e-5, atol=1e-6)
    assert example["weight"] == 1
    x_ND = np.stack([teacher[i]["x"] for i in range(1000)])
    assert abs(x_ND.mean()) < 0.05
    assert abs(x_ND.std() - 1) < 0.05


def test_held_out_questions_are_others():
    teacher, held_out = synthetic.train(16, 32, 5), synthetic.held_out(16, 32, 5)
    asked = {teacher[i]["x"].tobytes() for i in range(2000)}
    assert len(asked) == 2000
    assert not asked & {held_out[i]["x"].tobytes() for i in range(2000)}
    np.testing.assert_array_equal(teacher._w1_DF, held_out._w1_DF)


@pytest.mark.parametrize("shards", [1, 4])
def test_evaluation_covers_every_image_once(shards):
    images = digits.load().held_out
    parts = [
        list(digits.held_out_batches(images, 64, grain.sharding.ShardOptions(i, shards)))
        for i in range(shards)
    ]
    rows = [np.concatenate([p["label"] for p in batch]) for batch in zip(*parts, strict=True)]
    labels = np.concatenate(rows)
    assert [len(row) for row in rows] == [64] * 6
    np.testing.assert_array_equal(labels[:360], images.label_N)
    assert (labels[360:] == -1).all()


def test_evaluation_weighs_each_example_once():
    held_out = synthetic.held_out(16, 32, 5)
    weights = [b["weight"] for b in synthetic.held_out_batches(held_out, 1000)]
    assert [len(w) for w in weights] == [1000] * 5
    assert sum(w.sum() for w in weights) == synthetic.HELD_OUT


def test_digits_that_travel_with_the_repository():
    found = digits.load()
    assert (len(found.train), len(found.held_out)) == (1437, 360)
    assert (found.inputs, found.classes) == (64, 10)
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


def test_images_of_ones_own(tmp_path):
    _, folder = write(tmp_path / "d", [IMAGE, IMAGE | {"label": 2}], [IMAGE])
    found = digits.load(folder)
    assert (found.inputs, found.classes) == (4, 3)
    np.testing.assert_allclose(found.train[0]["image"], (np.arange(4) - 1.5) / np.std(np.arange(4)))
    assert found.fingerprint == digits.load(f"hf:{folder}").fingerprint


def test_pictures_are_arrays_too(tmp_path):
    """The Hub's image data sets decode to pictures."""
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
    ("train", "test", "sentence"),
    [
        ([{"picture": 1, "label": 0}], [{"picture": 1, "label": 0}], "has no column 'image'; set --image_column to one of 'picture', 'label'"),
        ([IMAGE | {"label": -3}], [IMAGE], "has a label -3, which is no class; labels are whole numbers from 0"),
        ([IMAGE | {"label": "one"}], [IMAGE | {"label": "two"}], "has a label 'one', which is no class"),
        ([IMAGE, IMAGE | {"image": [[0]]}], [IMAGE], "has images of 4 and of 1 numbers; make them alike"),
        ([IMAGE], [IMAGE | {"image": [[0]]}], "has images of 4 numbers to train on and of 1 held out; make them alike"),
        ([IMAGE], [{"picture": 1, "label": 0}], "could not be read (Couldn't cast)"),
    ],
)  # fmt: skip
def test_bad_images(train, test, sentence, tmp_path):
    dataset, folder = write(tmp_path / "d", train, test)
    with pytest.raises(DataError) as caught:
        digits.load(folder)
    assert str(caught.value).startswith(f"{dataset} {sentence}")


def test_no_split_to_test_on(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps(IMAGE) + "\n")
    with pytest.raises(DataError, match="has no split to test on; name one test or validation"):
        digits.load(str(tmp_path))
