"""generation_config.json: a model's sampling settings, as `transformers` reads them."""

import json
from typing import Any

from data.tokenizer import GENERATION, Tokenizer
from recipes.common.runtime.errors import UserError

# Settings that change an answer, and that the zoo does not apply → values that leave them off.
NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("num_beams", "num_beam_groups", "guidance_scale"), (1,)),
    "num_return_sequences": (1,),
    "max_length": (),  # of prompt and answer together
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("min_length", "min_new_tokens", "penalty_alpha"), (0,)),
    **dict.fromkeys(
        ("stop_strings", "bad_words_ids", "sequence_bias", "force_words_ids"), ([], {})
    ),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "constraints"), ([],)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "max_time"), ()),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config"), ()),
    **dict.fromkeys(("dola_layers", "token_healing"), (False,)),
}
NOT_APPLIED_IN_SAMPLING = {
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff"), (0,)),
    **dict.fromkeys(("typical_p", "top_h"), (1,)),
}


def setting(tokenizer: Tokenizer, key: str, default: float) -> Any:
    """A setting, a number ≥ 0; null counts as absent. Raises UserError for anything else."""
    value: Any = tokenizer.generation.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise UserError(
            f"{GENERATION} of {tokenizer.name} has {key} {json.dumps(value)}, which must be a number "
            f"≥ 0; use --{key}=…"
        )
    return value


def default_temperature(tokenizer: Tokenizer) -> float:
    """The temperature in the file: 0 (the likeliest token) unless it has do_sample; 0.8 without one."""
    if not tokenizer.generation:
        return 0.8
    return setting(tokenizer, "temperature", 1.0) if tokenizer.generation.get("do_sample") else 0.0


def default_top_k(tokenizer: Tokenizer) -> int:
    """The top_k in the file, by default 50, as in transformers; 0 (all tokens) without a file."""
    return int(setting(tokenizer, "top_k", 50 if tokenizer.generation else 0))


def settings_not_applied(tokenizer: Tokenizer, sampled: bool) -> list[str]:
    """A line that names the settings that the zoo ignores; [] if there are none.

    Args:
      sampled: whether tokens are sampled; else settings of sampling change nothing.
    """
    effects = NOT_APPLIED | (NOT_APPLIED_IN_SAMPLING if sampled else {})
    ignored = [
        f"{key} {json.dumps(value)}"
        for key, value in tokenizer.generation.items()
        if key in effects and value is not None and value not in effects[key]
    ]
    if not ignored:
        return []
    return [f"{GENERATION} has {', '.join(ignored)}, which the zoo does not apply."]
