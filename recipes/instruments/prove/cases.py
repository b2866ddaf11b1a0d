"""Proves a model on every mesh that fits: `prove` is what recipes.prove runs, and your own tests.

    def test_my_model_trains_alike_on_every_mesh():
        proof = prove(lambda: MyModel(rngs=nnx.Rngs(0)), None, RULES, batch, meshes=["8", "4x2"])
        assert proof.holds, str(proof)

recipes/docs/proving.md explains what it compares.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from recipes.common.sharding import Layout, paths
from recipes.common.train.state import abstract_state
from recipes.instruments.prove import comparison, table
from recipes.instruments.prove.comparison import Difference
from recipes.instruments.prove.first_difference import Place, locate
from recipes.instruments.prove.layouts import check_loss, layouts, make_meshes, reference_layout
from recipes.instruments.prove.run import (
    OPTIMIZER,
    Training,
    measure,
    restored,
    to_host,
    trace_loss,
)
from recipes.instruments.prove.source import float32_line, folder_of
from recipes.instruments.prove.waste import Waste, wasteful
from recipes.instruments.user_model import UserModel, make_user_model, reason

# What is compared → the largest relative difference that rounding explains.
TOLERANCES = {
    "initial": 0.0,
    "loss": comparison.LOSS_TOLERANCE,
    "metrics": comparison.LOSS_TOLERANCE,
    "gradient": comparison.GRADIENT_TOLERANCE,
    "state": comparison.STATE_TOLERANCE,
    "restore": 0.0,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model under one strategy on one mesh, against one device."""

    strategy: str
    mesh: str
    # What is compared → path, or name of a metric → difference; see TOLERANCES.
    differences: dict[str, dict[str, Difference]] = dataclasses.field(default_factory=dict)
    float64: float | None = None  # the largest relative difference in float64, if it was measured
    note: str = ""  # why it was not
    place: Place | None = None  # where the first difference comes from
    sent: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)  # see run.Measured
    memory: int = 0
    waste: tuple[Waste, ...] = ()
    error: str = ""  # why it could not be compiled or run

    @property
    def beyond(self) -> dict[str, dict[str, Difference]]:
        """The differences beyond tolerance."""
        every = {
            what: {path: x for path, x in differences.items() if not x.relative <= TOLERANCES[what]}
            for what, differences in self.differences.items()
        }
        return {what: differences for what, differences in every.items() if differences}

    @property
    def is_rounding(self) -> bool:
        """Whether float64 shows that what differs in float32 is rounding."""
        return self.float64 is not None and self.float64 <= comparison.FLOAT64_TOLERANCE

    @property
    def holds(self) -> bool:
        return not self.error and (not self.beyond or self.is_rounding)


@dataclasses.dataclass(frozen=True)
class Proof:
    """All cases, and why other pairs of strategy and mesh were left out."""

    cases: tuple[Case, ...]
    left_out: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return bool(self.cases) and all(case.holds for case in self.cases)

    def __str__(self) -> str:
        return table.text(self)


def prove(
    build: Callable[[], nnx.Module],
    loss: Callable[..., Any] | None,
    rules: dict,
    batch: dict[str, Any] | None = None,
    meshes: Iterable[str | Mesh] = (),
    *,
    optimizer: optax.GradientTransformation = OPTIMIZER,
    auto: bool = False,
    x64: bool = False,
    on_start: Callable[[str], None] = lambda case: None,
    on_case: Callable[[Case], None] = lambda case: None,
) -> Proof:
    """Compares a model on meshes with one device: initial values, loss, metrics, each gradient, the
    state after three steps, and that state restored on another mesh.

    Args:
      build: makes the model, with logical axes in the `out_sharding` of its variables.
      loss: (model, **batch) → a mean, or (sum, count, {name: (sum, count)}); None: model.loss.
      rules: strategy → {logical axis: mesh axis, tuple of mesh axes or None}, or one such table.
      batch: name → array, rows first; None: random tokens, for a loss of tokens and targets.
      meshes: names such as "4x2", or meshes; none: for each strategy, those of all devices that have
        its mesh axes.
      optimizer: of the three steps; AdamW.
      auto: whether mesh axes are Auto: the compiler then chooses what constraints leave open.
      x64: whether to repeat what differs in float64.
      on_start: called before each case with its name and number.
      on_case: called after each case.

    Raises UserError if these don't fit each other.
    """
    made = make_meshes(meshes)
    user_model = make_user_model(build, loss, rules, batch, optimizer)
    pairs, left_out = layouts(user_model, made, auto)
    reference = Reference(reference_layout(pairs.values()), user_model)
    check_loss(reference.layout, user_model.batch)
    targets = [*pairs.values(), reference.layout]
    cases = []
    for place, ((strategy, mesh), layout) in enumerate(pairs.items()):
        on_start(f"{place + 1} of {len(pairs)}: {strategy} on {mesh}")
        case = prove_case(reference, strategy, mesh, layout, targets[place + 1])
        if x64 and case.beyond:
            case = in_float64(case, layout, reference.user_model)
        cases.append(case)
        on_case(case)
    return Proof(tuple(cases), tuple(left_out))


