"""GPU kernels for noise, sampled weights and the block sums of bitwidths' gradients.

Each program handles a strip of 32 rows, one row of blocks. It computes R from 4 rows of words, each
word with eight elements of one column, and reads each weight once, both for its block's maximum and
for the sum.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.arrays import numerics, random
from optax_lowmem._src.arrays.codecs import split_of
from optax_lowmem._src.arrays.typing import PyTree
from optax_lowmem._src.arrays.varying import result_like
from optax_lowmem._src.kernels import gpu_kernel
from optax_lowmem._src.kernels.gpu_kernel import Operand, Program
from optax_lowmem._src.layers.noise.distributions import EIGHT, Noise
from optax_lowmem._src.layers.noise.formats import Format, Scaled
from optax_lowmem._src.layers.noise.kernels import SIDE, block_shape


@dataclasses.dataclass(frozen=True)
class Strip:
    """Strip of one program: 32 rows and some columns, a power of two and a multiple of 32."""

    columns: int = 128
    warps: int = 4


_WORDS = SIDE // EIGHT  # rows of words in a strip
Shape = tuple[int, ...]


class _Place:
    """Position of a program's strip in an array [layers, m, n], with layers of shape `lead`."""

    def __init__(self, strip: Strip, shape: Shape, program: Program) -> None:
        self.columns, self.blocks = strip.columns, strip.columns // SIDE
        *self.lead, self.m, self.n = shape
        strips = jnp.int32(-(-self.m // SIDE))
        number, self.across = program.index(0), program.index(1)
        self.layer, self.strip = lax.div(number, strips), lax.rem(number, strips)
        lanes = lax.iota(jnp.int32, self.columns)
        self.column = self.across * self.columns + lanes
        self.word = self.strip * _WORDS + lax.iota(jnp.int32, _WORDS)

    def prepared(self, noise: Noise, keys: Operand) -> PyTree:
        """Return the strip's prepared noise, from words [4, columns]."""
        coordinates, rest = [], self.layer
        for size in reversed(self.lead):
            coordinates.append(lax.rem(rest, jnp.int32(size)).astype(jnp.uint32))
            rest = lax.div(rest, jnp.int32(size))
        places = [self.word[:, None].astype(jnp.uint32), self.column[None, :].astype(jnp.uint32)]
        # in the kernel, since outside it would be one more launch per array
        word_keys = random.word_keys_of(keys.load(0), keys.load(keys.shape[0] - 1))
        indices = [*reversed(coordinates), *places]
        return noise.prepared(random.draw_words(word_keys, indices, noise.draws))

    def _part(self, x: Operand, rows: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
        """Return the indices of rows of the strip, and a mask of those in bounds; None: all."""
        shape = (rows.size, self.columns)
        row = lax.broadcast_in_dim(rows, shape, (0,))
        column = lax.broadcast_in_dim(self.column, shape, (1,))
        part = (lax.broadcast_in_dim(self.layer, shape, ()), row, column)
        if self.m % SIDE == 0 and self.n % self.columns == 0:
            return part, None
        return part, (row < x.shape[1]) & (column < self.n)

    def load(self, x: Operand, index: int) -> jax.Array:
        """Load one of the eight elements of each word; 0 out of bounds."""
        part, there = self._part(x, self.word * EIGHT + index)
        return x.load(*part, mask=there)

    def store(self, x: Operand, index: int, values: jax.Array) -> None:
        """Store one of the eight elements of each word."""
        part, there = self._part(x, self.word * EIGHT + index)
        x.store(*part, values=values, mask=there)

    def of_blocks(self, x: Operand) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Return the indices of the strip's blocks in [layers, blocks, blocks], and a mask."""
        block = self.across * self.blocks + lax.iota(jnp.int32, self.blocks)
        at = [lax.broadcast_in_dim(i, block.shape, ()) for i in (self.layer, self.strip)]
        return (*at, block), block < x.shape[2]

    def over_blocks(self, x: jax.Array, over: Callable[..., jax.Array]) -> jax.Array:
        """Reduce [4, columns] over each block to [blocks], by a sum or maximum."""
        return over(over(x, axis=0).reshape(self.blocks, SIDE), axis=1)

    def spread(self, of_blocks: jax.Array) -> jax.Array:
        """Broadcast [blocks] to [1, columns]."""
        wide = lax.broadcast_in_dim(of_blocks, (self.blocks, SIDE), (0,))
        return wide.reshape(1, self.columns)

    def absmax(self, parts: list[jax.Array]) -> jax.Array:
        """Return max |x| of each block."""
        bits = [lax.bitcast_convert_type(x, jnp.int32) & numerics.MAGNITUDE_MASK for x in parts]
        top = self.over_blocks(functools.reduce(jnp.maximum, bits), jnp.max)
        return lax.bitcast_convert_type(top, jnp.float32)


def _sample_body(
    noise: Noise, to: Format, strip: Strip, shape: Shape, program: Program, *arrays: Operand
) -> None:
    keys, factors, *parts, out, scales = arrays
    here = _Place(strip, shape, program)
    masters = []
    for k in range(EIGHT):
        w, *correction = (here.load(x, k) for x in parts)
        if correction:
            masters.append(split_of(correction[0].dtype).join(w, *correction))
        else:
            masters.append(w.astype(jnp.float32))
    where, there = here.of_blocks(factors)
    scale = here.absmax(masters) * factors.load(*where, mask=there)
    scales.store(*where, values=scale, mask=there)
    prepared, each = here.prepared(noise, keys), here.spread(scale)
    sampled = [w + noise.element(prepared, k) * each for k, w in enumerate(masters)]
    if isinstance(to, Scaled):
        top = here.spread(here.absmax(sampled))
        sampled = [to.cast(x, jnp.broadcast_to(top, x.shape)) for x in sampled]
    for k, x in enumerate(sampled):
        here.store(out, k, x.astype(out.dtype))


def _sums_body(
    noise: Noise,
    strip: Strip,
    shape: Shape,
    program: Program,
    keys: Operand,
    g: Operand,
    sums: Operand,
) -> None:
    here = _Place(strip, shape, program)
    loaded = [here.load(g, k) for k in range(EIGHT)]  # before the noise, to hide their latency
    prepared = here.prepared(noise, keys)
    total = jnp.zeros((_WORDS, strip.columns), jnp.float32)
    for k, x in enumerate(loaded):
        total += x.astype(jnp.float32) * noise.element(prepared, k)
    where, there = here.of_blocks(sums)
    sums.store(*where, values=here.over_blocks(total, jnp.sum), mask=there)


def _noise_body(
    noise: Noise, strip: Strip, shape: Shape, program: Program, keys: Operand, out: Operand
) -> None:
    here = _Place(strip, shape, program)
    prepared = here.prepared(noise, keys)
    for k in range(EIGHT):
        here.store(out, k, noise.element(prepared, k).astype(out.dtype))


def _launch(
    body: Callable[..., None],
    name: str,
    shape: Shape,
    out: Sequence[jax.ShapeDtypeStruct],
    strip: Strip,
    backend: str,
    *operands: jax.Array,
) -> list[jax.Array]:
    """Call `body(strip, shape, program, *operands, *results)` for each strip of [..., m, n].

    `out` has the results' shapes and dtypes. The first operand is the key, one or two uint32
    (`random.word_keys_of`); the others are [layers, ...], with a value per element or per block.
    """
    rows_of_strips = math.prod(shape[:-2]) * -(-shape[-2] // SIDE)
    return gpu_kernel.launch(
        functools.partial(body, strip, shape),
        operands,
        out,
        (rows_of_strips, -(-shape[-1] // strip.columns)),
        warps=strip.warps,
        name=name,
        backend=backend,
    )


def _layers(x: jax.Array) -> jax.Array:
    """Reshape [..., m, n] to [layers, m, n]."""
    return x.reshape(-1, *x.shape[-2:])


@functools.partial(jax.jit, static_argnames=("noise", "to", "dtype", "strip", "backend"))
def sample(
    w: jax.Array,
    correction: jax.Array | None,
    factor: jax.Array,
    key: jax.Array,
    noise: Noise,
    to: Format,
    dtype: jnp.dtype,
    strip: Strip = Strip(),  # noqa: B008 (frozen)
    backend: str = "pallas",
) -> tuple[jax.Array, jax.Array]:
    """Compute `kernels.sample_plain`, reading each weight once."""
    parts = [_layers(x) for x in (w, correction) if x is not None]
    of_blocks = _layers(factor)
    out = (
        result_like(w, parts[0].shape, dtype),
        result_like(w, of_blocks.shape, jnp.dtype(jnp.float32)),
    )
    body = functools.partial(_sample_body, noise, to)
    operands = key.reshape(-1), of_blocks, *parts
    sampled, scale = _launch(body, "sample_weights", w.shape, out, strip, backend, *operands)
    return sampled.reshape(w.shape), scale.reshape(factor.shape)


@functools.partial(jax.jit, static_argnames=("noise", "strip", "backend"))
def noise_sums(
    g: jax.Array, key: jax.Array, noise: Noise, strip: Strip | None = None, backend: str = "pallas"
) -> jax.Array:
    """Compute `kernels.noise_sums_plain`, with another order of the sums."""
    strip = strip or Strip(warps=2 if backend == "triton" else 4)  # as measured on an H100
    rows, blocks = _layers(g), block_shape(g.shape)
    out = result_like(g, (rows.shape[0], *blocks[-2:]), jnp.dtype(jnp.float32))
    body = functools.partial(_sums_body, noise)
    operands = key.reshape(-1), rows
    (result,) = _launch(body, "noise_sums", g.shape, [out], strip, backend, *operands)
    return result.reshape(blocks)


@functools.partial(jax.jit, static_argnames=("shape", "noise", "dtype", "strip", "backend"))
def noise_of(
    key: jax.Array,
    shape: Shape,
    noise: Noise,
    dtype: jnp.dtype,
    strip: Strip = Strip(warps=2),  # noqa: B008 (frozen)
    backend: str = "pallas",
) -> jax.Array:
    """Compute `kernels.noise_of_plain` in a dtype."""
    layers = (math.prod(shape[:-2]), *shape[-2:])
    body = functools.partial(_noise_body, noise)
    out = result_like(key, layers, dtype)
    (result,) = _launch(body, "noise", shape, [out], strip, backend, key.reshape(-1))
    return result.reshape(shape)
