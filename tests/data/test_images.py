"""data/images.py: exact pixels, crops and flips that depend on (seed, epoch, picture), errors."""

import io
import json
import os
import pathlib

import grain
import numpy as np
import PIL.Image
import pytest

from data import DataError, hub, images
from data.batches import Dataset, train_batches

pytestmark = pytest.mark.promise("batches")

COLORS = {"cat": (200, 40, 40), "dog": (40, 200, 40), "owl": (40, 40, 200)}


def picture(path, color=(0, 0, 0), size=(6, 4)):
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.new("L" if isinstance(color, int) else "RGB", size, color).save(path)


@pytest.fixture
def pets(tmp_path):
    for name, color in COLORS.items():
        for i in range(12):
            picture(tmp_path / "pets" / name / f"{i}.{'png' if i % 2 else 'JPG'}", color)
    return tmp_path / "pets"


def batches(data: Dataset, count=4, **options):
    feed = iter(train_batches(data, 8, seed=3, **options))
    return [next(feed) for _ in range(count)]


# ---- order and random changes --------------------------------------------------------------------


@pytest.mark.parametrize("by_chance", [{}, {"crop": True, "flip": True}], ids=["plain", "random"])
def test_batches_are_the_same_on_any_number_of_processes_and_when_resumed(by_chance):
    data = images.load("digits", seed=5, **by_chance)
    whole = batches(data, 5)
    for field, want in whole[3].items():
        np.testing.assert_array_equal(batches(data, 1, first=3)[0][field], want)
        for shards in (2, 4):
            parts = [
                batches(data, 1, first=3, rows=rows)[0][field]
                for rows in np.split(np.arange(8), shards)
            ]
            np.testing.assert_array_equal(np.concatenate(parts), want)


def test_crops_and_flips_differ_between_epochs_seeds_and_pictures():
    plain, seeds = images.load("digits"), [images.load("digits", crop=True, seed=i) for i in (0, 1)]
    number, count = 7, len(plain.train)
    shown = {e: seeds[0].train[number + e * count]["image"] for e in range(20)}
    assert len({image.tobytes() for image in shown.values()}) > 5
    again = images.load("digits", crop=True).train[number + 3 * count]["image"]
    np.testing.assert_array_equal(again, shown[3])
    others = [seeds[1].train[number + e * count]["image"] for e in range(20)]
    assert any((a != b).any() for a, b in zip(shown.values(), others, strict=True))
    # Every crop is the picture, moved by at most one pixel.
    wide = np.pad(plain.train[number]["image"], ((1, 1), (1, 1), (0, 0)), mode="edge")
    moved = [wide[i : i + 8, j : j + 8] for i in range(3) for j in range(3)]
    assert all(any((image == one).all() for one in moved) for image in shown.values())
    flips = images.load("digits", flip=True).train
    image = plain.train[number]["image"]
    seen = [(flips[number + e * count]["image"] == image).all() for e in range(20)]
    assert 0 < sum(seen) < 20
    np.testing.assert_array_equal(
        flips[number + seen.index(False) * count]["image"], image[:, ::-1]
    )
    held_out = images.load("digits", crop=True, flip=True).held_out[0]["image"]
    np.testing.assert_array_equal(held_out, plain.held_out[0]["image"])


def test_an_example_of_a_later_epoch_has_its_number():
    """Grain shuffles each epoch anew, and every example comes once in each."""
    numbers = grain.MapDataset.range(0, 16)

    class Numbers(grain.sources.RandomAccessDataSource):
        def __len__(self):
            return 16

        def __getitem__(self, i):
            return {"number": numbers[i]}

        def take(self, numbers):
            return {"number": np.asarray(numbers)}

    data = Dataset(Numbers(), Numbers(), {}, "", 1, {}, {}, by_epoch=True)
    found = np.concatenate([batch["number"] for batch in batches(data, 6)])
    for epoch in range(3):
        of_epoch = found[epoch * 16 : (epoch + 1) * 16]
        assert sorted(of_epoch) == list(range(epoch * 16, (epoch + 1) * 16))


# ---- folders and rows ----------------------------------------------------------------------------


def test_digits_are_the_repository_s():
    data = images.load()
    assert (len(data.train), len(data.held_out)) == (1437, 360)
    assert data.config["labels"] == tuple("0123456789")
    assert (data.config["channels"], data.config["classes"]) == (1, 10)
    image_NWWC = data.train.take(np.arange(1437))["image"]
    assert image_NWWC.shape == (1437, 8, 8, 1)
    assert abs(image_NWWC.mean()) < 0.02
    assert abs(image_NWWC.std() - 1) < 0.02


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_folder_with_a_subfolder_for_each_class(pets, in_memory, monkeypatch):
    monkeypatch.setattr(images, "IN_MEMORY", 2**30 if in_memory else 0)
    data = images.load(str(pets), image_size=4)
    assert data.config["labels"] == ("cat", "dog", "owl")
    assert (len(data.train), len(data.held_out)) == (33, 3), "a tenth of each class, at least one"
    for example in (data.train[i] for i in range(33)):
        pixels = (example["image"] * data.config["std"] + data.config["mean"]) * 255
        color = [*COLORS.values()][example["label"]]
        np.testing.assert_allclose(pixels, np.broadcast_to(color, (4, 4, 3)), atol=3)
    assert [data.held_out[i]["label"] for i in range(3)] == [0, 1, 2]
    assert images.load(str(pets), image_size=4).facts == data.facts
    assert images.load(str(pets), image_size=2).facts != data.facts


