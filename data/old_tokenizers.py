"""A tokenizer.json made from the files of old repositories, as `transformers` reads them.

    vocab.json, merges.txt    byte-level BPE: GPT-2's, RoBERTa's, CLIP's or Qwen's
    vocab.txt                 BERT's word pieces

The same files mean other ids to another class, which tokenizer_config.json names, or else the model's
config.json by its model_type.
"""

import json
import pathlib
from collections.abc import Callable
from typing import Any

from data import DataError, added_tokens, buckets

PAIRS = ("vocab.json", "merges.txt")
WORD_PIECES = "vocab.txt"
FILES = (*PAIRS, WORD_PIECES)
CONFIG, SPECIAL, MODEL = "tokenizer_config.json", "special_tokens_map.json", "config.json"
GPT2_END = "<|endoftext|>"  # ends a document in byte-level vocabularies; old files don't mark it
GPT2, ROBERTA, CLIP, QWEN2 = (f"{x}Tokenizer" for x in ("GPT2", "Roberta", "CLIP", "Qwen2"))
BERT = "BertTokenizer"
CLASSES = {"DistilBertTokenizer": BERT} | {x: x for x in (GPT2, ROBERTA, CLIP, QWEN2, BERT)}
MODEL_TYPES = {"gpt2": GPT2, "roberta": ROBERTA, "clip": CLIP, "bert": BERT, "distilbert": BERT}
MODEL_TYPES |= dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), QWEN2)
# Control tokens that the files don't name.
IN_ANGLES = {"bos": "<s>", "eos": "</s>", "sep": "</s>", "cls": "<s>"}
IN_ANGLES |= {x: f"<{x}>" for x in ("unk", "pad", "mask")}
IN_BRACKETS = {x: f"[{x.upper()}]" for x in ("unk", "sep", "pad", "cls", "mask")}
CONTROL = {
    GPT2: {},  # as its config.json says
    QWEN2: {"eos": GPT2_END, "pad": GPT2_END},
    ROBERTA: IN_ANGLES,
    CLIP: {"bos": "<|startoftext|>", "eos": GPT2_END, "unk": GPT2_END, "pad": GPT2_END},
    BERT: IN_BRACKETS,
}
CLIP_WORDS = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read(folder: pathlib.Path) -> tuple[bytes, dict[str, Any]] | None:
    """(a tokenizer.json, the keys of its tokenizer_config.json with defaults) of a folder.

    None without these files. Raises DataError if they can't be read, or are of another tokenizer.
    """
    has_pairs = all((folder / name).is_file() for name in PAIRS)
    if not has_pairs and not (folder / WORD_PIECES).is_file():
        return None
    config, special, model = (_json(folder / name) for name in (CONFIG, SPECIAL, MODEL))
    named = config.get("tokenizer_class") or model.get("tokenizer_class") or ""
    kind = CLASSES.get(named.removesuffix("Fast")) or MODEL_TYPES.get(model.get("model_type", ""))
    if not named and not model:
        kind = GPT2 if has_pairs else BERT
    if kind is None or (kind == BERT) == has_pairs:
        files = " and ".join(PAIRS) if has_pairs else WORD_PIECES
        raise DataError(
            f"{folder} has its tokenizer only as {files} of a {named or model.get('model_type')}, which "
            "the zoo does not read; add its tokenizer.json (transformers' save_pretrained writes one)"
        )
    settings = added_tokens.settings(config, special)
    names = CONTROL[kind] | {
        name.removesuffix("_token"): text
        for name, text in added_tokens.control_tokens(settings).items()
    }
    try:
        library = MAKERS[kind](folder, names, config)
    except Exception as error:  # the library's exceptions have no common base
        files = PAIRS if has_pairs else (WORD_PIECES,)
        raise DataError(
            f"{folder} has a {' and '.join(files)} that can't be read ({buckets.reason(error)}); fetch "
            "them again"
        ) from None
    stated = {f"{name}_token": text for name, text in CONTROL[kind].items()}
    return library.to_str().encode(), stated | config


def _json(file: pathlib.Path) -> dict[str, Any]:
    try:
        keys = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError:
        keys = None
    if not isinstance(keys, dict):
        raise DataError(f"{file} is not a JSON object; fetch it again")
    return keys


def _add_special(library, names: dict[str, str]) -> None:
    """Marks control tokens that the vocabulary has: a model may lack rows for others."""
    from tokenizers import AddedToken

    texts = [x for x in dict.fromkeys(names.values()) if library.token_to_id(x) is not None]
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])


