"""The recipe of every language model: `main`, its flags, and the sample at its end."""

from recipes.common.language.experts import (
    ExpertFlags,
    balance_rate_flag,
    mtp_depth_flag,
    mtp_weight_flag,
    usage,
    with_experts,
)
from recipes.common.language.flags import Flags, Text, remat_flag, size_flag
from recipes.common.language.recipe import (
    MATRICES,
    check_stages,
    fine_tuning,
    main,
    model_config,
    stages,
)
from recipes.common.language.sample import Sample
from recipes.common.train.adapters import targets_flag as lora_targets_flag
