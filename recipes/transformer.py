"""Trains the decoder-only Transformer on text, sharded over any mesh.

    python -m recipes.transformer --mesh=4x2                 # a laptop: 8 simulated devices
    python -m recipes.transformer --mesh=1x8 --rules=tp      # resumes that run, sharded differently
    python -m recipes.transformer --steps=0 --prompt="def "  # evaluates and writes text

Running the same command again resumes. --dataset takes your own text; --size a larger model.
"""

import dataclasses
from typing import Any

from data.tokenizer import Tokenizer
from recipes.common import checkpoint
from recipes.common.analysis import flops
from recipes.common.checkpoint import RunFolder, open_run
from recipes.common.language import (
    Sample,
    Text,
    architecture,
    attention,
    default_dtype,
    fine_tuning,
)
from recipes.common.runtime import Run, UserError, flag, make_mesh, print0
from recipes.common.runtime.start import start
from recipes.common.sharding import make_layout
from recipes.common.train.evaluation import in_words
from recipes.common.train.loop import finish, fit
from recipes.common.train.optimizer import OPTIMIZERS, LearningRate, hidden_matrices, make_optimizer
from recipes.common.train.step import TrainStep
from zoo.transformer import REMAT, SIZES, Config, Transformer

# For --optimizer=muon: logical axes that tell hidden matrices from other weights.
MATRICES = {"ends": ("vocab",), "stacks": ("layers",), "ranks": ("lora",)}


@dataclasses.dataclass(frozen=True)
class Flags:
    """Recipe-specific flags."""

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
    lora_rank: int = flag(
        0, "Train adapters (LoRA) of this rank beside the frozen weights of --restore_from; 0: all "
        "parameters.", "model", at_least=0,
    )  # fmt: skip
    lora_alpha: float = flag(
        0.0, "Adapters count lora_alpha / lora_rank times; 0: twice the rank.", "model",
        at_least=0.0,
    )  # fmt: skip
    lora_targets: str = flag(
        "all", f"Weights that have an adapter: all, or some of {','.join(Config.lora_targets)}.",
        "model",
    )  # fmt: skip
    base: str = flag(
        "", "Where the base model of an adapter is now, if it has moved.", "checkpoints",
        may_change=True,
    )  # fmt: skip
    optimizer: str = flag(
        "adamw", "Optimizer; muon has Adam for all but hidden matrices.", "optimizer",
        choices=OPTIMIZERS,
    )  # fmt: skip
    warmup_steps: int = flag(
        40, "Steps in which the learning rate rises to its peak. With --restore_from the default is at "
        "most a tenth of --steps, and that of --learning_rate 5e-5, or 5e-4 with LoRA.", "optimizer",
        at_least=0,
    )  # fmt: skip
    weight_decay: float = flag(
        0.1, "Decay of matrices, times the learning rate, a step.", "optimizer", at_least=0.0
    )
    clip_norm: float = flag(1.0, "Largest global norm of a gradient.", "optimizer", at_least=1e-9)
    accumulate: int = flag(
        1, "Gradient-accumulation microbatches in a batch.", "optimizer", at_least=1
    )


def main(run: Run, text: Text, flags: Flags, sample: Sample) -> None:
    # ---- Model and mesh: checked together before anything is allocated or written ----------------
    mesh = make_mesh(run.mesh)
    folder = open_run("transformer", run, text, flags, sample)  # what to resume or start from
    tokenizer = checkpoint.tokenizer_for(text.tokenizer, folder.start)
    config = model_config(flags, folder, tokenizer, mesh.devices.flat[0].platform)
    prompt = sample.begin(tokenizer)
    layout = make_layout(  # a NamedSharding for every array: logical axes → rules → mesh axes
        Transformer, config, mesh, run.rules,
        seed=run.seed, batch_size=run.batch_size, microbatches=flags.accumulate,
    )  # fmt: skip

    # ---- Data: batch k is a pure function of (seed, k), on any mesh and number of processes ------
    corpus = text.load(tokenizer)
    segments = "segment_ids" in corpus.filler
    for note in [*corpus.notes, *attention(layout, text.seq_len, segments)]:
        print0(note)

    # ---- Step: (state, batch) → (state, metrics), a pure function --------------------------------
    lr = LearningRate(run.learning_rate, flags.warmup_steps, run.steps, run.schedule)
    matrices = hidden_matrices(layout, **MATRICES)
    optimizer = make_optimizer(flags.optimizer, lr, flags.weight_decay, flags.clip_norm, matrices)
    step = TrainStep(layout, optimizer, lr, flags.accumulate, run.skip_nonfinite > 0)

    # ---- State and training: compiled once for the layout, each shard made on its own device -----
    sequence = flops.decoder(config, text.seq_len)["causal"]
    state, log, figures = fit(run, folder, step, corpus, tokenizer, example_flops=sequence)

    # ---- What it has learned ---------------------------------------------------------------------
    print0(f"Held-out {in_words(figures, corpus.held_out_bytes)}.")
    if sample.sample_bytes:
        print0(*sample.write(Transformer, layout, state, tokenizer, prompt, text, run.seed))
    finish(folder, layout, log)


def model_config(flags: Flags, folder: RunFolder, tokenizer: Tokenizer, platform: str) -> Config:
    """The architecture from --size or the checkpoint; how to compute it from the other flags."""
    config = architecture(SIZES, flags.size, folder.start, tokenizer)
    dtype, remat = flags.dtype or default_dtype(platform), flags.remat or config.remat
    return dataclasses.replace(config, dtype=dtype, remat=remat, **adapters(flags))


def adapters(flags: Flags) -> dict[str, Any]:
    """Config's fields of LoRA. Raises UserError where they make no sense."""
    if not flags.lora_rank:
        if flags.lora_alpha or flags.lora_targets != "all":
            name = "lora_alpha" if flags.lora_alpha else "lora_targets"
            raise UserError(
                f"--{name}={getattr(flags, name)} is of adapters, and --lora_rank=0 trains none; "
                "add, for example, --lora_rank=8"
            )
        return {"lora_rank": 0}
    known = Config.lora_targets
    wanted = known if flags.lora_targets == "all" else flags.lora_targets.split(",")
    for name in wanted:
        if name not in known:
            raise UserError(
                f"--lora_targets={flags.lora_targets} has {name!r}; use all, or some of "
                f"{','.join(known)}"
            )
    return {
        "lora_rank": flags.lora_rank,
        "lora_alpha": flags.lora_alpha or 2.0 * flags.lora_rank,
        "lora_targets": tuple(name for name in known if name in wanted),
    }


def learning_rate(restored: bool, lora_rank: int) -> float:
    """The default. A new model's would undo what given parameters have learned."""
    if not restored:
        return 4e-3
    return 5e-4 if lora_rank else 5e-5


def defaults(run: Run, text: Text, flags: Flags, sample: Sample) -> list:
    """Those of this command line: others where it begins on given parameters."""
    return fine_tuning("transformer", NEW, run, learning_rate(True, flags.lora_rank))


NEW = (
    Run(steps=600, batch_size=16, learning_rate=learning_rate(False, 0)),
    Text(),
    Flags(),
    Sample(),
)

if __name__ == "__main__":
    start(main, *NEW, defaults=defaults)
