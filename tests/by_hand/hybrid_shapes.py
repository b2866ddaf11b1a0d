"""Compares hybrids of odd shapes with `transformers`, live. Needs the extra `hf`.

    python -m tests.by_hand.hybrid_shapes --shapes=10
    python -m tests.by_hand.hybrid_shapes --families=falcon_h1

Each shape is drawn anew: heads, groups, widths, patterns, widths of convolutions, numbers of experts.
Logits differ by at most hf_families.TOLERANCE, or the command fails. Some shapes amplify rounding, as
norms of small numbers do: there, ours may be no further from those of `transformers` in float64 than
its own in float32 are.
"""

import argparse
import dataclasses
import pathlib
import tempfile

import jax
import numpy as np

import tests.conftest  # noqa: F401, simulates the devices
from tests.by_hand.hf_parity import make, their_logits
from tests.support.hf_families import FAMILIES, FULL, LINEAR_LAYER, TOLERANCE
from tests.support.hf_models import our_logits


class Draw:
    """Random choices of a seed."""

    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)

    def of(self, *values):
        return values[self.random.integers(len(values))]

    def types(self, *values: str) -> list[str]:
        """Kinds of layers, at least one of each."""
        more = [self.of(*values) for _ in range(self.of(0, 1, 3))]
        return [str(x) for x in self.random.permutation([*values, *more])]


def experts(draw: Draw, number: str) -> dict:
    count = draw.of(3, 5, 8)
    return {number: count, "num_experts_per_tok": draw.of(1, 2, count)}


def mamba(draw: Draw, heads: str, groups: str) -> dict:
    of_groups, groups_count = draw.of(1, 2, 3), draw.of(1, 2, 3)
    return {heads: of_groups * groups_count, groups: groups_count}


def lfm2(draw: Draw) -> dict:
    types = draw.types("conv", FULL)
    return {"layer_types": types, "num_hidden_layers": len(types), "conv_L_cache": draw.of(2, 3, 5)}


def lfm2_moe(draw: Draw) -> dict:
    options = lfm2(draw) | experts(draw, "num_experts")
    return options | {
        "num_dense_layers": draw.of(0, 1),
        "moe_intermediate_size": draw.of(4, 12, 24),
        "norm_topk_prob": draw.of(True, False),
        "routed_scaling_factor": draw.of(1.0, 2.5),
    }


def granite(draw: Draw) -> dict:
    types = draw.types(LINEAR_LAYER, FULL)
    options = mamba(draw, "mamba_n_heads", "mamba_n_groups")
    head_dim = draw.of(4, 6)
    embed = options["mamba_n_heads"] * head_dim // 2 * 8
    return options | experts(draw, "num_local_experts") | {
        "layer_types": types, "num_hidden_layers": len(types), "hidden_size": embed,
        "mamba_d_head": 8 * head_dim, "mamba_d_state": draw.of(3, 8), "mamba_d_conv": draw.of(2, 4),
        "num_attention_heads": 4, "num_key_value_heads": draw.of(1, 2, 4),
    }  # fmt: skip


def falcon(draw: Draw) -> dict:
    options = mamba(draw, "mamba_n_heads", "mamba_n_groups")
    factors = [draw.of(0.5, 0.8, 1.0, 1.3) for _ in range(5)]
    return options | {
        "mamba_d_ssm": options["mamba_n_heads"] * draw.of(3, 8), "mamba_d_state": draw.of(3, 8),
        "mamba_d_conv": draw.of(2, 4), "mamba_rms_norm": draw.of(True, False),
        "mamba_norm_before_gate": False, "num_hidden_layers": draw.of(1, 2),
        "ssm_multipliers": factors, "mlp_multipliers": factors[:2], "key_multiplier": factors[2],
        "attention_in_multiplier": factors[3], "lm_head_multiplier": draw.of(0.1, 1 / 3, 1.0),
    }  # fmt: skip


