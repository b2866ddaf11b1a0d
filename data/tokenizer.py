"""Text to token ids and back: bytes, or a tokenizer.json read by the library `tokenizers`.

    find("bytes")              # a token is a byte, 0 to 255; 256 starts each document
    find("tokenizer.json")     # a file, or a folder that has one, such as a Hugging Face model
    find("org/name")           # a model on the Hub
    from_files(files)          # files stored next to a checkpoint's weights

The files besides tokenizer.json describe the model's chat format: its chat template (chat.py) and
the tokens that end an answer.
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
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from data import DataError, added_tokens, buckets, chat, hub, old_tokenizers

MAIN = "tokenizer.json"
CONFIG, GENERATION = "tokenizer_config.json", "generation_config.json"
TEMPLATE = "chat_template.jinja"
OLD_TEMPLATE = "chat_template.json"  # of older processors, for texts with pictures
SPECIAL, ADDED = "special_tokens_map.json", "added_tokens.json"
# Files that a model folder may have.
FILES = (MAIN, CONFIG, TEMPLATE, OLD_TEMPLATE, GENERATION, SPECIAL, ADDED)
MODEL = "config.json"  # the model's own; kept only where no other file names the end-of-text token
# Unsupported formats: sentencepiece's and tiktoken's.
PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model")
# The characters that stand for bytes in byte-level vocabularies (GPT-2): printable ones for themselves.
PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + n): b for n, b in enumerate(OTHERS)}
# Control tokens that divide an answer of GPT-OSS into parts (harmony) → how a terminal shows them:
# [analysis] The user asks …
# assistant[final] Paris.
HARMONY = {"<|start|>": "\n", "<|channel|>": "[", "<|message|>": "] ", "<|end|>": ""}
START = 256  # starts each document of bytes
PADDED = 384  # vocabulary of our byte models: 257, padded to a multiple of 128
BLOCK = 2**20  # tokens that `text_bytes` decodes at once
GUIDE = "recipes/docs/tokenizers.md"
TRAIN = ("train", "new", "auto")  # what people write who look for a run that trains its tokenizer

# The shortest text of a control token that is looked for in texts: "!" pads in some vocabularies.
SPELLED = 3

_claiming = threading.Lock()


class TwoTexts(NamedTuple):
    """What a tokenizer puts around two texts of one row, such as [CLS] … [SEP] … [SEP]: ids and types."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    before_types: tuple[int, ...]
    between_types: tuple[int, ...]
    after_types: tuple[int, ...]
    first_type: int
    second_type: int


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, made by `find` or `from_files`. Threads may share one."""

    name: str = dataclasses.field(compare=False)  # --tokenizer's value, for messages
    sha256: str  # tokenizer.json's
    size: int  # ids are 0 … size - 1
    files: dict[str, bytes] = dataclasses.field(repr=False, compare=False)  # {} for bytes
    start: tuple[int, ...]  # ids before each document
    end: tuple[int, ...]  # ids that end a text
    added: tuple[str, ...] = ()  # tokens that files next to tokenizer.json add (added_tokens.py)

    def __reduce__(self):  # pickled as its files
        return from_files, (self.files, self.name)

    @property
    def dtype(self) -> np.dtype:
        """The smallest type that holds every id."""
        return np.dtype(np.uint16 if self.size <= 2**16 else np.uint32)

    @property
    def vocabulary(self) -> int:
        """Ids that a model may write are below this: all, or the 256 bytes."""
        return self.size if self.files else START

    @functools.cached_property
    def _library(self):
        return _library(self.files, self.name)[0]

    @functools.cached_property
    def _encoders(self) -> dict[bool, Any]:
        return {}

    def _encoder(self, control: bool):
        """The library's tokenizer, which recognizes control tokens in a text or treats them as text.

        The library has a switch for this, but flipping it would change what other threads encode. A
        second copy is made only if both kinds are used: 40 MB for a vocabulary of 151,669.
        """
        with _claiming:
            if control not in self._encoders:
                made = _library(self.files, self.name)[0] if self._encoders else self._library
                made.encode_special_tokens = not control
                self._encoders[control] = made
            return self._encoders[control]

    def shared(self) -> dict[str, bytes]:
        """The files to put into a model folder that other programs read."""
        files = self.files or bytes_files()
        return {name: content for name, content in files.items() if name != MODEL}

    def control(self, kind: str) -> tuple[int, str] | None:
        """(id, text) of the "bos" or "eos" token in tokenizer_config.json, or None."""
        if not self.files:
            return (START, "") if kind == "bos" else None
        text = self.control_tokens.get(f"{kind}_token")
        token = None if text is None else self._library.token_to_id(text)
        return None if text is None or token is None else (token, text)

    def config_ids(self) -> dict[str, int | list[int] | None]:
        """The ids that start and end a text, as config.json has them."""
        begin = _json(self.files, GENERATION, self.name).get("bos_token_id")
        if begin is None and not self.start and (named := self.control("bos")):
            begin = named[0]
        begin = self.start[0] if begin is None and self.start else begin
        end = list(self.end) if len(self.end) > 1 else next(iter(self.end), None)
        return {"bos_token_id": begin, "eos_token_id": end}

    def encode(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """The int32 ids of each text alone; control tokens in a text are encoded as plain text.

        Bytes that are not UTF-8 become U+FFFD, except with the bytes tokenizer.
        """
        if not self.files:
            raw = (t if isinstance(t, bytes) else t.encode(errors="replace") for t in texts)
            return [np.frombuffer(text, np.uint8).astype(np.int32) for text in raw]
        return self._encode(list(map(_text, texts)), control=False)

    @functools.cached_property
    def closing(self) -> tuple[int, ...]:
        """Ids that the tokenizer puts behind a whole text, such as [SEP]."""
        if not self.files:
            return ()
        with _encoding(self.name):
            example = self._library.encode("a")
        special = [*example.special_tokens_mask]
        behind = special[::-1].index(0) if 0 in special else 0
        return tuple(example.ids[len(special) - behind :])

    @functools.cached_property
    def two_texts(self) -> TwoTexts:
        """The form of a row of two texts. Raises DataError if nothing would divide them."""
        if not self.files:
            return TwoTexts((START,), (START,), (), (0,), (1,), (), 0, 1)
        with _encoding(self.name):
            example = self._library.encode("a", "b")
        text = [example.sequence_ids.index(number) for number in (0, 1)]
        first_end = max(i for i, number in enumerate(example.sequence_ids) if number == 0) + 1
        second_end = max(i for i, number in enumerate(example.sequence_ids) if number == 1) + 1
        parts = slice(text[0]), slice(first_end, text[1]), slice(second_end, None)
        if not example.ids[parts[1]]:
            raise DataError(
                f"--tokenizer={self.name} puts no token between two texts of a row; use an encoder's "
                "tokenizer, or bytes"
            )
        before, between, after = (tuple(example.ids[part]) for part in parts)
        before_types, between_types, after_types = (tuple(example.type_ids[x]) for x in parts)
        first_type, second_type = (example.type_ids[begin] for begin in text)
        return TwoTexts(
            before,
            between,
            after,
            before_types,
            between_types,
            after_types,
            first_type,
            second_type,
        )

    @functools.cached_property
    def _spelled(self) -> re.Pattern[str] | None:
        texts = [text for text in self._special_texts if len(text) >= SPELLED]
        return re.compile("|".join(map(re.escape, sorted(texts)))) if texts else None

    def spells_control(self, text: str) -> bool:
        """Whether a text spells a control token, as a rendered chat does: `encode` reads it as letters."""
        return self._spelled is not None and bool(self._spelled.search(text))

    def decode(self, tokens, after=()) -> str:
        """Text without control tokens; ids outside the vocabulary, such as padding, are dropped.

        Args:
          after: the tokens before these. Without them a decoder may drop the first space.
        """
        if len(after):
            return self.decode([*after, *tokens])[len(self.decode(after)) :]
        ids = [int(t) for t in tokens if 0 <= t < self.size]
        if not self.files:
            return bytes(t for t in ids if t < START).decode(errors="replace")
        return self._library.decode(ids, skip_special_tokens=True)

    @functools.cached_property
    def marks(self) -> dict[int | None, str]:
        """HARMONY by the tokens' ids; {} for other chat formats."""
        if not self.files:
            return {}
        marks = {self._library.token_to_id(token): text for token, text in HARMONY.items()}
        return {} if None in marks else marks

    def last_part(self, tokens) -> Any:
        """The tokens of an answer's last part, after its channel; all tokens in other formats."""
        begins = [i for i, token in enumerate(tokens) if self.marks.get(int(token)) == "] "]
        return tokens[begins[-1] + 1 :] if begins else tokens

    @functools.cached_property
    def a_text(self) -> np.ndarray:
        """The ids of some text, as the `after` of tokens that do not begin a text."""
        return self.encode(["a"])[0]

    def stream(self, after=()) -> "Stream":
        """Decodes token by token."""
        return Stream(self, after)

    @property
    def generation(self) -> dict[str, Any]:
        """Sampling settings in generation_config.json: temperature, top_p, …; {} without one."""
        return _json(self.files, GENERATION, self.name)

    def prompt(self, text: str) -> np.ndarray:
        """The int32 ids, at least one, of a document that begins with this text."""
        ids = [*self.start, *self.encode([text])[0]]
        # An empty document begins after the end of another one.
        return np.array(ids or self.end[:1] or [0], np.int32)

    def text_bytes(self, tokens: np.ndarray) -> int:
        """Bytes of the text that these tokens stand for; control tokens stand for none."""
        if not self.files:
            return int((tokens < START).sum())
        size, first = 0, 0
        while first < len(tokens):  # decoded in blocks, to save memory
            end = first + BLOCK
            while end < len(tokens) and self.decode(tokens[max(end - 4, 0) : end]).endswith(
                "\ufffd"
            ):
                end += 1  # perhaps in the middle of a character
            text = self.decode(tokens[first:end], after=self.a_text if first else ())
            complete = text.rstrip("\ufffd")
            size += len(complete.encode())
            if ends := len(text) - len(complete):
                size += self._bytes_at_the_end(tokens[first:end], ends)
            first = end
        return size

    def _bytes_at_the_end(self, tokens: np.ndarray, ends: int) -> int:
        """Bytes of the `ends` U+FFFD that the text of tokens ends with, without a character that is
        incomplete: decoding gives U+FFFD for that too.
        """
        last = b"".join(map(self._token_bytes, tokens[-3 * ends - 3 :].tolist()))
        text, _ = codecs.utf_8_decode(last, "replace")  # stops before the incomplete character
        return 3 * min(len(text) - len(text.rstrip("\ufffd")), ends)

    def _token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; control tokens stand for none."""
        piece = self._library.id_to_token(token) or ""
        if token in self.special:
            return b""
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece):
            return bytes.fromhex(byte[1])
        decoder = self._library.decoder
        if decoder is not None and b"ByteLevel" in decoder.__getstate__():
            return bytes(BYTE_OF[character] for character in piece if character in BYTE_OF)
        return piece.encode()

    @functools.cached_property
    def template(self) -> str:
        """The model's chat template; "" if it has none."""
        return _template(self.files, self.name)

    @functools.cached_property
    def tool_template(self) -> str:
        """The template of conversations with tools: the one named tool_use, where there are several."""
        return _template(self.files, self.name, "tool_use") or self.template

    @functools.cached_property
    def control_tokens(self) -> dict[str, str]:
        """The texts of bos_token, eos_token, …, where the files name them."""
        return _control_tokens(self.files, self.name)

    @functools.cached_property
    def special(self) -> frozenset[int]:
        """Ids of control tokens."""
        return frozenset({*self.start, *self.end, *self._special_texts.values()})

    @functools.cached_property
    def _special_texts(self) -> dict[str, int]:
        """The texts of control tokens, and their ids."""
        added = self._library.get_added_tokens_decoder().items() if self.files else ()
        return {token.content: number for number, token in added if token.special}

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        today: datetime.datetime | None = None,
        context: dict[str, Any] | None = None,
    ) -> str:
        """A conversation, [{"role": …, "content": …}, …], rendered by the model's chat template.

        Args:
          context: what else the template gets, such as {"tools": […]}.

        Raises DataError if there is no template, or it refuses these messages.
        """
        context = context or {}
        template = self.tool_template if context.get("tools") else self.template
        variables = self.control_tokens | context | {"add_generation_prompt": add_generation_prompt}
        return chat.render(template, messages, variables, self.name, today)

    def ask(
        self, messages: list[dict[str, Any]], context: dict[str, Any] | None = None
    ) -> np.ndarray:
        """The int32 ids of a conversation for the model to answer. Raises DataError."""
        return self.encode_rendered(self.render(messages, context=context))

    def encode_rendered(self, text: str) -> np.ndarray:
        """The int32 ids of a rendered template, which spells its control tokens."""
        if not self.files:
            return self.encode([text])[0]
        return self._encode([_text(text)], control=True)[0]

    def _encode(self, texts: list[str], control: bool) -> list[np.ndarray]:
        with _encoding(self.name):  # a batch, even of one text: `encode` holds Python's lock
            encodings = self._encoder(control).encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in encodings]

    @functools.cached_property
    def chat_key(self) -> str:
        """sha256 of what decides a conversation's tokens and targets, except for tokenizer.json."""
        about = [chat.CODE, self.template, self.control_tokens, self.start, self.end]
        about.append(chat.TRAINING_DAY.isoformat())
        about += [self.added] if self.added else []
        about += [self.tool_template] if self.tool_template != self.template else []
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


