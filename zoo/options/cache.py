"""Generation with a cache of the keys and values of tokens that a model has read.

    logits_BV, cache = prefill(model, tokens_BT, lengths_B, slots=256)
    logits_BV, cache = decode(model, tokens_B, cache)

Shapes: B batch, T positions, S slots of the cache, D embed, N heads, K kv heads, G = N/K, H head dim,
V vocab or head dim of values, C latent, P rotary dim, L layers, R shards of B and T.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..kernels.shared import NOT_SEEN, soft_cap
from ..core.attention import AttentionInputs
from ..core.layers import AttentionType, WeightInUse, dot, gather_positions
from ..core.sharding import auto, constrain, device, explicit, mesh_axes, reshape, shards
from ..core.stack import fit_rules, layer_indices
from ..core.vocabulary import Batch, unembed


# Stacks of layers with keys and values, where layers are of unlike_layers' stacks; others keep a state.
ATTENTION = "attention"
SLIDING = "sliding"  # with a window, where heads differ from those of ATTENTION
SIDE_BY_SIDE = "side_by_side"  # attention beside a recurrence: keys and values, and a state
WITH_KEYS = (SLIDING, ATTENTION, SIDE_BY_SIDE)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["number", "state"], meta_fields=["stack"]
)
@dataclasses.dataclass(frozen=True)
class Place:
    """Where a cache has a layer's keys and values: the layer's number in one of WITH_KEYS."""

    number: jax.Array
    stack: str
    state: Any = None  # of a layer of SIDE_BY_SIDE


class Cache(NamedTuple):
    """Keys and values of the tokens that a model has read so far. L layers, S slots.

    If only some layers have keys and values, L counts these; `states` has what the others keep.

    Rows are left-padded: the newest token of every row is in slot `length` - 1. Rows that begin at
    different times each have a length of their own.
    """

    k: Any  # [L, B, S, K, H], rotated, in config.dtype, S having the logical axis `slots`; or a dict
    v: Any  # of such arrays by stack, of unlike_layers' stacks; likewise
    first: jax.Array  # [B], int32: the slot of each row's first token
    length: jax.Array  # int32: the number of filled slots, or that of each row, [B]
    states: Any = None  # stack of other layers → their states, each [L, B, ...]

    def seen(self, window: int | None) -> jax.Array:
        """[B, S], bool: the slots that each row's next position attends to, besides itself."""
        slots_S = jnp.arange(self.slots)
        least = 0 if window is None else self.length + 1 - window
        first_B1 = jnp.maximum(self.first, least)[:, None]
        length = self.length[:, None] if self.length.ndim else self.length
        return (slots_S[None] >= first_B1) & (slots_S[None] < length)

    def of_layer(self, index: Any) -> tuple[jax.Array, jax.Array]:
        """A layer's keys and values, each [B, S, K, H]; index: its number, or its Place.

        Layers index the full stack: slicing it for a scan of some layers would copy it.
        """
        k, v, number = self.k, self.v, index
        if isinstance(index, Place):
            k, v, number = k[index.stack], v[index.stack], index.number
        take = functools.partial(jax.lax.dynamic_index_in_dim, index=number, keepdims=False)
        return take(k), take(v)

    @property
    def slots(self) -> int:
        """S."""
        return jax.tree.leaves(self.k)[0].shape[2]

    @property
    def next_B1(self) -> jax.Array:
        """The position of each row's next token in its sequence."""
        return (self.length - self.first)[:, None]

    def append(self, kv, states) -> "Cache":
        """Returns the cache with one more token per row; a donated cache is updated in place."""
        if self.length.ndim:
            k, v = jax.tree.map(self._put_in_rows, (self.k, self.v), kv)
            return Cache(k, v, self.first, self.length + 1, states)
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=2)
        k, v = jax.tree.map(
            lambda x, new: in_slots(put, x)(x, new, self.length), (self.k, self.v), kv
        )
        return Cache(k, v, self.first, self.length + 1, states)

    def _put_in_rows(self, x, new) -> jax.Array:
        """Puts [L, B, 1, …] into [L, B, S, …], each row's into its next slot."""
        if shards("slots") > 1:
            is_next_BS = jnp.arange(self.slots)[None] == self.length[:, None]
            is_next_BS = constrain(is_next_BS, "batch", "slots")
            return jnp.where(is_next_BS[None, :, :, None, None], new.astype(x.dtype), x)

        def put(x, new, length_B):
            return x.at[:, jnp.arange(x.shape[1]), length_B].set(new[:, :, 0])

        return on_shards(put, x, new, self.length)

    def with_rows(self, is_new_B, other: "Cache", rows_B) -> "Cache":
        """Returns the cache with rows of another one, whose rows have one length, where is_new_B.

        Args:
          other: slots beyond its own keep what they have.
          rows_B: int, of `other`; counted on each device's own rows, if the rules split them.
        """
        is_new_B, rows_B = (constrain(x, "batch") for x in (is_new_B, rows_B))

        def picked(x, new, is_new_B, rows_B):
            new = jnp.take(new, rows_B, axis=1)
            is_new = is_new_B.reshape((1, -1) + (1,) * (x.ndim - 2))
            if new.shape == x.shape:
                return jnp.where(is_new, new, x)
            kept = x[:, :, : new.shape[2]]
            return x.at[:, :, : new.shape[2]].set(jnp.where(is_new, new, kept))

        mine, others = (self.k, self.v, self.states), (other.k, other.v, other.states)
        k, v, states = jax.tree.map(
            lambda x, new: on_shards(picked, x, new, is_new_B, rows_B), mine, others
        )
        first = on_shards(
            lambda x, new, is_new, rows: jnp.where(is_new, jnp.take(new, rows), x),
            *(self.first, other.first, is_new_B, rows_B),
        )
        length = jnp.where(is_new_B, other.length, self.length)
        return Cache(k, v, first, length, states)


