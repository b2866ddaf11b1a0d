"""Shape: what a model multiplies, keeps and caches, read from the logical axes of its variables.

Reports and plans compute with it alone, so they work for any model that names the dims of its
variables as strategies.DECODER does, a user's too. "Numbers" are elements of arrays, of any dtype.
A config says what no variable shows, such as windows, if it has the fields of ComputeOptions.
"""

import dataclasses
import math
from typing import Any

from flax import nnx

from recipes.common.runtime import UserError
from recipes.common.sharding.abstract import AbstractModel, abstract_model, paths
from recipes.common.sharding.tower_shape import TowerShape, tower_of
from zoo.core.sharding import AxisNames
from zoo.core.strategies import (
    HEADS,
    KV_HEADS,
    LAYERS,
    VOCAB,
)
from zoo.experts.expert_strategies import EXPERT, EXPERT_EMBED
from zoo.options.dense_first import DENSE_STACK
from zoo.options.mtp import HEAD_PATH
from zoo.parallel.pipeline import rounds

POSITIONS = "positions"  # the logical axis of learned positions
# Of two towers: the stack of the layers of texts, with which paths of its other weights begin, and the
# logical axis of its learned positions; and weights that are multiplied with one position.
TEXT, TEXT_POSITIONS, TEXT_HEAD = "text", "text_positions", "text_head"
ONCE = ("pooling/q", "pooling/o", "pooling/mlp", "image_head", TEXT_HEAD)

Weights = dict[str, tuple[tuple[str, ...], tuple[int, ...]]]  # path → (logical axes, shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The attention of a layer."""

    weights: int  # that a position is multiplied with: the projections
    heads: int  # N, of queries
    kv_heads: int  # K
    key_dim: int  # H, of a query and of a key
    value_dim: int
    cached: int  # numbers per position in a cache: keys and values, or a latent
    window: int | None = None  # a position sees itself and the window - 1 before it
    causal: bool = True  # False: a position sees the whole row
    soft_cap: bool = False  # whether scores have one, which some kernels lack
    sinks: bool = False  # whether heads have sinks, likewise
    latents: int = 0  # numbers per position between low-rank projections; no rule splits them
    shared_key: int = 0  # the part of `latents` that is a key of all heads

    @property
    def kv_dim(self) -> int:
        """The dims of a key and its value."""
        return self.key_dim + self.value_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrenceShape:
    """A layer's recurrence, which keeps a state in place of keys and values."""

    weights: int  # that a position is multiplied with: the projections
    # What its module states, see delta.Recurrence.
    work: int
    width: int
    chunks: int
    group: int
    state: int
    erase: int
    halo: int

    @property
    def cached(self) -> int:
        """Numbers per row in a cache, whatever the row's length."""
        return self.state + self.halo


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsShape:
    """A layer's mixture of experts."""

    number: int  # E
    per_token: int  # J, experts that compute a position
    embed: int  # width of the rows that experts read and write: D, or a latent
    width: int  # F, hidden width of one expert
    weights: int  # of one expert
    latents: int = 0  # weights to and from a latent, which a position is multiplied with
    capacity: float | None  # slots, as a multiple of an even load; None: dropless
    load_limit: float = 0.0  # of a device's dropless experts, 1 if even; 0: none
    groups: int = 1  # of experts; those of a position are in its `top_groups` best groups
    top_groups: int = 1

    @property
    def slots(self) -> float:
        """Slots per position: experts compute empty ones too."""
        return (self.capacity or 1.0) * self.per_token


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Layers of one kind."""

    count: int
    attention: AttentionShape | None = None
    recurrence: RecurrenceShape | None = None
    mlp: int = 0  # F, hidden width of the MLP that computes every position; shared experts are one
    matrices: int = 3  # [D, F] of the MLP or an expert: gate, up and down; 2 without a gate
    experts: ExpertsShape | None = None
    positions: int = 0  # of an example, if not the model's
    embed: int = 0  # D, width of the residual stream: of a tower
    is_apart: bool = False  # a stack of first layers, which a pipeline doesn't divide


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A model. The defaults are those of a model without tokens, remat and low precision."""

    embed: int  # D, width of the residual stream
    layers: tuple[LayerShape, ...]  # one for each kind, in the order of the first layers
    vocab_size: int = 0  # V, if inputs are rows of tokens
    logits: int = 0  # V, if the loss is of tokens; 0: of classes or vectors of rows
    max_positions: int | None = None  # of a row, if the model learns positions
    period: int = 1  # layers that a pipeline's stage has a multiple of
    pipe_rounds: int = 1  # chunks of such periods that a stage runs
    mtp_layers: int = 0  # layers of the last kind after the others, in the MTP head
    positions: int = 1  # of an example, of a model without tokens
    text_positions: int = 0  # of its text, of a model with two towers
    joint: int = 0  # dims of embeddings that such a model compares
    pairs: str | None = None  # how they meet: a field of the config
    # Fields of the config on how to compute; None: it has no such field.
    dtype: str | None = None  # of activations and matmuls; None: float32
    kernel: str | None = None  # of attention, or "auto"; None: XLA's
    context: str | None = None  # how positions attend to those on other devices, or "auto"
    remat: str | None = None
    matmul: str | None = None
    matmul_backward: str | None = None
    reduce_dtype: str | None = None
    remats: tuple[str, ...] = ()  # values of remat that a plan may choose
    adapters: bool = False  # whether all other weights are frozen
    tower: TowerShape | None = None  # of a model that sees, beside the layers
    spans: bool = False  # whether positions of a picture see each other, in some layers

    def positions_of(self, path: str) -> int:
        """The positions of an example that a weight is multiplied with."""
        if not self.text_positions:
            return self.positions
        if path.startswith(ONCE):
            return 1
        return self.text_positions if path.startswith(TEXT) else self.positions

    @property
    def stacked_layers(self) -> int:
        """Layers that a pipeline divides."""
        return sum(layer.count for layer in self.layers if not layer.is_apart)

    @property
    def num_layers(self) -> int:
        """Layers without the MTP head's."""
        return sum(layer.count for layer in self.layers)

    @property
    def attention(self) -> AttentionShape | None:
        """The attention of the first layer that has one."""
        return next((layer.attention for layer in self.layers if layer.attention), None)

    @property
    def trained_layers(self) -> list[tuple[LayerShape, int]]:
        """Each kind of layer with its number, the MTP head's layers included."""
        *first, last = self.layers
        return [*((layer, layer.count) for layer in first), (last, last.count + self.mtp_layers)]

    @property
    def trained_experts(self) -> list[tuple[ExpertsShape, int]]:
        """The experts of each kind of layer, with the number of layers that have them."""
        return [(layer.experts, count) for layer, count in self.trained_layers if layer.experts]

    @property
    def multiplied(self) -> int:
        """N: the weights that a position is multiplied with in training.

        All but vectors (biases, norms, gates), the lookup in the embedding table and what classifies
        rows. Of experts, the router and those that a position uses. The MTP head has its own logits.
        """
        D, table = self.embed, self.logits * self.embed
        stack = sum(count * self.of_layer(layer) for layer, count in self.trained_layers)
        return stack + table + self.mtp_layers * (2 * D * D + table)

    def of_layer(self, layer: LayerShape) -> int:
        """The part of `multiplied` in a layer."""
        count = layer.matrices * self.embed * layer.mlp
        if layer.attention:
            count += layer.attention.weights
        if layer.recurrence:
            count += layer.recurrence.weights
        if experts := layer.experts:
            count += self.embed * experts.number + experts.per_token * experts.weights
            count += experts.latents
        return count


