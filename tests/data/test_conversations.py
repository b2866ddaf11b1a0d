"""data/conversations.py: only the assistant's text and stop token are learned."""

import csv
import functools
import itertools
import json
import re

import numpy as np
import pytest
from tokenizers.decoders import DecodeStream

from data import DataError, chat, conversations, corpus, packing, sources, text, tokenizer
from data.batches import held_out_batches, train_batches
from data.tokenizer import BYTES, Tokenizer
from recipes import moe, transformer
from recipes.common.language import sample
from recipes.common.runtime.flags import parse
from tests.support import small_tokenizers
from tests.support.quick import quick as quick
from tests.support.runs import TINY, records
from tests.support.small_tokenizers import MISTRAL

pytestmark = pytest.mark.promise("chats")

CHATS = small_tokenizers.chats()


def said(*turns: str, system: str = "") -> list[dict[str, str]]:
    """Messages of a user and an assistant in turn."""
    roles = ("user", "assistant")
    made = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return [{"role": "system", "content": system}, *made] if system else made


@functools.cache
def made(name: str) -> Tokenizer:
    return tokenizer.from_files(CHATS[name], name)


def documents(row: dict, tokens: Tokenizer) -> list[conversations.Document]:
    kind = conversations.form(row, "text")
    return conversations.documents(conversations.checked(row, kind, "line 1"), tokens, "line 1")


def marked(document: conversations.Document, tokens: Tokenizer) -> str:
    """The document's text, control tokens included; targets are between ⟦ and ⟧."""
    stream, shown, inside = DecodeStream(skip_special_tokens=False), "", False
    for token, target in zip(document.tokens, document.targets, strict=True):
        if target != inside:
            shown, inside = shown + "⟧⟦"[int(target)], target
        shown += stream.step(tokens._library, int(token)) or ""
    return shown + ("⟧" if inside else "")


# ---- masks ---------------------------------------------------------------------------------------

ROWS = {
    "one turn": {"messages": said("Hi", "Hello.")},
    "two turns, the user last": {"messages": said("Hi", "Hello.", "So?", "Yes\n", "Bye")},
    "its prompt is not learned": {"prompt": said("Hi", "No."), "completion": said("So?", "Yes")},
}
ROWS["its prompt is not learned"]["completion"] = said("", "Yes")[1:]
ROWS["its prompt is not learned"]["prompt"] = said("Hi", "No.", "So?")
SYSTEM = {"a system message": {"messages": said("1 + 1?", "2", system="Count.")}}
THINKS = {"thoughts": {"messages": said("Hi", "<think>\nA.\n</think>\n\nB.", "So?", "C.")}}
PLAIN = {
    "a prompt and a completion": {"prompt": "Paris is in", "completion": " France."},
    "control tokens are text": {"prompt": "", "completion": "a<|im_end|></s>b"},
}
GOLDEN = {
    "chatml": ROWS | SYSTEM | PLAIN,
    "llama3": ROWS | SYSTEM,
    "mistral": ROWS | PLAIN,
    "qwen3": {k: ROWS[k] for k in ("one turn", "two turns, the user last")} | THINKS,
    "harmony": ROWS | SYSTEM,
}


def test_targets_are_as_reviewed(golden):
    """The golden was checked by hand against the rule in data/conversations.py."""
    shown = [
        f"==== {name}: {what}\n{marked(one, made(name))}\n"
        for name, rows in GOLDEN.items()
        for what, row in rows.items()
        for one in documents(row, made(name))
    ]
    golden("conversations.txt", "\n".join(shown))


@pytest.mark.parametrize("name", CHATS)
def test_a_target_follows_what_the_model_is_given_when_it_answers(name):
    """The tokens before each turn's targets are those that --chat makes of the earlier messages."""
    tokens, messages = made(name), said("Hi", "Hello.", "So?", "Yes")
    found = documents({"messages": messages}, tokens)
    for turn, after in ((1, "Hello."), (3, "Yes")):
        given = tokens.encode_rendered(
            tokens.render(messages[:turn], True, today=chat.TRAINING_DAY)
        ).tolist()
        answers = []
        for one in found:
            if one.tokens[: len(given)].tolist() == given and one.targets[len(given)]:
                run = np.argmin([*one.targets[len(given) :], False])
                answers.append(one.tokens[len(given) : len(given) + run])
        assert len(answers) == 1
        shown = tokens._library.decode(answers[0].tolist(), skip_special_tokens=False)
        assert after in shown
        assert answers[0][-1] in tokens.end, "its stop token"
    assert sum(conversations.target_bytes(one, tokens) for one in found) >= len("Hello.Yes")


def test_bytes_behind_targets_are_those_of_the_answers():
    row = {"messages": said("naïve?", "naïve 🙂", "漢", "字")}
    for name in ("chatml", "llama3", "mistral"):
        (one,) = documents(row, made(name))
        assert conversations.target_bytes(one, made(name)) == len("naïve 🙂字".encode())
    (one,) = documents({"prompt": "é", "completion": "ç"}, BYTES)
    assert (one.tokens.tolist(), one.targets.tolist()) == (
        [256, *"éç".encode()],
        [False] * 3 + [True] * 2,
    )
    assert conversations.target_bytes(one, BYTES) == 2