def on_shards(function, *arrays) -> jax.Array:
    """Runs a function on each device's own shards; the result is laid out like the first array."""
    mesh = jax.typeof(arrays[0]).sharding.mesh
    if mesh.empty or not mesh.explicit_axes:
        return function(*arrays)
    specs = tuple(jax.typeof(x).sharding.spec for x in arrays)
    local = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=specs[0])
    return local(*arrays)


@dataclasses.dataclass(frozen=True)
class CachedInputs(AttentionInputs):
    """What one new position of each row attends to: itself and a cache."""

    cache: Cache = dataclasses.field(kw_only=True)
    seen: dict[AttentionType, jax.Array] = dataclasses.field(kw_only=True)  # [B, S], bool: slots

    def attend(
        self,
        q_BTNH,
        k_BTKH,
        v_BTKH,
        kind: AttentionType,
        cache_index: Any = None,
        *,
        soft_cap: float | None = None,
        sinks_N=None,
    ) -> jax.Array:
        past_k_BSKH, past_v_BSKH = self.cache.of_layer(cache_index)
        return attend_to_cache(
            keys=((q_BTNH, k_BTKH, past_k_BSKH),),
            values=(v_BTKH, past_v_BSKH),
            seen_BS=self.seen[kind],
            root=math.sqrt(q_BTNH.shape[-1]),
            cap=soft_cap,
            sinks_N=sinks_N,
        )

    def of_layers(self, layers, first: int = 0) -> jax.Array:
        return first + layer_indices(layers)

    def of_stack(self, name: str, layers) -> Any:
        """The cache_index of each layer of unlike_layers' stacks: for some, the state itself."""
        states = self.cache.states or {}
        if name in WITH_KEYS:
            return Place(layer_indices(layers), name, states.get(name))
        return states[name]


def prefill(model, tokens_BT, lengths_B, slots: int) -> tuple[jax.Array, Cache]:
    """Reads prompts. Returns next-token logits [B, V] and a Cache with room for more tokens.

    Args:
      tokens_BT: int, left-padded: row b's prompt is its last lengths_B[b] ≥ 1 tokens.
      slots: S ≥ T, the capacity of the cache in tokens, including prompts and padding.
    """
    return prefill_and_measure(model, tokens_BT, lengths_B, slots)[:2]


@fit_rules
def prefill_and_measure(model, tokens_BT, lengths_B, slots: int) -> tuple[jax.Array, Cache, Any]:
    """`prefill`, and the metrics of the layers, as `decode_and_measure` returns them."""
    T = tokens_BT.shape[1]
    first_B = constrain(T - lengths_B, "batch")
    positions_BT = constrain(jnp.arange(T)[None] - first_B[:, None], "batch", "seq")
    segments_BT = (positions_BT >= 0).astype(jnp.int32)  # padding: segment 0
    batch = Batch(tokens_BT, None, segments_BT)
    inputs = model.inputs_of(batch, positions_BT=positions_BT, lengths_B1=lengths_B[:, None])
    inputs = dataclasses.replace(inputs, generates=True)
    x_BTD, table_RVD, kv, states, metrics = run(model, tokens_BT, inputs)
    unchanged = (0, 0)
    padding = (unchanged, unchanged, (0, slots - T), unchanged, unchanged)
    pad = functools.partial(jnp.pad, pad_width=padding)
    k, v = jax.tree.map(lambda x: in_slots(pad, x)(x), kv)
    logits_BV = next_logits(x_BTD, table_RVD, model.config)
    return logits_BV, Cache(k, v, first_B, jnp.int32(T), states), metrics


