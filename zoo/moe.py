"""MoE: a decoder-only language model whose MLPs are mixtures of experts.

Each position goes through `experts_per_token` of `num_experts` SwiGLU experts, chosen by a router
(Shazeer et al. 2017); with a capacity for each expert, as in GShard (Lepikhin et al. 2020), or
dropless (Gale et al. 2022). The balance loss is Switch Transformer's (Fedus et al. 2021), the
router's z-loss ST-MoE's (Zoph et al. 2022), the bias that balances DeepSeek's (Wang et al. 2024):
the family of Mixtral and Qwen3-MoE.

All but the experts is as in transformer.py: what has the same name in both files has the same lines,
except Config, Attention, Layer and the model. Adapters (LoRA) are there alone.

Shapes: B batch, T query positions, S key positions, D embed, N heads, K kv heads, G = N/K, H head
dim, F hidden width of an expert, V vocab, L layers, E experts, J experts of a position, U slots that
a row has in an expert, M slots or chosen experts in a row, R shards of the batch, C positions in one
chunk of the loss.

Every parameter carries *logical* axis names. They have no effect until sharding rules map them to
mesh axes:

    model = MoE(Config.tiny(), rngs=nnx.Rngs(0))                     # no mesh, no rules, no context
    logits_BTV = model(tokens_BT)

    rules = RULES["fsdp_ep"]                                         # at the end of this file
    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(rules.items())):
        graph, state = nnx.split(model)
        state = jax.device_put(state, nnx.get_named_sharding(state, mesh))   # each weight at rest
        logits_BTV = jax.jit(lambda s, t: nnx.merge(graph, s)(t))(state, tokens_BT)

jax.jit does not notice that the rules change: give each table its own jitted function.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Config:
    """The architecture, and how to compute it. Named sizes are classmethods."""

    vocab_size: int  # V, tokens
    embed: int  # D
    num_layers: int  # L
    num_heads: int  # N, query heads
    num_kv_heads: int  # K, key and value heads; divides num_heads
    head_dim: int  # H, even
    mlp: int  # F, hidden width of one expert's SwiGLU
    num_experts: int  # E
    experts_per_token: int  # J, those that a position goes through
    # Slots that each row has in an expert, in multiples of what even use would take. A position for
    # which an expert has none left goes on without it. None: dropless, at the price of a sort.
    capacity: float | None = 1.25
    normalize: bool = True  # the weights of a position's experts sum to 1
    balance_weight: float = 0.01  # of the balance loss in the objective
    router_z_weight: float = 1e-3  # of the squared log-normalizer of the router's logits
    balance_rate: float = 0.0  # by which a step moves the biases that even the load; 0: none
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0  # base of the rotary wavelengths
    # Llama 3: (factor, low_freq_factor, high_freq_factor, original length in positions)
    rope_scaling: tuple[float, float, float, int] | None = None
    sliding_window: int | None = None  # a position sees itself and the window - 1 before it
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = True
    # How to compute it; nothing below changes a parameter.
    dtype: str = "float32"  # of activations and matmuls; parameters, norms and loss stay float32
    remat: str = "full"  # what a layer keeps for its backward pass: a key of REMAT
    attention: str = "auto"  # "xla", a key of KERNELS, or "auto": the best of the mesh's device
    loss_chunk: int = 256  # C, positions of a sequence with logits at one time: positions_at_once
    unroll: int = 1  # layers in one trip of the scan: all are 1 to 6% faster, and compile longer

    def __post_init__(self):
        """Raises ValueError if the configuration is invalid."""
        for name, value in vars(self).items():
            if type(value) is int and value < 1:
                raise ValueError(f"{name}={value} must be ≥ 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} must be even: rotary embeddings rotate pairs of dims"
            )
        if self.remat not in REMAT:
            raise ValueError(f"remat={self.remat!r} is not one of {', '.join(REMAT)}")
        if self.attention not in ("auto", "xla", *KERNELS):
            known = ", ".join(("auto", "xla", *KERNELS))
            raise ValueError(f"attention={self.attention!r} is not one of {known}")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} is more than num_experts={self.num_experts}"
            )
        if self.capacity is not None and not self.capacity > 0:
            raise ValueError(f"capacity={self.capacity} must be > 0, or None for dropless")

    @classmethod
    def tiny(cls) -> "Config":
        """271,680 parameters. 124,224 of them active. For tests: every sharded dim is divisible by 8."""
        return cls(
            384, 64, 2, num_heads=16, num_kv_heads=8, head_dim=8,
            mlp=64, num_experts=8, experts_per_token=2,
        )  # fmt: skip

    @classmethod
    def small(cls) -> "Config":
        """2,479,232 parameters. 857,216 of them active, about Transformer's small. The laptop default, over bytes."""
        return cls(
            384, 128, 4, num_heads=8, num_kv_heads=8, head_dim=16,
            mlp=176, num_experts=8, experts_per_token=2, remat="dots",
            # A row of 128 bytes uses its experts less evenly than one of thousands of tokens.
            capacity=2.0, balance_weight=0.03,
        )  # fmt: skip

    @classmethod
    def mixtral_8x7b(cls) -> "Config":
        """46,702,792,704 parameters. 12,879,925,248 of them active. Mixtral 8x7B."""
        return cls(
            32_000, 4_096, 32, num_heads=32, num_kv_heads=8, head_dim=128,
            mlp=14_336, num_experts=8, experts_per_token=2,
            rope_theta=1e6, tie_embeddings=False, remat="dispatched",
        )  # fmt: skip

    @classmethod
    def qwen3_30b_a3b(cls) -> "Config":
        """30,532,122,624 parameters. 3,353,032,704 of them active. Qwen3 30B-A3B."""
        return cls(
            151_936, 2_048, 48, num_heads=32, num_kv_heads=4, head_dim=128,
            mlp=768, num_experts=128, experts_per_token=8, qk_norm=True, norm_eps=1e-6,
            rope_theta=1e6, tie_embeddings=False, remat="dispatched",
        )  # fmt: skip


# What a layer's forward pass keeps for its backward pass; the rest is computed again.
REMAT = {
    "none": jax.checkpoint_policies.everything_saveable,  # under FSDP, gathered weights too
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # products with a weight
    # The two sublayers' outputs: no all-reduce of tensor parallelism runs a second time.
    "sublayers": jax.checkpoint_policies.save_only_these_names("sublayer"),
    # What arrived at the experts and where it came from: nothing is sent to them a second time.
    "dispatched": jax.checkpoint_policies.save_only_these_names("dispatched"),
    "full": jax.checkpoint_policies.nothing_saveable,  # only the layer's input
}


SIZES = {
    "tiny": Config.tiny,
    "small": Config.small,
    "mixtral_8x7b": Config.mixtral_8x7b,
    "qwen3_30b_a3b": Config.qwen3_30b_a3b,
}