@dataclasses.dataclass(frozen=True)
class Reference:
    """One device's run, which all others must equal."""

    layout: Layout
    user_model: UserModel

    @functools.cached_property
    def unchanged(self) -> Training:
        """With the model's own optimizer."""
        return measure(self.layout, self.user_model.optimizer, self.user_model.batch).training

    @functools.cached_property
    def fault(self) -> str:
        """Why nothing can be compared with this run; "" if something can."""
        for step, (metrics, grads) in enumerate(
            zip(self.unchanged.metrics, self.unchanged.grads, strict=True), start=1
        ):
            values = {f"the metric {name!r}": x for name, x in metrics.items()}
            values |= {f"the gradient of {path}": x for path, x in paths(grads).items()}
            for name, x in values.items():
                if not np.isfinite(x).all():
                    return (
                        f"on one device, {name} is not finite at step {step}, so nothing can be "
                        "compared; fix the loss or the batch"
                    )
        if not any(np.any(x) for x in jax.tree.leaves(self.unchanged.grads)):
            return (
                "on one device, all gradients are zero, so nothing is compared; use a loss and a "
                "batch that train the model"
            )
        return ""

    @functools.cached_property
    def zeros(self) -> set[str]:
        """Paths of gradients that are zero but for rounding."""
        return comparison.zeros(paths(self.unchanged.grads[0]))

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """The model's, with zeros for such gradients: Adam would turn rounding into steps."""
        return (
            without(self.user_model.optimizer, self.zeros)
            if self.zeros
            else self.user_model.optimizer
        )

    @functools.cached_property
    def training(self) -> Training:
        if not self.zeros:
            return self.unchanged
        return measure(self.layout, self.optimizer, self.user_model.batch).training


def without(optimizer: optax.GradientTransformation, zeros: set[str]) -> Any:
    """An optimizer to which the gradients of these paths are zero."""

    def update(updates, state, params=None):
        def keep(path, grad):
            is_zero = "/".join(str(key.key) for key in path) in zeros
            return jnp.zeros_like(grad) if is_zero else grad

        return optimizer.update(jax.tree_util.tree_map_with_path(keep, updates), state, params)

    return optax.GradientTransformation(optimizer.init, update)


def prove_case(
    reference: Reference, strategy: str, mesh: str, layout: Layout, target: Layout
) -> Case:
    """One case; `target`: the layout on which the state is restored."""
    user_model = reference.user_model
    try:
        measured = measure(layout, reference.optimizer, user_model.batch)
    except Exception as error:  # whatever the user's code raises
        failure = reason(error)
        if type(error).__name__ == "ShardingTypeError":  # JAX doesn't export it
            failure += " If your model leaves this to the compiler, use auto axes (--auto)."
        return Case(strategy, mesh, error=failure)
    if reference.fault:
        return Case(strategy, mesh, error=reference.fault)
    training = measured.training
    differences = compare_runs(training, reference.training)
    after = restored(training.state, abstract_state(target, reference.optimizer))
    warnings = wasteful(layout, reference.optimizer, user_model.batch, measured.step)
    differences["restore"] = comparison.compare_all(after, training.final, is_copy=True)
    case = Case(
        strategy,
        mesh,
        differences,
        sent=measured.sent,
        memory=measured.memory,
        waste=tuple(dict.fromkeys(warnings)),
    )
    if case.beyond.keys() & {"loss", "metrics", "gradient"}:
        variables = {kind: reference.training.initial[kind] for kind in layout.model.shapes}
        place = locate(layout, reference.layout, variables, user_model.batch)
        case = dataclasses.replace(case, place=place)
    return dataclasses.replace(case, note=in_16_bits(layout)) if case.beyond else case


