"""data/masked.py: which tokens are masked, and how."""

import json

import numpy as np
import pytest

from data import DataError, masked, text
from data.batches import held_out_batches, train_batches
from data.tokenizer import START, from_files
from tests.conftest import ROOT
from tests.support import small_tokenizers

pytestmark = pytest.mark.promise("batches")

LICENCE = str(ROOT / "LICENSE")


def load(seed: int = 0, **options):
    return masked.load(LICENCE, seq_len=64, seed=seed, **options)


def test_a_seventh_is_a_target_and_of_these_a_tenth_stays_and_a_tenth_is_random():
    masks, plain = load(), text.load(LICENCE, seq_len=64)
    numbers = np.arange(20 * len(plain.train))  # twenty epochs
    batch, original = masks.train.take(numbers), plain.train.take(numbers % len(plain.train))
    chosen = batch["targets"] >= 0
    assert chosen.mean() == pytest.approx(0.15, abs=0.003)
    np.testing.assert_array_equal(batch["targets"][chosen], original["tokens"][chosen])
    np.testing.assert_array_equal(batch["tokens"][~chosen], original["tokens"][~chosen])
    shown, wanted = batch["tokens"][chosen], batch["targets"][chosen]
    is_mask = shown == masked.MASK
    assert is_mask.mean() == pytest.approx(0.8, abs=0.01)
    assert (shown == wanted).mean() == pytest.approx(0.1, abs=0.01)
    others = shown[~is_mask & (shown != wanted)]
    assert set(others) == set(range(START)), "random tokens are all bytes"
    assert START not in wanted, "the start of a document is never masked"


def test_a_mask_depends_on_the_seed_the_row_and_the_epoch_alone():
    data = load()
    N = len(data.train)
    rows = data.train.take(np.array([3, 3 + N, 5]))["targets"]
    np.testing.assert_array_equal(rows[2], data.train.take(np.array([5]))["targets"][0])
    assert not np.array_equal(rows[0], rows[1]), "another epoch"
    assert not np.array_equal(rows[0], load(seed=1).train.take(np.array([3]))["targets"][0])
    same = [next(iter(held_out_batches(load(seed=s), 2)))["targets"] for s in (0, 1)]
    np.testing.assert_array_equal(*same)


def test_processes_that_read_parts_of_a_batch_see_the_same_masks():
    whole = iter(train_batches(load(), 8, seed=3, first=40))
    parts = [
        iter(train_batches(load(), 8, seed=3, first=40, rows=np.array(rows)))
        for rows in ([0, 1, 4, 5], [2, 3, 6, 7])
    ]
    for _ in range(3):
        batch, (first, second) = next(whole), map(next, parts)
        for name, values in batch.items():
            np.testing.assert_array_equal(values[[0, 1, 4, 5]], first[name])
            np.testing.assert_array_equal(values[[2, 3, 6, 7]], second[name])


def test_a_tokenizer_names_its_mask_token():
    files = dict(small_tokenizers.byte_level())
    with pytest.raises(DataError, match=r"names no mask_token in its tokenizer_config\.json; use"):
        load(tokenizer=from_files(files))
    config = json.loads(files["tokenizer_config.json"]) | {"mask_token": "<|im_start|>"}
    tokenizer = from_files(files | {"tokenizer_config.json": json.dumps(config).encode()})
    rows = load(tokenizer=tokenizer).train
    batch = rows.take(np.arange(len(rows)))
    shown = batch["tokens"][batch["targets"] >= 0]
    assert (shown == 1).mean() > 0.6
    assert not {0, 1, 2} & {*batch["targets"][batch["targets"] >= 0]}, "control tokens"
    padding = batch["segment_ids"] == 0
    assert padding.any()
    assert (batch["targets"][padding] == -1).all()
