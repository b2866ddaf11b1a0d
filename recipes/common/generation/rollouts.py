"""Answers that are sampled on the devices in one program, with the log-probability of each token.

A Generator returns to the host after every token, to show it. A Sampler stays on the devices until
all rows have ended, and keeps what reinforcement learning needs of the distribution it sampled from.
With fewer slots than answers, the next answer takes the slot of one that has ended.

Shapes: B rows, T positions of prompts, N new tokens, V vocab, W bytes of V bits, M slots, D shards of B and M,
L layers with experts, J experts per position.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from recipes.common.generation.generator import kept_logits
from recipes.common.generation.slots import Queue, Slots
from recipes.common.runtime import UserError
from recipes.common.sharding import Layout, Tree, make_layout
from zoo.core.sharding import constrain
from zoo.options import cache as zoo_cache
from zoo.options.rope_scaling import LongRope


class Answers(NamedTuple):
    """The answers of a batch of prompts: NumPy arrays on the host, JAX arrays inside the program."""

    tokens_BN: Any  # int32; -1 after the token that ended a row
    log_probs_BN: Any  # float32, nats at the sampling temperature; 0 after the end
    entropies_BN: Any  # float32, nats, of the distribution of each token; likewise
    # uint8, as jnp.packbits: the tokens among which each was chosen; None: among all.
    kept_BNW: Any = None
    # uint8 or uint16: the experts of the positions that predict these tokens; None: not kept.
    experts_BNLJ: Any = None
    experts_BTLJ: Any = None  # those of the prompts, which are left-padded

    def first(self, rows: int) -> "Answers":
        """The answers of the first rows."""
        return jax.tree.map(lambda x: x[:rows], self)


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Samples one answer to each prompt: (variables, prompts, ids) → Answers.

    An answer is a function of the model, its prompt and its id, on any mesh and whatever the other
    rows are, its slot and the time at which it begins, up to rounding between meshes. Log-probabilities are those of the distribution that was
    sampled from: with top_k or top_p, the softmax over the tokens that these keep; else that over the
    whole vocabulary, as in training: ids without a token are never written, and have next to no weight.
    """

    layout: Layout
    end: tuple[int, ...]  # the tokens that end a row
    vocabulary: int  # only tokens below this number are written
    new_tokens: int  # N, the limit of an answer
    temperature: float = 1.0
    top_k: int = 0  # as in generator.Sampling
    top_p: float = 1.0
    seed: int = 0
    slots: int = 0  # M, answers that are written at a time; 0: all
    keeps_experts: bool = False
    _compiled: dict[tuple[int, int], jax.stages.Compiled] = dataclasses.field(default_factory=dict)

    def check(self, longest: int) -> None:
        """Raises UserError if the layout can't generate, or rows outgrow a rotary scaling.

        Args:
          longest: tokens of the longest prompt.
        """
        self.layout.check_whole("sampling answers")
        if self.slots % (parts := self.layout.batch_shards):
            raise UserError(
                f"--sample_slots={self.slots} is not divisible by the {parts} shards of 'batch' (rules "
                f"{self.layout.strategy!r}); use --sample_slots={self.slots + -self.slots % parts}"
            )
        for scaling in {kind.rope_scaling for kind in self.layout.config.kinds}:
            length = longest + self.new_tokens
            if isinstance(scaling, LongRope) and longest <= scaling.original_length < length:
                raise UserError(
                    f"an answer may grow to {length} tokens with its prompt, and from "
                    f"{scaling.original_length} on this model's longrope rotates all of them otherwise; "
                    f"use --max_new_tokens={scaling.original_length - longest}"
                )

    def __call__(self, variables: Tree, prompts: Sequence[np.ndarray], ids: np.ndarray) -> Answers:
        """
        Args:
          variables: the model's, {"params": …}.
          prompts: at least one token each.
          ids: int [rows, …], what an answer's random numbers depend on, besides the seed.
        """
        layout = self.layout
        B, T = self._padded(len(prompts), max(map(len, prompts)))
        tokens_BT, lengths_B = np.zeros((B, T), np.int32), np.ones(B, np.int32)
        for b, prompt in enumerate(prompts):
            tokens_BT[b, T - len(prompt) :] = prompt
            lengths_B[b] = len(prompt)
        ids_BI = np.zeros((B, ids.shape[1]), np.uint32)
        ids_BI[: len(prompts)] = ids
        is_real_B = np.arange(B) < len(prompts)
        # Rows are replicated: each device chooses the next tokens of all rows. Positions are split.
        replicated = layout.replicated
        parts = replicated.update(spec=jax.P(None, *layout.batch_shardings(tokens_BT).spec[1:]))
        where = (parts, replicated, replicated, replicated)
        arguments = jax.device_put((tokens_BT, lengths_B, ids_BI, is_real_B), where)
        if (B, T) not in self._compiled:
            write = self._write_in_slots if 0 < self.slots < B else self._write
            self._compiled[B, T] = layout.compile(
                write, variables, *arguments, out_shardings=replicated
            )
        written = jax.device_get(self._compiled[B, T](variables, *arguments))
        return written.first(len(prompts))

    @property
    def truncates(self) -> bool:
        """Whether tokens are chosen among a part of the vocabulary."""
        return self.top_k > 0 or self.top_p < 1

    def _padded(self, rows: int, longest: int) -> tuple[int, int]:
        """(rows, positions of a prompt) of a program: few shapes, so few programs."""
        T = 2 ** math.ceil(math.log2(max(longest, 8)))
        return rows + -rows % self.layout.batch_shards, T + -T % self.layout.seq_shards

    def bytes_per_device(self, rows: int, longest: int) -> tuple[int, int]:
        """Bytes of (weights, cache) on a device while it samples; allocates nothing."""
        layout = self.layout
        variables = layout.variables()
        B, T = self._padded(rows, longest)
        sizes = [(B, self._length(T))]
        if 0 < self.slots < B:
            sizes = [(B, self._length_of_waiting(T)), (self.slots, self._length(T))]

        def read(length, variables, tokens_BT, lengths_B):
            model = layout.model.merge(variables)
            return zoo_cache.prefill(model, tokens_BT, lengths_B, length)[1]

        def cache_of(rows: int, length: int) -> tuple:
            arguments = [
                jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout.replicated)
                for shape in ((rows, T), (rows,))
            ]
            with layout.trace():
                cache = jax.eval_shape(functools.partial(read, length), variables, *arguments)
            return cache.k, cache.v, cache.states

        def of_device(arrays: Any) -> int:
            return sum(
                math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
                for x in jax.tree.leaves(arrays)
            )

        return of_device(variables), of_device([cache_of(*size) for size in sizes])

    def _length(self, T: int) -> int:
        """Slots of a row of the cache, after a prompt of T positions."""
        length = T + self.new_tokens
        return length + -length % self.layout.seq_shards

    def _length_of_waiting(self, T: int) -> int:
        """The same of a prompt that waits: as many, where devices share them out."""
        return T if self.layout.seq_shards == 1 else self._length(T)

    def _write(self, variables, tokens_BT, lengths_B, ids_BI, is_real_B) -> Answers:
        """The program: reads the prompts, then writes a token per row until all rows have ended."""
        model = self.layout.model.merge(variables)
        N, length = self.new_tokens, self._length(tokens_BT.shape[1])
        logits_BV, cache, metrics = zoo_cache.prefill_and_measure(
            model, tokens_BT, lengths_B, length
        )
        keys_B, experts_BTLJ = self._keys(ids_BI), self._experts(metrics)
        first = self._choose(keys_B, jnp.int32(0), logits_BV, is_real_B, experts_BTLJ)
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=1)
        written = jax.tree.map(lambda x, new: put(x, new, 0), self._nothing(first), first)

        def goes_on(state):
            number, token_B, *_ = state
            return (number < N) & (token_B >= 0).any()

        def step(state):
            number, token_B, cache, written = state
            is_going_B = (token_B >= 0) & ~self._is_end(token_B)
            logits_BV, cache, metrics = zoo_cache.decode_and_measure(
                model, jnp.maximum(token_B, 0), cache
            )
            new = self._choose(keys_B, number, logits_BV, is_going_B, self._experts(metrics))
            written = jax.tree.map(lambda x, new: put(x, new, number), written, new)
            return number + 1, new.tokens_BN, cache, written

        state = jnp.int32(1), first.tokens_BN, cache, written
        written = jax.lax.while_loop(goes_on, step, state)[-1]
        return written._replace(experts_BTLJ=experts_BTLJ)

    def _write_in_slots(self, variables, tokens_BT, lengths_B, ids_BI, is_real_B) -> Answers:
        """`_write` with M rows of a cache, which answers take in turn.

        All prompts are read first, in one pass. Each answer has the same places in a row of the cache
        whenever it begins, so that sums over them have one order. On a mesh, an answer stays on the
        devices that have read its prompt.
        """
        model = self.layout.model.merge(variables)
        N, M = self.new_tokens, self.slots
        B, T = tokens_BT.shape
        logits_BV, waiting, metrics = zoo_cache.prefill_and_measure(
            model, tokens_BT, lengths_B, self._length_of_waiting(T)
        )
        keys_B, experts_BTLJ = self._keys(ids_BI), self._experts(metrics)
        first = self._choose(keys_B, jnp.int32(0), logits_BV, is_real_B, experts_BTLJ)
        written = jax.tree.map(lambda x, new: x.at[:, 0].set(new), self._nothing(first), first)
        queue = Queue.of(is_real_B & ~self._is_end(first.tokens_BN) & (N > 1), self.layout)
        nobody_M = jnp.zeros(M, bool)

        def goes_on(state):
            queue, slots, *_ = state
            return slots.is_going_M.any() | queue.waits()

        def step(state):
            queue, slots, cache, written = state
            queue, is_new_M, rows_M, answer_M = queue.take(slots.is_going_M, slots.answer_M)
            cache = jax.lax.cond(
                is_new_M.any(),
                lambda cache: cache.with_rows(is_new_M, waiting, rows_M),
                lambda cache: cache,
                cache,
            )
            number_M = jnp.where(is_new_M, 1, slots.number_M)
            token_M = jnp.where(is_new_M, first.tokens_BN[answer_M], slots.token_M)
            is_going_M = slots.is_going_M | is_new_M
            # Slots without an answer write over their own last token.
            length_M = constrain(T + jnp.minimum(number_M, N - 1) - 1, "batch")
            cache = cache._replace(length=length_M)
            logits_MV, cache, metrics = zoo_cache.decode_and_measure(
                model, jnp.maximum(token_M, 0), cache
            )
            new = self._choose(
                keys_B[answer_M], number_M, logits_MV, is_going_M, self._experts(metrics)
            )
            place = jnp.where(is_going_M, answer_M, B), number_M
            written = jax.tree.map(lambda x, y: x.at[place].set(y, mode="drop"), written, new)
            is_going_M &= ~self._is_end(new.tokens_BN) & (number_M + 1 < N)
            slots = Slots(answer_M, number_M + 1, new.tokens_BN, is_going_M)
            return queue, slots, cache, written

        slots = Slots(jnp.zeros(M, int), jnp.ones(M, int), jnp.zeros(M, jnp.int32), nobody_M)
        state = queue, slots, self._empty(waiting, T), written
        written = jax.lax.while_loop(goes_on, step, state)[-1]
        return written._replace(experts_BTLJ=experts_BTLJ)

    def _empty(self, waiting, T: int):
        """A cache of M empty rows, laid out like that of the prompts that wait."""
        M, S = self.slots, self._length(T)

        def zeros(x, length: int) -> jax.Array:
            shape = (x.shape[0], M, *((length,) if length else x.shape[2:3]), *x.shape[3:])
            return jnp.zeros(shape, x.dtype, out_sharding=jax.typeof(x).sharding.spec)

        k, v = jax.tree.map(lambda x: zeros(x, S), (waiting.k, waiting.v))
        states = jax.tree.map(lambda x: zeros(x, 0), waiting.states)
        first = jnp.zeros(M, jnp.int32, out_sharding=jax.typeof(waiting.first).sharding.spec)
        return zoo_cache.Cache(k, v, first, first, states)

    def _experts(self, metrics: Tree) -> jax.Array | None:
        """Each position's experts, [B, T, L, J], on all devices; None: they are not kept."""
        if not self.keeps_experts:
            return None
        chosen_LBTJ = jax.sharding.reshard(metrics["chosen"], jax.P())
        return jnp.moveaxis(chosen_LBTJ, 0, 2).astype(self.experts_dtype)

    @property
    def experts_dtype(self):
        return jnp.uint8 if self.layout.config.num_experts <= 256 else jnp.uint16

    def experts_of_position(self) -> tuple[int, int]:
        """(L, J) of a model with experts; allocates nothing."""
        layout = self.layout

        def read(variables, tokens_BT, lengths_B):
            model = layout.model.merge(variables)
            metrics = zoo_cache.prefill_and_measure(model, tokens_BT, lengths_B, 8)[2]
            return metrics["chosen"]

        shapes = (layout.batch_shards, layout.seq_shards), (layout.batch_shards,)
        arguments = [
            jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout.replicated) for shape in shapes
        ]
        with layout.trace():
            L, _, _, J = jax.eval_shape(read, layout.variables(), *arguments).shape
        return L, J

    def _is_end(self, token_B: jax.Array) -> jax.Array:
        return jnp.isin(token_B, jnp.array(self.end, jnp.int32))

    def _nothing(self, first: Answers) -> Answers:
        """Answers of which nothing is written, to go with their first tokens."""
        empty = jax.tree.map(
            lambda x: jnp.zeros((len(x), self.new_tokens, *x.shape[1:]), x.dtype), first
        )
        return empty._replace(tokens_BN=empty.tokens_BN - 1)

    def _keys(self, ids_BI: jax.Array) -> jax.Array:
        def of_row(ids_I):
            key = jax.random.key(self.seed)
            for i in range(len(ids_I)):
                key = jax.random.fold_in(key, ids_I[i])
            return key

        return jax.vmap(of_row)(ids_BI)

    def _choose(self, keys_B, number, logits_BV, is_going_B, experts_BTLJ) -> Answers:
        """The next token of each row, -1 for rows that have ended, and what belongs to it; without N.

        Args:
          number: of the token in its answer, one for all rows or [B].
          experts_BTLJ: of the positions that were read, of which the last predicts it.
        """
        logits_BV = jax.sharding.reshard(logits_BV, jax.P()) / self.temperature
        kept_BW = None
        if self.truncates:
            is_token_V = jnp.arange(logits_BV.shape[1]) < self.vocabulary
            logits_BV = jnp.where(is_token_V[None], logits_BV, -jnp.inf)
            logits_BV = kept_logits(logits_BV, self.top_k, self.top_p)
            kept_BW = jnp.packbits(logits_BV > -jnp.inf, axis=1)
            kept_BW = jnp.where(is_going_B[:, None], kept_BW, 0)
        log_probs_BV = jax.nn.log_softmax(logits_BV)

        def one(key, number, log_probs_V):
            return jax.random.categorical(jax.random.fold_in(key, number), log_probs_V)

        of_rows = jax.vmap(one, in_axes=(0, 0 if number.ndim else None, 0))
        token_B = of_rows(keys_B, number, log_probs_BV[:, : self.vocabulary]).astype(jnp.int32)
        log_prob_B = jnp.take_along_axis(log_probs_BV, token_B[:, None], axis=1)[:, 0]
        probs_BV = jnp.exp(log_probs_BV)
        entropy_B = -jnp.where(probs_BV > 0, probs_BV * log_probs_BV, 0).sum(axis=1)
        return Answers(
            jnp.where(is_going_B, token_B, -1),
            jnp.where(is_going_B, log_prob_B, 0),
            jnp.where(is_going_B, entropy_B, 0),
            kept_BW,
            None if experts_BTLJ is None else experts_BTLJ[:, -1],
        )


def sampling_layout(model: type, training: Layout, rules: str = "") -> Layout:
    """The layout in which a training run samples, on the same mesh.

    Without rules, those of training, but weights are stored as they are used: training may gather them
    for each use, here that would be for each token. Raises UserError if the rules don't fit.
    """
    if rules:
        try:
            layout = make_layout(model, training.config, training.mesh, rules)
        except UserError as error:  # the run's own rules were found to fit
            raise UserError(str(error).replace("--rules", "--sample_rules")) from None
    else:
        own = training.strategies.get(training.strategy, training.rules)
        gathered = own | {
            rest: own[used] for rest, used in training.names.in_use.items() if used in own
        }
        layout = make_layout(model, training.config, training.mesh, gathered)
        layout = dataclasses.replace(layout, strategy=f"{training.strategy}, gathered once")
    if layout.stages > 1:
        raise UserError(
            f"the rules {layout.strategy!r} put layers into {layout.stages} stages, which can't sample "
            "answers; use --sample_rules=fsdp, for example"
        )
    return layout
