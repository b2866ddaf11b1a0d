"""Checkpoints: finding, restoring, writing and verifying them; a run's folder and its saves."""

from recipes.common.checkpoint.integrity import verify
from recipes.common.checkpoint.lora import Adapted
from recipes.common.checkpoint.new_head import NewHead
from recipes.common.checkpoint.resolve_tokenizer import check_vocabulary, tokenizer_for
from recipes.common.checkpoint.run_folder import RunFolder, flags_of, open_run
from recipes.common.checkpoint.saver import Saver
from recipes.common.checkpoint.store import (
    PUBLISHED,
    Checkpoint,
    Source,
    check_variables,
    config_from,
    config_of,
    context,
    find,
    find_on_all_processes,
    layout_of,
    metadata,
    open_checkpoint,
    published,
    restore,
    restore_variables,
    steps_in,
    write,
)