def in_16_bits(layout: Layout) -> str:
    """A line about parameters whose gradients are rounded before devices add them up; "" without any."""
    weights = paths(layout.variables()["params"])
    rounded = [path for path, x in weights.items() if x.dtype.itemsize < 4]
    if not rounded:
        return ""
    others = f" and {len(rounded) - 1} more" if len(rounded) > 1 else ""
    return (
        f"parameters in 16 bits ({rounded[0]}{others}): devices round their gradients before they add up; keep "
        "parameters in float32, and let layers compute in 16 bits"
    )


def compare_runs(on_mesh: Training, on_one: Training) -> dict[str, dict[str, Difference]]:
    """What is compared → path or name → the largest difference in all steps."""
    dtype = jax.dtypes.canonicalize_dtype("float64")  # float32 without x64

    def worst(steps: Iterable[dict[str, Difference]]) -> dict[str, Difference]:
        every = [*steps]
        return {path: max(x[path] for x in every) for path in every[0]}

    def arrays(metrics: dict[str, float]) -> dict[str, np.ndarray]:
        return {name: np.array(x, dtype) for name, x in metrics.items()}

    metrics = worst(
        comparison.compare_finite(arrays(a), arrays(b))
        for a, b in zip(on_mesh.metrics, on_one.metrics, strict=True)
    )
    gradients = worst(
        comparison.compare_gradients(paths(a), paths(b))
        for a, b in zip(on_mesh.grads, on_one.grads, strict=True)
    )
    initial = to_host(on_mesh.initial)
    return {
        "initial": comparison.compare_all(initial, to_host(on_one.initial), is_copy=True),
        "loss": {"loss": metrics.pop("loss")},
        "metrics": metrics,
        "gradient": gradients,
        "state": comparison.compare_all(on_mesh.final, on_one.final),
    }


def in_float64(case: Case, layout: Layout, user_model: UserModel) -> Case:
    """The case with its largest difference in float64, or with a note why that tells nothing.

    Variables are float64 and `jnp.float32` means float64 in the model's code, as does `dtype` in the
    configs that its modules hold.
    """

    def build() -> nnx.Module:
        model = user_model.build()
        node: Any
        for _, node in nnx.iter_graph(model):
            if isinstance(node, nnx.Variable) and node.dtype == np.float32:
                node.set_value(node.get_value().astype("float64"))
            elif isinstance(node, nnx.Module):
                config: Any = vars(node).get("config")
                is_config = dataclasses.is_dataclass(config) and not isinstance(config, type)
                if is_config and "dtype" in vars(config):
                    vars(node)["config"] = dataclasses.replace(
                        vars(node)["config"], dtype="float64"
                    )
        return model

    batch = {
        name: np.asarray(x, np.float64) if x.dtype == np.float32 else x
        for name, x in user_model.batch.items()
    }
    wide = dataclasses.replace(user_model, build=build, batch=batch)
    with jax.enable_x64(True), mock.patch.object(jnp, "float32", jnp.float64):
        pairs, _ = layouts(wide, [layout.mesh])
        (wide_layout,) = (x for (name, _), x in pairs.items() if name == layout.strategy)
        traced = trace_loss(wide_layout, wide_layout.model, batch)
        if narrow := float32_line(traced.jaxpr.jaxpr, folder_of(nnx.eval_shape(build))):
            note = f"the model computes in float32 at {narrow}, so float64 tells nothing"
            return dataclasses.replace(case, note=note)
        reference = Reference(reference_layout([wide_layout]), wide)
        training = measure(wide_layout, reference.optimizer, batch).training
        differences = compare_runs(training, reference.training)
    every = [x.relative for by_path in differences.values() for x in by_path.values()]
    return dataclasses.replace(case, float64=max(every))
