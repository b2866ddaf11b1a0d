"""Muon (Jordan 2024) on a mesh: every matrix is whole on one device while it is orthogonalized.

The matrices of all layers and experts are dealt out over the mesh. One all-to-all brings each to its
device, and one brings its update back to the devices that hold the momentum; where several devices
hold the same part, each takes some of the matrices, and updates are all-gathered. A step sends the
momenta twice, 4 bytes for each number that a device holds, and each device orthogonalizes 1 / devices
of the matrices; their number is padded with zeros.

Shapes: S matrices on a device, Q of them after dealing, R rows, C columns.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from optax.contrib import MuonState

from recipes.common.sharding import Tree, paths
from recipes.common.sharding.matrices import ITERATIONS, Form, devices, form_of

BETA = 0.95  # of the momentum
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration
EPS = 1e-8
RMS = 0.2  # of an update, as of AdamW's (Liu et al. 2025)


Sides = Sequence[Sequence[int]]  # the dims of a matrix's rows and columns


def muon(
    lr: optax.Schedule, weight_decay: float, matrices: Tree
) -> optax.GradientTransformationExtraArgs:
    """Like optax.contrib.muon with consistent_rms=0.2, with the same state.

    Args:
      matrices: a tree like the parameters, of the dims of their rows and columns, and None for Adam. Parameters
        may be a part of it.
    """
    dims = paths(matrices)

    def labels(params: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "muon" if _name(path) in dims else "adam", params
        )

    hidden = optax.chain(
        scale_by_muon(dims),
        optax.identity(),  # where optax.contrib.muon scales, and has no state
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(lr),
    )
    adam = optax.adamw(lr, b1=0.9, b2=0.95, eps=EPS, weight_decay=0.0, nesterov=True)
    return optax.partition({"muon": hidden, "adam": adam}, labels)


def scale_by_muon(matrices: dict[str, Sides]) -> optax.GradientTransformation:
    """Orthogonalized momenta (with Nesterov's look-ahead) of these matrices, by path."""

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, MuonState]:
        mu = optax.tree.update_moment(updates, state.mu, BETA, 1)
        count = optax.safe_increment(state.count)
        ahead = jax.tree.map(
            lambda m, g: BETA * m + (1 - BETA) * g,
            optax.tree.bias_correction(mu, BETA, optax.safe_increment(count)),
            optax.tree.bias_correction(updates, BETA, count),
        )
        flat, tree = jax.tree_util.tree_flatten_with_path(ahead)
        momenta = {_name(path): momentum for path, momentum in flat}
        scaled = orthogonalize(momenta, {name: matrices[name] for name in momenta}, state.ns_coeffs)
        return jax.tree.unflatten(tree, [scaled[name] for name in momenta]), MuonState(
            count=count, mu=mu, ns_coeffs=state.ns_coeffs
        )

    return optax.GradientTransformation(optax.contrib.scale_by_muon(COEFFICIENTS).init, update)


def _name(path: Sequence[Any]) -> str:
    return "/".join(str(key.key) for key in path)


# ---- dealing out matrices --------------------------------------------------------------------------


def orthogonalize(
    momenta: dict[str, jax.Array], matrices: dict[str, Sides], coefficients: jax.Array
) -> dict[str, jax.Array]:
    """Orthogonalizes the matrices of all momenta, scaled to an RMS of 0.2; laid out as they are.

    Args:
      coefficients: [3], of the Newton-Schulz iteration.
    """
    mesh = jax.sharding.get_abstract_mesh()
    groups: dict[Form, dict[str, tuple[int, ...]]] = {}
    specs = {}
    for name, momentum in momenta.items():
        spec = jax.typeof(momentum).sharding.spec if mesh.explicit_axes else ()
        specs[name] = jax.sharding.PartitionSpec(*spec, *[None] * (momentum.ndim - len(spec)))
        form, order = form_of(momentum.shape, specs[name], matrices[name], mesh)
        groups.setdefault(form, {})[name] = order
    scaled = {}
    for form, orders in groups.items():

        def on_device(shards: dict[str, jax.Array], coefficients, form=form, orders=orders):
            return _orthogonalize_shards(shards, coefficients, form, orders, mesh)

        if mesh.explicit_axes:
            on_device = jax.shard_map(
                on_device,
                mesh=mesh,
                in_specs=({name: specs[name] for name in orders}, jax.sharding.PartitionSpec()),
                out_specs={name: specs[name] for name in orders},
                check_vma=False,  # after an all-gather, it doesn't know that replicas are equal
            )
        scaled |= on_device({name: momenta[name] for name in orders}, coefficients)
    return scaled


