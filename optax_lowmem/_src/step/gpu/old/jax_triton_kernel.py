"""Triton functions that the generated kernel calls to find leaves and elements; its signature."""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations: parameters without one are values on the GPU.

from collections.abc import Sequence

import triton
import triton.language as tl

from optax_lowmem._src.kernels.triton_library import _pointer

# ---- leaves --------------------------------------------------------------------------------------


@triton.constexpr_function
def _first_tile(leaves, index):
    return leaves[index][0]


@triton.constexpr_function
def _length(leaves, index):
    return leaves[index][1]


@triton.constexpr_function
def _groups(leaves, index):
    return leaves[index][2]


@triton.constexpr_function
def _rank(leaves, index):
    return len(leaves[index][3])


@triton.constexpr_function
def _below(leaves, index, axis):
    return leaves[index][3][axis][0]


@triton.constexpr_function
def _factor(leaves, index, axis):
    return leaves[index][3][axis][1]


@triton.constexpr_function
def _block_axes(leaves, index, part):
    return len(leaves[index][4 + part])


@triton.constexpr_function
def _block_axis(leaves, index, part, axis, field):
    return leaves[index][4 + part][axis][field]


@triton.jit
def _block_of(group, leaves: tl.constexpr, INDEX: tl.constexpr, PART: tl.constexpr,
              LANES: tl.constexpr, GROUP_SIZE: tl.constexpr, BY_LANE: tl.constexpr):  # fmt: skip
    """Block number of each group, [rows, 1], or with BY_LANE of each element, [rows, lanes]."""
    number = group[:, None] * 0
    if BY_LANE[PART]:
        number += tl.arange(0, LANES)[None, :] * 0
    for axis in tl.static_range(_block_axes(leaves, INDEX, PART)):
        position = (group // _block_axis(leaves, INDEX, PART, axis, 0))[:, None]
        position = position % _block_axis(leaves, INDEX, PART, axis, 1)
        if _block_axis(leaves, INDEX, PART, axis, 4):
            position = position * GROUP_SIZE + tl.arange(0, LANES)[None, :]
        # skip divisions by 1, after which Triton does not know that neighbours are contiguous
        if _block_axis(leaves, INDEX, PART, axis, 2) > 1:
            position = position // _block_axis(leaves, INDEX, PART, axis, 2)
        number += position * _block_axis(leaves, INDEX, PART, axis, 3)
    return number


@triton.jit
def find_leaf(
    arrays,
    program,
    LEAVES: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BY_LANE: tl.constexpr,
):
    """Find the leaf of a program by bisection, and its properties.

    Returns:
      The pointers of the leaf; its index; the first group of the tile; the number of groups of the
      leaf; per group of the tile the input of its random bits, its offset in the array and its
      number of elements (both in units of ALIGNMENT), and its row; the length of rows; and for the
      two parts that a block may have, the block number of each group, or with BY_LANE of each
      element.
    """
    if HIGH - LOW == 1:
        first = (program - _first_tile(LEAVES, LOW)) * ROWS
        leaf = tl.full((), LOW, tl.int32)
        count = tl.full((), _groups(LEAVES, LOW), tl.int32)
        N: tl.constexpr = _length(LEAVES, LOW)
        PER_ROW: tl.constexpr = (N + GROUP_SIZE - 1) // GROUP_SIZE
        group = first + tl.arange(0, ROWS)
        column = group % PER_ROW * GROUP_SIZE
        row = group // PER_ROW
        begin = (row * N + column) // ALIGNMENT
        size = tl.minimum(N - column, GROUP_SIZE) // ALIGNMENT
        place = tl.full((ROWS,), 0, tl.uint32)
        for axis in tl.static_range(_rank(LEAVES, LOW)):
            quotient = group.to(tl.uint32) // _below(LEAVES, LOW, axis)
            place += quotient * _factor(LEAVES, LOW, axis)
        block = _block_of(group, LEAVES, LOW, 0, LANES, GROUP_SIZE, BY_LANE)
        other = _block_of(group, LEAVES, LOW, 1, LANES, GROUP_SIZE, BY_LANE)
        length = tl.full((), N, tl.int32)
        return arrays[LOW], leaf, first, count, place, begin, size, row, length, block, other
    else:
        MIDDLE: tl.constexpr = (LOW + HIGH) // 2
        if program < _first_tile(LEAVES, MIDDLE):
            result = find_leaf(
                arrays, program, LEAVES, LOW, MIDDLE, GROUP_SIZE, ROWS, LANES, ALIGNMENT, BY_LANE
            )
        else:
            result = find_leaf(
                arrays, program, LEAVES, MIDDLE, HIGH, GROUP_SIZE, ROWS, LANES, ALIGNMENT, BY_LANE
            )
        return result


@triton.jit
def elements(
    group,
    exists,
    begin,
    size,
    lanes,
    LANES: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Return offsets and mask of the elements of groups."""
    if FLAT:
        offsets = group[:, None] * LANES + lanes[None, :]
        mask = exists[:, None]
    else:
        offsets = (begin * ALIGNMENT)[:, None] + lanes[None, :]
        mask = (lanes[None, :] < (size * ALIGNMENT)[:, None]) & exists[:, None]
    # 8 neighbours per thread for all dtypes, so that threads hold the same elements of all arrays
    return tl.max_contiguous(offsets, (1, 8 if LANES > 8 else LANES)), mask


@triton.jit
def bytes_of_codes(
    group,
    exists,
    begin,
    size,
    row,
    length,
    LANES: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    CODES: tl.constexpr,
):
    """Do `elements` for an array with CODES neighbours per byte and LANES bytes per group."""
    lanes = tl.arange(0, LANES)
    WIDE: tl.constexpr = 8 // CODES
    if FLAT:
        offsets = group[:, None] * LANES + lanes[None, :]
        mask = exists[:, None]
    else:
        if ALIGNMENT % CODES == 0:
            first = begin * (ALIGNMENT // CODES)
            count = size * (ALIGNMENT // CODES)
        else:  # every row ends in part of a byte
            beyond = row * ((CODES - length % CODES) % CODES)
            first = (begin * ALIGNMENT + beyond) // CODES
            count = (size * ALIGNMENT + (CODES - 1)) // CODES
        offsets = first[:, None] + lanes[None, :]
        mask = (lanes[None, :] < count[:, None]) & exists[:, None]
    return tl.max_contiguous(offsets, (1, WIDE if LANES > WIDE else LANES)), mask


@triton.jit
def load(pointer, offsets, mask, OTHER: tl.constexpr, MASKED: tl.constexpr, EARLY: tl.constexpr):
    if MASKED:
        return tl.load(_pointer(pointer) + offsets, mask=mask, other=OTHER, volatile=EARLY)
    else:
        return tl.load(_pointer(pointer) + offsets, volatile=EARLY)


@triton.jit
def store(pointer, offsets, values, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(_pointer(pointer) + offsets, values, mask=mask)
    else:
        tl.store(_pointer(pointer) + offsets, values)


# ---- the kernel ----------------------------------------------------------------------------------


def entry(parameters: Sequence[str], statics: Sequence[str], body: Sequence[str]) -> str:
    """Return the source of the kernel, with one parameter per array, as jax_triton needs it."""
    signature = [*parameters, *(f"{name}: tl.constexpr" for name in statics)]
    lines = ["@triton.jit", f"def fused_update({', '.join(signature)}):"]
    return "\n".join([*lines, *(f"    {line}" for line in body)]) + "\n"
