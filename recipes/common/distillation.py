"""Distillation: a student learns the next-token distribution of a frozen teacher.

    loss = (1 − α) · cross entropy + α · τ² · D(softmax(teacher / τ), softmax(student / τ))

D is the forward or reverse Kullback-Leibler divergence, or Jensen-Shannon's (Hinton et al. 2015; Gu et al.
2024; Agarwal et al. 2024). Teacher and student compute under rules of their own. Their logits exist
for one chunk of positions at a time, split over the vocabulary, as in the loss of any decoder.

Shapes: B batch, T positions, D embed, V vocab, R shards of B and T, M positions of one shard, C chunks.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from recipes.common.runtime import UserError, flag
from recipes.common.sharding import Layout, Tree
from zoo.log_probs import outputs
from zoo.sharding import constrain
from zoo.vocabulary import (
    SHARDS,
    Objective,
    cross_entropies,
    in_chunks,
    logits_of,
    product_gradients,
    table_product,
)  # fmt: skip

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
        frozen: Tree,
    ) -> tuple[jax.Array, jax.Array, Tree]:
        """
        Args:
          tokens, targets, segment_ids: [B, T], as in Decoder.loss.
          frozen: the teacher's variables.
        """
        with self.teacher.trace():
            teacher = self.teacher.model.merge(jax.lax.stop_gradient(frozen))
            rows = (tokens, targets, segment_ids)  # which come sharded for the student
            rows = [x if x is None else constrain(x, "batch", "seq") for x in rows]
            theirs_BTD, *_ = outputs(teacher, *rows)
        theirs_BTD = constrain(theirs_BTD, "batch", "seq", "act_embed")
        their_table_RVD = teacher.tables()[-1]  # under the student's rules, like its own
        x_BTD, table_RVD, metrics = outputs(model, tokens, targets, segment_ids)
        targets = constrain(targets, "batch", "seq")
        config, their_config = model.config, self.teacher.config

        def of_chunk(product_RMV, chunk, their_table_RVD):
            targets_RM, theirs_RMD = chunk
            their_logits_RMV = logits_of(table_product(theirs_RMD, their_table_RVD), their_config)
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

        x_CRMD, theirs_CRMD = (in_chunks(x, config, "act_embed") for x in (x_BTD, theirs_BTD))
        others = in_chunks(targets, config), theirs_CRMD
        sums: Any = _sums(of_chunk, x_CRMD, table_RVD, others, their_table_RVD)
        total, nats, apart = (sums_R.sum() for sums_R in sums)
        count = (targets >= 0).sum().astype(jnp.float32)
        aux = {"loss": (nats, count), "divergence": (apart, count)}
        total_and_costs = model.add_costs(total, metrics)
        model.update_buffers(Objective(total_and_costs, count, aux, metrics))
        return total_and_costs, count, aux


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(of_chunk, x_CRMD, table_RVD, others_CRM, whole):
    """Sums over each shard's positions of the three results of `of_chunk`, float32 [R] each.

    Like the sums of vocabulary.cross_entropy: when the first one is differentiated, the forward pass
    computes each chunk's gradients, and logits are neither kept nor computed twice.
    """

    def chunk(sums, x_and_others):
        x_RMD, others_RM = x_and_others
        new = of_chunk(table_product(x_RMD, table_RVD), others_RM, whole)
        return _add(sums, new), None

    return jax.lax.scan(chunk, _zeros(table_RVD), (x_CRMD, others_CRM))[0]


def _sums_and_gradients(of_chunk, x_CRMD, table_RVD, others_CRM, whole):
    """`_sums`, and the first one's gradients of x and of the table for a cotangent of 1."""

    def chunk(carry, x_and_others):
        sums, table_grad_RVD = carry
        x_RMD, others_RM = x_and_others

        def first(product_RMV):
            new = of_chunk(product_RMV, others_RM, whole)
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
        return (p_RMV * (log_p_RMV - log_q_RMV)).sum(axis=-1)

    teacher_RMV, student_RMV = log_softmax(teacher_RMV), log_softmax(student_RMV)
    if kind == FORWARD:
        return kl(teacher_RMV, student_RMV)
    if kind == REVERSE:
        return kl(student_RMV, teacher_RMV)
    mixture_RMV = jnp.logaddexp(teacher_RMV, student_RMV) - jnp.log(2.0)
    return (kl(teacher_RMV, mixture_RMV) + kl(student_RMV, mixture_RMV)) / 2


def check_vocabularies(teacher: Any, student: Any, named: str) -> None:
    """Raises UserError if two Configs have other numbers of tokens."""
    if teacher.vocab_size != student.vocab_size:
        raise UserError(
            f"--teacher={named} has {teacher.vocab_size} tokens, and the student {student.vocab_size}; use a "
            "teacher and a student of one vocabulary"
        )
