"""Functions that generated Triton calls, and the way from a source to a `triton.jit` function."""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations: what has none is a value on the GPU.

import linecache
from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from triton.language.extra import libdevice  # noqa: F401  # of generated sources

# ---- memory --------------------------------------------------------------------------------------


@triton.jit
def _pointer(pointer):
    """A pointer to bf16 as one to its bits."""
    if pointer.dtype.element_ty == tl.bfloat16:
        pointer = pointer.to(tl.pointer_type(tl.uint16), bitcast=True)
    return pointer


@triton.jit
def load(pointer, offsets, mask, OTHER: tl.constexpr, MASKED: tl.constexpr, EARLY: tl.constexpr):
    """Elements of a tile, bf16 as its bits; OTHER where there are none.

    EARLY is before what follows: volatile, or the assembler moves it down to its use. Not for what
    all programs read, which would come from the same place of the L2 cache each time.
    """
    if MASKED:
        return tl.load(_pointer(pointer) + offsets, mask=mask, other=OTHER, volatile=EARLY)
    else:
        return tl.load(_pointer(pointer) + offsets, volatile=EARLY)


@triton.jit
def store(pointer, offsets, values, mask, MASKED: tl.constexpr):
    """Write elements of a tile, bf16 as its bits."""
    if MASKED:
        tl.store(_pointer(pointer) + offsets, values, mask=mask)
    else:
        tl.store(_pointer(pointer) + offsets, values)


@triton.jit
def pick(pointers, number, LOW: tl.constexpr, HIGH: tl.constexpr):
    """pointers[number], by bisection; LOW and HIGH are 0 and how many there are."""
    if HIGH - LOW == 1:
        return pointers[LOW]
    else:
        MIDDLE: tl.constexpr = (LOW + HIGH) // 2
        if number < MIDDLE:
            found = pick(pointers, number, LOW, MIDDLE)
        else:
            found = pick(pointers, number, MIDDLE, HIGH)
        return found


# ---- arithmetic ----------------------------------------------------------------------------------


@triton.jit
def minus(x):
    """-x of f32 values, where a NaN is CUDA's own: a change of its sign would leave another."""
    return tl.inline_asm_elementwise(
        "sub.rn.f32 $0, 0f80000000, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


# ---- FP8, as its bits ----------------------------------------------------------------------------


@triton.jit
def to_e4m3(x):
    """Bits of E4M3 of f32 values, to nearest even; larger numbers are 448."""
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def of_e4m3(x):
    """f32 of E4M3's bits."""
    return x.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def to_e4m3_by_bits(x):
    """`to_e4m3` where the GPU has no conversion: before compute capability 8.9."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20
    # under 2^-6 steps of 2^-9, which are those of f32 numbers in [2^14, 2^15)
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, tl.minimum(normal, 0x43E00000 >> 20) - (120 << 3))
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def of_e4m3_by_bits(x):
    """`of_e4m3` where the GPU has no conversion."""
    wide = x.to(tl.uint32)
    size = wide & 0x7F
    # an exponent over 7 bits' is over f32's by 2^120, subnormal numbers too
    number = (size << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    number = tl.where(size == 0x7F, float("nan"), number)
    return (number.to(tl.uint32, bitcast=True) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def to_e5m2(x):
    """Bits of E5M2 of f32 values, to nearest even; larger numbers are 57344."""
    return x.to(tl.float8e5).to(tl.uint8, bitcast=True)


@triton.jit
def of_e5m2(x):
    """f32 of E5M2's bits."""
    return x.to(tl.float8e5, bitcast=True).to(tl.float32)


# ---- sources -------------------------------------------------------------------------------------


def compiled_from(source: str, name: str, more: Mapping[str, Any] | None = None) -> Any:
    """Return the `triton.jit` function `name` of a source.

    Args:
      source: which may use what this module has.
      name: of the function.
      more: what else it uses, by name.
    """
    file = f"<{name} {hash(source):x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names = {**globals(), **(more or {}), "__name__": __name__}
    exec(compile(source, file, "exec"), names)
    return names[name]
