"""Seconds to trace attention for a TPU: splash, forward and backward, one row with segments.

python -m tests.by_hand.tracing 131072 1048576
"""

import functools
import itertools
import sys
import time

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from zoo.core.attention import attend
from zoo.llama_relatives import RULES


def main(lengths: list[int]) -> None:
    device = AbstractDevice(device_kind="TPU v5p", num_cores=None, platform="tpu")
    mesh = AbstractMesh((1,), ("data",), (AxisType.Explicit,), abstract_device=device)
    rules = tuple(RULES["fsdp"].items())
    for T, window in itertools.product((1_024, *lengths), (None, 4_096)):
        start = time.process_time()  # the first also imports the kernel
        with jax.sharding.use_abstract_mesh(mesh), nnx.logical_axis_rules(rules):
            traced = gradients.trace(*arguments(T), window)
        seconds = time.process_time() - start
        assert "splash_mha" in str(traced.jaxpr)
        print(f"{T:,} positions, window {window}: {seconds:.2f} s of CPU time")


def arguments(T: int):
    """8b's queries, keys, values and the output's gradient, and segment ids."""
    heads = (32, 8, 8, 32)
    arrays = [jax.ShapeDtypeStruct((1, T, n, 128), jnp.bfloat16) for n in heads]
    return *arrays, jax.ShapeDtypeStruct((1, T), jnp.int32)


@functools.partial(jax.jit, static_argnums=5)
def gradients(q, k, v, grad, ids, window):
    out, back = jax.vjp(lambda *qkv: attend(*qkv, ids, window=window), q, k, v)
    return out, back(grad)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [131_072, 1_048_576])
