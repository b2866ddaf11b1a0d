"""Distillation: a student learns the next-token distribution of a frozen teacher.

    loss = (1 − α) · cross entropy + α · τ² · D(softmax(teacher / τ), softmax(student / τ))

D is the forward or reverse Kullback-Leibler divergence, or Jensen-Shannon's (Hinton et al. 2015; Gu et al.
2024; Agarwal et al. 2024). Teacher and student compute under rules of their own. Their logits exist
for one chunk of positions at a time, split over the vocabulary, as in the loss of any decoder.

Shapes: B batch, T positions, D embed, V vocab, R shards of B and T, M positions of one shard, C chunks.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from recipes.common.runtime import UserError, flag
from recipes.common.sharding import Layout, Tree
from zoo.sharding import constrain
from zoo.vocabulary import Objective, chunked_sums, chunks, cross_entropies, logits_of, product

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
            theirs_BTD, *_ = teacher.outputs(*rows)
        theirs_BTD = constrain(theirs_BTD, "batch", "seq", "act_embed")
        their_table_RVD = teacher.tables()[-1]  # under the student's rules, like its own
        x_BTD, table_RVD, metrics = model.outputs(tokens, targets, segment_ids)
        targets = constrain(targets, "batch", "seq")
        config, their_config = model.config, self.teacher.config

        def of_chunk(product_RMV, chunk, table_RVD):
            targets_RM, theirs_RMD = chunk
            their_logits_RMV = logits_of(product(theirs_RMD, table_RVD), their_config)
            logits_RMV = logits_of(product_RMV, config)
            apart_RM = divergence(
                self.flags.divergence,
                their_logits_RMV / self.flags.tau,
                logits_RMV / self.flags.tau,
                config.vocab_size,
            )
            apart_RM = jnp.where(targets_RM < 0, 0, apart_RM)
            nats_RM = cross_entropies(product_RMV, targets_RM, config)
            alpha = self.flags.alpha
            total_RM = (1 - alpha) * nats_RM + alpha * self.flags.tau**2 * apart_RM
            return total_RM, nats_RM, apart_RM

        others = chunks(targets, config), chunks(theirs_BTD, config, "act_embed")
        x_CRMD = chunks(x_BTD, config, "act_embed")
        total, nats, apart = chunked_sums(of_chunk, 3, x_CRMD, table_RVD, others, their_table_RVD)
        count = (targets >= 0).sum().astype(jnp.float32)
        aux = {"loss": (nats, count), "divergence": (apart, count)}
        total_and_costs = model.add_costs(total, metrics)
        return model.results(Objective(total_and_costs, count, aux, metrics))


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
