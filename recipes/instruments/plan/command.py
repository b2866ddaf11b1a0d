"""The command `python -m recipes.plan`."""

import dataclasses
import json
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractDevice

from recipes.common import entries
from recipes.common.flags.config_flags import check_matmul, field_flag
from recipes.common.report import contexts, kernel, report
from recipes.common.report.hlo import sent_by_kind
from recipes.common.runtime import UserError, flag, print0
from recipes.common.runtime.flags import choose, refuse_unused
from recipes.common.sharding import AbstractModel, abstract_model, make_layout
from recipes.common.sharding.shape import check_length, shape_of
from recipes.common.train.offload import Offload
from recipes.common.train.optimizer import (
    OPTIMIZERS,
    LearningRate,
    hidden_matrices,
    make_optimizer,
)
from recipes.common.train.step import TrainStep
from recipes.instruments.plan import answer
from recipes.instruments.plan import page as plan_page
from recipes.instruments.plan.compilers import TooLarge, compile_step, missing_compiler, topology
from recipes.instruments.plan.estimate import Estimate, estimate
from recipes.instruments.plan.hardware import Devices, parse_devices
from recipes.instruments.plan.own_model import own_model
from recipes.instruments.plan.search import Change, Job, Plan, cheapest_change, search
from recipes.instruments.plan.step_cycles import (
    clock,
    count,
    dump_bundles,
    has_cycles,
    read_bundles,
    read_hlo,
)
from recipes.instruments.user_model import ModelFlags
from zoo.options.compute_options import ComputeOptions

SHORT, LONG = 128, 4_096  # tokens of a row: the recipes' default; of a published model's size
SAY_SECONDS = 30  # between lines while the compiler works


@dataclasses.dataclass(frozen=True)
class Flags(ModelFlags, Offload):
    entry: str = flag(
        "transformer", "Zoo entry, unless --model is given.", group="model", choices=entries.ENTRIES
    )
    size: str = flag("small", "Size of the model, a key of its zoo file's SIZES.", group="model")
    devices: str = flag(
        "cpu:8", "Kind and number of devices: v5p:64; v5e:256x2, two slices of 256; h100:16, two nodes "
        "of 8.",
    )  # fmt: skip
    batch_tokens: str = flag(
        "", "Tokens of a batch over all devices, or examples of a model without tokens; K is 2^10, M is "
        "2^20. Empty: 16 rows for each device.", group="data",
    )  # fmt: skip
    seq_len: int = flag(
        0, f"Tokens of context, for text; 0: {SHORT}, or {LONG:,} for sizes of published models, if they "
        "were trained with so many.", group="data", at_least=0,
    )  # fmt: skip
    pictures: int = flag(
        1, "Pictures of a row, for models that see; --plan of their recipes counts those of the data.",
        group="data", at_least=0,
    )  # fmt: skip
    matmul: str = field_flag(ComputeOptions, "matmul")
    optimizer: str = flag("adamw", "Optimizer.", "optimizer", choices=OPTIMIZERS)
    top: int = flag(8, "Rows of the table.", at_least=1)
    confirm: int = flag(0, "Candidates to compile with the real compiler.", at_least=0)
    confirm_layers: int = flag(0, "Layers of the compiled models; 0: all.", at_least=0)
    json: bool = flag(False, "Print one JSON object, and nothing else, on standard output.")
    html: str = flag("", "Also write a page with pictures to this file.")


