"""How far a generator's log-probabilities are from training's: the seam of reinforcement learning.

The generator samples answers and keeps their log-probabilities; training's forward pass computes them
again from the same weights. In exact arithmetic they are equal. Rounding makes them differ, and so do
experts that a rounded score chooses otherwise.

Shapes: B rows, T positions, N new tokens, L layers, J experts per position.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from recipes.common import checkpoint, entries
from recipes.common.checkpoint import WeightSource
from recipes.common.generation.rollouts import Sampler
from recipes.common.runtime import UserError, describe, make_mesh
from recipes.common.sharding import Layout, Tree
from recipes.instruments.prove.layouts import make_meshes
from zoo.core.decoder import Decoder
from zoo.experts import mixture
from zoo.options import cache as zoo_cache
from zoo.options.log_probs import log_probs_and_metrics

# Dtype of activations → the largest mean difference, in nats a token, that rounding explains.
BOUNDS = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
OUTSIDE = 0.1  # how far a ratio of probabilities is from 1 to be counted
HEAD = ("training", "generating", "mean", "largest", "sd of a row", "outside", "other experts")
WIDTHS = (22, 22, 9, 9, 12, 9, 13)


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """Differences in nats between a layout's log-probabilities in training and those of a generator."""

    training: str  # "strategy on mesh"
    generating: str
    mean: float  # absolute, of a token
    largest: float
    row_sd: float  # standard deviation of the sum over an answer
    outside: float  # share of tokens whose ratio of probabilities is outside [0.9, 1.1]
    tokens: int
    other_experts: float | None  # share of choices of an expert that differ; None: no experts

    def line(self) -> str:
        routes = "-" if self.other_experts is None else f"{self.other_experts:.2%}"
        numbers = f"{self.mean:.2e}", f"{self.largest:.2e}", f"{self.row_sd:.2e}"
        return _columns((self.training, self.generating, *numbers, f"{self.outside:.2%}", routes))


def _columns(cells: Sequence[str]) -> str:
    return "  ".join(c.ljust(w) for c, w in zip(cells, WIDTHS, strict=True)).rstrip()


def head() -> str:
    return _columns(HEAD)


def verdict(mismatches: Sequence[Mismatch], dtype: str) -> tuple[bool, str]:
    """Whether rounding explains the largest mean difference, and a sentence that says so."""
    worst = max(x.mean for x in mismatches)
    holds = worst <= BOUNDS[dtype]
    explains = "explains" if holds else "does not explain"
    return holds, (
        f"Nats over {mismatches[0].tokens:,} sampled tokens. Rounding in {dtype} {explains} a mean "
        f"difference of {worst:.1e}."
    )


def measure(
    name: str,
    meshes: Iterable[str | Mesh] = (),
    *,
    dtype: str = "float32",
    rows: int = 8,
    new_tokens: int = 128,
    verify: bool = True,
) -> list[Mismatch]:
    """Compares every pair of meshes, one for training and one for generating.

    Args:
      name: a run, checkpoint or published name, or hf:DIR.
      meshes: each with the default strategy; none: all devices along `data`.
      rows: answers, sampled at temperature 1 from the beginning of a document.
      new_tokens: of an answer.

    Raises UserError if the checkpoint generates no text or fits a mesh badly.
    """
    made = make_meshes(meshes) or [make_mesh("")]
    source = checkpoint.find(name, "--generate", verify)
    entry = source.metadata["entry"]
    if not issubclass(entries.model(entry), Decoder) or not checkpoint.config_of(source).causal:
        raise UserError(f"--generate={name} is a {entry!r} model; use a language model")
    tokenizer = checkpoint.tokenizer_for("", source)
    most = checkpoint.context(source) - len(tokenizer.prompt(""))
    if new_tokens > most:
        raise UserError(
            f"--seq_len={new_tokens} new tokens exceed the model's context; use at most --seq_len={most}"
        )
    layouts = [_layout(source, mesh, dtype, rows) for mesh in made]
    wanted = Wanted(
        begin=tokenizer.prompt(""),
        end=tokenizer.end,
        vocabulary=tokenizer.vocabulary,
        rows=rows,
        new_tokens=new_tokens,
    )
    return compare_pairs(source, layouts, wanted)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The answers to sample."""

    begin: np.ndarray  # the tokens that each of them follows
    end: tuple[int, ...]  # as in Sampler
    vocabulary: int
    rows: int
    new_tokens: int


def compare_pairs(
    source: WeightSource, layouts: Sequence[Layout], wanted: Wanted
) -> list[Mismatch]:
    """Compares each layout in training with each in generation."""
    by_generator = [_generate(source, layout, wanted) for layout in layouts]
    return [
        _compare(training, _train(source, training, generated), generating, generated)
        for training in layouts
        for generating, generated in zip(layouts, by_generator, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Answered:
    """Rows of a prompt and an answer, and what a layout computes of them, on the host."""

    tokens_BT: np.ndarray
    targets_BT: np.ndarray  # int32; -1 where there is none
    log_probs_BT: np.ndarray  # of the targets
    experts_BTLJ: np.ndarray | None  # None: the model has none


def _layout(source: WeightSource, mesh: Mesh, dtype: str, rows: int) -> Layout:
    compute: dict[str, Any] = {"dtype": dtype}
    if "capacity" in source.metadata["config"]:
        compute["capacity"] = None  # generation drops no choice of an expert
    layout = checkpoint.layout_of(source, mesh, **compute)
    layout.check_whole("generation")
    if rows % layout.batch_shards:
        raise UserError(
            f"--batch_size={rows} rows are not divisible by the {layout.batch_shards} parts of a batch "
            f"on --meshes={describe(mesh.shape)}; use a multiple"
        )
    return layout


def _generate(source: WeightSource, layout: Layout, wanted: Wanted) -> Answered:
    variables = checkpoint.restore_variables(source, layout)
    sampler = Sampler(layout, wanted.end, wanted.vocabulary, wanted.new_tokens)
    rows, length = wanted.rows, len(wanted.begin)
    sampler.check(length)
    answers = sampler(variables, [wanted.begin] * rows, np.arange(rows)[:, None])
    last = length - 1  # the position that predicts the first new token
    padding = -(last + wanted.new_tokens) % layout.mesh.size  # positions may be split
    begin, end = np.tile(wanted.begin, (rows, 1)), np.zeros((rows, padding))
    tokens_BT = np.concatenate([begin, answers.tokens_BN[:, :-1], end], axis=1)
    around = (0, 0), (last, padding)
    targets_BT = np.pad(answers.tokens_BN, around, constant_values=-1)
    tokens_BT = np.maximum(tokens_BT, 0).astype(np.int32)
    experts = _experts_of_decoding(layout, variables, tokens_BT)
    return Answered(tokens_BT, targets_BT, np.pad(answers.log_probs_BN, around), experts)


def _train(source: WeightSource, layout: Layout, answered: Answered) -> Answered:
    """The same rows by training's forward pass."""
    variables = checkpoint.restore_variables(source, layout)
    arrays = answered.tokens_BT, answered.targets_BT
    placed = jax.device_put(arrays, layout.batch_shardings(arrays))

    def forward(variables, arrays):
        model = layout.model.merge(variables)
        log_probs_BT, metrics = log_probs_and_metrics(model, *arrays)
        experts = metrics.get("chosen")
        if experts is not None:
            experts = model.in_order(jnp.moveaxis(experts, 0, 2), None, None)
        return log_probs_BT, experts

    with _chosen_experts():
        program = layout.compile(forward, variables, placed, out_shardings=layout.replicated)
    log_probs_BT, experts = jax.device_get(program(variables, placed))
    return dataclasses.replace(answered, log_probs_BT=log_probs_BT, experts_BTLJ=experts)


