"""A small text encoder for tests, and checkpoints of it."""

import dataclasses
import pathlib

from data.tokenizer import BYTES
from recipes.common import checkpoint
from recipes.common.mesh import make_mesh
from recipes.common.sharding import make_layout
from recipes.common.sharding.abstract import variables_of
from tests.support.models import built
from zoo.bert import Bert, Config

SMALL = dataclasses.replace(Config.tiny(), num_layers=1, mlp=64)


def written(folder: pathlib.Path, config: Config = SMALL) -> Bert:
    """Writes a checkpoint of a random model, which reads bytes; returns the model."""
    model = built(Bert, config, seed=7)
    layout = make_layout(Bert, config, make_mesh("1"))
    facts = checkpoint.metadata("bert", layout, {}) | {"step": 0, "context": 128}
    facts["tokenizer"] = BYTES.sha256
    checkpoint.write(folder, variables_of(model), facts, tokenizer=BYTES)
    return model
