"""Answers that are sampled on the devices in one program, with the log-probability of each token.

A Generator returns to the host after every token, to show it. A Sampler stays on the devices until
all rows have ended, and keeps what reinforcement learning needs of the distribution it sampled from.

Shapes: B rows, T positions of prompts, N new tokens, V vocab, W bytes of V bits.
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
from recipes.common.runtime import UserError
from recipes.common.sharding import Layout, Tree, make_layout
from zoo.options import cache as zoo_cache
from zoo.options.rope_scaling import LongRope


class Answers(NamedTuple):
    """The answers of a batch of prompts: NumPy arrays on the host, JAX arrays inside the program."""

    tokens_BN: Any  # int32; -1 after the token that ended a row
    log_probs_BN: Any  # float32, nats at the sampling temperature; 0 after the end
    entropies_BN: Any  # float32, nats, of the distribution of each token; likewise
    # uint8, as jnp.packbits: the tokens among which each was chosen; None: among all.
    kept_BNW: Any = None

    def first(self, rows: int) -> "Answers":
        """The answers of the first rows."""
        return jax.tree.map(lambda x: x[:rows], self)


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Samples one answer to each prompt: (variables, prompts, ids) → Answers.

    An answer is a function of the model, its prompt and its id, on any mesh and whatever the other
    rows are, up to rounding between meshes. Log-probabilities are those of the distribution that was
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
    _compiled: dict[tuple[int, int], jax.stages.Compiled] = dataclasses.field(default_factory=dict)

    def check(self, longest: int) -> None:
        """Raises UserError if the layout can't generate, or rows outgrow a rotary scaling.

        Args:
          longest: tokens of the longest prompt.
        """
        self.layout.check_whole("sampling answers")
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
            self._compiled[B, T] = layout.compile(
                self._write, variables, *arguments, out_shardings=replicated
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
        slots = T + self.new_tokens + -(T + self.new_tokens) % layout.seq_shards
        arguments = [
            jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout.replicated)
            for shape in ((B, T), (B,))
        ]

        def read(variables, tokens_BT, lengths_B):
            model = layout.model.merge(variables)
            return zoo_cache.prefill(model, tokens_BT, lengths_B, slots)

        with layout.trace():
            _, cache = jax.eval_shape(read, variables, *arguments)

        def of_device(arrays: Any) -> int:
            return sum(
                math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
                for x in jax.tree.leaves(arrays)
            )

        return of_device(variables), of_device((cache.k, cache.v, cache.states))

    def _write(self, variables, tokens_BT, lengths_B, ids_BI, is_real_B) -> Answers:
        """The program: reads the prompts, then writes a token per row until all rows have ended."""
        model = self.layout.model.merge(variables)
        N, B = self.new_tokens, len(tokens_BT)
        slots = tokens_BT.shape[1] + N
        slots += -slots % self.layout.seq_shards
        logits_BV, cache = zoo_cache.prefill(model, tokens_BT, lengths_B, slots)
        choose = functools.partial(self._choose, self._keys(ids_BI))
        written = Answers(jnp.full((B, N), -1), jnp.zeros((B, N)), jnp.zeros((B, N)))
        if self.truncates:
            W = -(-logits_BV.shape[1] // 8)
            written = written._replace(kept_BNW=jnp.zeros((B, N, W), jnp.uint8))
        token_B, written = choose(jnp.int32(0), logits_BV, is_real_B, written)

        def goes_on(state):
            number, token_B, *_ = state
            return (number < N) & (token_B >= 0).any()

        def step(state):
            number, token_B, cache, written = state
            is_going_B = (token_B >= 0) & ~jnp.isin(token_B, jnp.array(self.end, jnp.int32))
            logits_BV, cache = zoo_cache.decode(model, jnp.maximum(token_B, 0), cache)
            token_B, written = choose(number, logits_BV, is_going_B, written)
            return number + 1, token_B, cache, written

        return jax.lax.while_loop(goes_on, step, (jnp.int32(1), token_B, cache, written))[-1]

    def _keys(self, ids_BI: jax.Array) -> jax.Array:
        def of_row(ids_I):
            key = jax.random.key(self.seed)
            for i in range(len(ids_I)):
                key = jax.random.fold_in(key, ids_I[i])
            return key

        return jax.vmap(of_row)(ids_BI)

    def _choose(self, keys_B, number, logits_BV, is_going_B, written: Answers):
        """The next token of each row, -1 for rows that have ended; and all that was written so far."""
        logits_BV = jax.sharding.reshard(logits_BV, jax.P()) / self.temperature
        kept_BW = None
        if self.truncates:
            is_token_V = jnp.arange(logits_BV.shape[1]) < self.vocabulary
            logits_BV = jnp.where(is_token_V[None], logits_BV, -jnp.inf)
            logits_BV = kept_logits(logits_BV, self.top_k, self.top_p)
            kept_BW = jnp.packbits(logits_BV > -jnp.inf, axis=1)
            kept_BW = jnp.where(is_going_B[:, None], kept_BW, 0)
        log_probs_BV = jax.nn.log_softmax(logits_BV)

        def one(key, log_probs_V):
            return jax.random.categorical(jax.random.fold_in(key, number), log_probs_V)

        token_B = jax.vmap(one)(keys_B, log_probs_BV[:, : self.vocabulary]).astype(jnp.int32)
        log_prob_B = jnp.take_along_axis(log_probs_BV, token_B[:, None], axis=1)[:, 0]
        probs_BV = jnp.exp(log_probs_BV)
        entropy_B = -jnp.where(probs_BV > 0, probs_BV * log_probs_BV, 0).sum(axis=1)
        new = Answers(
            jnp.where(is_going_B, token_B, -1),
            jnp.where(is_going_B, log_prob_B, 0),
            jnp.where(is_going_B, entropy_B, 0),
            kept_BW,
        )
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=number, axis=1)
        return new.tokens_BN, jax.tree.map(put, written, new)


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
