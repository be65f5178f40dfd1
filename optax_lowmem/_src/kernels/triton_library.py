"""Functions called by generated Triton source, and compilation of such source."""

# mypy: disable-error-code="no-untyped-def"
# Triton reads annotations: an argument without one is a value on the GPU.

import linecache
from typing import Any

import triton
import triton.language as tl
from triton.language.extra import libdevice  # noqa: F401  # for generated sources


@triton.jit
def _pointer(pointer):
    """Convert a pointer to bf16 to one to its bits."""
    if pointer.dtype.element_ty == tl.bfloat16:
        pointer = pointer.to(tl.pointer_type(tl.uint16), bitcast=True)
    return pointer


@triton.jit
def load(pointer, offsets, mask, OTHER: tl.constexpr, EARLY: tl.constexpr):
    """Load elements of a tile, bf16 as its bits; OTHER where there are none.

    EARLY loads are volatile, so that the assembler does not move them down to their use. Not for
    data that all programs read: each load would go to the same place of the L2 cache.
    """
    if mask is None:
        return tl.load(_pointer(pointer) + offsets, volatile=EARLY)
    else:
        return tl.load(_pointer(pointer) + offsets, mask=mask, other=OTHER, volatile=EARLY)


@triton.jit
def store(pointer, offsets, values, mask):
    """Store elements of a tile, bf16 as its bits."""
    tl.store(_pointer(pointer) + offsets, values, mask=mask)


# ---- arithmetic ----------------------------------------------------------------------------------


@triton.jit
def minus(x):
    """Return -x of f32 values; NaN becomes CUDA's NaN, which flipping its sign would not give."""
    return tl.inline_asm_elementwise(
        "sub.rn.f32 $0, 0f80000000, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


# ---- FP8, as its bits ----------------------------------------------------------------------------


@triton.jit
def to_e4m3(x):
    """Round f32 values to the bits of E4M3, to nearest even; larger numbers become 448."""
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def of_e4m3(x):
    """Convert the bits of E4M3 to f32."""
    return x.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def to_e4m3_by_bits(x):
    """`to_e4m3` for GPUs without this conversion: before compute capability 8.9."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20
    # below 2^-6 the spacing is 2^-9, that of f32 numbers in [2^14, 2^15)
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, tl.minimum(normal, 0x43E00000 >> 20) - (120 << 3))
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def of_e4m3_by_bits(x):
    """`of_e4m3` for GPUs without this conversion."""
    wide = x.to(tl.uint32)
    size = wide & 0x7F
    # 2^120 corrects the exponent's bias, 7 in E4M3 and 127 in f32; also for subnormal numbers
    number = (size << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    number = tl.where(size == 0x7F, float("nan"), number)
    return (number.to(tl.uint32, bitcast=True) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def to_e5m2(x):
    """Round f32 values to the bits of E5M2, to nearest even; larger numbers become 57344."""
    return x.to(tl.float8e5).to(tl.uint8, bitcast=True)


@triton.jit
def of_e5m2(x):
    """Convert the bits of E5M2 to f32."""
    return x.to(tl.float8e5, bitcast=True).to(tl.float32)


def compiled_from(source: str, name: str) -> Any:
    """Return the `triton.jit` function `name` of a source, which may use this module's names."""
    file = f"<{name} {hash(source):x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names = {**globals()}
    exec(compile(source, file, "exec"), names)
    return names[name]
