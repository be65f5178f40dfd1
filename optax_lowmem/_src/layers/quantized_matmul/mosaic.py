"""Matrix products of codes on Hopper's tensor cores: a Pallas kernel for Mosaic GPU.

XLA writes the int32 or f32 sums of a product before it scales them, four bytes per number; this
kernel scales them in registers. One warpgroup copies blocks of both operands to shared memory, by
TMA, while two multiply, each one half of the columns of a block. Each multiprocessor runs one
program, which loops over blocks of the result, so that copies for the next block overlap with the
scaling.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from optax_lowmem._src.arrays import varying
from optax_lowmem._src.arrays.typing import PyTree
from optax_lowmem._src.kernels import platform
from optax_lowmem._src.layers.quantized_matmul.plain import Quantized

TILE = 128  # rows and columns of a warpgroup's part of the result, and length of a partial sum
COLUMNS = 2 * TILE  # columns of a block of the result: two warpgroups, side by side
_MULTIPLYING, _COPYING = 2, 1  # warpgroups
_STAGES = 4  # operand blocks in flight; with the result's buffers they fill the shared memory
_TOGETHER = 8  # width in blocks of the snake order, whose operands stay in the L2 cache
_STORED_ROWS, _STORED_BYTES = 64, 128  # piece of the result that is written at a time
_COPYING_REGISTERS = 40  # per thread, which leaves 232 per multiplying thread


def _layout(
    bytes_wide: int, dtype: DTypeLike
) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Return the tiling and swizzle of rows in shared memory, for TMA and the tensor cores."""
    swizzle = plgpu.find_swizzle(bytes_wide * 8)
    lanes = swizzle // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, lanes)), plgpu.SwizzleTransform(swizzle)


def _pipeline(
    steps: int,
    dtypes: tuple[DTypeLike, DTypeLike],
    step: Callable[..., PyTree],
    around: Callable[..., None],
) -> Any:  # JAX's type of pipelines is private
    """Return a pipeline that copies both operands, block by block, and calls `step` on each."""
    specs = [
        plgpu.BlockSpec(
            (size, TILE), lambda i: (0, i), transforms=_layout(TILE, dtype), memory_space=plgpu.SMEM
        )
        for size, dtype in zip((TILE, COLUMNS), dtypes, strict=True)
    ]
    return plgpu.emit_pipeline_warp_specialized(
        step,
        grid=(steps,),
        in_specs=specs,
        memory_registers=_COPYING_REGISTERS,
        wg_axis="warpgroup",
        num_compute_wgs=_MULTIPLYING,
        max_concurrent_steps=_STAGES,
        compute_context=around,
    )


def _scales(ref: jax.Ref, first: jax.Array, summed: int) -> jax.Array:
    """Return the scales of a warpgroup's rows or columns in its sums' layout, or the only one."""
    if ref.shape == (1,):
        return ref[0]
    layout = plgpu.Layout.WGMMA.reduce(summed)
    load: Any = plgpu.load  # its arguments differ in older JAX
    # no vector load per thread, since several threads need the same row's scale
    return load(ref.at[pl.ds(first, TILE)], layout=layout, optimized=False)


def _scaled(values: jax.Array, scales: jax.Array, axis: int) -> jax.Array:
    """Return sums times the result of `_scales` for an axis."""
    return values * (lax.broadcast_in_dim(scales, values.shape, (axis,)) if scales.ndim else scales)


