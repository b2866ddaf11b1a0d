"""The vocabulary at both ends of a decoder: token embeddings, logits, the loss.

Shapes: B batch, T positions, D embed, V vocab, R shards of B and T, M positions of one shard, C
chunks of the loss.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ..kernels import choice
from .layers import dot, gather_positions
from .sharding import auto, cast, constrain, device, explicit, param, reshape, shards


class Batch(NamedTuple):
    """Arrays [B, T] of a training batch; see decoder.Decoder.loss."""

    tokens: jax.Array
    targets: jax.Array | None  # None for logits
    segment_ids: jax.Array | None


class Objective(NamedTuple):
    """The training objective of a batch, float32."""

    total: jax.Array  # sum over targets of the cross entropy, plus costs
    count: jax.Array  # number of targets
    aux: dict  # name → (sum, count)
    metrics: dict  # of the layers: name → [L, ...], sums over positions


SHARDS = ("batch", "seq")  # the logical axes of R


def by_shard(x_BT: jax.Array, *axes: str | None) -> jax.Array:
    """[B, T, ...] → [R, M, ...], without communication. `axes`: of the dims after T."""
    B, T, *rest = x_BT.shape
    batch = shards("batch")
    seq = shards("seq")
    if seq > 1:
        parts = (batch, B // batch, seq, T // seq, *rest)
        x_BT = reshape(x_BT, parts, "batch", None, "seq", None, *axes).swapaxes(1, 2)
    return reshape(x_BT, (batch * seq, B * T // (batch * seq), *rest), SHARDS, None, *axes)


def from_shards(x_RM: jax.Array, shape: tuple[int, ...], *axes: str | None) -> jax.Array:
    """The inverse of `by_shard`; shape: (B, T)."""
    B, T = shape
    rest = x_RM.shape[2:]
    batch = shards("batch")
    seq = shards("seq")
    if seq > 1:
        parts = (batch, seq, B // batch, T // seq, *rest)
        x_RM = reshape(x_RM, parts, "batch", "seq", None, None, *axes).swapaxes(1, 2)
    return reshape(x_RM, (B, T, *rest), "batch", "seq", *axes)


def vocabulary(config, *, rngs: nnx.Rngs) -> nnx.Param:
    """An embedding table [V, D], for lookup or for unembedding."""
    shape = (config.vocab_size, config.embed)
    return param(rngs, shape, ("vocab", "embed"), config.embed**-0.5)


def table_copies(table: nnx.Param, dtype: str) -> jax.Array:
    """Gives each shard of B and T its own copy of a table, [R, V, D], or of a bias, [R, V]; every
    device holds one anyway.

    Lookups and chunks of the loss then add to their own copy's gradient, and the copies' gradients
    are summed once, in the transpose of this broadcast; otherwise they would be summed in every
    chunk. V is padded with zeros to a multiple of its own shards.
    """
    table_VD = cast(table.get_value(), dtype)
    vocab, *rest = table.out_sharding
    rest = ["act_embed"] * len(rest)
    if padding := -len(table_VD) % shards(vocab):
        padded_VD = jnp.pad(table_VD, ((0, padding), *[(0, 0)] * len(rest)))
        table_VD = constrain(padded_VD, None, *rest)  # gather before splitting
    table_VD = constrain(table_VD, vocab, *rest)
    axes = (SHARDS, vocab, *rest)
    shape = (shards(SHARDS), *table_VD.shape)
    return constrain(jnp.broadcast_to(table_VD, shape, out_sharding=explicit(*axes)), *axes)


def look_up(table_RVD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Embeddings of tokens, [B, T, D]; each shard of B and T reads its own copy of the table."""
    lookup = auto(jax.vmap(_rows), SHARDS, None, "act_embed")
    # jnp.asarray, because JAX's custom_vjp takes no NumPy constants.
    tokens_RM = by_shard(constrain(jnp.asarray(tokens_BT), "batch", "seq"))
    x_BTD = from_shards(lookup(table_RVD, tokens_RM), tokens_BT.shape, "act_embed")
    return constrain(x_BTD, "batch", "residual_seq", "act_embed")


@jax.custom_vjp
def _rows(table_VD, tokens_M):
    """Rows of a table, [M, D]. Adds up the table's gradient in float32, whatever its dtype.

    A frequent token occurs thousands of times. A sum in bfloat16 soon no longer changes: at 256 times
    the next term, it rounds back to what it was.
    """
    return table_VD[tokens_M]


