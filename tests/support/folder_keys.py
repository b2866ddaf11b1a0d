"""Model folders in which a key of one file has another value, and what ours make of them.

`python -m tests.by_hand.folder_keys` compares them with `transformers` and sentence-transformers.
"""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import PIL.Image
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from data import DataError, images, old_tokenizers, tokenizer, whole_texts
from recipes.common.runtime.errors import UserError
from tests.support.golden_folders import GOLDEN, config_of
from tests.support.small_tokenizers import byte_level, metaspace, words

FILE = GOLDEN.parent / "folder_keys.json"
CONFIG = "tokenizer_config.json"
SAME, REFUSED, WITHOUT_EFFECT, WRONG = "the same here", "refused", "without effect", "WRONG"
TOLERANCE = 2e-5
TEXTS = [
    "Hello the World's licence, naïve 12",
    "Ünder  the\n\nCode 東京 X",
    "a  b ",
]  # without control tokens


@dataclasses.dataclass(frozen=True)
class Case:
    """A folder in which some keys of one file have other values."""

    kind: str  # one of FOLDERS
    file: str
    keys: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.kind} {self.file} {json.dumps(dict(self.keys))}"


# ---- folders -------------------------------------------------------------------------------------


def pieces(size: int, suffix: str = "") -> tuple[dict[str, int], list[str]]:
    """(vocabulary, merges) of byte-level BPE."""
    ends = {"end_of_word_suffix": suffix} if suffix else {}
    made = tokenizers.Tokenizer(models.BPE(**ends))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        **ends,
        show_progress=False,
    )
    made.train_from_iterator((f" {word.lower()}" for word in words()), trainer)
    model = json.loads(made.to_str())["model"]
    # CLIP has each byte with and without the suffix. The trainer's order differs between runs.
    every = {*model["vocab"], *(f"{x}{suffix}" for x in pre_tokenizers.ByteLevel.alphabet())}
    vocabulary = {piece: i for i, piece in enumerate(sorted(every))}
    return vocabulary, [" ".join(pair) for pair in model["merges"]]


def old_files(folder: pathlib.Path, kind: str, model_type: str) -> None:
    """Writes the tokenizer of an old repository, and the config.json of its model."""
    control = [*dict.fromkeys(old_tokenizers.CONTROL[kind].values())] or ["<|endoftext|>"]
    if kind == old_tokenizers.BERT:
        letters = sorted({letter for word in words() for letter in word.lower()} | {*"東京ü"})
        some = sorted({word.lower() for word in words() if word.isalpha()})[:60]
        every = [*control, *letters, *(f"##{letter}" for letter in letters), *some]
        (folder / "vocab.txt").write_text("".join(f"{x}\n" for x in dict.fromkeys(every)))
    else:
        suffix = "</w>" if kind == old_tokenizers.CLIP else ""
        vocabulary, merges = pieces(300, suffix)
        for text in control:
            vocabulary.setdefault(text, len(vocabulary))
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


def new_files(folder: pathlib.Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def plain_names(files: dict[str, bytes]) -> dict[str, bytes]:
    """tokenizer_config.json without objects, which transformers 5 refuses in place of a token."""
    keys = json.loads(files[CONFIG])
    keys = {
        k: v["content"] if isinstance(v, dict) and "content" in v else v for k, v in keys.items()
    }
    return {CONFIG: json.dumps(keys).encode()}


def sentence_transformer(folder: pathlib.Path) -> None:
    """The golden encoder with a tokenizer of its size."""
    shutil.copytree(GOLDEN / "bert_mean", folder, dirs_exist_ok=True)
    letters = [*"abcdefghijklmnopqrstuvwxyz"]
    control = [f"[{x}]" for x in ("PAD", "UNK", "CLS", "SEP", "MASK")]
    both = letters + [f"##{x}" for x in letters]
    vocabulary = {piece: i for i, piece in enumerate([*control, *both, "A", "##A"])}
    made = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{x[1:-1].lower()}_token": x for x in control}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 48} | names
    (folder / "tokenizer.json").write_text(made.to_str())
    (folder / CONFIG).write_text(json.dumps(config))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    settings = {"prompts": {"query": "ask ", "none": ""}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))


def pictures(name: str) -> Callable[[pathlib.Path], None]:
    def make(folder: pathlib.Path) -> None:
        shutil.copytree(GOLDEN / name, folder, dirs_exist_ok=True)

    return make


