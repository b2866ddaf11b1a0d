"""Checkpoints: finding, restoring, writing and verifying them; a run's folder and its saves."""

from recipes.common.checkpoint.adapters import Adapted
from recipes.common.checkpoint.integrity import verify
from recipes.common.checkpoint.locate import PUBLISHED, find, published
from recipes.common.checkpoint.resolve_tokenizer import check_vocabulary, tokenizer_for
from recipes.common.checkpoint.restoring import (
    NewHead,
    check_variables,
    context,
    layout_of,
    leaves_out_head,
    restore,
    restore_variables,
    variables_of_dtype,
)
from recipes.common.checkpoint.run_folder import RunFolder, flags_of, open_run
from recipes.common.checkpoint.saver import Saver
from recipes.common.checkpoint.store import (
    Checkpoint,
    WeightSource,
    config_from,
    config_of,
    metadata,
    open_checkpoint,
    write,
)
from recipes.common.storage.folders import steps_in
