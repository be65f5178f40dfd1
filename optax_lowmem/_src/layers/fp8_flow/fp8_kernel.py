"""GPU kernels that store activations in FP8.

They compute a group's maximum and its codes from one read of the array, where XLA reads it twice. A
program's tile has one group per row.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.arrays import groups, numerics
from optax_lowmem._src.arrays.groups import Tile, Tiling, next_power_of_two
from optax_lowmem._src.arrays.varying import result_like
from optax_lowmem._src.kernels import gpu_kernel
from optax_lowmem._src.kernels.gpu_kernel import Operand, Program
from optax_lowmem._src.layers.fp8_flow import kernels
from optax_lowmem._src.layers.fp8_flow.kernels import Grouped
from optax_lowmem._src.layers.quantized_matmul import Format, Quantized, codes_of
from optax_lowmem._src.layers.quantized_matmul.quantize_kernel import store_scale

_ELEMENTS = 4096  # per program of a norm, unless its row is longer
_PER_WARP = 1024


# ---- norms ---------------------------------------------------------------------------------------


def _norm_body(
    eps: float, exact: bool, size: int, rows: int, program: Program, *arrays: Operand
) -> None:
    """Normalise some rows, as a tile [rows * groups, size]; missing groups are zeros."""
    x_at, scale_at, *stored_at, inverse_at, largest_at = arrays
    count, width = x_at.shape
    per_row = groups.group_count(width, size)
    wide = next_power_of_two(per_row)
    shape = (rows * wide, size)
    group = lax.iota(jnp.int32, shape[0])
    line = program.index() * rows + lax.div(group, jnp.int32(wide))
    at = lax.rem(group, jnp.int32(wide))
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    column = jnp.broadcast_to(at[:, None] * jnp.int32(size), shape) + lane
    there = (column < width) & (line < count)[:, None]
    place = (jnp.broadcast_to(line[:, None], shape), column)
    given = numerics.widen(x_at.load(*place, mask=there))
    if stored_at:
        codes_at, scales_at = stored_at
        stored = kernels.store_groups(given)
        codes_at.store(*place, values=stored.codes, mask=there)
        exists = (at < per_row) & (line < count)
        scales_at.store(line, at, values=stored.scales, mask=exists)
        given = given if exact else kernels.restore_groups(stored)
    scale = scale_at.load(column, mask=there)
    squares = jnp.sum(given * given, axis=1).reshape(rows, wide)
    inverse = kernels.inverse_of(jnp.sum(squares, axis=1), width, eps)
    # `max` may drop a NaN, but the row's sum of squares, and so `inverse`, keeps it
    largest = jnp.max(jnp.max(jnp.abs(given * scale), axis=1).reshape(rows, wide), axis=1)
    lines = program.index() * rows + lax.iota(jnp.int32, rows)
    inverse_at.store(lines, values=inverse, mask=lines < count)
    largest_at.store(lines, values=largest * inverse, mask=lines < count)


@functools.partial(jax.jit, static_argnames=("eps", "group_size", "exact", "backend", "keep"))
def store_normed(
    x: jax.Array,
    scale: jax.Array,
    eps: float,
    group_size: int,
    exact: bool,
    backend: str = "pallas",
    keep: bool = True,
) -> tuple[Grouped | None, jax.Array, jax.Array]:
    """Compute `kernels.store_normed_plain` of [rows, n], reading x once.

    The maxima are those of each row, [rows]. Without `keep`, which an `exact` norm allows, nothing
    is stored.
    """
    count, width = x.shape
    per_row = groups.group_count(width, group_size)
    wide = next_power_of_two(per_row) * group_size
    rows = max(1, _ELEMENTS // wide)
    of_x = (
        result_like(x, x.shape, jnp.float8_e4m3fn),
        result_like(x, (count, per_row), kernels.SCALE.dtype),
    )
    of_row = result_like(x, (count,), jnp.float32)
    *stored, inverse, largest = gpu_kernel.launch(
        functools.partial(_norm_body, eps, exact, group_size, rows),
        [x, scale.astype(jnp.float32)],
        [*(of_x if keep else ()), of_row, of_row],
        (-(-count // rows),),
        warps=min(16, max(4, wide * rows // _PER_WARP)),
        name="fp8_store_normed",
        backend=backend,
    )
    return Grouped(*stored) if keep else None, inverse[:, None], largest


# ---- activation functions ------------------------------------------------------------------------


def _gate_body(
    activation: str, exact: bool, tiling: Tiling, count: int, program: Program, *arrays: Operand
) -> None:
    """Store each input of a tile as codes and scales, and the output's largest magnitude.

    `arrays` are the `count` inputs, codes and scales of each (none if they are not kept), and the
    maxima. Unless `exact`, the output is that of the decoded inputs.
    """
    tile = program.index()
    place = gpu_kernel.Place.of(tiling, tile)
    values, stored_at = [], arrays[count:-1]
    for i in range(count):
        x = numerics.widen(place.load(arrays[i]))
        if stored_at:
            codes_at, scales_at = stored_at[2 * i : 2 * i + 2]
            stored = kernels.store_groups(x)
            place.store(codes_at, stored.codes)
            place.store_scales(scales_at, stored.scales)
            x = x if exact else kernels.restore_groups(stored)
        values.append(x)
    # f(0) = 0, so padding does not raise the maximum
    bits = numerics.absmax_bits(kernels.gated(activation, *values)).astype(jnp.int32)
    arrays[-1].store(tile, values=lax.bitcast_convert_type(jnp.max(bits), jnp.float32))


@functools.partial(
    jax.jit, static_argnames=("activation", "group_size", "exact", "tile", "backend", "keep")
)
def store_gated(
    given: tuple[jax.Array, ...],
    activation: str,
    group_size: int,
    exact: bool,
    tile: Tile = Tile(elements=2048),  # noqa: B008 (frozen)
    backend: str = "pallas",
    keep: bool = True,
) -> tuple[tuple[Grouped, ...], jax.Array]:
    """Compute `kernels.store_gated_plain`, reading each input once.

    `given` is the gate, or the gate and the other factor. Returns each of them as codes and scales,
    and the output's largest magnitude in each tile, [tiles]. Unless `exact`, the output is that of
    the quantized inputs. Without `keep`, which an `exact` function allows, nothing is stored.
    """
    first = given[0]
    tiling = Tiling(first.shape, group_size, tile.elements)
    views = [tiling.element_view(x) for x in given]
    of_one = (
        result_like(first, views[0].shape, jnp.float8_e4m3fn),
        result_like(first, (tiling.groups,), kernels.SCALE.dtype),
    )
    *arrays, largest = gpu_kernel.launch(
        functools.partial(_gate_body, activation, exact, tiling, len(given)),
        views,
        [*(of_one * len(given) if keep else ()), result_like(first, (tiling.tiles,), jnp.float32)],
        (tiling.tiles,),
        warps=tile.warps,
        name="fp8_store_gated",
        backend=backend,
    )
    scales = groups.scale_shape(first.shape, group_size)
    stored = tuple(
        Grouped(arrays[i].reshape(first.shape), arrays[i + 1].reshape(scales))
        for i in range(0, len(arrays), 2)
    )
    return stored, largest


# ---- transposed codes, for dW = X^T G ------------------------------------------------------------

# 8-bit products of GPUs contract the last axis of both operands. XLA's transposes would change the
# layout, and so the speed, of the computations before them.

# tile of a program: at least 128 bytes per row, in what it reads and in the transpose it writes
ROWS, COLUMNS = 128, {1: 128, 2: 64, 4: 64}


def _load(x: Operand, row: jax.Array, column: jax.Array, like: Operand) -> jax.Array:
    """Load a tile of a matrix of the shape of `like`, or of a row or column that broadcasts."""
    if x.shape != like.shape:
        one = lax.iota(jnp.int32, 1)
        row, column = (
            index if size > 1 else one for index, size in zip((row, column), x.shape, strict=True)
        )
    place, there = gpu_kernel.part(x, row, column)
    return x.load(*place, mask=there)


def _transpose_body(
    function: Callable[..., jax.Array] | None,
    to: Format | None,
    inputs: int,
    columns: int,
    program: Program,
    *arrays: Operand,
) -> None:
    """Transpose a tile of codes, or compute `function`, quantize it, and store both orders."""
    given, rest = arrays[:inputs], list(arrays[inputs:])
    row = program.index(0) * ROWS + lax.iota(jnp.int32, ROWS)
    column = program.index(1) * columns + lax.iota(jnp.int32, columns)
    values = [_load(x, row, column, given[0]) for x in given]
    codes = values[0] if function is None else function(*map(numerics.widen, values))
    if to is not None:
        absmax_at, codes_at, scale_at, *rest = rest
        absmax = absmax_at.load(0)
        codes = codes_of(codes, absmax, to)
        place, there = gpu_kernel.part(codes_at, row, column)
        codes_at.store(*place, values=codes, mask=there)
        store_scale(program, scale_at, absmax, to)
    place, there = gpu_kernel.part(rest[0], column, row)
    rest[0].store(*place, values=codes.T, mask=there)


def _transpose_call(
    function: Callable[..., jax.Array] | None,
    to: Format | None,
    given: Sequence[jax.Array],
    more: Sequence[jax.Array],
    out: Sequence[jax.ShapeDtypeStruct],
    backend: str,
) -> list[jax.Array]:
    x = given[0]
    columns = COLUMNS[x.dtype.itemsize]
    return gpu_kernel.launch(
        functools.partial(_transpose_body, function, to, len(given), columns),
        [*given, *more],
        out,
        (-(-x.shape[0] // ROWS), -(-x.shape[1] // columns)),
        warps=4 if function is None else 8,  # with 4, norms leave other programs too few registers
        name="fp8_transpose" if to is None else "fp8_quantize_both",
        backend=backend,
    )


@functools.partial(jax.jit, static_argnames=("backend"))
def transpose(codes: jax.Array, backend: str = "pallas") -> jax.Array:
    """Return codes [..., k] as [k, ...]."""
    *rest, last = codes.shape
    rows = codes.reshape(-1, last)
    out = [result_like(codes, rows.shape[::-1], codes.dtype)]
    (transposed,) = _transpose_call(None, None, [rows], [], out, backend)
    return transposed.reshape(last, *rest)


@functools.partial(jax.jit, static_argnames=("to", "function", "backend"))
def quantize_both(
    x: jax.Array,
    absmax: jax.Array,
    to: Format,
    backend: str = "pallas",
    function: Callable[..., jax.Array] | None = None,
    beside: tuple[jax.Array, ...] = (),
) -> tuple[Quantized, jax.Array]:
    """Compute `kernels.quantized` of x [..., n], and its codes as [n, ...], reading x once.

    `function` computes the values to quantize from f32 x and `beside`, arrays of x's shape, or of
    size 1 on the last axis or on all others; None: they are x. `absmax` is their largest magnitude.
    """
    given = [array.reshape(-1, array.shape[-1]) for array in (x, *beside)]
    rows = given[0].shape
    shapes = (rows, to.dtype), ((1,), jnp.float32), (rows[::-1], to.dtype)
    out = [result_like(x, *shape) for shape in shapes]
    codes, scale, transposed = _transpose_call(
        function, to, given, [absmax.reshape(1)], out, backend
    )
    result = Quantized(codes.reshape(x.shape), scale.reshape((1,) * x.ndim))
    return result, transposed.reshape(x.shape[-1], *x.shape[:-1])
