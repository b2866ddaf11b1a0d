"""Flags of every language model: text, model, optimizer."""

import dataclasses
from collections.abc import Iterable

from data import text as texts
from data.batches import Dataset
from data.tokenizer import Tokenizer
from recipes.common.runtime import flag
from recipes.common.train import adapters
from recipes.common.train.matmul import matmul_backward_flag, matmul_emulate_flag, matmul_flag
from recipes.common.train.offload import offload_flag
from recipes.common.train.optimizer import OPTIMIZERS
from zoo.config import CHOICES


@dataclasses.dataclass(frozen=True)
class Text:
    """Flags of the training and evaluation text."""

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

    def load(self, tokenizer: Tokenizer) -> Dataset:
        """Loads the text as examples. Raises DataError if it can't be found or read."""
        where = (self.dataset, self.text_column, self.seq_len)
        return texts.load(*where, tokenizer, self.pack, self.eval_dataset)


# Each entry's recipe calls these three with the choices of its zoo file.


def size_flag(sizes: Iterable[str] = ()) -> str:
    """--size: one of SIZES."""
    return flag(
        "", "Size of the model; empty: small, or that of the checkpoint.", "model",
        choices=["", *sizes],
    )  # fmt: skip


def remat_flag(policies: Iterable[str] = ()) -> str:
    """--remat: one of REMAT."""
    return flag(
        "", "What a layer keeps for its backward pass; empty: the size's default.", "model",
        choices=["", *policies], may_change=True,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Flags:
    """Flags of the model and its optimizer. Each recipe's subclass adds its entry's choices."""

    size: str = size_flag()
    dtype: str = flag(
        "", "Dtype of activations and matmuls; empty: bfloat16 on accelerators, else float32.",
        "model", choices=["", "float32", "bfloat16"], may_change=True,
    )  # fmt: skip
    matmul: str = matmul_flag()
    matmul_backward: str = matmul_backward_flag()
    matmul_emulate: bool = matmul_emulate_flag()
    remat: str = remat_flag()
    context: str = flag(
        "auto", "How positions on different devices of --mesh=data=2,seq=4 attend to each other; auto: "
        "all-to-all if every device gets a head, else ring.", "model", choices=CHOICES["context"], may_change=True,
    )  # fmt: skip
    pipeline: str = flag(
        "1f1b", "Schedule of the stages on --mesh=data=2,pipe=4; 1f1b keeps fewer activations than "
        "gpipe, and takes as long.", "model", choices=CHOICES["pipeline"], may_change=True,
    )  # fmt: skip
    pipe_microbatches: int = flag(
        0, "Parts of a batch that follow one another through the stages; 0: up to 4 per stage.",
        "model", at_least=0, may_change=True,
    )  # fmt: skip
    lora_rank: int = adapters.rank_flag()
    lora_alpha: float = adapters.alpha_flag()
    lora_targets: str = adapters.targets_flag()
    base: str = adapters.base_flag()
    optimizer: str = flag(
        "adamw", "Optimizer; muon uses Adam for all but hidden matrices.", "optimizer",
        choices=OPTIMIZERS,
    )  # fmt: skip
    warmup_steps: int = flag(
        40, "Steps in which the learning rate rises to its peak. With --restore_from it defaults to at "
        "most a tenth of --steps, and --learning_rate to 5e-5, or 5e-4 with LoRA.", "optimizer",
        at_least=0,
    )  # fmt: skip
    weight_decay: float = flag(
        0.1, "Weight decay of matrices, times the learning rate.", "optimizer", at_least=0.0
    )
    clip_norm: float = flag(1.0, "Largest global norm of a gradient.", "optimizer", at_least=1e-9)
    accumulate: int = flag(
        1, "Gradient-accumulation steps: microbatches in a batch.", "optimizer", at_least=1
    )
    offload: str = offload_flag()
