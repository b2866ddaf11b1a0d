"""Trains the mixture of experts on text, with its experts shared out over any mesh.

    python -m recipes.moe --mesh=data=2,expert=4             # a laptop: 8 simulated devices
    python -m recipes.moe --mesh=4x2                         # resumes that run on another mesh
    python -m recipes.moe --mesh=data=1,expert=8 --steps=0 --restore_from=hf:DIR --prompt="def "

Running the same command again resumes. The DIR may have Mixtral or Qwen3-MoE. metrics.jsonl tells how
much each expert is used: load_3=1.2 is 1.2 times its even share. So does the end of the run.
"""

import dataclasses
import math
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
from recipes.common.sharding import Tree, make_layout
from recipes.common.train.evaluation import in_words
from recipes.common.train.loop import finish, fit
from recipes.common.train.optimizer import OPTIMIZERS, LearningRate, hidden_matrices, make_optimizer
from recipes.common.train.step import TrainStep
from zoo.moe import REMAT, SIZES, Config, MoE

# For --optimizer=muon, to which an expert is a matrix of its own.
MATRICES = {"ends": ("vocab",), "stacks": ("layers", "expert")}


@dataclasses.dataclass(frozen=True)
class Flags:
    """Recipe-specific flags."""

    size: str = flag(
        "", "Size of the model; empty: small, or that of the checkpoint.", "model",
        choices=["", *SIZES],
    )  # fmt: skip
    num_experts: int = flag(
        0, "Experts of a layer; 0: as many as the size or the checkpoint has.", "model", at_least=0
    )
    experts_per_token: int = flag(
        0, "Experts that a token goes through; 0: as of the size or the checkpoint.", "model",
        at_least=0,
    )  # fmt: skip
    capacity: str = flag(
        "", "Tokens of a sequence that an expert has room for, in even shares of them; none: for all "
        "that choose it; empty: as of the size or the checkpoint.", "model",
    )  # fmt: skip
    balance_weight: float = flag(
        -1.0, "Weight of the load-balancing loss; -1: as of the size or the checkpoint.", "model",
        at_least=-1.0,
    )  # fmt: skip
    balance_rate: float = flag(
        -1.0, "By which a step moves the biases of experts toward even loads; 0: no biases; -1: as of "
        "the size or the checkpoint.", "model", at_least=-1.0,
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
        40, "Steps in which the learning rate rises to its peak. With --restore_from the default is at "
        "most a tenth of --steps, and that of --learning_rate 5e-5.", "optimizer", at_least=0,
    )  # fmt: skip
    weight_decay: float = flag(
        0.1, "Decay of matrices, times the learning rate, a step.", "optimizer", at_least=0.0
    )
    clip_norm: float = flag(1.0, "Largest global norm of a gradient.", "optimizer", at_least=1e-9)
    accumulate: int = flag(
        1, "Gradient-accumulation microbatches in a batch.", "optimizer", at_least=1
    )


def main(run: Run, text: Text, flags: Flags, sample: Sample) -> None:
    # ---- What is asked: the model, where it is to lie, and what it begins with -------------------
    mesh = make_mesh(run.mesh)
    folder = open_run("moe", run, text, flags, sample)
    tokenizer = checkpoint.tokenizer_for(text.tokenizer, folder.start)
    config = model_config(flags, folder, tokenizer, mesh.devices.flat[0].platform)
    prompt = sample.begin(tokenizer)
    layout = make_layout(  # the experts' dim is a logical axis like any other
        MoE, config, mesh, run.rules,
        seed=run.seed, batch_size=run.batch_size, microbatches=flags.accumulate,
    )  # fmt: skip

    # ---- Text, in batches that depend on nothing but the seed ------------------------------------
    corpus = text.load(tokenizer)
    kernel = attention(layout, text.seq_len, "segment_ids" in corpus.filler)
    for note in [*corpus.notes, *kernel]:
        print0(note)

    # ---- Step: the loss has what balances the experts, and figures of how they are used ----------
    lr = LearningRate(run.learning_rate, flags.warmup_steps, run.steps, run.schedule)
    matrices = hidden_matrices(layout, **MATRICES)
    optimizer = make_optimizer(flags.optimizer, lr, flags.weight_decay, flags.clip_norm, matrices)
    step = TrainStep(layout, optimizer, lr, flags.accumulate, run.skip_nonfinite > 0)

    # ---- Training, whose FLOPs are those of the experts that a token goes through ----------------
    sequence = flops.decoder(config, text.seq_len)["causal"]
    state, log, figures = fit(run, folder, step, corpus, tokenizer, example_flops=sequence)

    # ---- What it has learned, and which experts it uses for it -----------------------------------
    print0(f"Held-out {in_words(figures, corpus.held_out_bytes)}.", *usage(figures))
    if sample.sample_bytes:
        print0(*sample.write(MoE, layout, state, tokenizer, prompt, text, run.seed))
    finish(folder, layout, log)


def model_config(flags: Flags, folder: RunFolder, tokenizer: Tokenizer, platform: str) -> Config:
    """The architecture and how to compute it: of --size or the checkpoint, with the other flags."""
    config = architecture(SIZES, flags.size, folder.start, tokenizer)
    changes: dict[str, Any] = {
        "num_experts": flags.num_experts or config.num_experts,
        "experts_per_token": flags.experts_per_token or config.experts_per_token,
        "capacity": capacity(flags.capacity) if flags.capacity else config.capacity,
        **{
            name: value if (value := getattr(flags, name)) >= 0 else getattr(config, name)
            for name in ("balance_weight", "balance_rate")
        },
        "dtype": flags.dtype or default_dtype(platform),
        "remat": flags.remat or config.remat,
    }
    most = changes["num_experts"]
    if changes["experts_per_token"] > most:
        raise UserError(
            f"--experts_per_token={changes['experts_per_token']} is more than the experts of a layer, "
            f"{most}; use at most {most}, or a larger --num_experts"
        )
    return dataclasses.replace(config, **changes)


def capacity(given: str) -> float | None:
    """--capacity as Config has it. Raises UserError."""
    if given == "none":
        return None
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(
            f"--capacity={given} is not a number > 0; try 1.25, or none to leave no token out"
        )
    return value


def usage(figures: Tree) -> list[str]:
    """A line on how even the experts' use is, and what they had no room for.

    Args:
      figures: of the held-out text, name → (sum, count).
    """
    means = {name: float(total / count) for name, (total, count) in figures.items()}
    loads = [value for name, value in means.items() if name.startswith("load_")]
    each = f" ({', '.join(f'{load:.2f}' for load in loads)})" if len(loads) <= 16 else ""
    return [
        f"Use of the {len(loads)} experts, in even shares: {min(loads):.2f} to {max(loads):.2f}{each}; "
        f"no room for {means['dropped']:.2%} of what was chosen."
    ]


NEW = (Run(steps=300, batch_size=16, learning_rate=4e-3), Text(), Flags(), Sample())

if __name__ == "__main__":
    start(main, *NEW, defaults=lambda run, *_: fine_tuning("moe", NEW, run, learning_rate=5e-5))
