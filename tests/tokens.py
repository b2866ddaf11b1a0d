"""A small tokenizer, trained in a moment on the licence's text."""

import functools
import json

from data import tokenizer
from tests.conftest import ROOT


@functools.cache
def small(start: bool = True, end: bool = True) -> tokenizer.Tokenizer:
    """Byte-level BPE of 400 tokens; with a token in front of documents and one behind, or without."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator([(ROOT / "LICENSE").read_text()], trainer)
    if start:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    generation = {"eos_token_id": 1} if end else {}
    return tokenizer.from_files(
        {
            tokenizer.MAIN: made.to_str().encode(),
            tokenizer.GENERATION: json.dumps(generation).encode(),
        },
        "small",
    )
