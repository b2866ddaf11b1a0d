"""A second model that nothing trains: the reference of preferences, or a teacher."""

import dataclasses
import functools

from recipes.common import checkpoint
from recipes.common.checkpoint import Source
from recipes.common.checkpoint.lora import content_sha256
from recipes.common.report.report import bytes_per_device, size
from recipes.common.sharding import Layout, Tree


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A second model on the mesh of the first, under rules of its own."""

    layout: Layout
    source: Source  # what it is
    dtype: str  # of matmul weights; "": as they are stored
    shares_weights: bool = False  # it is the first model without its adapter

    @functools.cached_property
    def key(self) -> list[str]:
        """What decides its outputs."""
        return [content_sha256(self.source), self.dtype, self.layout.config.dtype]

    def abstract(self) -> Tree:
        """Its variables as ShapeDtypeStructs with shardings."""
        return checkpoint.variables_of_dtype(self.layout, self.dtype)

    def read(self) -> Tree:
        """Its variables, each shard read onto its own device."""
        return checkpoint.restore_variables(self.source, self.layout, self.dtype)

    @property
    def bytes_per_device(self) -> int:
        """Of its weights; 0 if they are the first model's."""
        return 0 if self.shares_weights else bytes_per_device(self.abstract())

    def __str__(self) -> str:
        held = size(self.bytes_per_device)
        name = self.source.path.name
        return f"a frozen copy of {name}, rules {self.layout.strategy}, {held} per device"
