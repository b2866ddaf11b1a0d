"""Cycles of recorded TPU programs against sums by hand; needs no compiler."""

import dataclasses

import numpy as np
import pytest

from recipes.common.report import program
from recipes.instruments.bench import documents
from recipes.instruments.plan import step_cycles
from recipes.instruments.plan.hardware import Devices
from tests.conftest import ROOT

pytestmark = pytest.mark.promise("bench")

# A scan of three layers on 4 v5e, a row of 1,024 tokens each: splash attention of 2 heads of 128
# with blocks of 256; a gather of the layer's [256, 1024] in bfloat16; two matmuls with it.
GOLDEN = ROOT / "tests" / "golden" / "scan_with_kernel.hlo"
V5E = Devices("v5e", 4)


@pytest.fixture(scope="module")
def reading():
    text, bundles = step_cycles.read_program(GOLDEN)
    return step_cycles.read_hlo(text, V5E, bundles)


def test_cycles_of_a_scan_by_hand(reading):
    per_layer = {"fusion": 2_663, "copy": 3 * 100, "iota": 48, "matmul": 13_062}
    sums = step_cycles.count(reading, V5E)
    assert sums.operations == {kind: 3 * n for kind, n in per_layer.items()}
    blocks = 4 * 5 // 2  # of the causal triangle
    assert sums.kernels == 3 * 2 * blocks * 915
    gathered = 3 / 4 * 256 * 1_024 * 2
    assert [(x.kind, x.overlap, x.times, x.sent, x.group) for x in reading.transfers] == [
        ("all-gather", step_cycles.EXPOSED, 3, 3 * gathered, 4)
    ]
    clock = 197e12 / 2**17
    assert sums.exposed == pytest.approx(3 * gathered / V5E.send_rate(4) * clock)
    assert sums.total == sum(sums.operations.values()) + sums.kernels + sums.exposed


def test_a_matmul_beside_its_roofline(reading):
    (matmuls,) = [x for x in reading.operations if x.kind == "matmul"]
    assert matmuls.flops == 2 * (2 * 1_024 * 256 * 1_024)
    fewest, bound = step_cycles.roofline(matmuls, V5E)
    assert (fewest, bound) == (matmuls.flops / 2**17, "compute")
    assert 0.5 < fewest / matmuls.cycles < 1
    assert matmuls.bytes == 0, "all its operands are in the chip's cache"
    # A slice of the weights, from memory into the cache: [3, 64, 1024] is read in part.
    (cut,) = [x for x in reading.operations if x.kind == "fusion"]
    assert step_cycles.roofline(cut, V5E)[1] == "memory"
    assert cut.bytes == 64 * 1_024 * 2 + 4  # and an index


def test_kernels_without_bundles_count_nothing():
    text, _ = step_cycles.read_program(GOLDEN)
    unknown = step_cycles.read_hlo(text, V5E, {})
    assert [kernel.bundles for kernel in unknown.kernels] == [0]
    assert step_cycles.count(unknown, V5E).kernels == 0


def test_equal_kernels_have_equal_bundles():
    """The compiler writes them once."""
    blocks = r"\"block_q\": 128, \"block_kv\": 128"
    short, long = (
        KERNEL.format(name="fwd", mask=mask, q=q, blocks=blocks)
        for mask, q in (("1,4,4", "2,512,64"), ("1,8,8", "2,1024,64"))
    )
    lines = (
        short.replace("%k", "%fwd"),
        short.replace("%k", "%fwd.2"),
        long.replace("%k", "%fwd.3"),
    )
    hlo = "ENTRY %main (q: bf16[1]) -> bf16[1] {{\n  {}\n}}\n".format("\n  ".join(lines))
    kernels = step_cycles.read_hlo(hlo, V5E, {"fwd.2": 7}).kernels
    assert [kernel.bundles for kernel in kernels] == [7, 7, 0]


def test_two_cores_share_a_grid(reading):
    (kernel,) = reading.kernels
    one, two = (step_cycles.kernel_cycles(kernel, Devices(kind, 4)) for kind in ("v5e", "v5p"))
    assert one == 2 * two


