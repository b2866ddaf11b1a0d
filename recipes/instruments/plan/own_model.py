"""A user's own model for the planner, and what is assumed of it."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

from recipes.common.runtime import UserError
from recipes.common.sharding.abstract import AbstractModel, declared_names
from recipes.common.sharding.rules import Rules
from recipes.instruments.user_model import (
    ModelFlags,
    UserModel,
    make_user_model,
    reason,
    with_rules,
)
from zoo.core.strategies import VOCAB
from zoo.experts.expert_strategies import EXPERT_DECODER
from zoo.options.compute_options import ComputeOptions


class OwnModel(NamedTuple):
    """A user's model, as `search` takes it."""

    model: Callable[..., nnx.Module]  # of (config, *, rngs)
    config: Any
    abstract: AbstractModel
    rules: dict[str, Rules]
    assumed: list[str]  # sentences on what can't be read from the model


def own_model(flags: ModelFlags) -> OwnModel:
    """Traces the model that a user's flags name. Raises UserError."""
    name = flags.model.rpartition(":")[2]
    user_model = make_user_model(*flags.parts())
    abstract, tables = with_rules(user_model)
    model: Any = nnx.eval_shape(user_model.build)
    is_declared = declared_names(model) is not None
    known = abstract.names.logical_axes
    if not is_declared:  # a product's result has the axes of its weight
        known = {axis: "activations" if axis == "batch" else "both" for axis in known}
    # The planner also asks for the axes of decoders, which are not split if the model has none.
    others = {axis: "weights" for axis in EXPERT_DECODER.logical_axes if axis not in known}
    names = dataclasses.replace(abstract.names, logical_axes=known | others)
    abstract = abstract._replace(names=names)
    tables = {strategy: table | dict.fromkeys(others) for strategy, table in tables.items()}
    config = vars(model).get("config")
    assumed = []
    if not is_declared:
        stream = abstract.names.stream or "none of its axes"
        assumed.append(f"{name} declares no axes: its residual stream is taken to be {stream}.")
    is_text = any(VOCAB in axes for axes in jax.tree.leaves(abstract.axes, is_leaf=_is_axes))
    if is_text and not _computes(config):
        assumed.append(
            f"{name}'s config lacks fields of zoo.core.config.ComputeOptions: no windows or remat, float32."
        )
    if not is_text:
        abstract = abstract._replace(positions=_positions(user_model, abstract))
        assumed.append(
            f"By the products in its loss, each weight multiplies {abstract.positions:,} positions of "
            "an example; all activations are kept."
        )
    return OwnModel(
        model=lambda _, rngs: user_model.build(),
        config=_with_options(config) if _computes(config) else _Plain(),
        abstract=abstract,
        rules=tables,
        assumed=assumed,
    )


@dataclasses.dataclass(frozen=True)
class _Plain:
    """How a model without a config of its own computes."""

    loss_chunk: int = 256
    attention: str = "auto"
    context: str = "auto"
    pipeline: str = "1f1b"
    pipe_rounds: int = 2
    pipe_microbatches: int = 0
    dtype: str = "float32"


def _computes(config: Any) -> bool:
    """Whether a config has the fields of zoo.core.config.ComputeOptions, as a copy has."""
    return dataclasses.is_dataclass(config) and {*ComputeOptions.__dataclass_fields__} <= {
        *dir(config)
    }


def _with_options(config: Any) -> Any:
    """A config that also has the fields of ComputeOptions which it lacks, off."""
    lacking = [
        (field.name, field.type, dataclasses.field(default=field.default))
        for field in dataclasses.fields(ComputeOptions)
        if field.name not in vars(config)
    ]
    if not lacking:
        return config
    name, bases = type(config).__name__, (type(config),)
    extended = dataclasses.make_dataclass(name, lacking, bases=bases, frozen=True, kw_only=True)
    return extended(**vars(config))


def _is_axes(x: Any) -> bool:
    return isinstance(x, tuple)


def _positions(user_model: UserModel, abstract: AbstractModel) -> int:
    """How often an example's loss multiplies by each weight, in the mean."""

    def total(variables, batch):
        return user_model.loss(abstract.merge(variables), **batch)[0]

    try:
        traced = jax.make_jaxpr(total)(abstract.shapes, user_model.batch)
    except UserError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise UserError(
            f"the loss of the batch can't be traced ({reason(error)}); fix the batch or the loss"
        ) from error
    rows = len(jax.tree.leaves(user_model.batch)[0])
    weights = sum(math.prod(x.shape) for x in jax.tree.leaves(abstract.shapes))
    return max(1, round(_multiplications(traced.jaxpr) / rows / max(weights, 1)))


def _multiplications(jaxpr: Any) -> int:
    """Multiplications of all matrix products and convolutions, those of a scan once per iteration."""
    count = 0
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = parameters["dimension_numbers"]
            left = equation.invars[0].aval.shape
            out = equation.outvars[0].aval.shape
            count += math.prod(out) * math.prod(left[dim] for dim in contracted)
        elif name == "conv_general_dilated":
            out, kernel = equation.outvars[0].aval.shape, equation.invars[1].aval.shape
            channels = kernel[parameters["dimension_numbers"].rhs_spec[0]]
            count += math.prod(out) * math.prod(kernel) // channels
        inner = jax.tree.leaves([*parameters.values()], is_leaf=_is_jaxpr)
        times = parameters.get("length", 1) if name == "scan" else 1
        for value in filter(_is_jaxpr, inner):
            count += times * _multiplications(getattr(value, "jaxpr", value))
    return count


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")
