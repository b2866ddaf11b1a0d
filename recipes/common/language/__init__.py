"""The recipe of every language model: `main`, its flags, and the sample at its end."""

from recipes.common.flags.config_flags import DECODER, EXPERTS, model_flags
from recipes.common.language.flags import Text, Training
from recipes.common.language.recipe import (
    check_heads,
    check_stages,
    fine_tuning,
    for_another_loss,
    main,
    model_config,
    stages,
)
from recipes.common.language.sample import Sample