WITHOUT_CONTROL = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def test_a_turn_ends_where_nothing_ends_a_text():
    """A turn ends at its last control token, or else at its last token."""
    files = small_tokenizers.with_template(small_tokenizers.byte_level(), WITHOUT_CONTROL)
    (one,) = documents({"messages": said("a", "b")}, tokens := tokenizer.from_files(files, "plain"))
    assert marked(one, tokens) == "user: a\nassistant: ⟦b\n⟧"
    files = small_tokenizers.byte_level() | {"generation_config.json": b'{"eos_token_id": 0}'}
    (one,) = documents({"messages": said("a", "b")}, tokens := tokenizer.from_files(files, "other"))
    assert marked(one, tokens).endswith("assistant\n⟦b<|im_end|>⟧"), "<|endoftext|> ends a text"


ONLY_WHEN_ASKED = small_tokenizers.TEMPLATE.replace("loop.first and", "add_generation_prompt and")


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("mistral", {"messages": said("a", "b", system="c")}, "line 1: the chat template of mistral can't be rendered (Roles must alternate user/assistant)"),
        ("chatml", {"messages": said("", "b")[1:]}, "line 1: the chat template of chatml renders message 1 differently from the beginning of an answer"),
        (ONLY_WHEN_ASKED, {"messages": said("a", "b")}, "line 1: the chat template of it renders message 2 differently from the beginning of an answer, so where the answer begins is unknown"),
        ("{{ bos_token }}", {"messages": said("a", "b")}, "line 1: the chat template does not render what the assistant says; use another"),
        (WITHOUT_CONTROL.replace(": ", ": transf"), {"messages": said("a", "ormer")}, "renders message 2 differently from the beginning of an answer, so where the answer begins is unknown; remove white space from its beginning"),
        ("chatml", {"prompt": "transf", "completion": "ormer"}, "line 1: the tokenizer joins the end of the prompt to the completion; begin the completion with"),
        ("bare", {"messages": said("a", "b")}, "line 1 has messages, but the tokenizer it has no chat template; use a chat model's, or rows of text"),
    ],
)  # fmt: skip
def test_a_conversation_that_has_no_mask_is_refused(name, row, message):
    other = "" if name == "bare" else name
    files = small_tokenizers.with_template(small_tokenizers.byte_level(), other)
    tokens = made(name) if name in CHATS else tokenizer.from_files(files, "it")
    with pytest.raises(DataError) as caught:
        documents(row, tokens)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- tools, weights, spaces ----------------------------------------------------------------------

