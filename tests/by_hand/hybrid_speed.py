"""Training a small Nemotron-H on CPUs here and in `transformers`, in turn. Needs the extra `hf`.

    python -m tests.by_hand.hybrid_speed
    python -m tests.by_hand.hybrid_speed --batch_size=2 --seq_len=1024

The same architecture with AdamW and clipped gradients, float32, on all cores. `transformers` computes
Mamba-2 by chunks in PyTorch, eagerly: its kernels need a GPU. Prints a table.
"""

import argparse
import dataclasses
import pathlib

import jax

from recipes.common.hf.hybrid_nemotron import nemotron_json
from recipes.common.mesh import make_mesh
from recipes.instruments.bench.common import (
    ONE_DEVICE,
    Table,
    Training,
    interleaved,
    machine,
    make_step,
    random_rows,
)  # fmt: skip
from zoo.hybrid import Config, Hybrid

CONFIG = Config(
    256, 384, 10, num_heads=6, num_kv_heads=2, head_dim=64, mlp=1_536, pattern="M-M-M-M-*-",
    mamba_heads=12, mamba_groups=2, mamba_head_dim=64, mamba_state_dim=64, activation="relu2",
    least_step=1e-3, tie_embeddings=False, remat="none",
)  # fmt: skip


class TorchStep:
    """A step of the model of `transformers`."""

    def __init__(self, config: Config, batch_size: int, seq_len: int, compiled: bool):
        import torch
        import transformers

        keys = nemotron_json(config) | {
            "vocab_size": config.vocab_size, "hidden_size": config.embed,
            "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim, "mamba_num_heads": config.mamba_heads,
            "mamba_head_dim": config.mamba_head_dim, "ssm_state_size": config.mamba_state_dim,
            "n_groups": config.mamba_groups, "conv_kernel": config.conv_width,
            "tie_word_embeddings": False, "pad_token_id": None,
        }  # fmt: skip
        transformers.logging.set_verbosity_error()
        theirs = transformers.AutoConfig.for_model("nemotron_h", **keys)
        model = transformers.AutoModelForCausalLM.from_config(theirs)
        self.parameters = sum(x.numel() for x in model.parameters())
        self._torch, self._model = torch, model.train()
        self._called = torch.compile(self._model) if compiled else self._model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        rows = random_rows(config.vocab_size, batch_size, seq_len)
        self._tokens = torch.from_numpy(rows["tokens"]).long()

    def __call__(self) -> None:
        loss = self._called(input_ids=self._tokens, labels=self._tokens, use_cache=False).loss
        loss.backward()
        self._torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--seq_len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--compile", action="store_true", help="also torch.compile")
    args = parser.parse_args()
    B, T = args.batch_size, args.seq_len
    runs = {}
    for remat in ("none", "dots"):
        config = dataclasses.replace(CONFIG, remat=remat)
        step = make_step(config, ONE_DEVICE, make_mesh("1"), B, T, model=Hybrid)
        runs[f"here, remat {remat}"] = Training(step)
    ours = sum(x.size for x in jax.tree.leaves(step.layout.model.shapes["params"]))
    theirs = TorchStep(CONFIG, B, T, compiled=False)
    assert theirs.parameters == ours, (theirs.parameters, ours)
    runs["transformers"] = theirs
    if args.compile:
        runs["transformers, torch.compile"] = TorchStep(CONFIG, B, T, compiled=True)
    times = interleaved(runs, args.rounds)
    table = Table("step", "ms", "tokens/s", "tokens per CPU second")
    for name, taken in times.items():
        table.row(
            name, f"{min(taken.wall) * 1e3:,.0f}", f"{B * T / min(taken.wall):,.0f}",
            f"{B * T / min(taken.cpu):,.0f}",
        )  # fmt: skip
    load = pathlib.Path("/proc/loadavg").read_text().split()[0]
    print(
        f"\n{ours:,} parameters, {B} × {T:,} tokens. Best of {args.rounds} interleaved rounds, at a load "
        f"of {load}.", machine("", "torch", "transformers"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