class Stream:
    """Text as its tokens arrive: `put` returns whole characters, `rest` the incomplete last one."""

    def __init__(self, tokenizer: Tokenizer, after):
        self._tokenizer = tokenizer
        self._shown = after  # the last tokens whose text was returned
        self._held: list[int] = []  # tokens without text so far

    def put(self, token: int) -> str:
        if (mark := self._tokenizer.marks.get(token)) is not None:
            text, self._shown = self.rest(), ()
            return text + mark
        self._held.append(token)
        text = self._tokenizer.decode(self._held, self._shown)
        if not text or text.endswith("\ufffd"):  # perhaps a part of a character
            return ""
        self._shown, self._held = self._held, []
        return text

    def rest(self) -> str:
        """The text still held back; bytes that are not UTF-8 become U+FFFD."""
        text = self._tokenizer.decode(self._held, self._shown)
        self._held = []
        return text


# ---- finding and reading -------------------------------------------------------------------------


def find(name: str) -> Tokenizer:
    """Finds a tokenizer by name: "bytes", a tokenizer.json, a folder, or ORG/NAME on the Hub.

    Raises DataError if there is none, or it can't be read.
    """
    if name == "bytes":
        return BYTES
    what = f"--tokenizer={name}"
    path = buckets.local(name, what)
    try:
        if name and path.is_file():
            files = read(path.parent) if path.name == MAIN else {MAIN: path.read_bytes()}
        elif name and path.is_dir():
            files = read(path)
        elif re.fullmatch(hub.MODEL_NAME, name):
            files = read(hub.snapshot(name, [*FILES, *PIECES, *old_tokenizers.FILES, MODEL], what))
        elif name in TRAIN:
            raise DataError(
                f"{what}: runs train no tokenizer; five lines with the library tokenizers do ({GUIDE}), "
                "then use --tokenizer=FOLDER"
            )
        else:
            raise DataError(
                f"{what} does not exist; use bytes, a tokenizer.json, a folder that has one, or "
                f"ORG/NAME on the Hub, or train one in five lines ({GUIDE})"
            )
    except OSError as error:
        raise DataError(f"{what[:200]} can't be read ({error.strerror}); use another") from None
    if not files:
        raise DataError(f"{what} has no {MAIN}; use a folder that has one, or bytes")
    return from_files(files, name)


