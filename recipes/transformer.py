"""Trains the decoder-only Transformer on text, sharded over any mesh.

    python -m recipes.transformer --mesh=4x2                 # a laptop: 8 simulated devices
    python -m recipes.transformer --mesh=1x8 --rules=tp      # resumes that run, sharded differently
    python -m recipes.transformer --steps=0 --prompt="def "  # evaluates and writes text

Running the same command again resumes. --dataset takes your own text; --size a larger model.
"""

import dataclasses
from typing import Any

import numpy as np

from data import text
from data.tokenizer import Tokenizer
from recipes.common import checkpoint
from recipes.common.analysis import flops
from recipes.common.checkpoint import RunFolder, flags_of, open_run
from recipes.common.generation import Generator, Sampling
from recipes.common.runtime import Run, UserError, flag, make_mesh, print0, quote
from recipes.common.runtime.start import start
from recipes.common.sharding import Layout, Tree, make_layout
from recipes.common.train.evaluation import in_words
from recipes.common.train.loop import finish, fit
from recipes.common.train.optimizer import OPTIMIZERS, LearningRate, hidden_matrices, make_optimizer
from recipes.common.train.step import TrainStep
from zoo.transformer import REMAT, SIZES, Config, Transformer, best_kernel


@dataclasses.dataclass(frozen=True)
class Flags:
    """Recipe-specific flags."""

    dataset: str = flag(
        "stdlib", "Training text: stdlib, a file, folder or pattern of .txt, .jsonl or .parquet "
        "files, or hf:NAME; several with their shares: a.jsonl@0.7,b.parquet@0.3. Rows of messages, "
        "or of prompt and completion, are trained on what the assistant says.", "data",
    )  # fmt: skip
    eval_dataset: str = flag(
        "", "Text to hold out, as --dataset takes it; empty: a part of --dataset.", "data"
    )
    text_column: str = flag(
        "text", "Column of .jsonl, .parquet and hf: datasets that has the text.", "data"
    )
    tokenizer: str = flag(
        "", "Tokenizer: bytes, a tokenizer.json or a folder with one, or ORG/NAME on the Hub; empty: "
        "the checkpoint's, or bytes.", "data", may_change=True,
    )  # fmt: skip
    pack: str = flag(
        "", "Rows of whole documents in place of windows that cut them; empty: with a tokenizer "
        "other than bytes.", "data", choices=["", "true", "false"],
    )  # fmt: skip
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
    prompt: str = flag("", "Start of the sample at the end.", may_change=True)
    chat: bool = flag(
        False, "Give --prompt to the model as a user's message, by its chat template.",
        may_change=True,
    )  # fmt: skip
    sample_bytes: int = flag(
        400, "Length of the sample, in bytes, or in tokens of another tokenizer; 0: none.",
        at_least=0, may_change=True,
    )  # fmt: skip
    temperature: float = flag(
        0.8, "Temperature of the sample; 0 takes the likeliest token.", at_least=0.0,
        may_change=True,
    )  # fmt: skip


def main(run: Run, flags: Flags) -> None:
    # ---- Model and mesh: checked together before anything is allocated or written ----------------
    mesh = make_mesh(run.mesh)
    folder = open_run("transformer", run, flags)  # what to resume or start from, if anything
    tokenizer = checkpoint.tokenizer_for(flags.tokenizer, folder.start)
    config = model_config(flags, folder, tokenizer, mesh.devices.flat[0].platform)
    prompt = prompt_tokens(flags, tokenizer)
    layout = make_layout(  # a NamedSharding for every array: logical axes → rules → mesh axes
        Transformer, config, mesh, run.rules,
        seed=run.seed, batch_size=run.batch_size, microbatches=flags.accumulate,
    )  # fmt: skip

    # ---- Data: batch k is a pure function of (seed, k), on any mesh and number of processes ------
    given = (flags.dataset, flags.text_column, flags.seq_len)
    corpus = text.load(*given, tokenizer, flags.pack, flags.eval_dataset)
    segments = "segment_ids" in corpus.filler
    for note in [*corpus.notes, *attention(layout, flags.seq_len, segments)]:
        print0(note)

    # ---- Step: (state, batch) → (state, metrics), a pure function --------------------------------
    lr = LearningRate(run.learning_rate, flags.warmup_steps, run.steps, run.schedule)
    # for --optimizer=muon
    matrices = hidden_matrices(layout, ends=("vocab",), stacks=("layers",), ranks=("lora",))
    optimizer = make_optimizer(flags.optimizer, lr, flags.weight_decay, flags.clip_norm, matrices)
    step = TrainStep(layout, optimizer, lr, flags.accumulate, run.skip_nonfinite > 0)

    # ---- State and training: compiled once for the layout, each shard made on its own device -----
    sequence = flops.decoder(config, flags.seq_len)["causal"]
    state, log, figures = fit(run, folder, step, corpus, tokenizer, example_flops=sequence)

    # ---- What it has learned ---------------------------------------------------------------------
    print0(f"Held-out {in_words(figures, corpus.held_out_bytes)}.")
    if flags.sample_bytes:
        shown, ended = sample(layout, state, run, flags, tokenizer, prompt)
        print0("Sample, ended by the model:" if ended else "Sample:", *quote(shown))
    finish(folder, layout, log)