def _add_rows(saved, grad_MD):
    table_VD, tokens_M = saved
    V, M = len(table_VD), len(tokens_M)
    grad_MD = grad_MD.astype(jnp.float32)
    if table_VD.dtype == jnp.float32 or V // shards("vocab") <= M:
        sums_VD = jnp.zeros(table_VD.shape, jnp.float32).at[tokens_M].add(grad_MD)
        return sums_VD.astype(table_VD.dtype), None
    # Sums in float32 of the tokens that occur, where they occur first, need less memory than a table.
    number_M = jnp.arange(M)
    first_V = jnp.full(V, M).at[tokens_M].min(number_M)
    first_M = first_V[tokens_M]
    sums_MD = jnp.zeros(grad_MD.shape, jnp.float32).at[first_M].add(grad_MD)
    row_M = jnp.where(first_M == number_M, tokens_M, V + number_M)  # beyond the table: dropped
    rows_MD = sums_MD.astype(table_VD.dtype)
    sums_VD = jnp.zeros_like(table_VD).at[row_M].add(rows_MD, mode="drop", unique_indices=True)
    return sums_VD, None


_rows.defvjp(lambda *saved: (_rows(*saved), saved), _add_rows)


def unembed(x_BTD: jax.Array, table_RVD: jax.Array, config, bias_RV=None) -> jax.Array:
    """Logits [B, T, V] in float32."""
    product_RMV = table_product(by_shard(gather_positions(x_BTD), "act_embed"), table_RVD, bias_RV)
    logits_RMV = logits_of(product_RMV, config)
    logits_BTV = from_shards(logits_RMV, x_BTD.shape[:2], "vocab")
    if logits_BTV.shape[-1] == config.vocab_size:
        return logits_BTV
    return constrain(logits_BTV, "batch", "seq", None)[..., : config.vocab_size]


def cross_entropy(x_BTD, table_RVD, targets_BT, config, bias_RV=None):
    """Returns (sum of cross entropies in nats, number of targets), float32 scalars.

    Targets below 0 are padding and don't count. Only `positions_at_once` positions of each sequence
    have logits at the same time.
    """
    targets_BT = constrain(targets_BT, "batch", "seq")
    x_CRMD = in_chunks(gather_positions(x_BTD), config, "act_embed")
    sums_R: Any = _sums(config, x_CRMD, table_RVD, bias_RV, in_chunks(targets_BT, config))
    return sums_R.sum(), (targets_BT >= 0).sum().astype(jnp.float32)


