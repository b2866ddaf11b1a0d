"""Evaluation on all held-out examples, during training and at its end."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from data.batches import Dataset, held_out_batches
from recipes.common.sharding import Layout, Tree
from recipes.common.train.beside import beside
from recipes.common.train.feed import to_devices

Extra = Callable[[Any, Tree], Tree]  # (model, batch) → name → sum over the batch


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Evaluates training states with one program, compiled at its first use, or by `begin` before.

    It only reads the state: a run takes the same steps with and without it.
    """

    layout: Layout
    data: Dataset
    extra: Extra | None = None
    _compiled: dict[str, Callable[[], jax.stages.Compiled]] = dataclasses.field(
        default_factory=dict
    )

    def begin(self, abstract: Tree) -> None:
        """Begins to compile the program, beside the main thread.

        Args:
          abstract: the states' shapes, dtypes and shardings.
        """
        layout = self.layout
        variables = self._variables(abstract)
        batch = layout.abstract_batch(self.data.filler)
        self._compiled["program"] = beside(layout.mesh, lambda: self._compile(variables, batch))

    def __call__(self, state: Tree) -> Tree:
        """Returns the loss's metrics over all held-out examples, name → (sum, count) in float64.

        The sums of `extra` are among them.

        Args:
          state: a training state or the model's variables, with the same dtypes in every call.
        """
        variables, totals = self._variables(state), None
        for rows in held_out_batches(self.data, self.layout.batch_size, self.layout.process_rows):
            batch = to_devices(rows, self.layout)
            if "program" not in self._compiled:
                compile_once = functools.partial(self._compile, variables, batch)
                self._compiled["program"] = functools.cache(compile_once)
            sums = self._compiled["program"]()(variables, batch)
            values = jax.tree.map(np.float64, jax.device_get(sums))
            totals = values if totals is None else jax.tree.map(np.add, totals, values)
        return totals

    def _variables(self, state: Tree) -> Tree:
        kinds = self.layout.model.shapes.keys() | state.keys() & {"frozen"}
        return {kind: state[kind] for kind in kinds}

    def _compile(self, variables: Tree, batch: Tree) -> jax.stages.Compiled:
        layout = self.layout

        def sums(variables: Tree, batch: Tree) -> Tree:
            model = layout.model.merge(variables)
            frozen = {kind: variables[kind] for kind in variables.keys() & {"frozen"}}
            _, _, aux = layout.model.loss(model, **batch, **frozen)
            return aux | (self.extra(model, batch) if self.extra else {})

        return layout.compile(sums, variables, batch, out_shardings=layout.replicated)

    def metrics(self, totals: Tree) -> dict[str, float]:
        """The metrics to log: means over the examples and, for text, how well it is compressed.

        loss: nats per target. perplexity: exp(loss). bits_per_byte: bits per byte of the targets' text,
        comparable between tokenizers. targets: their number.
        """
        # Of a kind that no example has, there is no mean.
        pairs = {name: pair for name, pair in totals.items() if isinstance(pair, tuple) and pair[1]}
        means = {name: float(total / count) for name, (total, count) in pairs.items()}
        if self.data.held_out_bytes is None:
            return means
        nats, targets = map(float, totals["loss"])
        return means | {
            "targets": targets,
            "perplexity": math.exp(min(nats / targets, 700)),
            "bits_per_byte": nats / math.log(2) / self.data.held_out_bytes,
        }


def in_words(totals: Tree, size: int | None) -> str:
    """Describes the loss on text. Bits per byte compare models with different tokenizers.

    Args:
      totals: an Evaluation's.
      size: bytes of the targets' text; None: the targets are masked tokens.
    """
    nats, targets = map(float, totals["loss"])
    if size is None:
        right = (
            f", {float(totals['accuracy'][0]) / targets:.2%} right" if "accuracy" in totals else ""
        )
        return f"loss {nats / targets:.4f} nats/token{right}, over {targets:,.0f} masked tokens"
    loss, bits = nats / targets, f"{nats / math.log(2) / size:.4f} bits/byte"
    if targets == size:  # a token is a byte
        return f"loss {loss:.4f} nats/byte, {bits}, over {targets:,.0f} bytes"
    return (
        f"loss {loss:.4f} nats/token, perplexity {math.exp(min(loss, 700)):.2f}, {bits}, "
        f"over {targets:,.0f} tokens, {size:,} bytes"
    )
