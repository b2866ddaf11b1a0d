"""The parts of a decoder besides attention: matmuls and their adapters, norm, SwiGLU, stacked layers,
and the vocabulary's table with the loss.

Shapes: B batch, T positions, D embed, F mlp, V vocab, L layers, R shards of the batch, M positions of
one shard, C positions in one chunk of the loss.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from .sharding import constrain, device, explicit, param, reshape, shards


def multiply(x: jax.Array, weight: nnx.Param, contract: int = 1) -> jax.Array:
    """x[B, T, ...] · weight, over the last `contract` dims of x and the first of the weight, in use.

    The result's other axes are the weight's; this fixes the layout of every activation in a layer.
    B and T enter as one dim: where a gradient contracts two dims at once, XLA's CPU backend
    transposes its operands first, which made the whole training step 1.6 times slower.
    """
    w, (B, T, *inner) = weight[...].astype(x.dtype), x.shape
    axes = weight.out_sharding[-w.ndim :]
    x = reshape(x, (B * T, *inner), "batch", *axes[:contract])
    y = jnp.tensordot(x, w, contract, out_sharding=explicit("batch", *axes[contract:]))
    return reshape(y, (B, T, *y.shape[1:]), "batch", "seq", *axes[contract:])


def project(module: nnx.Module, name: str, x: jax.Array, contract: int = 1) -> jax.Array:
    """`multiply` by the module's weight of this name, plus the output of its adapter if it has one."""
    y = multiply(x, getattr(module, name), contract)
    if name in module.lora:
        adapter = module.lora[name]
        y += multiply(multiply(x, adapter.a, contract), adapter.b) * adapter.scale
    return y


class Adapter(nnx.Module):
    """LoRA (Hu et al. 2021): adds A · B · scale of a low rank to a weight, initially zero."""

    def __init__(self, weight, contract: int, rank: int, scale: float, *, rngs: nnx.Rngs):
        shape, axes = weight.shape, weight.out_sharding
        inner, outer = (slice(contract), slice(contract, None))
        stddev = math.prod(shape[inner]) ** -0.5
        self.a = param(rngs, (*shape[inner], rank), (*axes[inner], "lora"), stddev, nnx.LoRAParam)
        self.b = param(rngs, (rank, *shape[outer]), ("lora", *axes[outer]), 0.0, nnx.LoRAParam)
        self.scale = scale


def adapters(module: nnx.Module, config, rngs: nnx.Rngs, **contract: int) -> nnx.Dict:
    """Name → Adapter for those weights of a module that config.lora_targets lists.

    Args:
      config: has lora_rank (0: no adapters), lora_alpha and lora_targets.
      contract: for each weight that can have one, how many dims its input is contracted over.
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
    """(silu(x · gate) * (x · up)) · down (Shazeer 2020). Under tensor parallelism F is split, and the
    output is one all-reduce.
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


# ---- stacked layers ------------------------------------------------------------------------------

# What a layer's forward pass keeps for its backward pass; the rest is computed again.
REMAT = {
    "none": jax.checkpoint_policies.everything_saveable,  # under FSDP, gathered weights too
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # products with a weight
    # The two sublayers' outputs: no all-reduce of tensor parallelism runs a second time.
    "sublayers": jax.checkpoint_policies.save_only_these_names("sublayer"),
    "full": jax.checkpoint_policies.nothing_saveable,  # only the layer's input
}


def stack(make_layer, num_layers: int, rngs: nnx.Rngs):
    """`num_layers` layers as one module, whose variables have L, logical axis `layers`, in front.

    Args:
      make_layer: function of `rngs` → a layer.
    """
    split = nnx.split_rngs(splits=num_layers)
    names = {nnx.PARTITION_NAME: "layers"}
    build = nnx.vmap(
        lambda rngs: make_layer(rngs=rngs), in_axes=0, out_axes=0, transform_metadata=names
    )
    return split(build)(rngs)