WITH_TOOLS = (  # the manner of Hermes and Qwen 2.5
    "{% if tools %}{{ '<|im_start|>tools\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ 'null' if m.content is none else m.content }}{% for call in m.tool_calls or [] %}"
    "{{ '<call>' + (call.function.arguments | tojson) + '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' + ('<think>' if enable_thinking else '') }}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"default": None}}}]


@functools.cache
def tooled() -> Tokenizer:
    files = small_tokenizers.with_template(small_tokenizers.byte_level(), WITH_TOOLS)
    return tokenizer.from_files(files, "tooled")


def call(**arguments) -> dict:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


@pytest.mark.parametrize("given", [TOOLS, json.dumps(TOOLS), [json.dumps(TOOLS[0])]])
def test_tools_are_shown_and_not_learned(given):
    (one,) = documents({"messages": said("Hi", "Yes"), "tools": given}, tooled())
    assert marked(one, tooled()) == (
        f"<|im_start|>tools\n{json.dumps(TOOLS[0])}<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yes<|im_end|>⟧"
    )
    pair = {"prompt": said("Hi"), "completion": said("Hi", "Yes")[1:], "tools": given}
    (again,) = documents(pair, tooled())
    assert again.tokens.tolist() == one.tokens.tolist()
    without = {"messages": said("Hi", "Yes")}
    (plain,) = documents(without, tooled())
    assert "tools" not in marked(plain, tooled())
    for empty in ([], None, "", "[]"):
        checked = conversations.checked(
            without | {"tools": empty}, conversations.MESSAGES, "line 1"
        )
        assert checked == conversations.checked(without, conversations.MESSAGES, "line 1")


def test_a_row_s_own_variables_go_to_the_template():
    row = {"messages": said("Hi", "<think>Yes"), "chat_template_kwargs": {"enable_thinking": True}}
    (one,) = documents(row, tooled())
    assert marked(one, tooled()).endswith("assistant\n<think>⟦Yes<|im_end|>⟧")


def test_a_message_of_tool_calls_alone_is_learned():
    """Its content is null, as OpenAI writes it, or absent; the template gets null."""
    absent = {name: value for name, value in call(city="Paris").items() if name != "content"}
    for message in (call(city="Paris"), absent):
        (one,) = documents({"messages": [*said("Hi"), message]}, tooled())
        assert marked(one, tooled()).endswith(
            'assistant\n⟦null<call>{"city": "Paris"}</call><|im_end|>⟧'
        )


def test_variables_of_well_known_templates_are_columns():
    template = "{{ documents[0].text }}{{ enable_thinking }}{{ id }}" + small_tokenizers.TEMPLATE
    files = small_tokenizers.with_template(small_tokenizers.byte_level(), template)
    tokens = tokenizer.from_files(files, "retrieves")
    row = {"messages": said("a", "b"), "documents": [{"text": "Alps"}], "enable_thinking": False}
    for variables, shown in (({}, "AlpsFalse"), ({"enable_thinking": True}, "AlpsTrue")):
        one = row | {"id": 7, "chat_template_kwargs": variables}
        (document,) = documents(one, tokens)
        assert marked(document, tokens).startswith(f"{shown}<|im_start|>")


def test_a_variable_set_inside_generation_stays():
    template = "{% generation %}{% set said = 'b' %}{% endgeneration %}{{ said }}"
    assert chat.render(template, said("a"), {}, "sets") == "b"


def test_templates_see_tokens_that_extra_special_tokens_names():
    """As an object, as transformers writes them, or with AddedToken's fields."""
    files = small_tokenizers.with_template(small_tokenizers.byte_level(), "{{ image_token }}.")
    config = json.loads(files["tokenizer_config.json"])
    for token in ("<|endoftext|>", {"content": "<|endoftext|>", "lstrip": False}):
        named = config | {"extra_special_tokens": {"image_token": token}}
        changed = files | {"tokenizer_config.json": json.dumps(named).encode()}
        tokens = tokenizer.from_files(changed, "sees")
        assert tokens.render(said("a")) == "<|endoftext|>."


@pytest.mark.parametrize("name", conversations.WEIGHTS)
def test_a_message_of_weight_0_is_context(name):
    messages = said("Hi", "No.", "So?", "Yes", "And?", "Hm")
    for number, weight in ((1, 0), (3, 1), (5, False)):
        messages[number][name] = weight
    messages[0][name] = 0  # a user's is never learned
    (one,) = documents({"messages": messages}, tooled())
    assert marked(one, tooled()) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>\n"
        "<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n⟦Yes<|im_end|>⟧"
    )
    assert conversations.target_bytes(one, tooled()) == 3
    curious = WITH_TOOLS.replace("m.role +", f"m.role + ('!' if m.{name} is defined else '') +")
    files = small_tokenizers.with_template(small_tokenizers.byte_level(), curious)
    (again,) = documents({"messages": messages}, tokenizer.from_files(files, "curious"))
    assert again.tokens.tolist() == one.tokens.tolist(), "the template does not see it"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": said("a", "b"), "tools": {"name": "c"}}, "line 1: 'tools' is an object, not a list of objects; write"),
        ({"messages": said("a", "b"), "tools": "weather"}, "line 1: 'tools' is a string, not a list"),
        ({"messages": said("a", "b"), "tools": [TOOLS[0], "weather"]}, "line 1: tool 2 is a string, not an object; write"),
        ({"messages": said("a", "b"), "chat_template_kwargs": [1]}, "line 1: 'chat_template_kwargs' is a list, not an object"),
        ({"messages": [*said("a"), {"role": "assistant", "content": "b", "weight": 0}]}, "line 1 has nothing to learn: all of the assistant's messages have weight 0; remove it"),
        ({"messages": [*said("a"), {"role": "assistant", "content": "b", "weight": 0.5}]}, "line 1: message 2 has the weight 0.5; use 0 for context only, or 1"),
        ({"messages": [*said("a"), {"role": "assistant", "content": "b", "train": "no"}]}, 'line 1: message 2 has the train "no"; use 0'),
        ({"messages": [*said("a"), {"role": "assistant", "content": "b", "loss": 1, "weight": 0}]}, "line 1: message 2 has weight and loss, which contradict each other; keep one"),
        ({"messages": [*said("a"), {"role": "assistant", "content": "b", "weight": "0"}]}, 'line 1: message 2 has the weight "0"; use 0'),
        ({"messages": [*said("a"), {"role": "assistant", "content": None}]}, "line 1: the content of message 2 is missing, not a string; write it as text"),
        ({"messages": [{"role": "user", "content": None, "tool_calls": [1]}, *said("", "b")[1:]]}, "line 1: the content of message 1 is missing"),
        ({"messages": None}, "line 1 has null in the column 'messages'; fill it, or remove the row"),
    ],
)  # fmt: skip
def test_rows_with_other_tools_or_weights_are_refused(row, message):
    with pytest.raises(DataError) as caught:
        documents(row, tooled())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_calls_that_the_template_does_not_render_are_refused():
    """Such a message would teach the model to say nothing."""
    template = WITHOUT_CONTROL.replace("m.content", "(m.content or '')")
    files = small_tokenizers.with_template(small_tokenizers.byte_level(), template)
    tokens = tokenizer.from_files(files, "plain")
    with pytest.raises(
        DataError,
        match="line 1: the chat template of plain does not render the tool calls of message 2",
    ):
        documents({"messages": [*said("a"), call(city="Paris")]}, tokens)
    (one,) = documents({"messages": [*said("a"), call(city="Paris") | {"content": "b"}]}, tokens)
    assert marked(one, tokens).endswith("assistant: ⟦b\n⟧")


SPACED = "{% for m in messages %}{{ (bos_token + m.content) if m.role == 'user' else m.content + eos_token }}{% endfor %}"


@pytest.mark.parametrize("lead", ["", " ", "  "])
@pytest.mark.parametrize("name", ["bytes", "byte_level", "metaspace"])
def test_bytes_of_an_answer_include_the_space_that_begins_it(name, lead):
    """Decoders of sentencepiece's kind drop a first space when they decode an answer alone."""
    files = {} if name == "bytes" else getattr(small_tokenizers, name)()
    tokens = tokenizer.from_files(files, name)
    for prompt in ("The capital is", "ü", ""):
        if (not lead and prompt) or (not prompt and not tokens.start):
            continue  # the tokenizer may join them; nothing predicts the first token
        (one,) = documents({"prompt": prompt, "completion": f"{lead}Paris 🦊"}, tokens)
        assert conversations.target_bytes(one, tokens) == len(f"{lead}Paris 🦊".encode())
    if name == "metaspace":
        for template in (SPACED, MISTRAL):
            files = small_tokenizers.with_template(small_tokenizers.metaspace(), template)
            tokens = tokenizer.from_files(files, "it")
            turns = ("Hi", f"{lead or '.'}Paris", "So?", f"{lead or '.'}Rome")
            found = documents({"messages": said(*turns)}, tokens)
            size = sum(conversations.target_bytes(one, tokens) for one in found)
            assert size == len(turns[1] + turns[3])


