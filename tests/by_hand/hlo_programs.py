"""Compiles the programs of tests/support/known_programs.py, whose bytes are known by hand, for TPUs and GPUs.

    python -m tests.by_hand.hlo_programs            # for every kind of TPU; needs tpu-aot
    python -m tests.by_hand.hlo_programs v5e h100   # for these kinds; GPUs need gpu-aot

Raises AssertionError where a compiled program sends other bytes.
"""

import functools
import sys
from collections import Counter

import tests.conftest  # noqa: F401, simulates the devices

import jax  # isort: skip
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from recipes.common.report.hlo import sent_by_kind
from recipes.common.sharding.compiler_options import compiler_options
from recipes.instruments.bench.targets import GPUS, TPUS, check_targets
from recipes.instruments.plan.compilers import topology
from recipes.instruments.plan.hardware import NODE
from tests.support.known_programs import (
    ACROSS_SLICES,
    AXIS,
    LAYERS,
    SPLIT,
    WIDTH,
    Program,
    block,
    cases,
    counted,
    crosses,
    hlo_of,
)

SENDING_KINDS = ("TPU v5", "TPU v6 lite", "TPU7x")  # whose SparseCores send

# ---- TPU -------------------------------------------------------------------------------------------


def ragged(n: int) -> Program:
    """XLA's CPU backend has no such collective. A device takes at most twice what it has."""

    def function(v):
        each = jnp.ones(n, jnp.int32)
        out, first = jnp.zeros((2 * n, WIDTH)), jnp.arange(n, dtype=jnp.int32)
        return lax.ragged_all_to_all(v, out, first, each, first, each, axis_name=AXIS)

    return function, {"ragged-all-to-all": 2 * block(n)}


def gathers_beside_matmuls(mesh: Mesh) -> None:
    """Gathers that share a channel, long enough for v5e to overlap them with matmuls."""
    n, size, dtype = mesh.size, 2048, jnp.bfloat16

    def local(w, x):
        def layer(x, w):
            return jnp.tanh(x @ lax.all_gather(w, AXIS, tiled=True))

        def loss(w):
            y = x
            for i in range(LAYERS):
                y = jax.checkpoint(layer)(y, w[i])
            return y.astype(jnp.float32).sum()

        return jax.grad(loss)(w)

    where = PartitionSpec(None, AXIS), SPLIT
    given = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(((LAYERS, size, size), (n * 512, size)), where, strict=True)
    ]
    program = jax.shard_map(local, mesh=mesh, in_specs=where, out_specs=where[0], check_vma=False)
    hlo = jax.jit(program).lower(*given).compile().as_text()
    # The last layer's value is not needed but in its backward pass.
    want = (2 * LAYERS - 1) * size * size * 2
    assert counted(hlo)["all-gather"] == want, (counted(hlo), want)
    lines = hlo.count(" all-gather(")
    print(f"  {2 * LAYERS - 1} gathers beside matmuls, written {lines} times")


def scatters(kind: str) -> None:
    """Over one of two mesh axes: of columns, a reduce-scatter; of rows, one that is written as an
    all-reduce and a slice, somewhat larger than asked for, and permutes for the difference.
    """
    mesh = topology(kind, {"other": 4, AXIS: 4})
    textbook = 3 * 4096 * 4096 / 4 * 4  # bytes: 3 parts of 4, of float32
    for name, dim, most in (("columns", 1, 1.0), ("rows", 0, 1.2)):
        scatter = functools.partial(
            lax.psum_scatter, axis_name=AXIS, scatter_dimension=dim, tiled=True
        )
        sent = sent_by_kind(hlo_of(lambda v, f=scatter: f(v * 2), mesh, 4 * 4096, 4096), 16)
        assert sent.keys() <= {"reduce-scatter", "collective-permute"}, sent
        assert 1 <= sum(sent.values()) / textbook <= most, (sent, textbook)
        print(f"  {name} scattered: {sum(sent.values()) / textbook:.2f} of the textbook")


def ring_of_a_gradient(mesh: Mesh) -> None:
    """A matmul whose result is scattered: XLA makes a ring of permutes in a loop, and unrolls it."""
    n, size = mesh.size, 2048
    rows = jax.ShapeDtypeStruct((n * 512, size), jnp.bfloat16, sharding=NamedSharding(mesh, SPLIT))
    options = {"xla_tpu_reduce_scatter_collective_matmul_mode": "post_spmd"}
    product = jax.jit(
        lambda x, y: jnp.matmul(x.T, y, out_sharding=NamedSharding(mesh, SPLIT)),
        compiler_options=options,
    )
    sent = counted(product.lower(rows, rows).compile().as_text())
    chunk = size * size * 2 // n
    chunks = sent["collective-permute"] / chunk
    assert list(sent) == ["collective-permute"], sent
    assert n - 1 <= chunks <= n + 1, sent
    print(f"  ring of {n} chips: {chunks:.0f} chunks of 1/{n}")


