"""Decoder: what all decoder-only language models share, from tokens to logits and the loss.

A model's file has its Config, its Layer and what differs; this one is read once. Methods of a model,
and of its Config (config.Compute), are where options replace a part.

Shapes: B batch, T positions, D embed, V vocab, L layers, R shards of B and T.
"""

import functools
from typing import Any

import jax
from flax import nnx

from .attention import AttentionInputs, make_inputs
from .layers import RMSNorm, gather_positions
from .sharding import AxisNames
from .stack import fit_rules, scan_layers, stack
from .strategies import DECODER
from .vocabulary import Batch, Objective, cross_entropy, look_up, unembed, vocabulary


class Decoder(nnx.Module):
    """Tokens in, next-token logits out.

    A model has `config`, whose class inherits config.Compute, `embed`, `layers`, `final_norm` and
    `unembed`, which is None if `embed` unembeds too. Its Layer is a module built from (config, *,
    rngs), whose call is

        layer(x_BTD, inputs, kind, cache_index) → (x_BTD, (keys, values), metrics)

    inputs: AttentionInputs; kind: the layer's AttentionType; cache_index: the layer's number in a
    cache, or None. metrics: name → sum over the positions in inputs.counted_BT.
    """

    config: Any
    layers: Any
    axes: AxisNames = DECODER

    def __init__(self, config: Any, layer, final_norm=None, *, rngs: nnx.Rngs):
        self.config = config
        self.make_tables(config, rngs)
        self.make_layers(layer, rngs)
        self.final_norm = final_norm or RMSNorm(config.embed, config.norm_eps)
        self.unembed = None if config.tie_embeddings else vocabulary(config, rngs=rngs)

    def make_tables(self, config, rngs: nnx.Rngs) -> None:
        """Makes what embeds tokens."""
        self.embed = vocabulary(config, rngs=rngs)

    def make_layers(self, layer, rngs: nnx.Rngs) -> None:
        """Makes the layers. Every parameter of theirs starts with dim L, logical axis `layers`."""
        make_layer = functools.partial(layer, self.config)
        self.layers = stack(make_layer, self.config.num_layers, rngs)

    # ---- what a user calls

    @fit_rules
    def __call__(self, tokens_BT, segment_ids_BT=None) -> jax.Array:
        """Returns logits [B, T, V] in float32; position t predicts token t + 1.

        Args:
          tokens_BT: int, below vocab_size. On a mesh, B must be divisible by the axes of `batch`.
          segment_ids_BT: int; positions attend only within their own segment. None: one per row.
        """
        batch = self.on_devices(Batch(tokens_BT, None, segment_ids_BT))
        tables = self.tables()
        x_BTD, _ = self.run_batch(tables, batch)
        # Embeddings instead of logits: V may be uneven.
        x_BTD = self.in_order(gather_positions(self.final_norm(x_BTD)), "act_embed")
        return unembed(x_BTD, tables[-1], self.config, self.bias_copies())

    @fit_rules
    def loss(self, tokens, targets, segment_ids=None):
        """The training objective of a batch: the cross entropy in nats, plus `costs`.

        A model with buffers also updates them. tokens and segment_ids are those of `__call__`.

        Args:
          targets: [B, T], int; targets below 0 are padding and don't count.

        Returns: (sum over targets, number of targets, aux), float32 scalars; aux maps a name to
          (sum, count): loss: the cross entropy alone; and means over the layers of their metrics.
        """
        objective = self.objective(Batch(tokens, targets, segment_ids))
        self.update_buffers(objective)
        means = self.layer_means(objective.metrics, objective.count)
        return objective.total, objective.count, objective.aux | means

    # ---- from tokens to the output of the layers

    def on_devices(self, batch: Batch) -> Batch:
        """A batch whose positions have the order that they have on the devices."""
        layout = self.config.row_layout(batch.tokens.shape[1])
        return Batch(*(layout.reorder(x_BT) for x_BT in batch))

    def in_order(self, x_BT: jax.Array, *axes: str) -> jax.Array:
        """[B, T, ...] back in the order of a row; axes: the logical axes of the dims after T."""
        return self.config.row_layout(x_BT.shape[1]).reorder(x_BT, *axes, back=True)

    def tables(self) -> list[jax.Array]:
        """Copies of the tables that embed tokens (the first) and unembed the output (the last)."""
        tables = (self.embed,) if self.unembed is None else (self.embed, self.unembed)
        return [self.config.use_table(table) for table in tables]

    def bias_copies(self) -> jax.Array | None:
        """Copies of the bias of logits, [R, V] in float32; None without one."""
        return None

    def run_batch(self, tables, batch: Batch):
        """Runs all layers on a batch from `on_devices`: (x_BTD, metrics of the stacked layers)."""
        inputs = self.inputs_of(batch)
        x_BTD, _ = self.begin(tables, batch.tokens, inputs)
        return self.config.run_layers(self, x_BTD, inputs, batch)

    def inputs_of(self, batch: Batch, **more) -> AttentionInputs:
        """What the batch's positions attend to; `more`: see attention.make_inputs."""
        return make_inputs(self.config, batch.tokens, batch.segment_ids, batch.targets, **more)

    def begin(self, tables, tokens_BT, inputs: AttentionInputs, **more) -> tuple[Any, Any]:
        """The input of the stacked layers, and what a cache keeps of layers before them, or None.

        `more`: see `embed_tokens`.
        """
        return self.embed_tokens(tables, tokens_BT, inputs, **more), None

    def embed_tokens(self, tables, tokens_BT, inputs: AttentionInputs) -> Any:
        """The embeddings of tokens, [B, T, D]."""
        return look_up(tables[0], tokens_BT)

    def run_layers(self, x_BTD, inputs: AttentionInputs) -> tuple[jax.Array, Any, Any]:
        """Runs the stacked layers: (x_BTD, what a cache keeps of them, their metrics)."""
        x_BTD, (kept, metrics) = self.scan(
            (self.layers, inputs.of_layers(self.layers)), x_BTD, inputs
        )
        return x_BTD, kept, metrics

    def scan(self, layers, x_BTD, inputs: AttentionInputs) -> tuple[Any, Any]:
        """Runs layers of one kind, given with their `cache_index`; see stack.scan_layers."""
        (kind,) = self.config.kinds
        run_layer = functools.partial(self.run_layer, inputs, kind=kind)
        return scan_layers(run_layer, x_BTD, layers, self.config.remat_policy, self.config.unroll)

    def run_layer(self, inputs: AttentionInputs, x_BTD, layer_and_index, kind):
        """Runs one layer: (x_BTD, (what a cache keeps of it, its metrics))."""
        layer, cache_index = layer_and_index
        # Inside remat, so that the backward pass gathers again.
        layer = self.config.use_layer(layer, self.axes)
        x_BTD, kept, metrics = layer(x_BTD, inputs, kind, cache_index)
        return x_BTD, (kept if inputs.generates else None, metrics)

    # ---- from there to the objective

    def objective(self, batch: Batch) -> Objective:
        """The training objective."""
        return self.config.objective(self, batch)

    def cross_entropy(self, batch: Batch) -> Objective:
        """The objective of next tokens: their cross entropies, plus `costs`."""
        batch = self.on_devices(batch)
        tables = self.tables()
        x_BTD, metrics = self.run_batch(tables, batch)
        total, count = self.finish(tables, x_BTD, batch.targets)
        total_and_costs = self.add_costs(total, metrics)
        return Objective(total_and_costs, count, {"loss": (total, count)}, metrics)

    def finish(self, tables, x_BTD, targets_BT):
        """The cross entropy after the layers: (sum in nats, number of targets)."""
        x_BTD = self.final_norm(x_BTD)
        return cross_entropy(x_BTD, tables[-1], targets_BT, self.config, self.bias_copies())

    def add_costs(self, total, metrics):
        """Adds the weighted means over the layers of the metrics in `costs`."""
        return total + sum(w * metrics[name].mean(axis=0) for name, w in self.costs.items())

    @property
    def costs(self) -> dict[str, float]:
        """Metric of the layers → its weight in the objective."""
        return {}

    def update_buffers(self, objective: Objective) -> None:
        """Updates the model's buffers, if it has any, after a batch."""

    def layer_means(self, metrics, count) -> dict:
        """Means over the layers of their metrics: name → (sum over positions, number of positions).

        Of a metric that is a vector, each number has its own name, such as load_0.
        """
        means = {}
        for name, metric in metrics.items():
            mean = metric.mean(axis=0)
            names = [f"{name}_{i}" for i in range(len(mean))] if mean.ndim else [name]
            means |= dict(zip(names, mean if mean.ndim else [mean], strict=True))
        return {name: (mean, count) for name, mean in means.items()}
