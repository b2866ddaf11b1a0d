"""Text to token ids and back: bytes, or a tokenizer.json by way of the library `tokenizers`.

    find("bytes")              # a token is a byte, 0 to 255; 256 is in front of each document
    find("tokenizer.json")     # a file, or a folder that has one, as Hugging Face's models do
    find("org/name")           # that of a model on the Hub
    from_files(files)          # as it lies beside a checkpoint's weights

Besides tokenizer.json the files are what says how a model is talked to: its chat template (chat.py)
and the tokens that end an answer.
"""

import codecs
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from data import DataError, buckets, chat, hub

MAIN = "tokenizer.json"
CONFIG, GENERATION, TEMPLATE = (
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)
SPECIAL = "special_tokens_map.json"
FILES = (MAIN, CONFIG, TEMPLATE, GENERATION, SPECIAL)  # that a model folder may have
MODEL = "config.json"  # the model's own: kept only where no other file says which token ends a text
PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")  # what can't be read
CONTROL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # NAME_token, for templates
START = 256  # of bytes
PADDED = 384  # tokens of our models of bytes: 257, padded to a multiple of 128


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Made by `find` or `from_files`; pickled as its files."""

    name: str = dataclasses.field(compare=False)  # what --tokenizer said, for messages
    sha256: str  # of tokenizer.json
    size: int  # ids are 0 … size - 1
    files: dict[str, bytes] = dataclasses.field(repr=False, compare=False)  # {} for bytes
    start: tuple[int, ...]  # ids in front of each document
    end: tuple[int, ...]  # ids that end a text

    def __reduce__(self):
        return from_files, (self.files, self.name)

    # The library's tokenizer, one for both ways: 40 MB of a vocabulary of 151,669. Fetch it anew for
    # each use.

    @property
    def _plain(self):  # spells control tokens
        self._library.encode_special_tokens = True
        return self._library

    @property
    def _control(self):  # recognises them
        self._library.encode_special_tokens = False
        return self._library

    @functools.cached_property
    def _library(self):
        return _library(self.files, self.name)

    def shared(self) -> dict[str, bytes]:
        """The files as they lie in a model folder that others read."""
        files = self.files or bytes_files()
        return {name: content for name, content in files.items() if name != MODEL}

    def control(self, kind: str) -> tuple[int, str] | None:
        """(id, text) of its "bos" or "eos" token, by tokenizer_config.json; None if it names none."""
        text = self.control_tokens.get(f"{kind}_token")
        token = None if text is None else self._control.token_to_id(text)
        if not self.files and kind == "bos":
            return START, ""
        return None if token is None else (token, text)

    def config_ids(self) -> dict[str, int | list[int] | None]:
        """What config.json says of them."""
        begin = _json(self.files, GENERATION, self.name).get("bos_token_id")
        if begin is None and not self.start and (named := self.control("bos")):
            begin = named[0]
        begin = self.start[0] if begin is None and self.start else begin
        end = list(self.end) if len(self.end) > 1 else next(iter(self.end), None)
        return {"bos_token_id": begin, "eos_token_id": end}

    def encode(self, texts: list[str | bytes]) -> list[np.ndarray]:
        """The int32 ids of each text, with nothing around them; a text never holds control tokens.

        What is not UTF-8 is U+FFFD to all tokenizers but bytes.
        """
        if not self.files:
            raw = (t if isinstance(t, bytes) else t.encode(errors="replace") for t in texts)
            return [np.frombuffer(text, np.uint8).astype(np.int32) for text in raw]
        with _encoding(self.name):
            found = self._plain.encode_batch_fast(list(map(_text, texts)), add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in found]

    def decode(self, tokens, after=()) -> str:
        """Text without control tokens; ids that are none, as padding, are dropped.

        Args:
          after: the tokens of a text that these go on from; else a decoder may drop their first space.
        """
        if len(after):
            last = after[-1:]
            return self.decode([*last, *tokens])[len(self.decode(last)) :]
        ids = [int(t) for t in tokens if 0 <= t < self.size]
        if not self.files:
            return bytes(t for t in ids if t < START).decode(errors="replace")
        return self._control.decode(ids, skip_special_tokens=True)

    def stream(self, after=()) -> "Stream":
        """As `decode`, token by token."""
        return Stream(self, after)

    @property
    def generation(self) -> dict[str, Any]:
        """What generation_config.json says of writing: temperature, top_p, …; {} without one."""
        return _json(self.files, GENERATION, self.name)

    def prompt(self, text: str) -> np.ndarray:
        """The int32 ids, at least one, of a document that begins so."""
        ids = [*self.start, *self.encode([text])[0]]
        # Without any token, as behind another document.
        return np.array(ids or self.end[:1] or [0], np.int32)

    def text_bytes(self, tokens: np.ndarray) -> int:
        """Bytes of the text that these tokens stand for, of which control tokens have none."""
        if not self.files:
            return int((tokens < START).sum())
        blocks = range(0, len(tokens), 2**20)  # of which each is decoded alone
        texts = (self.decode(tokens[first : first + 2**20]) for first in blocks)
        return sum(len(text.rstrip("\ufffd").encode()) for text in texts)

    @functools.cached_property
    def template(self) -> str:
        """The model's chat template; "" if it has none."""
        found = self.files[TEMPLATE].decode(errors="replace") if TEMPLATE in self.files else ""
        return found or chat.template(_json(self.files, CONFIG, self.name))

    @functools.cached_property
    def control_tokens(self) -> dict[str, str]:
        """bos_token, eos_token, … → its text, where there is one."""
        return _control_tokens(self.files, self.name)

    @functools.cached_property
    def special(self) -> frozenset[int]:
        """Ids of control tokens."""
        found = self._control.get_added_tokens_decoder().items() if self.files else ()
        return frozenset({*self.start, *self.end, *(i for i, token in found if token.special)})

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        today: datetime.datetime | None = None,
    ) -> str:
        """A conversation, [{"role": …, "content": …}, …], as the model's chat template writes it.

        Raises DataError if there is no template, or it refuses these messages.
        """
        given = (add_generation_prompt, self.control_tokens, self.name, today)
        return chat.render(self.template, messages, *given)

    def ask(self, messages: list[dict[str, Any]]) -> np.ndarray:
        """The int32 ids of a conversation that the model is to answer. Raises DataError."""
        return self.encode_rendered(self.render(messages))

    def encode_rendered(self, text: str) -> np.ndarray:
        """The int32 ids of a rendered template, which itself says where control tokens are."""
        if not self.files:
            return self.encode([text])[0]
        with _encoding(self.name):
            found = self._control.encode(_text(text), add_special_tokens=False)
        return np.array(found.ids, np.int32)


