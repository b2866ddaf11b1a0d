"""Options of XLA's compilers for the programs that a Layout compiles, and what each option buys."""

import jax

# NVIDIA's compiler has other options from JAX 0.11.1 on, and refuses unknown ones.
NEW_OPTIONS = jax.__version_info__ >= (0, 11, 1)

# Passes of the CPU's compiler that its programs do without.
CPU_PASSES = [
    # Widens all-reduces of 16 bits. It aborts on those of pipelines with an axis `model`, whose
    # reduction JAX ends with a copy. A later pass widens all arithmetic of 16 bits anyway.
    "all-reduce-promotion",
]
if jax.__version_info__ >= (0, 11):
    # Lets a product read a matrix transposed. The kernels that add up products of bfloat16 in float32
    # can't, and what is left for others adds up in bfloat16: the gradient of the attention's `o` under
    # `tp` was wrong by 1.5% instead of 0.9%. Without the pass, steps take 6% less time, float32's the
    # same.
    CPU_PASSES += ["transpose-folding"]


def _pipelined(kind: str) -> dict[str, bool | str]:
    """The option that lets collectives of a kind overlap with neighbouring iterations of a loop."""
    if NEW_OPTIONS:
        return {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON"}
    return {f"xla_gpu_enable_pipelined_{kind}": True}


# Gradients are reduce-scattered: by default, TPUs but tpu7x sum them whole and slice. Where a chip has
# SparseCores, processors beside its matrix units, they gather, scatter and sum while the core goes
# on: on v5p and v6e, on tpu7x by default. See recipes/instruments/results/tpu.md.
SPARSE_CORES = {
    f"xla_tpu_enable_sparse_core_{option}": "true"
    for option in (
        # Over one dim of a torus, over two, over three.
        "collective_offload_all_gather",
        "collective_offload_2d_all_gather",
        "collective_offload_3d_all_gather",
        "collective_offload_reduce_scatter",
        "collective_offload_nd_reduce_scatter",
        "reduce_scatter_v2",
        "collective_offload_all_reduce",
    )
}

# By platform, as `platform` names it, and by kind of device, as JAX does; a device has those of both.
COMPILER_OPTIONS: dict[str, dict[str, bool | int | str]] = {
    "cpu": {"xla_disable_hlo_passes": ",".join(CPU_PASSES)},
    "tpu": {
        **SPARSE_CORES,
        # Small weights are gathered too, instead of summed with zeros: 124m on 256 v5e sends 1.1 GB
        # a step, with it 0.7.
        "xla_tpu_prefer_async_allgather_to_allreduce": "true",
        # Dropless rows travel while the core computes; newer compilers (libtpu 0.0.50) do so by default.
        "xla_tpu_enable_async_ragged_all_to_all": "true",
    },
    # Matmuls take larger blocks, because an operation may use more of a core's vector memory than by
    # default: see recipes/instruments/results/tpu.md. v4 has no more.
    "TPU v5": {  # v5p
        "xla_tpu_scoped_vmem_limit_kib": "32768",
    },
    "TPU v5 lite": {  # v5e
        "xla_tpu_scoped_vmem_limit_kib": "24576",
    },
    "TPU v6 lite": {  # v6e
        "xla_tpu_scoped_vmem_limit_kib": "49152",
    },
    "TPU7x": {
        "xla_tpu_scoped_vmem_limit_kib": "49152",
    },
    # NVIDIA. Measured with 8b with 4 layers, fsdp on 8 H200, JAX 0.11.2. Without these options, 5.6
    # GB are gathered, of which 2.8 GB overlap with matmuls, as do 101 of 481 MB of scatters; the
    # peak is 6.9 GB. With all of them, 3.8 GB and 186 MB overlap, and the peak is 6.7 GB.
    "cuda": {
        # A layer's gathers and scatters may overlap with the layer before or after it. These two
        # alone let 232 MB of the scatters overlap; the peak is 6.4 GB.
        **_pipelined("all_gather"),
        **_pipelined("reduce_scatter"),
        # Two layers per iteration: together with the two above, 3.5 GB of the gathers overlap, and
        # iterations pass on their results without copies: 1.6 GB of copies instead of 3.4 GB.
        "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER",
        # Fewer, larger transfers: 34 gathers instead of 50, 6 scatters instead of 10.
        "xla_gpu_all_gather_combine_threshold_bytes": 2**27,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**27,
        # Replica groups: gradients are scattered within a group and summed between groups, instead
        # of summed over all GPUs and sliced. 124m with 2 layers, hsdp_tp on 2x8x1: all-reduces send
        # 13 MB and scatters 92, without it 63 and 68.
        **({"xla_gpu_all_reduce_splitter_ignore_profitability_check": True} if NEW_OPTIONS else {}),
    },
}

# For models in 16 bits on CPUs, which compute in float32 and round where the program says so. By default,
# the compiler leaves out a rounding that is widened again in the same fusion. Then training and
# generation, whose fusions differ, round at different places: see recipes/docs/precision.md.
ROUND_AS_WRITTEN: dict[str, bool | int | str] = {"xla_allow_excess_precision": False}

# For proofs on simulated devices: programs compile in a third of the time, to slower code. Sharding
# and collectives are decided before code is generated, which takes most of the time: least where LLVM
# does not optimize it, and where the older generator of loops makes it. LLVM gets a program in one part,
# not in many that it compiles in parallel: 10% less CPU time.
QUICK: dict[str, bool | int | str] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
}
if jax.__version_info__ < (0, 11):  # newer ones have no other generator
    QUICK["xla_cpu_use_fusion_emitters"] = False


def platform(device: jax.Device) -> str:
    """Whose compiler a device needs: "cpu", "tpu", "cuda" for NVIDIA GPUs, "gpu" for others."""
    capability = getattr(device, "compute_capability", "")  # "9.0" on NVIDIA, "gfx942" on AMD
    nvidia = device.platform == "gpu" and capability[:1].isdecimal()
    return "cuda" if nvidia else device.platform


def compiler_options(
    mesh: jax.sharding.Mesh, dtype: str | None = None
) -> dict[str, bool | int | str]:
    """The options for programs on this mesh.

    Args:
      dtype: of the model's activations; None: float32.
    """
    device = mesh.devices.flat[0]
    target = platform(device)
    if target == "cpu" and dtype in ("bfloat16", "float16"):
        return COMPILER_OPTIONS["cpu"] | ROUND_AS_WRITTEN
    if target == "cuda" and mesh.size == 1:
        return {}  # nothing is sent, and unrolled loops would only compile longer
    return COMPILER_OPTIONS.get(target, {}) | COMPILER_OPTIONS.get(device.device_kind, {})