# ---- files ---------------------------------------------------------------------------------------

CHAT = made("chatml")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a cache of its own."""
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    return tmp_path


def write(path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chats(count: int, seed: int = 0, longest: int = 12) -> list[dict]:
    """Rows of random words, one to three turns each."""
    rng = np.random.default_rng(seed)
    some = ["mesh", "shard", "the", "naïve", "漢"]

    def words() -> str:
        return " ".join(rng.choice(some, rng.integers(1, longest)))

    return [
        {"messages": said(*(words() for _ in range(2 * rng.integers(1, 4))), system=f"{seed} {i}")}
        for i in range(count)
    ]


def load(*datasets: str, seq_len=512, tokens=CHAT, **options):
    return text.load(",".join(datasets), seq_len=seq_len, tokenizer=tokens, **options)


def answers(rows) -> list[list[int]]:
    """Targets of each piece of each row, in order; [] if a text is all padding."""
    found = []
    for row in (rows[i] for i in range(len(rows))):
        for number in range(1, row["segment_ids"].max() + 1):
            here = row["targets"][row["segment_ids"] == number]
            found.append(here[here >= 0].tolist())
    return sorted(found)


def wanted(rows: list[dict], tokens=CHAT) -> list[list[int]]:
    found = [one for row in rows for one in documents(row, tokens)]
    return sorted(one.tokens[one.targets].tolist() for one in found)


def test_each_target_is_learned_once_and_held_out_chats_are_whole(folder):
    rows = chats(60)
    data = load(write(folder / "a.jsonl", rows), seq_len=512)
    assert sorted(answers(data.train) + answers(data.held_out)) == wanted(rows)
    assert answers(data.held_out) == wanted(rows[-3:]), (
        "the last twentieth, where no hash holds out"
    )
    assert data.held_out_bytes == sum(
        len(one["content"].encode())
        for row in rows[-3:]
        for one in row["messages"]
        if one["role"] == "assistant"
    )
    assert data.notes[0].startswith("Training data: the answers in 57 rows of ")
    assert data.notes[1].startswith("Held out: the answers in 3 rows of ")
    assert len(data.notes) == 2
    whole = next(i for i in range(len(data.train)) if data.train[i]["segment_ids"].max() > 1)
    row = data.train[whole]
    assert (row["targets"] >= 0).sum() < (row["segment_ids"] > 0).sum(), "others are no target"


def test_by_their_hash_as_soon_as_there_are_enough(folder, monkeypatch):
    monkeypatch.setattr(sources, "HELD_OUT", 0.1)
    rows = chats(100)
    rows += rows[:50]
    data = load(write(folder / "a.jsonl", rows), seq_len=512)
    held = answers(data.held_out)
    assert 3 < len(held) < 40
    assert not {*map(tuple, held)} & {*map(tuple, answers(data.train))}, "twins are on one side"


def test_eight_chats_and_one(folder):
    rows = chats(8)
    name = write(folder / "a.jsonl", rows)
    data = load(name)
    assert answers(data.held_out) == wanted(rows[-1:])
    every = load(name, eval_dataset=name)
    assert answers(every.train) == answers(every.held_out) == wanted(rows)
    assert every.facts["eval_dataset"] == name
    assert every.facts["fingerprint"] != data.facts["fingerprint"]
    other = load(name, eval_dataset=write(folder / "b.jsonl", chats(2, seed=1)))
    assert answers(other.train) == wanted(rows)
    assert answers(other.held_out) == wanted(chats(2, seed=1))
    one = write(folder / "one.jsonl", rows[:1])
    with pytest.raises(
        DataError, match=r"one\.jsonl has a single row, and one is held out to evaluate"
    ):
        load(one)
    assert not list((folder / "cache").rglob("*one*"))
    assert answers(load(one, eval_dataset=one).train) == wanted(rows[:1])


def test_a_text_can_be_held_out_for_a_text(folder):
    book, other = folder / "a.txt", folder / "b.txt"
    book.write_text("some text " * 100)
    other.write_text("another " * 100)
    data = text.load(str(book), seq_len=32, eval_dataset=str(other))
    assert len(data.train) == 1000 // 32
    assert len(data.held_out) == 800 // 32 == data.held_out_bytes // 32
    assert bytes(data.held_out[0]["targets"].astype(np.uint8)).startswith(b"another ")


@pytest.mark.parametrize("kind", ["messages", "texts", "lists"])
def test_formats_are_alike(kind, folder):
    """Covers JSON Lines, Parquet and `datasets`; a null counts as an absent key."""
    import pyarrow
    import pyarrow.parquet

    rows = chats(30)
    rows[3]["messages"][0]["name"] = "x"
    if kind != "messages":
        rows = [
            {"prompt": one["messages"][:-1], "completion": one["messages"][-1:]} for one in rows
        ]
    if kind == "texts":
        rows = [{"prompt": f"{i}", "completion": f" {i} the"} for i in range(30)]
    (folder / "hub").mkdir()
    names = [write(folder / "a.jsonl", rows), str(folder / "a.parquet"), f"hf:{folder / 'hub'}"]
    for parquet in (names[1], folder / "hub" / "train.parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet, row_group_size=7)
    found = [load(name) for name in names]
    assert len({one.facts["fingerprint"] for one in found}) == 1
    assert answers(found[0].train) == wanted(rows[:-1])


@pytest.mark.parametrize("kind", ["messages", "lists"])
def test_tools_and_calls_of_all_formats_are_alike(kind, folder):
    """Arrow gives each call the arguments of all others, as null; they are not learned."""
    import pyarrow
    import pyarrow.parquet

    rows = []
    for i in range(30):
        messages = [*said("Hi"), call(**{("city", "query", "date")[i % 3]: f"the {i}"})]
        some = {"tools": [TOOLS[0] | {"name": f"{i}"}]} if i % 2 else {}
        some["tools"] = json.loads(json.dumps(some.get("tools", [])).replace("null", "0"))
        pair = {"prompt": messages[:1], "completion": messages[1:]}
        rows.append((pair if kind == "lists" else {"messages": messages}) | some)
    (folder / "hub").mkdir()
    (folder / "lines").mkdir()
    write(folder / "lines" / "train.jsonl", rows)
    names = [write(folder / "a.jsonl", rows), str(folder / "a.parquet")]
    names += [f"hf:{folder / 'hub'}", f"hf:{folder / 'lines'}"]
    for parquet in (names[1], folder / "hub" / "train.parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet)
    found = [load(name, tokens=tooled()) for name in names]
    assert len({one.facts["fingerprint"] for one in found}) == 1
    assert answers(found[1].train) == wanted(rows[:-1], tooled())
    shown = "".join(
        tooled().decode(found[1].train[i]["tokens"]) for i in range(len(found[1].train))
    )
    assert '"name": "1"}' in shown
    calls = [json.loads(one) for one in re.findall("<call>(.*?)</call>", shown)]
    assert {len(one) for one in calls} == {1}
    assert {*itertools.chain(*calls)} == {"city", "query", "date"}


def test_a_null_that_json_lines_say_is_kept(folder):
    rows = [{"messages": [*said("Hi"), call(city=None)]}] * 30
    data = load(write(folder / "a.jsonl", rows), tokens=tooled())
    assert '<call>{"city": null}</call>' in tooled().decode(data.train[0]["tokens"])


def test_tools_that_the_template_ignores_are_reported(folder):
    rows = chats(30)
    for row in rows[:20]:
        row["tools"] = TOOLS
    name = write(folder / "a.jsonl", rows)
    other = write(folder / "b.jsonl", chats(3))
    notes = load(name, eval_dataset=other).notes
    assert notes[1] == (
        "warning: the chat template ignores the tools of 20 of them, so the model learns calls of "
        "tools that it is never shown; use a template that renders tools."
    )
    assert len(notes) == 3, "the held-out rows have no tools"
    assert len(load(name, tokens=tooled(), eval_dataset=other).notes) == 2
    rows = [THINKS["thoughts"] | {"tools": TOOLS}] * 4
    notes = load(write(folder / "c.jsonl", rows), tokens=made("qwen3"), eval_dataset=other).notes
    assert "4 rows" in notes[0]
    assert "8 turns one by one" in notes[0]
    assert notes[1].startswith("warning: the chat template ignores the tools of 4 of them")


def test_a_template_named_tool_use_renders_tools():
    """A model may have several templates; transformers chooses the same."""
    named = {"default": WITH_TOOLS.replace("tools", "none"), "tool_use": WITH_TOOLS}
    files = small_tokenizers.byte_level()
    both = [{"name": name, "template": template} for name, template in named.items()]
    found = tokenizer.from_files(small_tokenizers.with_template(files, both), "both")
    one = {"messages": said("Hi", "Yes")}
    for row in (one, one | {"tools": TOOLS}):
        (want,) = documents(row, tooled())
        (got,) = documents(row, found)
        assert got.tokens.tolist() == want.tokens.tolist()
    alone = tokenizer.from_files(small_tokenizers.with_template(files, both[:1]), "one")
    assert found.chat_key != alone.chat_key


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_the_name_that_a_template_reads(name):
    """Adds the names that transformers 5.24 adds."""
    template = (
        "{{ messages[0].reasoning_content }}/{{ messages[0].thinking }}/{{ messages[0].content }}"
    )
    files = small_tokenizers.with_template(small_tokenizers.byte_level(), template)
    message = {"role": "assistant", "content": "a", name: "Hm"}
    assert tokenizer.from_files(files).render([message]) == "Hm/Hm/a"
    assert tokenizer.from_files(files).render([said("a")[0]]) == "//a"


def test_rows_of_weight_0_are_held_out_and_read_from_parquet(folder):
    """Where only some messages have a weight, Parquet has null for the others, which means 1."""
    import pyarrow
    import pyarrow.parquet

    rows = [{"messages": said("Hi", f"No {i}", "So?", f"Yes {i}")} for i in range(30)]
    for row in rows:
        row["messages"][1]["weight"] = 0
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, folder / "a.parquet")
    names = str(folder / "a.parquet"), write(folder / "a.jsonl", rows)
    found = [load(name, eval_dataset=name) for name in names]
    assert len({one.facts["fingerprint"] for one in found}) == 1
    learned = [CHAT.decode(one) for one in answers(found[0].train)]
    assert sorted(learned) == sorted(f"Yes {i}" for i in range(30))


def test_messages_of_a_csv_are_json(folder):
    rows = [{"messages": said(f'"{n}"\n', f"{n}, yes"), "note": "x"} for n in range(30)]
    write(folder / "a.jsonl", rows)
    with (folder / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows([row | {"messages": json.dumps(row["messages"])} for row in rows])
    loaded = [load(str(folder / f"a.{kind}")) for kind in ("jsonl", "csv")]
    assert loaded[0].facts["fingerprint"] == loaded[1].facts["fingerprint"]
    assert any("not used: 1 ('note')" in note for note in loaded[1].notes)


@pytest.mark.parametrize("name", ["chatml", "mistral"])
def test_a_prompt_may_end_in_white_space(name):
    """A token may begin with it, so it is learned with the answer."""
    tokens = made(name)
    (one,) = documents({"prompt": "The work: \n ", "completion": "the"}, tokens)
    assert "Thework:⟦the" in "".join(marked(one, tokens).split())
    text = tokens.decode(one.tokens)
    assert text.strip() == "The work: \n the"


def test_rows_that_were_rendered_before_are_counted(folder):
    rows = [{"prompt": f"<|im_start|>user {n}", "completion": "yes<|im_end|>"} for n in range(40)]
    write(folder / "a.jsonl", rows)
    write(folder / "b.jsonl", [{"text": f"{row['prompt']} {row['completion']}"} for row in rows])
    write(folder / "c.jsonl", [{"text": f"no control token {n}"} for n in range(40)])
    for name, warns in (("a", True), ("b", True), ("c", False)):
        data = load(str(folder / f"{name}.jsonl"), seq_len=32)
        notes = [note for note in data.notes if "spell control tokens" in note]
        counts = [re.match(r"warning: (\d+) of (\d+) rows", note).groups() for note in notes]
        assert (sum(int(count) for count, _ in counts) >= 38) == warns  # a cut may be within one
        assert warns or not counts
        assert all(count == total for count, total in counts)


def test_a_sample_asks_a_held_out_prompt(folder):
    """The first prompt's tokens, as training shows them, and nothing of other documents."""
    tokens = made("chatml")
    rows = [{"messages": said(f"{n}?", f"{n}!", f"{n}, so?", "Yes")} for n in range(40)]
    data = text.load(write(folder / "a.jsonl", rows), seq_len=128, tokenizer=tokens)
    assert data.has_answers
    asked = sample.first_prompt(data)
    number = re.search(r"user\n(\d+)\?", tokens.decode(asked))[1]
    messages = said(f"{number}?")
    np.testing.assert_array_equal(asked, tokens.ask(messages))
    (folder / "a.txt").write_text("no answer\n" * 100)
    assert not text.load(str(folder / "a.txt"), seq_len=16).has_answers