def _experts_of_decoding(layout: Layout, variables: Tree, tokens_BT: np.ndarray) -> Any:
    """The experts that the generator's program chooses at each position, [B, T, L, J]; None: it has none."""
    if "num_experts" not in vars(layout.config):
        return None
    B, T = tokens_BT.shape
    slots = T + -T % layout.seq_shards

    def decode_all(variables, tokens_BT):
        model = layout.model.merge(variables)
        first_B1, others_TB = tokens_BT[:, :1], tokens_BT.T[1:]
        _, cache = zoo_cache.prefill(model, first_B1, jnp.ones(B, jnp.int32), slots)

        def step(cache, tokens_B):
            _, cache, metrics = zoo_cache.decode_and_measure(model, tokens_B, cache)
            return cache, metrics["chosen"]

        return jax.lax.scan(step, cache, others_TB)[1]

    placed = jax.device_put(tokens_BT, layout.replicated)
    with _chosen_experts():
        program = layout.compile(decode_all, variables, placed, out_shardings=layout.replicated)
    experts_TLB1J = jax.device_get(program(variables, placed))
    experts_BTLJ = experts_TLB1J[:, :, :, 0].transpose(2, 0, 1, 3)
    return np.pad(experts_BTLJ, ((0, 0), (1, 0), (0, 0), (0, 0)), constant_values=-1)


@contextlib.contextmanager
def _chosen_experts() -> Iterator[None]:
    """Programs traced in this context have the chosen experts among the metrics of their layers."""
    measure_choice = mixture.measure

    def with_experts(config, choice, *arguments):
        return measure_choice(config, choice, *arguments) | {"chosen": choice.expert_BTJ}

    with mock.patch.object(mixture, "measure", with_experts):
        yield


def _compare(
    training: Layout, trained: Answered, generating: Layout, generated: Answered
) -> Mismatch:
    is_target_BT = generated.targets_BT >= 0
    difference_BT = np.where(is_target_BT, trained.log_probs_BT - generated.log_probs_BT, 0)
    difference_M = abs(difference_BT[is_target_BT])
    other_experts = None
    if trained.experts_BTLJ is not None and generated.experts_BTLJ is not None:
        ours, theirs = (np.sort(x[:, 1:]) for x in (trained.experts_BTLJ, generated.experts_BTLJ))
        is_other = (ours[..., :, None] != theirs[..., None, :]).all(axis=-1)
        other_experts = float(is_other[is_target_BT[:, 1:]].mean())
    ratio_M = np.exp(difference_BT[is_target_BT])
    return Mismatch(
        training=_name(training),
        generating=_name(generating),
        mean=float(difference_M.mean()),
        largest=float(difference_M.max()),
        row_sd=float(difference_BT.sum(axis=1).std()),
        outside=float((abs(ratio_M - 1) > OUTSIDE).mean()),
        tokens=len(difference_M),
        other_experts=other_experts,
    )


def _name(layout: Layout) -> str:
    return f"{layout.strategy} on {describe(layout.mesh.shape)}"
