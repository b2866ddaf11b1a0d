"""Sharding rules for models of few positions, which no strategy splits: of images and short texts."""

from ..core.strategies import DP, FSDP, HSDP, TP, ZERO1


def encoder_rules() -> dict[str, dict]:
    """Strategy → the rules that it states."""
    return {
        "dp": DP,
        "zero1": DP | ZERO1,
        "fsdp": DP | FSDP,
        "tp": DP | TP,
        "fsdp_tp": DP | FSDP | TP,
        "hsdp_tp": HSDP | TP,
    }
