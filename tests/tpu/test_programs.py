"""Optimized programs, read from their text."""
# ruff: noqa: E501 - lines of programs are as long as XLA writes them

import pytest

from benchmarks.suites.tpu.program import Array, Program, array

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

ENTRY %main (p: f32[512,512], q: bf16[512,512]) -> f32[512,512] {
  %p = f32[512,512]{1,0:T(8,128)} parameter(0)
  %q = bf16[512,512]{1,0:T(8,128)(2,1)} parameter(1)
  %start = s32[] constant(0)
  %fetch = (bf16[512,512]{1,0:T(8,128)(2,1)S(1)}, bf16[512,512]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%q)
  %fetched = bf16[512,512]{1,0:T(8,128)(2,1)S(1)} copy-done(%fetch)
  %first = (s32[], f32[512,512]{1,0:T(8,128)}) tuple(%start, %p)
  %loop = (s32[], f32[512,512]{1,0:T(8,128)}) while(%first), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"8"}}
  %r = f32[512,512]{1,0:T(8,128)} get-tuple-element(%loop), index=1
  %k = f32[512,512]{1,0:T(8,128)} custom-call(%r, %fetched), custom_call_target="tpu_custom_call"
  ROOT %s = f32[512,512]{1,0:T(8,128)} all-reduce(%k), replica_groups={}
}
"""


def test_bytes_of_a_program():
    """Slices count what they take, in a loop each time; chip memory nothing; a kernel each once."""
    program = Program(PROGRAM)
    counter = 8 * 2 * 4
    assert program.traffic() == MB // 2 + 2 * MB + counter + 2 * MB + 2 * MB
    assert program.cycles() == 8 * 150
    assert program.kernels() == 1


def test_bytes_of_tiles():
    assert array("f32", "5,100", "1,0:T(8,128)") == Array(8 * 128 * 4, 8 * 128 * 4)
    assert array("bf16", "100,5", "0,1:T(8,128)(2,1)S(1)") == Array(8 * 128 * 2, 0)
    assert array("s4", "64,64", "1,0") == Array(64 * 32, 64 * 32)
