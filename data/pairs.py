"""Preference pairs: a prompt with a chosen and a rejected answer.

    {"prompt": "The capital of France is", "chosen": " Paris.", "rejected": " Rome."}
    {"prompt": [{"role": "user", …}], "chosen": [{"role": "assistant", …}], "rejected": […]}
    {"chosen": [{"role": "user", …}, {"role": "assistant", …}], "rejected": […]}   # a shared prompt
    {"system": "…", "question": "…", "chosen": "…", "rejected": "…"}               # other names
    {"prompt": "…", "completion": "…", "label": true}                              # for a loss of single answers

Messages are rendered by the model's chat template, texts are taken as they are, or, with `as_chat`, as
messages. Only answers are targets, as in conversations.py. A row of a batch is a pair, so both of its
answers are always on the same device. Of labelled answers, a row has an answer, its label, and an answer
to another prompt as if it answered the row's, whose log-probability KTO compares with; a pair is two such
rows.

Texts of answers may begin with their prompt. It is cut off if all rows of a dataset do so, each at the end
of a token; with `as_chat`, an answer is a message, which is whole.

The default pairs are made from the standard library's source: the chosen answer continues a text,
the rejected one is that continuation with letters swapped.
"""

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from data import DataError, conversations, sources, whole_texts
from data.batches import Dataset, Example, Rows
from data.conversations import PAIRS, SPEAKERS, Document, checked_messages, documents
from data.tokenizer import BYTES, Tokenizer
from data.whole_texts import Row

# Names of the columns in well-known datasets.
ANSWERS = (("chosen", "rejected"), ("preferred_output", "non_preferred_output"))
PROMPTS = ("prompt", "instruction", "question", "input", "query", "conversations")
LABELLED_ANSWERS = ("completion", "response", "answer")
LABELS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}  # as text
T = TypeVar("T")
HELD_OUT = 20  # one prompt of so many is held out, if the dataset has no split for it
TURN = "\n\nAssistant:"  # begins an answer in dialogues that are one text
# Of pairs made from a text: bytes of the prompt and of the answer, and pairs of a file at most, for
# training and held out.
PROMPT, ANSWER, OF_A_FILE = 64, 64, (4, 16)


class Made(NamedTuple):
    """A pair as tokens."""

    prompt: str  # decides whether it is held out
    chosen: Document
    rejected: Document
    label: bool | None = None  # of `chosen`, where `rejected` is an answer to another prompt


class Labelled(NamedTuple):
    """A labelled answer, as texts or messages."""

    prompt: Any
    answer: Any
    is_good: bool
    context: dict[str, Any]  # for the chat template
    where: str


def load(
    dataset: str = "stdlib",
    seq_len: int = 128,
    tokenizer: Tokenizer | None = None,
    eval_dataset: str = "",
    as_chat: bool = False,
    labelled: bool = False,
) -> Dataset:
    """Loads pairs, each of whose answers has at most seq_len positions with its prompt.

    Args:
      dataset: stdlib, or JSON Lines, Parquet, CSV or hf: datasets as in `sources.find`.
      tokenizer: None means bytes.
      eval_dataset: the held-out pairs; without it, a twentieth of the prompts, at least one.
      as_chat: whether texts are messages.
      labelled: whether rows are answers with a label; pairs become two of these.

    Raises DataError if there are no such pairs, or a row has another form.
    """
    tokenizer = tokenizer or BYTES
    read = functools.partial(_read, tokenizer=tokenizer, chat=as_chat, labelled=labelled)
    train, held_out, notes = read(dataset)
    if eval_dataset:
        train += held_out or []
        own, of_split, more_notes = read(eval_dataset)
        held_out = own + (of_split or [])
        notes += [note for note in more_notes if note not in notes]
    elif held_out is None:
        train, held_out = split_by_prompt(train, lambda pair: pair.prompt.encode(), dataset)
    if labelled:
        _check_labels(train, dataset)
    parts = {"Training data": Pairs(train, seq_len), "Held out": Pairs(held_out, seq_len)}
    for what, pairs in parts.items():
        notes += pairs.notes(what, tokenizer)
        if not len(pairs):
            raise DataError(
                f"--dataset={dataset} has no {what.lower()} pair whose answers both begin, and differ, "
                f"within --seq_len={seq_len} tokens; --seq_len={pairs.longest} keeps all whole"
            )
    digest = hashlib.sha256()
    for pairs in parts.values():
        digest.update(pairs.fingerprint)
    zeros, nothing = np.zeros(seq_len, np.int32), np.full(seq_len, -1, np.int32)
    return Dataset(
        train=parts["Training data"],
        held_out=parts["Held out"],
        filler={
            "tokens": zeros,
            "targets": nothing,
            "rejected_tokens": zeros,
            "rejected_targets": nothing,
        }
        | ({"label": np.zeros((), np.float32)} if labelled else {}),
        unit="tokens",
        units=2 * seq_len,
        config={"vocab_size": tokenizer.size} if tokenizer.files else {},
        facts={"dataset": dataset, "seq_len": seq_len, "fingerprint": digest.hexdigest()}
        | ({"eval_dataset": eval_dataset} if eval_dataset else {})
        | ({"tokenizer": tokenizer.sha256} if tokenizer.files else {}),
        notes=tuple(notes),
    )