KERNEL = (
    '%k = bf16[{q}] custom-call(%m, %m, %q), custom_call_target="tpu_custom_call", '
    "operand_layout_constraints={{s8[{mask}]{{2,1,0}}, s8[{mask}]{{2,1,0}}, bf16[{q}]{{2,1,0}}}}, "
    'frontend_attributes={{kernel_metadata={{\n"xprof_metadata":"{blocks}"\n}}}}, '
    'metadata={{op_name="splash_mha_{name}"}}'
)


@pytest.mark.parametrize(
    ("name", "mask", "blocks", "heads", "steps"),
    [
        ("fwd", "1,8,4", {"block_q": 128, "block_kv": 256}, "3,1024,64", 3 * (2 * (1 + 2 + 3 + 4))),
        ("dq", "1,4,8", {"block_q_dq": 256, "block_kv_dq": 128}, "3,1024,64", 3 * (2 + 4 + 6 + 8)),
        ("dkv", "1,4,8", {"block_q_dkv": 256, "block_kv_dkv": 128}, "3,1024,64", 3 * 2 * (1 + 2 + 3 + 4)),
        # A window: at most two blocks are visited. Two rows of two heads.
        ("fwd", "1,8,2", {"block_q": 128, "block_kv": 128}, "2,2,1024,64", 4 * (1 + 2 * 7)),
        ("dkv", "1,2,8", {"block_q_dkv": 128, "block_kv_dkv": 128}, "2,2,1024,64", 4 * (1 + 2 * 7)),
    ],
)  # fmt: skip
def test_steps_of_a_kernel_s_grid(name, mask, blocks, heads, steps):
    noted = ", ".join(rf"\"{key}\": {n}" for key, n in blocks.items())
    line = KERNEL.format(name=name, mask=mask, q=heads, blocks=noted)
    hlo = f"ENTRY %main (q: bf16[1]) -> bf16[1] {{\n  {line}\n}}\n"
    (kernel,) = step_cycles.read_hlo(hlo, V5E, {}).kernels
    assert kernel.steps == steps


GROUPED = (
    '%{name} = bf16[{out}] custom-call(%m, %x, %w), custom_call_target="tpu_custom_call", '
    "operand_layout_constraints={{s32[1]{{0}}, bf16[{x}]{{1,0}}, bf16[{w}]{{1,0}}}}, "
    'frontend_attributes={{ragged_dot_tiling="256,512,384"}}'
)


def test_grids_of_grouped_matmuls_for_an_even_load():
    """Ten blocks of rows for three experts, so that twelve pairs meet; two blocks of K and of N."""
    lines = [
        GROUPED.format(name="ragged-dot-none.1", out="2560,768", x="2560,1024", w="3,1024,768"),
        GROUPED.format(name="ragged-dot-none.2", out="3,1024,768", x="2560,1024", w="2560,768"),
    ]
    hlo = "ENTRY %main (q: bf16[1]) -> bf16[1] {{\n  {}\n}}\n".format("\n  ".join(lines))
    bundles = {"ragged-dot-none.1": 100, "ragged-dot-none.2": 70}
    read = step_cycles.read_hlo(hlo, V5E, bundles)
    # The first kernel has two versions of a step.
    assert [(x.steps, x.bundles) for x in read.kernels] == [(12 * 4, 50), (12 * 4, 70)]
    assert step_cycles.count(read, V5E).kernels == 12 * 4 * (50 + 70)
    for rows, blocks in ((1_800, 8), (10_000, 10)):
        even = step_cycles.with_even_load(read, rows, 0)
        assert {x.steps for x in even.kernels} == {(blocks + 2) * 4}


def test_rows_that_travel_at_an_even_load():
    """Buffers of 96 and 64 rows of 8 numbers, and 64 rows on their way; a gather always sends all."""
    hlo = """ENTRY %main (x: bf16[64,8]) -> bf16[64,8] {
  %x = bf16[64,8]{1,0} parameter(0)
  %go = bf16[96,8]{1,0} ragged-all-to-all(%x, %c, %s, %s, %s, %s), replica_groups=[1,8]<=[8]
  %back = bf16[64,8]{1,0} ragged-all-to-all(%go, %n, %s, %s, %s, %s), replica_groups=[1,8]<=[8]
  ROOT %all = bf16[64,8]{1,0} all-gather(%y), replica_groups=[1,8]<=[8], dimensions={0}
}
"""
    read = step_cycles.read_hlo(hlo, Devices("v5e", 8), {})
    row = 7 / 8 * 8 * 2
    assert [x.sent for x in read.transfers] == [96 * row, 64 * row, 64 * row]
    for rows, sent in ((64, [64, 64, 64]), (48, [48, 48, 64]), (1_000, [96, 64, 64])):
        even = step_cycles.with_even_load(read, choices=0, rows=rows)
        assert [x.sent for x in even.transfers] == pytest.approx([n * row for n in sent])


