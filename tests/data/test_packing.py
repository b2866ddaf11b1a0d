"""data/packing.py, data/batches.py: rows of whole documents, mixed from several sources."""

import dataclasses
import hashlib
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data import DataError, batches, corpus, packing, sources, text
from data.batches import held_out_batches, train_batches
from tests.support.quick import QUICK
from tests.support.small_tokenizers import small
from zoo.llama_relatives import Config, Transformer

pytestmark = pytest.mark.promise("packing")

SHARDS = (1, 2, 4)


def write(path, seed: int, count=300, longest=200) -> str:
    """Writes `count` documents of random words, most of them short, as JSON Lines."""
    rng = np.random.default_rng(seed)
    words = ["the", "License", "shall", "mean", "any", "Work", "naïve", "漢字\n"]
    lengths = 1 + (longest * rng.random(count) ** 4).astype(int)
    texts = [f"{seed} {i} " + " ".join(rng.choice(words, n)) for i, n in enumerate(lengths)]
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sources, "HELD_OUT", 0.1)
        yield [write(folder / f"{seed}.jsonl", seed, 200 * seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def packed(files):
    return text.load(files[1], seq_len=64, tokenizer=small(start=False))


@pytest.fixture(scope="module")
def mixed(files):
    names = f"{files[0]}@0.7,{files[1]}@0.3"
    return text.load(names, seq_len=64, tokenizer=small())


def split_of(file: str, tokenizer) -> corpus.Split:
    return corpus.prepare(*sources.find(file), tokenizer).train


# ---- best fit ------------------------------------------------------------------------------------


def slowly(sizes: np.ndarray, room: int) -> list[int]:
    """Room left in each row by best-fit decreasing, one piece at a time."""
    rows: list[int] = []
    for size in sorted(map(int, sizes), reverse=True):
        fits = [row for row, left in enumerate(rows) if left >= size]
        if fits:
            rows[min(fits, key=lambda row: rows[row])] -= size
        else:
            rows.append(room - size)
    return sorted(rows)


@pytest.mark.parametrize("room", [1, 7, 64])
@pytest.mark.parametrize("count", [0, 1, 50, 400])
def test_best_fit_is_what_a_piece_at_a_time_gives(room, count):
    for seed in range(5):
        sizes = np.random.default_rng(seed).integers(1, room + 1, count)
        row_of = packing.best_fit(sizes, room)
        rows = np.bincount(row_of, weights=sizes, minlength=0).astype(int)
        assert sorted(room - rows) == slowly(sizes, room)


@pytest.mark.parametrize("length", [1_024, 4_096])
def test_padding_of_the_default_corpus(length):
    data = text.load("stdlib", seq_len=length, pack="true")
    assert packing.padding(data.train) <= 0.001


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("block", [100, packing.BLOCK])
def test_every_token_but_the_first_of_a_document_is_a_target_once(
    files, start, block, tmp_path, monkeypatch
):
    monkeypatch.setattr(packing, "BLOCK", block)
    split, T = split_of(files[0], small(start)), 64
    made = packing.Packed(split, T, tmp_path / "index")
    bounds = np.append(split.starts, len(split.tokens))
    documents = [split.tokens[a:b].tolist() for a, b in itertools.pairwise(bounds)]
    found, cut = [], []
    for row in (made[i] for i in range(len(made))):
        assert {name: (x.shape, x.dtype) for name, x in row.items()} == dict.fromkeys(
            ("tokens", "targets", "segment_ids"), ((T,), np.dtype(np.int32))
        )
        ids = row["segment_ids"]
        used = int((ids > 0).sum())
        assert (ids[used:] == 0).all(), "padding is at the end"
        assert (row["targets"][used:] == -1).all()
        assert set(np.diff(ids[:used])) <= {0, 1}
        assert ids[0] == 1
        for number in range(1, int(ids.max()) + 1):
            here = np.flatnonzero(ids == number)
            tokens = [*row["tokens"][here].tolist(), int(row["targets"][here[-1]])]
            assert tokens[1:] == row["targets"][here].tolist()
            (found if tokens in documents else cut).append(tokens)
    whole = [one for one in documents if 1 < len(one) <= T + 1]
    assert sorted(found) == sorted(whole), "no document is cut that fits"
    long = sorted(one for one in documents if len(one) > T + 1)
    pieces = [one[i : i + T + 1] for one in long for i in range(0, len(one) - 1, T)]
    assert sorted(cut) == sorted(pieces), "a later piece begins with the last token before it"
    assert long, "some are too long"


@pytest.mark.promise("user-errors")
def test_an_index_that_can_not_be_kept_is_reported(tmp_path):
    (tmp_path / "file").touch()
    tokens, starts = np.arange(9, dtype=np.uint16), np.array([0])
    with pytest.raises(DataError, match=r"can't be written \(Not a directory\); make room, or set"):
        packing.Packed(corpus.Split(tokens, starts, starts, 0), 4, tmp_path / "file" / "index")


def test_documents_without_a_target_are_left_out(tmp_path):
    tokens, starts = np.arange(12, dtype=np.uint16), np.array([0, 0, 1, 5, 5, 11, 12])
    made = packing.Packed(corpus.Split(tokens, starts, starts, 0), 6, tmp_path / "a")
    assert [made[i]["targets"].tolist() for i in range(2)] == [
        [6, 7, 8, 9, 10, -1], [2, 3, 4, -1, -1, -1],
    ]  # fmt: skip
    assert len(made) == 2


def test_the_loss_of_packed_rows_is_that_of_the_documents_one_by_one(packed):
    config = dataclasses.replace(Config.tiny(), vocab_size=small(start=False).size)
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    graph, shapes = nnx.split(model)
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: rng.normal(0, 0.2, x.shape).astype(x.dtype), shapes)
    sums = jax.jit(
        lambda state, batch: jnp.stack(nnx.merge(graph, state).loss(**batch)[:2]),
        compiler_options=QUICK,
    )
    rows = packed.train.take(len(packed.train) - np.arange(1, 9))  # of the shortest documents
    ids = rows["segment_ids"]
    assert ids.max() > 3
    alone = [
        {name: np.where(ids[row] == number, rows[name][row], packed.filler[name]) for name in rows}
        for row in range(8)
        for number in range(1, ids[row].max() + 1)
    ]
    alone = [  # each at the beginning of its row, as if there were no other
        {name: np.roll(x, -np.argmax(one["segment_ids"] > 0)) for name, x in one.items()}
        for one in alone
    ]
    alone += [packed.filler] * (-len(alone) % 8)
    batches_ = [
        {name: np.stack([one[name] for one in alone[i : i + 8]]) for name in rows}
        for i in range(0, len(alone), 8)
    ]
    nats, count = np.sum([sums(state, batch) for batch in batches_], axis=0, dtype=np.float64)
    together = np.asarray(sums(state, rows), np.float64)
    assert count == together[1] > 300
    assert abs(nats / count - together[0] / count) < 1e-5


# ---- what does not fit ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "lost", "bytes_"),
    [  # START a b c … j are ten positions with the targets c … j; START x y are two, with x y
        (10, packing.Lost(0, 0, 10, 10), 10),
        (9, packing.Lost(1, 1, 10, 10), 9),
        (4, packing.Lost(1, 6, 10, 10), 4),
        (3, packing.Lost(1, 7, 10, 10), 3),
        (2, packing.Lost(1, 8, 10, 10), 2),
    ],
)
def test_what_a_run_says_it_lost(length, lost, bytes_, tmp_path):
    """Counts by hand, at and around the length of the longest row."""
    rows = [("ab", "cdefghij"), ("", "xy")]
    lines = [json.dumps({"prompt": one, "completion": other}) for one, other in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = text.load(
        str(tmp_path / "a.jsonl"), seq_len=length, eval_dataset=str(tmp_path / "a.jsonl")
    )
    assert data.train.lost == lost
    assert (
        data.held_out_bytes
        == bytes_
        == sum(int((data.held_out[i]["targets"] >= 0).sum()) for i in range(len(data.held_out)))
    )


@pytest.mark.parametrize("start", [True, False])
def test_bytes_of_answers_that_are_cut_or_dropped(start, tmp_path):
    """A cut may fall before an answer, within it or behind it; the space that begins it counts."""
    tokens, size = small(start), 0
    rows = [("the License " * i + "shall", " mean any Work" * 3) for i in range(20)]
    lines = [json.dumps({"prompt": one, "completion": other}) for one, other in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    name = str(tmp_path / "a.jsonl")
    length = 5 + len(tokens.encode([rows[0][0] + rows[0][1]])[0])
    kinds = set()
    for prompt, answer in rows:
        (ids,) = tokens.encode([prompt + answer])
        shown = tokens.decode(ids[: length + 1 - len(tokens.start)])
        kept = max(len(shown) - len(prompt), 0)
        kinds.add("none" if not kept else "some" if kept < len(answer) else "all")
        size += kept
    assert kinds == {"none", "some", "all"}
    data = text.load(name, seq_len=length, tokenizer=tokens, eval_dataset=name)
    assert data.held_out_bytes == size
    whole = text.load(name, seq_len=data.train.lost.longest, tokenizer=tokens, eval_dataset=name)
    assert whole.held_out_bytes == sum(len(answer) for _, answer in rows)
    assert whole.train.lost[:2] == (0, 0)


# ---- batches -------------------------------------------------------------------------------------


def digests(parts: list[list[batches.Example]]) -> list[str]:
    """Hashes each batch, joined from the rows of all processes."""
    whole = [
        {name: np.concatenate([part[name] for part in batch]) for name in batch[0]}
        for batch in zip(*parts, strict=True)
    ]
    ordered = [[batch[name].tobytes() for name in sorted(batch)] for batch in whole]
    return [hashlib.sha256(b"".join(one)).hexdigest() for one in ordered]


def take(data, count, **options):
    feed = iter(train_batches(data, 8, 3, **options))
    return [next(feed) for _ in range(count)]


@pytest.mark.parametrize("kind", ["packed", "mixed"])
def test_batches_are_the_same_cold_resumed_and_on_any_number_of_processes(kind, request):
    data = request.getfixturevalue(kind)
    cold = digests([take(data, 21)])
    assert len(set(cold)) == 21
    assert digests([take(data, 8, first=13)]) == cold[13:]
    for shards in SHARDS:
        mine = np.split(np.arange(8), shards)
        assert digests([take(data, 21, rows=one) for one in mine]) == cold
        held_out = [list(held_out_batches(data, 8, one)) for one in mine]
        assert digests(held_out) == digests([list(held_out_batches(data, 8))])


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, 1), (5, 2)])
def test_weights_are_shares_of_rows(files, weights):
    names = ",".join(f"{file}@{weight}" for file, weight in zip(files, weights, strict=True))
    data = text.load(names, seq_len=256, tokenizer=small())
    alone = [text.load(file, seq_len=256, tokenizer=small()).train for file in files]
    known = [{rows[i]["tokens"].tobytes() for i in range(len(rows))} for rows in alone]
    feed = iter(train_batches(data, 8, seed=1))
    rows = [row.tobytes() for _ in range(125) for row in next(feed)["tokens"]]
    for one, weight in zip(known, weights, strict=True):
        assert abs(sum(row in one for row in rows) / 1000 - weight / sum(weights)) < 0.01
    assert len(rows) > sum(map(len, alone)), "each begins again where it ends"
    assert known[0] <= set(rows)


