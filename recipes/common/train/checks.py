"""What a train step needs of the mesh: kernels, stages and memories that fit the flags."""

from recipes.common.report import kernel
from recipes.common.runtime import UserError, describe
from recipes.common.sharding import Layout
from recipes.common.train.offload import check_offload
from recipes.common.train.training_flags import Optimization
from zoo.parallel.pipeline import rounds


def check_step(layout: Layout, training: Optimization) -> None:
    """Raises UserError if a decoder can't be trained with these flags on the layout's mesh."""
    kernel.check(layout)
    check_stages(layout, training.accumulate)
    check_offload(layout, training.offload)


def check_stages(layout: Layout, accumulate: int) -> None:
    """Raises UserError if flags of a pipeline don't fit its schedule, or its microbatches the batch.

    `make_layout` has checked that the stages fit the layers.
    """
    config, parts, mesh = layout.config, layout.stages, describe(layout.mesh.shape)
    wanted = config.pipe_microbatches
    if config.pipe_rounds not in (rounds(config), type(config).pipe_rounds):
        raise UserError(
            f"--pipe_rounds={config.pipe_rounds} is for --pipeline=interleaved, and not for "
            f"{config.pipeline}; leave it out, or use --pipeline=interleaved"
        )
    if parts == 1:
        if wanted:
            raise UserError(
                f"--pipe_microbatches={wanted} is for a pipeline, and rules {layout.strategy!r} on "
                f"--mesh={mesh} have none; use --pipe_microbatches=0, or a mesh with `pipe`"
            )
        return
    if layout.shape.mtp_layers:
        raise UserError(
            f"--mesh={mesh} has {parts} stages of layers, and mtp_depth=1 has a layer after the last "
            "stage; use --mtp_depth=0, or a mesh without `pipe`"
        )
    rows = rows_of_a_device(layout, accumulate)
    if wanted and rows % wanted:
        raise UserError(
            f"--pipe_microbatches={wanted} does not divide the {rows} rows of a device; use a divisor"
        )


def rows_of_a_device(layout: Layout, accumulate: int) -> int:
    return layout.batch_size // accumulate // layout.batch_shards