class Pairs(Rows):
    """Pairs as rows: `tokens` and `targets` of the chosen answer, `rejected_…` of the other.

    A row has `length` positions. Longer answers are cut; a pair is left out if a cut leaves one of its
    answers without a target, or both alike.
    """

    def __init__(self, pairs: list[Made], length: int):
        self._length = length
        self.made, self.cut, self.lost, self.of = len(pairs), 0, 0, 0
        self.longest = max((len(x.tokens) - 1 for _, *both, _ in pairs for x in both), default=0)
        kept, labels = [], []
        for _, *both, label in pairs:
            sides = [Document(x.tokens[: length + 1], x.targets[: length + 1]) for x in both]
            self.of += sum(int(x.targets.sum()) for x in both)
            self.cut += sum(len(x.tokens) > length + 1 for x in both)
            if all(x.targets.any() for x in sides) and (label is not None or not _same(*sides)):
                kept += sides
                labels += [] if label is None else [label]
        self.lost = self.of - sum(int(x.targets.sum()) for x in kept)
        ends = np.cumsum([0, *(len(x.tokens) for x in kept)])
        self._ends: list[int] = ends.tolist()
        self._tokens = np.concatenate([np.zeros(0, np.int32), *(x.tokens for x in kept)])
        self._targets = np.concatenate([np.zeros(0, bool), *(x.targets for x in kept)])
        self._labels = np.array(labels, np.float32)

    def __len__(self):
        return (len(self._ends) - 1) // 2

    @property
    def fingerprint(self) -> bytes:
        parts = (self._tokens, self._targets, np.array(self._ends), self._labels)
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).digest()

    def take(self, indices: np.ndarray) -> Example:
        batch: Example = {}
        for side, prefix in enumerate(("", "rejected_")):
            tokens_NT = np.zeros((len(indices), self._length), np.int32)
            targets_NT = np.full_like(tokens_NT, -1)
            for n, index in enumerate(indices):
                number = 2 * int(index) + side
                begin, end = self._ends[number], self._ends[number + 1]
                tokens = self._tokens[begin:end]
                is_target = self._targets[begin + 1 : end]
                tokens_NT[n, : len(tokens) - 1] = tokens[:-1]
                targets_NT[n, : len(tokens) - 1] = np.where(is_target, tokens[1:], -1)
            batch |= {f"{prefix}tokens": tokens_NT, f"{prefix}targets": targets_NT}
        return batch | ({"label": self._labels[indices]} if len(self._labels) else {})

    def notes(self, what: str, tokenizer: Tokenizer) -> Iterator[str]:
        """Lines to print: how many pairs there are, and what is cut."""
        yield f"{what}: {len(self):,} pairs, {self.of - self.lost:,} tokens of answers."
        if self.cut or len(self) < self.made:
            yield (
                f"warning: {self.cut:,} of {2 * self.made:,} answers are cut at --seq_len={self._length} "
                f"and {self.made - len(self):,} pairs left out, which loses {self.lost:,} of "
                f"{self.of:,} tokens; --seq_len={self.longest} keeps all."
            )