def model_config(flags: Flags, folder: RunFolder, tokenizer: Tokenizer, platform: str) -> Config:
    """The architecture from --size or the checkpoint; how to compute it from the other flags."""
    if folder.start and not flags.size:
        config = checkpoint.config_from(Config, folder.start)
    else:
        config = SIZES[flags.size or "small"]()
        if tokenizer.files:  # bytes take the size's own vocabulary
            config = dataclasses.replace(config, vocab_size=tokenizer.size)
    checkpoint.check_size(tokenizer, config.vocab_size)
    dtype = flags.dtype or ("float32" if platform == "cpu" else "bfloat16")
    config = dataclasses.replace(config, dtype=dtype, remat=flags.remat or config.remat)
    return dataclasses.replace(config, **adapters(flags))


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


def attention(layout: Layout, seq_len: int, segments: bool) -> list[str]:
    """A line for the report on the kernel that the mesh's devices take; none for CPU's only one."""
    with layout.trace():
        _, kernel = best_kernel(layout.config, seq_len, segments)
    return [] if kernel == "xla" else [f"attention: {kernel}"]


def prompt_tokens(flags: Flags, tokenizer: Tokenizer) -> np.ndarray:
    """What the sample starts with: --prompt as a document's beginning, or as a user's message."""
    if flags.chat:
        return tokenizer.ask([{"role": "user", "content": flags.prompt}])
    return tokenizer.prompt(flags.prompt)


def sample(
    layout: Layout, state: Tree, run: Run, flags: Flags, tokenizer: Tokenizer, prompt: np.ndarray
) -> tuple[str, bool]:
    """Text that the model writes after the prompt, and whether it ended it itself.

    A position attends to the last `seq_len` tokens, as many as it has seen in training.
    """
    window = min(flags.seq_len, layout.config.sliding_window or flags.seq_len)
    config = dataclasses.replace(layout.config, sliding_window=window)
    layout = make_layout(Transformer, config, layout.mesh, run.rules)
    vocabulary = tokenizer.size if tokenizer.files else text.START  # bytes write no other start
    chosen = Sampling(flags.temperature, seed=run.seed)
    generator = Generator(layout, state, chosen, tokenizer.end, vocabulary)
    written = [int(token) for (token,) in generator([prompt], flags.sample_bytes)]
    begin = [] if flags.chat else prompt  # of a conversation, the answer alone
    return tokenizer.decode([*begin, *written]), written[-1] in tokenizer.end


def fine_tuning(run: Run, flags: Flags) -> tuple[Run, Flags]:
    """The defaults of this command line, where it is one that begins on given parameters."""
    before = flags_of("transformer", run.workdir)
    if not run.steps or not (run.restore_from or before.get("restore_from")):
        return NEW
    rate = learning_rate(True, flags.lora_rank)
    # One step of warmup would be a step at a rate of 0.
    warmup = min(NEW[1].warmup_steps, run.steps // 10) if run.steps >= 20 else 0
    return (  # a run that resumes keeps its own, whatever --steps is now
        dataclasses.replace(NEW[0], learning_rate=before.get("learning_rate", rate)),
        dataclasses.replace(NEW[1], warmup_steps=before.get("warmup_steps", warmup)),
    )


def learning_rate(restored: bool, lora_rank: int) -> float:
    """The default. A new model's would undo what given parameters have learned."""
    if not restored:
        return 4e-3
    return 5e-4 if lora_rank else 5e-5


NEW = (Run(steps=600, batch_size=16, learning_rate=learning_rate(False, 0)), Flags())

if __name__ == "__main__":
    start(main, *NEW, defaults=fine_tuning)
