"""Programs whose bytes are known by hand, for tests/sharding/test_hlo.py and other compilers.

A device has BLOCK bytes of a vector `v` of 16 rows a device. Expected are the bytes of all results on
one device, by kind, in one execution.
"""

import functools
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from recipes.common.report.hlo import collectives, crossing
from recipes.common.sharding.compiler_options import platform

AXIS = "ring"
WIDTH = 256
LAYERS = 5
SPLIT = PartitionSpec(AXIS)
Program = tuple[Callable, dict[str, int]]


def block(n: int) -> int:
    """Bytes of a device's part of `v`, [n · n, WIDTH] in float32 for n devices."""
    return n * WIDTH * 4


def programs(n: int) -> dict[str, Program]:
    """Name → (function of a device's part of `v`, [n, WIDTH], inside shard_map; what it sends)."""
    ring = [(i, (i + 1) % n) for i in range(n)]
    shift = lambda v: jnp.sin(lax.ppermute(v, AXIS, ring))  # noqa: E731
    swap = lambda v: lax.all_to_all(v, AXIS, 0, 0, tiled=True)  # noqa: E731
    gather = lambda v: lax.all_gather(v, AXIS, tiled=True)  # noqa: E731
    add = lambda v: lax.psum(v, AXIS)  # noqa: E731
    b = block(n)

    def repeat(f, times):
        def all_on_one_line(v):
            for i in range(times):
                v = jnp.tanh(f(v) * (i + 1))
            return v

        return all_on_one_line

    def independent(v):
        return sum(jnp.sin(gather(jnp.cos(v * i))).sum(0, keepdims=True) for i in range(3)) + v

    def scan(f, length, **options):
        return lambda v: lax.scan(lambda c, _: (f(c), None), v, None, length, **options)[0]

    def loop(start, test, step):
        return lambda v: lax.while_loop(
            lambda s: test(s[0]), lambda s: (s[0] + step, shift(s[1])), (start, v)
        )[1]

    def until_small(v):  # at most five times, and the sum once more
        unfinished = lambda s: (s[0] < 5) & (add(jnp.abs(s[1]).sum()) > 1)  # noqa: E731
        return lax.while_loop(unfinished, lambda s: (s[0] + 1, shift(s[1])), (0, v))[1]

    permutes = lambda times: {"collective-permute": times * b}  # noqa: E731
    return {
        "all_gather": (gather, {"all-gather": n * b}),
        "psum": (add, {"all-reduce": b}),
        "psum_scatter": (
            lambda v: lax.psum_scatter(v, AXIS, tiled=True),
            {"reduce-scatter": b // n},
        ),
        "all_to_all": (swap, {"all-to-all": b}),
        "ppermute": (shift, permutes(1)),
        "twelve all_to_alls": (repeat(swap, 12), {"all-to-all": 12 * b}),
        "three psums": (repeat(add, 3), {"all-reduce": 3 * b}),
        "three gathers, independent": (independent, {"all-gather": 3 * n * b}),
        "scan": (scan(shift, 100), permutes(100)),
        "scan of one trip": (scan(shift, 1), permutes(1)),
        "scan unrolled": (scan(shift, 7, unroll=3), permutes(7)),
        "scan backwards": (scan(shift, 6, reverse=True), permutes(6)),
        "scan in a scan": (scan(scan(shift, 3), 4), permutes(12)),
        "two on a line, in a scan": (scan(repeat(shift, 2), 4), permutes(8)),
        "from 2 to 7": (loop(2, lambda i: i < 7, 1), permutes(5)),
        "up to 4": (loop(0, lambda i: i <= 4, 1), permutes(5)),
        "down from 5": (loop(5, lambda i: i > 0, -1), permutes(5)),
        "in twos": (loop(1, lambda i: i < 8, 2), permutes(4)),
        "a sum that ends a loop": (until_small, permutes(5) | {"all-reduce": 6 * 4}),
        "one branch or the other": (
            lambda v: lax.cond(v[0, 0] > 0, repeat(shift, 2), shift, v),
            permutes(2),
        ),
    }


def layers(n: int) -> dict[str, Program]:
    """Name → (function of a device's part of weights, [LAYERS, WIDTH / n, WIDTH]; what it sends).

    Each program gathers the weights layer by layer and is differentiated, so each gather of a scan or
    a loop is in the forward pass and, if it is rematerialised, in the backward pass, too.
    """
    whole = WIDTH * WIDTH * 4

    def layer(x, w):  # a TPU would multiply, and so gather, in bfloat16
        return jnp.tanh(jnp.matmul(x, lax.all_gather(w, AXIS, tiled=True), precision="highest"))

    def scanned(layer, w):
        x = jnp.ones((n, WIDTH)) + lax.axis_index(AXIS)
        return lax.scan(lambda x, w: (layer(x, w), None), x, w)[0].sum()

    def listed(layer, w):
        x = jnp.ones((n, WIDTH)) + lax.axis_index(AXIS)
        for i in range(LAYERS):
            x = layer(x, w[i])
        return x.sum()

    def sent(gathers):
        return {"all-gather": gathers * LAYERS * whole, "reduce-scatter": LAYERS * whole // n}

    grad = lambda f, layer: jax.value_and_grad(functools.partial(f, layer))  # noqa: E731
    return {
        "forward": (functools.partial(scanned, layer), {"all-gather": LAYERS * whole}),
        "gradient": (grad(scanned, layer), sent(1)),
        "gradient, remat": (grad(scanned, jax.checkpoint(layer)), sent(2)),
        # Not rematerialised: XLA's CPU backend gathers once for both passes, with JAX 0.10.
        "gradient, no scan": (grad(listed, layer), sent(1)),
    }


def hlo_of(
    function: Callable, mesh: Mesh, *shape: int, where: PartitionSpec = SPLIT, **options
) -> str:
    """Compiles a function of each device's part, whose results are parts again."""

    def local(part):
        return jax.tree.map(lambda x: x.reshape(1, -1), function(part))

    program = jax.shard_map(local, mesh=mesh, in_specs=where, out_specs=SPLIT, check_vma=False)
    given = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, where))
    target = platform(mesh.devices.flat[0])
    lowered = jax.jit(program).trace(given).lower(lowering_platforms=(target,))
    return lowered.compile(options).as_text()


def counted(hlo: str) -> dict[str, int]:
    """Kind → bytes of all results on one device."""
    sums = Counter()
    for found in collectives(hlo):
        sums[found.kind] += found.times * found.bytes
    return dict(sums)


def cases(n: int) -> dict[str, tuple[Callable, tuple[int, ...], PartitionSpec, dict[str, int]]]:
    """Name → function, shape of its argument, how that is split, and what it sends."""
    rows = (n * n, WIDTH), SPLIT
    weights = (LAYERS, WIDTH, WIDTH), PartitionSpec(None, AXIS)
    return {name: (f, *rows, sent) for name, (f, sent) in programs(n).items()} | {
        name: (f, *weights, sent) for name, (f, sent) in layers(n).items()
    }


def crosses(hlo: str) -> dict[str, int]:
    """Kind → bytes that a device sends to other slices."""
    sums = Counter()
    for found in crossing(hlo):
        sums[found.kind] += found.times * found.bytes
    return dict(sums)


ACROSS_SLICES = {"all-reduce": LAYERS * WIDTH * WIDTH * 2 // 16}  # each chip its part of the sums
