"""Sharding rules for decoders: what each kind of parallelism splits, and what it costs.

A strategy is a union of parallelisms, and `decoder_rules` lists all:

    "fsdp_tp": DP | FSDP | TP

A weight [D, F] is stored with the logical axes (embed, mlp) and multiplied with (act_embed, mlp).
If the rules shard these differently, the weight is gathered just before its matmul, and its
gradient is scattered just after.

Notation: In[B_X, D] is a tensor whose dim B is split over mesh axis X. B batch, D embed, F mlp.
"""

from .sharding import AxisNames, optimizer_axis

# Logical axes that files besides the models ask for by name.
SEQ = "seq"  # T, S
RESIDUAL_SEQ = "residual_seq"  # T of the residual stream, between sublayers
HEADS = "heads"  # N
KV_HEADS = "kv_heads"  # K
MLP = "mlp"  # F
VOCAB = "vocab"  # V
LAYERS = "layers"  # L, in front of every weight of the stacked layers
HEAD_DIM = "head_dim"  # H

# Data parallel: every device has all weights; one all-reduce of all gradients per step.
DP = {
    "batch": "data",  # In[B_data, D] · W[D, F] → Out[B_data, F]: no communication
}

# ZeRO-3: weights, gradients and optimizer state are split; a layer's weights are whole only while
# it runs. Two all-gathers of the weights and one reduce-scatter of the gradients per step.
FSDP = {
    "embed": "data",  # 1/data of every matrix on each device;
    # W[D_data, F] → W[D, F] is the all-gather, in compute dtype
}

# ZeRO-1: weights are whole, and each device has 1/data of the optimizer's state. The gradients'
# all-reduce becomes a reduce-scatter, and an all-gather of the updated parts of the weights.
ZERO1 = {"optimizer_embed": "data"}

# Megatron: each sublayer splits its inner dim and ends in an all-reduce of activations: two per
# layer forward and two backward. With FSDP, it divides the bytes to gather by `model`.
TP = {
    "heads": "model",  # each device attends with its own heads,
    "kv_heads": "model",  # and their kv heads; see DECODER.uneven if `model` does not divide them
    "mlp": "model",  # In[B, F_model] · W[F_model, D] → partial sums: the all-reduce
    "vocab": "model",  # logits stay split; the loss reduces two numbers per position
}

# Hybrid: `data` replica groups, each of fsdp × model devices that share one copy of the weights.
# Gathers stay inside a group (fast links); only gradients cross groups, by an all-reduce.
HSDP = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",
}

# Megatron's sequence parallelism, for TP: between sublayers T is split too, so norms and saved
# activations are. The all-reduces become reduce-scatters after a sublayer and all-gathers before it;
# the backward pass gathers again, unless remat is "gathered".
SP = {
    "residual_seq": "model",  # In[B, T_model, D] → In[B, T, D]
}

# Context parallelism: devices share out the positions of each row. These meet in attention alone
# (context.choose_exchange). Gradients are summed over `seq` as over `data`.
CP = {
    "seq": "seq",
    "residual_seq": "seq",
    "slots": "seq",  # decoding sums small numbers over `seq`, not keys
}

# ZeRO-3 over all devices that share the positions.
FSDP_CP = {"embed": ("data", "seq")}

# Pipeline: each device along `pipe` has L / pipe of the layers. Microbatches visit one after another,
# and only their activations travel.
PP = {"layers": "pipe"}


def decoder_rules(*like_embed: str, like_heads: tuple[str, ...] = ()) -> dict[str, dict]:
    """Strategy → the rules that it states, for every decoder.

    Args:
      like_embed: more logical axes of weights at rest, which ZeRO-3 splits as it splits `embed`.
      like_heads: more logical axes, which tensor parallelism splits as it splits `heads`.
    """
    zero1 = {**ZERO1, **{optimizer_axis(axis): "data" for axis in like_embed}}
    fsdp = split_alike(FSDP, like_embed)
    hsdp = split_alike(HSDP, like_embed)
    fsdp_cp = split_alike(FSDP_CP, like_embed)
    tp = split_alike(TP, like_heads, HEADS)
    return {
        "dp": DP,
        "zero1": DP | zero1,
        "fsdp": DP | fsdp,
        "tp_sp": DP | tp | SP,
        "fsdp_tp_sp": DP | fsdp | tp | SP,
        "hsdp_tp_sp": hsdp | tp | SP,
        "tp": DP | tp,
        "fsdp_tp": DP | fsdp | tp,
        "hsdp_tp": hsdp | tp,
        "cp": DP | CP,
        "fsdp_cp": DP | CP | fsdp_cp,
        "fsdp_cp_tp": DP | CP | fsdp_cp | tp,
        "pp": DP | PP,
        "pp_zero1": DP | zero1 | PP,
        "fsdp_pp": DP | fsdp | PP,
        "fsdp_pp_tp": DP | fsdp | PP | tp,
    }


def split_alike(parallelism: dict, axes: tuple[str, ...], like: str = "embed") -> dict:
    """Adds logical axes that a parallelism splits as it splits `like`."""
    return parallelism | dict.fromkeys(axes, parallelism[like])


DECODER = AxisNames(
    logical_axes={
        "batch": "activations",  # B
        "seq": "activations",
        "residual_seq": "activations",
        "slots": "activations",  # S of a cache
        "act_embed": "activations",  # D; also of weights in use
        "embed": "weights",  # D, of weights at rest
        "heads": "both",
        "kv_heads": "both",
        "head_dim": "both",  # H
        "mlp": "both",
        "vocab": "both",
        "lora": "both",  # the rank of adapters
        "norm": "weights",  # D or H, of a norm's scale: too small to be worth a gather
        "layers": "stack",
    },
    in_use={"embed": "act_embed"},
    uneven={
        "vocab": "padded",  # in the step, with rows that nothing reads; at rest it is replicated
        "heads": "replicated",  # every device along the axis computes all heads
        "kv_heads": "replicated",
    },
    positions=(SEQ, RESIDUAL_SEQ),
    substitutes={"residual_seq": "seq", "slots": "seq"},
)