def test_the_column_of_text_comes_first(folder):
    rows = chats(30)
    name = write(folder / "a.jsonl", [one | {"text": "some text " * 20} for one in rows])
    assert "template" not in load(name, seq_len=16).facts
    data = load(name, text_column="messages")
    assert answers(data.train) == wanted(rows[:-1])
    assert "template" in data.facts


def test_files_of_two_kinds_are_refused(folder):
    text_, chat_ = [{"text": "some text"}], chats(2)
    for first, second in ((text_, chat_), (chat_, text_)):
        write(folder / "a.jsonl", first)
        write(folder / "b.jsonl", second)
        with pytest.raises(
            DataError, match=r"b\.jsonl (has conversations, but not|line 1 has no 'mess)"
        ):
            load(str(folder / "?.jsonl"))
    (folder / "c.json").write_text(json.dumps(chats(2)))
    with pytest.raises(
        DataError, match=r"c\.json has conversations, but not as JSON Lines, a row a line"
    ):
        load(str(folder / "c.json"))
    write(folder / "a.jsonl", chats(2))
    (folder / "b.jsonl").unlink()
    (folder / "b.txt").write_text("some text")
    with pytest.raises(
        DataError, match=r"b\.txt is text, but a\.jsonl has conversations; name the files"
    ):
        load(str(folder / "[ab].*"))


