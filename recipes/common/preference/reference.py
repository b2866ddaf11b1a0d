"""The reference of preference tuning: the checkpoint that the run starts from, frozen."""

import dataclasses

from recipes.common import checkpoint
from recipes.common.checkpoint import RunFolder
from recipes.common.preference.losses import WITH_REFERENCE, Loss
from recipes.common.preference.preference_flags import ON_HOST, STORED, Reference
from recipes.common.runtime import Run, UserError
from recipes.common.sharding import Layout, make_layout
from recipes.common.sharding.rules import check_batch
from recipes.common.train.checks import check_stages
from recipes.common.train.frozen import Frozen
from recipes.common.train.offload import check_host_memory


def choose(
    loss: Loss, flags: Reference, layout: Layout, model: type, folder: RunFolder, run: Run
) -> Frozen | None:
    """The reference of a run; None: its loss has none. Raises UserError if it doesn't fit or is gone.

    Args:
      layout: the policy's, a pair a row.
    """
    named = {name: value for name, value in vars(flags).items() if value}
    if loss.loss not in WITH_REFERENCE:
        for name, value in named.items():
            raise UserError(f"--{name}={value} is for a reference, which --loss={loss.loss} lacks")
        return None
    return frozen_start(flags, layout, model, folder, run, rows=2 * layout.batch_size)


def frozen_start(
    flags: Reference, layout: Layout, model: type, folder: RunFolder, run: Run, rows: int
) -> Frozen:
    """The checkpoint that a run started from, frozen. Raises UserError if it doesn't fit or is gone.

    Args:
      layout: the policy's.
      rows: of a batch of the reference.
    """
    named = {name: value for name, value in vars(flags).items() if value}
    source = folder.source
    if source is None:  # a resumed run
        source = checkpoint.find(folder.flags["restore_from"], hash_files=run.verify)
    # A run that trains an adapter further starts from the base with that adapter, not from the base.
    shares_weights = bool(layout.config.lora_rank) and not named and "base" not in source.metadata
    dtype = flags.reference_dtype
    config = dataclasses.replace(layout.config, lora_rank=0, dtype=dtype or layout.config.dtype)
    rules = flags.reference_rules or run.rules
    try:  # its rules may leave a mesh axis unused
        its = make_layout(model, config, layout.mesh, rules, seq_len=layout.seq_len)
        check_batch(its.strategy, its.rules, its.mesh, rows, microbatches=1)
        if its.stages > 1:
            check_stages(its, accumulate=1)
    except UserError as error:  # the run's own rules were found to fit
        raise UserError(str(error).replace("--rules", "--reference_rules")) from None
    checkpoint.check_variables(source, its)
    its = dataclasses.replace(its, batch_size=rows)
    on_host = flags.reference == ON_HOST
    if on_host:
        check_host_memory("reference", ON_HOST, layout.mesh.devices.flat[0], "use --reference=copy")
    return Frozen(its, source, dtype, shares_weights, on_host)


def describe(reference: Frozen | None, flags: Reference) -> list[str]:
    """A line of the report about the reference and its memory."""
    if reference is None:
        return ["Reference: none."]
    if reference.shares_weights:
        return ["Reference: the model without its adapter, which takes no more memory for weights."]
    until = " until its log-probabilities are stored" * (flags.reference == STORED)
    return [f"Reference: {reference}{until}."]