def _store(values: jax.Array, buffers: jax.Ref, out: jax.Ref) -> None:
    """Write a warpgroup's part in pieces; copies to and from shared memory overlap."""
    slots, rows, columns = buffers.shape
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for piece in range(values.size // (rows * columns)):
        row, column = divmod(piece, TILE // columns)
        part = (
            slice(row * rows, (row + 1) * rows),
            slice(column * columns, (column + 1) * columns),
        )
        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
        buffer = buffers.at[piece % slots]
        buffer[...] = values[part]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, out.at[part])


def _multiply_step(
    group_columns: slice | pl.Slice, _: object, a: jax.Ref, b: jax.Ref, sums: Any
) -> Any:
    """Add the product of two blocks to the sums of this warpgroup's columns."""
    plgpu.wgmma(sums, a, b.at[group_columns].transpose((1, 0)))
    plgpu.wgmma_wait(0)
    return sums


def _body(a: jax.Ref, b: jax.Ref, of_a: jax.Ref, of_b: jax.Ref, out: jax.Ref) -> None:
    (rows, length), columns = a.shape, b.shape[0]
    integer = jnp.issubdtype(a.dtype, jnp.integer)
    kind = jnp.int32 if integer else jnp.float32
    blocks = pl.cdiv(rows, TILE), pl.cdiv(columns, COLUMNS)
    pipeline = functools.partial(_pipeline, pl.cdiv(length, TILE), (a.dtype, b.dtype))
    stored = _STORED_ROWS, _STORED_BYTES // out.dtype.itemsize
    buffers = plgpu.SMEM(
        (_MULTIPLYING, 2, *stored), out.dtype, transforms=_layout(_STORED_BYTES, out.dtype)
    )

    def program(shared: PyTree, buffers: jax.Ref) -> None:
        group = lax.axis_index("warpgroup")
        group_columns = pl.ds(group * TILE, TILE)

        @plgpu.nd_loop((math.prod(blocks),), collective_axes="program")
        def _(loop: plgpu.NDLoopInfo) -> None:
            block = plgpu.planar_snake(loop.index[0], blocks, 0, _TOGETHER)
            row, column = block[0] * TILE, block[1] * COLUMNS
            part = pl.ds(row, TILE), pl.ds(column, COLUMNS)

            def around(run: Callable[[jax.Ref], object]) -> None:
                # loaded before the sums, which wait for their first block in any case
                of_rows = _scales(of_a, row, 1)
                of_columns = _scales(of_b, column + group * TILE, 0)

                @functools.partial(pl.run_scoped, sums=plgpu.ACC((TILE, TILE), kind))
                def _(sums: jax.Ref) -> None:
                    run(sums)
                    result = sums[...].astype(jnp.float32)
                    # in the order of `multiply_plain`
                    result = _scaled(_scaled(result, of_columns, 1), of_rows, 0)
                    place = out.at[part].at[:, group_columns]
                    _store(result.astype(out.dtype), buffers.at[group], place)

            step = functools.partial(_multiply_step, group_columns)
            pipeline(step, around)(a.at[part[0]], b.at[part[1]], allocations=shared)

    def nothing(*_: object) -> None: ...

    shared = pipeline(nothing, nothing).get_allocations(a, b)
    pl.run_scoped(program, shared, buffers, collective_axes="warpgroup")
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _padded_scales(x: Quantized, block: int) -> jax.Array:
    """Return a scale per row, padded to whole blocks, which the kernel loads; or the only one."""
    if x.scales.size == 1:
        return x.scales.reshape(1)
    count = x.codes.shape[0]
    scales = jnp.broadcast_to(x.scales[:, 0], count)
    return jnp.pad(scales, (0, -count % block))


@functools.partial(jax.jit, static_argnames=("dtype", "interpret"))
def multiply(a: Quantized, b: Quantized, dtype: jnp.dtype, interpret: object = None) -> jax.Array:
    """Compute `quantized_matmul.multiply_plain(a, b, 1, dtype)` of matrices [m, k] and [n, k].

    Both operands are int8, or each has a float8 format. Blocks at the edges may be partial (TMA
    reads zeros outside an array, and drops writes there), but m, n and k must be multiples of 8, 64
    and 128.
    """
    kernel = plgpu.kernel(
        _body,
        out_type=jax.ShapeDtypeStruct((a.codes.shape[0], b.codes.shape[0]), dtype),
        grid=(platform.multiprocessors(),),
        grid_names=("program",),
        num_threads=_MULTIPLYING + _COPYING,
        thread_name="warpgroup",
        kernel_name="quantized_product",
        interpret=interpret,
    )
    result = kernel(a.codes, b.codes, _padded_scales(a, TILE), _padded_scales(b, COLUMNS))
    # `plgpu.kernel` drops the varying axes (no upstream issue known; jax 0.10.2 and 0.12.0)
    return varying.over(result, varying.axes_of(a, b))