def test_documents_spare_the_blocks_that_they_do_not_share(reading):
    """Four blocks of 256: a document each, or one that ends in the third."""
    each, two = np.arange(1, 5).repeat(256), np.array([1, 2]).repeat([600, 424])
    for rows, blocks in (([each], 4), ([two], 6 + 2), ([each, two], 6)):
        (kernel,) = step_cycles.with_documents(reading, np.array(rows, np.int32)).kernels
        assert kernel.steps == 2 * blocks
    (kernel,) = step_cycles.with_documents(reading, np.ones((1, 2_048), np.int32)).kernels
    assert kernel.steps == 2 * 10, "rows of another length"


def test_rows_of_one_call_visit_the_same_blocks():
    blocks = r"\"block_q\": 256, \"block_kv\": 256"
    line = KERNEL.format(name="fwd", mask="1,4,4", q="2,3,1024,64", blocks=blocks)
    reading = step_cycles.read_hlo(
        f"ENTRY %main (q: bf16[1]) -> bf16[1] {{\n  {line}\n}}\n", V5E, {}
    )
    each, one = np.arange(1, 5).repeat(256), np.ones(1_024)
    for rows, blocks in (([each, each], 4), ([each, one], 10), ([each, each, each, one], 7)):
        (kernel,) = step_cycles.with_documents(reading, np.array(rows, np.int32)).kernels
        assert kernel.steps == 2 * 3 * blocks


def test_documents_of_random_lengths_fill_rows():
    ids = documents.random_lengths(200, 1_024)
    assert (ids > 0).mean() > 0.99
    assert set(np.diff(ids, axis=1)[ids[:, 1:] > 0].tolist()) == {0, 1}
    assert 150 < 1_024 / ids.max(1).mean() < 250


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        # [8, 16] · [16, 32]
        ("%c = f32[8,32]{1,0} convolution(%a, %b), dim_labels=bf_io->bf", 2 * 8 * 16 * 32),
        # A batch of 4 matmuls [8, 16] · [16, 32], as a window that meets one number of 4.
        (
            "%c = f32[4,8,32]{2,1,0} convolution(%d, %e), window={size=4 stride=3 pad=0_0 "
            "lhs_dilate=4}, dim_labels=0bf_0io->0bf", 4 * 2 * 8 * 16 * 32,
        ),
        # A window of 3 over 8 positions: its ends meet padding.
        (
            "%c = f32[8,8,32]{2,1,0} convolution(%f, %g), window={size=3 pad=1_1}, "
            "dim_labels=0bf_0io->0bf", (3 * 8 - 2) * 2 * 8 * 16 * 32,
        ),
        ("%c = f32[8,16]{1,0} add(%a, %a)", 0),
    ],
)  # fmt: skip
def test_flops_of_a_convolution(line, flops):
    shapes = {
        "a": "8,16",
        "b": "16,32",
        "d": "4,8,16",
        "e": "4,16,32",
        "f": "8,8,16",
        "g": "3,16,32",
    }
    lines = [f"%{name} = f32[{dims}]{{0}} parameter(0)" for name, dims in shapes.items()]
    match = program.INSTRUCTION.match(line)
    assert match
    assert step_cycles._flops(match, lines) == flops


