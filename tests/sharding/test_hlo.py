"""Every transfer of a compiled program is counted once, in programs with sums known by hand.

`python -m tests.by_hand.hlo_programs` checks the same programs compiled for TPUs.
"""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from recipes.common.report import hlo, report
from recipes.common.runtime.mesh import make_mesh
from tests.conftest import ROOT
from tests.support.known_programs import ACROSS_SLICES, AXIS, cases, counted, crosses, hlo_of
from tests.support.quick import QUICK

pytestmark = pytest.mark.promise("collectives-counted")

CASES = cases(8)


@pytest.mark.parametrize("name", CASES)
def test_a_program_sends_what_is_known_by_hand(name):
    function, shape, where, sent = CASES[name]
    compiled = hlo_of(function, make_mesh(f"{AXIS}=8"), *shape, where=where, **QUICK)
    assert counted(compiled) == sent


# Instructions that the CPU compiler does not write but others do, shortened, all on one channel.
ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""
TEXTS = {
    "async pairs": """
ENTRY %main (x: f32[4,8]) -> f32[32,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %g = (f32[4,8]{1,0}, f32[32,8]{1,0}) all-gather-start(%x), channel_id=1, dimensions={0}
  %h = ((f32[4,8]{1,0:T(8,128)}, s32[]), (f32[32,8]{1,0:T(8,128)}, s32[8]{0})) all-gather-start(%x, %i), channel_id=1
  %r = f32[4,8]{1,0} all-reduce-start(%x), channel_id=1, to_apply=%add
  %s = ((f32[32,8]{1,0}), f32[4,8]{1,0}, u32[]) reduce-scatter-start(%y), channel_id=1, to_apply=%add
  %p = (s32[], s32[], u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%i), channel_id=1
  %pd = s32[] collective-permute-done(%p)
  %sd = f32[4,8]{1,0} reduce-scatter-done(%s)
  %rd = f32[4,8]{1,0} all-reduce-done(%r)
  %hd = (f32[32,8]{1,0}, s32[8]{0}) all-gather-done(%h)
  ROOT %gd = f32[32,8]{1,0} all-gather-done(%g)
}
""",
    "async pairs of a GPU, several arrays at a time": """
ENTRY %main (x: bf16[4,8]) -> bf16[32,8] {
  %x = bf16[4,8]{1,0} parameter(0)
  %g = ((bf16[4,8]{1,0}, bf16[4,8]{1,0}, /*index=5*/bf16[2]{0}), (bf16[32,8]{1,0}, bf16[32,8]{1,0}, /*index=5*/bf16[16]{0})) all-gather-start(%x, %x, %y), channel_id=4, replica_groups=mesh['data'=8] {'data'}, dimensions={0}
  %gd = (bf16[32,8]{1,0}, bf16[32,8]{1,0}, /*index=5*/bf16[16]{0}) all-gather-done(%g)
  %r = ((f32[16]{0}), f32[16]{0}) all-reduce-start(%z), channel_id=36, replica_groups=[1,8]<=[8], to_apply=%add, output_to_operand_aliasing={{1}: (0, {})}
  %rd = f32[16]{0} all-reduce-done(%r)
  %m = ((f32[16]{0}, s32[]), (f32[16]{0}, s32[])) all-reduce-start(%z, %i), channel_id=37, replica_groups=[1,8]<=[8], to_apply=%add
  %md = (f32[16]{0}, s32[]) all-reduce-done(%m)
  %s = ((bf16[32,8]{0,1}, bf16[16]{0}), (bf16[4,8]{0,1}, bf16[2]{0})) reduce-scatter-start(%gd.0, %gd.2), channel_id=52, replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
  %sd = (bf16[4,8]{0,1}, bf16[2]{0}) reduce-scatter-done(%s)
  ROOT %out = bf16[32,8]{1,0} get-tuple-element(%gd), index=0
}
""",
    "wrapped async pair": """
%wrapped (x: f32[32,8]) -> f32[4,8] {
  %x.1 = f32[32,8]{1,0} parameter(0)
  ROOT %rs = f32[4,8]{1,0} reduce-scatter(%x.1), channel_id=1, dimensions={0}, to_apply=%add
}

ENTRY %main (x: f32[32,8]) -> f32[4,8] {
  %x = f32[32,8]{1,0} parameter(0)
  %s = ((f32[32,8]{1,0}), f32[4,8]{1,0}) async-start(%x), calls=%wrapped
  %u = ((f32[32,8]{1,0}), f32[4,8]{1,0}) async-update(%s), calls=%wrapped
  ROOT %d = f32[4,8]{1,0} async-done(%u), calls=%wrapped
}
""",
    "a gather beside two matmuls": """
%first (x: bf16[4,8]) -> (bf16[4,8], bf16[32,8], u32[]) {
  %x.1 = bf16[4,8]{1,0} parameter(0)
  %all-gather.1 = bf16[32,8]{1,0:T(8,128)(2,1)} all-gather(%x.1), channel_id=1, frontend_attributes={chain_id="3"}, backend_config={"async_collective_fusion_config":{"flag_start":"-1","flag_end":"-1"}}
  ROOT %c.1 = (bf16[4,8]{1,0}, bf16[32,8]{1,0}, u32[]{:S(2)}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%beside (x: bf16[4,8], y: bf16[8,8]) -> (bf16[8,8], bf16[32,8]) {
  %x.2 = bf16[4,8]{1,0} parameter(0)
  %y.2 = bf16[8,8]{1,0} parameter(1)
  %m = bf16[8,8]{1,0} convolution(%y.2, %y.2), dim_labels=bf_io->bf
  %all-gather.12 = bf16[32,8]{1,0:T(8,128)(2,1)S(1)} all-gather(%x.2), channel_id=1, frontend_attributes={chain_id="3"}, backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %t = (bf16[8,8]{1,0}, bf16[32,8]{1,0}) tuple(%m, %all-gather.12)
}

%last (x: bf16[4,8], g: bf16[32,8]) -> bf16[32,8] {
  %x.3 = bf16[4,8]{1,0} parameter(0)
  %g.3 = bf16[32,8]{1,0} parameter(1)
  %all-gather.3 = bf16[32,8]{1,0} all-gather(%x.3), channel_id=1, frontend_attributes={chain_id="3"}, backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %c.3 = bf16[32,8]{1,0} custom-call(%x.3, %g.3, %all-gather.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: bf16[4,8], y: bf16[8,8]) -> bf16[32,8] {
  %x = bf16[4,8]{1,0} parameter(0)
  %y = bf16[8,8]{1,0} parameter(1)
  %plain = bf16[32,8]{1,0} all-gather(%x), channel_id=1, dimensions={0}
  %s = (bf16[4,8]{1,0}, bf16[32,8]{1,0}, u32[]{:S(2)}) fusion(%x), kind=kCustom, calls=%first
  %f = (bf16[8,8]{1,0}, bf16[32,8]{1,0}) fusion(%x, %y), kind=kOutput, calls=%beside
  ROOT %d = bf16[32,8]{1,0} fusion(%x, %g), kind=kCustom, calls=%last
}
""",
    "a reduce-scatter as an all-reduce and a slice": """
%all-reduce-scatter.1 (x: bf16[30,8]) -> bf16[4,8] {
  %x.1 = bf16[30,8]{1,0} parameter(0)
  %zero = bf16[] constant(0)
  %pad = bf16[32,8]{1,0} pad(%x.1, %zero), padding=0_2x0_0
  %all-reduce.1 = bf16[32,8]{1,0} all-reduce(%pad), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %slice = bf16[4,8]{1,0} dynamic-slice(%all-reduce.1, %i, %z), dynamic_slice_sizes={4,8}
}

ENTRY %main (x: bf16[30,8]) -> bf16[4,8] {
  %x = bf16[30,8]{1,0} parameter(0)
  ROOT %f = bf16[4,8]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
}
""",
    "types of other sizes, tokens and a bound": """
ENTRY %main (x: f8e4m3fn[4,8]) -> f8e4m3fn[32,8] {
  %x = f8e4m3fn[4,8]{1,0} parameter(0)
  %g = f8e4m3fn[32,8]{1,0:T(8,128)(4,1)} all-gather(%x), channel_id=1, dimensions={0}
  %h = (f8e5m2[4,8]{1,0}, f8e5m2[32,8]{1,0}) all-gather-start(%y), channel_id=1, dimensions={0}
  %hd = f8e5m2[32,8]{1,0} all-gather-done(%h)
  %s = (f8e8m0fnu[32]{0}, f4e2m1fn[32,8]{1,0:T(8,128)(8,1)E(4)}, pred[8]{0}) all-to-all(%a, %b, %c), channel_id=1
  %c = (bf16[4,8]{1,0}, token[], opaque[]) collective-broadcast(%d, %t, %o), channel_id=1
  %r = c64[<=4,8]{1,0} all-reduce(%e), channel_id=1, to_apply=%add
  ROOT %out = f8e4m3fn[32,8]{1,0} copy(%g)
}
""",
    "a buffer with room to spare": """
ENTRY %main (x: f32[4,8]) -> f32[8,8] {
  %x = f32[4,8]{1,0} parameter(0)
  ROOT %r = f32[8,8]{1,0} ragged-all-to-all(%x, %out, %a, %b, %c, /*index=5*/%d), channel_id=1
}
""",
}
IN_TEXTS = {
    # 32 · 8 of float32; the same with 8 of int32.
    "async pairs": {"all-gather": 2 * 1024 + 32, "all-reduce": 128, "reduce-scatter": 128,
                    "collective-permute": 4},
    "async pairs of a GPU, several arrays at a time": {
        "all-gather": 2 * 512 + 32, "all-reduce": 64 + 68, "reduce-scatter": 64 + 4},
    "wrapped async pair": {"reduce-scatter": 128},
    "a gather beside two matmuls": {"all-gather": 2 * 512},
    "a reduce-scatter as an all-reduce and a slice": {"reduce-scatter": 64},
    "types of other sizes, tokens and a bound": {
        "all-gather": 2 * 256, "all-to-all": 32 + 128 + 8, "collective-broadcast": 64,
        "all-reduce": 256},
    "a buffer with room to spare": {"ragged-all-to-all": 256},
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_notations_of_other_compilers(name):
    assert counted(ADD + TEXTS[name]) == IN_TEXTS[name]


def test_traffic_between_slices_is_counted_separately():
    """Reads a recorded program for two TPU slices; see tests/support/known_programs.py."""
    text = (ROOT / "tests" / "golden" / "two_slices.hlo").read_text()
    assert crosses(text) == ACROSS_SLICES
    assert {found.groups for found in hlo.crossing(text)} == {"{1,2}x{0:15}"}
    inside = [hlo.group_size(found.groups, 32) for found in hlo.collectives(text)]
    assert inside == [16] * len(inside), "all others stay in a slice"
    assert not hlo.crossing(ADD + TEXTS["async pairs"])


HOST_COPIES = """
%body (w: (s32[], f32[4,256]{1,0:S(5)}, f32[256]{0})) -> (s32[], f32[4,256]{1,0:S(5)}, f32[256]{0}) {
  %w = (s32[], f32[4,256]{1,0:T(8,128)S(5)}, f32[256]{0}) parameter(0)
  %i = s32[] get-tuple-element(%w), index=0
  %m = f32[4,256]{1,0:T(8,128)S(5)} get-tuple-element(%w), index=1
  %x = f32[1,256]{1,0:T(8,128)} get-tuple-element(%w), index=2
  %s = ((f32[4,256]{1,0:T(8,128)S(5)}, s32[], s32[]), f32[1,256]{1,0:T(8,128)}, u32[]{:S(2)}) dynamic-slice-start(%m, %i, %i)
  %sd = f32[1,256]{1,0:T(8,128)} dynamic-slice-done(%s)
  %u = ((f32[4,256]{1,0:T(8,128)S(5)}, f32[1,256]{1,0:T(8,128)}, s32[], s32[]), f32[4,256]{1,0:T(8,128)S(5)}, u32[]{:S(2)}) dynamic-update-slice-start(%m, %sd, %i, %i)
  %ud = f32[4,256]{1,0:T(8,128)S(5)} dynamic-update-slice-done(%u)
  ROOT %r = (s32[], f32[4,256]{1,0:T(8,128)S(5)}, f32[256]{0}) tuple(%i, %ud, %x)
}
%cut (p: f32[4,256], q: s32[]) -> f32[1,256] {
  %p = f32[4,256]{1,0:S(5)} parameter(0)
  %q = s32[] parameter(1)
  ROOT %d = f32[1,256]{1,0} dynamic-slice(%p, %q, %q), dynamic_slice_sizes={1,256}
}
ENTRY %main (a: f32[16], b: f32[4,256]) -> f32[16] {
  %a = f32[16]{0} parameter(0)
  %b = f32[4,256]{1,0:S(5)} parameter(1)
  %c = (f32[16]{0:S(5)}, f32[16]{0}, u32[]{:S(2)}) copy-start(%a)
  %cd = f32[16]{0:S(5)} copy-done(%c)
  %e = f32[16]{0} copy(%cd)
  %f = f32[16]{0:S(5)} copy(%cd)
  %i = s32[] constant(0)
  %g = f32[1,256]{1,0} fusion(%b, %i), kind=kLoop, calls=%cut
  %t = (s32[], f32[4,256]{1,0:S(5)}, f32[256]{0}) tuple(%i, %b, %g)
  %l = (s32[], f32[4,256]{1,0:S(5)}, f32[256]{0}) while(%t), condition=%never, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  ROOT %h = f32[16]{0} add(%e, %a)
}
"""


def test_copies_to_the_hosts_memory_are_counted_by_direction():
    """Counts whole arrays, asynchronous slices in a loop, and a slice in a fusion; not a copy inside
    the host's memory.
    """
    layers, whole, one = 4 * 1024, 16 * 4, 1024
    want = {"to the device": layers + whole + one, "to the host": layers + whole}
    assert hlo.host_copies(HOST_COPIES) == want
    assert not any(hlo.host_copies(HOST_COPIES.replace("S(5)", "")).values())
    assert not hlo.collectives(HOST_COPIES)


def test_a_reduce_scatter_of_any_notation_sends_the_same():
    fused = TEXTS["a reduce-scatter as an all-reduce and a slice"]
    assert hlo.sent_by_kind(ADD + fused, 8) == {"reduce-scatter": 7 * 64}


def test_a_buffer_is_reported_as_a_bound():
    class Compiled:
        def as_text(self):
            return TEXTS["a buffer with room to spare"]

    assert report.sent(Compiled()) == "1 ragged-all-to-all of at most 256 B"


def test_a_collective_names_its_line_and_those_that_called_it(named_lines):
    # The partitioner's own gathers have their operand's line on JAX 0.12; ours have the call's.
    @jax.shard_map(in_specs=jax.P("data"), out_specs=jax.P(), check_vma=False)
    def gather(x):
        return jax.lax.all_gather(x, "data", tiled=True)  # innermost

    def twice(x):
        return 2 * gather(x)  # its caller

    with jax.set_mesh(make_mesh("8")):
        x = jax.device_put(jnp.ones((16, 4)), jax.P("data"))
        text = jax.jit(twice).lower(x).compile(QUICK).as_text()
    (gathered,) = hlo.collectives(text)
    lines = pathlib.Path(__file__).read_text().splitlines()
    frames = [x for x in hlo.source_frames(text)[gathered.frame] if x.file == __file__][:2]
    assert [x.function.rpartition(".")[2] for x in frames] == ["gather", "twice"]
    comments = [lines[x.line - 1].partition("# ")[2] for x in frames]
    assert comments == ["innermost", "its caller"]
