"""data/captions.py: pictures with captions in words."""

import numpy as np
import pytest

from data import DataError, captions, images

pytestmark = pytest.mark.promise("batches")


def text(tokens_T) -> str:
    return bytes(tokens_T[tokens_T != captions.PADDING].tolist()).decode()


def test_a_caption_names_the_class_of_its_picture():
    data, plain = captions.load(), images.load()
    batch, original = (one.train.take(np.arange(300)) for one in (data, plain))
    np.testing.assert_array_equal(batch["image"], original["image"])
    found = [text(tokens) for tokens in batch["tokens"]]
    for caption, label in zip(found, batch["label"], strict=True):
        assert caption.split()[-1] == captions.DIGITS[label]
    assert {caption.rpartition(" ")[0] for caption in found} == {
        template.removesuffix("{}").strip() for template in captions.TEMPLATES
    }
    assert data.filler["label"] == -1
    assert "classes" not in data.config


def test_a_caption_depends_on_the_seed_the_picture_and_the_epoch_alone():
    train = captions.load(seed=3).train
    N = len(train)
    first, again, later = (
        train.take(numbers)["tokens"]
        for numbers in (np.arange(40), np.arange(40)[::-1], N + np.arange(40))
    )
    np.testing.assert_array_equal(first, again[::-1])
    assert (first != later).any()
    assert (first != captions.load(seed=4).train.take(np.arange(40))["tokens"]).any()


def test_a_caption_that_does_not_fit_is_refused():
    assert captions.captions("great_dane")[0] == "great dane"
    with pytest.raises(
        DataError, match="the caption 'seven' has 5 bytes, and the model reads 4; use"
    ):
        captions.class_tokens(["7"], captions.Texts(4))