UPDATE = """
%rows (s: f32[8,128], i: s32[]) -> f32[1,128] {
  %s.1 = f32[8,128]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  ROOT %d = f32[1,128]{1,0} dynamic-slice(%s.1, %i.1, %z), dynamic_slice_sizes={1,128}
}
%replace (s: f32[8,128], x: f32[1,128], i: s32[], y: f32[1,128]) -> f32[8,128] {
  %s.2 = f32[8,128]{1,0} parameter(0)
  %x.2 = f32[1,128]{1,0} parameter(1)
  %i.2 = s32[] parameter(2)
  %y.2 = f32[1,128]{1,0:S(1)} parameter(3)
  %cut = f32[1,128]{1,0} fusion(%s.2, %i.2), kind=kLoop, calls=%rows
  %sum = f32[1,128]{1,0} add(%cut, %x.2)
  ROOT %u = f32[8,128]{1,0} dynamic-update-slice(%s.2, %sum, %i.2, %z)
}
ENTRY %main (s: f32[8,128], x: f32[1,128], i: s32[]) -> f32[8,128] {
  %s = f32[8,128]{1,0} parameter(0)
  %x = f32[1,128]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %y = f32[1,128]{1,0:S(1)} parameter(3)
  ROOT %r = f32[8,128]{1,0} fusion(%s, %x, %i, %y), kind=kLoop, calls=%replace, backend_config={"estimated_cycles":"7"}
}
"""


def test_a_fusion_that_updates_a_row_in_place_touches_that_row():
    (operation,) = step_cycles.read_hlo(UPDATE, V5E, {}).operations
    row = 128 * 4
    # The row of s read by %rows; x; i; the row that %u writes in its place. y is in the cache.
    assert operation.bytes == row + row + 4 + row


