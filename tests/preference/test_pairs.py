"""Preference pairs: the forms in which they are published, what is cut, and mistakes in one line."""

import json

import numpy as np
import pytest

from data import DataError, pairs
from data.tokenizer import from_files
from tests.support import small_tokenizers

pytestmark = pytest.mark.promise("preferences")

QUESTION = {"role": "user", "content": "What is the sky?"}
BLUE = {"role": "assistant", "content": "It is blue."}
GREEN = {"role": "assistant", "content": "It is green."}
BRIEF = {"role": "system", "content": "Be brief."}
MESSAGES = ([QUESTION], [BLUE], [GREEN])
TEXTS = ("Q: sky?\n\nA:", " blue", " green")

# Rows as well-known datasets have them → (prompt, chosen, rejected).
FORMS = {
    "texts": ({"prompt": TEXTS[0], "chosen": TEXTS[1], "rejected": TEXTS[2]}, TEXTS),
    "texts with the prompt": (
        {"prompt": TEXTS[0], "chosen": TEXTS[0] + TEXTS[1], "rejected": TEXTS[0] + TEXTS[2]},
        TEXTS,
    ),
    "dialogues": (  # Anthropic's
        {"chosen": "\n\nHuman: Sky?\n\nAssistant: It is blue.",
         "rejected": "\n\nHuman: Sky?\n\nAssistant: It is green."},
        ("\n\nHuman: Sky?\n\nAssistant:", " It is blue.", " It is green."),
    ),
    "texts of shared lines": (
        {"chosen": "Sky?\nIt is blue", "rejected": "Sky?\nIt is green"},
        ("Sky?\n", "It is blue", "It is green"),
    ),
    "messages": ({"prompt": [QUESTION], "chosen": [BLUE], "rejected": [GREEN]}, MESSAGES),
    "messages with the prompt": (
        {"prompt": "What is the sky?", "chosen": [QUESTION, BLUE], "rejected": [QUESTION, GREEN]},
        MESSAGES,
    ),
    "a shared prompt": ({"chosen": [QUESTION, BLUE], "rejected": [QUESTION, GREEN]}, MESSAGES),
    "a text and messages": (
        {"prompt": "What is the sky?", "chosen": [BLUE], "rejected": [GREEN]}, MESSAGES,
    ),
    "messages and texts": (
        {"prompt": [QUESTION], "chosen": "It is blue.", "rejected": "It is green."}, MESSAGES,
    ),
    "single messages": ({"prompt": [QUESTION], "chosen": BLUE, "rejected": GREEN}, MESSAGES),
    "from and value": (
        {"conversations": [{"from": "human", "value": "What is the sky?"}],
         "chosen": {"from": "gpt", "value": "It is blue."},
         "rejected": {"from": "gpt", "value": "It is green."}},
        MESSAGES,
    ),
    "OpenAI's": (
        {"input": {"messages": [QUESTION]}, "preferred_output": [BLUE],
         "non_preferred_output": [GREEN]},
        MESSAGES,
    ),
    "a system's message": (
        {"system": "Be brief.", "question": "What is the sky?", "chosen": [BLUE],
         "rejected": [GREEN]},
        ([BRIEF, QUESTION], [BLUE], [GREEN]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_published_forms_are_one_pair(name):
    row, expected = FORMS[name]
    assert pairs.pair_of(row, "row 1") == expected


def test_texts_become_messages_with_chat():
    row = {"system": "Be brief.", "instruction": "What is the sky?", "chosen": "It is blue.",
           "rejected": "It is green."}  # fmt: skip
    assert pairs.pair_of(row, "row 1", chat=True) == ([BRIEF, QUESTION], [BLUE], [GREEN])


LABELLED = {
    "texts": (
        {"prompt": "Sky?", "completion": " Blue.", "label": True}, [("Sky?", " Blue.", True)],
    ),
    "0 and 1": (
        {"question": "Sky?", "response": " Pink.", "label": 0}, [("Sky?", " Pink.", False)],
    ),
    "messages": (
        {"system": "Be brief.", "prompt": [QUESTION], "completion": [BLUE], "label": True},
        [([BRIEF, QUESTION], [BLUE], True)],
    ),
    "a prompt in front": (
        {"completion": [QUESTION, GREEN], "label": False}, [([QUESTION], [GREEN], False)],
    ),
    "a pair": (
        {"prompt": "Sky?", "chosen": " Blue.", "rejected": " Pink."},
        [("Sky?", " Blue.", True), ("Sky?", " Pink.", False)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LABELLED)
def test_rows_and_pairs_are_labelled_answers(name):
    row, expected = LABELLED[name]
    assert [x[:3] for x in pairs._labelled(row, "row 1", chat=False)] == expected


def test_a_labelled_answer_is_beside_the_next_ones(tmp_path):
    rows = [
        {"prompt": f"{n:02}, ", "completion": f"{n:02}!", "label": n % 3 == 0} for n in range(40)
    ]
    data = pairs.load(write(tmp_path / "labelled.jsonl", rows), 12, labelled=True)
    assert (len(data.train), len(data.held_out)) == (38, 2)
    batch = take(data.train, *range(38))

    def answers(prefix: str) -> list[int]:
        targets = batch[f"{prefix}targets"]
        return [int(bytes(row[row >= 0].tolist())[:2]) for row in targets]

    def prompts(prefix: str) -> list[int]:
        return [int(bytes(row[1:3].tolist())) for row in batch[f"{prefix}tokens"]]

    numbers = answers("")
    assert prompts("") == prompts("rejected_") == numbers
    assert answers("rejected_") == [(n + 1) % 40 for n in numbers]
    assert batch["label"].tolist() == [n % 3 == 0 for n in numbers]
    rows[0]["label"] = False
    other = pairs.load(write(tmp_path / "labelled.jsonl", rows), 12, labelled=True)
    assert other.facts["fingerprint"] != data.facts["fingerprint"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a", "completion": "b", "label": "yes"},
            "has label 'yes'; use true for a good",
        ),
        (
            {"prompt": "a", "completion": " ", "label": True},
            "has an empty completion; remove the row",
        ),
        ({"completion": "b", "label": True}, "has an empty prompt; remove the row"),
        ({"prompt": "a", "completion": "b"}, "has no column 'chosen'"),
    ],
)
def test_a_mistake_in_a_labelled_answer_names_its_row(row, message):
    with pytest.raises(DataError, match=f"row 7 {message}"):
        pairs._labelled(row, "row 7", chat=False)


MISTAKES = {
    "no rejected": ({"prompt": "a", "chosen": "b"}, "has no column 'rejected'; a row has"),
    "no answers": ({"text": "a"}, "has no column 'chosen'; a row has a prompt, and"),
    "null": ({"prompt": "a", "chosen": "b", "rejected": None}, "has null in 'rejected'; a row has"),
    "no prompt": ({"prompt": None, "chosen": "b", "rejected": "c"}, "has null in 'prompt'; fill it"),
    "no object": ([1], "has no column 'chosen'; a row has"),
    "empty": ({"prompt": "a", "chosen": " ", "rejected": "b"}, "has an empty chosen answer; remove"),
    "no messages": (
        {"prompt": [QUESTION], "chosen": [BLUE], "rejected": []},
        "has an empty rejected answer; remove",
    ),
    "equal": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "has equal chosen and rejected"),
    "mixed": ({"prompt": "a", "chosen": "b", "rejected": [GREEN]}, "mixes a text and messages in"),
    "a number": ({"prompt": "a", "chosen": 1, "rejected": "b"}, "'chosen' is a number, not a list"),
    "a silent message": (
        {"prompt": [QUESTION], "chosen": [BLUE], "rejected": [{"role": "assistant", "content": ""}]},
        "has no message in which the assistant says something",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_names_its_row(name, tmp_path):
    row, message = MISTAKES[name]
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, (good, row))))
    with pytest.raises(DataError) as error:
        pairs.load(str(file), 64)
    assert f"{file.name} line 2" in str(error.value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def take(pairs, *numbers: int) -> dict[str, np.ndarray]:
    return pairs.take(np.array(numbers))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_only_answers_are_targets_and_a_row_is_a_pair(tmp_path):
    rows = [{"prompt": f"{n}, ", "chosen": "yes", "rejected": "no!!"} for n in range(40)]
    data = pairs.load(write(tmp_path / "pairs.jsonl", rows), 12)
    assert len(data.train), len(data.held_out) == (38, 2)
    batch = take(data.train, *range(len(data.train)))
    for n in range(len(data.train)):
        for prefix, answer in (("", b"yes"), ("rejected_", b"no!!")):
            tokens, targets = batch[f"{prefix}tokens"][n], batch[f"{prefix}targets"][n]
            assert bytes(targets[targets >= 0].tolist()) == answer
            begin = int(np.flatnonzero(targets >= 0)[0])
            np.testing.assert_array_equal(
                tokens[begin + 1 : begin + len(answer)], list(answer[:-1])
            )
            assert tokens[0] == 256
            assert bytes(tokens[1 : begin + 1].tolist()).endswith(b", ")
    both = take(data.train, 0)["tokens"], take(data.held_out, 0)["tokens"]
    assert not np.array_equal(*both)
    filler = {name: rows[None] for name, rows in data.filler.items()}
    assert {k: v.shape for k, v in filler.items()} == {k: v[:1].shape for k, v in batch.items()}


def test_no_prompt_is_on_both_sides(tmp_path):
    rows = [{"prompt": f"{n % 10}, ", "chosen": f"yes {n}", "rejected": "no"} for n in range(40)]
    data = pairs.load(write(tmp_path / "pairs.jsonl", rows), 12)
    prompts = [
        {int(take(x, n)["tokens"][0, 1]) for n in range(len(x))}
        for x in (data.train, data.held_out)
    ]
    assert not prompts[0] & prompts[1]
    assert (len(data.train), len(data.held_out)) == (36, 4)


def test_truncation_is_counted_and_told(tmp_path):
    rows = [{"prompt": "p", "chosen": "abcdefgh", "rejected": "xy"}] * 2
    rows += [{"prompt": "p", "chosen": "abcd!", "rejected": "abcd?"}]  # alike when cut
    rows += [{"prompt": "p" * 9, "chosen": "a", "rejected": "b"}]  # nothing left
    path = write(tmp_path / "pairs.jsonl", rows)
    held_out = write(tmp_path / "held_out.jsonl", rows[:1])
    data = pairs.load(path, 5, eval_dataset=held_out)
    assert len(data.train) == 2
    told = next(note for note in data.notes if note.startswith("warning"))
    # Kept: abcd and xy, twice; lost: 2 · 4 and the two pairs left out, 10 + 2.
    assert told == (
        "warning: 6 of 8 answers are cut at --seq_len=5 and 2 pairs left out, which loses 20 of 32 tokens; "
        "--seq_len=10 keeps all."
    )
    assert [note for note in data.notes if note.startswith("Training")] == [
        "Training data: 2 pairs, 12 tokens of answers."
    ]
    with pytest.raises(DataError, match="--seq_len=10 keeps all whole"):
        pairs.load(path, 1, eval_dataset=held_out)


def test_messages_go_through_the_chat_template(tmp_path):
    tokenizer = from_files(small_tokenizers.byte_level())
    prompts = [{"role": "user", "content": f"{n}?"} for n in range(3)]
    rows = [{"prompt": [prompt], "chosen": [BLUE], "rejected": [GREEN]} for prompt in prompts]
    data = pairs.load(write(tmp_path / "pairs.jsonl", rows), 64, tokenizer)
    row = {name: x[0] for name, x in take(data.train, 0).items()}
    for prefix, answer in (("", BLUE), ("rejected_", GREEN)):
        targets = row[f"{prefix}targets"]
        assert tokenizer.decode(targets[targets >= 0]).strip() == answer["content"]
        count = int((targets >= 0).nonzero()[0][-1]) + 1
        rendered = [tokenizer.render([prompt, answer], False) for prompt in prompts]
        whole = [*row[f"{prefix}tokens"][:count], targets[count - 1]]
        found = tokenizer.encode_rendered
        assert any(list(found(text))[: len(whole)] == whole for text in rendered)


def test_parquet_and_json_lines_agree(tmp_path):
    from datasets import Dataset

    rows = [{"prompt": f"{n}, ", "chosen": "yes", "rejected": "no"} for n in range(5)]
    Dataset.from_list(rows).to_parquet(tmp_path / "pairs.parquet")
    write(tmp_path / "pairs.jsonl", rows)
    found = [
        pairs.load(str(tmp_path / f"pairs.{kind}"), 12).facts["fingerprint"]
        for kind in ("jsonl", "parquet")
    ]
    assert found[0] == found[1]


def test_made_pairs_differ_in_swapped_letters():
    made = pairs.swap_letters("def letters(of, words): 1234", np.random.default_rng(0))
    assert made != "def letters(of, words): 1234"
    assert sorted(made) == sorted("def letters(of, words): 1234")
    assert made.endswith("): 1234")
