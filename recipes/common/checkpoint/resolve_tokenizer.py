"""Chooses a run's tokenizer, which must be the one that its model was trained with."""

from data import DataError, tokenizer
from data.tokenizer import BYTES, PADDED, Tokenizer
from recipes.common.checkpoint.store import WeightSource
from recipes.common.runtime import UserError


def tokenizer_for(name: str, source: WeightSource | None) -> Tokenizer:
    """The tokenizer of a run.

    Args:
      name: --tokenizer; empty: the tokenizer of `source`, or bytes for a new model.
      source: the model that the run starts from, if any.

    Raises UserError if the model was trained with a different or unknown tokenizer, or its
    vocabulary is smaller; DataError if there is no tokenizer of this name.
    """
    if source is None:
        return tokenizer.find(name or "bytes")
    named = tokenizer.find(name) if name else None
    try:
        own = source.tokenizer()
    except DataError:
        if not named:
            raise
        own = None
    if named and own and named.sha256 != own.sha256:
        raise UserError(
            f"--tokenizer={name} (SHA-256 {named.sha256[:8]}…) must be the tokenizer of "
            f"{source.path} ({own.sha256[:8]}…), which its model was trained with; leave it out"
        )
    if named is BYTES and own is None and source.metadata["config"]["vocab_size"] > PADDED:
        raise UserError(
            f"--tokenizer=bytes has {BYTES.size} tokens, but the model of {source.path} has "
            f"{source.metadata['config']['vocab_size']}, so it was not trained on bytes; use its own "
            "tokenizer.json"
        )
    tokens = named or own
    if not tokens:
        raise UserError(
            f"{source.path} has no tokenizer.json, so its model's tokens are unknown; use "
            "--tokenizer=FILE, ORG/NAME on the Hub, or bytes if it was trained on bytes"
        )
    if named and own:  # the model's files complete the named one's
        tokens = tokenizer.from_files(own.files | named.files, named.name)
    return check_vocabulary(tokens, source)


def check_vocabulary(tokens: Tokenizer, source: WeightSource) -> Tokenizer:
    """Returns `tokens`. Raises UserError if the model's vocabulary is smaller."""
    # A config without vocab_size is reported where the config is read.
    vocab_size = source.metadata["config"].get("vocab_size", tokens.size)
    if tokens.size > vocab_size:
        raise UserError(
            f"the model has {vocab_size} tokens, but the tokenizer {tokens.name} has {tokens.size}; "
            "use the tokenizer that it was trained with, or a model with a larger vocabulary"
        )
    return tokens
