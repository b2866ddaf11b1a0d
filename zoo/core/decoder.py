"""Decoder: what all decoder-only language models share, from tokens to logits and the loss.

A model's file has its Config, its Layer and what differs; this one is read once. Other files that only
some calls need: cache.py to generate, pipeline.py if rules split the layers, mtp.py for a model with
a head for the second-next token.

Shapes: B batch, T positions, S slots of a cache, D embed, V vocab, L layers, R shards of B and T.
"""

import functools
from typing import Any

import jax
from flax import nnx

from .attention import Positions, make_positions, stripe
from .layers import RMSNorm, gather
from .sharding import AxisNames, shards
from .stack import fit_rules, layer_in_use, numbers, scan_layers, stack
from .strategies import DECODER, DENSE_STACK
from .vocabulary import (
    Batch, Objective, copies_in_use, cross_entropy, look_up, table_copies, unembed, vocabulary,
)  # fmt: skip


HEAD_PATH = "mtp/"  # how paths of the weights of `Decoder.mtp` begin


class Decoder(nnx.Module):
    """Tokens in, next-token logits out.

    A model has `config`, whose class inherits config.Compute, `embed`, `layers`, `final_norm` and
    `unembed`, which is None if `embed` unembeds too. Its Layer is a module built from (config, *,
    rngs), whose call is

        layer(x_BTD, positions, kind, past) → (x_BTD, (keys, values), metrics)

    with the layer's number in the cache, or None, in `past`. metrics: name → sum over the positions
    in positions.counted_BT. With config.dense_layers, the first layers are a stack of their own,
    `dense`, of layers built with dense=True, which have an MLP in place of experts.

    If config has a `period`, names of stacks such as ("delta", "attention"), the Layer is built from
    (config, name, *, rngs), and `layers` is a dict of stacks. Layers of other stacks than `attention`
    keep a state in place of keys and values, and get the one in the cache as `past`.
    """

    config: Any
    layers: Any
    axes: AxisNames = DECODER
    mtp: Any = None  # a head for the second-next token, see mtp.py
    unembed_bias: Any = None  # of logits, [V]

    def __init__(self, config: Any, layer, final_norm=None, *, rngs: nnx.Rngs):
        self.config = config
        self.make_tables(config, rngs)
        first = config.dense_layers
        if first:
            dense_layer = functools.partial(layer, config, dense=True)
            self.dense = stack(dense_layer, first, rngs, axis=DENSE_STACK)
        # Every parameter of the layers starts with dim L, logical axis `layers`.
        # Layers of unequal shapes have a stack for each kind, in the order of a period.
        if config.period:
            from ..options.unlike_layers import make_stacks

            self.layers = nnx.Dict(make_stacks(layer, config, rngs))
        else:
            self.layers = stack(functools.partial(layer, config), config.num_layers - first, rngs)
        self.final_norm = final_norm or RMSNorm(config.embed, config.norm_eps)
        self.unembed = None if config.tie_embeddings else vocabulary(config, rngs=rngs)

    def make_tables(self, config, rngs: nnx.Rngs) -> None:
        """Makes what embeds tokens."""
        self.embed = vocabulary(config, rngs=rngs)

    # ---- what a user calls

    @fit_rules
    def __call__(self, tokens_BT, segment_ids_BT=None) -> jax.Array:
        """Returns logits [B, T, V] in float32; position t predicts token t + 1.

        Args:
          tokens_BT: int, below vocab_size. On a mesh, B must be divisible by the axes of `batch`.
          segment_ids_BT: int; positions attend only within their own segment. None: one per row.
        """
        tokens_BT = stripe(self.config, tokens_BT)
        segment_ids_BT = stripe(self.config, segment_ids_BT)
        tables = self.tables()
        x_BTD, _ = self.run_batch(tables, Batch(tokens_BT, None, segment_ids_BT))
        # Embeddings instead of logits: V may be uneven.
        x_BTD = stripe(self.config, gather(self.final_norm(x_BTD)), "act_embed", back=True)
        return unembed(x_BTD, tables[-1], self.config, self.bias_copies())

    @fit_rules
    def loss(self, tokens, targets, segment_ids=None):
        """The training objective of a batch: the cross entropy in nats, plus `costs`.

        A model with buffers also updates them.

        Args:
          tokens, segment_ids: as in `__call__`.
          targets: [B, T], int; targets below 0 are padding and don't count.

        Returns: (sum over targets, number of targets, aux), float32 scalars; aux maps a name to
          (sum, count): loss: the cross entropy alone; and means over the layers of their metrics.
        """
        objective = self.objective(Batch(tokens, targets, segment_ids))
        self.update_buffers(objective)
        means = self.layer_means(objective.metrics, objective.count)
        return objective.total, objective.count, objective.aux | means

    def layer_means(self, metrics, count) -> dict:
        """Means over the layers of their metrics: name → (sum over positions, number of positions)."""
        means = {name: metric.mean(axis=0) for name, metric in metrics.items()}
        load_E = means.pop("load", ())
        means |= {f"load_{e}": load for e, load in enumerate(load_E)}
        return {name: (mean, count) for name, mean in means.items()}

    def log_probs(self, tokens, targets, segment_ids=None) -> jax.Array:
        """The log-probability of each target, float32 [B, T]; 0 for padding. Arguments as in `loss`."""
        from ..options.log_probs import of_targets

        return of_targets(self, tokens, targets, segment_ids)[0]

    def prefill(self, tokens_BT, lengths_B, slots: int):
        """Reads prompts. Returns next-token logits [B, V] and a Cache with room for more tokens.

        Args:
          tokens_BT: int, left-padded: row b's prompt is its last lengths_B[b] ≥ 1 tokens.
          slots: S ≥ T, the capacity of the cache in tokens, including prompts and padding.
        """
        from ..options.cache import prefill

        return prefill(self, tokens_BT, lengths_B, slots)

    def decode(self, tokens_B, cache):
        """Reads one more token per row. Returns next-token logits [B, V] and the extended cache.

        A jitted caller should donate the cache, so that one slot is written in place. The cache
        must not be full: length < S. Where a rotary scaling depends on the row's length, the new
        token has the scaling of the row so far; keys in the cache keep theirs.
        """
        from ..options.cache import decode

        return decode(self, tokens_B, cache)

    # ---- from tokens to the output of the layers

    def tables(self) -> list[jax.Array]:
        """Copies of the tables that embed tokens (the first) and unembed the output (the last)."""
        tables = (self.embed,) if self.unembed is None else (self.embed, self.unembed)
        return [copies_in_use(table, self.config) for table in tables]

    def bias_copies(self) -> jax.Array | None:
        """Copies of the bias of logits, [R, V] in float32; None without one."""
        return self.unembed_bias and table_copies(self.unembed_bias, "float32")

    def begin(self, tables, tokens_BT, positions: Positions, **more):
        """The input of the stacked layers, and the keys and values of the dense layers or None.

        In a pipeline, the dense layers are part of the first stage. `more`: see `embed_tokens`.
        """
        x_BTD = self.embed_tokens(tables, tokens_BT, positions, **more)
        first = self.config.dense_layers
        if not first:
            return x_BTD, None
        x_BTD, kv, _ = self.run_stack(self.dense, x_BTD, positions, first_number=0)
        return x_BTD, kv

    def embed_tokens(self, tables, tokens_BT, positions: Positions):
        x_BTD = look_up(tables[0], tokens_BT)
        return x_BTD if self.config.embed_scale == 1 else x_BTD * self.config.embed_scale

    def run_layers(self, x_BTD, positions: Positions) -> tuple[jax.Array, Any, Any]:
        """Runs the stacked layers: (x_BTD, what they keep in generation, their metrics).

        They keep their keys and values; with a `config.period`, a dict of what each stack keeps.
        """
        if self.config.period:
            from ..options.unlike_layers import run_unlike

            return run_unlike(self, x_BTD, positions)
        return self.run_stack(self.layers, x_BTD, positions, self.config.dense_layers)

    def run_stack(self, layers, x_BTD, positions: Positions, first_number: int):
        """Runs layers of a stack. A layer reads its part of a cache by its number."""
        past = None if positions.cache is None else first_number + numbers(layers)
        kinds = self.config.kinds
        first_kind = first_number % len(kinds)
        kinds = kinds[first_kind:] + kinds[:first_kind]
        x_BTD, (kv, metrics) = self.scan((layers, past), x_BTD, positions, kinds)
        return x_BTD, kv, metrics

    def scan(self, layers, x_BTD, positions: Positions, kinds):
        """Runs pairs of layers and their `past`; see stack.scan_layers."""
        config = self.config

        def run_layer(x_BTD, layer_and_past, kind):
            layer, past = layer_and_past
            # Inside remat, so that the backward pass gathers again.
            layer = layer_in_use(layer, self.axes.in_use, config)
            x_BTD, kv, metrics = layer(x_BTD, positions, kind, past)
            return x_BTD, (kv if positions.generates else None, metrics)

        remat = config.REMAT[config.remat]
        return scan_layers(run_layer, x_BTD, layers, kinds, remat, config.unroll, config.period)

    # ---- from there to the objective

    def objective(self, batch: Batch) -> Objective:
        """The training objective. Layers that the rules split run in stages."""
        if shards("layers") > 1:
            from ..parallel.pipeline import objective_in_stages

            return objective_in_stages(self, batch)
        if self.mtp is not None:
            from ..options.mtp import objective_with_mtp

            return objective_with_mtp(self, batch)
        batch = Batch(*(stripe(self.config, x) for x in batch))
        tables = self.tables()
        x_BTD, metrics = self.run_batch(tables, batch)
        total, count = self.finish(tables, x_BTD, batch.targets)
        total_and_costs = self.add_costs(total, metrics)
        return Objective(total_and_costs, count, {"loss": (total, count)}, metrics)

    def run_batch(self, tables, batch: Batch):
        """Runs all layers on a batch: (x_BTD, metrics of the stacked layers)."""
        positions = self.positions_of(batch)
        x_BTD, _ = self.begin(tables, batch.tokens, positions)
        if shards("layers") > 1:
            from ..parallel.gpipe import run_in_stages

            return run_in_stages(self, x_BTD, batch)
        x_BTD, _, metrics = self.run_layers(x_BTD, positions)
        return x_BTD, metrics

    def positions_of(self, batch: Batch, **more) -> Positions:
        return make_positions(self.config, batch.tokens, batch.segment_ids, batch.targets, **more)

    def finish(self, tables, x_BTD, targets_BT):
        """The cross entropy after the layers: (sum in nats, number of targets)."""
        x_BTD = self.final_norm(x_BTD)
        bias_RV = self.bias_copies()
        return cross_entropy(x_BTD, tables[-1], targets_BT, self.config, bias_RV)

    def add_costs(self, total, metrics):
        """Adds the weighted means over the layers of the metrics in `costs`."""
        return total + sum(w * metrics[name].mean(axis=0) for name, w in self.costs.items())

    @property
    def costs(self) -> dict[str, float]:
        """Metric of the layers → its weight in the objective."""
        return {}

    def update_buffers(self, objective: Objective) -> None:
        """Updates the model's buffers, if it has any, after a batch."""