# What sharding rules may name, and whether activations, weights or both have it; a stack is scanned
# one by one, so no rules may split it.
LOGICAL_AXES = {
    "batch": "activations",  # B
    "seq": "activations",  # T, S
    "act_embed": "activations",  # D; also of weights in use
    "embed": "weights",  # D, of weights at rest
    "heads": "both",  # N
    "kv_heads": "both",  # K
    "head_dim": "both",  # H
    "mlp": "both",  # F, of each expert
    "vocab": "both",  # V
    "expert": "weights",  # E; each device computes its experts, and activations travel to them
    "expert_embed": "weights",  # D, of experts at rest
    "router": "weights",  # E, of the router: each device scores all experts
    "norm": "weights",  # D or H, of a norm's scale and the router: too small to be worth a gather
    "layers": "stack",  # L, in front of every weight of the stacked layers
}

# What a weight's axis is called while it is multiplied, where rules may shard it differently.
IN_USE = {"embed": "act_embed", "expert_embed": "act_embed"}


# What a mesh axis need not divide, and what is done then; other dims are refused.
UNEVEN = {
    "vocab": "padded",  # inside the step, by rows that nothing reaches; at rest the table is whole
    "heads": "replicated",  # every device along the axis attends with all of them
    "kv_heads": "replicated",
}

# Logical axis → the one that its mesh axes must split, too: positions travel to experts along them.
WITHIN = {"expert": "batch"}


# ---- kit: the same lines in every zoo file, explained in zoo/README.md ---------------------------


def complete(tables):
    """Strategy → sharding rules for every logical axis; what a table leaves out is replicated."""
    return {name: dict.fromkeys(LOGICAL_AXES) | table for name, table in tables.items()}


def spec(axes: tuple[str | None, ...]) -> PartitionSpec | None:
    """Logical axes → PartitionSpec, by the rules and mesh in force; None where there are none."""
    rules = dict(get_logical_axis_rules() or ())
    if not rules or jax.sharding.get_abstract_mesh().empty:
        return None
    return PartitionSpec(*(rules[axis] if axis else None for axis in axes))