@fit_rules
def decode(model, tokens_B, cache: Cache) -> tuple[jax.Array, Cache]:
    """Reads one more token per row. Returns next-token logits [B, V] and the extended cache.

    A jitted caller should donate the cache, so that one slot is written in place. The cache must not
    be full: length < S. Where a rotary scaling depends on the row's length, the new token has the
    scaling of the row so far; keys in the cache keep theirs.
    """
    return decode_and_measure(model, tokens_B, cache)[:2]


@fit_rules
def decode_and_measure(model, tokens_B, cache: Cache) -> tuple[jax.Array, Cache, Any]:
    """`decode`, and the metrics of the layers: name → [L, ...].

    Experts add "chosen" to theirs, each position's choice of layers with experts, [L, B, T, J].
    """
    tokens_B1 = tokens_B[:, None]
    next_B1 = cache.next_B1
    batch = Batch(tokens_B1, None, None)
    inputs = model.inputs_of(batch, positions_BT=next_B1, lengths_B1=next_B1 + 1)
    inputs = CachedInputs(
        **vars(dataclasses.replace(inputs, generates=True)),
        cache=cache,
        seen={kind: cache.seen(kind.window) for kind in model.config.kinds},
    )
    x_B1D, table_RVD, kv, states, metrics = run(model, tokens_B1, inputs)
    return next_logits(x_B1D, table_RVD, model.config), cache.append(kv, states), metrics


def run(model, tokens_BT, inputs) -> tuple[jax.Array, jax.Array, Any, Any, Any]:
    """Returns the layers' output, normed, [B, T, D], the table to unembed it, [R, V, D], all layers'
    keys and values, each [L, B, T, K, H], the states of layers that have others, as in
    Cache.states, and the layers' metrics.
    """
    tables = model.tables()
    x_BTD, first_kv = model.begin(tables, tokens_BT, inputs)
    x_BTD, kept, metrics = model.run_layers(x_BTD, inputs)
    states = None
    if isinstance(kept, dict):  # of unlike_layers' stacks
        states = {name: kept[name] for name in kept if name not in WITH_KEYS}
        if SIDE_BY_SIDE in kept:
            states[SIDE_BY_SIDE] = kept[SIDE_BY_SIDE][2]
        keys = {name: kept[name][0] for name in kept if name in WITH_KEYS}
        kept = keys, {name: kept[name][1] for name in keys}
    if first_kv is not None:
        kept = jax.tree.map(lambda *x: jnp.concatenate(x), first_kv, kept)
    return model.final_norm(x_BTD), tables[-1], kept, states, metrics


def in_slots(function, x) -> Any:
    """Gives the result of `function`, which JAX can't infer, x's sharding with dim 2 split over slots."""
    if shards("slots") == shards("seq") == 1 or explicit("slots") is None:
        return function
    spec = jax.typeof(x).sharding.spec
    spec = PartitionSpec(*spec[:2], mesh_axes("slots"), *spec[3:])
    return jax.sharding.auto_axes(function, out_sharding=spec)


def next_logits(x_BTD: jax.Array, table_RVD: jax.Array, config) -> jax.Array:
    """Logits [B, V] in float32 of the token after each row's last position."""
    B, T, D = x_BTD.shape
    parts = shards("seq")
    if parts == 1:
        return unembed(gather_positions(x_BTD)[:, -1:], table_RVD, config)[:, 0]
    is_last_T = jnp.arange(T) == T - 1
    x_B1D = jnp.where(is_last_T[None, :, None], x_BTD, 0).sum(axis=1, keepdims=True)
    x_BPD = constrain(jnp.broadcast_to(x_B1D, (B, parts, D)), "batch", "seq", "act_embed")
    logits_BPV = unembed(x_BPD, table_RVD, config)
    return jnp.where((jnp.arange(parts) == 0)[None, :, None], logits_BPV, 0).sum(axis=1)


