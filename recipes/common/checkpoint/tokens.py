"""Which tokenizer a run uses: never another than its model was trained with."""

from data import DataError, tokenizer
from data.tokenizer import BYTES, PADDED, Tokenizer
from recipes.common.checkpoint.store import Source
from recipes.common.runtime import UserError


def tokenizer_for(name: str, source: Source | None) -> Tokenizer:
    """The tokenizer of a run.

    Args:
      name: --tokenizer; empty: that of `source`, or bytes for a new model.
      source: what the run begins from, if anything.

    Raises UserError if the model was trained with another tokenizer, nobody knows with which, or it
    has fewer tokens; DataError if there is no tokenizer of this name.
    """
    if source is None:
        return tokenizer.find(name or "bytes")
    given = tokenizer.find(name) if name else None
    try:
        own = source.tokenizer()
    except DataError:
        if not given:
            raise
        own = None
    if given and own and given.sha256 != own.sha256:
        raise UserError(
            f"--tokenizer={name} (SHA-256 {given.sha256[:8]}…) must be the tokenizer of "
            f"{source.path} ({own.sha256[:8]}…), which its model was trained with; leave it out"
        )
    if given is BYTES and own is None and source.metadata["config"]["vocab_size"] > PADDED:
        raise UserError(
            f"--tokenizer=bytes has {BYTES.size} tokens and the model of {source.path} "
            f"{source.metadata['config']['vocab_size']}, so it was not trained on bytes; use its own "
            "tokenizer.json"
        )
    if not (given or own):
        raise UserError(
            f"{source.path} has no tokenizer.json, so nobody knows what its model's tokens mean; use "
            "--tokenizer=FILE, ORG/NAME on the Hub, or bytes if it was trained on bytes"
        )
    if given and own:  # what the given files don't say, the model's own do
        given = tokenizer.from_files(own.files | given.files, given.name)
    return check_size(given or own, source)


def check_size(tokens: Tokenizer, source: Source) -> Tokenizer:
    """The same. Raises UserError if the source's model can't be given every token."""
    # A config without it is told as such where it is read.
    vocab_size = source.metadata["config"].get("vocab_size", tokens.size)
    if tokens.size > vocab_size:
        raise UserError(
            f"the model has {vocab_size} tokens, and the tokenizer {tokens.name} has {tokens.size}; "
            "use the tokenizer that it was trained with, or a model with a larger vocabulary"
        )
    return tokens