def test_hidden_files_and_folders_hold_no_pictures(pets, tmp_path):
    want = images.load(str(pets), 4)
    for name in ("cat/._1.png", "dog/.ipynb_checkpoints/1-checkpoint.png", ".git/a.png"):
        (pets / name).parent.mkdir(exist_ok=True)
        (pets / name).write_bytes(b"not a picture")
    data = images.load(str(pets), 4)
    assert data.facts == want.facts
    assert len(data.train) + len(data.held_out) == 36
    rows = [{"image": [[0, 1], [1, 0]], "label": i % 2} for i in range(20)]
    for split in ("train", "test"):
        (tmp_path / "rows" / ".git").mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "rows" / f"{split}.jsonl").write_text(lines)
    assert len(images.load(str(tmp_path / "rows"), 2).train) == 20


def test_names_of_pictures_may_be_latin_1(pets):
    for i in range(12):
        picture(
            pathlib.Path(os.fsdecode(os.fsencode(pets) + f"/owl/caf\xe9 {i}.png".encode("latin1")))
        )
    assert len(images.load(str(pets), 4, channels=1).train) == 3 * 11 + 11


def test_a_folder_with_train_and_test(pets, tmp_path):
    for part in ("train", "test"):
        for name, color in COLORS.items():
            if (part, name) != ("test", "owl"):
                picture(tmp_path / "both" / part / name / "a.png", color)
    data = images.load(str(tmp_path / "both"))
    assert (len(data.train), len(data.held_out)) == (3, 2)
    (tmp_path / "both" / "test" / "fox").mkdir()
    picture(tmp_path / "both" / "test" / "fox" / "a.png")
    with pytest.raises(DataError, match="has class 'fox' in test but not in train; add pictures"):
        images.load(str(tmp_path / "both"))


def test_a_model_s_classes_keep_their_order_and_its_inputs_their_scale(pets):
    known = ("owl", "fox", "cat", "dog")
    given = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
    data = images.load(str(pets), labels=known, **given)
    assert data.config | given == data.config
    assert (data.config["labels"], data.config["classes"]) == (known, 4)
    assert {int(data.train[i]["label"]) for i in range(len(data.train))} == {0, 2, 3}
    assert images.load(str(pets), labels=("owl", "cat")).config["labels"] == ("cat", "dog", "owl")


@pytest.mark.parametrize(("channels", "mode"), [(1, "RGB"), (3, "L")])
def test_pictures_are_converted_to_the_model_s_channels(channels, mode, tmp_path):
    for name, value in (("dark", 10), ("light", 200)):
        color = value if mode == "L" else (value,) * 3
        picture(tmp_path / name / "a.png", color)
        picture(tmp_path / name / "b.png", color)
    data = images.load(str(tmp_path), image_size=2, channels=channels)
    assert data.train[1]["image"].shape == (2, 2, channels)
    pixels = (data.train[1]["image"] * data.config["std"] + data.config["mean"]) * 255
    np.testing.assert_allclose(pixels, 200, atol=0.01)


