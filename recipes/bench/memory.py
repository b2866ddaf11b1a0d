"""x"""

# ---- memory ----------------------------------------------------------------------------------------


ON_DATA = [name for name, table in RULES.items() if used_axes(table) == {"data"}]  # strategies


@dataclasses.dataclass(frozen=True)
class MemoryFlags:
    size: str = flag("8b", "Size of the Transformer.", group="model", choices=SIZES)
    remats: str = flag(",".join(reversed(REMAT)), "Remat policies, comma-separated.", group="model")
    seq_len: int = flag(4_096, "Tokens of context.", group="data", at_least=1)
    rows: int = flag(1, "Sequences per chip.", group="data", at_least=1)
    chips: str = flag("16,256", "Numbers of chips, comma-separated.")
    kinds: str = flag("v4,v5e,v5p,v6e", "Kinds of TPU, or cpu, comma-separated.")
    rules: str = flag(
        ON_DATA[-1], "Strategy, of those that use no mesh axis but data.", choices=ON_DATA
    )


def memory(flags: MemoryFlags) -> None:
    kinds = one_of("kinds", flags.kinds, [*TOPOLOGIES, "cpu"])
    counts = numbers("chips", flags.chips)
    check_slices(kinds, counts)
    cases = itertools.product(kinds, counts, one_of("remats", flags.remats, REMAT))
    table = Table("kind", "chips", "remat", "parameters", "optimizer", "gradients",
                  "saved activations", "live working set", "sum", "compiled peak", "sum / peak")  # fmt: skip
    for kind, chips, remat in cases:
        config = dataclasses.replace(SIZES[flags.size](), dtype="bfloat16", remat=remat)
        mesh = topology(kind, {"data": chips})
        step = make_step(config, flags.rules, mesh, flags.rows * chips, flags.seq_len)
        compiled = _compile(step, f"{flags.size} {remat} on {chips} {kind}")
        if isinstance(compiled, TooLarge):
            peak, bytes_ = compiled
        else:
            bytes_ = compiled.memory_analysis().peak_memory_in_bytes
            peak = report.size(bytes_)
        parts = memory_parts(step)
        total = sum(parts.values())
        cells = map(report.size, [*parts.values(), total])
        table.row(kind, chips, remat, *cells, peak, f"{total / bytes_:.2f}")
    print0("", f"{flags.size}, {flags.rules}, {flags.rows} × {flags.seq_len:,} tokens per chip. The "
           "sum is computed analytically.", machine())  # fmt: skip


def memory_parts(step: Step) -> dict[str, float]:
    """Bytes on a device at the step's peak, computed analytically, by what they are.

    Saved for the backward pass: each layer's input, and what its remat policy names. The peak is the
    larger of two. In the loss: the unembedding table in use, its gradient, one chunk's logits and
    their gradient. In the layers' backward pass: all their gradients at rest and the table's
    gradient, whole; and as the live working set the weights in use of two layers (one of them is on
    its way), what one layer computes again, float32 attention scores included, and all layers'
    weights in the compute dtype, which the compiler casts at once, before the loop.
    """
    layout, config = step.layout, step.config
    width = jnp.dtype(config.dtype).itemsize

    def over(axis):
        return shards(layout.table, axis, layout.mesh.shape)

    rows, length = layout.batch_size // layout.batch_shards, step.seq_len
    D, F = config.embed, config.mlp // over("mlp")
    q = config.num_heads * config.head_dim // over("heads")
    kv = 2 * config.num_kv_heads * config.head_dim // over("kv_heads")
    block = max(128, -(-length // 8))  # of queries, as `attend` takes them
    ends = [min(start + block, length) for start in range(0, length, block)]
    seen = sum((end - start) * end for start, end in zip([0, *ends], ends, strict=False))
    scores = rows * config.num_heads // over("heads") * seen * 4
    layer = (D * (2 * q + kv) + 3 * D * F) * width
    kept = {"full": D, "sublayers": 2 * D, "dots": 2 * D + q + kv + 2 * F}
    # Whatever a derivative needs: 6 D in float32; keys and values once per block of queries.
    kept["none"] = 6 * D * 4 // width + 5 * D + 6 * F + 2 * q + kv * sum(ends) // length
    saved = rows * length * kept[config.remat] * width
    if config.remat == "none":  # also weights in use, and scores before and after the softmax
        saved += layer + scores * (4 + width) // 4
    chunk = min(length, config.loss_chunk)
    logits = rows * chunk * config.vocab_size // over("vocab") * (4 + width)
    in_use = config.vocab_size // over("vocab") * D * width
    inside = rows * length * (2 * q + kv + 3 * F + 2 * D) * width
    params = report.bytes_per_device(step.abstract["params"])
    stacked = report.bytes_per_device(step.abstract["params"]["layers"])
    cast = stacked * width // 4 if width < 4 else 0
    loss = in_use, in_use + logits
    backward = stacked + in_use, cast + 2 * layer + inside + scores
    grads, live = max(loss, backward, key=sum)
    return {
        "parameters": params,
        "optimizer": report.bytes_per_device(step.abstract["opt_state"]),
        "gradients": grads,
        "saved activations": config.num_layers * saved,
        "live working set": live,
    }


