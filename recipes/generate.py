"""Generates text with a trained model: after one prompt or many, or in a dialogue.

    python -m recipes.generate --restore_from=transformer.stdlib_3m --prompt="def "
    python -m recipes.generate --restore_from=hf:DIR --mesh=1x8 --chat --prompt="Who are you?"
    python -m recipes.generate --restore_from=hf:DIR --chat                # a dialogue
    python -m recipes.generate --restore_from=hf:DIR --prompts=FILE.jsonl --out=ANSWERS.jsonl
    python -m recipes.generate --restore_from=hf:DIR --image=cat.png --chat --prompt="What is it?"

The model may have been trained on any mesh; its KV cache is sharded by the same rules. A line of
FILE.jsonl is {"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}, …]}; ANSWERS.jsonl
adds "answer", its number of "tokens", and whether the model "ended" it. For models that see, a line may
name pictures, as rows to train on do.
"""

import dataclasses
import json
import pathlib
import signal
import sys
from typing import Any

import numpy as np
from jax.sharding import Mesh

from data.picture_rows import names_pictures
from data.tokenizer import Tokenizer
from recipes.common import checkpoint, entries
from recipes.common.flags.config_flags import Settings, default_dtype, describe_set, read_set
from recipes.common.generation import picture_prompts
from recipes.common.generation.generation_config import (
    default_temperature,
    default_top_k,
    setting,
    settings_not_applied,
)
from recipes.common.generation.generator import Generator, Sampling
from recipes.common.generation.int8_weights import to_int8, weights_flag
from recipes.common.generation.questions import Question, pictures_of, questions, rows_to_answer
from recipes.common.report import kernel, report
from recipes.common.runtime import Devices, UserError, flag, make_mesh, print0, processes
from recipes.common.runtime.flags import refuse_unused
from recipes.common.runtime.start import start
from recipes.common.runtime.terminal import ask, show
from recipes.common.sharding import Layout
from recipes.common.sharding.rules import select
from recipes.common.storage import folders
from zoo.core.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class Generate(Settings):
    restore_from: str = flag("", "The model: a run, checkpoint or published name, or hf:DIR.")
    base: str = flag("", "Path of an adapter's base model, if it has moved.")
    prompt: str = flag("", "Text to continue.")
    image: str = flag(
        "", "Pictures for --prompt, comma-separated, for a model that sees; <image> in the prompt says "
        "where each is, else they come first.",
    )  # fmt: skip
    chat: bool = flag(
        False, "Send prompts as user messages, in the model's chat template; without a prompt, hold "
        "a dialogue.",
    )  # fmt: skip
    prompts: str = flag("", "JSON Lines file with a prompt or messages in each row.")
    out: str = flag("", "New JSON Lines file for the answers to --prompts; empty: terminal.")
    max_new_tokens: int = flag(
        0, "Most tokens to generate; 0: from generation_config.json or 256, as the context allows.",
        at_least=0,
    )  # fmt: skip
    temperature: float = flag(
        -1.0, "Temperature; 0: always the likeliest token; -1: from generation_config.json, or 0.8.",
        at_least=-1.0,
    )  # fmt: skip
    top_k: int = flag(
        -1, "Number of likeliest tokens to sample from; 0: all; -1: from generation_config.json, "
        "or 50 if it has none.",
        at_least=-1,
    )  # fmt: skip
    top_p: float = flag(
        -1.0, "Total probability of the likeliest tokens to sample from; 0: one token; -1: from "
        "generation_config.json.", at_least=-1.0, at_most=1.0,
    )  # fmt: skip
    seed: int = flag(0, "Seed for sampling.", at_least=0, at_most=2**31 - 1)
    batch_size: int = flag(8, "Prompts of --prompts to answer at a time.", at_least=1)
    tokenizer: str = flag(
        "", "Tokenizer, if the model has none of its own: bytes, a tokenizer.json, ORG/NAME."
    )
    dtype: str = flag(
        "", "Type of activations and weights; empty: bfloat16 on accelerators, else float32.",
        choices=["", "float32", "bfloat16"],
    )  # fmt: skip
    weights: str = weights_flag()
    verify: bool = flag(True, "Check a checkpoint's files against their SHA-256 before reading it.")