def test_conversations_are_always_packed(folder):
    name = write(folder / "a.jsonl", [{"prompt": "a", "completion": "b"}] * 3)
    assert load(name, tokens=BYTES).facts["pack"]
    with pytest.raises(
        DataError, match=r"--pack=false would cut the conversations of .*leave it out"
    ):
        load(name, tokens=BYTES, pack="false")


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [7, packing.BLOCK])
def test_conversations_too_long_for_a_row_are_reported(folder, block, monkeypatch):
    monkeypatch.setattr(packing, "BLOCK", block)
    rows, length = chats(40, longest=60), 128
    data = load(write(folder / "a.jsonl", rows), seq_len=length)
    train = [one for row in rows[:-2] for one in documents(row, CHAT)]
    kept = [one.tokens[: length + 1][one.targets[: length + 1]].tolist() for one in train]
    assert answers(data.train) == sorted(filter(None, kept))
    cut = [one for one in train if len(one.tokens) > length + 1]
    lost = sum(one.targets[length + 1 :].sum() for one in cut)
    every = sum(one.targets.sum() for one in train)
    longest = max(len(one.tokens) for one in train) - 1
    assert data.notes[1] == (
        f"warning: {len(cut)} of them are cut at --seq_len=128, which loses {lost:,} of the {every:,} "
        f"tokens; --seq_len={longest} keeps all."
    )
    assert not any(
        note.startswith("warning")
        for note in load(data.facts["dataset"], seq_len=longest).notes[:2]
    )
    held = [one for row in rows[-2:] for one in documents(row, CHAT)]
    short = [conversations.Document(*(x[: length + 1] for x in one)) for one in held]
    assert data.held_out_bytes == sum(conversations.target_bytes(one, CHAT) for one in short)
    with pytest.raises(
        DataError, match="no answer in its training rows begins within the first --seq_"
    ):
        load(data.facts["dataset"], seq_len=4)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Conversations, and documents of plain text."""
    place = tmp_path_factory.mktemp("mixed")
    words = [{"text": f"{i} the shard of a mesh\n" * (i % 9)} for i in range(200)]
    texts = write(place / "b.jsonl", words)
    return load(write(place / "a.jsonl", chats(60)) + "@0.7", texts + "@0.3")


def test_a_mix_with_text(mixed):
    """Every token of the plain text is a target."""
    count = mixed.parts[0][0]
    assert mixed.parts == ((count, 0.7), (len(mixed.train) - count, 0.3))
    for i, masked in ((0, True), (count, False)):
        row = mixed.train[i]
        assert ((row["targets"] >= 0).sum() < (row["segment_ids"] > 0).sum()) == masked
    feed = iter(train_batches(mixed, 8, seed=1))
    rows = [
        (x, y)
        for _ in range(50)
        for b in [next(feed)]
        for x, y in zip(b["targets"], b["segment_ids"], strict=True)
    ]
    share = np.mean([((x >= 0).sum() < (y > 0).sum()) for x, y in rows])
    assert abs(share - 0.7) < 0.01


def test_batches_are_the_same_cold_resumed_and_on_any_number_of_processes(mixed):
    def take(count, **options):
        feed = iter(train_batches(mixed, 8, 3, **options))
        return [{k: v.tolist() for k, v in next(feed).items()} for _ in range(count)]

    def joined(parts):
        return [
            {k: [*itertools.chain(*(part[k] for part in batch))] for k in batch[0]}
            for batch in zip(*parts, strict=True)
        ]

    cold = take(12)
    assert take(5, first=7) == cold[7:]
    for shards in (2, 4):
        mine = np.split(np.arange(8), shards)
        assert joined([take(12, rows=one) for one in mine]) == cold
    targets = [batch["targets"] for batch in held_out_batches(mixed, 8)]
    assert sum((x >= 0).sum() for x in targets) > 0


# ---- the cache -----------------------------------------------------------------------------------


def test_the_cache_key_has_the_template_and_control_tokens(folder):
    """Its key has the template and the tokens around a text; a corpus of plain text ignores them."""
    name = write(folder / "a.jsonl", chats(10))
    (folder / "t.txt").write_text("some text " * 100)
    shout = small_tokenizers.TEMPLATE.replace("Be kind", "Be loud")
    others = [
        small_tokenizers.with_template(CHAT.files, shout),
        small_tokenizers.with_template(
            CHAT.files, small_tokenizers.TEMPLATE, pad_token="<|endoftext|>"
        ),
        CHAT.files | {"generation_config.json": b'{"eos_token_id": 0}'},
    ]
    tokens = [CHAT, *(tokenizer.from_files(files, "other") for files in others)]
    found = [load(name, tokens=one) for one in tokens]
    assert len({one.facts["template"] for one in found}) == 4
    assert load(name).facts == found[0].facts
    folders = {corpus.prepare(*sources.find(name), one).folder for one in tokens}
    assert len(folders) == 4
    of_text = [corpus.prepare(*sources.find(str(folder / "t.txt")), one).folder for one in tokens]
    assert len({*of_text}) == 1


def test_a_prepared_file_is_not_looked_into(folder, monkeypatch):
    name = write(folder / "a.jsonl", chats(10))
    first = load(name)
    monkeypatch.setattr(sources, "_columns", lambda *_: pytest.fail("looked into"))
    assert load(name).facts == first.facts


def test_training_data_is_of_one_day(folder, monkeypatch):
    """A template may insert today's date; training data uses one fixed date."""
    tokens, name = made("llama3"), write(folder / "a.jsonl", chats(10))
    data = load(name, tokens=tokens)
    assert data.notes[0].endswith("; templates see the date 26 Jul 2024.")
    assert "26 Jul 2024" in tokens.decode(data.train[0]["tokens"])
    assert "26 Jul 2024" not in tokens.render(said("Hi"))


