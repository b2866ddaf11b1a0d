"""Generates tokens with a KV cache: reads prompts in one pass, then writes a token per row and step.

Models need the methods `prefill` and `decode`, as in zoo/transformer.py and zoo/moe.py.
"""

import copy
import dataclasses
import functools
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recipes.common.sharding import Layout, Tree, paths
from recipes.common.sharding.rules import count_shards
from zoo.options import cache as zoo_cache
from zoo.options.pictures import with_pictures
from zoo.options.rope_scaling import LongRope

COLDEST = 1e-6  # a lower temperature takes the likeliest token: logits over it would overflow
SHORTEST = 16  # prompts are padded to 16, 32, 64, … tokens, rounded up to what the mesh divides


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings for choosing the next token."""

    temperature: float = 0.0  # 0: the likeliest token
    top_k: int = 0  # choose among the k likeliest tokens; 0: all
    top_p: float = 1.0  # choose among the fewest tokens that have this share; at least one
    seed: int = 0

    def keys(self, rows_B: jax.Array) -> jax.Array:
        """A key for each row [B], from the row's number."""
        return jax.vmap(lambda row: jax.random.fold_in(jax.random.key(self.seed), row))(rows_B)

    def __call__(self, logits_BV: jax.Array, keys_B: jax.Array, number) -> jax.Array:
        """Chooses tokens [B], each a function of its row's key, its number in the row and its logits."""
        if self.temperature < COLDEST:
            return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        logits_BV = kept_logits(logits_BV / self.temperature, self.top_k, self.top_p)

        def one(key, logits_V):
            return jax.random.categorical(jax.random.fold_in(key, number), logits_V)

        return jax.vmap(one)(keys_B, logits_BV).astype(jnp.int32)


