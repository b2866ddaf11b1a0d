"""Each family's kind of tokenizer and chat template gives the ids and texts of `transformers`.

The goldens are made by python -m tests.by_hand.tokenizer_parity --update-golden.
"""

import json
import re

import pytest

from data import DataError, chat, tokenizer
from tests.conftest import ROOT
from tests.support import family_tokenizers
from tests.support.family_tokenizers import CHATS, FAMILIES, TEXTS

pytestmark = pytest.mark.promise("tokenizers")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_s_texts_and_chats_are_those_of_transformers(name):
    golden = json.loads((ROOT / "tests" / "golden" / "family_chats" / f"{name}.json").read_text())
    ours = tokenizer.from_files(family_tokenizers.files(name), name)
    assert ours.control_tokens.get("bos_token") == FAMILIES[name].bos
    assert [ours.decode([token]) for token in ours.end] == [""], "a control token"
    for text, ids, plain in zip(TEXTS, golden["texts"], golden["plain"], strict=True):
        assert ours.encode([text])[0].tolist() == plain
        assert [*ours.start, *ours.encode_rendered(text)] == ids
    for (messages, variables), wanted in zip(CHATS, golden["chats"], strict=True):
        context = dict(variables)
        prompt = context.pop("add_generation_prompt", True)
        if "error" in wanted:
            with pytest.raises(DataError, match=re.escape(wanted["error"])):
                ours.render(messages, prompt, today=chat.TRAINING_DAY, context=context)
            continue
        text = ours.render(messages, prompt, today=chat.TRAINING_DAY, context=context)
        assert text == wanted["rendered"]
        assert ours.encode_rendered(text).tolist() == wanted["ids"]
