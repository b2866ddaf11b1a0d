"""Trains the decoder-only Transformer on text, sharded over any mesh.

    python -m recipes.transformer --mesh=4x2                 # a laptop: 8 simulated devices
    python -m recipes.transformer --mesh=1x8 --rules=tp      # resumes that run, sharded differently
    python -m recipes.transformer --steps=0 --prompt="def "  # evaluates and writes text

Running the same command again resumes. --dataset takes your own text; --size a larger model.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from data import text
from recipes.common import checkpoint
from recipes.common.analysis import flops
from recipes.common.checkpoint import RunFolder, open_run
from recipes.common.runtime import Run, UserError, flag, make_mesh, print0, quote
from recipes.common.runtime.start import start
from recipes.common.sharding import Layout, Tree, make_layout
from recipes.common.train.loop import finish, fit
from recipes.common.train.optimizer import OPTIMIZERS, LearningRate, hidden_matrices, make_optimizer
from recipes.common.train.step import TrainStep
from zoo.transformer import REMAT, SIZES, Config, Transformer


@dataclasses.dataclass(frozen=True)
class Flags:
    """Recipe-specific flags."""

    dataset: str = flag(
        "stdlib", "Training text: stdlib, a path to text, .jsonl or .parquet, or hf:NAME.",
        "data",
    )  # fmt: skip
    text_column: str = flag(
        "text", "Column of .jsonl, .parquet and hf: datasets that has the text.", "data"
    )
    seq_len: int = flag(128, "Tokens of context.", "data", at_least=1)
    size: str = flag(
        "", "Size of the model; empty: small, or that of the checkpoint.", "model",
        choices=["", *SIZES],
    )  # fmt: skip
    dtype: str = flag(
        "", "Type of activations and matmuls; empty: bfloat16 on accelerators, else float32.",
        "model", choices=["", "float32", "bfloat16"], may_change=True,
    )  # fmt: skip
    remat: str = flag(
        "", "What a layer keeps for its backward pass; empty: the size's default.", "model",
        choices=["", *REMAT], may_change=True,
    )  # fmt: skip
    optimizer: str = flag(
        "adamw", "Optimizer; muon has Adam for all but hidden matrices.", "optimizer",
        choices=OPTIMIZERS,
    )  # fmt: skip
    warmup_steps: int = flag(
        40, "Steps in which the learning rate rises to its peak.", "optimizer", at_least=0
    )
    weight_decay: float = flag(
        0.1, "Decay of matrices, times the learning rate, a step.", "optimizer", at_least=0.0
    )
    clip_norm: float = flag(1.0, "Largest global norm of a gradient.", "optimizer", at_least=1e-9)
    accumulate: int = flag(
        1, "Gradient-accumulation microbatches in a batch.", "optimizer", at_least=1
    )
    prompt: str = flag("", "Start of the sample at the end.", may_change=True)
    sample_bytes: int = flag(
        400, "Length of the sample, in bytes; 0: none.", at_least=0, may_change=True
    )


def main(run: Run, flags: Flags) -> None:
    # ---- Model and mesh: checked together before anything is allocated or written ----------------
    mesh = make_mesh(run.mesh)
    folder = open_run("transformer", run, flags)  # what to resume or start from, if anything
    config = model_config(flags, folder, mesh.devices.flat[0].platform)
    if config.vocab_size <= text.START:
        raise UserError(
            f"the model has {config.vocab_size} tokens, and text in bytes needs {text.START + 1}; "
            "use a model with a larger vocabulary"
        )
    layout = make_layout(  # a NamedSharding for every array: logical axes → rules → mesh axes
        Transformer, config, mesh, run.rules,
        seed=run.seed, batch_size=run.batch_size, microbatches=flags.accumulate,
    )  # fmt: skip

    # ---- Data: batch k is a pure function of (seed, k), on any mesh and number of processes ------
    corpus = text.load(flags.dataset, flags.text_column, flags.seq_len)

    # ---- Step: (state, batch) → (state, metrics), a pure function --------------------------------
    lr = LearningRate(run.learning_rate, flags.warmup_steps, run.steps, run.schedule)
    matrices = hidden_matrices(layout, ends=("vocab",), stacks=("layers",))  # for --optimizer=muon
    optimizer = make_optimizer(flags.optimizer, lr, flags.weight_decay, flags.clip_norm, matrices)
    step = TrainStep(layout, optimizer, lr, flags.accumulate, run.skip_nonfinite > 0)

    # ---- State and training: compiled once for the layout, each shard made on its own device -----
    sequence = flops.decoder(config, flags.seq_len)["causal"]
    state, log, figures = fit(run, folder, step, corpus, example_flops=sequence)

    # ---- What it has learned ---------------------------------------------------------------------
    print0(held_out(*figures["loss"], corpus.held_out_bytes))
    if flags.sample_bytes:
        print0("Sample:", *quote(sample(layout, state, flags)))
    finish(folder, layout, log)


def held_out(nats: float, targets: float, size: int) -> str:
    """The held-out loss in words; bits per byte compare models whatever their tokenizer."""
    loss, bits = nats / targets, f"{nats / math.log(2) / size:.4f} bits/byte"
    if targets == size:  # a token is a byte
        return f"Held-out loss {loss:.4f} nats/byte, {bits}, over {targets:,.0f} bytes."
    return (
        f"Held-out loss {loss:.4f} nats/token, perplexity {math.exp(min(loss, 700)):.2f}, {bits}, "
        f"over {targets:,.0f} tokens, {size:,} bytes."
    )


def model_config(flags: Flags, folder: RunFolder, platform: str) -> Config:
    """The architecture from --size or the checkpoint; how to compute it from the other flags."""
    if folder.start and not flags.size:
        config = checkpoint.config_from(Config, folder.start)
    else:
        config = SIZES[flags.size or "small"]()
    dtype = flags.dtype or ("float32" if platform == "cpu" else "bfloat16")
    return dataclasses.replace(config, dtype=dtype, remat=flags.remat or config.remat)


def sample(layout: Layout, state: Tree, flags: Flags) -> str:
    """Text that the model writes after --prompt, at temperature 0.8.

    Each byte is a whole forward pass over the last `seq_len` tokens: simple, and fast enough here.
    """
    prompt = np.concatenate([[text.START], text.encode(flags.prompt)]).astype(np.int32)
    length, context = len(prompt) + flags.sample_bytes, flags.seq_len
    # The batch must be divisible by its shards: each shard writes the same text.
    tokens_BT = np.zeros((layout.batch_shards, max(length, context)), np.int32)
    tokens_BT[:, : len(prompt)] = prompt

    def write(params, tokens_BT, key_data):
        model = layout.model.merge({"params": params})
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