def trace_shape(model: Any, config: Any) -> Shape:
    """The shape of `model(config, rngs=…)`, which is only traced."""
    return shape_of(abstract_model(lambda: model(config, rngs=nnx.Rngs(0))), config)


def shape_of(model: AbstractModel, config: Any) -> Shape:
    """The shape of a model.

    Args:
      config: the model's; fields with the names and meanings of ComputeOptions count, and those
        of experts. Without such fields, all of a row is attended to and nothing is recomputed.
    """
    weights = _weights(model)
    sizes = {
        axis: n for axes, shape in weights.values() for axis, n in zip(axes, shape, strict=True)
    }
    vocab_size = sizes.get(VOCAB, 0)
    learned = sizes.get(POSITIONS)
    windows = [kind.window for kind in _stated(config, "kinds") or ()] or [None]
    unlike = _stated(config, "period") or ()  # the stacks of a period
    stacks = _stacks(weights, unlike)
    names = [*_order(stacks, unlike)]
    embed = _embed(weights, model.names)
    causal = vocab_size > 0 and _stated(config, "causal") is not False
    kind_by_layer = [(name, windows[n % len(windows)]) for n, name in enumerate(names)]
    layers = []
    of_text = sizes.get(TEXT_POSITIONS, 0)
    for name, window in dict.fromkeys(kind_by_layer):
        own = stacks[name][1]
        width = _embed(own, model.names) if of_text else embed  # of a tower
        layer = _layer(own, width, model, config, window, causal)
        count = kind_by_layer.count((name, window))
        is_apart = any(
            path.startswith(f"{name}/") and axes[0] == DENSE_STACK
            for path, (axes, _) in weights.items()
        )
        layer = dataclasses.replace(
            layer, count=count, positions=of_text * (name == TEXT), is_apart=is_apart
        )
        layers.append(layer)
    return Shape(
        embed=embed,
        layers=tuple(layers),
        vocab_size=vocab_size,
        logits=0 if _stated(config, "task") in ("classify", "embed") else vocab_size,
        max_positions=learned if vocab_size else None,
        period=len(unlike or windows),
        pipe_rounds=rounds(config) if _stated(config, "pipeline") else 1,
        mtp_layers=int(any(path.startswith(HEAD_PATH) for path in weights)),
        positions=1 if vocab_size else learned or model.positions,
        text_positions=of_text,
        joint=weights[TEXT_HEAD][1][-1] if of_text else 0,
        pairs=_stated(config, "pairs"),
        dtype=stated_dtype(config),
        kernel=_stated(config, "attention"),
        context=_stated(config, "context"),
        remat=_stated(config, "remat"),
        matmul=_stated(config, "matmul"),
        matmul_backward=_stated(config, "matmul_backward"),
        reduce_dtype=_stated(config, "reduce_dtype"),
        remats=tuple(_stated(config, "REMAT") or ()) if vocab_size else (),
        adapters="base" in model.shapes,
        tower=tower_of(weights, config, trained="base" not in model.shapes and not model.frozen),
        spans="span_kinds" in dir(config) and config.span_kinds != (),
    )


