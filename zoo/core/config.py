"""What a decoder's Config states: its architecture, how to compute it, and who computes it otherwise.

A field states its own bounds where it is defined, and `check_fields` reads them:

    num_layers: int  # an integer: ≥ 1
    norm_eps: float = 1e-5  # a float: finite and ≥ 0
    shared_mlp: int = bounded(0, least=0)
    norms: str = one_of("before", NORMS)
"""

import dataclasses
import math
from collections.abc import Collection
from typing import Any, ClassVar

import jax
from flax import nnx

from ..kernels.choice import KERNELS
from .attention import RowLayout
from .layers import AttentionType, RopeScaling
from .sharding import AxisNames, in_use, shards
from .stack import REMAT_POLICIES
from .vocabulary import Batch, Objective, table_copies


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The values that a field may have."""

    least: float | None = None  # None: 1 for integers, 0 for other numbers
    most: float = math.inf
    choices: Collection[Any] = ()  # (): any


def bounded(default: Any, *, least: float, most: float = math.inf) -> Any:
    """A field whose numbers are from `least` to `most`; None is allowed where it is the default."""
    metadata = {"bounds": Bounds(least=least, most=most)}
    return dataclasses.field(default=default, metadata=metadata)


def factor(default: float | None) -> Any:
    """A field by which activations are multiplied or divided, which float32 can bear."""
    return bounded(default, least=1e-6, most=1e6)


def one_of(default: Any, choices: Collection[Any]) -> Any:
    """A field whose value is one of these."""
    return dataclasses.field(default=default, metadata={"bounds": Bounds(choices=choices)})


def bounds_of(config: type, name: str) -> Bounds:
    """What a Config's field states of its values."""
    return config.__dataclass_fields__[name].metadata.get("bounds", Bounds())


def check_fields(config) -> None:
    """Raises ValueError if a field has a value that its definition excludes."""
    for name, value in vars(config).items():
        bounds = bounds_of(type(config), name)
        if bounds.choices and value not in bounds.choices:
            named = ", ".join(str(choice) for choice in bounds.choices if choice != "")
            raise ValueError(f"{name}={value!r} is not one of {named}")
        if bounds.choices or type(value) not in (int, float):
            continue
        if bounds.most < math.inf and not bounds.least <= value <= bounds.most:
            raise ValueError(f"{name}={value} must be from {bounds.least:g} to {bounds.most:g}")
        least = (1 if type(value) is int else 0) if bounds.least is None else bounds.least
        if type(value) is int and value < least:
            raise ValueError(f"{name}={value} must be ≥ {least}")
        if type(value) is float and not least <= value < math.inf:
            raise ValueError(f"{name}={value} must be a finite number ≥ {least}")


class Architecture:
    """The attributes that core/ reads of a Config, which declares them as fields or properties.

    Those with a value here are optional.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float | None = None
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    tie_embeddings: bool = True
    causal: bool = True  # whether a position attends to earlier ones only

    @property
    def kinds(self) -> tuple[AttentionType, ...]:
        """The attention of each layer of a period; layer l has kind l mod len(kinds)."""
        return (AttentionType(self.sliding_window, self.rope_theta, self.rope_scaling),)

    @property
    def rotary_dim(self) -> int:
        """The dims of a head that rotary embeddings rotate."""
        return self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute(Architecture):
    """How to compute a decoder: fields of every decoder's Config. They don't change the parameters.

    The comment beside a field of a Config is also the help text of its flag in the recipes.

    The methods from `use_layer` on are where options replace what core/ does, as
    options/compute_options.py does by more fields.
    """

    dtype: str = "float32"  # dtype of activations and matmuls; parameters, norms and loss: float32
    # what a layer keeps for its backward pass, see stack.REMAT_POLICIES
    remat: str = one_of("full", REMAT_POLICIES)
    # one of choice.KERNELS; "auto": the best for the device
    attention: str = one_of("auto", KERNELS)
    loss_chunk: int = 256  # positions of a sequence with logits at once; see positions_at_once
    unroll: int = 1  # layers per scan iteration; unrolling all: 1 to 6% faster, slower to compile

    REMAT: ClassVar[dict] = REMAT_POLICIES
    ROTARY: ClassVar[str] = ""  # the field that rotary_dim comes from, if not head_dim

    def __post_init__(self):
        """Raises ValueError if the configuration is invalid."""
        name = "head_dim" if self.rotary_dim == self.head_dim else self.ROTARY
        for kind in self.kinds:
            kind.check(name, self.rotary_dim)
        check_fields(self)
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if heads % kv_heads:
            raise ValueError(f"num_heads={heads} is not divisible by num_kv_heads={kv_heads}")

    @property
    def remat_policy(self):
        """What a layer keeps for its backward pass."""
        return self.REMAT[self.remat]

    # ---- weights

    def add_weights(self, module: nnx.Module, rngs: nnx.Rngs, **contracted: int) -> None:
        """Gives a new module more parameters; here none.

        Args:
          contracted: a weight of the module → how many dims of its input it contracts.
        """

    def use_layer(self, layer, axes: AxisNames):
        """A layer with its weights as they multiply: cast to `dtype` and gathered."""
        return in_use(layer, axes.in_use_by_layers, self.dtype)

    def use_weights(self, weights, axes: AxisNames):
        """Likewise a module or variable outside of the layers."""
        return in_use(weights, axes.in_use, self.dtype)

    def use_table(self, table: nnx.Param) -> jax.Array:
        """Copies of a table of the vocabulary, [R, V, D]; see vocabulary.table_copies."""
        return table_copies(table, self.dtype)

    # ---- activations

    def row_layout(self, seq_len: int) -> RowLayout:
        """How positions are laid out over devices. Raises ValueError if rules split them."""
        if shards("seq") > 1:
            raise ValueError(
                f"the rules split positions over {shards('seq')} devices; use a Config that inherits "
                "ComputeOptions, or rules that don't"
            )
        return RowLayout()

    def rope_places(
        self, positions_BT, segment_ids_BT, seq_len: int, lengths_B1=None
    ) -> tuple[jax.Array, Any]:
        """The positions by which rotary embeddings turn, [B or 1, T], and the length of the rows.

        Args:
          lengths_B1: in generation: each row's tokens so far.
        """
        return positions_BT, seq_len

    def finish_logits(self, logits: jax.Array) -> jax.Array:
        """Logits from the product with the table, in float32."""
        return logits

    # ---- the model

    def run_layers(self, model, x_BTD, inputs, batch: Batch) -> tuple[jax.Array, Any]:
        """The output of a model's layers on a batch, and their metrics."""
        x_BTD, _, metrics = model.run_layers(x_BTD, inputs)
        return x_BTD, metrics

    def objective(self, model, batch: Batch) -> Objective:
        """A model's training objective."""
        return model.cross_entropy(batch)
