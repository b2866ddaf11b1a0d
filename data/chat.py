"""Chat templates: what a model's conversation looks like as text, rendered as `transformers` does.

A template is untrusted text that came with a model: jinja2's sandbox renders it.
"""

import datetime
import functools
import json
import re
from typing import Any

from data import DataError, hub

# What a template is told of today in training data, so that the same file gives the same tokens on
# any day and machine. It is the date that Llama 3's templates fall back on.
TRAINING_DAY = datetime.datetime(2024, 7, 26)


def template(config: dict[str, Any]) -> str:
    """That in a tokenizer_config.json, or "": where there are several, the one called default."""
    found = config.get("chat_template") or ""
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else ""


def render(
    source: str,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool,
    control: dict[str, str],
    name: str,
    today: datetime.datetime | None = None,
) -> str:
    """The messages as the template writes them.

    Args:
      add_generation_prompt: whether the beginning of an answer follows.
      control: bos_token, eos_token, … → its text.
      name: of the tokenizer, for messages.
      today: for templates that write the date; None: now.

    Raises DataError if there is no template, or it refuses these messages.
    """
    if not source:
        raise DataError(
            f"the tokenizer {name} has no chat template; use a chat model's, or leave out --chat"
        )
    given = {"messages": messages, "add_generation_prompt": add_generation_prompt}
    given["strftime_now"] = (today or datetime.datetime.now()).strftime
    try:
        return _compile(source).render(**given, tools=None, documents=None, **control)
    except Exception as error:  # whatever the template does
        raise DataError(
            f"the chat template of {name} can't be rendered ({hub.reason(error)}); use other "
            "messages or another template"
        ) from None


@functools.lru_cache
def _compile(source: str):
    from jinja2 import TemplateError, sandbox

    def raise_exception(message):
        raise TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        # jinja2's own escapes HTML.
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    # {% generation %} only marks the assistant's words, for training on them.
    tag = r"({%[-+]?\s*)(end)?generation(?=\s*[-+]?%})"
    shown = re.sub(tag, lambda m: m[1] + ("endif" if m[2] else "if true"), source)
    return environment.from_string(shown)