def check_length(shape: Shape, seq_len: int) -> None:
    """Raises UserError if rows have more tokens than the model has learned positions."""
    most = shape.max_positions
    if most is not None and seq_len > most:
        raise UserError(
            f"--seq_len={seq_len} is more than the {most} positions that the model learns; use at "
            f"most --seq_len={most}"
        )


def stated_dtype(config: Any) -> str | None:
    """The dtype of a model's activations; None if its config states none."""
    return _stated(config, "dtype")


def _stated(config: Any, field: str) -> Any:
    """A config's field; None if it has none of this name."""
    return getattr(config, field, None)


def _weights(model: AbstractModel) -> Weights:
    """The weights of a model without its adapters and buffers."""
    weights: Weights = {}
    for kind in ("params", "base"):
        if kind in model.shapes:
            axes = paths(model.axes[kind])
            for path, leaf in paths(model.shapes[kind]).items():
                if "/lora/" not in path:
                    weights[path] = axes[path], leaf.shape
    return weights


def _stacks(weights: Weights, period: tuple[str, ...]) -> dict[str, tuple[int, Weights]]:
    """Stack → (number of layers, a layer's weights by their path in the model).

    Layers are stacked along a logical axis, or are the modules of lists. Others are one layer.
    """
    stacks: dict[str, tuple[int, Weights]] = {}
    lists: dict[str, set[str]] = {}
    for path, (axes, shape) in weights.items():
        root, _, rest = path.partition("/")
        number = rest.partition("/")[0]
        if axes and axes[0] in (LAYERS, DENSE_STACK):
            name = f"{root}/{number}" if period and number in period else root
            _, layer = stacks.setdefault(name, (shape[0], {}))
            layer[path] = axes[1:], shape[1:]
        elif number.isdecimal():
            lists.setdefault(root, set()).add(number)
    if stacks:
        return stacks
    if not lists:
        return {"": (1, weights)}
    longest = max(lists, key=lambda root: len(lists[root]))
    first = {path: x for path, x in weights.items() if path.startswith(f"{longest}/0/")}
    return {longest: (len(lists[longest]), first)}


def _order(stacks: dict[str, tuple[int, Weights]], period: tuple[str, ...]) -> list[str]:
    """The stack of each layer, from the first to the last."""
    if period:
        by_name = {name.rpartition("/")[2]: name for name in stacks}
        total = sum(count for count, _ in stacks.values())
        return [by_name[period[n % len(period)]] for n in range(total)]
    return [name for name, (count, _) in stacks.items() for _ in range(count)]


def _embed(weights: Weights, names: AxisNames) -> int:
    """D: the dim of the residual stream."""
    at_rest = [axis for axis, used in names.in_use.items() if used == names.stream]
    for axes, shape in weights.values():
        for axis, n in zip(axes, shape, strict=True):
            if axis in at_rest:
                return n
    return 1


