"""The context that published models of the zoo's sizes were trained with."""

# Entry → size → tokens. Sizes without a published model (tiny, small, medium, the 124m Transformer) have
# none, and GPT2's tables of positions set its limit.
TRAINED = {
    "transformer": {  # Llama 3.2, 3 and 3.1, and its relatives
        "1b": 131_072, "8b": 8_192, "70b": 8_192,
        "llama31_8b": 131_072, "llama31_70b": 131_072, "llama31_405b": 131_072,
        "mistral_small_24b": 131_072, "ministral3_8b": 262_144, "olmo2_7b": 4_096,
        "olmo3_7b": 65_536, "phi3_mini": 4_096, "phi4": 16_384, "smollm3_3b": 65_536,
        "glm4_9b": 32_768, "seed_oss_36b": 524_288,
    },
    "moe": {
        "mixtral_8x7b": 32_768, "qwen3_30b_a3b": 32_768, "qwen15_moe_a3b": 8_192,
        "qwen2_57b_a14b": 65_536, "olmoe_7b_a1b": 4_096, "minimax_m2": 196_608,
        "glm45_air": 131_072, "glm45": 131_072,
    },
    "gemma3": {
        "1b": 32_768, "4b": 131_072, "12b": 131_072, "27b": 131_072,
        "gemma2_2b": 8_192, "gemma2_9b": 8_192, "gemma2_27b": 8_192,
    },
    "gemma3_vision": {"4b": 131_072, "12b": 131_072, "27b": 131_072},
    "gemma4": {
        "e2b": 131_072, "e4b": 131_072, "12b": 262_144, "26b_a4b": 262_144, "31b": 262_144,
    },
    "gemma4_vision": {
        "e2b": 131_072, "e4b": 131_072, "12b": 262_144, "26b_a4b": 262_144, "31b": 262_144,
    },
    "gpt_oss": {"20b": 131_072, "120b": 131_072},
    "deepseek": {"16b": 8_192, "671b": 131_072, "kimi_k2": 131_072},
    "qwen3_next": {"80b_a3b": 262_144, "qwen35_9b": 262_144, "qwen35_35b_a3b": 262_144},
    "hybrid": {
        "lfm2_350m": 32_768, "lfm2_1b": 32_768, "lfm2_8b_a1b": 32_768, "granite4_h_micro": 131_072,
        "granite4_h_tiny": 131_072, "granite4_h_small": 131_072,
        "nemotron_h_8b": 8_192, "nemotron_nano_9b": 131_072, "nemotron3_nano_30b": 262_144,
        "nemotron3_super_120b": 262_144, "falcon_h1_1b": 131_072, "falcon_h1_7b": 262_144,
        "kimi_linear_48b": 1_048_576, "olmo_hybrid_7b": 65_536,
    },
}  # fmt: skip


def beyond(entry: str, size: str, seq_len: int) -> list[str]:
    """A line if rows are longer than a size's published model was trained with; else none."""
    most = TRAINED.get(entry, {}).get(size, seq_len)
    if seq_len <= most:
        return []
    return [
        f"--seq_len={seq_len} is beyond the {most:,} tokens that the published {size} was trained with: "
        "its wavelengths would have to be scaled (rope_scaling), and the model trained on long rows."
    ]