def main(flags: Flags) -> None:
    # ---- Input: checked before anything is computed ----------------------------------------------
    devices = parse_devices(flags.devices)
    check_used(flags)
    if flags.model:
        name = flags.model.rpartition(":")[2]
        flags = dataclasses.replace(flags, entry=name, size=flags.config)
    else:
        check_own(flags)
        flags = dataclasses.replace(
            flags, size=choose("size", flags.size, entries.sizes(flags.entry))
        )
    asked = flags.seq_len
    flags = dataclasses.replace(flags, seq_len=asked or usual_rows(flags))
    page = pathlib.Path(flags.html).expanduser()
    if flags.html and not page.parent.is_dir():
        raise UserError(f"--html={flags.html}: there is no folder {page.parent}; make it first")
    jax.config.update("jax_platforms", "cpu")  # the devices need not exist
    job, abstract, assumed = make_job(flags, devices)
    if asked and not job.seq_len:
        refuse_unused(flags, ("seq_len",), f"text, which {flags.entry} doesn't read")
    if not shape_of(abstract, job.config).tower:
        refuse_unused(flags, ("pictures",), f"models that see, and {flags.entry} sees none")
    if flags.confirm and flags.model:
        raise UserError("--confirm compiles entries of the zoo, and --model is none; leave it out")
    if flags.confirm and not shape_of(abstract, job.config).vocab_size:
        raise UserError(
            f"--confirm compiles language models, and {flags.entry} is none; leave it out"
        )

    # ---- Every mesh and strategy, by arithmetic --------------------------------------------------
    plan = search(job, devices, abstract)
    if not plan.ranked:
        raise UserError(no_mesh(plan, flags))
    change = None if plan.best else cheapest_change(plan)
    say = (lambda *_: None) if flags.json else print0
    long = assumed + contexts.beyond(flags.entry, flags.size, job.seq_len)
    if job.seq_len and job.seq_len != (asked or SHORT):
        long.append(f"Rows have {job.seq_len:,} tokens; --seq_len=… plans others.")
    if plan.ranked[0].layout.shape.tower:
        long.append(
            f"Memory and compute count --pictures={job.pictures} a row; --confirm compiles rows of text."
        )
    ranked = answer.distinct(plan.ranked)[: flags.top]
    say(*answer.table(ranked), "", *long, *answer.notes(plan), "")
    if plan.best:
        say(answer.why_first(plan), *kernel.experts(plan.best.layout), "")
        say(*answer.why_others_lose(plan), "")
        if not flags.model:
            say(answer.command(flags.entry, flags.size, plan.best))
    else:
        say(*answer.why_others_lose(plan), "")
        say(_what_would_fit(change))
    results: dict[str, Any] = answer.as_json(plan, flags.entry, flags.size, flags.top)
    results["change"] = change and change.text
    results["notes"] = long
    if flags.html:
        page.write_text(plan_page.page(plan, plan.ranked[: flags.top], flags.entry, flags.size))
        say("", f"The plan with pictures: {page}")

    # ---- The best few, by the real compiler ------------------------------------------------------
    results["confirmed"] = confirm(plan, flags, say) if flags.confirm else []
    if flags.json:
        print0(json.dumps(results, indent=1))


def check_used(flags: Flags) -> None:
    """Raises UserError for flags that would have no effect."""
    for name in ("entry", "size") if flags.model else ():
        if (value := getattr(flags, name)) != getattr(Flags(), name):
            raise UserError(
                f"--{name}={value} is for the zoo's models, and --model={flags.model} is your own; leave "
                f"one of them out{' (--config names its size)' if name == 'size' else ''}"
            )
    if not flags.confirm:
        refuse_unused(flags, ("confirm_layers",), "--confirm, and there is none", "add --confirm=1")


def usual_rows(flags: Flags) -> int:
    """Tokens of a row, unless --seq_len says otherwise: more for sizes of published models."""
    trained = contexts.TRAINED.get(flags.entry, {}).get(flags.size)
    return min(trained, LONG) if trained and not flags.model else SHORT


def check_own(flags: Flags) -> None:
    """Raises UserError if flags of a user's own model are given without it."""
    for name, value in vars(flags).items():
        if value and name in ModelFlags.__dataclass_fields__:
            raise UserError(
                f"--{name}={value} is for a model of your own; add --model=FILE.py:NAME"
            )


