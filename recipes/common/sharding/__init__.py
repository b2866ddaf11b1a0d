"""(model, sharding rules, mesh) → a NamedSharding for every array."""

from recipes.common.sharding.abstract import AbstractModel, Tree, abstract_model, paths
from recipes.common.sharding.layout import Layout, elsewhere, make_layout, shardings
from recipes.common.sharding.rules import Rules