def explicit(*axes: str | None) -> PartitionSpec | None:
    """`out_sharding` of an operation that Explicit mesh axes, JAX's default, leave open; else None."""
    kinds = jax.sharding.get_abstract_mesh().axis_types
    return spec(axes) if AxisType.Explicit in kinds else None


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Shards an array by its logical axes. Outside a mesh it does nothing."""
    if (where := explicit(*axes)) is not None:
        return jax.sharding.reshard(x, where)
    if (where := spec(axes)) is not None:
        return jax.lax.with_sharding_constraint(x, where)
    lies = jax.typeof(x).sharding  # no rules say how to share the work: each device does all of it
    if AxisType.Explicit in lies.mesh.axis_types:
        return jax.sharding.reshard(x, lies.update(spec=PartitionSpec()))
    return x


def in_use(weights, dtype=None):
    """Weights as their matmuls want them: in `dtype`, with the axes that IN_USE gives them.

    Takes a module or one variable and returns the same. Under FSDP this is the all-gather, and its
    transpose, on Explicit axes, the reduce-scatter of the gradient. Sharding rules alone don't do
    this: XLA is then free to gather activations and partial sums instead, at ten times the bytes.
    """

    def one(weight):
        w, axes = weight[...], weight.out_sharding
        if IN_USE.keys() & set(axes):  # not a norm's scale, which stays in float32
            w = w if dtype is None else w.astype(dtype)
            axes = axes[-w.ndim :]  # inside a scan over layers, the axis of the layers is gone
            w = constrain(w, *(IN_USE.get(axis, axis) for axis in axes))
        elif spec(()) is None:
            w = constrain(w)
        return weight.replace(w)

    return jax.tree.map(one, weights, is_leaf=lambda x: isinstance(x, nnx.Variable))


# ---- end of the kit ------------------------------------------------------------------------------


def param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], stddev: float, kind=None):
    """A normal float32 parameter with logical axis names; `kind`: other than nnx.Param.

    eager_sharding=False keeps the names inert: they wait for rules instead of asking for a mesh.
    """
    value = stddev * jax.random.normal(rngs.params(), shape)
    return (kind or nnx.Param)(value, out_sharding=axes, eager_sharding=False)


def reshape(x: jax.Array, shape: tuple[int, ...], *axes: str | None) -> jax.Array:
    """Other dims for x, whose logical axes are `axes`."""
    return constrain(jnp.reshape(x, shape, out_sharding=explicit(*axes)), *axes)


def multiply(x: jax.Array, weight: nnx.Param, contract: int = 1) -> jax.Array:
    """x[B, T, ...] · weight, over the last `contract` dims of x and the first of the weight, in use.

    The result's other axes are those of the weight, which so lays out every activation of a layer.
    B and T go in as one dim: where a gradient contracts two dims at once, XLA's CPU backend
    transposes its operands first, which made the whole training step 1.6 times slower.
    """
    w, (B, T, *inner) = weight[...].astype(x.dtype), x.shape
    axes = [IN_USE.get(axis, axis) for axis in weight.out_sharding[-w.ndim :]]
    x = reshape(x, (B * T, *inner), "batch", *axes[:contract])
    y = jnp.tensordot(x, w, contract, out_sharding=explicit("batch", *axes[contract:]))
    return reshape(y, (B, T, *y.shape[1:]), "batch", "seq", *axes[contract:])


class RMSNorm(nnx.Module):
    """x / rms(x) · scale, in float32."""

    def __init__(self, dim: int, eps: float, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones(dim), out_sharding=("norm",), eager_sharding=False)
        self.eps = eps

    def __call__(self, x):
        x32 = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        scale = jnp.expand_dims(self.scale[...], tuple(range(x.ndim - 1)))
        return (x32 * jax.lax.rsqrt(variance + self.eps) * scale).astype(x.dtype)


def rope_angles(config: Config, positions_BT: jax.Array) -> jax.Array:
    """Rotation of each pair of dims at these positions: [B, T, H/2], float32 radians."""
    dims = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32)
    frequency = config.rope_theta ** -(dims / config.head_dim)
    if config.rope_scaling is not None:  # Llama 3: stretch long wavelengths, keep short ones
        factor, low, high, original = config.rope_scaling
        turns = original * frequency / (2 * math.pi)  # made within the original length
        keep = jnp.clip((turns - low) / (high - low), 0, 1)
        frequency = frequency * (keep + (1 - keep) / factor)
    return positions_BT.astype(jnp.float32)[:, :, None] * frequency[None, None]


def rotate(x_BTNH: jax.Array, angles_BTH: jax.Array) -> jax.Array:
    """Rotary position embedding: dims i and i + H/2 turn as a pair (Hugging Face's convention)."""
    cos, sin = (f(angles_BTH)[:, :, None, :] for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


def attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, config: Config) -> jax.Array:
    """Causal softmax attention by the best kernel for the device. Returns [B, T, N, H].

    A position sees itself and what is before it, in its own segment and sliding window.
    """
    T, kv_heads = q_BTNH.shape[1], "kv_heads"
    if shards("heads") > shards("kv_heads"):  # each device takes those that its queries want
        axes, kv_heads = ("batch", "seq", "heads", "head_dim"), "heads"
        G = q_BTNH.shape[2] // k_BSKH.shape[2]
        k_BSKH, v_BSKH = (constrain(jnp.repeat(x, G, axis=2), *axes) for x in (k_BSKH, v_BSKH))
    kernel, _ = best_kernel(config, T, segment_ids_BT is not None)
    if kernel == "xla":
        return blockwise(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, config.sliding_window, kv_heads)
    local = functools.partial(KERNELS[kernel], window=config.sliding_window)
    kv, ids = ("batch", None, kv_heads, None), ("batch", None)  # T and H whole, whatever the rules
    axes = (("batch", None, "heads", None), kv, kv, ids)
    return locally(local, (q_BTNH, k_BSKH, v_BSKH, segment_ids_BT), axes, check_vma=False)


def locally(function, arrays, axes, check_vma: bool = True):
    """function(*arrays) on each device's own shards, for what XLA can't split.

    Args:
      axes: the logical axes of each array, None of one that is None; the result's are the first's.
      check_vma: as jax.shard_map's; Pallas kernels have none.
    """
    pairs = list(zip(arrays, axes, strict=True))
    given = [x if x is None else constrain(x, *names) for x, names in pairs]
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:  # arrays on Explicit axes still know theirs
        mesh = jax.typeof(given[0]).sharding.mesh
    if mesh.empty:
        return function(*given)
    lie = tuple(x if x is None else jax.typeof(x).sharding.spec for x in given)
    if spec(()) is not None:  # Auto axes are no part of a type
        lie = tuple(spec(names) for names in axes)
    specs = {"in_specs": lie, "out_specs": lie[0]}
    return jax.shard_map(function, mesh=mesh, **specs, check_vma=check_vma)(*given)


def best_kernel(config: Config, seq_len: int, segments: bool) -> tuple[str, str]:
    """What `config.attention` is on the mesh in force, else on the default device.

    Returns "xla" or a key of KERNELS, and the same with what a reader may want to know of it.

    Args:
      seq_len: T, positions of a row.
      segments: whether rows have segment ids.
    """
    device, H, name = _device(), config.head_dim, config.attention
    if name != "auto" or device.platform not in ("tpu", "gpu"):
        name = "xla" if name == "auto" else name
        return name, name
    unknown = {
        f"rows whose {axis} the rules split": shards(axis) > 1 for axis in ("seq", "head_dim")
    }
    if device.platform == "tpu":
        block = _block(seq_len)
        name, told = "splash", f"splash, blocks of {block}"
        unknown[f"{seq_len:,} positions, no multiple of 128"] = not block
    else:
        name = told = "triton" if segments else "cudnn"
        capability = _capability(device.device_kind)
        widest = 256 if capability >= 9 and name == "cudnn" else 128
        unknown[device.device_kind] = capability < 8
        unknown[config.dtype] = config.dtype == "float32"
        unknown[f"a head dim of {H}"] = H % 8 or widest < H
        window = config.sliding_window is not None
        unknown["segments and a sliding window together"] = segments and window
    why = next((f"xla, no kernel for {what}" for what, asked in unknown.items() if asked), None)
    return ("xla", why) if why else (name, told)


def splash(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window: int | None) -> jax.Array:
    """TPU: scores stay on chip, and blocks that are masked are skipped.

    8b with 4 layers, fsdp, a row of 32,768 on each of 16 v5p: 9.8 GB at the peak, XLA's 95.4.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as tpu

    T, N, H = q_BTNH.shape[1:]
    mask = tpu.CausalMask((T, T)) if window is None else tpu.LocalMask((T, T), (window - 1, 0), 0)
    names = ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")
    # Two kernels backward: a single one keeps a partial dQ for each block of keys, 15 GB more there.
    sizes = tpu.BlockSizes(**{f"block_{name}": _block(T) for name in names})
    kernel = tpu.make_splash_mha(
        tpu.MultiHeadMask([mask] * N), block_sizes=sizes, head_shards=1, q_seq_shards=1,
        interpret=_device().platform == "cpu",
    )  # fmt: skip
    ids = None if segment_ids_BT is None else tpu.SegmentIds(segment_ids_BT, segment_ids_BT)
    heads_first = (x.swapaxes(1, 2) for x in (q_BTNH * H**-0.5, k_BSKH, v_BSKH))
    return jax.vmap(kernel)(*heads_first, ids).swapaxes(1, 2)


def triton(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window: None) -> jax.Array:
    """NVIDIA: segments without a mask of T × T in memory, which cuDNN wants: 2.1 GB a row of 32,768."""
    from jax.experimental.pallas.ops.gpu import attention as gpu

    if window is not None:
        raise ValueError(f"attention='triton' has no sliding window, got {window}; use 'xla'")
    (B, T, N, H), K = q_BTNH.shape, k_BSKH.shape[2]
    if segment_ids_BT is None:
        segment_ids_BT = jnp.zeros((B, T), jnp.int32)
    block, rest = (64, 32) if H > 64 else (128, 64)  # what 100 kB of shared memory take
    wide = ((0, 0), (0, -T % block), (0, 0), (0, 0))
    q, k, v = (
        jnp.pad(x, wide) for x in (q_BTNH, *(jnp.repeat(x, N // K, 2) for x in (k_BSKH, v_BSKH)))
    )
    ids = jnp.pad(segment_ids_BT, wide[:2], constant_values=-1)  # padding is a segment of its own
    sizes = gpu.BlockSizes(block, block, rest, rest, rest, rest)
    out_BTNH = gpu.mha(
        q, k, v, ids, sm_scale=H**-0.5, causal=True, block_sizes=sizes,
        interpret=_device().platform == "cpu",
    )  # fmt: skip
    return out_BTNH[:, :T]


def cudnn(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window: int | None) -> jax.Array:
    """NVIDIA, rows without segments. A mask for segments would be T × T in memory."""
    if segment_ids_BT is not None:
        raise ValueError("attention='cudnn' has no segments; use 'triton' or 'xla'")
    left = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, is_causal=True, local_window_size=left, implementation="cudnn"
    )


KERNELS = {"splash": splash, "triton": triton, "cudnn": cudnn}


def blockwise(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window: int | None, kv_heads: str):
    """Any platform: a block of queries at a time, against only the keys that it may see.

    Half the work of the full square, and blocks that XLA's CPU backend runs side by side (1.6 times
    faster there).

    Args:
      kv_heads: the logical axis of K.
    """
    (B, T, N, H), K = q_BTNH.shape, k_BSKH.shape[2]
    G = N // K
    q = reshape(q_BTNH, (B, T, K, G, H), "batch", "seq", kv_heads, None, "head_dim")
    q_BKGTH = q.transpose(0, 2, 3, 1, 4)
    k_BKSH, v_BKSH = k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2)
    block = max(128, -(-T // 8))
    outputs = []
    for start in range(0, T, block):
        end = min(start + block, T)
        first = 0 if window is None else max(0, start + 1 - window)
        # M: G and T as one dim, for a step 1.5% shorter on the CPU backend than with five dims.
        q_BKMH = reshape(q_BKGTH[:, :, :, start:end], (B, K, -1, H), "batch", kv_heads)
        k, v = k_BKSH[:, :, first:end], v_BKSH[:, :, first:end]
        logits = jnp.einsum("BKMH,BKSH->BKMS", q_BKMH, k, preferred_element_type=jnp.float32)
        logits_BKGTS = reshape(logits, (B, K, G, end - start, end - first), "batch", kv_heads)
        age = jnp.arange(start, end)[:, None] - jnp.arange(first, end)[None, :]
        seen = ((age >= 0) if window is None else (age >= 0) & (age < window))[None, None, None]
        if segment_ids_BT is not None:
            same = segment_ids_BT[:, start:end, None] == segment_ids_BT[:, None, first:end]
            seen &= same[:, None, None]
        weights = jax.nn.softmax(jnp.where(seen, logits_BKGTS / math.sqrt(H), -1e30), axis=-1)
        weights_BKMS = reshape(weights.astype(v.dtype), logits.shape, "batch", kv_heads)
        out_BKMH = jnp.einsum("BKMS,BKSH->BKMH", weights_BKMS, v)
        outputs.append(reshape(out_BKMH, (B, K, G, -1, H), "batch", kv_heads))
    out_BKGTH = jnp.concatenate(outputs, axis=3)
    out_BTKGH = out_BKGTH.transpose(0, 3, 1, 2, 4)
    return reshape(out_BTKGH, (B, T, N, H), "batch", "seq", "heads", "head_dim")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """What generation keeps of the tokens that a model has read. L layers, S slots.

    A row is padded in front: the newest token of every row is in slot `length` - 1.
    """

    k: jax.Array  # [L, B, S, K, H], rotated, in config.dtype; sharded by `batch` and `kv_heads`
    v: jax.Array  # likewise
    first: jax.Array  # [B], int32: the slot of each row's first token
    length: jax.Array  # int32: slots that are filled

    def seen(self, window: int | None) -> jax.Array:
        """[B, S]: the slots that the next position of a row attends to, besides itself."""
        slots_S = jnp.arange(self.k.shape[2])
        least = 0 if window is None else self.length + 1 - window
        first_B1 = jnp.maximum(self.first, least)[:, None]
        return (slots_S[None] >= first_B1) & (slots_S[None] < self.length)


def recall(q_BTNH, k_BTKH, v_BTKH, past) -> jax.Array:
    """Attention of one new position, T = 1, to the cache and to itself. Returns [B, 1, N, H].

    `past` is one layer's cache, which is only read, and what the position sees of it:
    (k_BSKH, v_BSKH, seen_BS).
    """
    (B, T, N, H), K, (k_BSKH, v_BSKH, seen_BS) = q_BTNH.shape, k_BTKH.shape[2], past
    axes = ("batch", "seq", "kv_heads", "head_dim")  # where the cache is, though heads be elsewhere
    q_BTNH = constrain(q_BTNH, *axes)
    q_BKGH = reshape(q_BTNH, (B, K, N // K, H), "batch", "kv_heads", None, "head_dim")
    to = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    # The cache on the left: on the right, XLA's CPU backend would transpose it first.
    logits_BKGS = to("BSKH,BKGH->BKSG", k_BSKH, q_BKGH).swapaxes(2, 3)
    logits_BKGS = jnp.where(seen_BS[:, None, None], logits_BKGS, -jnp.inf)
    own_BKGT = to("BKGH,BTKH->BKGT", q_BKGH, k_BTKH)
    logits = jnp.concatenate([logits_BKGS, own_BKGT], axis=-1) / math.sqrt(H)
    weights_BKGS = jax.nn.softmax(logits, axis=-1).astype(v_BSKH.dtype)
    out_BKGH = jnp.einsum("BKGS,BSKH->BKGH", weights_BKGS[..., :-T], v_BSKH)
    out_BKGH += jnp.einsum("BKGT,BTKH->BKGH", weights_BKGS[..., -T:], v_BTKH)
    out_BTNH = reshape(out_BKGH, (B, T, N, H), *axes)
    return constrain(out_BTNH, "batch", "seq", "heads", "head_dim")


class Attention(nnx.Module):
    """Grouped-query attention. Megatron: heads are split, the output is one all-reduce."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        D, N, K, H = config.embed, config.num_heads, config.num_kv_heads, config.head_dim
        out_stddev = (N * H * 2 * config.num_layers) ** -0.5  # 2L sublayers add to one residual
        self.config = config
        self.q = param(rngs, (D, N, H), ("embed", "heads", "head_dim"), D**-0.5)
        self.k = param(rngs, (D, K, H), ("embed", "kv_heads", "head_dim"), D**-0.5)
        self.v = param(rngs, (D, K, H), ("embed", "kv_heads", "head_dim"), D**-0.5)
        self.o = param(rngs, (N, H, D), ("heads", "head_dim", "embed"), out_stddev)
        if config.qkv_bias:
            self.q_bias = param(rngs, (N, H), ("heads", "head_dim"), 0.0)
            self.k_bias = param(rngs, (K, H), ("kv_heads", "head_dim"), 0.0)
            self.v_bias = param(rngs, (K, H), ("kv_heads", "head_dim"), 0.0)
        if config.qk_norm:
            self.q_norm = RMSNorm(H, config.norm_eps, rngs=rngs)
            self.k_norm = RMSNorm(H, config.norm_eps, rngs=rngs)

    def __call__(self, x_BTD, segment_ids_BT, angles_BTH, past=None):
        """Returns what it adds to the residual, and the keys and values that a cache wants."""
        q, k, v = (multiply(x_BTD, weight) for weight in (self.q, self.k, self.v))
        if self.config.qkv_bias:
            q = q + self.q_bias[...].astype(q.dtype)[None, None]
            k = k + self.k_bias[...].astype(k.dtype)[None, None]
            v = v + self.v_bias[...].astype(v.dtype)[None, None]
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, angles_BTH), rotate(k, angles_BTH)
        if past is None:
            out_BTNH = attend(q, k, v, segment_ids_BT, self.config)
        else:
            out_BTNH = recall(q, k, v, past)
        return multiply(out_BTNH, self.o, contract=2), (k, v)


