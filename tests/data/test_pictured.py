"""Rows with pictures: their forms, what is learned of them, and mistakes, which name the row."""

import base64
import io
import json
import pathlib
import struct
import zlib

import numpy as np
import PIL.ExifTags
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import DataError, images, picture_rows, pictured, squares, tokenizer
from data.batches import train_batches
from tests.conftest import ROOT
from tests.support import gemma_like, small_tokenizers

pytestmark = pytest.mark.promise("batches")

K = picture_rows.OF_BYTES.count
PICTURE = picture_rows.OF_BYTES.around()


def png(shade: int, size: int = 8) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.fromarray(np.full((size, size), shade, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def of_size(picture: bytes, width: int, height: int) -> bytes:
    """A PNG whose header states another size."""
    header = b"IHDR" + struct.pack(">II", width, height) + picture[24:29]
    return picture[:12] + header + struct.pack(">I", zlib.crc32(header)) + picture[33:]


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
    row, text = sorted(rows, key=lambda row: -len(row[0].pictures))
    example = data.train.example(row)
    wanted = [256, *PICTURE, *b"Dark? ", *PICTURE, *b"yes"]
    assert example["tokens"][: len(wanted)].tolist() == wanted
    targets = example["targets"]
    assert targets[targets >= 0].tolist() == [*b"yes"]
    assert (targets[len(wanted) - 4 : len(wanted) - 1] >= 0).all()
    assert example["images"][:, 0, 0, 0].tolist() == [10, 200]
    assert example["segment_ids"].tolist() == [1] * len(wanted) + [0] * (40 - len(wanted))
    assert not data.train.example(text)["images"].any()


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def test_other_forms_of_rows_are_the_same_row(tmp_path):
    """A column or parts of messages, LLaVA's conversations, paths, bytes and URIs with base64."""
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
        {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": uri(png(10))}}, parts[1]]}, answer]},
    ]  # fmt: skip
    made = [picture_rows.with_marks(row, tmp_path, "row") for row in forms]
    first, *others = (
        json.dumps(row).replace(json.dumps(picture_rows.BORDER)[1:-1], "") for row, _ in made
    )
    assert {*others} == {first}
    for _, pictures in made:
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
        (ROW | {"images": ["a.png", "data:image/png;base64,AAA"]}, 'line 1: a picture is "data:image'),
        (ROW | {"images": ["a.png", "data:image/png,%89PNG"]}, 'line 1: a picture is "data:image'),
        (ROW | {"images": ["a.png", uri(b"no picture")]}, "line 1: a picture can't be read"),
        (ROW | {"images": ["a.png", "A" * 300]}, r"line 1: the picture .*AAA does not exist"),
        (ROW | {"images": ["a.png", "A" * 9999]}, 'line 1: a picture is "AAA'),
        (ROW | {"completion": "yes" * 9}, "line 1 has 46 tokens .* --seq_len=40"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, 'the type "audio"'),
        (ROW | {"images": ["a.png", "cut.jpg"]}, r"line 1: the picture .*cut.jpg can't be read"),
        (ROW | {"images": ["a.png", "empty.png"]}, r"line 1: the picture .*empty.png can't be read"),
        (ROW | {"images": ["a.png", "flat.png"]}, r"line 1: the picture .*flat.png can't be read"),
        (ROW | {"images": ["a.png", "huge.png"]}, "line 1: the picture .*huge.png has more than 89,"),
    ],
)  # fmt: skip
def test_a_mistake_names_its_row(write, row, said, tmp_path):
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)
    PIL.Image.fromarray(noise).save(buffer, "JPEG")
    (tmp_path / "cut.jpg").write_bytes(buffer.getvalue()[:-900])  # its header is whole
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "flat.png").write_bytes(of_size(png(0), 8, 0))
    (tmp_path / "huge.png").write_bytes(of_size(png(0), 20_000, 5_000))
    with pytest.raises(DataError, match=said):
        pictured.load(write(row, TEXT), seq_len=40)


