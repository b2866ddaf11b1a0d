"""Answers about pictures: with a cache they are those without, on any mesh; mistakes are one line."""

import dataclasses
import functools
import json

import jax
import numpy as np
import PIL.Image
import pytest

from data import DataError, picture_rows
from data.tokenizer import BYTES
from recipes.common import checkpoint, hf
from recipes.common.generation import picture_prompts, questions
from recipes.common.generation.generator import Generator, Sampling
from recipes.common.mesh import make_mesh
from recipes.common.runtime import UserError
from recipes.common.sharding.layout import make_layout
from recipes.common.tasks import picture_answers
from recipes.generate import Generate
from tests.conftest import ROOT, full_except
from tests.support.models import random_variables
from tests.support.quick import QUICK
from tests.support.quick import quick as quick
from zoo import gemma4_vision
from zoo.gemma3_vision import Config, Gemma3Vision

pytestmark = pytest.mark.promise("generation")

GOLDEN = ROOT / "tests" / "golden" / "pictures" / "gemma3"
NEW = 5  # tokens to write
# Of the golden folder's model: its placeholder is 63, and a picture has four.
PICTURE = [61, 63, 63, 63, 63, 62]
PROMPTS = [[2, 9, *PICTURE, 33, *PICTURE, 7], [2, 5], [*PICTURE, 8, 3]]
PICTURES = (2, 0, 1)


@functools.cache
def restored(mesh: str, rules: str):
    source = hf.open_folder(GOLDEN, "gemma3_vision")
    layout = checkpoint.layout_of(source, make_mesh(mesh), rules)
    return layout, checkpoint.restore_variables(source, layout)


def drawn(config) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    size = (config.image_size, config.image_size, config.channels)
    return [random.integers(0, 256, (count, *size), np.uint8) for count in PICTURES]


@functools.cache
def uncached() -> list[list[int]]:
    """The likeliest tokens after each prompt, with a whole forward pass for each."""
    layout, variables = restored("1x1", "dp")
    images = drawn(layout.config)
    images_BMWWC = np.zeros((len(images), 2, *images[0].shape[1:]), np.uint8)
    for slots, shown in zip(images_BMWWC, images, strict=True):
        slots[: len(shown)] = shown
    tokens_BT = np.zeros((len(PROMPTS), 24), np.int32)
    for row, prompt in zip(tokens_BT, PROMPTS, strict=True):
        row[: len(prompt)] = prompt

    def run(variables, tokens_BT, images_BMWWC):
        return layout.model.merge(variables)(tokens_BT, None, images_BMWWC)

    given = (variables, tokens_BT, images_BMWWC)
    program = layout.compile(run, *given, compiler_options=QUICK)
    ends = [len(prompt) for prompt in PROMPTS]
    for step in range(NEW):
        logits_BTV = np.asarray(program(variables, tokens_BT, images_BMWWC))
        for row, end, logits_TV in zip(tokens_BT, ends, logits_BTV, strict=True):
            row[end + step] = logits_TV[end + step - 1].argmax()
    return [row[end : end + NEW].tolist() for row, end in zip(tokens_BT, ends, strict=True)]


MESHES = [("1x1", "dp"), ("8", "fsdp"), ("data=2,seq=4", "fsdp_cp")]


@pytest.mark.parametrize(("mesh", "rules"), full_except(MESHES, fast=[], release=MESHES[:2]))
def test_answers_with_a_cache_are_those_without(mesh, rules, quick):
    """Rows with two pictures, none and one, at once; a generator compiled ahead reads them."""
    layout, variables = restored(mesh, rules)
    images = drawn(layout.config)
    ahead = Generator(layout, layout.variables(), Sampling(), (), layout.config.vocab_size)
    pictures = [{"images": x} for x in images]
    ahead.compile([len(prompt) for prompt in PROMPTS], NEW, pictures)
    generator = ahead.with_variables(variables)
    prompts = [np.array(prompt) for prompt in PROMPTS]
    found = np.stack(list(generator(prompts, NEW, pictures=pictures)), axis=1)
    assert found.tolist() == uncached()
    assert len(generator._compiled) == 2, "each program once, before there are variables"
    blank = [{"images": np.zeros_like(x)} for x in images]
    other = np.stack(list(generator(prompts, NEW, pictures=blank)), axis=1)
    assert other[1].tolist() == found[1].tolist()
    assert other.tolist() != found.tolist(), "the pictures matter"


# ---- how many answers are right -----------------------------------------------------------------


class Guesses:
    """A model that sees, whose likeliest tokens are given."""

    batch_axes = ("images",)
    config = Config.tiny()

    def __init__(self, guesses_BT):
        self.guesses_BT = guesses_BT

    def __call__(self, tokens_BT, segment_ids_BT, images=None):
        return jax.nn.one_hot(self.guesses_BT, 8)


