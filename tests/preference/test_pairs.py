"""Preference pairs: the forms in which they are published, what is cut, and mistakes in one line."""

import csv
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


# ---- answers are whole, and prompts end where tokens end -----------------------------------------


def answers(data, tokenizer=None) -> dict[str, tuple[str, str]]:
    """Prompt → (chosen, rejected) of all rows, as text."""
    decode = (tokenizer or from_files({})).decode
    shown = {}
    for part in (data.train, data.held_out):
        batch = take(part, *range(len(part)))
        for n in range(len(part)):
            begin = int(np.flatnonzero(batch["targets"][n] >= 0)[0])
            sides = [batch[f"{prefix}targets"][n] for prefix in ("", "rejected_")]
            prompt = decode(batch["tokens"][n, : begin + 1])
            shown[prompt] = tuple(decode(side[side >= 0]) for side in sides)
    return shown


def test_an_answer_to_a_message_is_whole(tmp_path):
    tokenizer = from_files(small_tokenizers.byte_level())
    rows = [
        {
            "prompt": f"Hello {n}",
            "chosen": f"Hello {n}! How can I help?",
            "rejected": f"Hello {n} no",
        }
        for n in range(3)
    ]
    path = write(tmp_path / "pairs.jsonl", rows)
    data = pairs.load(path, 128, tokenizer, as_chat=True)
    shown = answers(data, tokenizer)
    assert {chosen for chosen, _ in shown.values()} == {row["chosen"] for row in rows}
    assert any("all answers of 3 rows begin with their prompt" in note for note in data.notes)


@pytest.mark.parametrize("others", [0, 1])
def test_a_prompt_is_cut_off_texts_if_all_rows_begin_with_it(others, tmp_path):
    rows = [{"prompt": f"{n}: ", "chosen": f"{n}: yes", "rejected": f"{n}: no"} for n in range(9)]
    rows += [{"prompt": "Hello", "chosen": "Oh", "rejected": "Hello"}] * others
    shown = answers(pairs.load(write(tmp_path / "pairs.jsonl", rows), 32))
    assert shown["3: "] == (("3: yes", "3: no") if others else ("yes", "no"))


def test_a_prompt_is_cut_only_at_the_end_of_a_token(tmp_path):
    tokenizer = from_files(small_tokenizers.byte_level())
    rows = [
        {"prompt": p, "chosen": "transformer", "rejected": "transforms"}
        for p in ("transf", "trans")
    ]
    assert not pairs._begin_with_prompts([("", row) for row in rows], False, tokenizer)


def test_a_prompt_may_end_in_a_space(tmp_path):
    """It is learned with both answers, as tokens have it."""
    tokenizer = from_files(small_tokenizers.metaspace())
    rows = [{"prompt": f"Of {n}: ", "chosen": "the work", "rejected": "this"} for n in range(4)]
    shown = answers(pairs.load(write(tmp_path / "pairs.jsonl", rows), 64, tokenizer), tokenizer)
    assert [answer.strip() for answer in shown["Of 1:"]] == ["the work", "this"]
    assert len(shown) == 4