def in_chunks(x_BT, config, *axes: str | None):
    """[B, T, ...] → [C, R, M, ...], M: positions of a shard in a chunk. axes: of the dims after T."""
    B, T = x_BT.shape[:2]
    R = shards(SHARDS)
    rows = B // shards("batch")  # of a shard
    length = T // shards("seq")
    size = positions_at_once(config.loss_chunk, rows, length)
    C = length // size
    x = by_shard(x_BT, *axes)
    x = reshape(x, (R, rows, C, size, *x.shape[2:]), SHARDS, None, None, None, *axes)
    x = jnp.moveaxis(x, 2, 0)
    return reshape(x, (C, R, -1, *x.shape[4:]), None, SHARDS, None, *axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(config, x_CRMD, table_RVD, bias_RV, targets_CRM):
    """The sum of each shard's cross entropies, float32 [R].

    When differentiated, the forward pass computes each chunk's gradients from its logits, and the
    backward pass only scales them: logits are neither kept nor computed twice.
    """

    def chunk(sums_R, x_and_targets):
        x_RMD, targets_RM = x_and_targets
        product_RMV = table_product(x_RMD, table_RVD, bias_RV)
        return sums_R + cross_entropies(config, product_RMV, targets_RM).sum(axis=1), None

    return jax.lax.scan(chunk, _zeros(table_RVD), (x_CRMD, targets_CRM))[0]


def _sums_and_gradients(config, x_CRMD, table_RVD, bias_RV, targets_CRM):
    """`_sums`, and the gradients of x, the table and the bias for a cotangent of 1."""

    def chunk(carry, x_and_targets):
        sums_R, table_grad_RVD, bias_grad_RV = carry
        x_RMD, targets_RM = x_and_targets
        nats = lambda product_RMV: cross_entropies(config, product_RMV, targets_RM).sum(axis=1)  # noqa: E731
        nats_R, pull = jax.vjp(nats, table_product(x_RMD, table_RVD, bias_RV))
        (grad_RMV,) = pull(jnp.ones_like(nats_R))
        if bias_RV is not None:
            bias_grad_RV = bias_grad_RV + grad_RMV.sum(axis=1)
        x_grad_RMD, grad_RVD = product_gradients(grad_RMV, x_RMD, table_RVD)
        return (sums_R + nats_R, table_grad_RVD + grad_RVD, bias_grad_RV), x_grad_RMD

    # In float32: there may be hundreds of chunks, and a sum in bfloat16 soon no longer changes.
    bias_grad_RV = None if bias_RV is None else jnp.zeros_like(bias_RV)
    carry = _zeros(table_RVD), jnp.zeros_like(table_RVD, dtype=jnp.float32), bias_grad_RV
    sums, x_grad_CRMD = jax.lax.scan(chunk, carry, (x_CRMD, targets_CRM))
    sums_R, table_grad_RVD, bias_grad_RV = sums
    return sums_R, (x_grad_CRMD, table_grad_RVD.astype(table_RVD.dtype), bias_grad_RV)


def _scaled_gradients(config, gradients, grad_R):
    """The backward pass of `_sums`: scales the gradients by the cotangent grad_R."""

    def scaled(x, factor):  # in float32: a rounded factor would change all gradients alike
        return (factor * x.astype(jnp.float32)).astype(x.dtype)

    x_grad_CRMD, table_grad_RVD, bias_grad_RV = gradients
    x_grad_CRMD = scaled(x_grad_CRMD, grad_R[None, :, None, None])
    if bias_grad_RV is not None:
        bias_grad_RV = scaled(bias_grad_RV, grad_R[:, None])
    return x_grad_CRMD, scaled(table_grad_RVD, grad_R[:, None, None]), bias_grad_RV, None


_sums.defvjp(_sums_and_gradients, _scaled_gradients)


def product_gradients(grad_RMV, x_RMD, table_RVD):
    """The gradients of x, in its dtype, and of the table, from that of their product."""
    grad_RMV = grad_RMV.astype(x_RMD.dtype)  # GPUs multiply float32 at half the speed
    x_axes = explicit(SHARDS, None, "act_embed")
    x_grad_RMD = dot("RMV,RVD->RMD", grad_RMV, table_RVD, out_sharding=x_axes)
    table_axes = explicit(SHARDS, "vocab", "act_embed")
    grad_RVD = dot("RMV,RMD->RVD", grad_RMV, x_RMD, out_sharding=table_axes)
    return x_grad_RMD.astype(x_RMD.dtype), grad_RVD


def _zeros(table_RVD):
    """Zeros for the sum of each shard, [R]."""
    return constrain(jnp.zeros(len(table_RVD)), SHARDS)


def cross_entropies(config, product_RMV, targets_RM):
    """Cross entropies of one chunk, [R, M], from the product of x and the table; 0 for padding."""
    logits_RMV = logits_of(product_RMV, config)
    nats_RM = choice.cross_entropies(logits_RMV, targets_RM)
    return jnp.where(targets_RM < 0, 0, nats_RM)


def positions_at_once(loss_chunk: int, rows: int, seq_len: int) -> int:
    """How many positions of each of a device's `rows` have logits at once; divides seq_len.

    At most loss_chunk, but on accelerators up to 1,024 per device: with fewer, the matrix units
    wait for the table. By the TPU compiler's estimate, the loss of a row of 32,768 takes 1.8 times
    as long with 256.
    """
    most = loss_chunk if device().platform == "cpu" else max(loss_chunk, 1_024 // rows)
    return next(n for n in range(min(seq_len, most), 0, -1) if seq_len % n == 0)


def table_product(x_RMD, table_RVD, bias_RV=None):
    """Products of x and the rows of a table, plus a bias: [R, M, V] in float32."""
    axes = (SHARDS, None, "vocab")
    product_RMV = dot("RMD,RVD->RMV", x_RMD, table_RVD, out_sharding=explicit(*axes))
    product_RMV = constrain(product_RMV, *axes)
    return product_RMV if bias_RV is None else product_RMV + bias_RV[:, None]


def logits_of(product_RMV, config):
    """Logits [R, M, V] in float32; padded tokens get -inf."""
    logits_RMV = config.finish_logits(product_RMV)
    if logits_RMV.shape[-1] > config.vocab_size:
        padding = jnp.arange(logits_RMV.shape[-1])[None, None] >= config.vocab_size
        logits_RMV = jnp.where(padding, -jnp.inf, logits_RMV)
    return constrain(logits_RMV, SHARDS, None, "vocab")
