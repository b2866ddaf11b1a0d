"""Layers of several kinds in an order without a period: nested loops over stretches that repeat.

Each layer of a loop's body is compiled once, so a program grows with the order's distinct stretches, not
with its depth. Nemotron-H's 52 layers, M-M-M-M*-M-M-M-M-M*-…, compile 7 bodies:

    M, 3 × (-M), 4 × (*, 5 × (-M)), -

A model that has such layers takes `run_layers` as its method, and unlike_layers' `make_layers`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .periods import merge_first_dims, run_layers as run_one_by_one
from .unlike_layers import stacks_of
from ..core.stack import remat_input

# A loop's number of turns and its body, or one layer's number in the order.
Program = tuple["int | tuple[int, Program]", ...]

LOOP_COST = 0.5  # of a loop, in bodies of layers


@functools.cache
def find_stretches(order: tuple) -> Program:
    """The cheapest nested loops that run layers in this order, by the number of bodies to compile.

    Args:
      order: the kind of each layer; equal kinds compile to equal bodies.

    Returns: numbers in the order, of the first layer that each body runs.
    """
    names = {kind: chr(number) for number, kind in enumerate(dict.fromkeys(order))}
    text = "".join(names[kind] for kind in order)  # which compares faster

    @functools.cache
    def best(first: int, last: int) -> tuple[float, Program]:
        length = last - first
        if length == 1:
            return 1.0, (first,)
        splits = [(best(first, k), best(k, last)) for k in range(first + 1, last)]
        options = [(a[0] + b[0], a[1] + b[1]) for a, b in splits]
        for size in range(1, length // 2 + 1):
            repeats = (
                length % size == 0 and order[first + size : last] == order[first : last - size]
            )
            if repeats:
                cost, body = best(first, first + size)
                options.append((cost + LOOP_COST, ((length // size, body),)))
        return min(options, key=lambda option: option[0])

    return best(0, len(text))[1]


def bodies(program: Program) -> int:
    """The number of layers that a program compiles."""
    return sum(1 if isinstance(item, int) else bodies(item[1]) for item in program)


def run_layers(self, x_BTD, inputs):
    """`Decoder.run_layers`; a cache keeps a dict, stack → what its layers keep."""
    config = self.config
    stacks = stacks_of(self, inputs)
    depth = sum(jax.tree.leaves(stack)[0].shape[0] for stack in stacks.values())
    pairs = tuple(zip(config.period, config.kinds, strict=True))
    order = tuple(pairs[l % len(pairs)] for l in range(depth))

    def run_layer(x, layer, kind):
        function = functools.partial(self.run_layer, inputs, kind=kind)
        return remat_input(function, config.remat_policy)(x, layer)

    run = functools.partial(run_one_by_one, run_layer, stacks, config.remat_policy)
    x_BTD, outputs = run_program(find_stretches(order), order, run, x_BTD, dict.fromkeys(stacks, 0))
    metrics = [metrics for _, metrics in outputs.values() if metrics]
    metrics = jax.tree.map(lambda *x: jnp.concatenate(x), *metrics) if metrics else {}
    return x_BTD, {name: kept for name, (kept, _) in outputs.items()}, metrics


def run_program(program: Program, order: tuple, run, x, first: dict, in_loop: bool = False):
    """Runs x through the layers of a program: (x, stack → outputs of its layers).

    Args:
      run: periods.run_layers of the stacks.
      first: stack → the number of its first layer to run.
    """
    outputs: dict[str, list] = {}
    for item in program:
        if isinstance(item, int):
            # Outside a loop, XLA may merge forward and recomputed operations.
            x, output = run([order[item]], x, first, prevent_cse=not in_loop)
            counts = {order[item][0]: 1}
        else:
            turns, body = item
            counts = count_layers(body, order)
            firsts = {
                name: number + jnp.arange(turns) * counts.get(name, 0)
                for name, number in first.items()
            }

            def run_body(x, first: Any, body=body):
                return run_program(body, order, run, x, first, in_loop=True)

            x, output = jax.lax.scan(run_body, x, firsts)
            output = {
                name: jax.tree.map(merge_first_dims, of_stack) for name, of_stack in output.items()
            }
            counts = {name: turns * count for name, count in counts.items()}
        first = {name: number + counts.get(name, 0) for name, number in first.items()}
        for name, of_stack in output.items():
            outputs.setdefault(name, []).append(of_stack)
    joined = {
        name: jax.tree.map(lambda first, *x: jnp.concatenate((first, *x)) if x else first, *parts)
        for name, parts in outputs.items()
    }
    return x, joined


def count_layers(program: Program, order: tuple) -> dict[str, int]:
    """Stack → the number of its layers that a program runs."""
    counts: dict[str, int] = {}
    for item in program:
        if isinstance(item, int):
            of_item = {order[item][0]: 1}
        else:
            inner = count_layers(item[1], order)
            of_item = {name: item[0] * count for name, count in inner.items()}
        for name, count in of_item.items():
            counts[name] = counts.get(name, 0) + count
    return counts