def test_threads_make_the_same_files_as_one(folder, monkeypatch):
    name = write(folder / "a.jsonl", chats(80))
    here = corpus.prepare(*sources.find(name), CHAT)
    monkeypatch.setenv("ZOO_CACHE", str(folder / "other"))
    monkeypatch.setattr(corpus, "CHUNK", 3_000)
    monkeypatch.setattr(corpus, "cores", lambda: 4)
    there = corpus.prepare(*sources.find(name), CHAT)
    assert here.folder.name == there.folder.name
    assert {file.name for file in here.folder.iterdir()} >= {"train.targets", "held_out.targets"}
    for file in here.folder.iterdir():
        assert file.read_bytes() == (there.folder / file.name).read_bytes(), file.name
    rows = chats(80)
    broken = made("mistral")
    with pytest.raises(
        DataError, match=r"b.jsonl line \d+: the chat template of mistral can't be rendered"
    ):
        load(write(folder / "b.jsonl", rows), tokens=broken)
    assert len(list((folder / "other" / "text").iterdir())) == 2, "nothing is left of what failed"


# ---- runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def here(place, inside, quick, book):
    """`base`, a model with a chat template, and `tuned`, which starts from its parameters."""
    if any(place.iterdir()):
        return place
    for name, files in (("tokens", CHAT.files), ("loud", LOUD)):
        (place / name).mkdir()
        for file, content in files.items():
            (place / name / file).write_bytes(content)
    base = (*TINY, book, f"--workdir={place / 'base'}", f"--tokenizer={place / 'tokens'}")
    assert inside("recipes.transformer", *base, "--mesh=1x1", "--steps=1").code == 0
    write(place / "a.jsonl", chats(8))
    done = tune(inside, place, "--steps=10", "--eval_every=1")
    assert (done.code, done.err) == (0, "")
    (place / "out").write_text(done.out)
    return place