def test_a_resumed_run_sees_the_same_batches(write):
    rows = [
        (ROW if i % 3 else TEXT) | {"completion": "?" * (1 + i % 5) + str(i)} for i in range(40)
    ]
    data = pictured.load(write(*rows), seq_len=100)
    assert max(map(len, data.train.rows)) > 2, "packed"
    every, resumed = (iter(train_batches(data, 4, seed=3, first=first)) for first in (0, 5))
    for _ in range(5):
        next(every)
    for _ in range(3):
        wanted, found = next(every), next(resumed)
        assert wanted["images"].any()
        assert wanted.keys() == found.keys()
        assert all(np.array_equal(wanted[name], found[name]) for name in wanted)


def test_packed_documents_are_those_with_a_row_each(write):
    """With their pictures, in their order; the same file gives the same rows."""
    kinds = [TEXT, ROW, ROW | {"images": ["b.png", "a.png"]}]
    rows = [kinds[i % 3] | {"completion": "!" * i} for i in range(1, 31)]
    path = write(*rows)
    packed, again = (pictured.load(path, seq_len=120) for _ in range(2))
    alone = pictured.load(path, seq_len=120, pack=False)
    assert packed.facts == alone.facts | {"pack": True}
    assert len(packed.train) < len(alone.train) == sum(map(len, packed.train.rows))

    def documents(source) -> list:
        found = []
        for example in map(source.__getitem__, range(len(source))):
            used = 0
            for segment in range(1, example["segment_ids"].max() + 1):
                (place,) = np.nonzero(example["segment_ids"] == segment)
                assert (np.diff(place) == 1).all()
                tokens = example["tokens"][place]
                count = int((tokens == PICTURE[0]).sum())
                shown = example["images"][used : used + count]
                used += count
                found.append((tokens.tolist(), example["targets"][place].tolist(), shown.tobytes()))
            assert not example["images"][used:].any()
            padding = example["segment_ids"] == 0
            assert (example["targets"][padding] == -1).all()
            assert not example["tokens"][padding].any()
        return found

    for name in ("train", "held_out"):
        found, wanted = (sorted(documents(getattr(data, name))) for data in (packed, alone))
        assert found == wanted
        assert documents(getattr(again, name)) == documents(getattr(packed, name))


def test_pictures_are_checked_by_their_headers_and_named_when_they_break_later(
    write, tmp_path, monkeypatch
):
    rows = [ROW | {"completion": str(i)} for i in range(20)]
    with monkeypatch.context() as patch:
        patch.setattr(images, "decode", None)  # as it is called, this fails
        data = pictured.load(write(*rows), seq_len=40)
    (tmp_path / "b.png").write_bytes(png(1)[:50])
    with pytest.raises(DataError, match=r"rows.jsonl line \d+: the picture .*b.png can't be read"):
        next(iter(train_batches(data, 4, seed=0)))


def test_all_rows_are_evaluated_on(write):
    rows = [ROW | {"completion": f"a {i}"} for i in range(20)]
    data = pictured.load(write(*rows), seq_len=40, part="all")
    assert sum(map(len, data.held_out.rows)) == 20
    assert data.held_out_bytes == sum(len(row["completion"]) for row in rows)


def test_a_margin_is_around_each_picture(write):
    """As the processor of Gemma 3 has line breaks around each picture."""
    spaced = picture_rows.OF_BYTES._replace(margin="\n\n")
    data = pictured.load(write(ROW, ROW), seq_len=60, picture=spaced)
    tokens = [256, *b"\n\n", *PICTURE, *b"\n\nDark? \n\n", *PICTURE, *b"\n\nyes"]
    (row,) = data.train.rows[0]
    assert row.tokens.tolist() == tokens
    assert row.is_target.sum() == len("yes")
    prompt = {"prompt": picture_rows.MARK + "Dark? " + picture_rows.MARK}
    asked = picture_rows.asked(
        prompt, ["a", "b"], "--prompt", picture_rows.for_pictures(tokenizer.BYTES, spaced), spaced
    )
    assert asked.tokens.tolist() == tokens[: -len("yes")]


