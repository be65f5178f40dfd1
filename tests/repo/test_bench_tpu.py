"""The suite that compiles for TPUs: how it reads optimized programs and bundles, without libtpu."""
# ruff: noqa: E501 - lines of programs are as long as XLA writes them

import pytest

from benchmarks.suites.tpu import bundles, cases, tables
from benchmarks.suites.tpu.program import Array, Program, _array
from tests.claims_cases import made

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


def test_bytes_of_a_program():
    """Slices count what they take, in a loop each time; chip memory nothing; a kernel each once."""
    program = Program(PROGRAM)
    counter = 8 * 2 * 4
    assert program.traffic() == MB // 2 + 2 * MB + counter + 2 * MB + 2 * MB
    assert program.cycles() == 8 * 150
    assert program.kernels() == 1 and program.collectives() == {"all-reduce": 1}


def test_a_loop_of_unknown_length_is_an_error():
    with pytest.raises(ValueError, match="trips of loop are not known"):
        Program(PROGRAM.replace("direction=LT", "direction=NE")).traffic()


def test_bytes_of_tiles():
    assert _array("f32", "5,100", "1,0:T(8,128)") == Array(8 * 128 * 4, True)
    assert _array("bf16", "100,5", "0,1:T(8,128)(2,1)S(1)") == Array(8 * 128 * 2, False)
    assert _array("f8e4m3fn", "64", "") == Array(64, True)
    assert _array("s4", "64,64", "1,0") == Array(64 * 32, True)


def test_bundles_of_loops():
    """3 bundles of the inner loop 16 times, and two more of the outer one, 6 times."""
    assert bundles.cycles(BUNDLES) == 1 + 6 * (1 + 16 * 3 + 2) + 1
    with pytest.raises(ValueError, match="exit tests"):
        bundles.cycles(BUNDLES.replace("%s1, 16", "%s1, %s3"))


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


def test_bundles_of_a_grid():
    """Bundles that a branch leaves out of the first and the last trip run 4 times, not 6.

    The four bundles behind the branch run before it is taken.
    """
    always, of_step = 3 + 4 + 3, 1 + 16 * 2 + 1
    assert bundles.cycles(GRID) == 1 + 6 * always + 4 * of_step + 1
    with pytest.raises(ValueError, match="how often the branch on %p9"):
        bundles.cycles(GRID.replace("%s3, 5", "%s4, 5"))


def test_a_condition_may_be_kept_as_a_number():
    """A chip does so with no register left for it."""
    kept = GRID.replace(
        "{ %2 = sbr.rel (%p9)",
        "{ %s4 = scalar_select /*predicate=*/%p9, /*on_true=*/1, /*on_false=*/0  ;;  "
        "%p10 = scmp.ne.s32.totalorder %s4, 0  ;;  %2 = sbr.rel (%p10)",
    )
    assert bundles.cycles(kept) == bundles.cycles(GRID)


def test_the_test_of_a_loop_may_stand_in_the_one_inside():
    """It waits for the end of that one."""
    moved = BUNDLES.replace(
        "{ %p2 = scmp.ge.s32.totalorder %s2, 6 /* loop exit test */  ;;  ", "{ "
    )
    assert moved != BUNDLES
    waiting = " ;; %p2 = scmp.ge.s32.totalorder (%p1), %s2, 6 /* loop exit test */ }"
    moved = moved.replace("16 /* loop exit test */ }", "16 /* loop exit test */" + waiting)
    assert bundles.cycles(moved) == bundles.cycles(BUNDLES)


def test_every_case_has_leaves_and_every_optimizer():
    assert {"2048x8192", "32000x2048", "8192x2048", "128256x2048"} < cases.LEAVES.keys()
    assert len(cases.LEAVES["llama-layer"]) == 9
    assert cases.IMPLEMENTATIONS[0] == cases.BASE and "flash_adamw" in cases.IMPLEMENTATIONS
    assert all(shape[0] == 16 for shape in cases.LEAVES["stack-of-16"].values())


def rows_of(chip, case, impl, cycles_of="XLA's estimate", **values):
    more = {"device": f"TPU {chip} (compiled for, never run)", "cycles_of": cycles_of}
    return [{**made("tpu", case, impl, name, x), **more} for name, x in values.items()]


def test_the_tables():
    """A line for each program, with both chips where they differ."""

    def rows(chip, case, impl, cycles):
        return rows_of(chip, case, impl, traffic_ratio=1.5, temp_bytes=2e6, cycles=cycles)

    found = rows("v5e", "step/a", cases.BASE, 1e6) + rows("v5e", "step/a", "flash_lion", 5e5)
    found += rows("v6e", "step/a", "flash_lion", 3e5)
    other = rows("v5e", "part/b", "bf16", 2e6) + rows("v5e", "part/b", "switchback-int8", 1e6)
    _, body, used = tables.steps(found + other)
    assert body[1] == [
        "a", "`flash_lion`", "1.50", "2.0 MB", "0.50 * / 0.30 *", "0.50 / -",
    ] and used == found  # fmt: skip
    _, body, used = tables.parts(found + other)
    assert body[1][-2:] == ["1.00 *", "0.50"] and used == other
    assert "run tpu" in tables.TABLES["tpu_steps"]([])


def test_targets_are_of_the_largest_and_of_all_cases():
    leaves = ["2048x8192", "32000x2048", "8192x2048", "128256x2048", "stack-of-16"]

    def rows(impl, traffic, **more):
        return [
            row
            for chip in ("v5e", "v6e")
            for i, case in enumerate(leaves)
            for row in rows_of(chip, f"step/{case}", impl, "bundles", traffic_ratio=traffic - i / 100,
                               temp_bytes=3e5 * (i + 1), unaliased_bytes=0, cycles=9e5, **more)
        ]  # fmt: skip

    found = rows("flash_adamw", 1.04) + rows("stable_adamw", 1.25, passes_ratio=1.0)
    _, body, _ = tables.targets(found)
    shown = {line[0]: line[1:] for line in body}
    assert shown["large leaves: HBM traffic, `flash_adamw`"] == [
        "≤ 1.05 x ideal", "1.04 x ideal", "yes",
    ]  # fmt: skip
    assert shown["large leaves: HBM traffic, `stable_adamw`"][1:] == [
        "1.25 x ideal (1.00 of two passes)", "**no**",
    ]  # fmt: skip
    assert shown["large leaves: temporaries, all six"] == ["≤ 1.0 MB", "1.5 MB", "**no**"]
    assert shown["v6e: cycles of `flash_adamw`, 2048x8192"][2] == "**no**"
    assert shown["v5e: cycles of `flash_adamw`, 2048x8192"][2] == "yes"
    fewer = [row for row in found if row["case"] != "step/8192x2048"]
    assert not any("HBM traffic" in line[0] for line in tables.targets(fewer)[1])
