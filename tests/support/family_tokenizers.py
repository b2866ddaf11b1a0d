"""Small tokenizers of each family's kind, as the files of a model folder, with a chat template each.

The templates in chat_templates/ are written for these tests, in the form of the family's.
"""

import dataclasses
import functools
import json
import pathlib
from typing import Any

import tokenizers
from tokenizers import AddedToken

from tests.support.small_tokenizers import byte_level, metaspace

TEMPLATES = pathlib.Path(__file__).parent / "chat_templates"
GPT4 = (  # how GPT-4's kind splits words; most copy it with other numbers of digits
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
HAN = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{L}&&[^\p{Han}]]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
WORDS = BYTES | {"use_regex": True}  # GPT-2's


def split(pattern: str) -> dict[str, Any]:
    options = {"behavior": "Isolated", "invert": False}
    return {"type": "Split", "pattern": {"Regex": pattern}} | options


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [*steps]}


DIGITS = {"type": "Digits", "individual_digits": True}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
MERGED = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}


@dataclasses.dataclass(frozen=True)
class Family:
    """What a family's tokenizer.json and tokenizer_config.json have."""

    control: tuple[str, ...]  # control tokens after those of the vocabulary
    bos: str | None
    eos: str
    splits: dict[str, Any] | None = None  # pre-tokenizer; None: that of the vocabulary
    normalizer: dict[str, Any] | None = None
    pieces: bool = False  # a sentencepiece vocabulary that falls back on bytes; else byte-level BPE
    starts: bool = False  # whether a text starts with `bos`
    strips: bool = False  # whether control tokens take the spaces after them
    plain: tuple[str, ...] = ()  # added tokens that are not control tokens


CHATML = ("<|im_start|>", "<|im_end|>")
FAMILIES = {
    "glm45": Family(
        control=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        bos=None,
        eos="<|endoftext|>",
        splits=sequence(split(GPT4), BYTES),
        plain=("<think>", "</think>", "/nothink", "<tool_call>", "</tool_call>"),
    ),
    "smollm3": Family(
        control=("<|begin_of_text|>", "<|end_of_text|>"),
        bos=None,
        eos="<|im_end|>",
        splits=sequence(split(GPT4), BYTES),
        plain=("<think>", "</think>"),
    ),
    "granite": Family(
        control=("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
        bos="<|end_of_text|>",
        eos="<|end_of_text|>",
        splits=sequence(DIGITS, WORDS),
    ),
    "phi3": Family(
        control=("<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"),
        bos="<s>",
        eos="<|endoftext|>",
        pieces=True,
        strips=True,
    ),
    "phi4": Family(
        control=("<|im_sep|>",), bos="<|endoftext|>", eos="<|im_end|>",
        splits=sequence(split(GPT4), BYTES),
    ),
    "olmo2": Family(
        control=(), bos="<|endoftext|>", eos="<|endoftext|>",
        splits=sequence(split(GPT4), BYTES), plain=("|||EMAIL_ADDRESS|||",),
    ),
    "olmo3": Family(
        control=(), bos=None, eos="<|endoftext|>", splits=WORDS,
        normalizer={"type": "NFC"},
        plain=("<functions>", "</functions>", "<function_calls>", "</function_calls>"),
    ),
    "seed_oss": Family(
        control=("<seed:bos>", "<seed:eos>"), bos="<seed:bos>", eos="<seed:eos>",
        splits=sequence(split(GPT4), BYTES), plain=("<seed:think>", "</seed:think>"),
    ),
    "minimax_m2": Family(
        control=("]~!b[", "]~b]", "[e~["), bos="]~!b[", eos="[e~[",
        splits=sequence(split(GPT4.replace("{1,3}", "")), BYTES),
        plain=("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "kimi_k2": Family(
        control=("[BOS]", "[EOS]", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
        bos="[BOS]",
        eos="<|im_end|>",
        splits=sequence(split(HAN), BYTES),
        plain=("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    ),
    "mistral_small": Family(  # its newer vocabulary is byte-level
        control=("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        bos="<s>",
        eos="</s>",
        splits=sequence(split(GPT4.replace("{1,3}", "")), BYTES),
        starts=True,
    ),
    "mistral_v3": Family(
        control=("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        bos="<s>",
        eos="</s>",
        splits=METASPACE,
        pieces=True,
    ),
    "gemma3": Family(
        control=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        eos="<eos>",
        splits=MERGED,
        normalizer=SPACES,
        pieces=True,
        starts=True,
    ),
    "deepseek_v3": Family(
        control=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        splits=sequence(split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(GPT4), BYTES),
        starts=True,
        plain=("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    ),
}  # fmt: skip

QUESTION = {"role": "user", "content": "What is  1234 + 5?\n\n    x = '漢字' 🦊 <|im_end|> don't"}
ANSWER = {"role": "assistant", "content": "<think>\nAdd them.\n</think>\n\n It is 1239. "}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers, “exactly”. ",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
        },
    },
}
CALL = {"id": "call00001", "type": "function"}
CALL |= {"function": {"name": "add", "arguments": {"a": 5, "note": "é <b>"}}}
CALLING = [
    QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "1239", "tool_call_id": "call00001"},
]
TWO = [QUESTION, ANSWER, {"role": "user", "content": [{"type": "text", "text": "So? "}]}]
BRIEF = {"role": "system", "content": "Be brief. /no_think"}
CHATS: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [  # (messages, variables)
    ([QUESTION], {}),
    ([BRIEF, QUESTION, ANSWER], {"add_generation_prompt": False}),
    ([BRIEF, QUESTION, ANSWER, QUESTION], {}),
    (CALLING, {"tools": [TOOL]}),
    (TWO, {}),
    (
        [QUESTION],
        {"documents": [{"doc_id": 7, "text": "A fact."}], "controls": {"citations": True}},
    ),
    ([QUESTION], {"enable_thinking": False, "thinking": True, "thinking_budget": 0}),
    ([QUESTION], {"thinking_budget": 600, "model_identity": "I am one."}),
    ([QUESTION, QUESTION], {}),
]
TEXTS = [
    "",
    " a",
    "two  spaces\n\n\n\tdef f(x):  # 12345",
    "naïve e\u0301 漢字かな 🦊",
    "<|user|> <s>hi</s> [INST]",
]


@functools.cache
def files(name: str) -> dict[str, bytes]:
    """The files of a family's tokenizer."""
    family = FAMILIES[name]
    made = json.loads((metaspace if family.pieces else byte_level)()["tokenizer.json"])
    if family.splits:
        made["pre_tokenizer"] = family.splits
        made["normalizer"] = None
    if family.normalizer:
        made["normalizer"] = family.normalizer
    if family.pieces:
        made["post_processor"] = None
    else:
        made["model"]["ignore_merges"] = True  # as in most newer files
    library = tokenizers.Tokenizer.from_str(json.dumps(made))
    library.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False, rstrip=family.strips)
            for text in family.control
        ]
    )
    library.add_tokens([AddedToken(text, normalized=False) for text in family.plain])
    if family.starts:
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{family.bos} $A",
            special_tokens=[(family.bos, library.token_to_id(family.bos))],
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": family.bos,
        "eos_token": family.eos,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": library.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "chat_template.jinja": (TEMPLATES / f"{name}.jinja").read_bytes(),
    }