class Stream:
    """Text as its tokens arrive: `put` returns only whole characters, `rest` what never became one."""

    def __init__(self, tokenizer: Tokenizer, after):
        self._tokenizer = tokenizer
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._begin([int(token) for token in after])

    def _begin(self, after: list[int]) -> None:
        self._held: list[int] = []  # tokens that no text has come of
        if self._tokenizer.files:
            from tokenizers.decoders import DecodeStream

            self._stream = DecodeStream(ids=after, skip_special_tokens=True)

    def put(self, token: int) -> str:
        if not 0 <= token < self._tokenizer.size:
            return ""
        if not self._tokenizer.files:
            return self._bytes.decode(bytes([token])) if token < START else ""
        self._held.append(int(token))
        try:
            text = self._stream.step(self._tokenizer._control, int(token))
        except Exception:  # bytes that are not UTF-8, one of which has been text already
            return self.rest()
        self._held = [] if text else self._held
        return text or ""

    def rest(self) -> str:
        """What is held back, at the end: bytes that are not UTF-8 become U+FFFD."""
        if not self._tokenizer.files:
            return self._bytes.decode(b"", final=True)
        held, last = self._tokenizer.decode(self._held), self._held[-1:]
        self._begin(last)
        return held


# ---- found ---------------------------------------------------------------------------------------


def find(name: str) -> Tokenizer:
    """The tokenizer of this name: "bytes", a tokenizer.json, a folder, ORG/NAME on the Hub.

    Raises DataError if there is none, or it can't be read.
    """
    if name == "bytes":
        return BYTES
    what = f"--tokenizer={name}"
    local = buckets.local(name, what) if buckets.remote(name) else os.path.expanduser(name)
    path = pathlib.Path(local)
    try:
        if name and path.is_file():
            files = read(path.parent) if path.name == MAIN else {MAIN: path.read_bytes()}
        elif name and path.is_dir():
            files = read(path)
        elif re.fullmatch(hub.MODEL_NAME, name):
            files = read(hub.snapshot(name, [*FILES, *PIECES, MODEL], what))
        else:
            raise DataError(
                f"{what} does not exist; use bytes, a tokenizer.json, a folder that has one, or "
                "ORG/NAME on the Hub"
            )
    except OSError as error:
        raise DataError(f"{what[:200]} can't be read ({error.strerror}); use another") from None
    if not files:
        raise DataError(f"{what} has no {MAIN}; use a folder that has one, or bytes")
    return from_files(files, name)


def read(folder: pathlib.Path) -> dict[str, bytes]:
    """The tokenizer's files in a model folder, name → content; {} if it has none.

    Raises DataError if all it has is a sentencepiece model.
    """
    if not (folder / MAIN).is_file():
        for name in PIECES:
            if (folder / name).exists():
                raise DataError(
                    f"{folder} has its tokenizer in {name} alone, which the zoo does not read; add "
                    f"its {MAIN} (transformers' save_pretrained writes one)"
                )
        return {}
    files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    if _end(files, folder) is None and (folder / MODEL).is_file():
        files[MODEL] = (folder / MODEL).read_bytes()
    return files


