"""Writes what TRL's own trainers compute into tests/golden/trl_losses.json. Needs TRL and PyTorch alone.

    python -m venv trl && trl/bin/pip install trl==1.16.0 torch && trl/bin/python -m tests.by_hand.trl_losses

The golden has the arguments, log-probabilities of answers, which this command keeps. It gives them to the
trainers through a stand-in for the model, in float64, and stores losses, rewards and gradients.
"""

import json
import pathlib
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import trl
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "trl_losses.json"
TOKENS = (0.5, 1.75, 0.75)  # an answer's tokens, in units of their mean


class Model:
    """Returns the log-probabilities of given sequences in turn, as TRL's fused head does."""

    def __init__(self, *log_probs_BT: torch.Tensor):
        self.answers = [*log_probs_BT]
        self.training = True

    def __call__(self, **_):
        log_probs_BT = self.answers.pop(0)
        nothing = torch.zeros_like(log_probs_BT)
        return SimpleNamespace(
            log_probs=log_probs_BT, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool()
        )


def of_tokens(answers_B: torch.Tensor, averages: bool) -> torch.Tensor:
    """Each answer's log-probability, a sum or a mean, divided among three tokens: [B, 3]."""
    parts = torch.tensor(TOKENS, dtype=torch.float64)
    return answers_B[:, None] * (parts if averages else parts / len(TOKENS))


def trainer(**settings: Any) -> mock.MagicMock:
    fake = mock.MagicMock()
    fake.accelerator.device = "cpu"
    fake.accelerator.gather_for_metrics.side_effect = lambda x: x
    fake.accelerator.gather.side_effect = lambda x: x
    fake._metrics = {"train": defaultdict(list)}
    fake._total_train_tokens, fake._tp_size = 0, 1
    fake.aux_loss_enabled = False
    for name, value in settings.items():
        setattr(fake, name, value)
    return fake


def sequences(rows: int, prefix: str = "") -> dict[str, torch.Tensor]:
    """A prompt of one token and an answer of three."""
    mask = torch.ones(rows, 1 + len(TOKENS), dtype=torch.long)
    answers = mask.clone()
    answers[:, 0] = 0
    return {
        f"{prefix}input_ids": mask, f"{prefix}attention_mask": mask, f"{prefix}completion_mask": answers
    }  # fmt: skip


def loss_of(case: dict[str, Any], policy: torch.Tensor, reference: torch.Tensor | None):
    """(mean loss, mean reward of the chosen answers or None)."""
    beta, smoothing = case["beta"], case["label_smoothing"]
    if case["loss"] in ("dpo", "ipo"):
        # Its "robust" corrects for wrong labels in another way, so no case of dpo has smoothing.
        fake = trainer(
            beta=beta, loss_types=[{"dpo": "sigmoid"}.get(case["loss"], "ipo")], loss_weights=[1.0],
            ld_alpha=None, precompute_ref_logps=False, f_divergence_type="reverse_kl",
            use_weighting=False,
        )  # fmt: skip
        averages = case["loss"] == "ipo"
        fake.ref_model = Model(of_tokens(reference.flatten(), averages))
        model = Model(of_tokens(policy.flatten(), averages))
        loss = DPOTrainer._compute_loss(fake, model, sequences(policy.numel()), False)
        (reward,) = fake._metrics["train"]["rewards/chosen"]
        return loss, None if averages else reward  # its rewards of ipo are of sums
    if case["loss"] == "kto":
        fake = trainer(
            beta=beta, loss_type="kto", calculate_KL=True, precompute_ref_logps=False,
            desirable_weight=case["good_weight"], undesirable_weight=case["bad_weight"],
        )  # fmt: skip
        fake._compute_kl_logps = lambda model, batch: KTOTrainer._compute_kl_logps(
            fake, model, batch
        )
        answers, others = (of_tokens(x, False) for x in policy)
        fake.ref_model = Model(*(of_tokens(x, False) for x in reversed(reference)))
        batch = sequences(len(answers)) | sequences(len(answers), "KL_")
        batch["label"] = torch.tensor(case["labels"])
        return KTOTrainer._compute_loss(fake, Model(others.detach(), answers), batch, False), None
    if case["loss"] == "simpo":
        fake = trainer(
            beta=beta, loss_type="simpo", simpo_gamma=case["target_margin"], alpha=0.0,
            label_smoothing=smoothing,
        )  # fmt: skip
        losses, rewards, _ = CPOTrainer.cpo_loss(fake, *policy)
        return losses.mean(), rewards.mean()
    with mock.patch.object(torch.Tensor, "float", lambda x: x):  # stay in float64
        ratios, rewards, *_ = ORPOTrainer.odds_ratio_loss(trainer(beta=beta), *policy)
    return (-policy[0] - ratios).mean(), rewards.mean()  # as in its get_batch_loss_metrics


def main() -> None:
    golden = json.loads(GOLDEN.read_text())
    for case in golden["cases"].values():
        policy = torch.tensor(case["policy"], dtype=torch.float64, requires_grad=True)
        reference = case["reference"] and torch.tensor(case["reference"], dtype=torch.float64)
        loss, reward = loss_of(case, policy, reference)
        loss.backward()
        case["mean_loss"], case["gradient"] = loss.item(), policy.grad.tolist()
        case["mean_reward"] = None if reward is None else float(reward)
    golden["trl"] = trl.__version__
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    print(f"Wrote {len(golden['cases'])} cases of TRL {trl.__version__}.")


if __name__ == "__main__":
    main()
