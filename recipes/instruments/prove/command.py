"""The command `python -m recipes.prove`."""

import dataclasses
import json
import sys

from recipes.common.runtime import UserError, flag, print0
from recipes.common.runtime.flags import choose, refuse_unused, split
from recipes.instruments.prove import mismatch, table
from recipes.instruments.prove.cases import Case, prove
from recipes.instruments.prove.layouts import make_meshes
from recipes.instruments.prove.precision import prove_precision
from recipes.instruments.user_model import ModelFlags


@dataclasses.dataclass(frozen=True)
class Flags(ModelFlags):
    meshes: str = flag(
        "", "Meshes, comma-separated; with axis names, as in data=2,expert=4, separated by semicolons; "
        "empty: for each strategy, those of all devices that have its axes.",
    )  # fmt: skip
    auto: bool = flag(
        False,
        "Use Auto mesh axes, for models that leave shardings to the compiler; else Explicit ones.",
    )
    x64: bool = flag(False, "Repeat what differs in float64, to tell rounding from error.")
    dtype: str = flag(
        "", "Compare gradients in this 16-bit format, bfloat16 or float16, with float32's instead, and name "
        "the lines that add up in 16 bits. With --generate: the type of activations.",
    )  # fmt: skip
    generate: str = flag(
        "", "Compare a checkpoint's log-probabilities in training and in generation instead, on each pair of "
        "--meshes: a run, checkpoint or published name, or hf:DIR.",
    )  # fmt: skip
    batch_size: int = flag(
        0, "With --dtype: rows of the training that you plan, for the sums' number of terms; 0: the batch's. "
        "With --generate: answers; 0: 8.", group="data", at_least=0,
    )  # fmt: skip
    seq_len: int = flag(
        0, "With --dtype: positions of a row, likewise; 0: the batch's. With --generate: tokens of an answer; "
        "0: 128.", group="data", at_least=0,
    )  # fmt: skip
    json: bool = flag(False, "Print JSON, with a difference for each array.")


def main(flags: Flags) -> None:
    if flags.generate:
        return compare_generator(flags)
    if not flags.model:
        raise UserError("no model is named; use --model=FILE.py:NAME")
    if flags.dtype and flags.x64:
        raise UserError(
            f"--dtype={flags.dtype} compares with float32, and --x64 with float64; leave one of them out"
        )
    if not flags.dtype:
        fix = "add --dtype=bfloat16, or leave it out"
        refuse_unused(flags, ("batch_size", "seq_len"), "--dtype, and there is none", fix)
    meshes = make_meshes(mesh_names(flags))
    parts = flags.parts()
    if flags.dtype:
        precision = prove_precision(
            *parts,
            meshes,
            dtype=flags.dtype,
            batch_size=flags.batch_size,
            seq_len=flags.seq_len,
            auto=flags.auto,
        )
        print0(*([json.dumps(precision.as_json(), indent=1)] if flags.json else precision.lines()))
        sys.exit(0 if precision.holds else 1)

    def on_start(case: str) -> None:
        if not flags.json and case.startswith("1 "):
            print0(table.head())
        if sys.stderr.isatty():  # the next line of the table replaces it
            print(f"{case} …", end="\r", file=sys.stderr, flush=True)

    def on_case(case: Case) -> None:
        if not flags.json:
            print0(table.row(case), *table.details(case))

    proof = prove(
        *parts,
        meshes,
        auto=flags.auto,
        x64=flags.x64,
        on_start=on_start,
        on_case=on_case,
    )
    print0(*([json.dumps(table.as_json(proof), indent=1)] if flags.json else table.ending(proof)))
    sys.exit(0 if proof.holds else 1)


def mesh_names(flags: Flags) -> list[str]:
    return split(flags.meshes, ";" if "=" in flags.meshes else ",") if flags.meshes else []


def compare_generator(flags: Flags) -> None:
    """Prints how far log-probabilities of training and generation are apart, and exits."""
    alone = ("model", "config", "rules", "loss", "batch", "auto", "x64")
    refuse_unused(flags, alone, f"a model of your own, not for --generate={flags.generate}")
    dtype = choose("dtype", flags.dtype or "float32", mismatch.BOUNDS)
    mismatches = mismatch.measure(
        flags.generate,
        mesh_names(flags),
        dtype=dtype,
        rows=flags.batch_size or 8,
        new_tokens=flags.seq_len or 128,
    )
    holds, verdict = mismatch.verdict(mismatches, dtype)
    if flags.json:
        pairs = [dataclasses.asdict(pair) for pair in mismatches]
        print0(json.dumps({"holds": holds, "dtype": dtype, "pairs": pairs}, indent=1))
    else:
        print0(mismatch.head(), *(pair.line() for pair in mismatches), verdict)
    sys.exit(0 if holds else 1)
