"""Trains the MLP to read handwritten digits, sharded over any mesh.

    python -m recipes.mlp --mesh=4x2                          # a laptop: 8 simulated devices
    python -m recipes.mlp --mesh=1x8 --rules=tp --steps=0     # the same run, evaluated elsewhere
    python -m recipes.mlp --dataset=hf:ylecun/mnist           # other images, from the Hub

Running the same command again resumes; --help lists the flags.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from data import batches, digits
from recipes.common import checkpoint, loop, picture, report, sharding
from recipes.common.cli import Run, flag, start
from recipes.common.errors import UserError
from recipes.common.mesh import make_mesh
from recipes.common.metrics import Log, say
from recipes.common.optimizer import adamw, apply, change_of_steps, gradients, schedule, skipping
from recipes.common.workdir import Workdir
from zoo.mlp import MLP, RULES, Config


@dataclasses.dataclass(frozen=True)
class Flags:
    """What this recipe has besides the flags that all have."""

    embed: int = flag(0, "width between blocks; 0: 64, or that of the checkpoint", at_least=0)
    hidden: int = flag(0, "width inside a block; 0: 256, or that of the checkpoint", at_least=0)
    depth: int = flag(0, "blocks; 0: 3, or that of the checkpoint", at_least=0)
    dataset: str = flag("digits", "digits, a folder with train and test files, or hf:NAME")
    image_column: str = flag("image", "where the dataset keeps its images")
    label_column: str = flag("label", "where the dataset keeps its labels")
    warmup_steps: int = flag(50, "steps in which the learning rate rises to its peak", at_least=0)
    weight_decay: float = flag(0.1, "of kernels, times the learning rate, a step", at_least=0.0)
    clip_norm: float = flag(1.0, "largest global norm of a gradient", at_least=1e-9)


def main(run: Run, flags: Flags) -> None:
    # ---- What and where: model, table and mesh, checked together before anything is allocated ----
    mesh = make_mesh(run.mesh)
    work = Workdir(run, "mlp")
    images = digits.load(flags.dataset, flags.image_column, flags.label_column)
    shape = dataclasses.replace(Config.small(), inputs=images.inputs, classes=images.classes)
    config = checkpoint.configure(shape, work.start, flags)
    if (config.inputs, config.classes) != (images.inputs, images.classes):
        raise UserError(
            f"--dataset={flags.dataset} has images of {images.inputs} numbers in {images.classes} "
            f"classes, and the checkpoint's model takes {config.inputs} and {config.classes}; give "
            "the dataset that it was trained on"
        )
    dims = {"batch": ("--batch_size", run.batch_size)}
    layout = sharding.lay_out(
        lambda: MLP(config, rngs=nnx.Rngs(run.seed)), RULES, run.rules, mesh, dims
    )
    changed = work.check_flags(run, flags)
    if work.start:
        checkpoint.check_params(work.start, layout)
    shard = loop.process_rows(layout, run.batch_size)
    batch = layout.abstract_batch(images.train[0], run.batch_size)

    facts = {"seed": run.seed, "batch_size": run.batch_size, "dataset": flags.dataset}
    work.check_data(facts | {"fingerprint": images.fingerprint})

    # ---- The step: a pure function of (state, batch), compiled once for this layout -------------
    rate = schedule(run.learning_rate, flags.warmup_steps, run.steps)
    optimizer = adamw(rate, flags.weight_decay, flags.clip_norm)
    abstract = sharding.abstract_state(layout, optimizer)

    def loss_and_logits(params, batch):
        """(sum of nats, number of images), and the logits; label -1 does not count."""
        logits_BC = layout.plan.bind(params)(batch["image"])
        label_B = jnp.maximum(batch["label"], 0)
        nats_B = optax.softmax_cross_entropy_with_integer_labels(logits_BC, label_B)
        counts_B = batch["label"] >= 0
        return (nats_B * counts_B).sum(), counts_B.sum().astype(jnp.float32), logits_BC

    def loss(params, batch):
        return loss_and_logits(params, batch)[:2]

    def train_step(state, batch):
        mean_loss, grads = gradients(loss, state["params"], batch)
        metrics = {"loss": mean_loss, "grad_norm": optax.tree.norm(grads)}
        return apply(optimizer, state, grads), metrics | {"learning_rate": rate(state["step"])}

    say(report.headline(layout), report.table(layout, abstract))
    step = None
    if run.steps > work.step:
        where = sharding.shardings(abstract)  # pinned: the state comes out as it went in
        pinned = dict(donate_argnums=0, out_shardings=(where, None))
        step = layout.compile(skipping(train_step, run.skip_nonfinite), abstract, batch, **pinned)
        say(report.step(step))

    # ---- The state, and training ------------------------------------------------------------------
    state = work.first_state(layout, optimizer, run.seed, abstract)
    before = changed.get("steps")
    say(work.origin(), *change_of_steps(before, run, flags.warmup_steps, work.step))
    settings = dataclasses.asdict(run) | dataclasses.asdict(flags)
    work.begin(run.keep_checkpoints, checkpoint.metadata("mlp", config, layout, settings))
    log = Log(work.metrics, work.step, run, unit="images", per_step=run.batch_size)
    examples = batches.train_batches(images.train, run.batch_size, run.seed, work.step, shard)
    state = loop.fit(step, state, examples, layout, run, log, work)

    # ---- What it has learned ------------------------------------------------------------------------
    def sums(params, batch):
        total, count, logits_BC = loss_and_logits(params, batch)
        true_BC = jax.nn.one_hot(batch["label"], config.classes)  # label -1: a row of zeros
        guess_BC = jax.nn.one_hot(logits_BC.argmax(axis=1), config.classes)
        return {"loss": total, "images": count, "confusion": true_BC.T @ guess_BC}

    held_out = digits.held_out_batches(images.held_out, run.batch_size, shard)
    result = loop.evaluate(sums, state["params"], held_out, layout, run.batch_size)
    right, count = result["confusion"].trace(), result["images"]
    scores = {"held_out_loss": result["loss"] / count, "held_out_accuracy": right / count}
    log.write({"step": int(state["step"]), **scores})
    log.close()
    say(f"Held-out accuracy {right / count:.4f}: {right:.0f} of {count:.0f} images; "
        f"loss {scores['held_out_loss']:.4f} nats.")  # fmt: skip
    if work.in_use:
        picture.learning(work.path / "learning.png", work.metrics, result["confusion"])
        say(f"Loss curve and confusion matrix: {work.shown / 'learning.png'}")
    work.close()
    say(*work.farewell(layout), log.times())


if __name__ == "__main__":
    start(main, Run(steps=400, batch_size=128, learning_rate=3e-3), Flags())
