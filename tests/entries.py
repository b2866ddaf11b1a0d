"""What the proof needs to know of each zoo entry."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from data import batches, digits, synthetic
from recipes.common import sharding
from recipes.common.errors import UserError
from recipes.common.mesh import make_mesh
from recipes.common.optimizer import adamw, apply, gradients, schedule
from zoo import dot_relu_dot, mlp, transformer

MESHES = ["1x1", "8", "8x1", "4x2", "2x4", "1x8", "2x2x2"]
OPTIMIZER = adamw(schedule(1e-3, 2, 10), weight_decay=0.1, clip_norm=1.0)
BATCH = 24  # like no dim of a parameter, so that test_collectives.py can tell them apart


@dataclasses.dataclass(frozen=True)
class Entry:
    name: str
    rules: dict[str, sharding.Table]
    build: Callable[[], nnx.Module]
    loss: Callable[[nnx.Module, Any], tuple[jax.Array, jax.Array]]  # (sum, count)
    batches: list[Any]  # of numpy arrays, BATCH rows each

    def layout(self, mesh: str, strategy: str) -> sharding.Layout:
        dims = {"batch": ("--batch_size", BATCH)}
        return sharding.lay_out(self.build, self.rules, strategy, make_mesh(mesh), dims)


def _transformer() -> Entry:
    rng = np.random.default_rng(0)

    def loss(model, window_BT):
        tokens_BT = window_BT[:, :-1]
        return model.loss(tokens_BT, window_BT[:, 1:], jnp.cumsum(tokens_BT == 256, axis=1))

    return Entry(
        name="transformer",
        rules=transformer.RULES,
        build=lambda: transformer.Transformer(transformer.Config.tiny(), rngs=nnx.Rngs(0)),
        loss=loss,
        batches=[rng.integers(0, 257, (BATCH, 41), np.int32) for _ in range(5)],
    )


def _dot_relu_dot() -> Entry:
    config, teacher = dot_relu_dot.Config.tiny(), synthetic.train(16, 64, seed=0)

    def loss(model, batch):
        error_BD = model(batch["x"]) - batch["y"]
        return jnp.square(error_BD).sum(), batch["weight"].sum() * config.embed

    return Entry(
        name="dot_relu_dot",
        rules=dot_relu_dot.RULES,
        build=lambda: dot_relu_dot.DotReluDot(config, rngs=nnx.Rngs(0)),
        loss=loss,
        batches=first_batches(teacher),
    )


def _mlp() -> Entry:
    def loss(model, batch):
        logits_BC = model(batch["image"])
        nats_B = optax.softmax_cross_entropy_with_integer_labels(logits_BC, batch["label"])
        return nats_B.sum(), jnp.float32(nats_B.size)

    return Entry(
        name="mlp",
        rules=mlp.RULES,
        build=lambda: mlp.MLP(mlp.Config.tiny(), rngs=nnx.Rngs(0)),
        loss=loss,
        batches=first_batches(digits.load().train),
    )


def first_batches(source) -> list[Any]:
    feed = iter(batches.train_batches(source, BATCH, seed=0))
    return [next(feed) for _ in range(5)]


ENTRIES = {entry.name: entry for entry in (_dot_relu_dot(), _mlp(), _transformer())}


def fitting() -> list[tuple[str, str, str]]:
    """(entry, strategy, mesh) for every table and mesh that fit each other."""
    found = []
    for entry in ENTRIES.values():
        for strategy in entry.rules:
            for mesh in MESHES:
                try:
                    entry.layout(mesh, strategy)
                except UserError:
                    continue
                found.append((entry.name, strategy, mesh))
    return found


CASES = fitting()


def compile_step(entry_name: str, layout: sharding.Layout) -> jax.stages.Compiled:
    """A train step, (state, batch) → (state, mean loss, gradients)."""
    entry, abstract = ENTRIES[entry_name], sharding.abstract_state(layout, OPTIMIZER)

    def loss(params, batch):
        return entry.loss(layout.plan.bind(params), batch)

    def train_step(state, batch):
        mean, grads = gradients(loss, state["params"], batch)
        return apply(OPTIMIZER, state, grads), mean, grads

    batch = layout.abstract_batch(jax.tree.map(lambda x: x[0], entry.batches[0]), BATCH)
    where = sharding.shardings(abstract)
    outputs = (where, layout.replicated, where["params"])
    # What lies where and what is sent is decided before code is generated, which takes most of the
    # time: least where LLVM does not optimize it, and where the older generator of loops makes it.
    quick = {"xla_backend_optimization_level": 0}
    if jax.__version_info__ < (0, 11):  # newer ones have no other generator
        quick["xla_cpu_use_fusion_emitters"] = False
    return layout.compile(
        train_step, abstract, batch, out_shardings=outputs, compiler_options=quick
    )


@functools.cache
def compiled_step(entry_name: str, strategy: str, mesh: str) -> jax.stages.Compiled:
    """The one that test_meshes.py runs and test_collectives.py reads: compiling is what costs."""
    return compile_step(entry_name, ENTRIES[entry_name].layout(mesh, strategy))