def make_job(flags: Flags, devices: Devices) -> tuple[Job, AbstractModel, list[str]]:
    """The model and the batch that the flags ask for, the model as traced, and what is assumed of it.

    Raises UserError if they can't be planned.
    """
    if flags.model:
        own = own_model(flags)
        model, config, abstract, rules, assumed = own
    else:
        model, rules, assumed = entries.model(flags.entry), None, []
        config = entries.sizes(flags.entry)[flags.size]()
        abstract = abstract_model(lambda: model(config, rngs=nnx.Rngs(0)))
    shape = shape_of(abstract, config)
    if shape.dtype:
        dtype = "float32" if devices.kind == "cpu" else "bfloat16"
        config = dataclasses.replace(config, dtype=dtype)
    for name in ("matmul", "offload"):
        if (value := getattr(flags, name)) and shape.remat is None:
            raise UserError(
                f"--{name}={value} is for models with layers, and {flags.entry} has none; leave it out"
            )
    if flags.matmul:
        device = AbstractDevice(devices.hardware.name, None, devices.hardware.platform)
        check_matmul(flags.matmul, device)
        config = dataclasses.replace(config, matmul=flags.matmul)
    length = flags.seq_len if shape.vocab_size else 0
    check_length(shape, length)
    tokens = 16 * devices.count * max(length, 1)
    if flags.batch_tokens:
        number = re.fullmatch(r"(\d{1,15})([KM]?)", flags.batch_tokens.upper())
        if not number:
            raise UserError(
                f"--batch_tokens={flags.batch_tokens[:20]} is not a number of tokens; write 4M or 524288"
            )
        tokens = int(number[1]) * {"": 1, "K": 2**10, "M": 2**20}[number[2]]
    rows, over = divmod(tokens, max(length, 1))
    if over or not rows:
        suggestion = max(round(tokens / length), 1) * length
        raise UserError(
            f"--batch_tokens={flags.batch_tokens} is not a whole number of rows of "
            f"--seq_len={length}; try --batch_tokens={suggestion}"
        )
    job = Job(model, config, rows, length, flags.offload, flags.optimizer, rules, flags.pictures)
    return job, abstract, assumed


def _what_would_fit(change: Change | None) -> str:
    if change is None:
        return "Nothing fits, nor does it with rows of an eighth or with 16 times the devices."
    best = change.best
    return (
        f"Nothing fits. The cheapest change: with {change.text}, {best.layout.strategy} on "
        f"{answer.mesh_of(best)} needs {report.size(best.peak)} a device."
    )


def no_mesh(plan: Plan, flags: Flags) -> str:
    """Says why there are no candidates, and suggests a batch that has some."""
    rows, unit = plan.job.rows, plan.job.seq_len or 1
    if plan.left_out["rows"] >= max(plan.left_out.values()):
        count = plan.devices.count
        return (
            f"--batch_tokens={flags.batch_tokens} has {rows} row{'s' * (rows > 1)}, too few or not "
            f"divisible for the shards of any mesh of {count} devices; try "
            f"--batch_tokens={-(-rows // count) * count * unit}"
        )
    return f"no mesh of {plan.devices} divides this model; use another number of devices"


# ---- the real compiler ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Program:
    """A candidate's train step on a mesh that the compiler knows."""

    function: TrainStep
    abstract: Any
    example: dict[str, jax.ShapeDtypeStruct]

    def compile(self) -> jax.stages.Compiled:
        return self.function.lower(self.abstract, self.example).compile()


def make_program(model: type, candidate: Estimate) -> Program:
    """The train step of a candidate."""
    estimated, devices = candidate.layout, candidate.devices
    mesh = topology(devices.kind, dict(estimated.mesh.shape), devices.groups)
    layout = make_layout(
        model, estimated.config, mesh, estimated.strategy,
        batch_size=estimated.batch_size, microbatches=candidate.accumulate,
        seq_len=estimated.seq_len,
    )  # fmt: skip
    lr = LearningRate(1e-3, 10, 100)
    optimizer = make_optimizer(
        candidate.optimizer, lr, weight_decay=0.1, clip_norm=1.0, matrices=hidden_matrices(layout)
    )
    step = TrainStep(layout, optimizer, lr, candidate.accumulate, offload=candidate.offload)
    row = jax.ShapeDtypeStruct((estimated.seq_len,), np.int32)
    return Program(
        step, step.abstract_state(), dict.fromkeys(("tokens", "targets", "segment_ids"), row)
    )


