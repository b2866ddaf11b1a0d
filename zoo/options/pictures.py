"""Rows of tokens with pictures: a tower that runs on all devices, and the way of its tokens to their rows.

A batch has slots for M pictures a row. Each run of K placeholders in a row stands for its next picture.
Pictures whose sizes differ have grids, and fewer tokens than K: as many as rows times columns.
The tower runs data-parallel over *all* devices of the mesh, whatever the decoder's rules are:

    images [B_data, M, W, W, C]      devices that share rows hold these rows' pixels anyway
    → [P_(data, others), W, W, C]    so each takes its part of them, and sends nothing
    → tower: weights gathered, as under FSDP → tokens [P_(data, others), K, E]
    → [P_data, K, E]                 the one exchange: an all-gather among devices that share rows
    → [B_data, T, E]                 each position takes its token from its rows' pictures

Of the last step nothing is sent either, also if `seq` splits T. Backward, the all-gather becomes a
reduce-scatter of the tokens' gradients. Textbook: with N devices in `others` and b bytes a number, each
device receives (N - 1) / N · B / data · M · K · E · b bytes, and sends as many backward; none under FSDP
alone, where each device has rows of its own. Where no row of a batch has a picture, the tower is skipped.

The functions are methods of a Decoder with a field `vision`, of parts/picture_tokens.py or square_tokens.py,
whose Config has `image_token`, `picture_tokens`, `freeze_tower` and `span_kinds`, the kinds of layers in which
positions of a picture see each other (None: all). Gradients, generation and pipelines then see a view of the
model: the pictures' tokens, as a table, in place of the tower.

Shapes: B batch, T positions, M slots of a row, W height and width of a picture, C channels, G shards of B,
S slots of a shard, P pictures, K tokens of a picture, E embed, R shards of B and T.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.decoder import Decoder
from ..core.sharding import (
    AxisNames, active_rules, cast, check_rules, constrain, explicit, has_slot, mesh_axes, reshape,
    shards,
)  # fmt: skip
from ..core.vocabulary import SHARDS, Batch, look_up
from .spans import with_spans

# Logical axes that only the tower has: its rules split pictures over all devices.
ROWS = "picture_rows"  # the devices that have rows of their own
OTHERS = "picture_others"  # those that share rows


# ---- methods of a model --------------------------------------------------------------------------


def call(self, tokens_BT, segment_ids_BT=None, images=None, grids=None) -> jax.Array:
    """`Decoder.__call__`; images, grids: as in `loss`."""
    check_rules(self.axes.logical_axes)
    model, tokens_BT = with_pictures(self, tokens_BT, images, grids)
    return Decoder.__call__(model, tokens_BT, segment_ids_BT)


def loss(self, tokens, targets, segment_ids=None, images=None, grids=None):
    """`Decoder.loss` of rows with pictures. Placeholders are no targets.

    Args:
      images: [B, M, ...], uint8; a row's pictures in the order of its placeholders, then empty
        slots. None: a batch of texts, whose program has no tower.
      grids: [B, M, 2], int32, of pictures whose sizes differ: the rows and columns of their tokens;
        (0, 0): an empty slot.
    """
    check_rules(self.axes.logical_axes)
    targets = jnp.where(targets == self.config.image_token, -1, targets)
    model, tokens = with_pictures(self, tokens, images, grids)
    return Decoder.loss(model, tokens, targets, segment_ids)


def tables(self) -> list[jax.Array]:
    """`Decoder.tables`, and between them the tokens of the batch's pictures, [R, S · K, E]."""
    first, *rest = Decoder.tables(self)
    if self.picture_table is None:
        return [first, *rest]
    pictures_GSE = self.picture_table[...]
    G, S, E = pictures_GSE.shape
    shape = (G, shards("seq"), S, E)
    copies = jnp.broadcast_to(
        pictures_GSE[:, None], shape, out_sharding=explicit("batch", "seq", None, "act_embed")
    )
    copies = constrain(copies, "batch", "seq", None, "act_embed")
    copies_RSE = reshape(copies, (G * shape[1], S, E), SHARDS, None, "act_embed")
    return [first, copies_RSE, *(rest or [first])]


