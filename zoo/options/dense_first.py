"""First layers of another kind than the others, such as with an MLP in place of experts.

A model that may have them takes these functions as methods: its Config has `dense_layers`, their
number, and its Layer may be built with dense=True. They are a stack of their own, `dense`. In a
pipeline, they are part of the first stage.
"""

import functools
from typing import Any

from flax import nnx

from ..core.attention import AttentionInputs
from ..core.stack import stack
from .periods import scan_kinds

DENSE_STACK = "dense_stack"  # the logical axis of L in front of their weights


def make_layers(self, layer, rngs: nnx.Rngs) -> None:
    """`Decoder.make_layers`."""
    config = self.config
    first = config.dense_layers
    if first:
        make_dense = functools.partial(layer, config, dense=True)
        self.dense = stack(make_dense, first, rngs, axis=DENSE_STACK)
    make_layer = functools.partial(layer, config)
    self.layers = stack(make_layer, config.num_layers - first, rngs)


def begin(self, tables, tokens_BT, inputs: AttentionInputs, **more) -> tuple[Any, Any]:
    """`Decoder.begin`: the output of the first layers, and what a cache keeps of them, or None."""
    x_BTD = self.embed_tokens(tables, tokens_BT, inputs, **more)
    if not self.config.dense_layers:
        return x_BTD, None
    x_BTD, kept, _ = run_stack(self, self.dense, x_BTD, inputs, first=0)
    return x_BTD, kept


def run_layers(self, x_BTD, inputs: AttentionInputs):
    """`Decoder.run_layers`: the other layers."""
    return run_stack(self, self.layers, x_BTD, inputs, first=self.config.dense_layers)


def run_stack(model, layers, x_BTD, inputs: AttentionInputs, first: int):
    """Runs layers of a stack, the first of which has the number `first`."""
    indexed = layers, inputs.of_layers(layers, first)
    x_BTD, (kept, metrics) = scan_kinds(model, indexed, x_BTD, inputs, first)
    return x_BTD, kept, metrics
