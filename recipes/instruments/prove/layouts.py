"""The layouts in which a model is proven, on meshes that fit it."""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Sequence

import jax
from jax.sharding import AxisType, Mesh

from recipes.common.runtime import UserError, describe
from recipes.common.runtime.mesh import make_mesh, parse
from recipes.common.sharding import Layout, Tree
from recipes.common.sharding import rules as sharding_rules
from recipes.common.sharding.rules import Rules, used_axes
from recipes.instruments.plan.search import meshes as meshes_of
from recipes.instruments.prove.run import trace_loss
from recipes.instruments.user_model import UserModel, reason, with_rules


def check_loss(one: Layout, batch: Tree) -> None:
    """Raises UserError if one device can't compute the loss of the batch."""
    try:
        total, count, aux = trace_loss(one, one.model, batch).out_info
    except UserError:
        raise
    except Exception as error:  # whatever the user's code raises
        # Explicit axes are in the types of arrays, which flax's scan compares.
        explicit = ", or use auto axes (--auto)" if one.mesh.explicit_axes else ""
        raise UserError(
            f"one device can't compute the loss of the batch ({reason(error)}); fix the batch or the "
            f"loss{explicit}"
        ) from error
    for name, x in (("sum", total), ("count", count)):
        if x.shape:
            raise UserError(f"the loss's {name} has shape {list(x.shape)}; return a scalar")
    if "loss" not in aux:
        raise UserError(f"the loss's third result has {', '.join(aux)}; add 'loss': (sum, count)")


# ---- its layouts ---------------------------------------------------------------------------------


def layouts(
    user_model: UserModel, meshes: Sequence[Mesh], auto: bool = False
) -> tuple[dict[tuple[str, str], Layout], dict[str, None]]:
    """All pairs that fit: (strategy, mesh) → layout; and why others don't, in order.

    Without meshes, each strategy runs on all that have its mesh axes and all devices. With `auto`,
    axes are Auto instead of Explicit. Raises UserError if the rules don't suit the model, or no pair
    fits.
    """
    model, strategies = with_rules(user_model)
    rows = len(jax.tree.leaves(user_model.batch)[0])
    seq_len = jax.tree.leaves(user_model.batch)[0].shape[1] if model.names.positions else 0
    pairs: dict[tuple[str, str], Layout] = {}
    left_out: dict[str, None] = {}
    for strategy, rules in strategies.items():
        for mesh in meshes or default_meshes(rules):
            name = describe(dict(mesh.shape))
            if auto:
                types = (AxisType.Auto,) * len(mesh.axis_names)
                mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=types)
            used = used_axes(rules)
            split = {axis for axis, n in mesh.shape.items() if n > 1}
            if not split <= used <= {*mesh.axis_names}:
                continue
            if mesh.size == 1:
                left_out[f"--meshes={name} has one device, with which others are compared"] = None
                continue
            try:
                fitting, uneven = sharding_rules.fit(strategy, rules, model, mesh)
                sharding_rules.check_batch(strategy, fitting, mesh, rows, flag="a batch of ")
                sharding_rules.check_positions(
                    model.names, strategy, fitting, mesh, seq_len, trains=True, flag="rows of "
                )
            except UserError as error:
                left_out[str(error).replace("--mesh=", "--meshes=")] = None  # the command's flag
                continue
            pairs[strategy, name] = Layout(
                mesh,
                strategies,
                None,
                strategy,
                fitting,
                uneven,
                user_model.build,
                model,
                rows,
                seq_len,
            )
    if not pairs:
        needed = ", ".join(f"{name} {sorted(used_axes(t))}" for name, t in strategies.items())
        unsuited = f"no mesh has just the axes that a strategy uses ({needed}); use other meshes"
        raise UserError(next(iter(left_out), unsuited))
    return pairs, left_out


def reference_layout(layouts: Iterable[Layout]) -> Layout:
    """The same model on one device, on a mesh with all axes that any of the layouts has."""
    first, *others = layouts
    names = dict.fromkeys(axis for x in (first, *others) for axis in x.mesh.axis_names)
    devices = first.mesh.devices.reshape(-1)[:1].reshape([1] * len(names))
    types = first.mesh.axis_types[:1] * len(names)
    return dataclasses.replace(first, mesh=Mesh(devices, tuple(names), axis_types=types))


def make_meshes(names: Iterable[str | Mesh]) -> list[Mesh]:
    """Makes meshes from their names. Call it first: without accelerators it simulates eight devices or more.

    Raises UserError.
    """
    sizes = {name: math.prod(parse(name).values()) for name in names if isinstance(name, str)}
    with contextlib.suppress(UserError):  # accelerators, and not eight of them
        make_mesh("8")
    made = {name: make_mesh(name) for name in sorted(sizes, key=lambda name: -sizes[name])}
    return [made[name] if isinstance(name, str) else name for name in names]


def default_meshes(rules: Rules) -> list[Mesh]:
    """All meshes of the devices that have the rules' axes, each with two devices at least."""
    used = used_axes(rules)
    all_sizes = meshes_of(jax.device_count(), rules)
    used_sizes = [{axis: n for axis, n in sizes.items() if axis in used} for sizes in all_sizes]
    return [
        make_mesh(describe(sizes))
        for sizes in used_sizes
        if math.prod(sizes.values()) == jax.device_count() and min(sizes.values(), default=1) > 1
    ]
