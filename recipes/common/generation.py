"""Generates tokens with a KV cache: reads prompts in one pass, then writes a token per row and step.

Models need the methods `prefill` and `decode`, as in zoo/transformer.py and zoo/moe.py.
"""

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
        logits_BV = self._kept(logits_BV / self.temperature)

        def one(key, logits_V):
            return jax.random.categorical(jax.random.fold_in(key, number), logits_V)

        return jax.vmap(one)(keys_B, logits_BV).astype(jnp.int32)

    def _kept(self, logits_BV: jax.Array) -> jax.Array:
        """Sets excluded tokens to -inf; top_p applies to the tokens that top_k keeps."""
        if 0 < self.top_k < logits_BV.shape[-1]:
            least_B1 = jax.lax.top_k(logits_BV, self.top_k)[0][:, -1:]
            logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
        if self.top_p < 1:
            sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
            share_BV = jax.nn.softmax(sorted_BV, axis=-1)
            wanted_BV = jnp.cumsum(share_BV, axis=-1) - share_BV < self.top_p
            wanted_BV = wanted_BV.at[:, 0].set(True)
            least_B1 = jnp.where(wanted_BV, sorted_BV, jnp.inf).min(axis=-1, keepdims=True)
            logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
        return logits_BV


def cap_windows(config: Any, most: int) -> Any:
    """A decoder's config whose windows are limited to `most` positions; a state has no window."""
    if config.layer_kinds:
        capped = [kind._replace(window=min(most, kind.window or most)) for kind in config.kinds]
        return dataclasses.replace(config, layer_kinds=tuple(capped))
    return dataclasses.replace(config, sliding_window=min(most, config.sliding_window or most))


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
          variables: the model's variables, {"params": …}, or a training state.
          end: the tokens that end a row.
          vocabulary: only tokens below this number are written.
          rows: fewest rows of a batch; batches are also padded until the mesh divides them.
        """
        layout.check_whole("generation")
        self.layout, self.sampling, self.end = layout, sampling, np.array(end, np.int32)
        self._variables = {kind: variables[kind] for kind in layout.model.shapes}
        self._vocabulary, self._rows = vocabulary, rows
        self._compiled: dict[tuple[int, ...], jax.stages.Compiled] = {}
        self.cache_bytes = 0  # the last call's cache, per device
        self.read, self.written, self.steps, self.seconds = 0, 0, 0, [0.0, 0.0]

    def __call__(
        self, prompts: list[np.ndarray], max_new_tokens: int, first: int = 0
    ) -> Iterator[np.ndarray]:
        """Yields each row's next token, int32 [len(prompts)], until all rows have ended.

        The token that ends a row is included; after it the row yields -1.

        Args:
          prompts: at least one token each.
          first: number of the first prompt, if several calls share a seed.
        """
        lengths = [len(prompt) for prompt in prompts]
        layout = self.layout
        T = _multiple(max(SHORTEST, 2 ** math.ceil(math.log2(max(lengths)))), layout.seq_shards)
        B = _multiple(max(len(prompts), self._rows), layout.batch_shards)
        S = _multiple(T + max_new_tokens, layout.seq_shards)  # slots; some may stay empty
        tokens_BT, lengths_B = np.zeros((B, T), np.int32), np.ones(B, np.int32)
        for row, prompt in enumerate(prompts):
            tokens_BT[row, T - len(prompt) :] = prompt
            lengths_B[row] = len(prompt)
        rows_B = np.where(np.arange(B) < len(prompts), first + np.arange(B), -1).astype(np.int32)
        # Rows are replicated: each device chooses the next tokens of all rows. Positions are split.
        replicated = layout.replicated
        parts = replicated.update(spec=jax.P(None, *layout.batch_shardings(tokens_BT).spec[1:]))
        arguments = jax.device_put((tokens_BT, lengths_B, rows_B), (parts, replicated, replicated))

        prefill = self._program(self._prefill, (B, T, S), self._variables, *arguments)
        start = time.perf_counter()
        keys_B, *state = jax.block_until_ready(prefill(self._variables, *arguments))
        cache = state[-1]
        self.seconds[0] += time.perf_counter() - start
        self.read += sum(lengths)
        arrays = jax.tree.leaves((cache.k, cache.v, cache.states))
        self.cache_bytes = sum(x.addressable_shards[0].data.nbytes for x in arrays)

        decode = self._program(self._decode, (B, S), self._variables, keys_B, *state)
        going = np.ones(len(prompts), bool)
        start = time.perf_counter()
        for count in range(1, max_new_tokens + 1):
            shown = state[0]
            if count < max_new_tokens:  # runs while this step's tokens are read
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
        jax.block_until_ready(state)  # simulated devices: at most two programs in flight

    def bytes_a_token(self) -> tuple[int, int]:
        """Fewest bytes of (weights, cache) that a device must read to write a token.

        Counts only the experts of one token.
        """
        layout, weights, config = self.layout, 0.0, self.layout.config
        arrays, names = paths(self._variables), paths(layout.model.axes)
        for path, array in arrays.items():
            used = [layout.zoo.IN_USE.get(axis, axis) for axis in names[path]]
            parts = math.prod(count_shards(layout.rules, axis, layout.mesh.shape) for axis in used)
            chosen = config.experts_per_token / config.num_experts if "expert" in used else 1
            weights += array.nbytes / parts * chosen
        return round(weights), self.cache_bytes

    def _prefill(self, S, variables, tokens_BT, lengths_B, rows_B):
        model = self.layout.model.merge(variables)
        logits_BV, cache = model.prefill(tokens_BT, lengths_B, S)
        keys_B, number = self.sampling.keys(rows_B), jnp.int32(0)
        return keys_B, self._next(logits_BV, keys_B, rows_B < 0, number), number + 1, cache

    def _decode(self, S, variables, keys_B, token_B, number, cache):
        model = self.layout.model.merge(variables)
        ended_B = (token_B < 0) | jnp.isin(token_B, self.end)
        logits_BV, cache = model.decode(jnp.maximum(token_B, 0), cache)
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


def _multiple(number: int, divisor: int) -> int:
    """The least multiple of `divisor` that is at least `number`."""
    return -(-number // divisor) * divisor