def _same(a: Document, b: Document) -> bool:
    return np.array_equal(a.tokens, b.tokens) and np.array_equal(a.targets, b.targets)


# ---- reading -------------------------------------------------------------------------------------


def _read(
    dataset: str, tokenizer: Tokenizer, chat: bool, labelled: bool
) -> tuple[list[Made], list[Made] | None, list[str]]:
    """(pairs, held-out pairs, lines to print) of a dataset; None if it has no split for these."""
    if chat and dataset == "stdlib":
        raise DataError(
            "--as_chat is for texts, and --dataset=stdlib has source code; leave it out"
        )
    parts = sources.rows(dataset) if dataset != "stdlib" else _from_text()
    train, held_out = (None if rows is None else list(rows) for rows in parts)
    rows = [*(train or ()), *(held_out or ())]
    if chat and not any(map(_has_text, rows)):
        raise DataError(
            f"--as_chat is for texts, and --dataset={dataset} has messages; leave it out"
        )
    begin_with_prompts = _begin_with_prompts(rows, labelled, tokenizer)
    read = {"chat": chat, "cut": begin_with_prompts and not chat}

    def made_of(rows: list[Row]) -> list[Made]:
        if not labelled:
            return [_made(row, where, tokenizer, **read) for where, row in rows]
        answers = [answer for where, row in rows for answer in _labelled(row, where, **read)]
        return _with_other_answers(answers, tokenizer)

    made = made_of(train or [])
    made_held_out = None if held_out is None else made_of(held_out)
    notes = _notes(rows, labelled, tokenizer)
    if begin_with_prompts and chat:
        notes.append(
            f"warning: all answers of {len(rows):,} rows begin with their prompt, which is learned as a part of "
            "them; leave --as_chat out, or remove the prompt from the answers."
        )
    if labelled and len({one.prompt for one in made}) == 1:
        notes.append(
            f"warning: all rows of --dataset={dataset} have one prompt, so z of the loss is the mean log ratio "
            "of other answers to it."
        )
    return made, made_held_out, notes


def _has_text(place_and_row: Row) -> bool:
    """Whether a row has a text as prompt or as answer."""
    _, row = place_and_row
    names = (*PROMPTS, *LABELLED_ANSWERS, *(name for pair in ANSWERS for name in pair))
    cells = [row.get(name) for name in names] if isinstance(row, dict) else []
    return any(isinstance(cell, str) and not conversations.is_chat(cell) for cell in cells)


def _begin_with_prompts(rows: list[Row], labelled: bool, tokenizer: Tokenizer) -> bool:
    """Whether the answers of all rows are texts that begin with their prompt, at the end of a token."""
    for _, row in rows:
        if not isinstance(row, dict):
            return False
        names = _answer_names(row, labelled)
        prompt = next((row[name] for name in PROMPTS if row.get(name) is not None), None)
        answers: list[Any] = [row.get(name) for name in names]
        if not prompt or not all(isinstance(text, str) for text in (prompt, *answers)):
            return False
        rest = [answer[len(prompt) :] for answer in answers if answer.startswith(prompt)]
        if len(rest) < len(answers) or not all(rest):
            return False
        if not conversations.ends_at_border(prompt, rest, tokenizer):
            return False
    return bool(rows)


def _notes(rows: list[Row], labelled: bool, tokenizer: Tokenizer) -> list[str]:
    """Lines to print about the rows of a dataset."""
    used = {"system", *conversations.CONTEXT}
    texts = []
    for _, row in rows:
        prompt = [name for name in PROMPTS if row.get(name) is not None][:1]
        names = [*prompt, *_answer_names(row, labelled)]
        used |= {*names} | ({"label"} if labelled else set())
        texts.append(" ".join(row[name] for name in names if isinstance(row[name], str)))
    spelled = whole_texts.spelled(texts, "rows", tokenizer)
    return [*whole_texts.unused([rows], sorted(used)), *spelled]


