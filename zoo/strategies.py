"""What each kind of parallelism splits in a decoder, and what it costs.

A strategy is a union of parallelisms. The RULES of an entry, at the end of its file, are made of these:

    "fsdp_tp": DP | FSDP | TP

A weight [D, F] rests as its axes (embed, mlp) say, and is multiplied as (act_embed, mlp) say. Where the
two differ, it is gathered just before its matmul, and its gradient is scattered just after.

Notation: In[B_X, D] is a tensor whose dim B is split over mesh axis X. B batch, D embed, F mlp.
"""

# Data parallel: every device has all weights; one all-reduce of all gradients a step.
DP = {
    "batch": "data",  # In[B_data, D] · W[D, F] → Out[B_data, F]: no communication
}

# ZeRO-3: weights, gradients and optimizer state are split; a layer's weights are whole only while it
# runs. Two all-gathers of the weights and one reduce-scatter of the gradients a step.
FSDP = {
    "embed": "data",  # 1/data of every matrix on each device;
    # W[D_data, F] → W[D, F] is the all-gather, in compute dtype
}

# Megatron: each sublayer splits its inner dim and ends in an all-reduce of activations, two a layer
# forward and two backward. Under FSDP it divides the bytes that are gathered by `model`.
TP = {
    "heads": "model",  # each device attends with its own heads,
    "kv_heads": "model",  # so the kv heads must be divisible by `model` as well
    "mlp": "model",  # In[B, F_model] · W[F_model, D] → partial sums: the all-reduce
    "vocab": "model",  # logits stay split; the loss reduces two numbers a position
}

# Hybrid: `data` replica groups, each of fsdp × model devices that share one copy of the weights.
# Gathers stay inside a group (fast links); only gradients cross groups, by an all-reduce.
HSDP = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",
}

# The logical axes of a decoder, and whether activations, weights or both have them; a stack is scanned
# layer by layer, so no rules may split it.
DECODER_AXES = {
    "batch": "activations",  # B
    "seq": "activations",  # T, S
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

# The name of a weight's axis while it is multiplied, where rules may shard it differently.
DECODER_IN_USE = {"embed": "act_embed"}

# Dims that a mesh axis need not divide, and what happens then; other dims are refused.
DECODER_UNEVEN = {
    "vocab": "padded",  # inside the step, by rows that nothing reaches; at rest the table is whole
    "heads": "replicated",  # every device along the axis attends with all of them
    "kv_heads": "replicated",
}
