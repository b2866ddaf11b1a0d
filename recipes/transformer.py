"""Trains the decoder-only Transformer on text, sharded over any mesh.

    python -m recipes.transformer --mesh=4x2                 # a laptop: 8 simulated devices
    python -m recipes.transformer --mesh=1x8 --rules=tp      # goes on from there, split another way
    python -m recipes.transformer --steps=0 --prompt="def "  # evaluates and writes text

Running the same command again resumes. --dataset takes your own text; --size a larger model.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from data import text
from recipes.common import checkpoint, loop, report, sharding
from recipes.common.cli import Run, flag, start
from recipes.common.errors import UserError
from recipes.common.mesh import make_mesh
from recipes.common.metrics import Log, quote, say
from recipes.common.optimizer import adamw, apply, change_of_steps, gradients, schedule, skipping
from recipes.common.workdir import Workdir
from zoo.transformer import REMAT, RULES, Config, Transformer

SIZES = {
    "tiny": Config.tiny,
    "small": Config.small,
    "medium": Config.medium,
    "124m": Config.gpt2_124m,
    "1b": Config.llama_1b,
    "8b": Config.llama_8b,
    "70b": Config.llama_70b,
}


@dataclasses.dataclass(frozen=True)
class Flags:
    """What this recipe has besides the flags that all have."""

    size: str = flag(
        "", "of the model; empty: small, or that of the checkpoint", choices=["", *SIZES]
    )
    seq_len: int = flag(128, "tokens of context", at_least=1)
    dtype: str = flag(
        "", "of activations and matmuls; empty: bfloat16 on accelerators, else float32",
        choices=["", "float32", "bfloat16"], may_change=True,
    )  # fmt: skip
    remat: str = flag(
        "", "what a layer keeps for its backward pass; empty: the size's own",
        choices=["", *REMAT], may_change=True,
    )  # fmt: skip
    dataset: str = flag("stdlib", "stdlib, a path to text, .jsonl or .parquet, or hf:NAME")
    text_column: str = flag("text", "where .jsonl, .parquet and hf: datasets keep their text")
    warmup_steps: int = flag(40, "steps in which the learning rate rises to its peak", at_least=0)
    weight_decay: float = flag(0.1, "of matrices, times the learning rate, a step", at_least=0.0)
    clip_norm: float = flag(1.0, "largest global norm of a gradient", at_least=1e-9)
    accumulate: int = flag(1, "parts of a batch whose gradients are added up in turn", at_least=1)
    prompt: str = flag("", "what the sample at the end begins with", may_change=True)
    sample_bytes: int = flag(400, "length of that sample; 0: none", at_least=0, may_change=True)


def main(run: Run, flags: Flags) -> None:
    # ---- What and where: model, table and mesh, checked together before anything is allocated ----
    mesh = make_mesh(run.mesh)
    work = Workdir(run, "transformer")
    config = model_config(flags, work.start, mesh.devices.flat[0].platform)
    if run.batch_size % flags.accumulate:
        raise UserError(
            f"--batch_size={run.batch_size} does not divide by --accumulate={flags.accumulate}"
        )
    dims = {"batch": ("--batch_size", run.batch_size)}
    layout = sharding.lay_out(
        lambda: Transformer(config, rngs=nnx.Rngs(run.seed)), RULES, run.rules, mesh, dims
    )
    changed = work.check_flags(run, flags)
    if work.start:
        checkpoint.check_params(work.start, layout)

    # ---- Data: batch k is a pure function of (seed, k), on any mesh and number of processes ----
    corpus = text.corpus(flags.dataset, flags.text_column)
    text.check(corpus, flags.seq_len)
    if config.vocab_size <= text.START:
        raise UserError(f"the model knows {config.vocab_size} tokens and text has {text.START + 1}")
    facts = {"seed": run.seed, "batch_size": run.batch_size, "seq_len": flags.seq_len}
    work.check_data(facts | {"dataset": flags.dataset, "fingerprint": corpus.fingerprint})
    shard = loop.process_rows(layout, run.batch_size)
    window = layout.abstract_batch(np.zeros(flags.seq_len + 1, np.int32), run.batch_size)

    # ---- The step: a pure function of (state, batch), compiled once for this layout -------------
    rate = schedule(run.learning_rate, flags.warmup_steps, run.steps)
    optimizer = adamw(rate, flags.weight_decay, flags.clip_norm)
    abstract = sharding.abstract_state(layout, optimizer)

    def loss(params, window_BT):
        """(sum of nats, number of targets) of a batch of windows."""
        tokens_BT, targets_BT = jnp.maximum(window_BT[:, :-1], 0), window_BT[:, 1:]
        segment_ids_BT = jnp.cumsum(tokens_BT == text.START, axis=1)  # a document sees only itself
        return layout.plan.bind(params).loss(tokens_BT, targets_BT, segment_ids_BT)

    def train_step(state, window_BT):
        mean_loss, grads = gradients(loss, state["params"], window_BT, flags.accumulate)
        metrics = {"loss": mean_loss, "grad_norm": optax.tree.norm(grads)}
        return apply(optimizer, state, grads), metrics | {"learning_rate": rate(state["step"])}

    say(report.headline(layout), report.table(layout, abstract))
    step = None
    if run.steps > work.step:
        where = sharding.shardings(abstract)  # pinned: the state comes out as it went in
        pinned = dict(donate_argnums=0, out_shardings=(where, None))
        step = layout.compile(skipping(train_step, run.skip_nonfinite), abstract, window, **pinned)
        say(report.step(step))

    # ---- The state: resumed, on given parameters, or new; never two of them alive ---------------
    state = work.first_state(layout, optimizer, run.seed, abstract)
    before = changed.get("steps")
    say(work.origin(), *change_of_steps(before, run, flags.warmup_steps, work.step))

    # ---- Train ------------------------------------------------------------------------------------
    settings = dataclasses.asdict(run) | dataclasses.asdict(flags)
    work.begin(run.keep_checkpoints, checkpoint.metadata("transformer", config, layout, settings))
    log = Log(work.metrics, work.step, run, unit="tokens", per_step=run.batch_size * flags.seq_len)
    batches = text.train_batches(corpus, flags.seq_len, run.batch_size, run.seed, work.step, shard)
    state = loop.fit(step, state, batches, layout, run, log, work)

    # ---- What it has learned ------------------------------------------------------------------------
    held_out = text.held_out_batches(corpus, flags.seq_len, run.batch_size, shard)
    nats, targets = loop.evaluate(loss, state["params"], held_out, layout, run.batch_size)
    log.write(
        {"step": int(state["step"]), "held_out_loss": nats / targets, "held_out_targets": targets}
    )
    log.close()
    per_byte = f"{nats / targets:.4f} nats/byte, {nats / targets / math.log(2):.4f} bits/byte"
    say(f"Held-out loss {per_byte}, over {targets:,.0f} bytes.")
    if flags.sample_bytes:
        say("Sample:", *quote(sample(layout, state, flags)))
    work.close()
    say(*work.farewell(layout), log.times())


def model_config(flags: Flags, source: checkpoint.Source | None, platform: str) -> Config:
    """The architecture from --size or the checkpoint; how to compute it from the other flags."""
    if source and not flags.size:
        config = checkpoint.config_from(Config, source)
    else:
        config = SIZES[flags.size or "small"]()
    dtype = flags.dtype or ("float32" if platform == "cpu" else "bfloat16")
    return dataclasses.replace(config, dtype=dtype, remat=flags.remat or config.remat)


def sample(layout: sharding.Layout, state: sharding.Tree, flags: Flags) -> str:
    """Text that the model writes after --prompt, at temperature 0.8.

    Each byte is a whole forward pass over the last `seq_len` tokens: simple, and fast enough here.
    """
    prompt = np.concatenate([[text.START], text.encode(flags.prompt)]).astype(np.int32)
    length, context = len(prompt) + flags.sample_bytes, flags.seq_len
    # The batch has to divide over its shards: each shard writes the same text.
    tokens_BT = np.zeros((layout.batch_shards, max(length, context)), np.int32)
    tokens_BT[:, : len(prompt)] = prompt

    def write(params, tokens_BT, key_data):
        model = layout.plan.bind(params)
        key = jax.random.wrap_key_data(key_data)

        def next_byte(i, tokens_BT):
            begin = jnp.maximum(i - context, 0)
            window_BT = jax.lax.dynamic_slice_in_dim(tokens_BT, begin, context, axis=1)
            logits_V = model(window_BT)[0, i - 1 - begin, : text.START]  # bytes only
            byte = jax.random.categorical(jax.random.fold_in(key, i), logits_V / 0.8)
            return tokens_BT.at[:, i].set(byte)

        return jax.lax.fori_loop(len(prompt), length, next_byte, tokens_BT)

    tokens_BT = jax.device_put(tokens_BT, layout.replicated)
    arguments = (state["params"], tokens_BT, state["rngs"]["default"])
    written_BT = layout.compile(write, *arguments, out_shardings=layout.replicated)(*arguments)
    return text.decode(np.asarray(written_BT)[0, :length])


if __name__ == "__main__":
    start(main, Run(steps=600, batch_size=16, learning_rate=4e-3), Flags())
