"""ComputeOptions: everything that the fields of a Config turn on in core/.

Each method replaces one of config.Compute's, and imports the option's file only if it is on.
"""

import dataclasses
from typing import Any, ClassVar

import jax

from ..core.attention import RowLayout
from ..core.config import Compute, bounded, one_of
from ..core.layers import AttentionType, RopeScaling
from ..core.sharding import shards
from ..core.vocabulary import Batch, Objective
from . import weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeOptions(Compute):
    """How to compute a decoder, and its adapters: fields of the zoo's Configs."""

    # LoRA: x·W becomes x·W + (x·A)·B · lora_alpha / lora_rank. W is frozen; only A and B
    # (nnx.LoRAParam) get gradients.
    # rank of adapters (LoRA) on frozen weights; 0: none, train all weights
    lora_rank: int = bounded(0, least=0)
    lora_alpha: float = 16.0  # adapters are scaled by lora_alpha / lora_rank
    # Weights with an adapter.
    lora_targets: tuple[str, ...] = ("q", "k", "v", "o", "gate", "up", "down")
    # Nothing below changes the parameters.
    # format of the layers' matmuls: "int8" or "fp8", with scales; "": dtype
    matmul: str = one_of("", weights.MATMULS)
    # format of these matmuls' gradients: "bfloat16"; "": as matmul
    matmul_backward: str = one_of("", weights.MATMUL_GRADIENTS)
    # in which devices add gradients of weights: "float32"; "": dtype
    reduce_dtype: str = one_of("", weights.REDUCE_DTYPES)
    # how parts of T attend; "auto": all-to-all if there is a head for each
    context: str = one_of("auto", ("auto", "all-to-all", "ring"))
    # schedule of stages; "gpipe" keeps more activations and takes as long
    pipeline: str = one_of("1f1b", ("1f1b", "interleaved", "gpipe"))
    pipe_rounds: int = 2  # v, how often a microbatch visits each stage, with pipeline="interleaved"
    # M, parts of a batch in the pipeline; 0: up to 4 per stage
    pipe_microbatches: int = bounded(0, least=0)
    load_limit: float = 0.0  # most load of a device's dropless experts, 1 if even; 0: drop nothing

    layer_kinds = ()  # one period of kinds, see periods.py
    carries_state = False  # whether layers carry a state along the positions
    learns_positions = False  # whether a table has positions, which count from a document's start

    WINDOWS: ClassVar[tuple[str, ...]] = ("sliding_window",)  # the fields that are windows

    def __post_init__(self):
        """Raises ValueError if the configuration is invalid."""
        # Saved configs have kinds and rotary scalings as tuples.
        if self.rope_scaling is not None:
            object.__setattr__(self, "rope_scaling", read_scaling(self.rope_scaling))
        if self.layer_kinds:
            stored: Any = self.layer_kinds
            kinds = (AttentionType(*kind) for kind in stored)
            kinds = tuple(k._replace(rope_scaling=read_scaling(k.rope_scaling)) for k in kinds)
            object.__setattr__(self, "layer_kinds", kinds)
        super().__post_init__()
        weights.check(self)
        if self.layer_kinds:
            from .periods import check_kinds

            check_kinds(self)

    @property
    def kinds(self) -> tuple[AttentionType, ...]:
        return self.layer_kinds or super().kinds

    # ---- weights

    add_weights = weights.add_adapters
    use_layer = weights.use_layer
    use_weights = weights.use_weights
    use_table = weights.use_table

    # ---- activations

    def row_layout(self, seq_len: int) -> RowLayout:
        if shards("seq") == 1:
            return RowLayout()
        from ..parallel.context import row_layout

        return row_layout(self, seq_len)

    def rope_places(
        self, positions_BT, segment_ids_BT, seq_len: int, lengths_B1=None
    ) -> tuple[jax.Array, Any]:
        if not self.scales_by_length and not self.learns_positions:
            return positions_BT, seq_len
        from .rope_scaling import places_of_rows

        layout = self.row_layout(seq_len)
        return places_of_rows(positions_BT, segment_ids_BT, lengths_B1, layout)

    @property
    def scales_by_length(self) -> bool:
        """Whether attention depends on the length of a row or on places in it, not on distances alone."""
        scalings = (kind.rope_scaling for kind in self.kinds)
        return any(scaling is not None and scaling.by_length for scaling in scalings)

    # ---- the model

    def run_layers(self, model, x_BTD, inputs, batch: Batch) -> tuple[jax.Array, Any]:
        if shards("layers") == 1:
            return super().run_layers(model, x_BTD, inputs, batch)
        from ..parallel.gpipe import run_in_stages

        return run_in_stages(model, x_BTD, batch)

    def objective(self, model, batch: Batch) -> Objective:
        if shards("layers") == 1:
            return super().objective(model, batch)
        from ..parallel.pipeline import objective_in_stages

        return objective_in_stages(model, batch)


def read_scaling(stored) -> RopeScaling | None:
    """A rotary scaling, also from its `as_tuple`, as saved configs have it. Raises ValueError."""
    if stored is None or isinstance(stored, RopeScaling):
        return stored
    from .rope_scaling import from_tuple

    return from_tuple(stored)
