"""Flags of recipes.grpo's answers."""

import dataclasses

from recipes.common.runtime import UserError, flag


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Flags of the answers."""

    dataset: str = flag(
        "stdlib", "Prompts: stdlib, a file, folder or pattern of .jsonl or .parquet files, or hf:NAME, with "
        "prompt or messages; the reward gets all columns.", "data",
    )  # fmt: skip
    eval_dataset: str = flag(
        "", "Prompts to hold out, as --dataset takes them; empty: a part of --dataset.", "data"
    )
    eval_prompts: int = flag(
        64, "Held-out prompts to answer in an evaluation, at most.", "data", at_least=1
    )
    tokenizer: str = flag(
        "", "Tokenizer, if the model has none of its own: bytes, a tokenizer.json, ORG/NAME.",
        "data", may_change=True,
    )  # fmt: skip
    as_chat: bool = flag(
        False, "Give prompts that are texts to the model as messages, in its chat template.", "data"
    )
    seq_len: int = flag(96, "Tokens of a prompt with its answer.", "data", at_least=2)
    max_new_tokens: int = flag(48, "Tokens of an answer, at most.", "data", at_least=1)
    group_size: int = flag(
        8, "Answers to a prompt, which are compared with each other; divides --batch_size.", "data",
        at_least=2,
    )  # fmt: skip
    temperature: float = flag(1.0, "Temperature of the answers.", "data", at_least=0.01)
    top_k: int = flag(
        0, "Choose each token among the K likeliest, in training too; 0: among all.", "data", at_least=0
    )  # fmt: skip
    top_p: float = flag(
        1.0, "Choose each token among the fewest that have this share of the probability, in training too.",
        "data", at_least=0.01, at_most=1.0,
    )  # fmt: skip
    updates: int = flag(
        1, "Updates from each rollout, of --batch_size answers each; from the second on, ratios are clipped.",
        "optimizer", at_least=1,
    )  # fmt: skip
    pack_len: int = flag(
        0, "Length of rows into which an update packs answers with their prompts, as many as fit; 0: a row "
        "of --seq_len for each.", "data", at_least=0,
    )  # fmt: skip
    mask_cut: bool = flag(
        False, "Don't learn from answers that the limit has cut off.", "optimizer"
    )
    replay_routes: bool = flag(
        False, "Compute each position in training by the experts that computed it while it was sampled.",
        "optimizer",
    )  # fmt: skip
    sample_rules: str = flag(
        "", "Sharding rules to write answers with, on the same mesh; empty: those of training, with weights "
        "gathered once.", may_change=True,
    )  # fmt: skip
    sample_slots: int = flag(
        0, "Answers that are written at a time: the next takes the place of one that has ended; 0: all of a "
        "step.", may_change=True, at_least=0,
    )  # fmt: skip

    def check(self, batch_size: int) -> None:
        """Raises UserError if the sizes don't fit each other."""
        if batch_size % self.group_size:
            raise UserError(
                f"--batch_size={batch_size} answers are not divisible by --group_size={self.group_size}; use "
                f"--batch_size={max(batch_size // self.group_size, 1) * self.group_size}"
            )
        if self.max_new_tokens >= self.seq_len:
            raise UserError(
                f"--max_new_tokens={self.max_new_tokens} leave no room for a prompt in "
                f"--seq_len={self.seq_len}; use --seq_len={2 * self.max_new_tokens}"
            )
        if self.pack_len and self.pack_len < self.seq_len:
            raise UserError(
                f"--pack_len={self.pack_len} is shorter than a prompt with its answer, "
                f"--seq_len={self.seq_len}; use --pack_len={4 * self.seq_len}"
            )

    @property
    def longest_prompt(self) -> int:
        return self.seq_len - self.max_new_tokens + 1  # the last token is only a target
