"""A folder of transformers' Gemma 3 or 4 that sees, with a tokenizer of letters, and rows to tune it on."""

import json
import pathlib

import numpy as np
import PIL.Image
import tokenizers
from tokenizers import models, pre_tokenizers

from tests.conftest import ROOT

# Of transformers' Gemma3ForConditionalGeneration: three rows with two pictures, one and none.
GOLDEN = ROOT / "tests" / "golden" / "pictures" / "gemma3"
LETTERS = ["<pad>", "<eos>", "<bos>", "<unk>", *(chr(i) for i in range(97, 123)), "?", "\n", " "]


def write_folder(folder: pathlib.Path, golden: pathlib.Path = GOLDEN) -> pathlib.Path:
    """Writes `theirs`, `rows.jsonl` and its pictures into a folder; returns the path of `theirs`."""
    target = folder / "theirs"
    target.mkdir()
    for file in golden.iterdir():
        if file.name != "outputs.npz":
            (target / file.name).write_bytes(file.read_bytes())
    made = tokenizers.Tokenizer(
        models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.save(str(target / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (target / "tokenizer_config.json").write_text(json.dumps(names))
    rows = []
    for i, letter in enumerate("abcdef"):
        PIL.Image.fromarray(np.full((9, 9, 3), 40 * i, np.uint8)).save(folder / f"{i}.png")
        rows.append({"prompt": "<image>which?", "completion": letter, "image": f"{i}.png"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return target