OLD = {
    "gpt2": old_tokenizers.GPT2,
    "roberta": old_tokenizers.ROBERTA,
    "clip": old_tokenizers.CLIP,
    "qwen2": old_tokenizers.QWEN2,
    "bert": old_tokenizers.BERT,
    "distilbert": old_tokenizers.BERT,
}
FOLDERS: dict[str, Callable[[pathlib.Path], None]] = {
    **{
        f"old {model_type}": lambda folder, kind=kind, model_type=model_type: old_files(
            folder, kind, model_type
        )
        for model_type, kind in OLD.items()
    },
    "byte-level": lambda folder: new_files(folder, byte_level()),
    "metaspace": lambda folder: new_files(folder, metaspace() | plain_names(metaspace())),
    "sentences": sentence_transformer,
    "pictures vit": pictures("vit"),
    "pictures siglip": pictures("siglip"),
    "pictures clip": pictures("clip"),
}  # fmt: skip
PROCESSOR, WHOLE = "preprocessor_config.json", "processor_config.json"
ABSENT = "(absent)"  # in place of a value: the key is removed
AROUND = ({"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True})
TOKENIZER_KEYS: dict[str, list[dict[str, Any]]] = {
    "old gpt2": [{"add_prefix_space": True}, *AROUND],
    "old roberta": [{"add_prefix_space": True}, {"cls_token": "q"}, {"sep_token": "q"}, {"tokenizer_class": "GPT2Tokenizer"}],
    "old clip": [{"bos_token": "q"}, {"unk_token": "q"}, {"tokenizer_class": "CLIPTokenizerFast"}],
    "old qwen2": [{"add_prefix_space": True}, *AROUND, {"bos_token": "q", "add_bos_token": True}],
    "old bert": [
        *({"do_lower_case": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False}),
        *({"cls_token": "[MASK]"}, {"sep_token": "[MASK]"}, {"unk_token": "[MASK]"}),
    ],
    "old distilbert": [{"do_lower_case": False}],
    "byte-level": [
        *({"tokenizer_class": "GPT2Tokenizer"} | keys for keys in AROUND), *AROUND, {"add_bos_token": True, "add_eos_token": True}, {"add_prefix_space": True}, {"do_lower_case": True}],
    "metaspace": [
        *({"tokenizer_class": "LlamaTokenizer"} | keys for keys in ({}, *AROUND)), *AROUND, {"add_bos_token": True, "add_eos_token": True}],
}  # fmt: skip
SPECIAL = "special_tokens_map.json"
BOS, NO_BOS = f"{CONFIG}: add_bos_token", f"{CONFIG}: bos_token"
SPECIAL_KEYS: dict[str, list[dict[str, Any]]] = {
    "old gpt2": [{"bos_token": "q", BOS: True}, {"bos_token": "q", NO_BOS: "r", BOS: True}],
    "old roberta": [{"cls_token": "q"}, {"sep_token": {"content": "q"}}, {"sep_token": None}],
    "old clip": [{"bos_token": "q"}, {"eos_token": "q"}, {"unk_token": "q"}],
    "old qwen2": [{"bos_token": "q", BOS: True}],
    "old bert": [{"cls_token": "[MASK]"}, {"sep_token": "[MASK]"}, {"unk_token": "[MASK]"}],
    "byte-level": [{"bos_token": "q", BOS: True}, {"eos_token": "q", f"{CONFIG}: add_eos_token": True}],
    "metaspace": [{"bos_token": "▁a", BOS: True}],
}  # fmt: skip
SENTENCES: dict[str, list[dict[str, Any]]] = {
    "sentence_bert_config.json": [
        *({"max_seq_length": 9}, {"max_seq_length": None}, {"do_lower_case": True}),
        *({"transformer_task": "fill-mask"}, {"module_output_name": "other"}),
        {"tokenizer_args": {"model_max_length": 7}},
    ],
    CONFIG: [{"model_max_length": 5}],
    "config_sentence_transformers.json": [
        *({"default_prompt_name": "query"}, {"default_prompt_name": "none"}, {"truncate_dim": 5}),
        {"similarity_fn_name": "dot"},
    ],
    "1_Pooling/config.json": [
        *({"pooling_mode": "cls"}, {"pooling_mode": "max"}, {"pooling_mode": ABSENT}),
        {"include_prompt": False},
    ],
    "modules.json": [{"modules": 2}],
}  # fmt: skip
PICTURES: list[dict[str, Any]] = [
    *({"resample": 0}, {"do_rescale": False}, {"rescale_factor": 0.5}, {"do_normalize": False}),
    *({"image_mean": [0.1, 0.2, 0.3]}, {"image_std": [1.0, 2.0, 3.0]}, {"do_resize": False}),
    *({"resample": ABSENT}, {"image_mean": ABSENT}, {"image_std": ABSENT}, {"do_rescale": None}),
    *({"do_normalize": None}, {"do_center_crop": None}, {"image_mean": None}, {"size": None}),
    *({"do_center_crop": ABSENT}, {"do_center_crop": True}, {"do_center_crop": False}),
    *({"size": 4}, {"crop_size": 3}, {"do_pad": True}, {"image_processor_type": ABSENT}),
    *({"image_processor_type": f"{x}ImageProcessor"} for x in ("CLIP", "ViT", "Siglip", "DeiT")),
    *({"resample": ABSENT, "image_mean": ABSENT, "image_processor_type": x} for x in (
        "CLIPFeatureExtractor", "ViTImageProcessorFast",
    )),
]  # fmt: skip


def cases() -> Iterator[Case]:
    for kind, changes in TOKENIZER_KEYS.items():
        yield Case(kind, CONFIG)
        yield from (Case(kind, CONFIG, tuple(keys.items())) for keys in changes)
    for kind, changes in SPECIAL_KEYS.items():
        yield from (Case(kind, SPECIAL, tuple(keys.items())) for keys in changes)
    yield Case("sentences", "modules.json")
    for file, changes in SENTENCES.items():
        yield from (Case("sentences", file, tuple(keys.items())) for keys in changes)
    # Two files: the length in one counts if the other states none.
    no_length = (("max_seq_length", None), (f"{CONFIG}: model_max_length", 6))
    yield Case("sentences", "sentence_bert_config.json", no_length)
    prompt = (
        ("include_prompt", False),
        ("config_sentence_transformers.json: default_prompt_name", "query"),
    )
    yield Case("sentences", "1_Pooling/config.json", prompt)
    for name in ("vit", "siglip", "clip"):
        yield Case(f"pictures {name}", PROCESSOR)
        yield from (Case(f"pictures {name}", PROCESSOR, tuple(keys.items())) for keys in PICTURES)
        # processor_config.json wins, and may be the only one.
        yield Case(f"pictures {name}", WHOLE, (("resample", 0), ("image_mean", [0.1, 0.2, 0.3])))
        yield Case(f"pictures {name}", WHOLE, (("alone", True), ("image_std", [1.0, 2.0, 3.0])))


def make(case: Case, folder: pathlib.Path) -> None:
    """Writes a case's folder."""
    FOLDERS[case.kind](folder)
    for key, value in case.keys:
        other, _, rest = key.rpartition(": ")
        file, key = folder / (other or case.file), rest
        if key == "modules":
            file.write_text(json.dumps(json.loads(file.read_text())[:value]))
            continue
        if case.file == WHOLE:
            source = file if file.exists() else folder / PROCESSOR
            keys = json.loads(source.read_text())
            keys = keys if "image_processor" in keys else {"image_processor": keys}
            inner = keys["image_processor"]
            if key == "alone":
                (folder / PROCESSOR).unlink()
            else:
                inner[key] = value
        else:
            keys = inner = json.loads(file.read_text()) if file.exists() else {}
            inner[key] = value
        if value == ABSENT:
            del inner[key]
        file.write_text(json.dumps(keys))


# ---- outputs -------------------------------------------------------------------------------------


def picture() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)


def some(pixels: np.ndarray) -> list[float]:
    """Fifty numbers of a picture, of all channels, so that the golden stays small."""
    flat = pixels.ravel()
    return flat[:: max(1, len(flat) // 50) | 1].tolist()


def ours(case: Case, folder: pathlib.Path) -> Any:
    """The same, by us. Raises UserError or DataError."""
    if case.kind == "sentences":
        return vectors(folder, [*TEXTS, "AAA", TEXTS[0] * 2]).tolist()
    if case.kind.startswith("pictures"):
        file = folder / "config.json"  # without its tensors, which take longer
        config = config_of(json.loads(file.read_text()), file)
        crop = "center_crop" in vars(config) and config.center_crop
        form = images.Form(config.image_size, 3, config.resample, center_crop=crop)
        pixels = images.resized(PIL.Image.fromarray(picture()), form) / 255
        return some((pixels - np.array(config.mean)) / np.array(config.std))
    tokens = tokenizer.from_files(tokenizer.read(folder), str(folder))
    return [whole_texts.around(ids, tokens).tolist() for ids in tokens.encode(TEXTS)]


def vectors(folder: pathlib.Path, texts: list[str]) -> np.ndarray:
    """As recipes.embed makes them."""
    from recipes import embed

    out = folder.with_name(f"{folder.name}.npy")
    out.unlink(missing_ok=True)
    lines = folder.with_name(f"{folder.name}.jsonl")
    lines.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    flags = embed.Embed(restore_from=f"hf:{folder}", dataset=str(lines), out=str(out))
    embed.main(embed.Devices(mesh="1"), flags)
    return np.load(out)


def outcome(case: Case, wanted: Any, plain: Any, folder: pathlib.Path) -> str:
    """One of the above, for a case's folder.

    Args:
      wanted: their output; None: they refuse it too.
      plain: their output without the change.
    """
    try:
        found = ours(case, folder)
    except (UserError, DataError):
        return REFUSED
    if wanted is None:
        return WITHOUT_EFFECT  # there is no right value
    same_shape = np.shape(np.asarray(found, object)) == np.shape(np.asarray(wanted, object))
    if case.kind.startswith(("pictures", "sentences")):
        close = np.shape(found) == np.shape(wanted) and np.allclose(found, wanted, atol=TOLERANCE)
    else:
        close = same_shape and found == wanted
    if not close:
        return WRONG
    return SAME if wanted != plain or not case.keys else WITHOUT_EFFECT
