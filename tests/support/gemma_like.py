"""A small tokenizer of Gemma's kind, and chat templates in the form of Gemma 3's and Gemma 4's, which read parts."""

import json

import tokenizers
from tokenizers import AddedToken, models

# Roles other than the assistant's are as they are; texts of parts are stripped, one by one.
CONTENT = (
    "{%- if m.content is string -%}{{ m.content | trim }}{%- else -%}{%- for part in m.content -%}"
    "{%- if part.type == 'image' -%}{{ 'PICTURE' }}{%- else -%}{{ part.text | trim }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
)
TURNS = (
    "{{ bos_token }}{%- for m in messages -%}"
    "{{ 'BEGIN' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    f"{CONTENT}{{{{ 'END\n' }}}}{{%- endfor -%}}"
    "{%- if add_generation_prompt -%}{{ 'BEGINmodel\n' }}{%- endif -%}"
)


def template(begin: str, end: str, picture: str) -> str:
    return TURNS.replace("BEGIN", begin).replace("END", end).replace("PICTURE", picture)


GEMMA3 = template("<start_of_turn>", "<end_of_turn>", "<start_of_image>")
GEMMA4 = template("<|turn>", "<turn|>", "\n\n<|image|>\n\n")  # line breaks as in its first version
TEMPLATES = {"gemma3": GEMMA3, "gemma4": GEMMA4}
# Tokens that begin a picture, are its places, and end it.
PICTURES = {
    "gemma3": ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    "gemma4": ("<|image>", "<|image|>", "<image|>"),
}
ENDS = {"gemma3": "<end_of_turn>", "gemma4": "<turn|>"}
CONTROL = ["<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>", "<|turn>", "<turn|>"]
CONTROL += [name for names in PICTURES.values() for name in names]


def made() -> tokenizers.Tokenizer:
    """No pre-tokenizer, spaces are ▁, line breaks merge, bytes are the rest."""
    words = [
        "\n",
        "\n\n",
        "\n\n\n",
        "▁",
        *"abcdefghijklmnopqrstuvwxyzWT?.",
        *(f"<0x{i:02X}>" for i in range(256)),
    ]
    vocab = {word: i for i, word in enumerate(["<unk>", *words])}
    merges = [("\n", "\n"), ("\n\n", "\n")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    control = [AddedToken(one, special=True, normalized=False) for one in CONTROL]
    tokenizer.add_special_tokens(control)
    return tokenizer


def files(family: str) -> dict[str, bytes]:
    """The files of a folder's tokenizer."""
    names = {"bos_token": "<bos>", "eos_token": ENDS[family], "chat_template": TEMPLATES[family]}
    return {
        "tokenizer.json": made().to_str().encode(),
        "tokenizer_config.json": json.dumps(names).encode(),
    }
