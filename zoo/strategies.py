"""Sharding rules for decoders: what each kind of parallelism splits, and what it costs.

A strategy is a union of parallelisms. RULES at the end of an entry's file are built from these:

    "fsdp_tp": DP | FSDP | TP

A weight [D, F] is stored with the logical axes (embed, mlp) and multiplied with (act_embed, mlp).
If the rules shard these differently, the weight is gathered just before its matmul, and its
gradient is scattered just after.

Notation: In[B_X, D] is a tensor whose dim B is split over mesh axis X. B batch, D embed, F mlp.
"""

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

# Megatron: each sublayer splits its inner dim and ends in an all-reduce of activations: two per
# layer forward and two backward. With FSDP, it divides the bytes to gather by `model`.
TP = {
    "heads": "model",  # each device attends with its own heads,
    "kv_heads": "model",  # and their kv heads; see DECODER_UNEVEN if `model` does not divide them
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
# (attention.way_to_attend). Gradients are summed over `seq` as over `data`.
CP = {
    "seq": "seq",
    "residual_seq": "seq",
    "slots": "seq",  # decoding sums small figures over `seq`, not keys
}

# ZeRO-3 over all devices that share the positions.
FSDP_CP = {"embed": ("data", "seq")}

# Pipeline: each device along `pipe` has L / pipe of the layers. Microbatches visit one after another,
# and only their activations travel.
PP = {"layers": "pipe"}

# The logical axes of a decoder, and whether activations, weights or both have them. Some activations
# have an axis of their own instead of "seq". A "stack" is scanned layer by layer, so rules must not
# split it.
DECODER_AXES = {
    "batch": "activations",  # B
    "seq": "activations",  # T, S
    "residual_seq": "instead of seq",  # T of the residual stream, between sublayers
    "slots": "instead of seq",  # S of a cache
    "act_embed": "activations",  # D; also of weights in use
    "embed": "weights",  # D, of weights at rest
    "heads": "both",  # N
    "kv_heads": "both",  # K
    "head_dim": "both",  # H
    "mlp": "both",  # F
    "vocab": "both",  # V
    "lora": "both",  # the rank of adapters
    "norm": "weights",  # D or H, of a norm's scale: too small to be worth a gather
    "layers": "stack",  # L, in front of every weight of the stacked layers
}

# A weight's logical axis at rest → its name in use, so that rules can shard the two differently.
DECODER_IN_USE = {"embed": "act_embed"}

# Dims that need not be divisible by their mesh axes, and what happens then; others are an error.
DECODER_UNEVEN = {
    "vocab": "padded",  # in the step, with rows that nothing reads; at rest the table is replicated
    "heads": "replicated",  # every device along the axis computes all heads
    "kv_heads": "replicated",
}

DECODER_POSITIONS = ("seq", "residual_seq")  # the axes of T: of a batch, of the residual stream
DECODER = DECODER_AXES, DECODER_IN_USE, DECODER_UNEVEN, DECODER_POSITIONS
