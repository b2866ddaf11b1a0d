"""Shape: what a model multiplies, keeps and caches; reports and plans compute with it alone.

Every Config has one as its property `shape`. A decoder's follows from the fields of its Config
(config.Compute), which overrides what differs. "Numbers" are elements of arrays, of any dtype.
"""

import dataclasses

import jax


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
    work: int  # multiplications per position of the recurrence itself
    width: int  # numbers per position that its derivative needs; rules split them as heads
    chunks: int  # float32 numbers per position at work in its derivative; likewise
    group: int  # positions of a row at work at once
    state: int  # numbers per row that it carries along T; rules split them as heads
    erase: int  # numbers per row of the matrix that a part of T multiplies the state with; likewise
    halo: int  # numbers per row of the positions before a part of T that it also needs

    @property
    def cached(self) -> int:
        """Numbers per row in a cache, whatever the row's length."""
        return self.state + self.halo


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsShape:
    """A layer's mixture of experts."""

    number: int  # E
    per_token: int  # J, experts that compute a position
    width: int  # F, hidden width of one expert
    weights: int  # of one expert
    capacity: float | None  # slots, as a multiple of an even load; None: dropless

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A model. The defaults are those of a model without tokens, remat and low precision."""

    embed: int  # D, width of the residual stream
    layers: tuple[LayerShape, ...]  # one for each kind, in the order of the first layers
    vocab_size: int = 0  # V, if inputs are rows of tokens; the Config then inherits Compute
    max_positions: int | None = None  # of a row, if the model learns positions
    period: int = 1  # layers that a pipeline's stage has a multiple of
    mtp_layers: int = 0  # layers of the last kind after the others, in the MTP head
    # Of a model without tokens:
    positions: int = 1  # of an example
    example: dict[str, jax.ShapeDtypeStruct] = dataclasses.field(default_factory=dict)  # for `loss`
    # Fields of the Config on how to compute; None: it has no such field.
    dtype: str | None = None  # of activations and matmuls; None: float32
    remat: str | None = None
    matmul: str | None = None
    matmul_backward: str | None = None
    remats: tuple[str, ...] = ()  # values of remat that a plan may choose
    adapters: bool = False  # whether all other weights are frozen

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

        All but vectors (biases, norms, gates) and the lookup in the embedding table. Of experts, the
        router and those that a position uses. The MTP head has its own logits.
        """
        D, table = self.embed, self.vocab_size * self.embed
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
        return count
