"""How the optimized programs and the bundles of a TPU are read, from texts of them."""
# ruff: noqa: E501 - lines of programs are as long as XLA writes them

import pytest

from benchmarks.suites.tpu import bundles
from benchmarks.suites.tpu.program import Array, Program, _array

pytestmark = pytest.mark.tpu

MB = 1 << 20
PROGRAM = """HloModule step

%sliced (x: f32[512,512], i: s32[]) -> f32[64,512] {
  %x = f32[512,512]{1,0:T(8,128)} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %view = f32[512,512]{1,0:T(8,128)} copy(%x)
  ROOT %part = f32[64,512]{1,0:T(8,128)S(1)} dynamic-slice(%view, %i, %zero), dynamic_slice_sizes={64,512}
}

%updated (x.1: f32[512,512], y: f32[64,512], i.1: s32[]) -> f32[512,512] {
  %x.1 = f32[512,512]{1,0:T(8,128)} parameter(0)
  %y = f32[64,512]{1,0:T(8,128)S(1)} parameter(1)
  %i.1 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %put = f32[512,512]{1,0:T(8,128)} dynamic-update-slice(%x.1, %y, %i.1, %zero.1)
}

%body (carry: (s32[], f32[512,512])) -> (s32[], f32[512,512]) {
  %carry = (s32[], f32[512,512]{1,0:T(8,128)}) parameter(0)
  %n = s32[] get-tuple-element(%carry), index=0
  %a = f32[512,512]{1,0:T(8,128)} get-tuple-element(%carry), index=1
  %cut = f32[64,512]{1,0:T(8,128)S(1)} fusion(%a, %n), kind=kLoop, calls=%sliced, backend_config={"window_config":{"estimated_cycles":"100"}}
  %new = f32[512,512]{1,0:T(8,128)} fusion(%a, %cut, %n), kind=kLoop, calls=%updated, backend_config={"window_config":{"estimated_cycles":"50"}}
  ROOT %out = (s32[], f32[512,512]{1,0:T(8,128)}) tuple(%n, %new)
}

%condition (carry.1: (s32[], f32[512,512])) -> pred[] {
  %carry.1 = (s32[], f32[512,512]{1,0:T(8,128)}) parameter(0)
  %limit = s32[] constant(8)
  %m = s32[] get-tuple-element(%carry.1), index=0
  ROOT %less = pred[] compare(%m, %limit), direction=LT
}

ENTRY %main (p: f32[512,512], q: bf16[512,512]) -> f32[512,512] {
  %p = f32[512,512]{1,0:T(8,128)} parameter(0)
  %q = bf16[512,512]{1,0:T(8,128)(2,1)} parameter(1)
  %start = s32[] constant(0)
  %fetch = (bf16[512,512]{1,0:T(8,128)(2,1)S(1)}, bf16[512,512]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%q)
  %fetched = bf16[512,512]{1,0:T(8,128)(2,1)S(1)} copy-done(%fetch)
  %first = (s32[], f32[512,512]{1,0:T(8,128)}) tuple(%start, %p)
  %loop = (s32[], f32[512,512]{1,0:T(8,128)}) while(%first), condition=%condition, body=%body
  %r = f32[512,512]{1,0:T(8,128)} get-tuple-element(%loop), index=1
  %k = f32[512,512]{1,0:T(8,128)} custom-call(%r, %fetched), custom_call_target="tpu_custom_call"
  ROOT %s = f32[512,512]{1,0:T(8,128)} all-reduce(%k), replica_groups={}
}
"""

BUNDLES = """
     0   :  { %1 = smov 0 }
   0x1 LB: > { %2 = smov 0 }
   0x2 LB: >> { %p1 = scmp.ge.s32.totalorder %s1, 16 /* loop exit test */ }
   0x3   : > { %3 = smov 0 }
   0x4   : >> { %4 = sbr.rel (!%p1) target = $region1 }
   0x5   : > { %p2 = scmp.ge.s32.totalorder %s2, 6 /* loop exit test */  ;;  %5 = sbr.rel }
   0x6   :  {}
   0x7   :  { %6 = smov 0 }
"""