def kept_logits(logits_BV: jax.Array, top_k: int, top_p: float) -> jax.Array:
    """The logits of the tokens that may be chosen, -inf for others; see Sampling.

    top_p applies to the tokens that top_k keeps. Equal logits are kept together.
    """
    if 0 < top_k < logits_BV.shape[-1]:
        least_B1 = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    if top_p < 1:
        sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        share_BV = jax.nn.softmax(sorted_BV, axis=-1)
        wanted_BV = jnp.cumsum(share_BV, axis=-1) - share_BV < top_p
        wanted_BV = wanted_BV.at[:, 0].set(True)
        least_B1 = jnp.where(wanted_BV, sorted_BV, jnp.inf).min(axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    return logits_BV


Pictures = list[dict[str, np.ndarray]]  # of each row, arrays of a batch


def cap_windows(config: Any, most: int) -> Any:
    """A decoder's config whose windows are limited to `most` positions; a state has no window."""
    if config.layer_kinds:
        capped = [kind._replace(window=min(most, kind.window or most)) for kind in config.kinds]
        return dataclasses.replace(config, layer_kinds=tuple(capped))
    windows = {name: min(most, getattr(config, name) or most) for name in config.WINDOWS}
    return dataclasses.replace(config, **windows)


class Generator:
    """Continues prompts. Compiles its two programs once for each shape.

    Counts the tokens `read` and `written`, without padding, the decoding `steps`, and the `seconds`
    of reading and of writing.
    """

    def __init__(
        self,
        layout: Layout,
        variables: Tree,
        sampling: Sampling,
        end: tuple[int, ...],
        vocabulary: int,
        *,
        rows: int = 1,
    ):
        """Compiles nothing yet.

        Args:
          variables: the model's variables, {"params": …}, or a training state; ShapeDtypeStructs are
            enough to compile.
          end: the tokens that end a row.
          vocabulary: only tokens below this number are written.
          rows: fewest rows of a batch; batches are also padded until the mesh divides them.
        """
        layout.check_whole("generation")
        self.layout, self.sampling, self.end = layout, sampling, np.array(end, np.int32)
        self._variables = {kind: variables[kind] for kind in layout.model.shapes}
        self._vocabulary, self._rows = vocabulary, rows
        self._compiled: dict[tuple[int, ...], jax.stages.Compiled] = {}
        kinds = layout.config.kinds
        # Lengths of a row beyond which all of its positions rotate otherwise.
        self._switches = [
            scaling.original_length
            for scaling in {kind.rope_scaling for kind in kinds}
            if isinstance(scaling, LongRope)
        ]
        self.cache_bytes = 0  # the last call's cache, per device
        self.read, self.written, self.steps, self.seconds = 0, 0, 0, [0.0, 0.0]

    def with_variables(self, variables: Tree) -> "Generator":
        """A generator of other variables with the programs of this one."""
        other = copy.copy(self)
        other._variables = {kind: variables[kind] for kind in self.layout.model.shapes}
        return other

    def compile(
        self, lengths: list[int], max_new_tokens: int, pictures: Pictures | None = None
    ) -> None:
        """Compiles both programs for prompts of these lengths, before a call needs them.

        Args:
          pictures: as in a call.
        """
        shape = B, T, _ = self._shape(lengths, max_new_tokens)
        tokens_BT = np.zeros((B, T), np.int32)
        per_row_B = np.zeros(B, np.int32)
        slots = _in_slots(pictures, B)
        arguments = (tokens_BT, per_row_B, per_row_B, np.int32(0), slots)
        abstract = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            arguments,
            self._where(tokens_BT, slots),
        )
        shape = _with_pictures(shape, slots)
        prefill = self._program(self._prefill, shape, self._variables, *abstract)
        keys_B, *state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            prefill.out_info,
        )
        self._program(self._decode, (B, state[-1].slots), self._variables, keys_B, *state)

    def __call__(
        self,
        prompts: list[np.ndarray],
        max_new_tokens: int,
        first: int = 0,
        pictures: Pictures | None = None,
    ) -> Iterator[np.ndarray]:
        """Yields each row's next token, int32 [len(prompts)], until all rows have ended.

        The token that ends a row is included; after it the row yields -1. Where a row grows beyond the
        original length of a LongRope, all rows are read again: keys in a cache have the other factors.

        Args:
          prompts: at least one token each.
          first: number of the first prompt, if several calls share a seed.
          pictures: of each prompt, in the order of its placeholders: arrays of a batch of the model,
            [pictures, ...]. None: of prompts without pictures.
        """
        rows = [np.asarray(prompt, np.int32) for prompt in prompts]
        numbers = first + np.arange(len(prompts))
        going = np.ones(len(prompts), bool)
        self.read += sum(map(len, rows))
        keys_B, *state = self._read(rows, pictures, numbers, max_new_tokens, 0)
        decode = self._decode_program(keys_B, state)
        start = time.perf_counter()
        for count in range(1, max_new_tokens + 1):
            shown = state[0]
            reads_again = any(
                len(row) + count == length + 1
                for row, goes in zip(prompts, going, strict=True)
                for length in self._switches
                if goes
            )
            if count < max_new_tokens and not reads_again:  # runs while this step's tokens are read
                state = decode(self._variables, keys_B, *state)
            tokens = np.asarray(jax.device_get(shown))[: len(prompts)]
            self.written += int(going.sum())
            self.steps += 1
            self.seconds[1] += time.perf_counter() - start
            yield tokens
            start = time.perf_counter()
            going &= (tokens >= 0) & ~np.isin(tokens, self.end)
            if not going.any():
                break
            if self._switches:
                triples = zip(rows, tokens, going, strict=True)
                rows = [np.append(row, token) if goes else row for row, token, goes in triples]
            if count < max_new_tokens and reads_again:
                del state  # with its cache
                left = max_new_tokens - count
                those_going = np.where(going, numbers, -1)
                keys_B, *state = self._read(rows, pictures, those_going, left, count)
                decode = self._decode_program(keys_B, state)
        jax.block_until_ready(state)  # simulated devices: at most two programs in flight

    def _read(
        self,
        rows: list[np.ndarray],
        pictures: Pictures | None,
        numbers: np.ndarray,
        max_new_tokens: int,
        count: int,
    ) -> tuple:
        """Reads rows in one pass: (their keys, next tokens, their number, a cache).

        Args:
          pictures: of each row; see a call.
          numbers: the rows' own, for their keys; -1: nothing more is written.
          count: of the tokens that were written before.
        """
        B, T, S = self._shape([len(row) for row in rows], max_new_tokens)
        tokens_BT, lengths_B = np.zeros((B, T), np.int32), np.ones(B, np.int32)
        rows_B = np.full(B, -1, np.int32)
        rows_B[: len(rows)] = numbers
        for b, row in enumerate(rows):
            tokens_BT[b, T - len(row) :] = row
            lengths_B[b] = len(row)
        slots = _in_slots(pictures, B)
        where = self._where(tokens_BT, slots)
        arguments = (tokens_BT, lengths_B, rows_B, np.int32(count), slots)
        arguments = jax.device_put(arguments, where)
        shape = _with_pictures((B, T, S), slots)
        prefill = self._program(self._prefill, shape, self._variables, *arguments)
        start = time.perf_counter()
        state = jax.block_until_ready(prefill(self._variables, *arguments))
        self.seconds[0] += time.perf_counter() - start
        return state

    def _shape(self, lengths: list[int], max_new_tokens: int) -> tuple[int, int, int]:
        """(rows, positions, slots of the cache) of the programs for prompts of these lengths."""
        layout = self.layout
        T = least_multiple(
            max(SHORTEST, 2 ** math.ceil(math.log2(max(lengths)))), layout.seq_shards
        )
        B = least_multiple(max(len(lengths), self._rows), layout.batch_shards)
        S = least_multiple(T + max_new_tokens, layout.seq_shards)  # slots; some may stay empty
        return B, T, S

    def _where(self, tokens_BT: np.ndarray, slots: dict[str, np.ndarray]) -> tuple[Any, ...]:
        """Shardings of the prompts' tokens, lengths and numbers, of the tokens' number, and of pictures.

        Rows are replicated: each device chooses the next tokens of all rows. Positions are split.
        """
        replicated = self.layout.replicated
        spec = self.layout.batch_shardings(tokens_BT).spec[1:]
        split = replicated.update(spec=jax.P(None, *spec))
        return (split, replicated, replicated, replicated, dict.fromkeys(slots, replicated))

    def _decode_program(self, keys_B: jax.Array, state: list) -> jax.stages.Compiled:
        cache = state[-1]
        arrays = jax.tree.leaves((cache.k, cache.v, cache.states))
        self.cache_bytes = sum(x.addressable_shards[0].data.nbytes for x in arrays)
        slots = jax.tree.leaves(cache.k)[0].shape[2]
        return self._program(self._decode, (len(keys_B), slots), self._variables, keys_B, *state)

    def bytes_a_token(self) -> tuple[int, int]:
        """Fewest bytes of (weights, cache) that a device must read to write a token.

        Counts only the experts of one token.
        """
        layout, weights, config = self.layout, 0.0, self.layout.config
        arrays, names = paths(self._variables), paths(layout.model.axes)
        for path, array in arrays.items():
            used = [layout.names.while_used(axis) for axis in names[path]]
            parts = math.prod(count_shards(layout.rules, axis, layout.mesh.shape) for axis in used)
            chosen = config.experts_per_token / config.num_experts if "expert" in used else 1
            weights += array.nbytes / parts * chosen
        return round(weights), self.cache_bytes

    def _prefill(self, S, variables, tokens_BT, lengths_B, rows_B, number, slots):
        model = self.layout.model.merge(variables)
        if slots:
            model, tokens_BT = with_pictures(model, tokens_BT, **slots)
        logits_BV, cache = zoo_cache.prefill(model, tokens_BT, lengths_B, S)
        keys_B = self.sampling.keys(rows_B)
        return keys_B, self._next(logits_BV, keys_B, rows_B < 0, number), number + 1, cache

    def _decode(self, S, variables, keys_B, token_B, number, cache):
        model = self.layout.model.merge(variables)
        ended_B = (token_B < 0) | jnp.isin(token_B, self.end)
        logits_BV, cache = zoo_cache.decode(model, jnp.maximum(token_B, 0), cache)
        return self._next(logits_BV, keys_B, ended_B, number), number + 1, cache

    def _next(self, logits_BV, keys_B, ended_B, number):
        logits_BV = jax.sharding.reshard(logits_BV, jax.P())[:, : self._vocabulary]
        return jnp.where(ended_B, -1, self.sampling(logits_BV, keys_B, number))

    def _program(self, function, shape, *arguments) -> jax.stages.Compiled:
        key = (function.__name__, *shape)
        if key not in self._compiled:
            donated = {"donate_argnums": 4} if function == self._decode else {}
            self._compiled[key] = self.layout.compile(
                functools.partial(function, shape[-1]), *arguments, **donated
            )
        return self._compiled[key]


def _in_slots(pictures: Pictures | None, rows: int) -> dict[str, np.ndarray]:
    """Pictures of each row as arrays [rows, M, ...], M being the most of a row; {} without any."""
    pictures = pictures or []
    most = max((len(array) for arrays in pictures for array in arrays.values()), default=0)
    if not most:
        return {}
    slots = {
        name: np.zeros((rows, most, *array.shape[1:]), array.dtype)
        for name, array in pictures[0].items()
    }
    for row, arrays in enumerate(pictures):
        for name, array in arrays.items():
            slots[name][row, : len(array)] = array
    return slots


def _with_pictures(shape: tuple[int, ...], slots: dict[str, np.ndarray]) -> tuple[int, ...]:
    """What a program that reads prompts depends on."""
    return tuple(length for array in slots.values() for length in array.shape) + shape


def least_multiple(number: int, divisor: int) -> int:
    """The least multiple of `divisor` that is at least `number`."""
    return -(-number // divisor) * divisor
