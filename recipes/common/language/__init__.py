"""The recipe of every language model: `main`, its flags, and the sample at its end."""

from recipes.common.flags.config_flags import DECODER, EXPERTS, model_flags
from recipes.common.language import messages as messages
from recipes.common.language.recipe import (
    decoder_of,
    fine_tuning,
    for_another_loss,
    main,
    model_config,
)
from recipes.common.language.sample import Sample
from recipes.common.language.text_flags import Text, Training