def main(devices: Devices, flags: Generate) -> None:
    # ---- Check the flags before anything is computed ---------------------------------------------
    mesh = make_mesh(devices.mesh)
    if not flags.restore_from:
        raise UserError("--restore_from is missing; use --restore_from=RUN, or hf:DIR")
    for name in ("temperature", "top_p"):
        if -1 < (value := getattr(flags, name)) < 0:
            raise UserError(f"--{name}={value} must be ≥ 0, or -1 for the model's own; try 0.9")
    rows = rows_to_answer(flags)
    shown = picture_prompts.names(flags.image) or any(names_pictures(row) for _, row in rows)
    source = checkpoint.find(
        flags.restore_from,
        hash_files=flags.verify,
        base=flags.base,
        entry=picture_prompts.SEEING if shown else "",  # of a folder that is also read without
    )
    model = entries.model(source.metadata["entry"])
    if not issubclass(model, Decoder) or not checkpoint.config_of(source).causal:
        raise UserError(
            f"--restore_from={flags.restore_from} is a {source.metadata['entry']!r} model, which "
            "generates no text; use a language model"
        )
    tokenizer = checkpoint.tokenizer_for(flags.tokenizer, source)
    asked = questions(flags, rows, tokenizer, source)
    limit = Limit(checkpoint.context(source), flags, tokenizer)
    for question in asked:
        limit.new_tokens(question)
    chosen = sampling(flags, tokenizer)
    out = folders.new_path(flags.out, "out", appended=True) if flags.out else None

    # ---- Read the model --------------------------------------------------------------------------
    dtype = flags.dtype or default_dtype(mesh.devices.flat[0])
    compute = {"dtype": dtype} | read_set(type(checkpoint.config_of(source)), flags.set, ("dtype",))
    layout = model_layout(source, mesh, devices.rules, compute)
    kernel.check(layout)
    print0(report.headline(layout), *describe_set(flags))
    variables = checkpoint.restore_variables(source, layout, dtype)
    if flags.weights:
        layout, variables = to_int8(entries.model(source.metadata["entry"]), layout, variables)
    print0(*report.uneven(layout, variables))
    generator = Generator(
        layout, variables, chosen, tokenizer.end, tokenizer.vocabulary,
        rows=min(flags.batch_size, max(len(asked), 1)),
    )  # fmt: skip
    print0(*settings_not_applied(tokenizer, sampled=chosen.temperature > 0))

    # ---- Answer ----------------------------------------------------------------------------------
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if flags.prompts:
            answer_all(generator, asked, limit, flags, out)
        elif asked:
            answer(generator, asked[0], limit)
        else:
            dialogue(generator, limit)
    except KeyboardInterrupt:
        print0("", "Stopped by SIGINT.")
    print0(*speed(generator))


def model_layout(
    source: checkpoint.WeightSource, mesh: Mesh, rules: str, compute: dict[str, Any]
) -> Layout:
    """The model's layout. Without --rules, weights are stored as they are used.

    In training the mesh's default rules may gather weights for each use; here that would be for
    each token.

    Args:
      compute: fields to replace in its Config.
    """
    if rules:
        return checkpoint.layout_of(source, mesh, rules, **compute)
    entry = source.metadata["entry"]
    names = entries.model(entry).axes
    name, table = select(entries.zoo_file(entry).RULES, names, None, mesh)
    gathered = table | {rest: table[used] for rest, used in names.in_use.items()}
    layout = checkpoint.layout_of(source, mesh, gathered, **compute)
    name += ", gathered once" if gathered != table else ""
    return dataclasses.replace(layout, strategy=name)


@dataclasses.dataclass(frozen=True)
class Limit:
    """Limits the number of new tokens."""

    context: int  # tokens of prompt and answer together
    flags: Generate
    tokenizer: Tokenizer

    def new_tokens(self, question: Question) -> int:
        """Most tokens to generate after a prompt. Raises UserError if the context has no room."""
        length, wanted = len(question.tokens), self.flags.max_new_tokens
        place = f"{question.where}: " if question.where else ""
        if length >= self.context:
            raise UserError(
                f"{place}a prompt has {length} tokens, but the model's context is {self.context}, answer "
                "included; use a shorter prompt"
            )
        if length + wanted > self.context:
            raise UserError(
                f"{place}a prompt has {length} tokens, and with --max_new_tokens={wanted} exceeds the "
                f"model's context of {self.context}; try --max_new_tokens={self.context - length}"
            )
        wanted = wanted or int(setting(self.tokenizer, "max_new_tokens", 256))
        return min(wanted, self.context - length)


