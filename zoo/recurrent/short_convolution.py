"""Gated short convolutions (LFM2): layers whose only state is the last W - 1 positions.

    out = (C * convolution(B * x)) · o

B, C and x are projections of the position, and the convolution is causal, of each channel alone. See
state.py for what layers with a state share; here devices exchange a halo and nothing else.

Shapes: B batch, T positions, D embed, F = D channels, W width of the convolution.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from .state import Positions, Recurrence, before_first, convolve, last_inputs
from ..core.layers import multiply, sublayer_input
from ..core.sharding import constrain, mesh_axes, param, per_device


class ShortConvolution(nnx.Module):
    """A gated short convolution, of config.conv_width.

    Tensor parallelism splits the channels as it splits heads; the output then costs one all-reduce.
    Context parallelism sends W - 1 positions.
    """

    def __init__(self, config, *, rngs: nnx.Rngs):
        D, W = config.embed, config.conv_width
        self.config = config
        self.b = param(rngs, (D, D), ("embed", "heads"), D**-0.5)
        self.c = param(rngs, (D, D), ("embed", "heads"), D**-0.5)
        self.x = param(rngs, (D, D), ("embed", "heads"), D**-0.5)
        self.kernel = param(rngs, (W, D), ("conv_width", "heads"), W**-0.5)
        self.o = param(rngs, (D, D), ("heads", "embed"), (D * 2 * config.num_layers) ** -0.5)
        config.add_weights(self, rngs, b=1, c=1, x=1, o=1)

    @property
    def recurrence(self) -> Recurrence:
        """Costs that the weights' shapes don't show."""
        D, W = self.config.embed, self.config.conv_width
        return Recurrence(
            work=W * D, width=5 * D, chunks=0, group=1, state=0, erase=0, halo=(W - 1) * D
        )

    def __call__(self, x_BTD, inputs, kind, cache_index=None):
        """Returns (output to add to the residual, the last inputs of the convolution).

        Args:
          cache_index: ([B, W - 1, F],), the layer's inputs of the convolution from a cache; None: none.
        """
        dtype = x_BTD.dtype
        x_BTD = sublayer_input(x_BTD, self.x)
        (last,) = cache_index or (None,)
        arrays = Arrays(
            x=multiply(x_BTD, self.b) * multiply(x_BTD, self.x),
            kernel=self.kernel[...],
            ids=inputs.segment_ids_BT,
            inputs=last,
        )
        seq = mesh_axes("seq", manual=True)
        results = per_device(
            lambda *arrays: on_device(Arrays(*arrays), seq, inputs.generates),
            arrays,
            AXES,
            [AXES.x, AXES.inputs] if inputs.generates else [AXES.x],
            check_vma=False,
        )
        out_BTF = multiply(x_BTD, self.c).astype(jnp.float32) * results[0]
        out_BTF = constrain(out_BTF.astype(dtype), "batch", "seq", "heads")
        return multiply(out_BTF, self.o, seq="residual_seq"), tuple(results[1:])


class Arrays(NamedTuple):
    """The inputs of `on_device`, arrays or their logical axes."""

    x: Any  # [B, T, F]
    kernel: Any  # [W, F]
    ids: Any  # [B, T], int: segments; None: one per row
    inputs: Any = None  # [B, W - 1, F], from a cache


AXES = Arrays(
    x=("batch", "seq", "heads"),
    kernel=(None, "heads"),
    ids=("batch", "seq"),
    inputs=("batch", None, "heads"),
)


def on_device(
    arrays: Arrays, seq: tuple[str, ...] = (), generates: bool = False
) -> list[jax.Array]:
    """One device's part of the convolution: [outputs], [B, T, F], float32; if it `generates`, also the
    last inputs.
    """
    positions = Positions(
        x_BTF=arrays.x,
        kernel_WF=arrays.kernel,
        bias_F=None,
        by_position=(),
        ids_BT=arrays.ids,
        inputs=arrays.inputs,
    )
    inputs, ids_before, ids_BT = before_first(positions, seq)
    x_BSF = jnp.concatenate((inputs, arrays.x), axis=1)
    ids_BS = jnp.concatenate((ids_before, ids_BT), axis=1)
    out_BTF = convolve(x_BSF, arrays.kernel, ids_BS)
    if not generates:
        return [out_BTF]
    return [out_BTF, last_inputs(arrays.x, ids_BT, inputs, ids_before, seq)]