def test_resizing_is_pillow_s(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
    picture = PIL.Image.fromarray(pixels)
    for name, number in {"bilinear": 2, "bicubic": 3}.items():
        want = np.asarray(picture.resize((4, 4), PIL.Image.Resampling(number)))
        np.testing.assert_array_equal(images.resized(picture, images.Form(4, 3, name)), want)
    deep = PIL.Image.fromarray(np.asarray([[0, 257 * 128, 65535]], np.uint16))
    np.testing.assert_array_equal(
        images.resized(deep.resize((3, 3), 0), images.Form(3, 1))[0, :, 0], [0, 128, 255]
    )


def test_rows_without_a_held_out_split(tmp_path):
    rows = [{"image": [[0, i % 7], [3, 6]], "label": i % 3} for i in range(30)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = images.load(str(tmp_path), image_size=2)
    assert data.notes == ()
    assert (len(data.train), len(data.held_out)) == (27, 3)
    assert data.config["labels"] == ("0", "1", "2")
    assert (
        data.facts["fingerprint"]
        == images.load(f"hf:{tmp_path}", image_size=2).facts["fingerprint"]
    )


def test_files_of_a_folder_that_are_not_read_are_named(pets):
    assert images.load(str(pets)).notes == ()
    (pets / "cat" / "a.heic").write_bytes(b"")
    (pets / "notes.txt").write_text("about")
    (pets / ".hidden").write_text("")
    picture(pets / "of_no_class.png")
    (note,) = images.load(str(pets)).notes
    assert note == "Files that are not read: 3 (cat/a.heic, notes.txt, of_no_class.png)."


def test_columns_are_for_rows(pets):
    with pytest.raises(DataError, match=r"^--image_column=other is for rows"):
        images.load(str(pets), image_column="other")
    with pytest.raises(DataError, match=r"^--label_column=other is for rows"):
        images.load(str(pets), label_column="other")


def test_rows_may_have_encoded_pictures(pets, tmp_path):
    """As Parquet files have them that `datasets` has not written."""
    encoded = [file.read_bytes() for file in sorted(pets.rglob("*.png"))[:2]]
    rows = [
        {"image": {"bytes": encoded[n % 2], "path": None}, "label": n % 2, "alt": "a"}
        for n in range(20)
    ]
    (tmp_path / "rows").mkdir()
    hub.library().Dataset.from_list(rows).to_parquet(tmp_path / "rows" / "train.parquet")
    data = images.load(str(tmp_path / "rows"), image_size=2)
    assert data.notes == ("Columns that are not used: 1 ('alt').",)
    for n in range(2):
        with PIL.Image.open(io.BytesIO(encoded[n])) as one:
            wanted = images.resized(one, images.Form(2, 3))
        (number,) = np.flatnonzero(data.train.label_N == n)[:1]
        np.testing.assert_array_equal(data.train.pixels[number], wanted)


# ---- errors --------------------------------------------------------------------------------------


def empty(root):
    (root / "fox").mkdir()


def one(root):
    for name in ("dog", "owl"):
        for file in (root / name).iterdir():
            file.unlink()
        (root / name).rmdir()


def single(root):
    picture(root / "fox" / "a.png")


def torn(root):
    file = root / "cat" / "1.png"
    file.write_bytes(file.read_bytes()[:-30])


def text(root):
    (root / "dog" / "1.png").write_text("no picture")


def grey(root):
    picture(root / "cat" / "1.png", 7)


def nothing(root):
    for path in sorted(root.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (root / ".hidden").mkdir()


def flat(root):
    """Pictures and their captions, but no classes."""
    nothing(root)
    picture(root / "cat.png")
    (root / "cat.txt").write_text("a cat")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (empty, "{pets} has no pictures (.png, .jpg, .jpeg) in {pets}/fox; add some, or remove the folder"),
        (one, "{pets} has a single class, 'cat'; add a folder for another one"),
        (single, "{pets} has a single picture of class 'fox', and one is held out; add pictures"),
        (torn, "{pets}: {pets}/cat/1.png is not a readable picture; replace or remove it"),
        (text, "{pets}: {pets}/dog/1.png is not a readable picture; replace or remove it"),
        (grey, "{pets} has grey pictures, such as {pets}/cat/1.png, and colored ones, such as {pets}/"),
        (nothing, "{pets} has no folders in {pets}; use one for each class"),
        (flat, "{pets} has no folders in {pets}; use one for each class"),
    ],
)  # fmt: skip
def test_bad_folders(damage, message, pets):
    damage(pets)
    with pytest.raises(DataError) as caught:
        images.load(str(pets))
    assert str(caught.value).startswith(f"--dataset={message.replace('{pets}', str(pets))}")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"picture": 1, "label": 0}], "has no column 'image'; set --image_column to one of"),
        ([{"image": [[1]], "label": -1}], "has the label -1; use whole numbers from 0"),
        ([{"image": [[1]], "label": 0}], "has an empty split; add images to it"),
    ],
)
def test_bad_rows(rows, message, tmp_path):
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError) as caught:
        images.load(str(tmp_path), image_size=1)
    assert str(caught.value).startswith(f"--dataset={tmp_path} {message}")


def test_no_such_folder():
    with pytest.raises(DataError, match="--dataset=no/such is not a folder; use digits, a folder"):
        images.load("no/such")


def test_a_picture_of_a_phone_stands_upright(tmp_path):
    """As `datasets` and transformers' load_image turn it: its EXIF says how the phone was held."""
    pixels = np.zeros((8, 4, 3), np.uint8)
    pixels[:4] = 255  # the upper half is white
    exif = PIL.Image.Exif()
    exif[PIL.Image.ExifTags.Base.Orientation] = 6  # to be turned by 90° clockwise
    sideways = PIL.Image.fromarray(np.rot90(pixels))
    sideways.save(tmp_path / "phone.png", exif=exif)
    form = images.Form(8, 3, "nearest")
    with (tmp_path / "phone.png").open("rb") as file:
        found = images.decode(file, form, "phone", "phone.png")
    wanted = images.resized(PIL.Image.fromarray(pixels), form)
    np.testing.assert_array_equal(found, wanted)
    assert found[0].all()
    assert not found[-1].any()