def test_the_held_out_rows_of_a_mix_are_those_of_all_its_sources(files, mixed):
    alone = [text.load(file, seq_len=64, tokenizer=small()) for file in files]
    want = [one.held_out[i] for one in alone for i in range(len(one.held_out))]
    assert len(mixed.held_out) == len(want)
    for i, row in enumerate(want):
        for name, value in row.items():
            np.testing.assert_array_equal(mixed.held_out[i][name], value)
    assert mixed.held_out_bytes == sum(one.held_out_bytes for one in alone)


def test_facts_that_a_run_records_of_packed_and_mixed_text(files, packed, mixed):
    plain = text.load(files[1], seq_len=64)
    assert plain.facts.keys() == {"dataset", "seq_len", "fingerprint"}
    assert plain.config == {}
    assert packed.facts.keys() == plain.facts.keys() | {"tokenizer", "pack"}
    assert packed.config == {"vocab_size": small(start=False).size}
    other = text.load(f"{files[0]}@0.6,{files[1]}@0.4", seq_len=64, tokenizer=small())
    prints = [data.facts["fingerprint"] for data in (plain, packed, mixed, other)]
    assert len(set(prints)) == 4
    windows = text.load(files[1], seq_len=64, tokenizer=small(start=False), pack="false")
    assert "pack" not in windows.facts
    assert windows.facts["fingerprint"] == packed.facts["fingerprint"]