def scatters_with_our_options(mesh: Mesh) -> None:
    """Over all chips of a torus: a reduce-scatter, by SparseCores where they send."""
    n, size = mesh.size, 4096
    scatter = functools.partial(lax.psum_scatter, axis_name=AXIS, scatter_dimension=0, tiled=True)
    text = hlo_of(lambda v: scatter(v * 2), mesh, n * size, size, **compiler_options(mesh))
    sent, textbook = sent_by_kind(text, n), (n - 1) / n * size * size * 4
    assert sent.keys() <= {"reduce-scatter", "collective-permute"}, sent  # permutes on v4
    assert 1 <= sum(sent.values()) / textbook <= 1.2, (sent, textbook)
    by_sparse_cores = 'async_execution_thread="sparsecore"' in text
    assert by_sparse_cores == (mesh.devices.flat[0].device_kind in SENDING_KINDS)
    print(f"  scattered over {n} chips, by SparseCores: {by_sparse_cores}")


def across_slices(mesh: Mesh) -> str:
    """The compiled program: gradients of LAYERS weights, WIDTH² of bfloat16, summed over all chips.

    The mesh has an axis `data` over slices and AXIS inside. golden/two_slices.hlo is that of two
    slices of 16 v5e chips, without metadata and the compiler's configurations.
    """

    def local(weights, x):
        def layer(x, w):
            y = jnp.sin(x @ w)
            return y, lax.psum(y.T @ x, ("data", AXIS))

        x, grads = lax.scan(layer, x, weights)
        return grads, lax.psum(x.sum(), AXIS)

    where = PartitionSpec(), PartitionSpec(("data", AXIS))
    given = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(
            ((LAYERS, WIDTH, WIDTH), (mesh.size * 64, WIDTH)), where, strict=True
        )
    ]
    program = jax.shard_map(
        local, mesh=mesh, in_specs=where, out_specs=PartitionSpec(), check_vma=False
    )
    return jax.jit(program).lower(*given).compile().as_text()


def wrong(kind: str, n: int) -> list[str]:
    """Returns the programs on n chips of a kind whose bytes differ from those known by hand."""
    mesh, found = topology(kind, {AXIS: n}), {}
    known = cases(n)
    if kind in TPUS or n <= NODE:  # between nodes of GPUs it is several transfers
        function, bound = ragged(n)
        known["ragged"] = function, (n * n, WIDTH), SPLIT, bound
    for name, (f, shape, where, want) in known.items():
        found[name] = counted(hlo_of(f, mesh, *shape, where=where)), want
        scattered, got = want.get("reduce-scatter", 0), found[name][0]
        # Over all chips of a slice TPUs sum it all and take a part; tpu7x does so in some programs.
        if kind in TPUS and scattered and "reduce-scatter" not in got:
            found[name] = got, want | {"all-reduce": n * scattered, "reduce-scatter": 0}
    bad = [f"{kind}, {k}: {a}, not {b}" for k, (a, b) in found.items() if Counter(a) != Counter(b)]
    print(f"{kind}: {len(known)} programs, {n} devices, {len(known) - len(bad)} to the byte")
    return bad


def main(kinds: list[str]) -> None:
    check_targets(kinds, [16])
    for kind in kinds:
        for n in (NODE, 16) if kind in GPUS else (16,):
            bad = wrong(kind, n)
            assert not bad, "\n".join(bad)
        if kind in GPUS:
            continue
        mesh = topology(kind, {AXIS: 16})
        gathers_beside_matmuls(mesh)
        scatters(kind)
        ring_of_a_gradient(mesh)
        scatters_with_our_options(mesh)
        for count in (2, 4):
            sent = crosses(across_slices(topology(kind, {"data": count, AXIS: 16}, count)))
            assert sent == ACROSS_SLICES, (sent, ACROSS_SLICES)
        print("  2 and 4 slices: gradients / chips of a slice")


if __name__ == "__main__":
    TPUS["tpu7x"] = (16,)  # two devices a chip, which benches do not know
    main(sys.argv[1:] or list(TPUS))
