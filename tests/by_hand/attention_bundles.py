"""Bundles of splash attention's kernels by blocks, for a table of recipes/instruments/results.

    python -m tests.by_hand.attention_bundles v5p 128 512x512x512 1024x1024x512 1024x1024x512+fused

Args: kind of TPU, head dim, then blocks of queries × keys × keys whose scores are computed at a time.
Needs the extra tpu-aot. Rows have 8,192 positions with segment ids; heads are 4 of queries and 1 of keys.
"""

import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from recipes.instruments.plan.compilers import topology
from recipes.instruments.plan.step_cycles import dump_bundles, read_bundles

T, HEADS = 8_192, 4


def bundles(kind: str, head_dim: int, blocks: str, folder: pathlib.Path) -> dict[str, int]:
    """Name of each kernel of a forward and a backward pass → its bundles."""
    sizes, _, fused = blocks.partition("+")
    query, key, compute = map(int, sizes.split("x"))
    of_dq = {} if fused else {"block_q_dq": query, "block_kv_dq": key}
    block_sizes = kernel.BlockSizes(
        block_q=query, block_kv=key, block_kv_compute=compute, block_q_dkv=query,
        block_kv_dkv=key, block_kv_dkv_compute=compute, use_fused_bwd_kernel=bool(fused), **of_dq,
    )  # fmt: skip
    mask = masks.MultiHeadMask([masks.CausalMask((T, T))] * HEADS)
    attend = kernel.make_splash_mha(mask, block_sizes=block_sizes, head_shards=1, q_seq_shards=1)

    def summed(q, k, v, ids):
        return attend(q, k, v, kernel.SegmentIds(ids, ids)).astype(jnp.float32).sum()

    chips = topology(kind, {"data": 8 if kind == "tpu7x" else 4}).devices[:1]
    mesh = Mesh(chips, ("data",), axis_types=(AxisType.Auto,))

    def array(*shape, dtype=jnp.bfloat16):
        sharding = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    keys = array(1, T, head_dim)
    gradients = jax.jit(jax.grad(summed, (0, 1, 2)))
    lowered = gradients.lower(array(HEADS, T, head_dim), keys, keys, array(T, dtype=jnp.int32))
    text = lowered.compile().as_text()
    found = read_bundles(folder)
    return {name: n for name, n in found.items() if "splash" in name and f"%{name} = " in text}


if __name__ == "__main__":
    files = pathlib.Path(tempfile.mkdtemp())
    dump_bundles(files)
    for asked in sys.argv[3:]:
        for path in files.iterdir():
            path.unlink()
        print(asked, bundles(sys.argv[1], int(sys.argv[2]), asked, files), flush=True)