def nemotron(draw: Draw) -> dict:
    types = draw.types(LINEAR_LAYER, FULL, "mlp", "moe")
    return mamba(draw, "mamba_num_heads", "n_groups") | experts(draw, "n_routed_experts") | {
        "layers_block_type": types, "mamba_head_dim": draw.of(3, 8), "ssm_state_size": draw.of(3, 8),
        "conv_kernel": draw.of(2, 4), "moe_intermediate_size": draw.of(4, 12),
        "moe_shared_expert_intermediate_size": draw.of(9, 24), "norm_topk_prob": draw.of(True, False),
        "moe_latent_size": draw.of(None, 8, 20), "mlp_bias": draw.of(True, False),
    }  # fmt: skip


def kimi(draw: Draw) -> dict:
    types = draw.types(LINEAR_LAYER, FULL)
    feeds = ["sparse", *(draw.of("dense", "sparse") for _ in types[1:])]
    heads = draw.of(2, 3, 5)
    return {
        "layer_types": types, "num_hidden_layers": len(types), "mlp_layer_types": feeds,
        "num_attention_heads": heads, "num_key_value_heads": heads, "norm_topk_prob": draw.of(True, False),
        "linear_num_heads": draw.of(1, 3, 5), "linear_head_dim": draw.of(3, 8, 10),
        "linear_conv_kernel_dim": draw.of(2, 3, 4), "kv_lora_rank": draw.of(6, 12, 17),
        "q_lora_rank": draw.of(None, 7), "qk_nope_head_dim": draw.of(2, 6, 8),
        "qk_rope_head_dim": draw.of(2, 4), "v_head_dim": draw.of(3, 5, 8),
        "num_local_experts": draw.of(3, 5, 8), "num_experts_per_tok": draw.of(1, 2, 3),
        "n_shared_experts": draw.of(1, 2), "routed_scaling_factor": draw.of(1.0, 2.446),
    }  # fmt: skip


def olmo(draw: Draw) -> dict:
    types = draw.types(LINEAR_LAYER, FULL)
    groups, key_dim = draw.of(1, 2, 3), draw.of(2, 4, 6)
    value_dim = draw.of(2, 3, 8)
    return {
        "layer_types": types, "num_hidden_layers": len(types), "linear_num_key_heads": groups,
        "linear_num_value_heads": groups * draw.of(1, 2), "linear_key_head_dim": key_dim,
        "linear_value_head_dim": 3 * value_dim, "linear_conv_kernel_dim": draw.of(2, 3, 4),
        "linear_allow_neg_eigval": draw.of(True, False), "num_key_value_heads": draw.of(1, 2, 3, 6),
        "rope_parameters": {"rope_theta": draw.of(None, 30.0), "rope_type": "default"},
    }  # fmt: skip


SHAPES = {
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
    "granitemoehybrid": granite,
    "falcon_h1": falcon,
    "nemotron3": nemotron,
    "kimi_linear": kimi,
    "olmo_hybrid": olmo,
}


def main() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", type=int, default=10)
    parser.add_argument("--families", default=",".join(SHAPES))
    args = parser.parse_args()
    for name in args.families.split(","):
        worst, amplified = 0.0, 0
        for seed in range(args.shapes):
            drawn = SHAPES[name](Draw(seed))
            options = FAMILIES[name].options | drawn
            family = dataclasses.replace(FAMILIES[name], options=options, dtype="float32")
            with tempfile.TemporaryDirectory() as work:
                folder = pathlib.Path(work) / name
                make(family, folder)
                wanted = their_logits(folder)
                got = our_logits(f"hf:{folder}", "1x1", "dp")
                error = np.abs(got - wanted).max()
                print(
                    f"{name} {seed}: {error:.1e} of {np.abs(wanted).max():.1f}; {drawn}", flush=True
                )
                if error < TOLERANCE:
                    worst = max(worst, error)
                else:
                    exact = their_logits(folder, dtype="float64")
                    ours, theirs = (np.abs(x - exact).max() for x in (got, wanted))
                    print(f"  in float64: theirs {theirs:.1e}, ours {ours:.1e}", flush=True)
                    assert ours <= theirs
                    amplified += 1
            jax.clear_caches()
        equal = args.shapes - amplified
        print(f"{name}: {equal} of {args.shapes} shapes differ by at most {worst:.1e}", flush=True)


if __name__ == "__main__":
    main()
