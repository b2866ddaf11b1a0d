"""A second model that nothing trains: the reference of preferences, or a teacher."""

import dataclasses
import functools

import jax
from jax.sharding import NamedSharding

from recipes.common import checkpoint
from recipes.common.checkpoint import WeightSource
from recipes.common.checkpoint.adapters import content_sha256
from recipes.common.report.report import bytes_per_device, size
from recipes.common.sharding import Layout, Tree, shardings
from recipes.common.sharding.host_memory import on_host
from recipes.common.train.planned import FrozenModel


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A second model on the mesh of the first, under rules of its own."""

    layout: Layout
    source: WeightSource  # what it is
    dtype: str  # of matmul weights; "": as they are stored
    shares_weights: bool = False  # it is the first model without its adapter
    on_host: bool = False  # it is in the host's memory; a step copies it to the devices

    @functools.cached_property
    def key(self) -> list[str]:
        """What decides its outputs."""
        return [content_sha256(self.source), self.dtype, self.layout.config.dtype]

    def abstract(self) -> Tree:
        """Its variables as ShapeDtypeStructs with shardings."""
        variables = checkpoint.variables_of_dtype(self.layout, self.dtype)
        if not self.on_host:
            return variables
        return jax.tree.map(lambda x: x.update(sharding=on_host(x.sharding)), variables)

    def read(self) -> Tree:
        """Its variables, each shard read onto its own device."""
        variables = checkpoint.restore_variables(self.source, self.layout, self.dtype)
        if not self.on_host:
            return variables

        def put(x: jax.Array, there: NamedSharding) -> jax.Array:
            copy = jax.block_until_ready(jax.device_put(x, there))
            x.delete()  # JAX can't donate to another kind of memory
            return copy

        return jax.tree.map(put, variables, shardings(self.abstract()))

    @property
    def bytes_per_device(self) -> int:
        """Of its weights, wherever they are; 0 if they are the first model's."""
        return 0 if self.shares_weights else bytes_per_device(self.abstract())

    @property
    def in_plan(self) -> FrozenModel:
        """What the planner needs to know."""
        return FrozenModel(self.layout, self.bytes_per_device, self.on_host)

    def __str__(self) -> str:
        held = size(self.bytes_per_device)
        name = self.source.path.name
        where = " in the host's memory" if self.on_host else ""
        return f"a frozen copy of {name}{where}, rules {self.layout.strategy}, {held} per device"