def attend_absorbed(
    attention, q_BTNH, turned_BTNP, latent_BT1C, key_BT1P, inputs: CachedInputs, kind, cache_index
) -> jax.Array:
    """Latent attention (deepseek.py) of one new position, T = 1, to a cache. Returns [B, 1, N, V].

    Keys and values are not expanded: queries are multiplied into the space of the latents, and
    outputs come back from it. A cache of L layers has latents as `k`, [L, B, S, 1, C], and rotary
    keys as `v`, [L, B, S, 1, P].
    """
    nope = q_BTNH.shape[-1]
    up = attention.kv_up
    up_CNH = up.dense() if isinstance(up, WeightInUse) else up[...]
    up_CNH = constrain(up_CNH.astype(q_BTNH.dtype), None, "heads", None)
    latents, rotary_keys = inputs.cache.of_layer(cache_index)
    q_BTNC = jnp.einsum("BTNH,CNH->BTNC", q_BTNH, up_CNH[..., :nope])
    out_BTNC = attend_to_cache(
        keys=((q_BTNC, latent_BT1C, latents), (turned_BTNP, key_BT1P, rotary_keys)),
        values=(latent_BT1C, latents),
        seen_BS=inputs.seen[kind],
        root=attention.config.head_dim**0.5,
        axes=(None, "heads", None),
    )
    return jnp.einsum("BTNC,CNV->BTNV", out_BTNC, up_CNH[..., nope:])


def attend_to_cache(
    keys,
    values,
    seen_BS: jax.Array,
    root: float,
    cap: float | None = None,
    sinks_N: jax.Array | None = None,
    axes: tuple = ("kv_heads", None, "head_dim"),
) -> jax.Array:
    """Attention of one new position (T = 1) to a layer's cache and itself. Returns [B, 1, N, H].

    Devices that share out the slots exchange sums, not keys.

    Args:
      keys: (q [B, 1, N, H], its own k [B, 1, K, H], the cache's k [B, S, K, H]) for each part of the
        head dim; scores are the sum of their products, divided by `root`.
      values: (its own [B, 1, K, H], the cache's [B, S, K, H]).
      axes: the logical axes of K, G and H, which are the cache's however heads are split.
    """
    B, T, N, _ = keys[0][0].shape
    v_BTKH, v_BSKH = values
    K = v_BTKH.shape[2]
    split = ("batch", "seq", axes[0] or axes[1], axes[2])

    def grouped(q_BTNH):
        shape = (B, K, N // K, q_BTNH.shape[-1])
        return reshape(constrain(q_BTNH, *split), shape, "batch", *axes)

    dtype = keys[0][0].dtype
    keys = [(grouped(q), own, past) for q, own, past in keys]
    # The cache is the left operand: XLA's CPU backend would transpose a right one first.
    scores_BKSG: Any = sum(dot("BSKH,BKGH->BKSG", past, q) for q, _, past in keys)
    scores_BKGS = scores_BKSG.swapaxes(2, 3) / root
    scores_BKGS = jnp.where(seen_BS[:, None, None], soft_cap(scores_BKGS, cap), NOT_SEEN)
    own_BKG1: Any = sum(dot("BKGH,BTKH->BKGT", q, own) for q, own, _ in keys)
    own_BKG1 = soft_cap(own_BKG1 / root, cap)
    most_BKG1 = jnp.maximum(scores_BKGS.max(-1, keepdims=True), own_BKG1)
    if sinks_N is not None:
        sinks_KG = reshape(sinks_N.astype(jnp.float32), (K, N // K), *axes[:2])
        sinks_1KG1 = sinks_KG[None, :, :, None]
        most_BKG1 = jnp.maximum(most_BKG1, sinks_1KG1)
    weights_BKGS = jnp.exp(scores_BKGS - most_BKG1)
    own_BKG1 = jnp.exp(own_BKG1 - most_BKG1)
    total_BKG1 = weights_BKGS.sum(-1, keepdims=True) + own_BKG1
    if sinks_N is not None:
        total_BKG1 += jnp.exp(sinks_1KG1 - most_BKG1)
    total = auto(functools.partial(dot, "BKGS,BSKH->BKGH"), "batch", *axes)
    if device().platform == "gpu":  # whose matrix units would take values in float32 too
        weights_BKGS = weights_BKGS.astype(v_BSKH.dtype)
    # Elsewhere they stay in float32, as in training's attention: choice.blockwise.
    out_BKGH = total(weights_BKGS, v_BSKH)
    out_BKGH += own_BKG1 * v_BTKH.swapaxes(1, 2).astype(jnp.float32)
    out_BTNH = reshape((out_BKGH / total_BKG1).astype(dtype), (B, T, N, -1), *split)
    return constrain(out_BTNH, "batch", "seq", "heads", "head_dim")
