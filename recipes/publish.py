"""Publishes a trained checkpoint: a folder with its parameters, a card and a way to check them.

    python -m recipes.publish --source=runs/mlp --target=zoo/checkpoints/mlp.digits
    python -m recipes.mlp --restore_from=mlp.digits --steps=0 --mesh=2x4

The folder is a standard Orbax checkpoint, with the SHA-256 of every file, a card (README.md) and a
probe: a batch of held-out data and its loss, which shows whether a restore is correct.
"""

import dataclasses

import jax

from recipes.common import checkpoint
from recipes.common.checkpoint import card, integrity, probe
from recipes.common.report import report
from recipes.common.runtime import UserError, flag, make_mesh, print0
from recipes.common.runtime.start import start
from recipes.common.storage import folders


@dataclasses.dataclass(frozen=True)
class Publish:
    source: str = flag("", "A run's workdir, or one of its checkpoints.")
    target: str = flag("", "New folder to write.")
    base: str = flag("", "Path of an adapter's base model, if it has moved.")
    licence: str = flag("", "Licence of the parameters; empty: the data's, if the zoo knows it.")
    dtype: str = flag(
        "", "Type to round matmul weights to, for half the size; empty: as trained.",
        choices=["", "bfloat16"],
    )  # fmt: skip
    note: str = flag("", "A line for the card, such as who trained it on which machine.")
    mesh: str = flag("", "Device mesh to read onto, as in every recipe; empty: all on data.")
    rules: str = flag("", "Sharding rules, as in every recipe; empty: chosen by the mesh.")


def main(flags: Publish) -> None:
    # ---- Check the flags before anything is read -------------------------------------------------
    for name in ("source", "target"):
        if not getattr(flags, name):
            raise UserError(f"--{name} is missing; use --{name}=DIR")
    target = folders.new_path(flags.target)
    if flags.source.startswith("hf:"):
        raise UserError(
            f"--source={flags.source} is not a checkpoint of this zoo; use a run's workdir or a "
            "checkpoint"
        )
    source = checkpoint.find(flags.source, "--source", base=flags.base)
    data, entry = source.metadata["data"], source.metadata["entry"]
    if "published" in source.metadata or "dataset" not in data:
        done = "published" in source.metadata
        what = "is already published" if done else "does not come from a training run"
        raise UserError(f"--source={flags.source} {what}; use a run's workdir or its checkpoint")
    licence = flags.licence or known_licence(source)
    layout = checkpoint.layout_of(source, make_mesh(flags.mesh), flags.rules)

    rounds = checkpoint.variables_of_dtype(layout, flags.dtype) != layout.variables()
    if flags.dtype and not rounds:
        raise UserError(
            f"--dtype={flags.dtype} is for matmul weights, of which {entry!r} has none that are rounded; "
            "leave it out"
        )

    # ---- Read the parameters, and compute their loss on a held-out batch -------------------------
    variables = checkpoint.restore_variables(source, layout, flags.dtype or None)
    tokenizer = source.tokenizer()
    batch = probe.batch(source.metadata, tokenizer)
    # Restoring converts what is written to float32.
    restored = jax.tree.map(lambda a, s: a.astype(s.dtype), variables, layout.variables())
    loss = probe.loss(layout, restored, batch)
    leaves = jax.tree.leaves(variables["params"])
    metadata = source.metadata | {
        # An adapter is published merged.
        "logical_axes": checkpoint.metadata("", layout, {})["logical_axes"],
        "flags": {k: v for k, v in source.metadata["flags"].items() if k not in card.OMITTED_FLAGS},
        "published": card.facts(source, leaves, licence, flags.note) | {"probe_loss": loss},
    }

    # ---- Write a temporary folder, and move it in place ------------------------------------------
    in_this_clone = target.parent == checkpoint.PUBLISHED
    with folders.write_errors(flags.target):
        checkpoint.write(
            target,
            variables,
            metadata,
            files={integrity.PROBE: probe.dumps(loss, batch)}
            | ({card.PICTURE: picture} if (picture := card.picture(source)) else {}),
            readme=lambda hashes: card.text(target.name, in_this_clone, metadata, hashes),
            tokenizer=tokenizer,
        )
    size = sum(folders.at(target).sizes().values())
    print0(
        report.headline(layout),
        f"Published {len(leaves)} arrays, {size:,} bytes, in {flags.target}. To use it:",
        f"  python -m recipes.{metadata['entry']} --restore_from={target.name if in_this_clone else flags.target} --steps=0",
    )


def known_licence(source: checkpoint.WeightSource) -> str:
    """The licence of the training data. Raises UserError if the zoo doesn't know it."""
    dataset = source.metadata["data"]["dataset"]
    began = source.metadata["flags"].get("restore_from")  # its licence also binds the result
    if began or dataset not in card.LICENCES:
        what = f"--restore_from={began}" if began else f"--dataset={dataset}"
        raise UserError(
            f"--licence is missing, and the zoo knows none for {what}; use --licence=NAME"
        )
    return card.LICENCES[dataset]


if __name__ == "__main__":
    start(main, Publish())
