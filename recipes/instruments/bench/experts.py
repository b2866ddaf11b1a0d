"""Communication and FLOPs of a mixture of experts, from the TPU compiler."""

import dataclasses
import itertools
from typing import Any

from recipes.common.report import report
from recipes.common.report.hlo import sent_by_kind
from recipes.common.runtime import describe
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.flags import flag
from recipes.common.runtime.terminal import print0
from recipes.instruments.bench.common import Step, Table, machine, make_step, one_of, read_integers
from recipes.instruments.bench.targets import TPUS, check_targets
from recipes.instruments.plan.compilers import TooLarge, compile_step, topology
from recipes.instruments.plan.textbook import device_tokens, transfers
from zoo.experts.mixture import EXPERT_REMAT
from zoo.moe import Config, MoE
from zoo.sizes import MOE as SIZES


@dataclasses.dataclass(frozen=True)
class ExpertsFlags:
    sizes: str = flag("mixtral_8x7b,qwen3_30b_a3b", "Sizes of MoE, comma-separated.", "model")
    remats: str = flag("dispatched,full", "Remat policies, comma-separated.", "model")
    seq_len: int = flag(4_096, "Tokens of context, with one sequence per chip.", "data", at_least=1)
    chips: str = flag("16,256", "Numbers of chips, comma-separated.")
    expert: int = flag(8, "Chips along expert.", at_least=2)
    kind: str = flag("v5p", "Kind of TPU, or cpu: simulated devices.", choices=[*TPUS, "cpu"])


def experts(flags: ExpertsFlags) -> None:
    sizes, chips = one_of("sizes", flags.sizes, SIZES), read_integers("chips", flags.chips)
    remats = one_of("remats", flags.remats, EXPERT_REMAT)
    for count in chips:
        if count % flags.expert:
            raise UserError(
                f"--chips has {count}, not divisible by --expert={flags.expert}; use a divisor"
            )
    check_targets([flags.kind], chips)
    table = Table("size", "mesh", "remat", "all-to-all", "textbook", "ratio", "all that is sent",
                  "peak", "FLOPs / active")  # fmt: skip
    for size, count in itertools.product(sizes, chips):
        computed = _flops(flags, SIZES[size](), count)
        for remat in remats:
            _row(table, flags, size, count, remat, computed)
    print0("", f"Bytes that one {flags.kind} chip sends in a step under fsdp_ep, a sequence of "
           f"{flags.seq_len:,} tokens a chip, and its memory.", machine())  # fmt: skip


def _step(flags: ExpertsFlags, config: Config, chips: int) -> Step:
    mesh = topology(flags.kind, {"data": chips // flags.expert, "expert": flags.expert})
    dtype = "float32" if flags.kind == "cpu" else "bfloat16"  # XLA's CPU backend sends float32
    config = dataclasses.replace(config, dtype=dtype)
    return make_step(config, "fsdp_ep", mesh, chips, flags.seq_len, segments=True, model=MoE)


def _row(
    table: Table, flags: ExpertsFlags, size: str, chips: int, remat: str, computed: str
) -> None:
    step = _step(flags, dataclasses.replace(SIZES[size](), remat=remat), chips)
    name = describe(step.layout.mesh.shape)
    compiled = compile_step(step, flags.kind, f"{size} {remat} on {flags.kind} {name}")
    if isinstance(compiled, TooLarge):
        table.row(size, name, remat, "-", "-", "-", "-", compiled.text, computed)
        return
    sent, least = sent_by_kind(compiled.as_text(), chips), _textbook(step)
    exchanged, peak = sent["all-to-all"], report.peak_memory(compiled)
    sizes = map(report.size, (exchanged, least))
    ratio, total = f"{exchanged / least:.2f}", report.size(sum(sent.values()))
    table.row(size, name, remat, *sizes, ratio, total, report.size(peak), computed)


def _textbook(step: Step) -> float:
    """Bytes that a device must exchange with the devices of other experts per step."""
    return sum(x.bytes for x in transfers(step.layout) if x.kind == "all-to-all")


def _flops(flags: ExpertsFlags, config: Config, chips: int) -> str:
    """A layer's FLOPs at capacity 1, relative to 6 FLOPs for each weight that a token uses.

    Starts from the compiler's count for a step with one layer, and subtracts the loss: 6 FLOPs for
    each weight of the embedding table, and 2 more because logits are computed twice. The vocabulary
    is small, so that little has to be subtracted. The compiler does not count FLOPs of TPU kernels,
    so attention counts as none.
    """
    config = dataclasses.replace(
        config, num_layers=1, capacity=1.0, remat="none", loss_chunk=flags.seq_len,
        vocab_size=1_024,
    )  # fmt: skip
    step = _step(flags, config, chips)
    compiled = compile_step(step, flags.kind, f"FLOPs of one layer, {chips} chips")
    if isinstance(compiled, TooLarge):
        return "-"
    tokens = device_tokens(step.layout)
    table = step.config.vocab_size * config.embed
    layer = step.layout.shape.multiplied - table
    costs: Any = compiled.cost_analysis()
    counted = costs["flops"] - 8 * table * tokens
    return f"{counted / (6 * layer * tokens):.2f}"
