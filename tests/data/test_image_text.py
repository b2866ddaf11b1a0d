"""data/image_text.py: pairs of pictures and captions in every form of files, their order, errors."""

import csv
import io
import json
import tarfile

import numpy as np
import PIL.Image
import pyarrow
import pyarrow.parquet
import pytest

from data import DataError, captions, images
from data.batches import train_batches
from tests.data.test_captions import text

pytestmark = pytest.mark.promise("batches")

COUNT, FIRST = 24, 10  # pairs; the red of the first, which its caption has in words


def encoded(red: int, size=(6, 4)) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", size, (red, 0, 0)).save(file, "png")
    return file.getvalue()


PICTURES = {f"{i:02}": encoded(FIRST + 5 * i) for i in range(COUNT)}
TEXTS = {name: f"red {FIRST + 5 * i}" for i, name in enumerate(PICTURES)}


def side_by_side(root):
    (root / "inner").mkdir(parents=True)
    for name, picture in PICTURES.items():
        (root / "inner" / f"{name}.png").write_bytes(picture)
        (root / "inner" / f"{name}.txt").write_text(TEXTS[name] + "\n")


def json_beside(root):
    root.mkdir()
    for name, picture in PICTURES.items():
        (root / f"{name}.PNG").write_bytes(picture)
        (root / f"{name}.json").write_text(json.dumps({"caption": TEXTS[name], "id": 1}))


def table(root, write):
    (root / "images").mkdir(parents=True)
    for name, picture in PICTURES.items():
        (root / "images" / f"{name}.png").write_bytes(picture)
    columns = {"id": 1}  # that nothing reads
    write([columns | {"file_name": f"images/{x}.png", "text": TEXTS[x]} for x in PICTURES])


def json_lines(root):
    table(root, lambda rows: (root / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows))))


def comma_separated(root):
    def write(rows):
        with (root / "metadata.csv").open("w") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)

    table(root, write)


def parquet(root, image=lambda name: {"bytes": PICTURES[name], "path": None}):
    """With several captions for each picture, which all say the same."""
    root.mkdir()
    for part in range(2):
        names = [*PICTURES][part::2]
        columns = {
            "image": [image(name) for name in names],
            "captions": [[TEXTS[name]] * 2 for name in names],
            "id": [1 for name in names],
        }
        pyarrow.parquet.write_table(pyarrow.table(columns), root / f"part-{part}.parquet")


def plain_bytes(root):
    parquet(root, PICTURES.get)