def test_messages_of_a_csv_are_json(tmp_path):
    tokenizer = from_files(small_tokenizers.byte_level())
    rows = [
        {
            "prompt": [{"role": "user", "content": f'"{n}"?\n'}],
            "chosen": [BLUE],
            "rejected": [GREEN],
        }
        for n in range(5)
    ]
    as_text = [{name: json.dumps(value) for name, value in row.items()} for row in rows]
    with (tmp_path / "pairs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(as_text)
    write(tmp_path / "pairs.jsonl", rows)
    prints = [
        pairs.load(str(tmp_path / f"pairs.{kind}"), 64, tokenizer).facts["fingerprint"]
        for kind in ("csv", "jsonl")
    ]
    assert prints[0] == prints[1]
    with pytest.raises(DataError, match=r"row 1 has messages in 'prompt' as text that is not JSON"):
        pairs.pair_of({"prompt": str([QUESTION]), "chosen": "a", "rejected": "b"}, "row 1")
    for text in ('{"role": "admin", "content": "x"}', "[1, 2]", "[a] note", '{"from": "Rome"}'):
        row = {"prompt": "Write JSON", "chosen": text, "rejected": "b"}
        assert pairs.pair_of(row, "row 1") == ("Write JSON", text, "b")


# ---- labelled answers ----------------------------------------------------------------------------


def test_labels_of_a_csv_are_text(tmp_path):
    labels = ["True", "False", "1", "0", "true", "FALSE", "1.0", "0.0"] * 3
    lines = [f"{n}?,yes {n},{label}" for n, label in enumerate(labels)]
    (tmp_path / "a.csv").write_text("\n".join(["prompt,completion,label", *lines]))
    data = pairs.load(str(tmp_path / "a.csv"), 32, labelled=True)
    found = [take(part, *range(len(part)))["label"].sum() for part in (data.train, data.held_out)]
    assert sum(found) == 12
    for label in ("yes", "2", "", "nan"):
        with pytest.raises(DataError, match="row 1 has label"):
            pairs._labelled({"prompt": "a", "completion": "b", "label": label}, "row 1", chat=False)


@pytest.mark.parametrize("form", ["pairs", "answers", "scattered"])
def test_z_is_of_answers_to_other_prompts(form, tmp_path):
    rows = [{"prompt": f"{n:02}?", "chosen": f"{n:02}+", "rejected": f"{n:02}-"} for n in range(10)]
    if form != "pairs":
        rows = [
            {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
            for row in rows
            for side in ("chosen", "rejected")
        ]
        rows += rows[:3] if form == "answers" else []
        rows = rows if form == "answers" else [*rows[::2], *rows[1::2]]
    data = pairs.load(write(tmp_path / "a.jsonl", rows), 16, labelled=True)
    seen = 0
    for part in (data.train, data.held_out):
        batch = take(part, *range(len(part)))
        for n in range(len(part)):
            answer, other = (batch[f"{side}targets"][n] for side in ("", "rejected_"))
            prompts = [bytes(batch[f"{side}tokens"][n, 1:4].tolist()) for side in ("", "rejected_")]
            assert prompts[0] == prompts[1], "as if it answered the row's prompt"
            texts = [bytes(side[side >= 0].tolist()).decode() for side in (answer, other)]
            assert prompts[0].decode().startswith(texts[0][:2])
            assert texts[0][:2] != texts[1][:2]
            seen += 1
    assert seen == (23 if form == "answers" else 20)
    assert not any("z of the loss" in note for note in data.notes)


def test_one_prompt_has_a_z_of_its_own_answers(tmp_path):
    rows = [{"prompt": "a", "completion": f"{n}", "label": n % 2 == 0} for n in range(4)]
    path = write(tmp_path / "a.jsonl", rows)
    data = pairs.load(path, 8, eval_dataset=path, labelled=True)
    assert any("have one prompt, so z of the loss" in note for note in data.notes)


@pytest.mark.parametrize("label", [True, False])
def test_answers_of_one_label_are_refused(label, tmp_path):
    rows = [{"prompt": f"{n}", "completion": "b", "label": label} for n in range(40)]
    path = write(tmp_path / "a.jsonl", rows)
    counts = (38, 0) if label else (0, 38)
    with pytest.raises(DataError, match="has {} good and {} bad answers".format(*counts)):
        pairs.load(path, 8, labelled=True)
    other = write(tmp_path / "b.jsonl", [row | {"label": not label} for row in rows])
    with pytest.raises(DataError, match="40 good and 0" if label else "0 good and 40"):
        pairs.load(path, 8, eval_dataset=other, labelled=True)


def test_columns_of_pairs_that_nothing_reads_are_named(tmp_path):
    rows = [{"prompt": f"{n}", "chosen": "b", "rejected": "c", "score": n} for n in range(4)]
    data = pairs.load(write(tmp_path / "a.jsonl", rows), 8)
    assert "Columns that are not used: 1 ('score')." in data.notes