def _layer(
    weights: Weights,
    embed: int,
    model: AbstractModel,
    config: Any,
    window: int | None,
    causal: bool,
) -> LayerShape:
    """One layer, from its weights."""
    names = model.names
    modules: dict[str, dict[str, tuple]] = {}  # path of a module → its own weights
    for path, weight in weights.items():
        module, _, name = path.rpartition("/")
        modules.setdefault(module, {})[name] = weight
    attention = recurrence = experts = None
    others = []  # matrices of the MLP
    latents = 0  # weights to and from a latent of experts
    expert_matrices = 3
    latent = {*names.in_use.values()} - {names.stream}
    for path, own in modules.items():
        # Matrices have an axis that is gathered for use, and another dim.
        matrices = [(a, n) for a, n in own.values() if len(a) > 1 and {*names.in_use} & {*a}]
        axes = {axis for a, _ in matrices for axis in a}
        if path in model.recurrences:
            recurrence = _recurrence(own, model.recurrences[path])
        elif HEADS in axes:
            attention = _attention(own, matrices, names, config, window, causal)
        elif EXPERT in axes:
            experts = _experts(matrices, embed, config)
            expert_matrices = len(matrices)
        elif latent & axes:
            latents = sum(math.prod(shape) for _, shape in matrices)
        else:
            others += matrices
    if experts:
        experts = dataclasses.replace(experts, latents=latents)
    return LayerShape(
        count=1,
        embed=embed,
        attention=attention,
        recurrence=recurrence,
        mlp=sum(math.prod(n) for _, n in others) // (embed * len(others)) if others else 0,
        matrices=len(others) or expert_matrices,
        experts=experts,
    )


def _recurrence(own: dict[str, tuple], stated: Any) -> RecurrenceShape:
    """A module that states what its recurrence keeps; its projections and convolutions are counted."""
    weights = sum(
        math.prod(shape)
        for name, (_, shape) in own.items()
        if len(shape) > 1 and not name.endswith("bias")
    )
    return RecurrenceShape(weights=weights, **stated._asdict())


def _experts(matrices: list[tuple], embed: int, config: Any) -> ExpertsShape:
    sizes = dict(zip(*matrices[0], strict=True))
    number = sizes[EXPERT]
    embed = sizes.get(EXPERT_EMBED, embed)
    weights = sum(math.prod(shape) for _, shape in matrices) // number
    return ExpertsShape(
        number=number,
        per_token=_stated(config, "experts_per_token") or 1,
        embed=embed,
        width=weights // (embed * len(matrices)),
        weights=weights,
        capacity=_stated(config, "capacity"),
        load_limit=_stated(config, "load_limit") or 0.0,
        groups=_stated(config, "groups") or 1,
        top_groups=_stated(config, "top_groups") or 1,
    )


def _attention(
    own: dict[str, tuple],
    matrices: list[tuple],
    names: AxisNames,
    config: Any,
    window: int | None,
    causal: bool,
) -> AttentionShape:
    """A module whose matrices have heads.

    Args:
      own: all weights of the module; matrices: those among them.
    """
    size = {axis: n for axes, dims in matrices for axis, n in zip(axes, dims, strict=True)}
    heads = size[HEADS]
    kv_heads = size.get(KV_HEADS, heads)
    value_dim = next(dims[-2] for axes, dims in matrices if axes[0] == HEADS)
    of_keys = KV_HEADS if KV_HEADS in size else HEADS
    key_dim = next(dims[-1] for axes, dims in matrices if of_keys in axes and axes[0] != HEADS)
    has_keys = len(matrices) > 2  # else queries and outputs alone, which read another layer's
    cached = kv_heads * (key_dim + value_dim) if has_keys else 0
    # Some matrices make latents, and others read them. What none reads is a key of all heads.
    latent = {rest: used for rest, used in names.in_use.items() if used != names.stream}
    latents = sum(dims[-1] for axes, dims in matrices if axes[-1] in latent.values())
    read = [(dims[0], dims[-1]) for axes, dims in matrices if axes[0] in latent]
    shared_key = latents - sum(dim for dim, _ in read)
    if latents:
        # A query has H numbers, and a head's own part of a key and its value H - P + V.
        made = [dims[-1] for axes, dims in matrices if HEADS in axes and axes[0] != HEADS]
        key_dim = next(H for H in made if H - shared_key + value_dim in made)
        kv_latent = next(C for C, out in read if out == key_dim - shared_key + value_dim)
        cached = kv_latent + shared_key
    return AttentionShape(
        weights=sum(math.prod(dims) for _, dims in matrices),
        heads=heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        cached=cached if causal else 0,
        window=window,
        causal=causal,
        soft_cap=bool(_stated(config, "soft_cap")),
        sinks=any(axes == (HEADS,) for axes, _ in own.values()),
        latents=latents,
        shared_key=shared_key,
    )