def confirm(plan: Plan, flags: Flags, say) -> list[dict[str, Any]]:
    """Compiles the best candidates and prints a line as each one finishes."""
    if missing := missing_compiler(plan.devices.kind):
        print(f"Not confirmed: {missing}", file=sys.stderr, flush=True)
        return []
    say("", "| mesh | rules | memory, estimated | compiled | ratio | sent, estimated | compiled | ratio "
        "| step, estimated | by cycles | ratio |", "|---|---|" + 9 * "---:|")  # fmt: skip
    rows: list[dict[str, Any]] = []
    signal.signal(signal.SIGINT, signal.default_int_handler)
    candidates = [x for x in plan.ranked[: flags.confirm] if x.fits] or plan.ranked[:1]
    files = pathlib.Path(tempfile.mkdtemp())
    if has_cycles(plan.devices):
        dump_bundles(files)
    try:
        for number, candidate in enumerate(candidates, 1):
            what = f"{candidate.layout.strategy} on {answer.mesh_of(candidate)}"
            _progress(f"{what}: compiling, {number} of {len(candidates)}; Ctrl-C stops")
            rows.append(
                _in_background(
                    lambda x=candidate: _confirm(plan.job.model, x, flags.confirm_layers, files),
                    what,
                )
            )
            say(_line(rows[-1]))
    except KeyboardInterrupt:
        say("", f"Stopped: {len(rows)} of {len(candidates)} are confirmed.")
    finally:
        shutil.rmtree(files, ignore_errors=True)  # the compiler may still be writing
    return rows


def _confirm(model: type, candidate: Estimate, layers: int, files: pathlib.Path) -> dict[str, Any]:
    """A candidate's estimated and compiled costs.

    Args:
      files: the folder to which the compiler writes its kernels' bundles.
    """
    if layers:
        config = dataclasses.replace(candidate.layout.config, num_layers=layers)
        shallow = make_layout(model, config, candidate.layout.mesh, candidate.layout.strategy)
        layout = dataclasses.replace(candidate.layout, config=config, model=shallow.model)
        candidate = estimate(
            layout,
            candidate.devices,
            candidate.accumulate,
            candidate.offload,
            candidate.optimizer,
        )
    name = f"{candidate.layout.strategy} on {answer.mesh_of(candidate)}"
    costs = answer.to_json(candidate)
    compiled = compile_step(make_program(model, candidate), candidate.devices.kind, name)
    if isinstance(compiled, TooLarge):
        return costs | {
            "compiled_memory": compiled.bytes, "compiled_sent": None, "compiled_seconds": None,
        }  # fmt: skip
    devices = candidate.devices
    seconds = None
    if has_cycles(devices):
        bundles = read_bundles(files)
        seconds = count(read_hlo(compiled.as_text(), devices, bundles), devices).total
        seconds /= clock(devices)
    sent = sent_by_kind(compiled.as_text(), devices.count)
    return costs | {
        "compiled_memory": report.peak_memory(compiled),
        "compiled_sent": sum(sent.values()),
        "compiled_seconds": seconds,
    }


def _line(costs: dict[str, Any]) -> str:
    """A row of the table that compares estimate and compiler."""
    memory, sent = sum(costs["memory"].values()), costs["sent_inside"] + costs["sent_between"]
    peak, real = costs["compiled_memory"], costs["compiled_sent"]
    mesh = answer.describe(costs["mesh"])
    cells = [mesh, costs["rules"], report.size(memory), report.size(peak), f"{memory / peak:.2f}"]
    cells += [report.size(sent), report.size(real), f"{sent / real:.2f}"] if real else ["-"] * 3
    step, cycles = costs["seconds"]["step"], costs["compiled_seconds"]
    cells += [f"{step:.2f} s", f"{cycles:.2f} s", f"{step / cycles:.2f}"] if cycles else ["-"] * 3
    return f"| {' | '.join(cells)} |"


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _in_background(function, what: str) -> Any:
    """Compiles in a thread, so that Ctrl-C does not wait, and says every so often that it still does."""
    results: list[Any] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    start, printed = time.perf_counter(), 0.0
    while thread.is_alive():
        thread.join(0.2)
        passed = time.perf_counter() - start
        if passed - printed >= SAY_SECONDS:
            printed = passed
            _progress(f"{what}: still compiling after {passed:.0f} s")
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]
