"""Publishes a trained checkpoint: its parameters alone, in a folder that says what it is.

    python -m recipes.publish --source=runs/mlp --target=zoo/checkpoints/mlp.digits
    python -m recipes.mlp --restore_from=mlp.digits --steps=0 --mesh=2x4

The folder is a standard Orbax checkpoint, with the SHA-256 of every file, a card (README.md), and a
probe: a batch of held-out data and the loss on it, which shows that a restore went right.
"""

import dataclasses

import jax

from recipes.common import card, checkpoint, folders, probe, report
from recipes.common.cli import flag, start
from recipes.common.errors import UserError
from recipes.common.mesh import make_mesh
from recipes.common.metrics import say
from recipes.common.sharding import paths


@dataclasses.dataclass(frozen=True)
class Publish:
    source: str = flag("", "a run's workdir, or one of its checkpoints")
    target: str = flag("", "new folder to write")
    licence: str = flag("", "of the parameters; empty: that of the data, if the zoo knows it")
    note: str = flag("", "a line for the card: who trained it, on which machine")
    mesh: str = flag("", "devices to read onto, as of every recipe; empty: all on data")
    rules: str = flag("", "strategy, a key of the zoo file's RULES; empty: by the mesh")


def main(flags: Publish) -> None:
    # ---- What is asked for, checked before anything is read --------------------------------------
    for name in ("source", "target"):
        if not getattr(flags, name):
            raise UserError(f"--{name} is missing; give --{name}=DIR")
    target = folders.new(flags.target)
    if flags.source.startswith("hf:"):
        raise UserError(
            f"--source={flags.source} is not of this zoo; give a run's workdir or a checkpoint"
        )
    source = checkpoint.find(flags.source, "--source")
    data = source.metadata["data"]
    if "published" in source.metadata or "dataset" not in data:
        what = "is published already" if "published" in source.metadata else "is of no training run"
        raise UserError(f"--source={flags.source} {what}; give a run's workdir or its checkpoint")
    began = source.metadata["flags"].get("restore_from")  # whose licence holds for what came of it
    licence = flags.licence or (None if began else card.LICENCES.get(data["dataset"]))
    if not licence:
        what = f"--restore_from={began}" if began else f"--dataset={data['dataset']}"
        raise UserError(
            f"--licence is missing, and {what} has none that the zoo knows; give --licence=NAME"
        )
    layout = checkpoint.lay_out(source, make_mesh(flags.mesh), flags.rules)

    # ---- Parameters, and what they make of a batch that nobody trained on ------------------------
    params = checkpoint.restore_params(source, layout)
    batch = probe.batch(source.metadata)
    loss = probe.loss(source.metadata["entry"], layout, params, batch)
    leaves = jax.tree.leaves(params)
    metadata = source.metadata | {
        "flags": {k: v for k, v in source.metadata["flags"].items() if k not in card.UNTOLD},
        "published": {
            "parameters": sum(leaf.size for leaf in leaves),
            "dtype": " and ".join(sorted({str(leaf.dtype) for leaf in leaves})),
            "licence": licence,
            "note": " ".join(flags.note.split()),
            "probe_loss": loss,
            "unit": probe.UNITS[source.metadata["entry"]],
            **card.measured(source.path, source.step),
        },
    }

    # ---- Written beside its place, and moved there whole ------------------------------------------
    ours = target.parent == checkpoint.PUBLISHED
    try:
        checkpoint.write(
            target,
            params,
            metadata,
            files={checkpoint.PROBE: probe.dumps(loss, batch)},
            readme=lambda hashes: card.text(target.name, ours, metadata, hashes),
        )
    except OSError as error:
        raise UserError(
            f"--target={flags.target} can't be written ({error.strerror}); give another"
        ) from None
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    say(
        report.headline(layout),
        f"Published {len(paths(params))} arrays, {size:,} bytes, in {flags.target}; it can be used:",
        f"  python -m recipes.{metadata['entry']} --restore_from={target.name if ours else flags.target} --steps=0",
    )


if __name__ == "__main__":
    start(main, Publish())
