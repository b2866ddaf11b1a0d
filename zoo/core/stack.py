"""A stack of layers: how they are built and run one after another.

Shapes: B batch, T positions, D embed, L layers.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax.ad_checkpoint import checkpoint_name

from .sharding import check_rules, shards

# What a layer's forward pass keeps for its backward pass; the rest is recomputed.
REMAT_POLICIES = {
    "none": jax.checkpoint_policies.everything_saveable,  # under FSDP, gathered weights too
    "dots": jax.checkpoint_policies.save_from_both_policies(  # products with a weight
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names("product"),  # by WeightInUse.multiply
    ),
    # The two sublayers' outputs: tensor parallelism repeats no all-reduce.
    "sublayers": jax.checkpoint_policies.save_only_these_names("sublayer"),
    # What sublayers gather before they start: sequence-sharded tensor parallelism repeats no gather.
    "gathered": jax.checkpoint_policies.save_only_these_names("gathered"),
    "full": jax.checkpoint_policies.nothing_saveable,  # only the layer's input
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(  # the same, on the host
        names_which_can_be_saved=[], names_which_can_be_offloaded=["input"],
        offload_src="device", offload_dst="pinned_host",
    ),
}  # fmt: skip


def stack(make_layer, num_layers: int, rngs: nnx.Rngs, axis: str = "layers"):
    """Builds `num_layers` layers as one module; its variables start with L, logical axis `axis`.

    Args:
      make_layer: a function of `rngs` that returns a layer.
    """
    layers = nnx.vmap(lambda rngs: make_layer(rngs=rngs))(rngs.split(num_layers))
    # nnx.vmap's transform_metadata names the axis only in NNX's graph mode, not in tree mode.
    for _, variable in nnx.iter_graph(layers):
        if isinstance(variable, nnx.Variable) and hasattr(variable, "out_sharding"):
            variable.set_metadata(out_sharding=(axis, *variable.out_sharding))
    return layers


def layer_indices(layers) -> jax.Array:
    """The numbers 0, 1, … of a stack's layers."""
    return jnp.arange(jax.tree.leaves(layers)[0].shape[0])


def scan_layers(function, x: jax.Array, layers, remat, unroll: int = 1):
    """Runs x through stacked layers, so that compile time doesn't grow with their number.

    Args:
      function: (x, one layer of `layers`) → (x, outputs).
      layers: tree of arrays whose first dim is L.
      remat: one of REMAT_POLICIES' values.
      unroll: layers per iteration of the compiled loop.

    Returns: (x, outputs of all layers, stacked in a first dim L).
    """
    layer = jax.checkpoint(remat_input(function, remat), policy=remat, prevent_cse=False)
    return jax.lax.scan(layer, x, layers, unroll=unroll)


def remat_input(function, remat):
    """A layer's function whose input remat may move to the host.

    Raises ValueError if the rules split the layers.
    """
    if shards("layers") > 1:
        raise ValueError(
            "the rules split the layers into stages, which can't generate and need a Config that "
            "inherits ComputeOptions"
        )
    if remat is not REMAT_POLICIES["offload"]:
        return function
    return lambda x, layer: function(checkpoint_name(x, "input"), layer)


def fit_rules(method):
    """A method of a model that takes tokens [B, T] or [B]: fits the active rules to this call.

    T is not split where the rules can't divide it. Raises ValueError if the rules don't name the
    logical axes of the model, its `axes`.
    """

    @functools.wraps(method)
    def fitting(self, tokens, *args, **kwargs):
        check_rules(self.axes.logical_axes)
        T = tokens.shape[1] if tokens.ndim > 1 else 1
        replicated = {axis: None for axis in ("seq", "residual_seq") if T % shards(axis)}
        rules = dict(get_logical_axis_rules() or ()) | replicated
        with nnx.logical_axis_rules(tuple(rules.items())):
            return method(self, tokens, *args, **kwargs)

    return fitting