def from_files(files: dict[str, bytes], name: str = "") -> Tokenizer:
    """The tokenizer that these files are; {} is bytes. Raises DataError if they can't be read."""
    digest = hashlib.sha256(files[MAIN]).hexdigest() if files else BYTES.sha256
    if digest == BYTES.sha256:
        return BYTES
    library = _library(files, name)
    vocabulary = library.get_vocab(with_added_tokens=True)
    size = 1 + max(vocabulary.values(), default=-1)
    with _encoding(name):
        example = library.encode("a")
    inside = [not special for special in example.special_tokens_mask]
    start = example.ids[: inside.index(True)] if any(inside) else []
    end = _end(files, name)
    end = [vocabulary.get(end, end)] if isinstance(end, str) else end or []
    if not size or not all(type(token) is int and 0 <= token < size for token in end):
        raise DataError(
            f"the tokenizer {name} has {size} tokens, and {end} is to end a text; use files that "
            "belong together"
        )
    made = Tokenizer(name, digest, size, files, tuple(start), tuple(end))
    made.__dict__["_library"] = library  # a large one takes a second to read
    return made


def _end(files: dict[str, bytes], name) -> str | list | None:
    """What ends a text, by the first file that says so: ids or, in the second, a token's text."""
    by_name = _control_tokens(files, name).get("eos_token")
    for found in (
        _json(files, GENERATION, name).get("eos_token_id"),
        by_name,
        _json(files, MODEL, name).get("eos_token_id"),
    ):
        if found is not None and found != []:
            return found if isinstance(found, (str, list)) else [found]
    return None


def _control_tokens(files: dict[str, bytes], name="") -> dict[str, str]:
    """bos_token, eos_token, … → its text, where there is one."""
    said = _json(files, SPECIAL, name) | _json(files, CONFIG, name)
    found = {f"{kind}_token": said.get(f"{kind}_token") for kind in CONTROL}
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in found.items()}
    return {kind: text for kind, text in texts.items() if isinstance(text, str)}


def _json(files: dict[str, bytes], file: str, name) -> dict[str, Any]:
    try:
        found = json.loads(files.get(file, b"{}"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise DataError(f"{file} of the tokenizer {name} is not a JSON object; fetch it again")
    return found


def _library(files: dict[str, bytes], name: str):
    import tokenizers

    try:
        made = tokenizers.Tokenizer.from_str(files[MAIN].decode())
    except Exception as error:  # the library's have no common base
        raise DataError(
            f"{MAIN} of the tokenizer {name} can't be read ({hub.reason(error)}); fetch it again"
        ) from None
    made.no_truncation()
    made.no_padding()
    return made


@contextlib.contextmanager
def _encoding(name: str) -> Iterator[None]:
    """What the library raises for a text becomes a DataError."""
    try:
        yield
    except Exception as error:  # the library's have no common base
        raise DataError(
            f"the tokenizer {name} can't encode every text ({hub.reason(error)}); use one that has a "
            "token for unknown words or characters"
        ) from None


def _text(text: str | bytes) -> str:
    raw = text if isinstance(text, bytes) else text.encode(errors="replace")
    return raw.decode(errors="replace")


# ---- bytes ---------------------------------------------------------------------------------------


def bytes_files() -> dict[str, bytes]:
    """The bytes tokenizer as others read it: an id is a byte, 256 is put in front of a text."""
    shown = [
        *range(33, 127),
        *range(161, 173),
        *range(174, 256),
    ]  # ByteLevel's alphabet: themselves
    others = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    start = "<|start|>"
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    level |= {"use_regex": False}
    before = {"SpecialToken": {"id": start, "type_id": 0}}
    single = [before, {"Sequence": {"id": "A", "type_id": 0}}]
    content = {
        "version": "1.0",
        "added_tokens": [{"id": START, "content": start, **plain, "special": True}],
        "pre_tokenizer": level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {start: {"id": start, "ids": [START], "tokens": [start]}},
        },
        "decoder": level,
        "model": {
            "type": "BPE",
            "vocab": {letters[byte]: byte for byte in range(256)} | {start: START},
            "merges": [],
        },
    }
    config = {"bos_token": start, "tokenizer_class": "PreTrainedTokenizerFast"}
    texts = {MAIN: content, CONFIG: config}
    return {name: (json.dumps(text, indent=1) + "\n").encode() for name, text in texts.items()}


BYTES = Tokenizer(
    "bytes", hashlib.sha256(bytes_files()[MAIN]).hexdigest(), START + 1, {}, (START,), ()
)
