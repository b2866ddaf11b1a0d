"""Chat templates: render a conversation as the text that a model expects, like `transformers`.

A template is untrusted text that came with a model, so jinja2's sandbox renders it.
"""

import datetime
import functools
import json
import re
from typing import Any

from data import DataError, buckets

CODE = 1  # increase it when the same conversations would give different tokens or targets
# The date that templates see in training data, so that a file always gives the same tokens. Llama
# 3's templates fall back on this date.
TRAINING_DAY = datetime.datetime(2024, 7, 26)
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field of messages


def template(config: dict[str, Any], name: str = "default") -> str:
    """The template in a tokenizer_config.json, or the one of several with this name; "" if none."""
    templates = config.get("chat_template") or ""
    if isinstance(templates, list):
        named = {one.get("name"): one.get("template") for one in templates if isinstance(one, dict)}
        templates = named.get(name)
    return templates if isinstance(templates, str) else ""


def render(
    source: str,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    name: str,
    today: datetime.datetime | None = None,
) -> str:
    """Renders messages by a chat template.

    Args:
      variables: other variables of the template: add_generation_prompt, bos_token, tools, ….
      name: the tokenizer's name, for messages.
      today: for templates that write the date; None: now.

    Raises DataError if there is no template, or it refuses these messages.
    """
    if not source:
        raise DataError(
            f"the tokenizer {name} has no chat template; use a chat model's, or leave out --chat"
        )
    try:
        return _compile(source).render(
            {"tools": None, "documents": None}
            | variables
            | {"messages": list(map(_with_reasoning, messages))}
            | {"strftime_now": (today or datetime.datetime.now()).strftime}
        )
    except Exception as error:  # whatever the template does
        raise DataError(
            f"the chat template of {name} can't be rendered ({buckets.reason(error)}); use other "
            "messages or another template"
        ) from None


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose reasoning has the names that templates read, as in `transformers`."""
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


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
    # {% generation %} only marks the assistant's words as targets.
    tag = r"({%[-+]?\s*)(end)?generation(?=\s*[-+]?%})"
    shown = re.sub(tag, lambda m: m[1] + ("endif" if m[2] else "if true"), source)
    return environment.from_string(shown)
