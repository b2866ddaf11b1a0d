"""Tokens that the files next to tokenizer.json name, read as `transformers` does.

    tokenizer_config.json    "eos_token": "<|im_end|>", and "added_tokens_decoder":
                             {"32001": {"content": "<|im_end|>", "special": true, …}}
    special_tokens_map.json  {"eos_token": …}; wins in old folders, without added_tokens_decoder
    added_tokens.json        {"<|im_end|>": 32001}, in old folders

A template that spells such a token must get one id, although tokenizer.json may not mark the token,
or not even have it.
"""

from collections.abc import Iterator
from typing import Any

from data import DataError

CONTROL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # NAME_token, for templates
DECODER = "added_tokens_decoder"
MORE = ("additional_special_tokens", "extra_special_tokens")  # lists of further control tokens
OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def settings(config: dict[str, Any], special: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json and special_tokens_map.json together."""
    special = {key: value for key, value in special.items() if value is not None}
    return special | config if DECODER in config else config | special


def control_tokens(named_settings: dict[str, Any]) -> dict[str, str]:
    """The texts of bos_token, eos_token, …, where `settings` name them, and of other tokens that an
    object of `extra_special_tokens` names, such as image_token.
    """
    texts = {}
    for names in (named_settings.get(key) for key in MORE):
        texts |= {key: _text(one) for key, one in names.items()} if isinstance(names, dict) else {}
    texts |= {f"{kind}_token": _text(named_settings.get(f"{kind}_token")) for kind in CONTROL}
    return {kind: text for kind, text in texts.items() if isinstance(text, str)}


def add(
    library, named_settings: dict[str, Any], added: dict[str, Any], template: str, name: str
) -> tuple[str, ...]:
    """Adds the tokens that `library`, a tokenizer.json, does not mark.

    A token without an id, or with one that it can't get, is left out if the template and the ends of
    a text do not need it. So are control tokens at the end: a model may have no rows for them.

    Args:
      named_settings: `settings`.
      added: added_tokens.json.
      template: the chat templates' text.
      name: the tokenizer's name, for messages.

    Returns the added tokens, each in one string with its id and options. Raises DataError if one
    that is needed can't have the id that the files give it.
    """
    from tokenizers import AddedToken

    marked = {token.content for token in library.get_added_tokens_decoder().values()}
    try:
        named = [one for one in _named(named_settings, added) if one[1]["content"] not in marked]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise DataError(
            f"the added tokens of the tokenizer {name} are not in the form of `transformers`; fetch "
            "its files again"
        ) from None
    if not named:
        return ()
    control = control_tokens(named_settings)
    ends = {control.get(kind) for kind in ("bos_token", "eos_token")}
    size = library.get_vocab_size(with_added_tokens=True)
    new: list[tuple[int, dict[str, Any], bool]] = []  # (id, token, whether it can be left out)
    for number, token in named:
        text = token["content"]
        is_needed = text in ends or text in template
        token_id = library.token_to_id(text)
        free = token_id if token_id is not None else size
        if number is None and token_id is None:
            continue
        if number not in (None, free):
            if is_needed:
                raise DataError(
                    f"the files of the tokenizer {name} give {text!r} the id {number}, but after the "
                    f"tokens of tokenizer.json it has {free}; fetch files that belong together"
                )
            continue
        size += token_id is None
        new.append((free, token, token_id is None and token["special"] and not is_needed))
    while new and new[-1][2]:
        new.pop()
    library.add_tokens([AddedToken(**token) for _, token, _ in new])
    return tuple(f"{number} {token}" for number, token, _ in new)


def _named(
    named_settings: dict[str, Any], added: dict[str, Any]
) -> Iterator[tuple[int | None, dict]]:
    """Yields (id, token) in the order of ids, and then control tokens without an id."""
    control = control_tokens(named_settings)
    unused = control.pop("pad_token", None)  # may be an ordinary word, such as "!"
    texts = {*control.values()}
    for names in (named_settings.get(key) or () for key in MORE):
        texts |= {_text(one) for one in (names.values() if isinstance(names, dict) else names)}
    tokens: dict[str, tuple[int, dict[str, Any]]] = {}
    for text, number in added.items():
        special = text in texts or text == unused
        tokens[text] = int(number), {"content": text, "special": special, "normalized": not special}
    for number, token in (named_settings.get(DECODER) or {}).items():
        options = {key: bool(token[key]) for key in OPTIONS if key in token}
        special = options.get("special", False) or token["content"] in texts
        tokens[token["content"]] = (
            int(number),
            {"content": token["content"], "normalized": not special, **options, "special": special},
        )
    yield from sorted(tokens.values(), key=lambda one: one[0])
    for text in sorted(text for text in texts if isinstance(text, str) and text not in tokens):
        yield None, {"content": text, "special": True, "normalized": False}


def _text(token: Any) -> Any:
    """The text of a token, which old files write as an object."""
    return token.get("content") if isinstance(token, dict) else token