# The loop over a grid of 4 steps: trip 0 only fetches, trip 5 only stores, and both branch over.
GRID = """
     0   :  { %1 = smov 0 }
   0x1 LB: > { %p7 = scmp.ge.s32.totalorder %s3, 1 }
   0x2   : > { %p8 = scmp.lt.s32.totalorder %s3, 5  ;;  %p9 = pnand %p7, %p8 }
   0x3   : > { %2 = sbr.rel (%p9) target = $region6 }
   0x4   : > { %3 = smov 0 }
   0x5   :  {}
   0x6   :  {}
   0x7   :  {}
   0x8   : > { %4 = smov 0 }
   0x9 LB: >> { %p1 = scmp.ge.s32.totalorder %s1, 16 /* loop exit test */ }
   0xa   : >> { %5 = sbr.rel (!%p1) target = $region1 }
   0xb   : > { %6 = smov 0 }
   0xc PF: > { %7 = smov 0 }
   0xd   : > { %p2 = scmp.ge.s32.totalorder %s2, 6 /* loop exit test */ }
   0xe   : > { %8 = sbr.rel (!%p2) target = $region2 }
   0xf   :  { %9 = smov 0 }
"""


def test_bytes_of_a_program():
    """Slices count what they take, in a loop each time; chip memory nothing; a kernel each once."""
    program = Program(PROGRAM)
    counter = 8 * 2 * 4
    assert program.traffic() == MB // 2 + 2 * MB + counter + 2 * MB + 2 * MB
    assert program.cycles() == 8 * 150
    assert program.kernels() == 1 and program.collectives() == {"all-reduce": 1}
    with pytest.raises(ValueError, match="trips of loop are not known"):
        Program(PROGRAM.replace("direction=LT", "direction=NE")).traffic()


def test_bytes_of_tiles():
    assert _array("f32", "5,100", "1,0:T(8,128)") == Array(8 * 128 * 4, True)
    assert _array("bf16", "100,5", "0,1:T(8,128)(2,1)S(1)") == Array(8 * 128 * 2, False)
    assert _array("s4", "64,64", "1,0") == Array(64 * 32, True)


def test_bundles_of_loops():
    """3 bundles of the inner loop 16 times, and two more of the outer one, 6 times."""
    assert bundles.cycles(BUNDLES) == 1 + 6 * (1 + 16 * 3 + 2) + 1
    with pytest.raises(ValueError, match="exit tests"):
        bundles.cycles(BUNDLES.replace("%s1, 16", "%s1, %s3"))
    # the test of a loop may stand in the one inside, and wait for the end of that
    test = " ;; %p2 = scmp.ge.s32.totalorder (%p1), %s2, 6 /* loop exit test */ }"
    moved = BUNDLES.replace("%p2 = scmp.ge.s32.totalorder %s2, 6 /* loop exit test */  ;;  ", "")
    moved = moved.replace("16 /* loop exit test */ }", "16 /* loop exit test */" + test)
    assert bundles.cycles(moved) == bundles.cycles(BUNDLES)


def test_bundles_of_a_grid():
    """Bundles that a branch leaves out of the first and the last trip run 4 times, not 6.

    The four bundles behind the branch run before it is taken. Its condition may be kept as
    a number, with no register left for it.
    """
    always, of_step = 3 + 4 + 3, 1 + 16 * 2 + 1
    assert bundles.cycles(GRID) == 1 + 6 * always + 4 * of_step + 1
    kept = GRID.replace(
        "{ %2 = sbr.rel (%p9)",
        "{ %s4 = scalar_select /*predicate=*/%p9, /*on_true=*/1, /*on_false=*/0  ;;  "
        "%p10 = scmp.ne.s32.totalorder %s4, 0  ;;  %2 = sbr.rel (%p10)",
    )
    assert bundles.cycles(kept) == bundles.cycles(GRID)
    with pytest.raises(ValueError, match="how often the branch on %p9"):
        bundles.cycles(GRID.replace("%s3, 5", "%s4, 5"))