def inputs_of(self, batch: Batch, **more) -> Any:
    """`Decoder.inputs_of`; the positions of a picture see each other."""
    inputs = Decoder.inputs_of(self, batch, **more)
    if self.picture_table is None:
        return inputs
    config = self.config
    place_BT = batch.tokens - config.vocab_size
    K = config.picture_tokens
    return with_spans(inputs, place_BT // K, K, config.span_kinds)


def embed_tokens(self, tables, tokens_BT, inputs, scale: float = 1.0) -> jax.Array:
    """The embeddings of tokens, times `scale`; those of places in pictures are the pictures' tokens."""
    if self.picture_table is None:
        return look_up(tables[0], tokens_BT) * scale
    vocab_size = self.config.vocab_size
    x_BTE = look_up(tables[0], jnp.minimum(tokens_BT, vocab_size - 1)) * scale
    picture_BTE = look_up(tables[1], jnp.maximum(tokens_BT - vocab_size, 0))
    is_text_BT = constrain(tokens_BT < vocab_size, "batch", "residual_seq")
    return jnp.where(is_text_BT[..., None], x_BTE, picture_BTE)


def frozen(self) -> tuple[str, ...]:
    """How paths of parameters begin that are not trained."""
    return ("vision/",) if self.config.freeze_tower else ()


# ---- the tower on all devices --------------------------------------------------------------------


def with_pictures(
    model: Any, tokens_BT: jax.Array, images: jax.Array | None, grids: jax.Array | None = None
) -> tuple[Any, Any]:
    """A view of a model that has the tokens of these pictures, and the tokens of the rows.

    A placeholder becomes vocab_size + its place among the tokens of its shard's pictures.

    Args:
      images, grids: as in `loss`. None: returns the arguments.
    """
    if images is None:
        return model, tokens_BT
    config = model.config
    K = config.picture_tokens
    B, M = images.shape[:2]
    tokens_BT = constrain(jnp.asarray(tokens_BT), "batch", None)  # whole rows, of numbers alone
    is_picture_BT = tokens_BT == config.image_token
    number_BT = jnp.minimum(jnp.cumsum(is_picture_BT, axis=1), M * K) - 1
    if grids is not None:
        number_BT = jnp.minimum(after_filled_slots(number_BT, grids, K), M * K - 1)
    row_B1 = (jnp.arange(B) % (B // shards("batch")))[:, None]  # of the shard
    place_BT = config.vocab_size + row_B1 * M * K + number_BT
    tokens_BT = jnp.where(is_picture_BT, place_BT, tokens_BT).astype(jnp.int32)
    pictures = images if grids is None else (images, grids)
    table_GSE = run_tower(model, pictures, is_picture_BT.any())
    view = jax.tree.map(lambda x: x, model)
    view.vision = None
    view.picture_table = nnx.data(
        nnx.Param(table_GSE, out_sharding=("batch", None, "act_embed"), eager_sharding=False)
    )
    return view, tokens_BT


def after_filled_slots(number_BT: jax.Array, grids_BM2: jax.Array, tokens: int) -> jax.Array:
    """The places of a row's placeholders where each picture has `tokens` places, used or not.

    Args:
      number_BT: the numbers of placeholders in their row.
    """
    counts_BM = constrain(jnp.asarray(grids_BM2), "batch", None, None).prod(axis=-1)
    ends_BM = jnp.cumsum(counts_BM, axis=1)
    is_later_BTM = number_BT[:, :, None] >= ends_BM[:, None]
    return number_BT + jnp.where(is_later_BTM, (tokens - counts_BM)[:, None], 0).sum(axis=-1)


def run_tower(model: Any, pictures: Any, has_any: jax.Array) -> jax.Array:
    """The tokens of all slots, [G, S · K, E]: each shard of B has those of its rows.

    Args:
      pictures: what model.vision reads: an array [B, M, ...], or several.
    """
    B, M = jax.tree.leaves(pictures)[0].shape[:2]
    G = shards("batch")
    S = B // G * M
    rows = mesh_axes("batch", manual=True)
    others = tuple(axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis not in rows)
    rules = active_rules()
    spread = dict.fromkeys(rules) | {"batch": (*rows, *others), ROWS: rows, OTHERS: others}
    with nnx.logical_axis_rules(tuple((spread if rules else {}).items())):
        N = shards(OTHERS)
        padded = S + -S % N

        def spread_out(x):
            """[B, M, ...] → [P, ...]."""
            size = x.shape[2:]
            empty = [None] * len(size)
            x = constrain(jnp.asarray(x), ROWS, None, *empty)
            x = reshape(x, (G, S, *size), ROWS, None, *empty)
            x = jnp.pad(x, ((0, 0), (0, padded - S), *[(0, 0)] * len(size)))
            x = constrain(x, ROWS, OTHERS, *empty)
            return reshape(x, (G * padded, *size), "batch", *empty)

        vision = with_whole_vectors(model.vision, model.axes)
        tokens_PKE = jax.lax.cond(
            has_any,
            lambda pictures: vision(pictures, model.axes),
            empty_like(model),
            jax.tree.map(spread_out, pictures),
        )
        if model.config.freeze_tower:  # its backward pass is left out
            tokens_PKE = jax.lax.stop_gradient(tokens_PKE)
        _, K, E = tokens_PKE.shape
        tokens = reshape(tokens_PKE, (G, padded, K, E), ROWS, OTHERS, None, None)
        tokens = constrain(tokens, ROWS, None, None, None)[:, :S]
        return reshape(tokens, (G, S * K, E), ROWS, None, None)


def with_whole_vectors(vision: Any, axes: AxisNames):
    """A tower with biases as the active rules split them; `Config.use_layer` gathers matrices alone.

    Weights outside of the layers that have slots for their gradients get plain arrays in their place.
    """

    def gather(weight: nnx.Variable) -> nnx.Variable:
        if has_slot(weight.get_value()) and not axes.stacks & {*weight.out_sharding}:
            weight = weight.replace(cast(weight.get_value()))
        if axes.in_use.keys() & {*weight.out_sharding}:
            return weight
        return weight.replace(constrain(weight[...], *weight.out_sharding))

    return jax.tree.map(gather, vision, is_leaf=lambda x: isinstance(x, nnx.Variable))


def empty_like(model: Any):
    """A function of pictures that returns zeros as their tokens."""
    config = model.config

    def zeros(pictures):
        shape = (len(jax.tree.leaves(pictures)[0]), config.picture_tokens, config.embed)
        return constrain(jnp.zeros(shape, config.dtype), "batch", None, None)

    return zeros
