"""Embeddings of tokens that each layer has for itself (Gemma 4 E2B and E4B).

One table has the embeddings of all layers, so a token is looked up once. Each is combined with a
projection of the token's first embedding, and gated by the layer that it is for. A model takes
`make_tables` and `begin` as methods.

Shapes: B batch, T positions, D embed, P layer embed, V vocab, L layers, C columns of the table (L · P),
M positions of several devices.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.decoder import Decoder
from ..core.layers import RMSNorm, gather_positions, multiply, sublayer_input
from ..core.sharding import (
    AxisNames, cast, constrain, mesh_axes, param, per_device, reshape, shards,
)  # fmt: skip


COLUMNS = "layer_columns"  # the logical axis of C


# ---- methods of a model --------------------------------------------------------------------------


def make_tables(self, config, rngs: nnx.Rngs) -> None:
    """`Decoder.make_tables`; layers embed tokens where config.layer_embed says so."""
    Decoder.make_tables(self, config, rngs)
    self.layer_embeddings = LayerEmbeddings(config, rngs=rngs) if config.layer_embed else None


def begin(self, tables, tokens_BT, inputs, words_BT=None, **more) -> tuple[Any, Any]:
    """`Decoder.begin`; with embeddings of the layers, a pair of x_BTD and these, [L, B, T, P].

    Args:
      words_BT: the tokens that the layers embed; None: tokens_BT.
    """
    x_BTD = self.embed_tokens(tables, tokens_BT, inputs, **more)
    if self.layer_embeddings is None:
        return x_BTD, None
    words_BT = tokens_BT if words_BT is None else words_BT
    embedded_LBTP = self.layer_embeddings(x_BTD, words_BT, self.config, self.axes)
    return (x_BTD, embedded_LBTP), None


# ---- the embeddings ------------------------------------------------------------------------------


class LayerEmbeddings(nnx.Module):
    """What the layers read besides the residual stream."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        D, P, L = config.embed, config.layer_embed, config.num_layers
        self.table = param(rngs, (config.vocab_size, L * P), ("vocab", COLUMNS), P**-0.5)
        self.projection = param(rngs, (D, L * P), ("embed", "layer_embed"), D**-0.5)
        self.norm = RMSNorm(P, config.norm_eps)

    def __call__(self, x_BTD, tokens_BT, config, axes: AxisNames) -> jax.Array:
        """(norm(projection of x) + embedding) / √2 for each layer: [L, B, T, P].

        Args:
          x_BTD: the embeddings of the tokens, times √D.
          axes: the model's.
        """
        B, T = tokens_BT.shape
        P, L = config.layer_embed, config.num_layers
        by_layer = (B, T, L, P)
        names = ("batch", "seq", None, "layer_embed")
        own_BTC = look_up_in_place(self.table, tokens_BT, config.dtype) * math.sqrt(P)
        own_BTLP = reshape(own_BTC, by_layer, *names)
        projection = config.use_weights(self.projection, axes)
        x_BTD = gather_positions(x_BTD) * config.embed**-0.5
        projected_BTLP = self.norm(reshape(multiply(x_BTD, projection), by_layer, *names))
        return jnp.moveaxis((projected_BTLP + own_BTLP) * 2**-0.5, 2, 0)


def look_up_in_place(table: nnx.Param, tokens_BT: jax.Array, dtype: str) -> jax.Array:
    """Embeddings of tokens, [B, T, C] in `dtype`, by a table [V, C] whose parts stay where they are.

    Devices that share out the columns look each other's tokens up in their own and send what they
    read. Under `fsdp`, one with 8,192 tokens receives 176 MB of E4B's table so in bfloat16, and would
    gather 5.6 GB. A gradient is added up where its part of the table is, in the table's dtype.
    """
    columns, words = mesh_axes(COLUMNS), mesh_axes("vocab")
    table_VC = cast(table.get_value())
    if padding := -len(table_VC) % shards("vocab"):  # then the table at rest has all words
        table_VC = constrain(jnp.pad(table_VC, ((0, padding), (0, 0))), None, COLUMNS)

    def on_device(table_VC, tokens_BT):
        tokens_M = tokens_BT.reshape(-1)
        if columns:
            tokens_M = jax.lax.all_gather(tokens_M, columns, tiled=True)
        if words:
            row_M = tokens_M - jax.lax.axis_index(words) * len(table_VC)
            is_here_M = (row_M >= 0) & (row_M < len(table_VC))
            x_MC = jnp.where(is_here_M[:, None], table_VC[row_M], 0).astype(dtype)
            x_MC = jax.lax.psum(x_MC, words)
        else:
            x_MC = table_VC[tokens_M].astype(dtype)
        if columns:
            x_MC = jax.lax.all_to_all(x_MC, columns, split_axis=0, concat_axis=1, tiled=True)
        return x_MC.reshape(*tokens_BT.shape, -1)

    axes = (("vocab", COLUMNS), ("batch", "seq"))
    operands = (table_VC, tokens_BT)
    # check_vma can't see that devices along an axis that splits columns alone end with equal rows.
    return per_device(on_device, operands, axes, ("batch", "seq", None), check_vma=False)


class LayerEmbedding(nnx.Module):
    """What one layer adds to the residual stream: (gelu(x · gate) * embedding) · out."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        D, P = config.embed, config.layer_embed
        self.gate = param(rngs, (D, P), ("embed", "layer_embed"), D**-0.5)
        self.out = param(
            rngs, (P, D), ("layer_embed", "embed"), (P * 2 * config.num_layers) ** -0.5
        )

    def __call__(self, x_BTD, embedding_BTP) -> jax.Array:
        x_BTD = sublayer_input(x_BTD, self.gate)
        gate_BTP = jax.nn.gelu(multiply(x_BTD, self.gate))  # by tanh
        return multiply(gate_BTP * embedding_BTP, self.out, seq="residual_seq")
