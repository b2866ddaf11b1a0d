"""Keys of config.json, adapter_config.json and generation_config.json with other values, and what ours become.

`python -m tests.by_hand.config_keys` compares what the models then compute with `transformers`.
"""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

from data import DataError, tokenizer
from recipes.common import hf
from recipes.common.generation.generation_config import settings_not_applied
from recipes.common.runtime.errors import UserError
from recipes.generate import Generate, Limit, Question, sampling
from tests.support.golden_folders import GOLDEN
from tests.support.small_tokenizers import byte_level

FILE = GOLDEN.parent / "config_keys.json"
SAME, REFUSED, WRONG = "the same here", "refused", "WRONG"
FOLDERS = (  # golden folders: of most architectures, and of each rotary scaling
    *("llama3", "llama_biases", "llama_linear", "llama_dynamic", "mistral", "ministral", "qwen2"),
    *("qwen3", "qwen3_yarn", "olmo2", "olmo3", "phi3", "smollm3", "granite", "glm4", "seed_oss"),
    *("ministral3", "mistral3", "mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "bert", "roberta"),
    *("gpt2", "gpt_oss", "llama2", "odd_llama", "odd_qwen3", "smollm", "gemma2", "gemma3"),
    *("modernbert", "xlmr", "siglip", "clip", "vit", "gemma3_vision"),
    *("granitemoe", "glm4_moe", "minimax_m2", "qwen3_next"),
    *("gemma4", "gemma4_moe", "gemma4_unified"),
    *(
        "lfm2",
        "lfm2_moe",
        "nemotron_h",
        "nemotron3",
        "nemotron3_latent",
        "falcon_h1",
        "granitemoehybrid",
    ),
    *("kimi_linear", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_vision"),
    *("bert_classes", "roberta_classes", "xlmr_classes", "modernbert_classes", "xlmr_pooler"),
)


def changed(keys: dict[str, Any], case: str) -> dict[str, Any]:
    """A config.json with a key of another value, as "text_config.head_dim=8" says."""
    path, _, text = case.partition("=")
    first, _, rest = path.partition(".")
    if not rest:
        return keys | {path: json.loads(text)}
    inner = keys.get(first) or {}
    return keys | {first: changed(inner, f"{rest}={text}")}


def fields(config: Any, plain: Any) -> dict[str, str]:
    """Field → value, of the fields in which a Config differs from the one without the change."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: repr(x) for name, x in values.items() if x != getattr(plain, name)}


# ---- adapter_config.json -------------------------------------------------------------------------

ADAPTER = "adapter_config.json"  # of the golden adapter of llama3
ADAPTER_VALUES: dict[str, list[Any]] = {
    "alora_invocation_tokens": [[1]],
    "alpha_pattern": [{"q_proj": 16}],
    "auto_mapping": [{"base_model_class": "x"}],
    "base_model_name_or_path": ["other"],
    "bias": ["all", "lora_only"],
    "corda_config": [{}],
    "eva_config": [{}],
    "exclude_modules": [["q_proj"], ".*q_proj"],
    "init_lora_weights": ["pissa", "gaussian", False, "olora"],
    "kasa_config": [{"a": 1}],
    "layer_replication": [[[0, 1], [0, 2]]],
    "layers_to_transform": [[0], 1],
    "loftq_config": [{"a": 1}],
    "lora_alpha": [2],
    "lora_dropout": [0.5],
    "megatron_core": ["other"],
    "modules_to_save": [["lm_head"]],
    "peft_type": ["LOHA"],
    "peft_version": ["0.1"],
    "qalora_group_size": [1],
    "r": [1],
    "rank_pattern": [{"q_proj": 1}],
    "revision": ["other"],
    "target_modules": [["q_proj"], "all-linear", ".*q_proj"],
    "target_parameters": [["x"]],
    "task_type": ["SEQ_CLS", None, "FEATURE_EXTRACTION"],
    "trainable_token_indices": [[0, 1]],
    **{key: [True, False] for key in ("ensure_weight_tying", "fan_in_fan_out", "inference_mode")},
    **{key: [True] for key in ("lora_bias", "use_dora", "use_qalora", "use_rslora")},
    "velora_config": [{"a": 1}],
}
ADAPTER_CASES = [
    f"{key}={json.dumps(value)}" for key, values in ADAPTER_VALUES.items() for value in values
]


def adapter_with(case: str, folder: pathlib.Path) -> pathlib.Path:
    """Writes the golden adapter with a key of another value into an empty folder."""
    plain = GOLDEN / "llama3_lora"
    for file in plain.glob("*.safetensors"):
        (folder / file.name).symlink_to(file)
    keys = json.loads((plain / ADAPTER).read_text())
    (folder / ADAPTER).write_text(json.dumps(changed(keys, case)))
    return folder


def adapter_fields(folder: pathlib.Path) -> dict[str, str]:
    """The fields of our Config that an adapter's change makes others. Raises UserError."""
    base = hf.Folder(GOLDEN / "llama3")
    read, plain = (
        hf.read_adapter(path).on(base.metadata, base.config)
        for path in (folder, GOLDEN / "llama3_lora")
    )
    return fields(read.config, plain.config)


# ---- generation_config.json ----------------------------------------------------------------------

GENERATION_VALUES: dict[str, list[Any]] = {  # with do_sample; in whose place null is greedy
    "do_sample": [False],
    "temperature": [0.3],
    "top_k": [3],
    "top_p": [0.4],
    "min_p": [0.3],
    "top_h": [0.3],
    "typical_p": [0.3],
    "epsilon_cutoff": [0.02],
    "eta_cutoff": [0.05],
    "repetition_penalty": [3.0],
    "encoder_repetition_penalty": [3.0],
    "length_penalty": [3.0],
    "diversity_penalty": [3.0],
    "no_repeat_ngram_size": [1],
    "encoder_no_repeat_ngram_size": [1],
    "bad_words_ids": [[[3], [5], [9], [20], [33], [40]]],
    "sequence_bias": [[[[3], 9.0]]],
    "force_words_ids": [[[3]]],
    "suppress_tokens": [[*range(20, 64)]],
    "begin_suppress_tokens": [[*range(5, 64)]],
    "forced_bos_token_id": [3],
    "forced_eos_token_id": [3],
    "exponential_decay_length_penalty": [[1, 9.0]],
    "min_length": [30],
    "min_new_tokens": [8],
    "max_length": [30],
    "max_new_tokens": [3],
    "max_time": [1e-9],
    "stop_strings": ["e"],
    "num_beams": [3],
    "num_beam_groups": [2],
    "num_return_sequences": [2],
    "early_stopping": [True],
    "guidance_scale": [3.0],
    "penalty_alpha": [0.6],
    "constraints": [[1]],
    "renormalize_logits": [True],
    "remove_invalid_values": [True],
    "token_healing": [True],
    "watermarking_config": [{"greenlist_ratio": 0.25, "bias": 9.0}],
    "dola_layers": ["high"],
    "use_mtp": [True],
    "use_cache": [False],
    "cache_implementation": ["static"],
    "low_memory": [True],
    "is_assistant": [True],
    "num_assistant_tokens": [3],
    "eos_token_id": [[*range(64)], 7],
    "bos_token_id": [7],
    "pad_token_id": [7],
    "decoder_start_token_id": [7],
    "prefill_chunk_size": [4],
    "disable_compile": [True],
}
GENERATION_CASES = [
    f"{key}={json.dumps(value)}" for key, values in GENERATION_VALUES.items() for value in values
]
PLAIN_GENERATION = {"do_sample": True, "eos_token_id": 63}
READ, NAMED = "read", "named"


def generation_outcome(case: str) -> str:
    """What recipes.generate makes of generation_config.json: READ, NAMED in a line, REFUSED or WRONG: nothing."""

    def settings(keys: dict[str, Any]) -> tuple[Any, ...]:
        tokens = tokenizer.from_files(
            byte_level() | {tokenizer.GENERATION: json.dumps(keys).encode()}, "folder"
        )
        chosen = sampling(Generate(), tokens)
        limit = Limit(1_000, Generate(), tokens)
        question = Question({}, np.zeros(4, np.int32))
        return chosen, tokens.end, limit.new_tokens(question), settings_not_applied(tokens, True)

    try:
        *read, named = settings(changed(PLAIN_GENERATION, case))
    except (UserError, DataError):
        return REFUSED
    *plain, _ = settings(PLAIN_GENERATION)
    return NAMED if named else READ if read != plain else WRONG