def test_windows_of_tokens_know_the_documents_and_one_document_needs_no_segments(files, tmp_path):
    tokenizer = small(start=False)
    data = text.load(files[0], seq_len=64, tokenizer=tokenizer, pack="false")
    split = split_of(files[0], tokenizer)
    for i in range(0, len(data.train), 5):
        row, at = data.train[i], i * 64 + np.arange(64)
        np.testing.assert_array_equal(row["tokens"], split.tokens[at])
        np.testing.assert_array_equal(row["targets"], split.tokens[at + 1])
        of = np.searchsorted(split.starts, at, side="right")
        assert (np.diff(row["segment_ids"]) == np.diff(of)).all()
    lines = [json.dumps({"text": letter * 700}) for letter in "ab"]
    (tmp_path / "two.jsonl").write_text("\n".join(lines))
    two = text.load(
        str(tmp_path / "two.jsonl"), seq_len=64, eval_dataset=str(tmp_path / "two.jsonl")
    )
    border = two.train[700 // 64]  # START, 700 times a, START, 700 times b
    assert border["segment_ids"].tolist() == [0] * 61 + [1] * 3
    assert border["tokens"].tolist() == [ord("a")] * 61 + [256] + [ord("b")] * 2
    (tmp_path / "one.txt").write_text("a book " * 2000)
    book = text.load(str(tmp_path / "one.txt"), seq_len=64)
    assert set(book.filler) == set(book.train[0]) == {"tokens", "targets"}