def test_a_rendered_conversation_has_margins_that_its_template_would_strip():
    """Templates trim messages, and a picture may come first."""
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"
    files = small_tokenizers.with_template(small_tokenizers.byte_level(), template)
    chat = tokenizer.from_files(files)
    spaced = picture_rows.OF_BYTES._replace(margin="\n\n")
    row = {"messages": [{"role": "user", "content": picture_rows.MARK + "Who?"}]}
    asked = picture_rows.asked(
        row, ["a"], "--prompt", picture_rows.for_pictures(chat, spaced), spaced
    )
    before, after = chat.encode(["<user>\n\n", "\n\nWho?\n"])
    assert asked.tokens.tolist() == [*before, *PICTURE, *after]


def test_a_picture_divides_a_text_as_a_control_token_does():
    """A tokenizer of Llama 2's kind writes a character otherwise inside a text than alone."""
    tokens = tokenizer.from_files(small_tokenizers.metaspace())
    around = picture_rows.OF_BYTES
    row = {"prompt": f"a{picture_rows.MARK}b{picture_rows.MARK}"}
    asked = picture_rows.asked(
        row, ["1", "2"], "", picture_rows.for_pictures(tokens, around), around
    )
    before, after = tokens.encode(["a", "b"])
    assert asked.tokens.tolist() == [*tokens.start, *before, *PICTURE, *after, *PICTURE]


# ---- dialogues -----------------------------------------------------------------------------------

# Of transformers' processors, by tests/by_hand/pictures_parity.py.
DIALOGUES = json.loads((ROOT / "tests" / "golden" / "pictures" / "dialogues.json").read_text())


def of_family(family: str) -> tuple[picture_rows.PictureTokenizer, picture_rows.PictureTokens]:
    files = gemma_like.files(family)
    begin, placeholder, end = map(gemma_like.made().token_to_id, gemma_like.PICTURES[family])
    margin = "\n\n" if family == "gemma3" else ""
    around = picture_rows.PictureTokens(begin, placeholder, end, 4, margin)
    return picture_rows.for_pictures(tokenizer.from_files(files), around), around


@pytest.mark.parametrize("dialogue", DIALOGUES, ids=lambda x: x["family"])
def test_a_dialogue_has_the_text_of_transformers_processor(dialogue):
    """Its tokens are theirs too, and every answer is learned, to the end of its turn."""
    family, messages = dialogue["family"], dialogue["messages"]
    chat, around = of_family(family)
    row, _ = picture_rows.with_marks({"messages": messages}, pathlib.Path(), "")
    place = around.margin + picture_rows.MARK + around.margin
    wanted = dialogue["text"].replace(chat.written, place)
    assert chat.render(row["messages"], False) == wanted
    (made,) = picture_rows.encoded(row, [b""] * wanted.count(place), "", chat, around)
    if "tokens" in dialogue:
        assert made.tokens.tolist() == dialogue["tokens"][: len(made.tokens)]
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    texts = [x if isinstance(x, str) else "".join(part["text"] for part in x) for x in answers]
    learned = [chat.encode_rendered(x.strip() + gemma_like.ENDS[family]) for x in texts]
    assert made.tokens[made.is_target].tolist() == np.concatenate(learned).tolist()
    assert made.is_target[-1]


NAMES = ["a.png", "b.png", "c.png"]
PARTS = [
    [{"type": "image", "path": "a.png"}, {"type": "text", "text": "What is it?"}],
    [{"type": "text", "text": "a cat."}],
    [{"type": "image", "path": "b.png"}, {"type": "image", "path": "c.png"},
     {"type": "text", "text": "And these two?"}],
    [{"type": "text", "text": "dogs."}],
]  # fmt: skip
TEXTS = ["<image>What is it?", "a cat.", "<image><image>And these two?", "dogs."]
IN_PARTS, IN_TEXT = (
    [{"role": ["user", "assistant"][i % 2], "content": content} for i, content in enumerate(turns)]
    for turns in (PARTS, TEXTS)
)
LLAVA = [{"from": ["human", "gpt"][i % 2], "value": text} for i, text in enumerate(TEXTS)]


def dialogues(path: pathlib.Path) -> list[tuple]:
    """The rows of a file beside its pictures: (tokens, targets, names of pictures) of each."""
    for shade, name in enumerate(NAMES):
        (path.parent / name).write_bytes(png(shade))
    chat, around = of_family("gemma3")
    rows, _ = picture_rows.read(str(path), chat, around)
    return [
        (row.tokens.tolist(), row.is_target.tolist(), [picture.name for picture in row.pictures])
        for row in rows
    ]


