"""Checkpoints: find, restore, write, verify; a run's folder and what it saves."""

from recipes.common.checkpoint.adapter import Adapted
from recipes.common.checkpoint.integrity import verify
from recipes.common.checkpoint.run_folder import RunFolder, flags_of, open_run
from recipes.common.checkpoint.saver import Saver
from recipes.common.checkpoint.store import (
    PUBLISHED,
    Checkpoint,
    Source,
    at,
    check_variables,
    config_from,
    config_of,
    configure,
    context,
    find,
    layout_of,
    metadata,
    published,
    restore,
    restore_variables,
    steps_in,
    write,
)
from recipes.common.checkpoint.together import find_together
from recipes.common.checkpoint.tokens import check_size, tokenizer_for
