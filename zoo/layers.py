"""Parts of a decoder: matmuls, LoRA, RMSNorm, SwiGLU, rotary and token embeddings, the loss.

Shapes: B batch, T positions, D embed, F mlp, N heads, H head dim, V vocab, R batch shards, M
positions of one shard, C positions in one chunk of the loss.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from .sharding import constrain, device, explicit, param, reshape, shards


def multiply(x: jax.Array, weight: nnx.Param, contract: int = 1) -> jax.Array:
    """Multiplies x[B, T, ...] by a weight in use: x's last `contract` dims with the weight's first.

    The result's other dims have the weight's logical axes; this fixes the layout of every
    activation in a layer. B and T are merged into one dim: where a gradient contracts two dims at
    once, XLA's CPU backend transposes its operands first, which made the whole training step 1.6
    times slower.
    """
    w, (B, T, *inner) = weight[...].astype(x.dtype), x.shape
    axes = weight.out_sharding[-w.ndim :]
    x = reshape(x, (B * T, *inner), "batch", *axes[:contract])
    y = jnp.tensordot(x, w, contract, out_sharding=explicit("batch", *axes[contract:]))
    return reshape(y, (B, T, *y.shape[1:]), "batch", "seq", *axes[contract:])


def project(module, name: str, x: jax.Array, contract: int = 1) -> jax.Array:
    """`multiply` by the module's weight of this name, plus its adapter's output if it has one."""
    y = multiply(x, getattr(module, name), contract)
    if name in module.lora:
        adapter = module.lora[name]
        y += multiply(multiply(x, adapter.a, contract), adapter.b) * adapter.scale
    return y


class Adapter(nnx.Module):
    """LoRA (Hu et al. 2021): a low-rank A · B · scale to add to a weight; B starts at zero."""

    def __init__(self, weight, contract: int, rank: int, scale: float, *, rngs: nnx.Rngs):
        shape, axes = weight.shape, weight.out_sharding
        inner, outer = (slice(contract), slice(contract, None))
        stddev = math.prod(shape[inner]) ** -0.5
        self.a = param(rngs, (*shape[inner], rank), (*axes[inner], "lora"), stddev, nnx.LoRAParam)
        self.b = param(rngs, (rank, *shape[outer]), ("lora", *axes[outer]), 0.0, nnx.LoRAParam)
        self.scale = scale


def adapters(module: nnx.Module, config, rngs: nnx.Rngs, **contract: int) -> nnx.Dict:
    """Builds an Adapter for each weight of a module that config.lora_targets lists, by name.

    Args:
      config: has lora_rank (0: no adapters), lora_alpha and lora_targets.
      contract: for each weight that can have an adapter, how many dims of its input are contracted.
    """
    rank, scale = config.lora_rank, config.lora_alpha / max(config.lora_rank, 1)
    names = [name for name in contract if rank and name in config.lora_targets]
    return nnx.Dict(
        {n: Adapter(getattr(module, n), contract[n], rank, scale, rngs=rngs) for n in names}
    )


class RMSNorm(nnx.Module):
    """x / rms(x) · scale, in float32 (Zhang & Sennrich 2019)."""

    def __init__(self, dim: int, eps: float):
        self.scale = nnx.Param(jnp.ones(dim), out_sharding=("norm",), eager_sharding=False)
        self.eps = eps

    def __call__(self, x):
        x32 = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        scale = jnp.expand_dims(self.scale[...], tuple(range(x.ndim - 1)))
        return (x32 * jax.lax.rsqrt(variance + self.eps) * scale).astype(x.dtype)


class SwiGLU(nnx.Module):
    """(silu(x · gate) * (x · up)) · down (Shazeer 2020). Tensor parallelism splits F, and then the
    output costs one all-reduce.
    """

    def __init__(self, config, *, rngs: nnx.Rngs):
        D, F = config.embed, config.mlp
        self.gate = param(rngs, (D, F), ("embed", "mlp"), D**-0.5)
        self.up = param(rngs, (D, F), ("embed", "mlp"), D**-0.5)
        self.down = param(rngs, (F, D), ("mlp", "embed"), (F * 2 * config.num_layers) ** -0.5)
        self.lora = adapters(self, config, rngs, gate=1, up=1, down=1)

    def __call__(self, x_BTD):
        hidden_BTF = jax.nn.silu(project(self, "gate", x_BTD)) * project(self, "up", x_BTD)
        return project(self, "down", hidden_BTF)


def rotate(x_BTNH: jax.Array, angles_BTH: jax.Array, magnitude: float = 1.0) -> jax.Array:
    """Rotary position embedding (Su et al. 2021); dims i and i + H/2 rotate as a pair, as in
    Hugging Face's models.
    """
    cos, sin = (f(angles_BTH)[:, :, None, :] for f in (jnp.cos, jnp.sin))
    if magnitude != 1:
        cos, sin = cos * magnitude, sin * magnitude
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


def rope_angles(kind, head_dim: int, positions_BT: jax.Array) -> jax.Array:
    """Rotation angles of each pair of dims at these positions: [B, T, H/2], float32 radians.

    Args:
      kind: an attention.Kind.
    """
    scaling, theta = kind.rope_scaling, kind.rope_theta
    frequency = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        keep, factor = 1, 1
    elif scaling[0] == "linear":
        keep, factor = 0, scaling[1]
    elif scaling[0] == "yarn":
        _, factor, fast, slow, original, truncate, _ = scaling
        # Index of the pair of dims that makes n turns within the original length.
        first, last = (
            math.log(original / (n * 2 * math.pi), theta) * head_dim / 2 for n in (fast, slow)
        )
        if truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        pair = jnp.arange(head_dim // 2, dtype=jnp.float32)
        keep = 1 - jnp.clip((pair - first) / (last - first or 0.001), 0, 1)
    else:
        factor, low, high, original = scaling
        turns = original * frequency / (2 * math.pi)  # within the original length
        keep = jnp.clip((turns - low) / (high - low), 0, 1)
    if scaling is not None:
        frequency = frequency * (keep + (1 - keep) / factor)
    return positions_BT.astype(jnp.float32)[:, :, None] * frequency[None, None]


# ---- token embeddings and the loss ---------------------------------------------------------------


def vocabulary(config, *, rngs: nnx.Rngs) -> nnx.Param:
    """An embedding table [V, D], for lookup or for unembedding."""
    V, D = config.vocab_size, config.embed
    return param(rngs, (V, D), ("vocab", "embed"), D**-0.5)


def table_copies(table: nnx.Param, dtype: str) -> jax.Array:
    """Gives each batch shard its own copy of the table: [R, V, D]. Each device holds one anyway.

    Lookups and chunks of the loss then add to their own copy's gradient, and the copies' gradients
    are summed once, in the transpose of this broadcast; otherwise they would be summed in every
    chunk. V is padded with zeros to a multiple of its own shards.
    """
    table_VD = table[...].astype(dtype)
    if padding := -len(table_VD) % shards("vocab"):
        padded_VD = jnp.pad(table_VD, ((0, padding), (0, 0)))
        table_VD = constrain(padded_VD, None, "act_embed")  # gather before splitting
    table_VD, axes = constrain(table_VD, "vocab", "act_embed"), ("batch", "vocab", "act_embed")
    copies = (shards("batch"), *table_VD.shape)
    return constrain(jnp.broadcast_to(table_VD, copies, out_sharding=explicit(*axes)), *axes)


def look_up(table_RVD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Embeddings of tokens, [B, T, D]; each batch shard reads its own copy of the table."""
    lookup, (B, T) = jax.vmap(lambda table_VD, tokens_M: table_VD[tokens_M]), tokens_BT.shape
    where = explicit("batch", None, "act_embed")
    if where is not None:  # JAX can't infer a lookup's sharding
        lookup = jax.sharding.auto_axes(lookup, out_sharding=where)
    tokens_BT = constrain(tokens_BT, "batch", "seq")
    tokens_RM = reshape(tokens_BT, (len(table_RVD), -1), "batch", None)
    x_RMD = lookup(table_RVD, tokens_RM)  # pyright: ignore[reportCallIssue]: auto_axes' overloads
    return reshape(x_RMD, (B, T, -1), "batch", "seq", "act_embed")