def _orthogonalize_shards(
    shards: dict[str, jax.Array],
    coefficients: jax.Array,
    form: Form,
    orders: dict[str, tuple[int, ...]],
    mesh,
) -> dict[str, jax.Array]:
    """`orthogonalize` on one device, for parameters of one form."""
    sizes = tuple(dim.size for dim in form.dims)
    turned = {name: shards[name].transpose(order) for name, order in orders.items()}
    x = jnp.concatenate([shard.reshape(-1, *sizes) for shard in turned.values()])
    replicas = form.replicas(mesh)
    share = form.share(len(x), mesh)  # Q
    part = share * devices(mesh, form.axes)  # of each replica
    padding = part * devices(mesh, replicas) - len(x)
    x = jnp.pad(x, [(0, padding), *[(0, 0)] * len(sizes)])
    if replicas:
        x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(replicas) * part, part)
    x_QRC = _to_owners(x, form, share, mesh)
    update_QRC = jax.vmap(newton_schulz, in_axes=(0, None))(x_QRC, coefficients)
    update_QRC *= RMS * math.sqrt(max(x_QRC.shape[1:]))
    x = _from_owners(update_QRC, form, share, mesh)
    if replicas:
        x = jax.lax.all_gather(x, replicas, tiled=True)
    updates, start = {}, 0
    for name, order in orders.items():
        shape = turned[name].shape
        size = math.prod(shape) // math.prod(sizes)
        back = [order.index(i) for i in range(len(order))]
        updates[name] = x[start : start + size].reshape(shape).transpose(back)
        start += size
    return updates


def _to_owners(x: jax.Array, form: Form, share: int, mesh) -> jax.Array:
    """Parts of many matrices → a share of the matrices, whole: [Q, R, C]."""
    x = _exchange(x, form, mesh)
    # The first dims are now those of the devices that the parts come from.
    x = x.reshape(*(mesh.shape[axis] for axis in form.axes), share, *(d.size for d in form.dims))
    x = x.transpose(_order(form))
    rows, columns = (form.side(side, mesh) for side in (form.rows, form.columns))
    return x.reshape(share, rows, columns)


def _from_owners(x_QRC: jax.Array, form: Form, share: int, mesh) -> jax.Array:
    """The inverse of `_to_owners`."""
    order = _order(form)
    shape = (*(mesh.shape[axis] for axis in form.axes), share, *(d.size for d in form.dims))
    x = x_QRC.reshape([shape[i] for i in order])
    x = x.transpose([order.index(i) for i in range(len(order))])
    return _exchange(x.reshape(-1, *(d.size for d in form.dims)), form, mesh)


def _exchange(x: jax.Array, form: Form, mesh) -> jax.Array:
    """Sends the n-th part of the first dim to the n-th of the devices that share matrices."""
    if not form.axes:
        return x
    # Flat: XLA's CPU backend fails on all-to-alls of operands that it has transposed.
    flat = x.reshape(devices(mesh, form.axes), -1)
    flat = jax.lax.all_to_all(flat, form.axes, split_axis=0, concat_axis=0, tiled=True)
    return flat.reshape(x.shape)


def _order(form: Form) -> list[int]:
    """[mesh axes..., Q, dims...] → [Q, then each dim after the mesh axes that split it]."""
    stack = len(form.axes)
    order, axis = [stack], 0
    for i, dim in enumerate(form.dims):
        order += [*range(axis, axis + len(dim.axes)), stack + 1 + i]
        axis += len(dim.axes)
    return order


def newton_schulz(x_RC: jax.Array, coefficients: jax.Array) -> jax.Array:
    """Moves a matrix's singular values near 1, R ≤ C."""
    a, b, c = coefficients
    x_RC /= jnp.linalg.norm(x_RC) + EPS
    for _ in range(ITERATIONS):
        square_RR = x_RC @ x_RC.T
        x_RC = a * x_RC + (b * square_RR + c * square_RR @ square_RR) @ x_RC
    return x_RC