def test_each_answer_counts_by_the_pictures_before_it_in_its_document():
    """Two documents in a row, whose first one has three answers; a wrong token makes its answer wrong."""
    begin = Config.tiny().picture_begin
    tokens = [begin, 1, 1, 1, begin, 1, 1, 1, 1, 1, 1, begin, 1, 1, 0, 0]
    targets = [-1, 2, 3, -1, -1, 4, -1, -1, 5, 6, -1, -1, 7, -1, -1, -1]
    wrong = [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0]
    segments = [1] * 10 + [2] * 4 + [0] * 2
    batch = {
        "tokens": np.array([tokens]), "targets": np.array([targets]),
        "segment_ids": np.array([segments]), "images": np.zeros((1, 3)),
    }  # fmt: skip
    guesses = np.where(wrong, 1, np.maximum(targets, 0))
    count = functools.partial(picture_answers.right_answers, Guesses(guesses[None]))
    sums = jax.jit(count, compiler_options=QUICK)(batch)
    found = {name: (float(right), float(count)) for name, (right, count) in sums.items()}
    assert found == {
        "right_0": (0, 0), "right_1": (2, 2), "right_2": (1, 2), "right_more": (0, 0),
    }  # fmt: skip


# ---- pictures of unequal sizes -------------------------------------------------------------------

UNEQUAL = dataclasses.replace(
    gemma4_vision.Config.tiny(), num_layers=2, tower_layers=1, sliding_window=3
)
GRIDS = [[(2, 3), (1, 4)], [], [(5, 1)]]  # of three rows' pictures


def of_squares() -> tuple[list[np.ndarray], list[dict[str, np.ndarray]]]:
    """(prompts, their pictures)."""
    random = np.random.default_rng(0)
    prompts, pictures = [], []
    for grids in GRIDS:
        tokens = [256, 7]
        for rows, columns in grids:
            tokens += [381, *[UNEQUAL.image_token] * (rows * columns), 382, 9]
        prompts.append(np.array(tokens, np.int32))
        shape = (len(grids), UNEQUAL.picture_tokens, UNEQUAL.square, UNEQUAL.square, 3)
        pictures.append(
            {
                "images": random.integers(0, 256, shape, np.uint8),
                "grids": np.array(grids, np.int32).reshape(-1, 2),
            }
        )
    return prompts, pictures


@pytest.mark.parametrize(
    "config",
    [Config.tiny(), UNEQUAL, dataclasses.replace(UNEQUAL, tower_layers=0)],
    ids=["gemma3", "gemma4", "gemma4 without a tower"],
)
def test_rows_and_prompts_have_the_same_pixels(config, tmp_path):
    """Of a tall picture, in which the order of rows and columns matters."""
    noise = np.random.default_rng(0).integers(0, 256, (90, 20, 3), np.uint8)
    PIL.Image.fromarray(noise).save(tmp_path / "a.png")
    row = {"prompt": "<image>?", "completion": "a", "images": ["a.png"]}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    rows = picture_answers.load(str(tmp_path / "rows.jsonl"), 64, config, BYTES, pack=False).train
    reader = picture_prompts.reader(config, BYTES)
    marked, pictures = picture_rows.with_marks(row, tmp_path, "here")
    prompt = reader.asked({"prompt": marked["prompt"]}, pictures, "here")
    example = rows.example(rows.rows[0])
    for name, array in reader.pictures(prompt, "here").items():
        np.testing.assert_array_equal(example[name], array)


@functools.cache
def answers(mesh: str, rules: str) -> list[list[int]]:
    prompts, pictures = of_squares()
    layout = make_layout(gemma4_vision.Gemma4Vision, UNEQUAL, make_mesh(mesh), rules)
    generator = Generator(layout, random_variables(layout), Sampling(), (), 257)
    return np.stack(list(generator(prompts, NEW, pictures=pictures)), axis=1).tolist()


def test_answers_about_pictures_of_unequal_sizes_are_those_without_a_cache(quick):
    layout = make_layout(gemma4_vision.Gemma4Vision, UNEQUAL, make_mesh("1x1"), "dp")
    model = layout.model.merge(random_variables(layout))
    prompts, pictures = of_squares()
    for prompt, shown, found in zip(prompts, pictures, answers("1x1", "dp"), strict=True):
        tokens_1T = np.zeros((1, 32), np.int32)
        tokens_1T[0, : len(prompt)] = prompt
        tokens_1T[0, len(prompt) : len(prompt) + NEW] = found
        seen = {name: x[None] for name, x in shown.items()} if len(shown["grids"]) else {}
        logits = np.asarray(model(tokens_1T, None, **seen))[0, :, :257]
        first = len(prompt) - 1
        assert logits[first : first + NEW].argmax(axis=-1).tolist() == found


@pytest.mark.parametrize(("mesh", "rules"), full_except(MESHES[1:], fast=[], release=MESHES[1:]))
def test_answers_about_pictures_of_unequal_sizes_are_one_device_s(mesh, rules, quick):
    assert answers(mesh, rules) == answers("1x1", "dp")


# ---- prompts -------------------------------------------------------------------------------------

K = picture_rows.OF_BYTES.around()