def sampling(flags: Generate, tokenizer: Tokenizer) -> Sampling:
    """Sampling by the flags, and by default as transformers reads generation_config.json.

    Raises UserError for flags of samples if the likeliest token is always taken.
    """
    temperature, top_k, top_p = flags.temperature, flags.top_k, flags.top_p
    chosen = Sampling(
        temperature=default_temperature(tokenizer) if temperature < 0 else temperature,
        top_k=default_top_k(tokenizer) if top_k < 0 else top_k,
        top_p=setting(tokenizer, "top_p", 1.0) if top_p < 0 else top_p,
        seed=flags.seed,
    )
    if not chosen.temperature:
        whose = "--temperature=0" if not temperature else "the model's own temperature of 0"
        fix = "leave it out, or use --temperature=0.8"
        refuse_unused(flags, ("top_k", "top_p", "seed"), f"samples, and not for {whose}", fix)
    return chosen


# ---- answering -----------------------------------------------------------------------------------


def answer(generator: Generator, question: Question, limit: Limit) -> str:
    """Prints one answer as it is generated, and returns it; of several parts, the last."""
    stream = limit.tokenizer.stream(question.after)
    tokens: list[int] = []
    show(question.begins)
    new = limit.new_tokens(question)
    for (token,) in generator([question.tokens], new, pictures=pictures_of([question])):
        tokens.append(int(token))
        show(stream.put(tokens[-1]))
    show(stream.rest() + "\n")
    return limit.tokenizer.decode(limit.tokenizer.last_part(tokens), question.after)


def answer_all(
    generator: Generator,
    asked: list[Question],
    limit: Limit,
    flags: Generate,
    out: pathlib.Path | None,
) -> None:
    """Answers --batch_size prompts at a time, to --out or the terminal."""
    for first in range(0, len(asked), flags.batch_size):
        group = asked[first : first + flags.batch_size]
        most = [limit.new_tokens(question) for question in group]
        tokens_of_group = [one.tokens for one in group]
        steps = list(generator(tokens_of_group, max(most), first, pictures=pictures_of(group)))
        for question, tokens, room in zip(group, np.stack(steps, axis=1), most, strict=True):
            tokens = tokens[:room]
            written = tokens[tokens >= 0]
            row = question.row | {
                "answer": limit.tokenizer.decode(
                    limit.tokenizer.last_part(written), question.after
                ),
                "ended": bool(np.isin(written[-1:], generator.end).any()),
                "tokens": len(written),
            }
            if out is None:
                print0(as_line(row, sys.stdout.encoding or "ascii"))
            elif processes.is_first():
                with out.open("a", encoding="utf-8") as file:
                    print(as_line(row, "utf-8"), file=file)


def as_line(row: dict[str, Any], encoding: str) -> str:
    """A row of JSON Lines; in ASCII if the encoding lacks a character, such as a lone surrogate."""
    line = json.dumps(row, ensure_ascii=False)
    try:
        line.encode(encoding)
    except UnicodeEncodeError:
        return json.dumps(row)
    return line


def dialogue(generator: Generator, limit: Limit) -> None:
    """Holds a dialogue until the end of the input; each turn reads the whole conversation."""
    print0("A dialogue; Ctrl-D ends it.")
    messages: list[dict[str, str]] = []
    while (line := ask("> ")) is not None:
        messages.append({"role": "user", "content": line})
        turn = Question({}, limit.tokenizer.ask(messages))
        try:
            limit.new_tokens(turn)
        except UserError as full:
            print0(f"The conversation is over: {full}. A new one starts.")
            messages = []
            continue
        messages.append({"role": "assistant", "content": answer(generator, turn, limit)})


def speed(generator: Generator) -> list[str]:
    """Lines with tokens per second and the least bytes that a step reads."""
    read, write = generator.seconds
    if not generator.written:
        return []
    weights, cache = generator.bytes_a_token()
    each = write / generator.steps
    return [
        f"Read {generator.read:,} tokens at {generator.read / read:,.0f} tokens/s, wrote "
        f"{generator.written:,} at {generator.written / write:,.1f} tokens/s.",
        f"A step reads {report.size(weights + cache)} a device at least, weights "
        f"{report.size(weights)} and cache {report.size(cache)}: {report.size((weights + cache) / each)}/s.",
    ]


if __name__ == "__main__":
    start(main, Devices(), Generate())
