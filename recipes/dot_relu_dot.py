"""Trains DotReluDot, two matmuls and a ReLU, to copy a random teacher; shows who holds what.

    python -m recipes.dot_relu_dot --mesh=2x4               # FSDP over 2, tensor parallel over 4
    python -m recipes.dot_relu_dot --mesh=8 --rules=dp      # every device holds all: compare

Running the same command again resumes; --help lists the flags.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from data import batches, synthetic
from recipes.common import checkpoint, loop, picture, report, sharding
from recipes.common.cli import Run, flag, start
from recipes.common.mesh import make_mesh
from recipes.common.metrics import Log, say
from recipes.common.optimizer import adamw, apply, change_of_steps, gradients, schedule, skipping
from recipes.common.processes import is_first
from recipes.common.workdir import Workdir
from zoo.dot_relu_dot import RULES, Config, DotReluDot


@dataclasses.dataclass(frozen=True)
class Flags:
    """What this recipe has besides the flags that all have."""

    embed: int = flag(0, "width of x and y; 0: 32, or that of the checkpoint", at_least=0)
    hidden: int = flag(0, "width in between; 0: 128, or that of the checkpoint", at_least=0)
    warmup_steps: int = flag(20, "steps in which the learning rate rises to its peak", at_least=0)


def main(run: Run, flags: Flags) -> None:
    # ---- What and where: model, table and mesh, checked together before anything is allocated ----
    mesh = make_mesh(run.mesh)
    work = Workdir(run, "dot_relu_dot")
    config = checkpoint.configure(Config.small(), work.start, flags)
    dims = {"batch": ("--batch_size", run.batch_size)}
    layout = sharding.lay_out(
        lambda: DotReluDot(config, rngs=nnx.Rngs(run.seed)), RULES, run.rules, mesh, dims
    )
    changed = work.check_flags(run, flags)
    if work.start:
        checkpoint.check_params(work.start, layout)

    # ---- Data: examples are made as they are asked for, each from (seed, its number) -------------
    teacher = synthetic.train(config.embed, config.hidden, run.seed)
    facts = {"seed": run.seed, "batch_size": run.batch_size, "dataset": "teacher"}
    work.check_data(facts | {"fingerprint": teacher.fingerprint()})
    shard = loop.process_rows(layout, run.batch_size)
    batch = layout.abstract_batch(teacher[0], run.batch_size)

    # ---- The step: a pure function of (state, batch), compiled once for this layout -------------
    rate = schedule(run.learning_rate, flags.warmup_steps, run.steps)
    optimizer = adamw(rate, weight_decay=0.0, clip_norm=1.0)
    abstract = sharding.abstract_state(layout, optimizer)

    def loss(params, batch):
        """(sum of squared errors, number of outputs)."""
        error_BD = layout.plan.bind(params)(batch["x"]) - batch["y"]
        weight_B1 = batch["weight"][:, None]
        return (error_BD**2 * weight_B1).sum(), weight_B1.sum() * config.embed

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
    metadata = checkpoint.metadata("dot_relu_dot", config, layout, settings)
    work.begin(run.keep_checkpoints, metadata)
    log = Log(work.metrics, work.step, run, unit="examples", per_step=run.batch_size)
    examples = batches.train_batches(teacher, run.batch_size, run.seed, work.step, shard)
    state = loop.fit(step, state, examples, layout, run, log, work)

    # ---- What it has learned, and where it lies -----------------------------------------------------
    def sums(params, batch):
        total, count = loss(params, batch)
        return {"loss": total, "count": count, "square": jnp.square(batch["y"]).sum()}

    held_out = synthetic.held_out(config.embed, config.hidden, run.seed)
    held_out = synthetic.held_out_batches(held_out, run.batch_size, shard)
    result = loop.evaluate(sums, state["params"], held_out, layout, run.batch_size)
    mean_loss, part = result["loss"] / result["count"], result["loss"] / result["square"]
    log.write({"step": int(state["step"]), "held_out_loss": mean_loss})
    log.close()
    say(f"Held-out loss {mean_loss:.6f}: {part:.2%} of the teacher's mean square is unexplained.")
    draw(layout, state["params"], batch["x"].shape, work)
    reshard(layout, state["params"]["w1"])
    work.close()
    say(*work.farewell(layout), log.times())


def draw(layout: sharding.Layout, params: sharding.Tree, x_shape, work: Workdir) -> None:
    """Weights and activations, each as the parts that devices hold: on the terminal and as PNG."""
    (B, _), F = x_shape, params["w1"].shape[1]
    x, hidden = (layout.activation("batch", axis) for axis in ("act_embed", "hidden"))
    arrays = {
        "x": (("batch", "embed"), x_shape, x),
        "w1": (("embed", "hidden"), params["w1"].shape, params["w1"].sharding),
        "relu(x · w1)": (("batch", "hidden"), (B, F), hidden),
        "w2": (("hidden", "embed"), params["w2"].shape, params["w2"].sharding),
        "y": (("batch", "embed"), x_shape, x),
    }
    if is_first():
        for name, (axes, shape, where) in arrays.items():
            print(f"{name} {list(shape)} ({', '.join(axes)}): {tuple(where.spec)}")
            jax.debug.visualize_sharding(shape, where, use_color=False, max_width=100)
    if work.in_use:
        picture.layouts(work.path / "layout.png", arrays)
        say(f"The same as a picture: {work.shown / 'layout.png'}")


def reshard(layout: sharding.Layout, w1_DF: jax.Array) -> None:
    """Moves w1 to where each other table would have it, and says what that sends."""
    for strategy in RULES:
        other = sharding.elsewhere(layout, strategy)
        target = other and other.params()["w1"]
        if target is None or target.is_equivalent_to(w1_DF.sharding, 2):
            continue
        moved_DF, there = report.reshard(w1_DF, target)
        _, back = report.reshard(moved_DF, w1_DF.sharding)
        say(f"Resharding w1 from {layout.strategy} to {strategy} takes {there}; back: {back}.")


if __name__ == "__main__":
    start(main, Run(steps=200, batch_size=1024, learning_rate=0.1), Flags())