def scan_layers(function, x: jax.Array, layers, kinds: tuple, remat, unroll: int = 1):
    """Runs x through stacked layers, so that compile time doesn't grow with their number.

    A trip of the scan runs one *period* of layers: as many as there are kinds, each compiled for its
    own kind. Layers that are left over at the end follow the scan.

    Args:
      function: (x, one layer of `layers`, its kind) → (x, outputs).
      layers: tree of arrays with L in front.
      kinds: what sets layers of equal shapes apart; layer l has kind l mod len(kinds). Static.
      remat: a policy of REMAT.
      unroll: trips of the scan in one trip of the loop, where layers are all alike.

    Returns: (x, outputs of all layers with L in front).
    """
    if len(kinds) == 1:
        layer = functools.partial(function, kind=kinds[0])
        layer = jax.checkpoint(layer, policy=remat, prevent_cse=False)
        return jax.lax.scan(layer, x, layers, unroll=unroll)
    L, P = jax.tree.leaves(layers)[0].shape[0], len(kinds)
    whole = L - L % P if L >= 2 * P else 0  # XLA would unroll a loop of one trip
    outputs = []

    def run(x, first, count, prevent_cse):
        """Layers `first` to `first` + count - 1."""
        found = []
        for i in range(count):
            # Each layer is read from the whole stack: slices by kind would copy all parameters,
            # their gradients and the cache.
            def layer(x, layers, l=first + i, kind=kinds[i % P]):
                at = functools.partial(jax.lax.dynamic_index_in_dim, index=l, keepdims=False)
                return function(x, jax.tree.map(at, layers), kind=kind)

            layer = jax.checkpoint(layer, policy=remat, prevent_cse=prevent_cse)
            x, output = layer(x, layers)
            found.append(output)
        return x, jax.tree.map(lambda *o: jnp.stack(o), *found)

    if whole:
        trip = functools.partial(run, count=P, prevent_cse=False)
        x, found = jax.lax.scan(trip, x, jnp.arange(0, whole, P))
        outputs.append(jax.tree.map(lambda o: o.reshape(whole, *o.shape[2:]), found))
    if whole < L:  # outside of a loop, XLA may merge forward and recomputed operations
        x, found = run(x, whole, L - whole, prevent_cse=True)
        outputs.append(found)
    return x, jax.tree.map(lambda *o: jnp.concatenate(o), *outputs)


# ---- the vocabulary ------------------------------------------------------------------------------


def vocabulary(config, *, rngs: nnx.Rngs) -> nnx.Param:
    """A row [D] for each of V tokens, to look tokens up and to unembed."""
    V, D = config.vocab_size, config.embed
    return param(rngs, (V, D), ("vocab", "embed"), D**-0.5)


def table_copies(table: nnx.Param, dtype: str) -> jax.Array:
    """A copy of the table for each shard of the batch, [R, V, D]: each device holds one anyway.

    Lookups and chunks of the loss then add to their own copy's gradient, and the copies' gradients
    meet once, where this broadcast is transposed. Without it they meet at every chunk. V is padded
    with zeros to a multiple of its own shards.
    """
    table_VD = table[...].astype(dtype)
    if padding := -len(table_VD) % shards("vocab"):
        padded_VD = jnp.pad(table_VD, ((0, padding), (0, 0)))
        table_VD = constrain(padded_VD, None, "act_embed")  # gathered before it is split
    table_VD, axes = constrain(table_VD, "vocab", "act_embed"), ("batch", "vocab", "act_embed")
    copies = (shards("batch"), *table_VD.shape)
    return constrain(jnp.broadcast_to(table_VD, copies, out_sharding=explicit(*axes)), *axes)


def look_up(table_RVD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """The tokens' rows, [B, T, D]: each shard of the batch looks its tokens up in its own copy."""
    lookup, (B, T) = jax.vmap(lambda table_VD, tokens_M: table_VD[tokens_M]), tokens_BT.shape
    where = explicit("batch", None, "act_embed")
    if where is not None:  # Explicit axes have no rule for lookups
        lookup = jax.sharding.auto_axes(lookup, out_sharding=where)
    tokens_BT = constrain(tokens_BT, "batch", "seq")
    tokens_RM = reshape(tokens_BT, (len(table_RVD), -1), "batch", None)
    return reshape(lookup(table_RVD, tokens_RM), (B, T, -1), "batch", "seq", "act_embed")


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
    """(sum of cross entropies in nats, number of targets), float32 scalars.

    Only some positions of each sequence have logits at one time: positions_at_once.

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

    @jax.checkpoint  # the backward pass computes a chunk's logits again
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
    """C: positions of each sequence whose logits exist at one time. It divides T.

    At most loss_chunk; on accelerators enough for 1,024 a device, because fewer leave its matrix units
    waiting for the table: by the TPU compiler's estimate a row of 32,768 spends 1.8 times as long on
    the loss with 256.

    Args:
      rows: sequences on a device.
    """
    most = loss_chunk
    if device().platform != "cpu":
        most = max(most, 1_024 // rows)
    return next(c for c in range(min(seq_len, most), 0, -1) if seq_len % c == 0)


def _logits(x_RMD, table_RVD, vocab_size: int):
    """[R, M, V] in float32."""
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
    """The loss, computed before its backward pass, which doesn't need its value.

    Otherwise XLA may compute it afterwards, and keep the gathered table until then: 1 GB of each chip
    for 8b.
    """
    return total


_before_backward.defvjp(
    lambda total: (total, total),
    lambda total, grad: (jax.lax.optimization_barrier((grad, total))[0],),
)
