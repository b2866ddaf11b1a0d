"""Writes what TRL's own GRPO trainer computes into tests/golden/trl_policy_losses.json. Needs TRL and PyTorch alone.

    python -m venv trl && trl/bin/pip install trl==1.16.0 torch && trl/bin/python -m tests.by_hand.trl_policy_losses

The golden has the arguments, which this command keeps: log-probabilities of answers' tokens, their masks and
advantages. It gives them to the trainer through a stand-in for the model, in float64.
"""

import json
import pathlib
from collections import defaultdict
from typing import Any
from unittest import mock

import torch
import trl
from trl.trainer.grpo_trainer import GRPOTrainer

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "trl_policy_losses.json"


def loss_of(case: dict[str, Any], policy_BT: torch.Tensor) -> torch.Tensor:
    """The mean loss that TRL computes of a case."""
    mask_BT = torch.tensor(case["mask"])
    low, high = case["clips"]
    fake = mock.MagicMock()
    fake.accelerator.gather.side_effect = lambda x: x
    fake.accelerator.num_processes = 1
    fake._metrics = {"train": defaultdict(list)}
    fake._get_per_token_logps_and_entropies.return_value = (
        policy_BT, torch.zeros_like(policy_BT), None,
    )  # fmt: skip
    settings = {
        "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
        "importance_sampling_level": "sequence" if case["loss"] == "gspo" else "token",
        "beta": case["kl"], "loss_type": {"gspo": "grpo"}.get(case["loss"], case["loss"]),
        "epsilon_low": low, "epsilon_high": high, "use_vllm": False, "_entropy_bonus_enabled": False,
        "max_completion_length": case["longest"], "current_gradient_accumulation_steps": 1,
    }  # fmt: skip
    for name, value in settings.items():
        setattr(fake, name, value)
    fake.args.use_bias_correction_kl = False
    fake.args.delta = None
    fake.args.steps_per_generation = 1
    rows = torch.ones(len(mask_BT), 1, dtype=torch.long)
    inputs = {
        "prompt_ids": rows, "prompt_mask": rows,
        "completion_ids": mask_BT.long(), "completion_mask": mask_BT.long(),
        "num_items_in_batch": mask_BT.sum(),
    } | {
        key: torch.tensor(case[name], dtype=torch.float64)
        for key, name in {
            "advantages": "advantage", "old_per_token_logps": "old", "ref_per_token_logps": "reference",
        }.items()
    }  # fmt: skip
    return GRPOTrainer._compute_loss(fake, mock.MagicMock(), inputs)


def main() -> None:
    golden = json.loads(GOLDEN.read_text())
    for case in golden["cases"].values():
        policy_BT = torch.tensor(case["policy"], dtype=torch.float64, requires_grad=True)
        loss = loss_of(case, policy_BT)
        loss.backward()
        assert policy_BT.grad is not None
        case["mean_loss"], case["gradient"] = loss.item(), policy_BT.grad.tolist()
    golden["trl"] = trl.__version__
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    print(f"Wrote {len(golden['cases'])} cases of TRL {trl.__version__}.")


if __name__ == "__main__":
    main()