def _check_labels(made: list[Made], dataset: str) -> None:
    """Raises DataError if labelled answers are all good, or all bad."""
    good = sum(bool(one.label) for one in made)
    if good in (0, len(made)):
        label, missing = ("true", "bad") if good else ("false", "good")
        raise DataError(
            f"--dataset={dataset} has {good:,} good and {len(made) - good:,} bad answers to train on, all of them "
            f"with label {label}; add {missing} ones"
            + (", or fine-tune on good ones alone (recipes.transformer)" if good else "")
        )


def _with_other_answers(answers: list[Labelled], tokenizer: Tokenizer) -> list[Made]:
    """Tokenizes labelled answers, each beside an answer to another prompt as if it answered its own.

    That is the next row's, or the one of as many rows on as the prompt has neighbouring rows: of
    pairs, the chosen answer meets the next pair's chosen one. If there is a single prompt, it is
    another answer to it.
    """
    prompts = [json.dumps(one.prompt, sort_keys=True) for one in answers]
    runs = [len([*run]) for _, run in itertools.groupby(prompts)]  # rows of a prompt in a row
    run_of, end_of = np.repeat(runs, runs).tolist(), np.repeat(np.cumsum(runs), runs).tolist()
    has_others = len({*prompts}) > 1
    made = []
    for number, (one, prompt) in enumerate(zip(answers, prompts, strict=True)):
        other = (number + (run_of[number] if has_others else 1)) % len(answers)
        while has_others and prompts[other] == prompt:
            other = end_of[other] % len(answers)
        sides = {one.where: one.answer, f"{one.where} with another answer": answers[other].answer}
        answer, other_answer = _tokenized(one.prompt, sides, one.context, tokenizer)
        made.append(Made(prompt, answer, other_answer, one.is_good))
    return made


def _labelled(row: Any, where: str, chat: bool, cut: bool = True) -> list[Labelled]:
    """The labelled answer of a row, or both of a pair. Raises DataError, naming the row, if it has none."""
    context = _context(row)
    name = next((name for name in LABELLED_ANSWERS if name in row), "")
    if not name or "label" not in row:
        prompt, chosen, rejected = pair_of(row, where, chat, cut)
        return [Labelled(prompt, x, x is chosen, context, where) for x in (chosen, rejected)]
    label = row["label"]
    if isinstance(label, str):  # all that a CSV can hold
        label = LABELS.get(label.strip().lower(), label)
    if isinstance(label, str) or label not in (True, False):  # also 1 and 0
        raise DataError(
            f"{where} has label {row['label']!r}; use true for a good answer, false for a bad one"
        )
    prompt = next(
        (_plain(row[key], key, where) for key in PROMPTS if row.get(key) is not None), None
    )
    answer: Any = _plain(row[name], name, where)
    if cut and not chat and isinstance(prompt, str) and isinstance(answer, str):
        answer = answer.removeprefix(prompt)
    if prompt is None and isinstance(answer, list):
        prompt, answer = answer[:-1], answer[-1:]
    if not prompt or not (answer.strip() if isinstance(answer, str) else answer):
        raise DataError(f"{where} has an empty {name if prompt else 'prompt'}; remove the row")
    if chat or isinstance(answer, list) or isinstance(prompt, list) or row.get("system"):
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        (prompt, (answer, _)) = _messages(prompt, [answer, []], row.get("system"))
    return [Labelled(prompt, answer, bool(label), context, where)]