def _byte_level(folder: pathlib.Path, names: dict[str, str], config: dict[str, Any], **options):
    from tokenizers import Tokenizer, decoders, models

    vocabulary, merges = (str(folder / name) for name in PAIRS)
    library = Tokenizer(models.BPE.from_file(vocabulary, merges, **options))
    library.decoder = decoders.ByteLevel()
    return library


def _gpt2(folder: pathlib.Path, names: dict[str, str], config: dict[str, Any]):
    from tokenizers import AddedToken, pre_tokenizers, processors

    library = _byte_level(folder, names, config)
    prefix = bool(config.get("add_prefix_space"))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    library.post_processor = processors.ByteLevel(trim_offsets=False)
    if library.token_to_id(GPT2_END) is not None:
        library.add_special_tokens([AddedToken(GPT2_END, special=True)])
    _put_around(library, {"bos": GPT2_END, "eos": GPT2_END} | names, config)
    return library


def _qwen2(folder: pathlib.Path, names: dict[str, str], config: dict[str, Any]):
    from tokenizers import Regex, normalizers, pre_tokenizers, processors

    library = _byte_level(folder, names, config)
    library.normalizer = normalizers.NFC()
    prefix = bool(config.get("add_prefix_space"))
    words = pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated", invert=False)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    library.post_processor = processors.ByteLevel(trim_offsets=False)
    _add_special(library, names)
    _put_around(library, names, config)
    return library


def _put_around(library, names: dict[str, str], config: dict[str, Any]) -> None:
    """Puts the control tokens around each text that the settings ask for."""
    from tokenizers import processors

    asked = {x: names[x] for x in ("bos", "eos") if config.get(f"add_{x}_token") and x in names}
    if asked:
        order = (asked.get("bos", ""), "$A", asked.get("eos", ""))
        library.post_processor = processors.TemplateProcessing(
            single=[token for token in order if token],
            special_tokens=[_with_id(library, text) for text in {*asked.values()}],
        )


def _with_id(library, text: str) -> tuple[str, int]:
    """(token, its id). Raises ValueError if the vocabulary lacks it."""
    number = library.token_to_id(text)
    if number is None:
        raise ValueError(f"there is no {text}")
    return text, number


def _roberta(folder: pathlib.Path, names: dict[str, str], config: dict[str, Any]):
    from tokenizers import pre_tokenizers

    library = _byte_level(folder, names, config)
    prefix = bool(config.get("add_prefix_space"))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    _add_special(library, names)
    _put_between(library, names["cls"], names["sep"], add_prefix_space=prefix)
    return library


def _clip(folder: pathlib.Path, names: dict[str, str], config: dict[str, Any]):
    from tokenizers import Regex, normalizers, pre_tokenizers

    library = _byte_level(
        folder, names, config, end_of_word_suffix="</w>", unk_token=names["unk"], fuse_unk=False
    )
    spaces = normalizers.Replace(Regex(r"\s+"), " ")
    library.normalizer = normalizers.Sequence([normalizers.NFC(), spaces, normalizers.Lowercase()])
    words = pre_tokenizers.Split(Regex(CLIP_WORDS), behavior="removed", invert=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    _add_special(library, names)
    _put_between(library, names["bos"], names["eos"], add_prefix_space=False)
    return library


def _put_between(library, first: str, last: str, add_prefix_space: bool) -> None:
    """Puts control tokens around each text. They must be in the vocabulary."""
    from tokenizers import processors

    around = [_with_id(library, text) for text in (last, first)]
    library.post_processor = processors.RobertaProcessing(
        *around, trim_offsets=False, add_prefix_space=add_prefix_space
    )


def _bert(folder: pathlib.Path, names: dict[str, str], config: dict[str, Any]):
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    pieces = models.WordPiece.from_file(str(folder / WORD_PIECES), unk_token=names["unk"])
    library = Tokenizer(pieces)
    library.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case", True),
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix="##")
    _add_special(library, names)
    first, last = names["cls"], names["sep"]
    library.post_processor = processors.TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0",
        pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
        special_tokens=[_with_id(library, text) for text in (first, last)],
    )
    return library


MAKERS: dict[str, Callable[[pathlib.Path, dict[str, str], dict[str, Any]], Any]] = {
    GPT2: _gpt2,
    QWEN2: _qwen2,
    ROBERTA: _roberta,
    CLIP: _clip,
    BERT: _bert,
}
