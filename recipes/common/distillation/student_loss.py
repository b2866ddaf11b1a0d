"""Distillation: a student learns the next-token distribution of a frozen teacher.

    loss = (1 − α) · cross entropy + α · τ² · D(softmax(teacher / τ), softmax(student / τ))

D is the forward or reverse Kullback-Leibler divergence, or Jensen-Shannon's (Hinton et al. 2015; Gu et al.
2024; Agarwal et al. 2024). Teacher and student compute under rules of their own. Their logits exist
for one chunk of positions at a time, split over the vocabulary, as in the loss of any decoder.

With --top_k, the teacher's distribution is that of its K likeliest tokens, whose logits may be stored:
see teacher_logits.py.

Shapes: B batch, T positions, D embed, V vocab, R shards of B and T, M positions of one shard, C chunks.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from recipes.common.runtime import UserError, flag
from recipes.common.runtime.flags import refuse_unused
from recipes.common.sharding import Layout, Tree
from zoo.core.sharding import constrain, per_device
from zoo.core.vocabulary import (
    SHARDS,
    Objective,
    cross_entropies,
    in_chunks,
    logits_of,
    product_gradients,
    table_product,
)  # fmt: skip
from zoo.options.log_probs import from_chunks, outputs

FORWARD, REVERSE, JS = "forward", "reverse", "js"


@dataclasses.dataclass(frozen=True)
class Distillation:
    """Flags of distillation."""

    teacher: str = flag(
        "transformer.stdlib_3m", "The teacher: a run, checkpoint or published name, or hf:DIR.",
        "model",
    )  # fmt: skip
    student: str = flag(
        "transformer.small",
        "A new student, as ENTRY.SIZE; --restore_from takes a trained one.",
        "model",
    )
    teacher_rules: str = flag(
        "", "Sharding rules of the teacher; empty: chosen by the mesh.", may_change=True
    )
    teacher_dtype: str = flag(
        "", "Type of the teacher's weights and activations; empty: the student's.", "model",
        choices=["", "float32", "bfloat16"],
    )  # fmt: skip
    divergence: str = flag(
        FORWARD, "Divergence from the teacher: forward, KL(teacher ‖ student), covers all that the teacher "
        "says; reverse keeps to its likeliest; js is between.", "optimizer",
        choices=[FORWARD, REVERSE, JS],
    )  # fmt: skip
    tau: float = flag(1.0, "Temperature of both distributions.", "optimizer", at_least=1e-2)
    alpha: float = flag(
        0.5, "Share of the divergence in the loss; 0: train without a teacher.", "optimizer",
        at_least=0.0, at_most=1.0,
    )  # fmt: skip
    top_k: int = flag(
        0, "Tokens of the teacher's distribution, its likeliest; 0: all.", "optimizer", at_least=0
    )
    teacher_logits: str = flag(
        "", "Folder with the teacher's --top_k logits, which is written first if it doesn't exist; empty: "
        "the teacher computes in the step.", "optimizer", may_change=True,
    )  # fmt: skip

    def __post_init__(self):
        if not self.alpha:
            of_it = (
                "teacher_rules",
                "teacher_dtype",
                "divergence",
                "tau",
                "top_k",
                "teacher_logits",
            )
            refuse_unused(self, of_it, "a teacher, and --alpha=0 trains without one")
        if self.teacher_logits and not self.top_k:
            raise UserError(
                f"--teacher_logits={self.teacher_logits} needs --top_k; add it, for example --top_k=16"
            )
        if self.top_k and self.divergence == REVERSE:
            raise UserError(
                f"--divergence=reverse is infinite with --top_k={self.top_k}, which gives other tokens a "
                "probability of 0; use forward or js"
            )


@dataclasses.dataclass(frozen=True)
class Distilling:
    """The loss of a student, as AbstractModel.loss: (sum, number of targets, metrics)."""

    flags: Distillation
    teacher: Layout

    def __call__(
        self,
        model: Any,
        *,
        tokens: jax.Array,
        targets: jax.Array,
        segment_ids: jax.Array | None = None,
        frozen: Tree | None = None,
        teacher_logits: jax.Array | None = None,
        teacher_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, Tree]:
        """
        Args:
          tokens, targets, segment_ids: [B, T], as in Decoder.loss.
          frozen: the teacher's variables; None if its logits are stored.
          teacher_logits, teacher_ids: the stored logits and their tokens, [B, T, K].
        """
        config, their_table_RVD = model.config, None
        if frozen is None:
            assert teacher_logits is not None
            assert teacher_ids is not None
            stored = (constrain(x, "batch", "seq", None) for x in (teacher_logits, teacher_ids))
            theirs = tuple(in_chunks(x, config, None) for x in stored)
        else:
            theirs_BTD, their_table_RVD = self.teacher_outputs(frozen, tokens, targets, segment_ids)
            theirs = in_chunks(theirs_BTD, config, "act_embed")
        x_BTD, table_RVD, metrics = outputs(model, tokens, targets, segment_ids)
        targets = constrain(targets, "batch", "seq")

        def of_chunk(product_RMV, chunk, their_table_RVD):
            targets_RM, theirs = chunk
            if their_table_RVD is not None:
                their_logits_RMV = self.logits(theirs, their_table_RVD)
                theirs = self.top(their_logits_RMV) if self.flags.top_k else None
            if theirs is not None:
                logits_RMK, ids_RMK = theirs
                their_logits_RMV = _spread(logits_RMK, ids_RMK, product_RMV.shape[-1])
            apart_RM = divergence(
                self.flags.divergence,
                their_logits_RMV / self.flags.tau,
                logits_of(product_RMV, config) / self.flags.tau,
                config.vocab_size,
            )
            apart_RM = jnp.where(targets_RM < 0, 0, apart_RM)
            nats_RM = cross_entropies(config, product_RMV, targets_RM)
            alpha = self.flags.alpha
            total_RM = (1 - alpha) * nats_RM + alpha * self.flags.tau**2 * apart_RM
            return total_RM, nats_RM, apart_RM

        x_CRMD = in_chunks(x_BTD, config, "act_embed")
        others = in_chunks(targets, config), theirs
        sums: Any = _sums(of_chunk, x_CRMD, table_RVD, others, their_table_RVD)
        total, nats, apart = (sums_R.sum() for sums_R in sums)
        count = (targets >= 0).sum().astype(jnp.float32)
        aux = {"loss": (nats, count), "divergence": (apart, count)}
        total_and_costs = model.add_costs(total, metrics)
        model.update_buffers(Objective(total_and_costs, count, aux, metrics))
        return total_and_costs, count, aux

    def teacher_outputs(self, frozen: Tree, *rows: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """The teacher's output, [B, T, D], and its table, under the student's rules."""
        with self.teacher.trace():
            teacher = self.teacher.model.merge(jax.lax.stop_gradient(frozen))
            # Rows come sharded for the student.
            rows = tuple(x if x is None else constrain(x, "batch", "seq") for x in rows)
            x_BTD, *_ = outputs(teacher, *rows)
        return constrain(x_BTD, "batch", "seq", "act_embed"), teacher.tables()[-1]

    def logits(self, x_RMD: jax.Array, table_RVD: jax.Array) -> jax.Array:
        """The teacher's logits of a chunk."""
        return logits_of(table_product(x_RMD, table_RVD), self.teacher.config)

    def top(self, logits_RMV: jax.Array) -> list[jax.Array]:
        """The largest logits of each position and their tokens, [R, M, K]."""
        axes = (SHARDS, None, None)
        largest = lambda x: [*jax.lax.top_k(x, self.flags.top_k)]  # noqa: E731
        return per_device(largest, [logits_RMV], [axes], [axes, axes])

    def top_logits(self, frozen: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        """The teacher's `top` of a batch, [B, T, K], to be stored."""
        rows = (batch["tokens"], batch["targets"], batch.get("segment_ids"))
        x_BTD, table_RVD = self.teacher_outputs(frozen, *rows)
        chunk = lambda _, x_RMD: (None, self.top(self.logits(x_RMD, table_RVD)))  # noqa: E731
        x_CRMD = in_chunks(x_BTD, self.teacher.config, "act_embed")
        _, (logits_CRMK, ids_CRMK) = jax.lax.scan(chunk, None, x_CRMD)
        B, T = x_BTD.shape[:2]
        return from_chunks(logits_CRMK, (B, T), None), from_chunks(ids_CRMK, (B, T), None)


def _spread(logits_RMK: jax.Array, ids_RMK: jax.Array, words: int) -> jax.Array:
    """Logits of all tokens, [R, M, V]: -inf for those that are not among K."""

    def put(logits_RMV, one):
        logits_RM, ids_RM = one
        is_token = jnp.arange(words)[None, None] == ids_RM[..., None]
        return jnp.where(is_token, logits_RM[..., None], logits_RMV), None

    nothing = constrain(jnp.full((*ids_RMK.shape[:2], words), -jnp.inf), SHARDS, None, "vocab")
    one_by_one = (jnp.moveaxis(x, -1, 0) for x in (logits_RMK, ids_RMK))
    return jax.lax.scan(put, nothing, tuple(one_by_one))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(of_chunk, x_CRMD, table_RVD, others_CRM, unchunked):
    """Sums over each shard's positions of the three results of `of_chunk`, float32 [R] each.

    Like the sums of vocabulary.cross_entropy: when the first one is differentiated, the forward pass
    computes each chunk's gradients, and logits are neither kept nor computed twice.
    """

    def chunk(sums, x_and_others):
        x_RMD, others_RM = x_and_others
        new = of_chunk(table_product(x_RMD, table_RVD), others_RM, unchunked)
        return _add(sums, new), None

    return jax.lax.scan(chunk, _zeros(table_RVD), (x_CRMD, others_CRM))[0]


def _sums_and_gradients(of_chunk, x_CRMD, table_RVD, others_CRM, unchunked):
    """`_sums`, and the first one's gradients of x and of the table for a cotangent of 1."""

    def chunk(carry, x_and_others):
        sums, table_grad_RVD = carry
        x_RMD, others_RM = x_and_others

        def first(product_RMV):
            new = of_chunk(product_RMV, others_RM, unchunked)
            return new[0].sum(axis=1), new

        total_R, pull, new = jax.vjp(first, table_product(x_RMD, table_RVD), has_aux=True)
        (grad_RMV,) = pull(jnp.ones_like(total_R))
        x_grad_RMD, grad_RVD = product_gradients(grad_RMV, x_RMD, table_RVD)
        return (_add(sums, new), table_grad_RVD + grad_RVD), x_grad_RMD

    # In float32: there may be hundreds of chunks, and a sum in bfloat16 soon no longer changes.
    carry = _zeros(table_RVD), jnp.zeros_like(table_RVD, dtype=jnp.float32)
    (sums, table_grad_RVD), x_grad_CRMD = jax.lax.scan(chunk, carry, (x_CRMD, others_CRM))
    return sums, (x_grad_CRMD, table_grad_RVD.astype(table_RVD.dtype))


def _scaled_gradients(of_chunk, gradients, cotangents):
    """The backward pass of `_sums`: scales the gradients by the first sum's cotangent."""

    def scaled(x, factor):  # in float32: a rounded factor would change all gradients alike
        return (factor * x.astype(jnp.float32)).astype(x.dtype)

    x_grad_CRMD, table_grad_RVD = gradients
    grad_R = cotangents[0]
    x_grad_CRMD = scaled(x_grad_CRMD, grad_R[None, :, None, None])
    return x_grad_CRMD, scaled(table_grad_RVD, grad_R[:, None, None]), None, None


_sums.defvjp(_sums_and_gradients, _scaled_gradients)


def _zeros(table_RVD):
    return (constrain(jnp.zeros(len(table_RVD)), SHARDS),) * 3


def _add(sums, new):
    return tuple(a + b.sum(axis=1) for a, b in zip(sums, new, strict=True))


def divergence(kind: str, teacher_RMV, student_RMV, vocab_size: int) -> jax.Array:
    """The divergence of softmax(teacher) and softmax(student) at each position, in nats, [R, M].

    Args:
      vocab_size: logits from there on are padding.
    """
    is_token_V = jnp.arange(teacher_RMV.shape[-1])[None, None] < vocab_size

    def log_softmax(logits_RMV):
        log_p_RMV = logits_RMV - jax.nn.logsumexp(logits_RMV, axis=-1, keepdims=True)
        return jnp.where(is_token_V, log_p_RMV, 0)

    def kl(log_p_RMV, log_q_RMV):
        p_RMV = jnp.where(is_token_V, jnp.exp(log_p_RMV), 0)
        # Where p is 0, its logarithm may be -inf.
        return jnp.where(p_RMV > 0, p_RMV * (log_p_RMV - log_q_RMV), 0).sum(axis=-1)

    teacher_RMV, student_RMV = log_softmax(teacher_RMV), log_softmax(student_RMV)
    if kind == FORWARD:
        return kl(teacher_RMV, student_RMV)
    if kind == REVERSE:
        return kl(student_RMV, teacher_RMV)
    mixture_RMV = jnp.logaddexp(teacher_RMV, student_RMV) - jnp.log(2.0)
    return (kl(teacher_RMV, mixture_RMV) + kl(student_RMV, mixture_RMV)) / 2


def check_vocabularies(teacher: Any, student: Any, flags: Distillation) -> None:
    """Raises UserError if two Configs have other numbers of tokens, or fewer than --top_k."""
    if teacher.vocab_size != student.vocab_size:
        raise UserError(
            f"--teacher={flags.teacher} has {teacher.vocab_size} tokens, and the student "
            f"{student.vocab_size}; use a teacher and a student of one vocabulary"
        )
    if flags.top_k > teacher.vocab_size:
        raise UserError(
            f"--top_k={flags.top_k} is more than the {teacher.vocab_size} tokens of the vocabulary; use fewer"
        )