def shards(root, suffix="txt"):
    root.mkdir()
    for part in range(2):
        with tarfile.open(root / f"{part}.tar", "w") as tar:
            for name in [*PICTURES][part::2]:
                row = {"caption": TEXTS[name], "id": 1}
                caption = TEXTS[name] if suffix == "txt" else json.dumps(row)
                members = {
                    "png": PICTURES[name],
                    suffix: caption.encode(),
                    "mask.png": b"",
                    "cls": b"3",
                }
                for kind, content in members.items():
                    info = tarfile.TarInfo(f"set/{name}.{kind}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


def json_shards(root):
    shards(root, "json")


FORMS = (side_by_side, json_beside, json_lines, comma_separated, parquet, plain_bytes, shards)
FORMS += (json_shards,)
WITHOUT_ROWS = (side_by_side, shards)


def reds(data, part, numbers) -> list[int]:
    """The red of each picture. Asserts that its caption says so too."""
    batch = part.take(np.asarray(numbers))
    pixels = batch["image"] * data.config["std"] + data.config["mean"]
    found = (pixels[:, :, :, 0] * 255).round().astype(int)
    assert (found == found[:, :1, :1]).all()
    assert [f"red {red}" for red in found[:, 0, 0]] == [text(row) for row in batch["tokens"]]
    assert (batch["label"] == 0).all()
    return found[:, 0, 0].tolist()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("in_memory", [True, False])
def test_every_form_of_files_has_the_same_pairs(form, in_memory, tmp_path, monkeypatch):
    monkeypatch.setattr(images, "IN_MEMORY", 2**30 if in_memory else 0)
    form(tmp_path / "pairs")
    for _ in range(2):  # again, with what the first time has left in the cache
        data = captions.load(str(tmp_path / "pairs"), image_size=4)
        train = reds(data, data.train, range(len(data.train)))
        held_out = reds(data, data.held_out, range(len(data.held_out)))
        assert sorted(train + held_out) == [FIRST + 5 * i for i in range(COUNT)]
        assert len(held_out) == COUNT // 10
        assert data.config["labels"] == ()
        unused = () if form in WITHOUT_ROWS else ("Columns that are not used: 1 ('id').",)
        assert data.notes == ("Pairs: 22 to train on, 2 held out.", *unused)


def test_patterns_and_datasets_of_the_hub(tmp_path):
    """A folder stands for the Hub's dataset here: the same library reads both."""
    parquet(tmp_path / "pairs")
    (tmp_path / "pairs" / "part-0.parquet").rename(tmp_path / "pairs" / "train-0.parquet")
    (tmp_path / "pairs" / "part-1.parquet").rename(tmp_path / "pairs" / "test-0.parquet")
    for dataset, column in (
        (f"hf:{tmp_path / 'pairs'}", "captions"),
        (f"{tmp_path}/*/*.parquet", ""),
    ):
        data = captions.load(dataset, image_size=2, caption_column=column)
        assert (len(data.train), len(data.held_out)) == (12, 12)
        assert reds(data, data.train, range(12)) == [FIRST + 10 * i for i in range(12)]
        assert data.notes[1:] == ("Columns that are not used: 1 ('id').",)


def test_batches_are_the_same_on_any_number_of_processes_and_when_resumed(tmp_path):
    """Pictures change at random; a caption is one of several."""
    side_by_side(tmp_path / "pairs")
    rows = [{"file_name": f"inner/{name}.png", "caption": [*"abcd"]} for name in PICTURES]
    (tmp_path / "pairs" / "all.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = captions.load(str(tmp_path / "pairs"), image_size=4, crop=True, flip=True, seed=2)

    def batches(count, **options):
        feed = iter(train_batches(data, 8, seed=3, **options))
        return [next(feed) for _ in range(count)]

    whole = batches(5)
    assert len({row.tobytes() for batch in whole for row in batch["tokens"]}) == 4
    for field, want in whole[3].items():
        np.testing.assert_array_equal(batches(1, first=3)[0][field], want)
        parts = [batches(1, first=3, rows=r)[0][field] for r in np.split(np.arange(8), 2)]
        np.testing.assert_array_equal(np.concatenate(parts), want)


def test_longer_captions_are_cut_and_counted(tmp_path):
    side_by_side(tmp_path / "pairs")
    (tmp_path / "pairs" / "inner" / "00.txt").write_text("red 10 and nothing else")
    data = captions.load(str(tmp_path / "pairs"), image_size=4, max_positions=7)
    kept = captions.load(str(tmp_path / "pairs"), image_size=4, max_positions=23)
    assert data.notes[1:] == (
        "Captions: 1 of the first 22 are longer than 7 bytes and are cut; --set=max_positions=23 keeps "
        "all whole.",
    )
    assert kept.notes[1:] == ()
    assert text(data.train.take(np.arange(1))["tokens"][0]) == "red 10 "
    assert text(kept.train.take(np.arange(1))["tokens"][0]) == "red 10 and nothing else"


# ---- errors --------------------------------------------------------------------------------------


def no_caption(root):
    side_by_side(root)
    (root / "inner" / "03.txt").unlink()


def no_picture(root):
    side_by_side(root)
    (root / "inner" / "03.png").unlink()


def empty_caption(root):
    side_by_side(root)
    (root / "inner" / "03.txt").write_text(" \n")


def no_captions(root):
    root.mkdir()
    for name, picture in PICTURES.items():
        (root / f"{name}.png").write_bytes(picture)


def torn(root):
    side_by_side(root)
    (root / "inner" / "03.png").write_bytes(PICTURES["03"][:-30])


def torn_in_shard(root):
    shards(root)
    content = (root / "1.tar").read_bytes()
    (root / "1.tar").write_bytes(
        content.replace(PICTURES["03"], PICTURES["03"][:40] + bytes(len(PICTURES["03"]) - 40))
    )


def torn_shard(root):
    shards(root)
    (root / "1.tar").write_bytes((root / "1.tar").read_bytes()[:1000])


def packed_shard(root):
    root.mkdir()
    with tarfile.open(root / "1.tar", "w:gz"):
        pass


def no_file(root):
    json_lines(root)
    (root / "images" / "03.png").unlink()


def no_pictures(root):
    root.mkdir()
    (root / "x.jsonl").write_text('{"caption": "a", "photo": "b.png"}\n')


def not_json(root):
    json_beside(root)
    (root / "03.json").write_text("{")


def not_utf_8(root):
    json_beside(root)
    (root / "03.json").unlink()
    (root / "03.txt").write_bytes("caf\xe9".encode("latin-1"))


def wide(root):
    json_beside(root)
    (root / "03.json").unlink()
    (root / "03.txt").write_bytes("caption".encode("utf-16-le"))


def single(root):
    root.mkdir()
    (root / "a.png").write_bytes(PICTURES["00"])
    (root / "a.txt").write_text("a")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_caption, "{root}: inner/03.png has no caption; add inner/03.txt or inner/03.json, or remove it"),
        (no_picture, "{root}: inner/03.txt has no picture (.png, .jpg, .jpeg); add it, or remove it"),
        (empty_caption, "{root}: inner/03.txt has no caption in it; add one, or remove the pair"),
        (no_captions, "{root} has pictures without captions; add 00.txt beside 00.png, a metadata.jsonl with "),
        (torn, "{root}: inner/03.png is not a readable picture; replace or remove it"),
        (torn_in_shard, "{root}: 1.tar/set/03.png is not a readable picture; replace or remove it"),
        (torn_shard, "{root}: 1.tar is not a complete, uncompressed tar file ("),
        (packed_shard, "{root}: 1.tar is not a complete, uncompressed tar file ("),
        (no_file, "{root}: metadata.jsonl line 4 names {root}/images/03.png, which does not exist; add it"),
        (no_pictures, "{root}: x.jsonl line 1 has no picture in 'file_name' or 'image'; set --image_column to one of 'caption', 'photo'"),
        (not_json, "{root}: 03.json is not JSON (Expecting property name enclosed in double quotes); fix it"),
        (not_utf_8, "{root}: 03.txt is not UTF-8; convert the file"),
        (wide, "{root}: 03.txt is not a text file: it has NUL bytes"),
        (single, "{root} has 1 pairs of a picture and a caption, and one is held out; add pairs"),
    ],
)  # fmt: skip
def test_errors_are_one_line(damage, message, tmp_path):
    damage(tmp_path / "pairs")
    with pytest.raises(DataError) as error:
        captions.load(str(tmp_path / "pairs"), image_size=4)
    assert str(error.value).startswith("--dataset=" + message.format(root=tmp_path / "pairs"))
    assert "\n" not in str(error.value)


def test_flags_of_columns_need_rows(tmp_path):
    json_beside(tmp_path / "pairs")
    with pytest.raises(DataError, match=r"^--image_column=other is for rows"):
        captions.load(str(tmp_path / "pairs"), image_size=4, image_column="other")
    with pytest.raises(DataError, match=r"^--label_column=other is for rows"):
        captions.load(str(tmp_path / "pairs"), image_size=4, label_column="other")
    with pytest.raises(DataError, match=r"^--caption_column=other is for rows"):
        captions.load("digits", caption_column="other")


def test_a_column_that_is_not_there_is_named(tmp_path):
    json_lines(tmp_path / "pairs")
    with pytest.raises(
        DataError, match="has no column 'alt'; set --caption_column to one of 'file_n"
    ):
        captions.load(str(tmp_path / "pairs"), image_size=4, caption_column="alt")
    parquet(tmp_path / "rows")
    with pytest.raises(
        DataError, match="row 1 has no column 'alt'; set --caption_column to one of"
    ):
        captions.load(f"hf:{tmp_path / 'rows'}", image_size=4, caption_column="alt")
