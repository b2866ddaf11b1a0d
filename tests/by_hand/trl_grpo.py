"""TRL's GRPO trainer on what `python -m recipes.grpo` trains: the same model, prompts, rewards and sizes.

    python -m recipes.hf export --source=transformer.stdlib_3m --target=FOLDER
    python -m tests.by_hand.trl_grpo prompts FOLDER            # with the zoo installed
    trl/bin/python -m tests.by_hand.trl_grpo train FOLDER --steps=40

It prints each step's reward, seconds and CPU seconds, and those of generating. The environment of the last command
has trl==1.16.0, torch and transformers (tests/by_hand/trl_policy_losses.py).
"""

import argparse
import json
import pathlib
import time

from recipes.common.reinforcement import parses

QUESTIONS = (parses.parses, parses.uses_parameter, parses.names_known, parses.two_kinds)
LONGEST, NEW = 49, 48  # tokens of a prompt and of an answer, as the bare command's


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("what", choices=["prompts", "train"])
    options.add_argument("folder", type=pathlib.Path)
    options.add_argument("--steps", type=int, default=40)
    given = options.parse_args()
    if given.what == "prompts":
        write_prompts(given.folder)
    else:
        train(given.folder, given.steps)


def write_prompts(folder: pathlib.Path) -> None:
    from data import questions

    rows = [{"prompt": question.prompt} for question in questions.load("stdlib", LONGEST).train]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def reward(prompts: list[str], completions: list[str], **_) -> list[float]:
    pairs = zip(prompts, completions, strict=True)
    return [sum(question(*pair, {}) for question in QUESTIONS) / len(QUESTIONS) for pair in pairs]


def train(folder: pathlib.Path, steps: int) -> None:
    import datasets
    import transformers
    import trl

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    # The model ends no document; the trainer wants a token that would.
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.bos_token
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    settings = trl.GRPOConfig(
        output_dir=str(folder / "trl"), max_steps=steps, per_device_train_batch_size=64,
        num_generations=8, max_completion_length=NEW, temperature=1.0, top_k=0, top_p=1.0,
        learning_rate=3e-4, lr_scheduler_type="constant_with_warmup", warmup_steps=4, beta=0.0,
        loss_type="grpo", scale_rewards="group", use_cpu=True, bf16=False,
        gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=str(folder), reward_funcs=reward, args=settings, processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(rows), callbacks=[Clock()],
    )  # fmt: skip
    Clock.watch(trainer)
    trainer.train()


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


class Clock:
    """Prints a line for each step; made a callback below."""

    generating = (0.0, 0.0)
    begin = clocks()

    @classmethod
    def watch(cls, trainer) -> None:
        """Times the trainer's generation."""
        generate = trainer._generate

        def timed(*arguments, **others):
            start = clocks()
            result = generate(*arguments, **others)
            cls.generating = tuple(b - a for a, b in zip(start, clocks(), strict=True))
            return result

        trainer._generate = timed

    def __getattr__(self, name: str):
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *_, **__: None

    def on_step_begin(self, *_, **__) -> None:
        Clock.begin = clocks()

    def on_log(self, args, state, control, logs=None, **_) -> None:
        took = [b - a for a, b in zip(Clock.begin, clocks(), strict=True)]
        if logs and "reward" in logs:
            print(
                f"step {state.global_step}: reward {float(logs['reward']):.3f}, {took[0]:.2f} s, "
                f"{took[1]:.2f} CPU s, of these generating {self.generating[0]:.2f} s, "
                f"{self.generating[1]:.2f} CPU s",
                flush=True,
            )


if __name__ == "__main__":
    main()