def split_by_prompt(
    rows: Sequence[T], prompt: Callable[[T], bytes], dataset: str
) -> tuple[list[T], list[T]]:
    """(training rows, held-out rows): those of a twentieth of the prompts, at least of one."""

    def digest(row: T) -> bytes:
        return hashlib.sha256(prompt(row)).digest()

    prompts = sorted({*map(digest, rows)})
    if len(prompts) < 2:
        raise DataError(
            f"--dataset={dataset} has {len(prompts) or 'no'} prompt{'s' * (not prompts)}, and one is held "
            "out to evaluate on; add rows, or use --eval_dataset=FILE, which may be the same file"
        )
    last = prompts[max(1, len(prompts) // HELD_OUT) - 1]
    return [x for x in rows if digest(x) > last], [x for x in rows if digest(x) <= last]


def _made(row: Any, where: str, tokenizer: Tokenizer, chat: bool, cut: bool) -> Made:
    """Tokenizes a row. Raises DataError, naming it, if it is no pair."""
    prompt, *answers = pair_of(row, where, chat, cut)
    sides = {f"{where} ({name})": answer for name, answer in zip(ANSWERS[0], answers, strict=True)}
    chosen, rejected = _tokenized(prompt, sides, _context(row), tokenizer)
    return Made(json.dumps(prompt, sort_keys=True), chosen, rejected)


def _context(row: Any) -> dict[str, Any]:
    """A row's variables for the chat template."""
    return {name: row[name] for name in conversations.CONTEXT if row.get(name) is not None}


def _tokenized(
    prompt: Any, answers: dict[str, Any], context: dict[str, Any], tokenizer: Tokenizer
) -> list[Document]:
    """Tokenizes a prompt with each answer. Raises DataError, naming an answer by its key."""
    if isinstance(prompt, str):  # for both answers, or white space of one would be in the margin
        prompt, moved = conversations.at_border(prompt, [*answers.values()], tokenizer)
        answers = dict(zip(answers, moved, strict=True))
    rows = {
        where: conversations.checked(
            {"prompt": prompt, "completion": answer} | context, PAIRS, where
        )
        for where, answer in answers.items()
    }
    made = {where: documents(row, tokenizer, where) for where, row in rows.items()}
    for where, turns in made.items():
        if len(turns) > 1:
            raise DataError(
                f"{where} has {len(turns)} turns of the assistant, which the chat template renders one by one; "
                "keep the last one, and put the others into the prompt"
            )
    return [turns[0] for turns in made.values()]


def _answer_names(row: Any, labelled: bool) -> tuple[str, ...]:
    """Names of the columns of a row's answers: those of a pair, or of a labelled answer."""
    of_one = [name for name in LABELLED_ANSWERS if labelled and name in row and "label" in row]
    return (
        (of_one[0],)
        if of_one
        else next((names for names in ANSWERS if {*names} & {*row}), ANSWERS[0])
    )


def pair_of(row: Any, where: str, chat: bool = False, cut: bool = True) -> tuple[Any, Any, Any]:
    """(prompt, chosen, rejected) of a row: three texts, or three lists of messages.

    Args:
      chat: whether texts are messages, which are whole.
      cut: whether other texts of answers may begin with their prompt.

    Raises DataError, naming the row, if it has another form.
    """
    columns = list(row) if isinstance(row, dict) else []
    names = next((names for names in ANSWERS if {*names} & {*columns}), ANSWERS[0])
    for name in names:
        if name not in columns or row[name] is None:
            what = "has null in" if name in columns else "has no column"
            raise DataError(
                f"{where} {what} {name!r}; a row has a prompt, and a chosen and a rejected answer, and "
                f"this one has {', '.join(columns) or 'none'}"
            )
    answers: list[Any] = [_plain(row[name], name, where) for name in names]
    column = next((name for name in PROMPTS if row.get(name) is not None), "")
    prompt = _plain(row[column], column, where) if column else None
    if isinstance(answers[0], str) != isinstance(answers[1], str):
        raise DataError(
            f"{where} mixes a text and messages in {' and '.join(names)}; use two texts, or two lists "
            "of messages"
        )
    if isinstance(answers[0], str):
        if isinstance(prompt, list):  # of messages, with an answer that is a text
            answers = [[{"role": "assistant", "content": answer}] for answer in answers]
        else:
            prompt, answers = _without_prompt(prompt, answers, cut and not chat)
            if chat:
                answers = [[{"role": "assistant", "content": answer}] for answer in answers]
    if isinstance(answers[0], list):
        prompt, answers = _messages(prompt, answers, row.get("system"))
    for name, answer in zip(names, answers, strict=True):
        if not (answer.strip() if isinstance(answer, str) else answer):
            raise DataError(f"{where} has an empty {name} answer; remove the row")
    if answers[0] == answers[1]:
        raise DataError(f"{where} has equal {' and '.join(names)} answers; remove the row")
    if not prompt and (
        empty := [name for name in PROMPTS if name in columns and row[name] is None]
    ):
        raise DataError(f"{where} has null in {empty[0]!r}; fill it, or remove the row")
    chosen, rejected = answers
    return prompt, chosen, rejected


def _plain(value: Any, name: str, where: str) -> Any:
    """A text, or checked messages: a list of them, one alone, or {"messages": […]}; also as JSON text."""
    value = conversations.messages_of_text(value, name, where)
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        value = value["messages"] if isinstance(value.get("messages"), list) else [value]
    if isinstance(value, list):
        value = [
            {"role": SPEAKERS.get(one["from"], one["from"]), "content": one["value"]}
            if isinstance(one, dict) and {"from", "value"} <= {*one} else one
            for one in value
        ]  # fmt: skip
    return checked_messages(value, name, where)


def _without_prompt(prompt: str | None, answers: list[str], cut: bool) -> tuple[str, list[str]]:
    """(prompt, answers) of texts that may each begin with the prompt."""
    if prompt is not None:
        if cut and all(answer.startswith(prompt) for answer in answers):
            answers = [answer[len(prompt) :] for answer in answers]
        return prompt, answers
    chosen, rejected = answers
    shared = next(
        (n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None
    )
    shared = min(len(chosen), len(rejected)) if shared is None else shared
    turn = chosen.rfind(TURN, 0, shared)
    # Answers may begin with the same words; without turns, they begin after the last shared line.
    begin = turn + len(TURN) if turn >= 0 else chosen.rfind("\n", 0, shared) + 1
    return chosen[:begin], [answer[begin:] for answer in answers]


def _messages(prompt: Any, answers: list[Any], system: str | None) -> tuple[list, list[list]]:
    """(prompt, answers) of messages that may each begin with the prompt."""
    shared = 0
    while shared < min(map(len, answers)) and answers[0][shared] == answers[1][shared]:
        shared += 1
    before = answers[0][:shared]
    if isinstance(prompt, str) and not before:
        before = [{"role": "user", "content": prompt}] if prompt else []
    elif isinstance(prompt, list) and before[: len(prompt)] != prompt:
        before = [*prompt, *before]
    if system and not (before and before[0]["role"] == "system"):
        before = [{"role": "system", "content": system}, *before]
    return before, [answer[shared:] for answer in answers]


# ---- pairs made from a text ----------------------------------------------------------------------


def _from_text() -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """(where it is from, row) of pairs for training and held out, like `sources.rows`."""
    splits: tuple[list[tuple[str, Any]], list[tuple[str, Any]]] = ([], [])
    (source,) = sources.find("stdlib")
    for part in source.parts():
        text = part.text.decode(errors="ignore")
        room = len(text) - PROMPT - ANSWER
        if not part.begins or room <= 0:
            continue
        random = np.random.default_rng(
            int.from_bytes(hashlib.sha256(part.text).digest()[:8], "big")
        )
        for begin in sorted(random.integers(0, room, OF_A_FILE[part.held_out])):
            prompt = text[begin : begin + PROMPT]
            chosen = text[begin + PROMPT : begin + PROMPT + ANSWER]
            rejected = swap_letters(chosen, random)
            if rejected == chosen or not (prompt + chosen).isascii():  # a token is a byte
                continue
            row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            splits[part.held_out].append(("a pair of the standard library", row))
    return splits


def swap_letters(text: str, random: np.random.Generator) -> str:
    """Swaps neighbouring letters here and there, like a hasty typist."""
    letters = list(text)
    n = 0
    while n + 1 < len(letters):
        both = letters[n] + letters[n + 1]
        if both.isalpha() and random.random() < 0.1:
            letters[n], letters[n + 1] = letters[n + 1], letters[n]
            n += 1
        n += 1
    return "".join(letters)