@dataclasses.dataclass(frozen=True)
class Source:
    """What `questions` reads of a checkpoint."""

    entry: str
    config: Config = dataclasses.field(default_factory=Config.small)

    @property
    def metadata(self) -> dict:
        return {"entry": self.entry, "config": dataclasses.asdict(self.config)}


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """The questions of these flags, with two pictures in the working folder."""
    monkeypatch.chdir(tmp_path)
    for name, shade in (("a.png", 10), ("b.png", 200)):
        PIL.Image.fromarray(np.full((8, 8), shade, np.uint8)).save(tmp_path / name)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")

    def asked(entry: str = "gemma3_vision", **flags) -> list[questions.Question]:
        given = Generate(restore_from="x", **flags)
        rows = questions.rows_to_answer(given)
        return questions.questions(given, rows, BYTES, Source(entry))

    return asked


def test_pictures_come_first_or_where_the_prompt_says(ask):
    (first,) = ask(image="a.png,b.png", prompt="Which?")
    assert first.tokens.tolist() == [256, *K, *K, *b"Which?"]
    assert first.pictures["images"][:, 0, 0, 0].tolist() == [10, 200]
    assert first.begins == "Which?"
    (placed,) = ask(image="b.png", prompt="Is <image>dark?")
    assert placed.tokens.tolist() == [256, *b"Is ", *K, *b"dark?"]
    (without,) = ask(prompt="Hi")
    assert without.tokens.tolist() == [256, *b"Hi"]
    assert without.pictures["images"].shape == (0, 8, 8, 1)


def test_rows_of_prompts_name_their_pictures(ask, tmp_path):
    inner = tmp_path / "rows"
    inner.mkdir()
    row = {"prompt": "<image>?", "image": "../b.png", "note": 3}
    (inner / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({"prompt": "Hi"}) + "\n")
    seen, text = ask(prompts="rows/rows.jsonl")
    assert seen.row == row, "as it is written to --out"
    assert seen.tokens.tolist() == [256, *K, *b"?"]
    assert seen.pictures["images"][:, 0, 0, 0].tolist() == [200]
    assert text.tokens.tolist() == [256, *b"Hi"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"image": "none.png", "prompt": "?"}, "--image=none.png: the picture none.png does not exist"),
        ({"image": "broken.png", "prompt": "?"}, "--image=broken.png: the picture broken.png can't be read"),
        ({"image": "a.png,b.png", "prompt": "<image>?"}, "--image=a.png,b.png has 2 pictures and 1 places"),
        ({"prompt": "<image>?"}, "--prompt has 0 pictures and 1 places"),
        ({"image": "a.png", "chat": True}, "^--image=a.png is for --prompt"),
        ({"image": "a.png", "prompts": "x.jsonl"}, "^--image=a.png is for --prompt"),
        ({"image": "a.png", "prompt": "?", "entry": "gemma3"},
         "^--image=a.png has pictures, and --restore_from=x is a 'gemma3' model, which sees none"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(ask, flags, said):
    with pytest.raises((UserError, DataError), match=said) as error:
        ask(**flags)
    assert "\n" not in str(error.value)


# ---- whole commands ------------------------------------------------------------------------------


def test_commands_read_pictures(tmp_path, inside, quick, monkeypatch):
    """recipes.generate answers about a picture; recipes.evaluate counts right answers of a file."""
    config = dataclasses.replace(Config.tiny(), num_layers=2, tower_layers=1)
    layout = make_layout(Gemma3Vision, config, make_mesh("1x1"))
    facts = checkpoint.metadata("gemma3_vision", layout, {}) | {"step": 0, "context": 48}
    facts["tokenizer"] = BYTES.sha256
    checkpoint.write(tmp_path / "model", random_variables(layout), facts, tokenizer=BYTES)
    PIL.Image.fromarray(np.full((9, 12, 3), 90, np.uint8)).save(tmp_path / "a.png")
    flags = (f"--restore_from={tmp_path / 'model'}", "--mesh=1x1")
    done = inside(
        "recipes.generate", *flags, f"--image={tmp_path / 'a.png'}", "--prompt=Hm", "--temperature=0",
        "--max_new_tokens=3",
    )  # fmt: skip
    assert (done.code, done.err) == (0, "")
    assert "Hm" in done.out
    rows = [{"prompt": f"<image>{i}", "completion": "ab", "image": "a.png"} for i in range(5)]
    rows.append({"prompt": "without", "completion": "abc"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = inside(
        "recipes.evaluate", *flags, f"--dataset={tmp_path / 'rows.jsonl'}", "--batch_size=4",
        f"--out={tmp_path / 'out.json'}",
    )  # fmt: skip
    assert (done.code, done.err) == (0, "")
    assert "Answers about one picture: 0.00% right, 0 of 5." in done.out
    assert "Answers about no picture: 0.00% right, 0 of 1." in done.out
    (figures,) = json.loads((tmp_path / "out.json").read_text())["datasets"].values()
    assert figures["bytes"] == 13
    assert figures["targets"] == 13