OVERLAPS = """
%scattered (x: bf16[32,8]) -> bf16[4,8] {
  %x.1 = bf16[32,8]{1,0} parameter(0)
  %all-reduce.1 = bf16[32,8]{1,0} all-reduce(%x.1), channel_id=1, replica_groups=[1,8]<=[8]
  ROOT %slice = bf16[4,8]{1,0} dynamic-slice(%all-reduce.1, %i, %z), dynamic_slice_sizes={4,8}
}
%beside (x: bf16[4,8]) -> (bf16[8,8], bf16[32,8]) {
  %x.2 = bf16[4,8]{1,0} parameter(0)
  %m = bf16[8,8]{1,0} convolution(%x.2, %x.2), dim_labels=bf_io->bf
  %g = bf16[32,8]{1,0} all-gather(%x.2), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %t = (bf16[8,8]{1,0}, bf16[32,8]{1,0}) tuple(%m, %g)
}
ENTRY %main (x: bf16[4,8]) -> bf16[4,8] {
  %x = bf16[4,8]{1,0} parameter(0)
  %gs = (bf16[4,8]{1,0}, bf16[32,8]{1,0}) all-gather-start(%x), replica_groups=[1,8]<=[8], dimensions={0}
  %gd = bf16[32,8]{1,0} all-gather-done(%gs)
  %f = (bf16[8,8]{1,0}, bf16[32,8]{1,0}) fusion(%x), kind=kOutput, calls=%beside
  ROOT %r = bf16[4,8]{1,0} fusion(%gd), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_what_the_core_does_during_a_collective():
    text = OVERLAPS.replace("%scattered", "%all-reduce-scatter.1")
    transfers = step_cycles.read_hlo(text, Devices("v5e", 8), {}).transfers
    gathered, scattered = 7 / 8 * 512, 7 * 64
    assert [(x.kind, x.overlap, x.sent) for x in transfers] == [
        ("all-gather", step_cycles.OVERLAPPED, gathered),
        ("all-gather", step_cycles.FUSED, gathered),
        ("reduce-scatter", step_cycles.EXPOSED, scattered),
    ]


HIDDEN = """
%gather (x: bf16[4,8]) -> bf16[32,8] {
  %x.1 = bf16[4,8]{1,0} parameter(0)
  ROOT %g = bf16[32,8]{1,0} all-gather(%x.1), replica_groups=[1,8]<=[8], dimensions={0}
}
%body (s: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %s = (s32[], bf16[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %c = s32[] constant(1)
  %j = s32[] add(%i, %c)
  %y = bf16[4,8]{1,0} get-tuple-element(%s), index=1
  %b = bf16[4,8]{1,0} fusion(%y), kind=kLoop, calls=%other, backend_config={"estimated_cycles":"30"}
  ROOT %t = (s32[], bf16[4,8]{1,0}) tuple(%j, %b)
}
ENTRY %main (x: bf16[4,8]) -> bf16[4,8] {
  %x = bf16[4,8]{1,0} parameter(0)
  %gs = ((), (), (s32[1])) call-start(), async_execution_thread="sparsecore", to_apply=%gather
  %before = bf16[4,8]{1,0} fusion(%x), kind=kLoop, calls=%other, backend_config={"estimated_cycles":"1000"}
  %gu = ((bf16[4,8]{1,0}), bf16[32,8]{1,0}) call-update(%gs, %before)
  %a = bf16[4,8]{1,0} fusion(%x), kind=kLoop, calls=%other, backend_config={"estimated_cycles":"7"}
  %w = (s32[], bf16[4,8]{1,0}) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %k = bf16[4,8] custom-call(%a), custom_call_target="tpu_custom_call"
  %gd = bf16[32,8]{1,0} call-done(%gu)
  %after = bf16[4,8]{1,0} fusion(%gd), kind=kLoop, calls=%other, backend_config={"estimated_cycles":"1000"}
  %late = (bf16[4,8]{1,0}, bf16[32,8]{1,0}) all-gather-start(%after), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %r = bf16[32,8]{1,0} all-gather-done(%late)
}
"""


def test_the_core_waits_for_what_it_does_not_compute_meanwhile():
    """A start may come before its operands: the transfer begins with the update."""
    eight = Devices("v5e", 8)
    hidden, waited = step_cycles.read_hlo(HIDDEN, eight, {"k": 11}).transfers
    assert (hidden.overlap, hidden.meanwhile) == (step_cycles.OVERLAPPED, 7 + 3 * 30 + 11)
    assert (waited.overlap, waited.meanwhile) == (step_cycles.OVERLAPPED, 0)
    assert step_cycles.waiting(hidden, eight) == 0
    assert step_cycles.waiting(waited, eight) == step_cycles.transfer_cycles(waited, eight) > 0
    slow = dataclasses.replace(hidden, times=3, sent=3 * 10**6)
    needed = 3 * 10**6 / eight.send_rate(8) * step_cycles.clock(eight)
    assert step_cycles.waiting(slow, eight) == pytest.approx(needed - 3 * (7 + 3 * 30 + 11))


def test_a_program_is_saved_with_its_kernels_bundles(tmp_path):
    text, bundles = step_cycles.read_program(GOLDEN)
    step_cycles.write_program(text, tmp_path / "a.hlo", bundles | {"not_in_it": 3})
    assert step_cycles.read_program(tmp_path / "a.hlo")[1] == bundles


def test_bundles_are_read_from_the_compiler_s_files(tmp_path):
    name = "1795633442208877607-splash_mha_fwd.1-00-schedule-analysis_final_bundles.txt"
    (tmp_path / name).write_text("Schedule analysis:\n\ttotal scheduled bundles:    2374\n")
    assert step_cycles.read_bundles(tmp_path) == {"splash_mha_fwd.1": 2_374}
    assert step_cycles.read_bundles(tmp_path) == {}, "the next program doesn't have this one's"


def test_two_programs_side_by_side(inside, tmp_path):
    """A kernel with 100 times the bundles."""
    text = GOLDEN.read_text()
    (tmp_path / "other.hlo").write_text(text.replace("915 bundles", "91500 bundles"))
    done = inside(
        "recipes.bench", "cycles", "--size=tiny", "--devices=v5e:4", "--tokens=1024",
        "--seq_len=1024", f"--program={GOLDEN}", f"--against={tmp_path / 'other.hlo'}",
        f"--dataset={ROOT / 'README.md'}", "--mean_lengths=256",
    )  # fmt: skip
    assert done.code == 0, done.err
    rows = [
        [x.strip() for x in line.split("|")[1:-1]] for line in done.out.splitlines() if "|" in line
    ]
    table = {row[0]: row[1:] for row in rows}
    assert table["kernels"] == ["0.1", "5.5"]
    assert table["all-gather, exposed"][::4] == ["3", "3"]
    assert table["splash_mha_fwd_no_residuals.1"] == ["3", "20", "915", "0.1"]
    assert table["one a row"][1:3] == ["10.0 of 10.0", "0.1"]
    assert 4 < float(table["of 256 tokens"][1].split()[0]) < 9
    first, second = (float(x) for x in table["step, s"])
    assert first < second
