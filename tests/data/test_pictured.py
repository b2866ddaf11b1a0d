"""Rows with pictures: their forms, what is learned of them, and mistakes, which name the row."""

import io
import json

import numpy as np
import PIL.Image
import pytest

from data import DataError, pictured
from data.batches import train_batches

pytestmark = pytest.mark.promise("batches")

K = pictured.OF_BYTES.count
PICTURE = pictured.OF_BYTES.around()


def png(shade: int, size: int = 8) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.fromarray(np.full((size, size), shade, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def write(tmp_path):
    """Writes rows beside two pictures, a.png and b.png; returns the file's path."""
    (tmp_path / "a.png").write_bytes(png(10))
    (tmp_path / "b.png").write_bytes(png(200, size=20))

    def rows(*rows) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return rows


ROW = {"prompt": "<image>Dark? <image>", "completion": "yes", "images": ["a.png", "b.png"]}
TEXT = {"prompt": "And without? ", "completion": "no"}


def test_a_row_has_its_pictures_where_their_marks_are(write):
    data = pictured.load(write(ROW, TEXT), seq_len=40)
    rows = [*data.train.rows, *data.held_out.rows]
    row, text = sorted(rows, key=lambda row: -len(row.pictures))
    example = data.train.example(row)
    wanted = [256, *PICTURE, *b"Dark? ", *PICTURE, *b"yes"]
    assert example["tokens"][: len(wanted)].tolist() == wanted
    targets = example["targets"]
    assert targets[targets >= 0].tolist() == [*b"yes"]
    assert (targets[len(wanted) - 4 : len(wanted) - 1] >= 0).all()
    assert example["images"][:, 0, 0, 0].tolist() == [10, 200]
    assert example["segment_ids"].tolist() == [0] * len(wanted) + [1] * (40 - len(wanted))
    assert not data.train.example(text)["images"].any()


def test_other_forms_of_rows_are_the_same_row(tmp_path):
    """A column or parts of messages, LLaVA's conversations, paths and bytes."""
    (tmp_path / "a.png").write_bytes(png(10))
    parts = [{"type": "image", "path": "a.png"}, {"type": "text", "text": "What?"}]
    answer = {"role": "assistant", "content": "A cat."}
    forms = [
        {"messages": [{"role": "user", "content": "<image>What?"}, answer], "image": "a.png"},
        {"messages": [{"role": "user", "content": parts}, answer]},
        {"conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A cat."}],
         "images": ["a.png"]},
        {"messages": [{"role": "user", "content": "<image>What?"}, answer],
         "image": {"bytes": png(10), "path": None}},
    ]  # fmt: skip
    made = [pictured.with_marks(row, tmp_path, "row") for row in forms]
    for row, pictures in made:
        assert row == made[0][0]
        (picture,) = pictures
        shown = picture if isinstance(picture, bytes) else picture.read_bytes()
        assert shown == png(10)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (ROW | {"images": ["a.png"]}, "line 1 has 1 pictures and 2 places"),
        (ROW | {"images": ["a.png", "none.png"]}, r"line 1: the picture .*none.png does not exist"),
        (ROW | {"images": ["a.png", "rows.jsonl"]}, r"line 1: the picture .*rows.jsonl can't be read"),
        (ROW | {"images": ["a.png", "http://x/y.png"]}, "line 1: a picture is"),
        (ROW | {"completion": "yes" * 9}, "line 1 has 46 tokens .* --seq_len=40"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, 'the type "audio"'),
    ],
)  # fmt: skip
def test_a_mistake_names_its_row(write, row, said):
    with pytest.raises(DataError, match=said):
        pictured.load(write(row, TEXT), seq_len=40)


def test_a_resumed_run_sees_the_same_batches(write):
    data = pictured.load(write(*[ROW | {"completion": str(i)} for i in range(20)]), seq_len=40)
    every, resumed = (iter(train_batches(data, 4, seed=3, first=first)) for first in (0, 5))
    for _ in range(5):
        next(every)
    for _ in range(3):
        wanted, found = next(every), next(resumed)
        assert wanted.keys() == found.keys()
        assert all(np.array_equal(wanted[name], found[name]) for name in wanted)
