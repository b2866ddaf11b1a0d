"""Two small tokenizers trained here, like real ones, as the files of a model folder."""

import functools
import json

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from data.tokenizer import Tokenizer, from_files
from tests.conftest import ROOT

TEMPLATE = (  # the manner of SmolLM2
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SIZE = 512


def words() -> list[str]:
    return (ROOT / "LICENSE").read_text().split()  # a text that nobody edits


def files(tokenizer: dict, config: dict, generation: dict) -> dict[str, bytes]:
    named = {"tokenizer": tokenizer, "tokenizer_config": config, "generation_config": generation}
    return {f"{name}.json": json.dumps(content).encode() for name, content in named.items()}


@functools.cache
def byte_level() -> dict[str, bytes]:
    """GPT-2's kind, 512 tokens: no BOS; ids 0, 1, 2 are control tokens; two end an answer."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(words(), trainer)
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    generation = {"bos_token_id": 1, "eos_token_id": [2, 0]}
    return files(json.loads(made.to_str()), config, generation)


@functools.cache
def metaspace() -> dict[str, bytes]:
    """Llama 2's kind: a space is ▁, unknown characters are bytes, <s> starts a text."""
    made = tokenizers.Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False)
    made.train_from_iterator(("▁" + word.replace("\n", "") for word in words()), trainer)
    found = json.loads(made.to_str())
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [piece for piece in found["model"]["vocab"] if piece not in pieces]
    found["model"] |= {
        "vocab": {piece: i for i, piece in enumerate(pieces)},
        "byte_fallback": True,
        "fuse_unk": True,
        "unk_token": "<unk>",
    }
    found["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    }
    found["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    found["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    made = tokenizers.Tokenizer.from_str(json.dumps(found))
    control = [AddedToken(piece, special=True, normalized=False) for piece in pieces[:3]]
    made.add_special_tokens(control)
    config = {
        "bos_token": {"content": "<s>"},  # as older files say it
        "eos_token": {"content": "</s>"},
        "chat_template": [
            {"name": "tools", "template": "no"},
            {"name": "default", "template": "{{ bos_token }}[INST] {{ messages[0].content }} [/INST]"},
        ],
    }  # fmt: skip
    return files(json.loads(made.to_str()), config, {"eos_token_id": 2})


LLAMA = (  # the manner of Llama 3.2, with its date
    "{{ bos_token }}{% set first = messages[0] if messages[0].role == 'system' else none %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + strftime_now('%d %b %Y') + '\n\n' }}"
    "{{ (first.content if first else '') + '<|eot_id|>' }}"
    "{% for message in messages %}{% if message.role != 'system' %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim }}"
    "{{ '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"
)
QWEN = (  # the manner of Qwen 3: no thinking but in the last answer
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and loop.last and '</think>' not in message.content %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message.content if loop.last else message.content.split('</think>')[-1].lstrip() }}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

HARMONY = (  # the manner of GPT-OSS: channels, and another token behind the last answer
    "{{ '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}"
    "{% if messages[0].role == 'system' %}"
    "{{ '<|start|>developer<|message|># Instructions\n\n' + messages[0].content + '<|end|>' }}{% endif %}"
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}"
    "{% elif message.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)


def with_template(
    files: dict[str, bytes], template: str, control: tuple[str, ...] = (), **config
) -> dict[str, bytes]:
    """Returns a tokenizer's files with another template and more control tokens."""
    settings = json.loads(files["tokenizer_config.json"]) | {"chat_template": template} | config
    files = files | {"tokenizer_config.json": json.dumps(settings).encode()}
    if control:
        made = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
        made.add_special_tokens(
            [AddedToken(one, special=True, normalized=False) for one in control]
        )
        files["tokenizer.json"] = made.to_str().encode()
    return files


@functools.cache
def harmony() -> dict[str, bytes]:
    """GPT-OSS' kind, 518 tokens: its template is a file of its own, and three tokens end an answer."""
    names = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
    files = with_template(byte_level(), "", names, eos_token="<|return|>")
    ends = [SIZE + names.index("<|return|>"), 0, SIZE + names.index("<|call|>")]
    generation = {"bos_token_id": 1, "do_sample": True, "eos_token_id": ends}
    return files | {
        "chat_template.jinja": HARMONY.encode(),
        "generation_config.json": json.dumps(generation).encode(),
    }


@functools.cache
def chats() -> dict[str, dict[str, bytes]]:
    """Returns name → a tokenizer with a chat template like that model's."""
    plain = {k: v for k, v in byte_level().items() if k != "generation_config.json"}
    headers = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    begin = {"bos_token": headers[0], "eos_token": headers[-1]}
    return {
        "chatml": byte_level(),
        "llama3": with_template(plain, LLAMA, headers, **begin),
        "mistral": with_template(metaspace(), MISTRAL),
        "qwen3": with_template(byte_level(), QWEN),
        "harmony": harmony(),
    }


@functools.cache
def small(start: bool = True) -> Tokenizer:
    """A tokenizer that ends each document with a token and, with `start`, begins it with one."""
    files = metaspace() if start else byte_level()
    return from_files(files, "small")