def unembed(x_BTD: jax.Array, table_RVD: jax.Array, vocab_size: int) -> jax.Array:
    """Logits [B, T, V] in float32."""
    (B, T, D), R = x_BTD.shape, len(table_RVD)
    x_RMD = reshape(x_BTD, (R, -1, D), "batch", None, "act_embed")
    logits_RMV = _logits(x_RMD, table_RVD, vocab_size)
    logits_BTV = reshape(logits_RMV, (B, T, -1), "batch", "seq", "vocab")
    if logits_BTV.shape[-1] == vocab_size:
        return logits_BTV
    return constrain(logits_BTV, "batch", "seq", None)[..., :vocab_size]


def cross_entropy(x_BTD, table_RVD, targets_BT, vocab_size: int, loss_chunk: int):
    """Returns (sum of cross entropies in nats, number of targets), float32 scalars.

    Only `positions_at_once` positions of each sequence have logits at the same time.

    Args:
      targets_BT: int; targets below 0 are padding and don't count.
    """
    targets_BT = constrain(targets_BT, "batch", "seq")
    (B, T), R = targets_BT.shape, len(table_RVD)
    C = positions_at_once(loss_chunk, B // R, T)

    def chunks(x, *axes):  # [B, T, ...] → [T/C, R, B/R·C, ...]
        x = reshape(x, (R, B // R, T // C, C, *x.shape[2:]), "batch", None, None, None, *axes)
        x = jnp.moveaxis(x, 2, 0)
        return reshape(x, (T // C, R, -1, *x.shape[4:]), None, "batch", None, *axes)

    @jax.checkpoint  # the backward pass recomputes a chunk's logits
    def chunk(total_R, x_and_targets):
        x_RMD, targets_RM = x_and_targets
        logits_RMV = _logits(x_RMD, table_RVD, vocab_size)
        picked_RMV = jnp.arange(logits_RMV.shape[-1])[None, None] == targets_RM[..., None]
        picked_RM = jnp.where(picked_RMV, logits_RMV, 0).sum(axis=-1)
        nats_RM = jax.nn.logsumexp(logits_RMV, axis=-1) - picked_RM
        return total_R + jnp.where(targets_RM < 0, 0, nats_RM).sum(axis=1), None

    zeros_R = constrain(jnp.zeros(R), "batch")
    total_R, _ = jax.lax.scan(chunk, zeros_R, (chunks(x_BTD, "act_embed"), chunks(targets_BT)))
    return _before_backward(total_R.sum()), (targets_BT >= 0).sum().astype(jnp.float32)


def positions_at_once(loss_chunk: int, rows: int, seq_len: int) -> int:
    """C: how many positions of each sequence have logits at the same time. It divides T.

    At most loss_chunk, but on accelerators up to 1,024 per device: with fewer, the matrix units
    wait for the table. By the TPU compiler's estimate, the loss of a row of 32,768 takes 1.8 times
    as long with 256.

    Args:
      rows: sequences on a device.
    """
    most = loss_chunk
    if device().platform != "cpu":
        most = max(most, 1_024 // rows)
    return next(c for c in range(min(seq_len, most), 0, -1) if seq_len % c == 0)


def _logits(x_RMD, table_RVD, vocab_size: int):
    """Logits [R, M, V] in float32; padded tokens get -inf."""
    axes = ("batch", "seq", "vocab")
    logits_RMV = jnp.einsum(
        "RMD,RVD->RMV", x_RMD, table_RVD, preferred_element_type=jnp.float32,
        out_sharding=explicit(*axes),
    )  # fmt: skip
    if logits_RMV.shape[-1] > vocab_size:
        padding = jnp.arange(logits_RMV.shape[-1])[None, None] >= vocab_size
        logits_RMV = jnp.where(padding, -jnp.inf, logits_RMV)
    return constrain(logits_RMV, *axes)


@jax.custom_vjp
def _before_backward(total):
    """Makes XLA compute the loss before the backward pass, which doesn't need its value.

    Otherwise XLA may compute it later and keep the gathered table until then: 1 GB per chip for 8b.
    """
    return total


_before_backward.defvjp(
    lambda total: (total, total),
    lambda total, grad: (jax.lax.optimization_barrier((grad, total))[0],),
)