LOUD = small_tokenizers.with_template(
    CHAT.files, small_tokenizers.TEMPLATE.replace("Be kind", "Be loud")
)


def tune(inside, place, *flags):
    flags = (
        f"--restore_from={place / 'base'}", f"--workdir={place / 'tuned'}", "--mesh=1x1",
        f"--dataset={place / 'a.jsonl'}", "--sample_bytes=0", "--log_every=1", "--seq_len=256",
        "--batch_size=8", *flags,
    )  # fmt: skip
    return inside("recipes.transformer", *dict((f.split("=")[0], f) for f in flags).values())


def flags_of(place) -> dict:
    return json.loads((place / "tuned" / "config.json").read_text())["flags"]


@pytest.mark.full
def test_a_run_says_what_it_trains_on_and_evaluates_on_whole_chats(here):
    lines = (here / "out").read_text().splitlines()
    name = here / "a.jsonl"
    split = [chats(8)[:-1], chats(8)[-1:]]
    for line, what, rows in zip(lines[:2], ("Training data", "Held out"), split, strict=True):
        found = [one for row in rows for one in documents(row, CHAT)]
        targets = sum(int(one.targets.sum()) for one in found)
        every = sum(len(one.tokens) for one in found)
        count = f"{len(rows)} rows" if len(rows) > 1 else "1 row"
        assert line == f"{what}: the answers in {count} of {name}, {targets:,} of {every:,} tokens."
    metrics = records(here / "tuned", "step", "held_out_loss", "held_out_targets")
    assert [step for step, *_ in metrics] == [*range(11)]
    assert {count for *_, count in metrics} == {float(targets)}
    losses = [loss for _, loss in records(here / "tuned", "step", "loss")]
    assert losses[-1] < losses[0]


@pytest.mark.full
def test_a_run_on_chats_answers_a_held_out_prompt(here, inside):
    flags = (f"--restore_from={here / 'tuned'}", f"--workdir={here / 'asks'}", "--steps=0")
    done = tune(inside, here, *flags, "--sample_bytes=8")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    begin = lines.index("Sample: a held-out prompt,")
    (said_before,) = [one["content"] for one in chats(8)[-1]["messages"] if one["role"] == "system"]
    assert any(said_before in line for line in lines[begin:])
    end = next(n for n in range(begin, len(lines)) if lines[n].startswith("and its answer"))
    assert lines[end + 1].startswith("  | ")


@pytest.mark.full
def test_fine_tuning_has_its_own_learning_rate(here, inside):
    """A resumed run keeps it, whatever --steps and --restore_from say."""
    flags = flags_of(here)
    assert (flags["learning_rate"], flags["warmup_steps"]) == (5e-5, 0)
    done = tune(inside, here, "--steps=30", "--restore_from=", "--mesh=4x2")
    assert (done.code, done.err) == (0, "")
    flags = flags_of(here)
    assert (flags["learning_rate"], flags["warmup_steps"]) == (5e-5, 0)
    assert flags["restore_from"] == str(here / "base"), "so that it is known when it resumes again"
    assert records(here / "tuned", "step", "loss")[-1][0] == 30


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ([], (4e-3, 40)),
        (["--restore_from=x"], (5e-5, 40)),
        (["--restore_from=x", "--steps=30"], (5e-5, 3)),
        (["--restore_from=x", "--steps=12"], (5e-5, 0)),
        (["--restore_from=x", "--steps=0"], (4e-3, 40)),
        (["--restore_from=x", "--learning_rate=0.004", "--warmup_steps=7"], (4e-3, 7)),
        (["--restore_from=x", "--lora_rank=8"], (5e-4, 40)),
    ],
)
@pytest.mark.parametrize("recipe", [transformer, moe])
def test_learning_rates(recipe, flags, wanted, tmp_path):
    argv = [f"--workdir={tmp_path}", "--steps=600", *flags]
    given = parse(argv, *recipe.NEW)
    run, _, _, training, _ = parse(argv, *recipe.defaults(*given))
    assert (run.learning_rate, training.warmup_steps) == wanted


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokenizer={here}/loud"], "--tokenizer must have the chat template that the original run was trained with; leave it out, or use a different --workdir (this one is {here}/tuned)"),
        (["--learning_rate=0.004"], "--learning_rate=0.004 must match the original run, 5e-05"),
        (["--eval_dataset={here}/a.jsonl"], "--eval_dataset={here}/a.jsonl must match the original run, none"),
        (["--pack=false"], "--pack=false must match the original run, none"),
        (["--workdir={here}/new", "--pack=false"], "--pack=false would cut the conversations of {here}/a.jsonl; leave it out"),
        (["--workdir={here}/new", "--seq_len=8"], "no answer in its training rows begins within the first --seq_len=8 tokens; --seq_len="),
    ],
)  # fmt: skip
def test_incompatible_flags_are_one_line(flags, message, here, inside):
    before = everything(here)
    done = tune(inside, here, "--steps=40", *(flag.replace("{here}", str(here)) for flag in flags))
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert message.replace("{here}", str(here)) in done.err
    assert everything(here) == before


def everything(folder) -> dict:
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