class Balance(nnx.Variable):
    """What an expert's score gains before the choice: a buffer, which has no gradient."""


class Experts(nnx.Module):
    """A mixture of SwiGLU experts: each position's output is the weighted sum of its experts'."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        D, E, F = config.embed, config.num_experts, config.mlp
        self.config = config
        self.router = param(rngs, (D, E), ("norm", "router"), D**-0.5)
        self.gate = param(rngs, (E, D, F), ("expert", "expert_embed", "mlp"), D**-0.5)
        self.up = param(rngs, (E, D, F), ("expert", "expert_embed", "mlp"), D**-0.5)
        down_stddev = (F * 2 * config.num_layers) ** -0.5
        self.down = param(rngs, (E, F, D), ("expert", "mlp", "expert_embed"), down_stddev)
        if config.balance_rate:
            self.bias = Balance(jnp.zeros(E), out_sharding=("router",), eager_sharding=False)

    def __call__(self, x_BTD, counted_BT, capacity: float | None):
        """Returns what it adds to the residual, and the figures of `route`.

        The experts are computed inside jax.shard_map: what each device sends is written down, and
        is the same on any mesh. Raises ValueError if the rules don't split the batch over all axes
        that split experts.
        """
        E, T = self.config.num_experts, x_BTD.shape[1]
        slots = T  # enough for any choice
        if capacity is not None:
            slots = min(T, math.ceil(capacity * T * self.config.experts_per_token / E))
        choice, figures = self.route(x_BTD, counted_BT, slots)
        split = {axis: mesh_axes(axis) for axis in ("expert", "mlp")}
        if alone := {*split["expert"]} - {*mesh_axes("batch")}:
            raise ValueError(
                f"the rules split experts over {', '.join(sorted(alone))}, and the batch not"
            )
        compute = functools.partial(dropless, split=split)
        if capacity is not None:
            compute = functools.partial(by_capacity, num_experts=E, slots=slots, split=split)
        rows, into = ("batch", None, None), ("expert", None, "mlp")  # D whole, whatever the rules
        axes = (rows, rows, rows, rows, into, into, ("expert", "mlp", None))
        weights = (w[...].astype(x_BTD.dtype) for w in (self.gate, self.up, self.down))
        out_BTD = locally(compute, (x_BTD, *choice, *weights), axes)
        return constrain(out_BTD, "batch", "seq", "act_embed"), figures

    def route(self, x_BTD, counted_BT, slots: int):
        """Chooses each position's experts, in float32.

        Args:
          counted_BT: bool, the positions that figures are of.
          slots: how many positions of a row an expert takes. They are given away in the row's order,
            so that a position's output depends on nothing after it.

        Returns: (expert_BTJ, best first; weight_BTJ; place_BTJ, how many positions before it in its
          row chose the same expert), and name → sum over the positions:
          balance: E · Σ over experts of (share of a row's choices) · (mean probability); 1 is even.
          router_z: the square of the log of the router's normalizer.
          dropped: the share of its experts that had no slot left.
          load [E]: whether it chose this expert, times E/J; 1 is an even share.
        """
        config, E, J = self.config, self.config.num_experts, self.config.experts_per_token
        with jax.default_matmul_precision("highest"):
            logits_BTE = multiply(x_BTD.astype(jnp.float32), self.router)
        logits_BTE = constrain(logits_BTE, "batch", None, "router")
        probs_BTE = jax.nn.softmax(logits_BTE, axis=-1)
        scores_BTE = jax.lax.stop_gradient(probs_BTE)
        if config.balance_rate:
            scores_BTE += self.bias[...][None, None]
        expert, weight, taken = [], [], []
        for _ in range(J):  # not by top_k, for which XLA may gather all devices' scores
            best_BT = jnp.argmax(scores_BTE, axis=-1).astype(jnp.int32)
            best_BTE = best_BT[..., None] == jnp.arange(E)[None, None]
            scores_BTE = jnp.where(best_BTE, -jnp.inf, scores_BTE)
            expert.append(best_BT)
            weight.append(jnp.where(best_BTE, probs_BTE, 0).sum(axis=-1))
            taken.append(best_BTE)
        taken_BTE = sum(best_BTE.astype(jnp.int32) for best_BTE in taken)
        before_BTE = jnp.cumsum(taken_BTE, axis=1) - taken_BTE
        place = [jnp.where(best_BTE, before_BTE, 0).sum(axis=-1) for best_BTE in taken]
        expert_BTJ, weight_BTJ, place_BTJ = (jnp.stack(x, -1) for x in (expert, weight, place))
        if config.normalize:
            weight_BTJ /= weight_BTJ.sum(axis=-1, keepdims=True)

        counted_BT1 = counted_BT.astype(jnp.float32)[..., None]
        taken_BE = (taken_BTE.astype(jnp.float32) * counted_BT1).sum(axis=1)
        probs_BE = (probs_BTE * counted_BT1).sum(axis=1)
        count_B1 = jnp.maximum(counted_BT1.sum(1), 1)
        normalizer_BT1 = jax.nn.logsumexp(logits_BTE, axis=-1, keepdims=True)
        figures = {
            "balance": (taken_BE * probs_BE / count_B1).sum() * E / J,
            "router_z": (jnp.square(normalizer_BT1) * counted_BT1).sum(),
            "dropped": jnp.where(place_BTJ < slots, 0, counted_BT1).sum() / J,
            "load": taken_BE.sum(0) * E / J,
        }
        return (expert_BTJ, weight_BTJ, place_BTJ), figures


def by_capacity(
    x_BTD, expert_BTJ, weight_BTJ, place_BTJ, gate, up, down, *, num_experts, slots, split
):
    """[B, T, D]: an expert takes the first `slots` positions of each row that chose it.

    What one device does: its own rows, sent to the devices of their experts and back, and what other
    devices send to its own experts.

    Args:
      split: the mesh axes that split `expert` and `mlp`.
    """
    (B, T, J), E, U = expert_BTJ.shape, num_experts, slots
    x_BTD, weight_BTJ = _partial(split["mlp"], x_BTD, weight_BTJ)
    slot_BTJ = jnp.where(place_BTJ < U, expert_BTJ * U + place_BTJ, -1)
    # The inverse: which of a row's T · J choices has a slot, -1 if none.
    choices_BM = expert_BTJ.reshape(B, T * J)
    order_BM = jnp.argsort(choices_BM, axis=1, stable=True)
    count_BE = (choices_BM[..., None] == jnp.arange(E)[None, None]).sum(axis=1)
    first_BE1 = (jnp.cumsum(count_BE, axis=1) - count_BE)[..., None]
    slots_11U = jnp.arange(U)[None, None]
    sorted_BM = jnp.minimum(first_BE1 + slots_11U, T * J - 1).reshape(B, E * U)
    used_BM = (slots_11U < count_BE[..., None]).reshape(B, E * U)
    choice_BM = jnp.where(used_BM, jnp.take_along_axis(order_BM, sorted_BM, axis=1), -1)
    token_BM = choice_BM // J

    def send(y_BMD):  # [B, E · U, D] → [E here, M, D], M being slots of all rows that are sent here
        y_EBUD = y_BMD.reshape(B, E, U, -1).swapaxes(0, 1)
        if split["expert"]:
            y_EBUD = jax.lax.all_to_all(y_EBUD, split["expert"], 0, 1, tiled=True)
        return checkpoint_name(y_EBUD.reshape(len(y_EBUD), -1, y_EBUD.shape[-1]), "dispatched")

    x_EMD = send(spread(x_BTD, token_BM, slot_BTJ))
    weight_BM1 = weight_BTJ.reshape(B, T * J, 1)
    # The weights travel too: their gradient then needs nothing that was sent back.
    weight_EM1 = send(spread(weight_BM1, choice_BM, slot_BTJ.reshape(B, T * J, 1)))
    hidden_EMF = jax.nn.silu(jnp.einsum("EMD,EDF->EMF", x_EMD, gate))
    hidden_EMF *= jnp.einsum("EMD,EDF->EMF", x_EMD, up)
    out_EMD = jnp.einsum("EMF,EFD->EMD", hidden_EMF, down) * weight_EM1.astype(down.dtype)
    out_EBUD = out_EMD.reshape(len(gate), -1, U, out_EMD.shape[-1])
    if split["expert"]:
        out_EBUD = jax.lax.all_to_all(out_EBUD, split["expert"], 1, 0, tiled=True)
    out_BMD = out_EBUD.swapaxes(0, 1).reshape(B, E * U, -1)
    out_BTD = unite(out_BMD, slot_BTJ, token_BM)
    # After the weighted sum: J times fewer bytes than before it.
    return jax.lax.psum(out_BTD, split["mlp"]) if split["mlp"] else out_BTD


def dropless(x_BTD, expert_BTJ, weight_BTJ, place_BTJ, gate, up, down, *, split):
    """[B, T, D]: experts take all that chose them, sorted by expert (Gale et al. 2022).

    What one device does: the rows of all devices that its experts' axes connect, by its own experts.
    """
    del place_BTJ  # nothing is dropped
    given = _partial(split["mlp"], x_BTD, weight_BTJ)
    if split["expert"]:
        given = [jax.lax.all_gather(x, split["expert"], tiled=True) for x in given]
        expert_BTJ = jax.lax.all_gather(expert_BTJ, split["expert"], tiled=True)
    x_BTD, weight_BTJ = (checkpoint_name(x, "dispatched") for x in given)
    (B, T, J), E = expert_BTJ.shape, len(gate)
    first = jax.lax.axis_index(split["expert"]) * E if split["expert"] else 0
    here_M = expert_BTJ.reshape(-1) - first
    here_M = jnp.where((here_M >= 0) & (here_M < E), here_M, E)  # those of others last
    order_M = jnp.argsort(here_M)
    slot_M = jnp.argsort(order_M)
    sizes_E = (here_M[:, None] == jnp.arange(E)[None]).sum(axis=0).astype(jnp.int32)
    # Those of others are no rows: what ragged_dot makes where no group is, no platform promises.
    slot_M = jnp.where(here_M < E, slot_M, -1)
    order_M = jnp.where(jnp.arange(len(order_M)) < sizes_E.sum(), order_M, -1)
    token_1M, slot_1NJ = order_M[None] // J, slot_M.reshape(1, B * T, J)
    x_MD = spread(x_BTD.reshape(1, B * T, -1), token_1M, slot_1NJ)[0]
    weight_M1 = spread(weight_BTJ.reshape(1, -1, 1), order_M[None], slot_M.reshape(1, -1, 1))[0]
    hidden_MF = jax.nn.silu(jax.lax.ragged_dot(x_MD, gate, sizes_E))
    hidden_MF *= jax.lax.ragged_dot(x_MD, up, sizes_E)
    out_MD = jax.lax.ragged_dot(hidden_MF, down, sizes_E) * weight_M1.astype(down.dtype)
    out_BTD = unite(out_MD[None], slot_1NJ, token_1M).reshape(B, T, -1)
    if split["mlp"]:
        out_BTD = jax.lax.psum(out_BTD, split["mlp"])
    if split["expert"]:
        out_BTD = jax.lax.psum_scatter(out_BTD, split["expert"], tiled=True)
    return out_BTD


def _partial(axes: tuple[str, ...], *arrays):
    """Marks arrays whose gradient each device along these axes has a part of; it is summed here."""
    return [jax.lax.pcast(x, axes, to="varying") if axes else x for x in arrays]


def _take(x_BND, index_BM):
    """[B, M, D]: of each x_ND the rows that index says; zeros where it is negative."""
    get = jax.vmap(lambda x_ND, index_M: x_ND.at[index_M].get(mode="promise_in_bounds"))
    return jnp.where(index_BM[..., None] < 0, 0, get(x_BND, jnp.maximum(index_BM, 0)))


@jax.custom_vjp
def spread(x_BND, source_BM, target_BNJ):
    """[B, M, D]: row m is row source[m] of x, or 0. `target` is where x's rows go, for the gradient.

    The transposes of `spread` and `unite` are each other: gathers, where XLA would write scatters,
    which took five times as long to compile for TPUs.
    """
    return _take(x_BND, source_BM)


@jax.custom_vjp
def unite(y_BMD, target_BNJ, source_BM):
    """[B, N, D]: row n is the sum of y's rows target[n, :], those that are not negative."""
    return sum(_take(y_BMD, target_BNJ[..., j]) for j in range(target_BNJ.shape[-1]))


spread.defvjp(
    lambda x, source, target: (spread(x, source, target), (source, target)),
    lambda saved, grad: (unite(grad, saved[1], saved[0]), None, None),
)
unite.defvjp(
    lambda y, target, source: (unite(y, target, source), (source, target)),
    lambda saved, grad: (spread(grad, *saved), None, None),
)


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + experts(norm(x))."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.embed, config.norm_eps, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.embed, config.norm_eps, rngs=rngs)
        self.experts = Experts(config, rngs=rngs)

    def __call__(self, x_BTD, segment_ids_BT, angles_BTH, counted_BT, capacity, past=None):
        normed_BTD = self.attention_norm(x_BTD)
        out_BTD, kv = self.attention(normed_BTD, segment_ids_BT, angles_BTH, past)
        x_BTD = x_BTD + checkpoint_name(out_BTD, "sublayer")
        out_BTD, figures = self.experts(self.mlp_norm(x_BTD), counted_BT, capacity)
        return x_BTD + checkpoint_name(out_BTD, "sublayer"), kv, figures


class MoE(nnx.Module):
    """Tokens in, next-token logits out. See the module's docstring."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        V, D = config.vocab_size, config.embed
        self.config = config
        self.embed = param(rngs, (V, D), ("vocab", "embed"), D**-0.5)

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stack(rngs):
            return Layer(config, rngs=rngs)

        self.layers = stack(rngs)  # every parameter has L, axis `layers`, in front
        self.final_norm = RMSNorm(D, config.norm_eps, rngs=rngs)
        if not config.tie_embeddings:
            self.unembed = param(rngs, (V, D), ("vocab", "embed"), D**-0.5)

    def __call__(self, tokens_BT, segment_ids_BT=None) -> jax.Array:
        """Logits [B, T, V] in float32, with which position t predicts token t + 1.

        Args:
          tokens_BT: int, below vocab_size. On a mesh, B must be divisible by the axes of `batch`.
          segment_ids_BT: int; positions attend only within their own segment. None: all are one.
        """
        x_BTD, unembed_RVD, _, _ = self._trunk(tokens_BT, segment_ids_BT)
        return self._unembed(x_BTD, unembed_RVD)

    def loss(self, tokens, targets, segment_ids=None):
        """(sum of the objective, number of targets, further figures) of a batch.

        The objective is the cross entropy in nats, plus balance_weight · balance, plus
        router_z_weight · router_z. The logits of only some positions of each sequence exist at one
        time: positions_at_once. With balance_rate, this moves the biases.

        Args:
          tokens: [B, T], int; segment_ids: [B, T] or None, as `__call__` takes them.
          targets: [B, T], int; targets below 0 are padding and don't count.

        Returns: (objective sum, count, aux), float32 scalars; aux maps a name to (sum, count):
          loss: the cross entropy alone.
          balance, router_z, dropped, load_0 to load_{E-1}: see `Experts.route`; means over layers.
        """
        targets = constrain(targets, "batch", "seq")
        counted_BT = targets >= 0
        x_BTD, unembed_RVD, _, layers = self._trunk(tokens, segment_ids, counted_BT)
        (B, T), R = tokens.shape, unembed_RVD.shape[0]
        C = positions_at_once(self.config, B // R, T)

        def chunks(x, *axes):  # [B, T, ...] → [T/C, R, B/R·C, ...]
            x = reshape(x, (R, B // R, T // C, C, *x.shape[2:]), "batch", None, None, None, *axes)
            x = jnp.moveaxis(x, 2, 0)
            return reshape(x, (T // C, R, -1, *x.shape[4:]), None, "batch", None, *axes)

        @jax.checkpoint  # the backward pass computes a chunk's logits again
        def chunk(total_R, x_and_targets):
            x_RMD, targets_RM = x_and_targets
            logits_RMV = self._logits(x_RMD, unembed_RVD)
            picked_RMV = jnp.arange(logits_RMV.shape[-1])[None, None] == targets_RM[..., None]
            picked_RM = jnp.where(picked_RMV, logits_RMV, 0).sum(axis=-1)
            nats_RM = jax.nn.logsumexp(logits_RMV, axis=-1) - picked_RM
            return total_R + jnp.where(targets_RM < 0, 0, nats_RM).sum(axis=1), None

        zeros_R = constrain(jnp.zeros(R), "batch")
        total_R, _ = jax.lax.scan(chunk, zeros_R, (chunks(x_BTD, "act_embed"), chunks(targets)))
        total, count = _now(total_R.sum()), counted_BT.sum().astype(jnp.float32)
        if rate := self.config.balance_rate:
            self.layers.experts.bias[...] += rate * jnp.sign(count - layers["load"])
        means = {name: figure.mean(axis=0) for name, figure in layers.items()}
        loads = {f"load_{e}": means["load"][e] for e in range(self.config.num_experts)}
        figures = {"loss": total} | {k: v for k, v in means.items() if k != "load"} | loads
        objective = total + self.config.balance_weight * means["balance"]
        objective += self.config.router_z_weight * means["router_z"]
        return objective, count, {name: (figure, count) for name, figure in figures.items()}

    def prefill(self, tokens_BT, lengths_B, slots: int) -> tuple[jax.Array, Cache]:
        """Reads prompts: the logits [B, V] of what follows each, and a cache for more tokens.

        Args:
          tokens_BT: int; padded in front: row b's prompt is its last lengths_B[b] ≥ 1 tokens.
          slots: S ≥ T, tokens that the cache has room for, those of the prompt and its padding too.
        """
        T = tokens_BT.shape[1]
        first_B = constrain(T - lengths_B, "batch")
        positions_BT = jnp.arange(T)[None] - first_B[:, None]
        prompt_BT = (positions_BT >= 0).astype(jnp.int32)  # a segment, and its padding another
        x_BTD, unembed_RVD, kv, _ = self._trunk(tokens_BT, prompt_BT, None, positions_BT)
        k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, slots - T), (0, 0), (0, 0))) for x in kv)
        logits_BV = self._unembed(x_BTD[:, -1:], unembed_RVD)[:, 0]
        return logits_BV, Cache(k, v, first_B, jnp.int32(T))

    def decode(self, tokens_B, cache: Cache) -> tuple[jax.Array, Cache]:
        """Reads one more token a row: the logits [B, V] of what follows it, and the cache with it.

        A jitted caller donates the cache: one slot of it is then written in place. It must not be
        full: length < S.
        """
        positions_B1 = (cache.length - cache.first)[:, None]
        x_B1D, unembed_RVD, kv, _ = self._trunk(tokens_B[:, None], None, None, positions_B1, cache)
        k, v = (
            jax.lax.dynamic_update_slice_in_dim(old, new, cache.length, axis=2)
            for old, new in zip((cache.k, cache.v), kv, strict=True)
        )
        logits_BV = self._unembed(x_B1D, unembed_RVD)[:, 0]
        return logits_BV, Cache(k, v, cache.first, cache.length + 1)

    def _trunk(self, tokens_BT, segment_ids_BT, counted_BT=None, positions_BT=None, cache=None):
        """The last layer's output, normed, [B, T, D]; the table that unembeds it, [R, V, D].

        Given positions, as generation gives them, also each layer's keys and values, [L, B, T, K, H];
        nothing is dropped then, as what a prompt is padded with must take no slots. Last, each
        layer's figures of the positions that count, all if counted_BT is None.
        """
        config, (B, T) = self.config, tokens_BT.shape
        tokens_BT = constrain(tokens_BT, "batch", "seq")
        embed_RVD = _per_shard(self.embed, config.dtype)
        tokens_RM = reshape(tokens_BT, (embed_RVD.shape[0], -1), "batch", None)
        x_BTD = reshape(_rows(embed_RVD, tokens_RM), (B, T, -1), "batch", "seq", "act_embed")
        keep = positions_BT is not None
        angles_BTH = rope_angles(config, positions_BT if keep else jnp.arange(T)[None])
        past = None if cache is None else (cache.k, cache.v)
        seen_BS = None if cache is None else cache.seen(config.sliding_window)
        capacity = None if keep else config.capacity
        counted_BT = jnp.ones_like(tokens_BT) if counted_BT is None else counted_BT

        @functools.partial(jax.checkpoint, policy=REMAT[config.remat], prevent_cse=False)
        def layer(x_BTD, weights_and_kv):
            weights, kv = weights_and_kv
            weights = in_use(weights, config.dtype)  # the gather stands inside: remat gathers again
            x_BTD, kv, figures = weights(
                x_BTD, segment_ids_BT, angles_BTH, counted_BT, capacity, kv and (*kv, seen_BS)
            )
            return x_BTD, (kv if keep else None, figures)

        stack = (self.layers, past)
        x_BTD, (kv, figures) = jax.lax.scan(layer, x_BTD, stack, unroll=config.unroll)
        if not config.tie_embeddings:
            embed_RVD = _per_shard(self.unembed, config.dtype)
        return self.final_norm(x_BTD), embed_RVD, kv, figures

    def _unembed(self, x_BTD, unembed_RVD):
        """[B, T, V] in float32."""
        (B, T, D), R = x_BTD.shape, unembed_RVD.shape[0]
        x_RMD = reshape(x_BTD, (R, -1, D), "batch", None, "act_embed")
        logits_BTV = reshape(self._logits(x_RMD, unembed_RVD), (B, T, -1), "batch", "seq", "vocab")
        if logits_BTV.shape[-1] == self.config.vocab_size:
            return logits_BTV
        return constrain(logits_BTV, "batch", "seq", None)[..., : self.config.vocab_size]

    def _logits(self, x_RMD, unembed_RVD):
        """[R, M, V] in float32, M being the positions of one shard of the batch."""
        axes, V = ("batch", "seq", "vocab"), self.config.vocab_size
        logits_RMV = jnp.einsum(
            "RMD,RVD->RMV", x_RMD, unembed_RVD, preferred_element_type=jnp.float32,
            out_sharding=explicit(*axes),
        )  # fmt: skip
        if logits_RMV.shape[-1] > V:
            padding = jnp.arange(logits_RMV.shape[-1])[None, None] >= V
            logits_RMV = jnp.where(padding, -jnp.inf, logits_RMV)
        return constrain(logits_RMV, *axes)


def positions_at_once(config: Config, rows: int, seq_len: int) -> int:
    """C: positions of each sequence whose logits exist at one time. It divides T.

    At most config.loss_chunk; on accelerators so many that each has 1,024, as fewer leave its matrix
    units waiting for the table: by the TPU compiler's estimate a row of 32,768 spends 1.8 times as
    long on the loss with 256.

    Args:
      rows: sequences on a device.
    """
    most = config.loss_chunk
    if _device().platform != "cpu":
        most = max(most, 1_024 // rows)
    return next(c for c in range(min(seq_len, most), 0, -1) if seq_len % c == 0)


@jax.custom_vjp
def _now(total):
    """The loss's value, taken before its gradient, which does not need it.

    XLA may else take it after the backward pass, and keep the gathered table for it all the while:
    1 GB of each chip for 8b.
    """
    return total


_now.defvjp(
    lambda total: (total, total),
    lambda total, grad: (jax.lax.optimization_barrier((grad, total))[0],),
)


def shards(axis: str) -> int:
    """How many parts the rules and mesh in force cut a logical axis into."""
    return math.prod(jax.sharding.get_abstract_mesh().shape[name] for name in mesh_axes(axis))


def mesh_axes(axis: str) -> tuple[str, ...]:
    """The mesh axes that the rules in force split a logical axis over."""
    where = spec((axis,)) or (None,)
    return () if where[0] is None else (where[0],) if isinstance(where[0], str) else where[0]


def _device():
    """The kind of device that the mesh in force is of, else the default one."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def _block(seq_len: int) -> int:
    """Positions in a block of the TPU's kernel; 0 if it can't have this many in a row."""
    return next((block for block in (512, 384, 256, 128) if seq_len % block == 0), 0)


def _capability(kind: str) -> float:
    """CUDA's compute capability of a kind of GPU; 0.0 of AMD's."""
    for device in jax.devices():
        text = str(getattr(device, "compute_capability", ""))
        if device.device_kind == kind and text.replace(".", "").isdigit():
            return float(text)
    return 9.0 if "NVIDIA" in kind else 0.0  # compiled for a machine that is elsewhere


def _per_shard(table: nnx.Param, dtype: str) -> jax.Array:
    """A copy of the table for each shard of the batch, [R, V, D]: what each device holds anyway.

    Lookups and chunks of the loss then add to their own copy's gradient, and the copies' gradients
    meet once, where this broadcast is transposed. Without it they meet at every chunk. V is padded
    with zeros to a multiple of its own shards.
    """
    if padding := -table.shape[0] % shards("vocab"):
        padded_VD = jnp.pad(table[...].astype(dtype), ((0, padding), (0, 0)))
        # Gathered before it is split.
        table = table.replace(constrain(padded_VD, None, "act_embed"))
    table_VD, axes = in_use(table, dtype)[...], ("batch", "vocab", "act_embed")
    copies = (shards("batch"), *table_VD.shape)
    return constrain(jnp.broadcast_to(table_VD, copies, out_sharding=explicit(*axes)), *axes)


def _rows(table_RVD, tokens_RM):
    """[R, M, D]: each shard of the batch looks its tokens up in its own copy of the table."""
    lookup = jax.vmap(lambda table_VD, tokens_M: table_VD[tokens_M])
    where = explicit("batch", None, "act_embed")
    if where is not None:  # Explicit axes have no rule for lookups
        lookup = jax.sharding.auto_axes(lookup, out_sharding=where)
    return lookup(table_RVD, tokens_RM)


# Strategy → logical axis → mesh axis. What a table leaves out is replicated.
#
# A weight [D, F] rests as (embed, mlp) says, and is multiplied as (act_embed, mlp) says. Where the
# two differ, `in_use` gathers it just before its matmul and scatters its gradient just after. So it
# is with the experts' [E, D, F], whose D has a name of its own: what splits E can't split D as well.
# Notation: In[B_X, D] is a tensor whose dim B is split over mesh axis X.
RULES: dict[str, dict[str, str | tuple[str, ...] | None]] = complete(
    {
        # Data parallel: every device has every expert; one all-reduce of all gradients a step.
        "dp": {
            "batch": "data",
        },
        # ZeRO-3: all experts are gathered for every layer, also those that a device has little use
        # for. Two all-gathers of the weights and one reduce-scatter of gradients a step.
        "fsdp": {
            "batch": "data",
            "embed": "data",
            "expert_embed": "data",
        },
        # Megatron: each expert's hidden dim is split. Two all-reduces of activations a layer forward
        # and two backward, whatever the number of experts a position goes through.
        "tp": {
            "batch": "data",
            "heads": "model",
            "kv_heads": "model",
            "mlp": "model",
            "vocab": "model",
        },
        # Both: weights are split over the whole mesh, and gathered over `data` only.
        "fsdp_tp": {
            "batch": "data",
            "embed": "data",
            "expert_embed": "data",
            "heads": "model",
            "kv_heads": "model",
            "mlp": "model",
            "vocab": "model",
        },
        # Hybrid: `data` replica groups, each of fsdp × model devices that share one copy. Gathers
        # stay inside a group (fast links); only gradients cross groups, by an all-reduce.
        "hsdp_tp": {
            "batch": ("data", "fsdp"),
            "embed": "fsdp",
            "expert_embed": "fsdp",
            "heads": "model",
            "kv_heads": "model",
            "mlp": "model",
            "vocab": "model",
        },
        # Expert parallel: each device along `expert` has E / expert of the experts, and positions
        # travel to them and back. Four all-to-alls a layer and step, of capacity · J · D a position.
        # Everything else is data parallel.
        "ep": {
            "batch": ("data", "expert"),
            "expert": "expert",  # Slots[E, B_data_expert, D] → Slots[E_expert, B_data, D]
        },
        # With ZeRO-3: the other weights rest on all devices, the experts on `data` besides `expert`,
        # and only a device's own experts are gathered.
        "fsdp_ep": {
            "batch": ("data", "expert"),
            "embed": ("data", "expert"),
            "expert": "expert",
            "expert_embed": "data",
        },
        # And each expert's hidden dim is split over `model`.
        "fsdp_ep_tp": {
            "batch": ("data", "expert"),
            "embed": ("data", "expert"),
            "expert": "expert",
            "expert_embed": "data",
            "heads": "model",
            "kv_heads": "model",
            "mlp": "model",
            "vocab": "model",
        },
    }
)
