"""recipes.evaluate --labels: pictures classified by captions of their classes.

Its accuracy is that of the run that trained the model.
"""

import json

import numpy as np
import PIL.Image
import pytest

from data import captions
from data.captions import Texts
from recipes.common import checkpoint
from recipes.common.checkpoint import card
from recipes.common.runtime.errors import UserError
from recipes.common.tasks import zero_shot
from tests.support.golden_folders import GOLDEN
from tests.support.quick import quick as quick
from zoo.siglip import Config

pytestmark = pytest.mark.promise("evaluation")


@pytest.fixture
def pets(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for i in range(10):
            PIL.Image.new("L", (8, 8), i).save(tmp_path / "pets" / name / f"{i}.png")
    return tmp_path / "pets"


def test_labels_are_names_or_a_file_of_them(tmp_path):
    (tmp_path / "names.txt").write_text("Great Dane\n\nred, or brown fox\n")
    assert zero_shot.read_labels(str(tmp_path / "names.txt")) == ["Great Dane", "red, or brown fox"]
    assert zero_shot.read_labels("cat, dog") == ["cat", "dog"]
    with pytest.raises(UserError, match="--labels=cat has 1 names of classes; use two or more"):
        zero_shot.read_labels("cat")
    with pytest.raises(UserError, match="--labels=a,b,a has 'a' twice; remove one"):
        zero_shot.read_labels("a,b,a")


def test_templates_may_be_a_file_of_captions_with_commas(tmp_path):
    lines = ["a photo of {}, a type of food.", "a photo of a {}, a type of pet."]
    (tmp_path / "food.txt").write_text("\n".join(["", *lines, ""]))
    assert zero_shot.read_templates(str(tmp_path / "food.txt")) == lines
    assert zero_shot.read_templates("a {}, the {}") == ["a {}", "the {}"]
    assert zero_shot.read_templates("") == []
    with pytest.raises(UserError, match=r"'a type of food\.' without {}.* into a file"):
        zero_shot.read_templates(lines[0])


def test_lists_longer_than_a_file_s_name_are_lists():
    names = [f"a class of number {n}" for n in range(300)]
    assert zero_shot.read_labels(",".join(names)) == names


def test_templates_say_the_name_of_a_class():
    assert captions.captions("great_dane", ["a {}.", "no {}"]) == ["a great dane.", "no great dane"]
    rows = captions.class_tokens(["ox"], Texts(6), ["{}", "an {}"])
    assert [bytes(row[row > 0].tolist()) for row in rows[0]] == [b"ox", b"an ox"]


def test_all_pictures_or_those_held_out_have_the_numbers_of_their_labels(pets):
    names = ["fox", "dog", "cat"]
    every = zero_shot.pictures(str(pets), names, Config.tiny(), "all")
    held_out = zero_shot.pictures(str(pets), names, Config.tiny(), "held_out")
    assert [len(data.held_out) for data in every] == [18, 2]
    assert [len(data.held_out) for data in held_out] == [2]
    labels = [data.held_out.take(np.arange(len(data.held_out)))["label"] for data in every]
    assert np.bincount(np.concatenate(labels)).tolist() == [0, 10, 10]
    with pytest.raises(UserError, match="has class 'dog', which --labels lacks; add it"):
        zero_shot.pictures(str(pets), ["fox", "cat"], Config.tiny(), "all")


def test_columns_of_tables_have_names(tmp_path):
    rows = [{"photo": [[i, 9], [9, 9]], "kind": i % 2} for i in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="--image_column to one of 'photo', 'kind'"):
        zero_shot.pictures(str(tmp_path), ["1", "0"], Config.tiny(), "all")
    parts = zero_shot.pictures(str(tmp_path), ["1", "0"], Config.tiny(), "all", "photo", "kind")
    labels = [data.held_out.take(np.arange(len(data.held_out)))["label"] for data in parts]
    assert np.bincount(np.concatenate(labels)).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--labels=cat,dog"], "--labels needs --dataset=PICTURES, and neither --tasks nor --weights"),
        (["--labels=cat,dog", "--dataset=x", "--restore_from=mlp.digits"], "--labels is for models of two towers, and this is a 'mlp' model"),
        (["--labels=cat,dog", "--dataset=x", "--templates=a {},no"], "--templates has 'no' without {} for a class's name; add it"),
        (["--labels=cat,dog", "--dataset=x", "--tokenizer=bytes"], "the model has 41 tokens, but the tokenizer bytes has 257; use"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(flags, message, inside):
    done = inside("recipes.evaluate", f"--restore_from=hf:{GOLDEN / 'clip'}", *flags)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert done.err.startswith(f"error: {message}")


@pytest.mark.promise("published")
def test_held_out_digits_are_sorted_by_words_as_in_the_published_run(inside, quick, tmp_path):
    """By rules and on a mesh that the run did not have."""
    flags = ("--restore_from=siglip.digits", "--dataset=digits", "--part=held_out", "--mesh=2x2")
    out = tmp_path / "figures.json"
    done = inside("recipes.evaluate", *flags, "--labels=0,1,2,3,4,5,6,7,8,9", f"--out={out}")
    assert (done.code, done.err) == (0, "")
    found = json.loads(out.read_text())["datasets"]["digits"]
    assert found["accuracy"] >= 0.95
    metadata = checkpoint.find("siglip.digits", hash_files=False).metadata
    facts = metadata["published"]
    assert found["accuracy"] == pytest.approx(facts["held_out"]["accuracy"], abs=1e-6)
    assert 'pipeline_tag: "zero-shot-image-classification"' in card.for_hub("x", metadata, facts)