def test_forms_of_a_dialogue_are_the_same_row(tmp_path):
    """Parts, a column with <image>, LLaVA's conversations, others with roles, and JSON text."""
    rows = [
        {"messages": IN_PARTS},
        {"messages": json.dumps(IN_PARTS)},
        {"messages": IN_TEXT, "images": NAMES},
        {"conversations": LLAVA, "image": NAMES},
        {"conversations": IN_TEXT, "images": NAMES},
        {"conversations": json.dumps(LLAVA), "images": NAMES},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, *others = dialogues(path)
    assert first[-1] == NAMES
    assert others == [first] * (len(rows) - 1)


def test_a_dialogue_in_a_table_is_the_same_row(tmp_path):
    """There all parts have the same keys, some with nulls."""
    path, table = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    path.write_text(json.dumps({"messages": IN_PARTS}) + "\n")
    pq.write_table(pa.Table.from_pylist([{"messages": IN_PARTS}]), table)
    assert dialogues(table) == dialogues(path)


def test_turns_rendered_one_by_one_have_the_pictures_before_them():
    """Templates that change an answer once others follow make a document of each."""
    chat = tokenizer.from_files(
        small_tokenizers.with_template(small_tokenizers.byte_level(), small_tokenizers.QWEN)
    )
    messages = [
        {"role": role, "content": content}
        for mark in (1, 2)
        for role, content in (("user", picture_rows.MARK * mark + "?"), ("assistant", "yes"))
    ]
    ours = picture_rows.for_pictures(chat, picture_rows.OF_BYTES)
    rows = [*picture_rows.encoded({"messages": messages}, ["a", "b", "c"], "", ours, ours.picture)]
    assert [row.pictures for row in rows] == [("a",), ("a", "b", "c")]


def test_a_template_that_drops_a_picture_is_refused():
    """Else pictures would take the places of others."""
    template = (
        "{% for m in messages[1:] %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    files = small_tokenizers.with_template(
        small_tokenizers.byte_level(), template, ("</s>", "<assistant>")
    )
    ours = picture_rows.for_pictures(tokenizer.from_files(files), picture_rows.OF_BYTES)
    messages = [
        {"role": role, "content": content}
        for role, content in (("user", picture_rows.MARK + "?"), ("assistant", "yes")) * 2
    ]
    with pytest.raises(
        DataError, match="rows 3: the chat template renders 1 places for 2 pictures"
    ):
        [*picture_rows.encoded({"messages": messages}, ["a", "b"], "rows 3", ours, ours.picture)]


# ---- pictures as grids of squares ----------------------------------------------------------------

SQUARES = {"patch": 2, "pooling": 2, "picture_tokens": 6, "channels": 3, "resample": "bicubic"}


def colored(width: int, height: int, orientation: int = 1) -> bytes:
    """A picture without two equal pixels; orientation: as EXIF says how it was held."""
    pixels = np.arange(width * height * 3, dtype=np.uint32).reshape(height, width, 3) * 7 % 256
    picture = PIL.Image.fromarray(pixels.astype(np.uint8))
    exif = PIL.Image.Exif()
    exif[PIL.ExifTags.Base.Orientation] = orientation
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", exif=exif)
    return buffer.getvalue()


def test_a_picture_has_as_many_placeholders_as_squares(write, tmp_path):
    """By its own size, also if it was stored on its side; in a row they differ."""
    sizes = {"wide.png": (24, 8), "line.png": (60, 4), "held.png": (24, 8), "exact.png": (8, 12)}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(colored(*size, orientation=6 if name == "held.png" else 1))
    images = [*sizes]
    row = {"prompt": "<image>" * 4, "completion": "a", "images": images}
    data = pictured.load(write(row, row), seq_len=40, **SQUARES)
    example = data.train.example(data.train.rows[0])
    assert example["grids"].tolist() == [[1, 4], [1, 6], [4, 1], [3, 2]]
    counts = [4, 6, 4, 6]
    wanted = [x for count in counts for x in (381, *[383] * count, 382)]
    assert example["tokens"][1 : 1 + len(wanted)].tolist() == wanted
    assert (example["targets"] == ord("a")).sum() == 1
    exact = PIL.Image.open(tmp_path / "exact.png")
    squares = example["images"][3]
    np.testing.assert_array_equal(squares[3], np.asarray(exact)[4:8, 4:8], "row 1, column 1")
    assert squares.shape == (6, 4, 4, 3)
    assert not example["images"][0, 4:].any(), "empty places"


def test_the_largest_grid_of_a_picture_is_taken():
    """At most K squares, and none more would fit; a line of one row or column is cut at K."""
    for most in (6, 70, 280, 1_120):
        form = squares.SquareForm(48, most, 3)
        for width, height in ((896, 896), (37, 91), (1_200, 700), (301, 2_048), (5, 3)):
            rows, columns = form.grid(width, height)
            scale = (most * 48**2 / (width * height)) ** 0.5
            assert 0 < rows * columns <= most
            if min(rows, columns) > 1:
                assert 0 <= scale * height / 48 - rows < 1
                assert 0 <= scale * width / 48 - columns < 1
        assert form.grid(10_000 * most, 1) == (1, most)
        assert form.grid(1, 10_000 * most) == (most, 1)


def bicubic(x, size: int, axis: int) -> np.ndarray:
    """One dim of pixels resized by the definition of an antialiased bicubic filter, rounded."""
    x = np.moveaxis(x.astype(np.float64), axis, 0)
    scale = len(x) / size
    center = (np.arange(size)[:, None] + 0.5) * scale
    t = np.abs(np.arange(len(x)) + 0.5 - center) / max(scale, 1.0)
    near, far = 1.5 * t**3 - 2.5 * t**2 + 1, -0.5 * t**3 + 2.5 * t**2 - 4 * t + 2
    weights = np.where(t < 1, near, np.where(t < 2, far, 0))
    resized = np.tensordot(weights / weights.sum(axis=1, keepdims=True), x, 1)
    return np.moveaxis(np.clip(np.floor(resized + 0.5), 0, 255), 0, axis)


def test_columns_are_resized_first_where_there_is_no_tower(write):
    """As 12B's processor does. Of a tall picture, Pillow would begin with the rows."""
    noise = np.random.default_rng(0).integers(0, 256, (400, 60, 3), np.uint8)
    off = {}
    for tower_layers in (0, 1):
        fields = SQUARES | {"tower_layers": tower_layers}
        form = pictured.load(write(ROW, TEXT), seq_len=40, **fields).train.form
        form = form._replace(most=70)
        assert form.columns_first is (tower_layers == 0)
        pixels = form.resized(PIL.Image.fromarray(noise)).astype(np.float64)
        columns = bicubic(noise, pixels.shape[1], axis=1)
        off[tower_layers] = (bicubic(columns, len(pixels), axis=0) != pixels).mean()
    assert off[0] < 0.01, "but for sums next to a half"
    assert off[1] > 0.1


def test_joined_squares_are_the_picture():
    form = squares.SquareForm(4, 6, 3)
    pixels = form.resized(PIL.Image.open(io.BytesIO(colored(8, 12))))
    arrays = form.arrays([pixels], 1)
    np.testing.assert_array_equal(squares.joined(arrays["images"][0], arrays["grids"][0]), pixels)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "line 1: the picture .*x.png does not exist; fix the path"),
        (b"", "line 1: the picture .*x.png can't be read; replace it"),
        (of_size(png(3), 40_000, 40_000), "line 1: the picture .*x.png has more than"),
        (png(3)[:-30], "line 1: the picture .*x.png can't be read; replace it"),
    ],
)
def test_a_mistake_in_a_picture_of_squares_names_its_row(write, tmp_path, content, said):
    if content is not None:
        (tmp_path / "x.png").write_bytes(content)
    row = ROW | {"images": ["x.png", "a.png"]}
    with pytest.raises(DataError, match=said) as error:
        pictured.load(write(row, TEXT), seq_len=40, **SQUARES)
    assert "\n" not in str(error.value)