def read(folder: pathlib.Path) -> dict[str, bytes]:
    """The tokenizer's files in a model folder, name → content; {} if it has none.

    Raises DataError if the folder has it only in one of PIECES.
    """
    files: dict[str, bytes] = {}
    made = None
    if not (folder / MAIN).is_file():
        made = old_tokenizers.read(folder)
    if not made and not (folder / MAIN).is_file():
        for name in PIECES:
            if (folder / name).exists():
                raise DataError(
                    f"{folder} has its tokenizer only in {name}, which the zoo does not read; add "
                    f"its {MAIN} (transformers' save_pretrained writes one)"
                )
        return {}
    files |= {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    if made:
        files[MAIN], settings = made
        files |= {CONFIG: json.dumps(settings, indent=2).encode()} if settings else {}
    if _end(files, folder) is None and (folder / MODEL).is_file():
        files[MODEL] = (folder / MODEL).read_bytes()
    return files


def from_files(files: dict[str, bytes], name: str = "") -> Tokenizer:
    """Makes a tokenizer from its files; {} means bytes. Raises DataError if they can't be read."""
    digest = hashlib.sha256(files[MAIN]).hexdigest() if files else BYTES.sha256
    if digest == BYTES.sha256:
        return BYTES
    library, added = _library(files, name)
    vocabulary = library.get_vocab(with_added_tokens=True)
    size = 1 + max(vocabulary.values(), default=-1)
    with _encoding(name):
        example = library.encode("a")
    inside = [not special for special in example.special_tokens_mask]
    start = example.ids[: inside.index(True)] if any(inside) else []
    named = _end(files, name)
    end: list[Any] = [vocabulary.get(named, named)] if isinstance(named, str) else named or []
    if not size or not all(type(token) is int and 0 <= token < size for token in end):
        raise DataError(
            f"the tokenizer {name} has {size} tokens, but {end} should end a text; use files that "
            "belong together"
        )
    made = Tokenizer(name, digest, size, files, tuple(start), tuple(end), added)
    made.__dict__["_library"] = library  # a large one takes a second to read
    return made


def _end(files: dict[str, bytes], name) -> str | list | None:
    """The ids that end a text, or a token's text, from the first file that names any."""
    by_name = _control_tokens(files, name).get("eos_token")
    for named in (
        _json(files, GENERATION, name).get("eos_token_id"),
        by_name,
        _json(files, MODEL, name).get("eos_token_id"),
    ):
        if named is not None and named != []:
            return named if isinstance(named, (str, list)) else [named]
    return None


def _control_tokens(files: dict[str, bytes], name="") -> dict[str, str]:
    """The texts of bos_token, eos_token, …, where the files name them."""
    return added_tokens.control_tokens(_settings(files, name))


def _settings(files: dict[str, bytes], name: str) -> dict[str, Any]:
    return added_tokens.settings(_json(files, CONFIG, name), _json(files, SPECIAL, name))


def _template(files: dict[str, bytes], name: str, which: str = "default") -> str:
    template = files[TEMPLATE].decode(errors="replace") if TEMPLATE in files else ""
    of_processor = chat.template(_json(files, OLD_TEMPLATE, name), which)
    return template or of_processor or chat.template(_json(files, CONFIG, name), which)


def _json(files: dict[str, bytes], file: str, name) -> dict[str, Any]:
    try:
        value = json.loads(files.get(file, b"{}"))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise DataError(f"{file} of the tokenizer {name} is not a JSON object; fetch it again")
    return value


def _library(files: dict[str, bytes], name: str) -> tuple[Any, tuple[str, ...]]:
    """(the library's tokenizer, the tokens that files next to tokenizer.json add to it)."""
    import tokenizers

    # chunks.py has its own threads. The library's, one for each core, would take 10 MB each.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        made = tokenizers.Tokenizer.from_str(files[MAIN].decode())
    except Exception as error:  # the library's exceptions have no common base
        raise DataError(
            f"{MAIN} of the tokenizer {name} can't be read ({buckets.reason(error)}); fetch it again"
        ) from None
    made.no_truncation()
    made.no_padding()
    settings, added = _settings(files, name), _json(files, ADDED, name)
    templates = _template(files, name) + _template(files, name, "tool_use")
    return made, added_tokens.add(made, settings, added, templates, name)


@contextlib.contextmanager
def _encoding(name: str) -> Iterator[None]:
    """Turns errors that the library raises for a text into a DataError."""
    try:
        yield
    except Exception as error:  # the library's exceptions have no common base
        raise DataError(
            f"the tokenizer {name} can't encode every text ({buckets.reason(error)}); use one that has a "
            "token for unknown words or characters"
        ) from None


def _text(text: str | bytes) -> str:
    raw = text if isinstance(text, bytes) else text.encode(errors="replace")
    return raw.decode(errors="replace")


# ---- bytes ---------------------------------------------------------------------------------------


def bytes_files() -> dict[str, bytes]:
    """The bytes tokenizer as a tokenizer.json: an id is a byte, and 256 starts a text."""
    folder = pathlib.Path(__file__).parent / "bytes"
    return {name: (folder / name).read_bytes() for name in (MAIN, CONFIG)}


BYTES = Tokenizer(
    "bytes", hashlib.sha256(bytes_files()[MAIN]).hexdigest(), START + 1, {}, (START,), ()
)
