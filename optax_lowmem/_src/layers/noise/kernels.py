"""Noise, sampled weights and the block sums of gradients (GaussWS), as kernels or plain JAX.

The implementation is chosen while tracing.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from optax_lowmem._src.arrays import numerics, random
from optax_lowmem._src.arrays.codecs import split_of
from optax_lowmem._src.arrays.sharding import (
    left_to_xla,
    named_sharding,
    on_each_device,
    reshard_like,
    sharding_of,
)
from optax_lowmem._src.arrays.shards import Shards, divides
from optax_lowmem._src.arrays.typing import PyTree
from optax_lowmem._src.kernels import platform, step_arguments
from optax_lowmem._src.kernels.along_axes import (
    Cut,
    Names,
    along_axes,
    factors_of,
    in_groups,
    names_of,
)
from optax_lowmem._src.layers.noise.distributions import EIGHT, Noise
from optax_lowmem._src.layers.noise.formats import Format, Scaled

# ---- square blocks of 32 on the last two axes; those at the end of an axis may be partial --------

SIDE = 32


def block_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of blocks per axis; axes before the last two have one per index."""
    return (*shape[:-2], *(-(-size // SIDE) for size in shape[-2:]))


def check_matrix(what: str, x: jax.Array | jax.ShapeDtypeStruct) -> None:
    """Raise ValueError unless an array is not empty and has at least two axes."""
    if jnp.ndim(x) < 2 or math.prod(x.shape) == 0:
        raise ValueError(
            f"{what} has shape {tuple(x.shape)}: blocks of 32 x 32 need the two axes of a matrix."
        )


def to_blocks(x: jax.Array) -> jax.Array:
    """Reshape [..., m, n] to [..., blocks, 32, blocks, 32], padded with zeros."""
    rows, columns = block_shape(x.shape)[-2:]
    padding = [(0, 0)] * (x.ndim - 2)
    padding += [(0, count * SIDE - size) for count, size in zip((rows, columns), x.shape[-2:],
                                                               strict=True)]  # fmt: skip
    if any(after for _, after in padding):
        x = jnp.pad(x, padding)
    return x.reshape(*x.shape[:-2], rows, SIDE, columns, SIDE)


def absmax(x: jax.Array) -> jax.Array:
    """Return max |x| of each block, f32; NaN if the block has a NaN."""
    return numerics.from_bits(numerics.absmax_bits(to_blocks(x), axes=(-3, -1)))


def sums(x: jax.Array) -> jax.Array:
    """Return the sum over each block."""
    return jnp.sum(to_blocks(x), axis=(-3, -1))


def spread(of_blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast each block's value to its elements, in the array's shape."""
    *lead, rows, columns = of_blocks.shape
    wide = jnp.broadcast_to(
        of_blocks[..., :, None, :, None], (*lead, rows, SIDE, columns, SIDE)
    ).reshape(*lead, rows * SIDE, columns * SIDE)
    return wide[..., : shape[-2], : shape[-1]]


def words_of(key: jax.Array, shape: tuple[int, ...], draws: int) -> list[jax.Array]:
    """Return `draws` arrays of random words for [..., m, n], each [..., ceil(m / 8), n]."""
    places = (*shape[:-2], -(-shape[-2] // EIGHT), shape[-1])
    return random.draw_words(random.word_keys(key), random.indices(places), draws)


def noise_of_plain(
    key: jax.Array, shape: tuple[int, ...], noise: Noise, dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Return R with the shape `shape`."""
    # with the barrier, XLA computes words once, not once per element (no upstream issue known)
    prepared = lax.optimization_barrier(noise.prepared(words_of(key, shape, noise.draws)))
    rows = noise.elements(prepared)
    r = rows.reshape(*rows.shape[:-3], -1, shape[-1])[..., : shape[-2], :]
    return r.astype(dtype)  # exact in bf16


def perturb(w: jax.Array, scale: jax.Array, r: jax.Array) -> jax.Array:
    """Return w + R scale (equation 1), with a scale per block; only the addition rounds."""
    return w + r * spread(scale, w.shape)


def cast(x: jax.Array, to: Format, dtype: jnp.dtype) -> jax.Array:
    """Round f32 values to a format and return them as `dtype`."""
    if isinstance(to, Scaled):
        x = to.cast(x, spread(absmax(x), x.shape))
    return x if dtype == jnp.float32 else numerics.narrow(x, dtype)


def sample_plain(
    w: jax.Array,
    correction: jax.Array | None,
    factor: jax.Array,
    key: jax.Array,
    noise: Noise,
    to: Format,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """Return weights [..., m, n] with noise, and the scale of the noise, f32, per block.

    These are w + R scale, rounded to the format, in `dtype`; and max |w| factor, where `factor` is
    2^(1 - b_t), f32, per block. `correction` is that of split master weights; `key` is of the leaf
    and step, or of a part (`random.part_keys`).
    """
    masters = (
        numerics.widen(w) if correction is None else split_of(correction.dtype).join(w, correction)
    )
    scale = absmax(masters) * factor
    r = noise_of_plain(key, w.shape, noise)
    sampled = perturb(masters, scale, r)
    return cast(sampled, to, dtype), scale


def noise_sums_plain(g: jax.Array, key: jax.Array, noise: Noise) -> jax.Array:
    """Return the sum of g R over each block, f32 (equation 3)."""
    return sums(numerics.widen(g) * noise_of_plain(key, g.shape, noise))


def result_dtype(to: Format) -> jnp.dtype:
    """Return the dtype of sampled weights: the wide format's, or bf16, exact for scaled formats."""
    return jnp.dtype(jnp.bfloat16 if isinstance(to, Scaled) else to.name)


# ---- noise on sharded arrays: each device generates the noise of its shard -----------------------
# The noise does not depend on the sharding, since words are hashes of global coordinates. If shard
# boundaries cut through blocks, XLA partitions the computation instead.


def _on_shards(
    run: Callable[..., PyTree],
    path: str | None,
    arrays: list[jax.Array | None],
    key: jax.Array,
    results: int,
) -> PyTree:
    """Return run(*arrays, key), computed per device if the first array is known to be sharded.

    On Explicit axes whose shards cut through blocks, per-block arrays are replicated.
    """
    first = arrays[0]
    assert first is not None
    typed = sharding_of(first)
    sharding = step_arguments.sharding(path) if path is not None else None
    if sharding is None and typed is not None:
        sharding = named_sharding(path or "a sampled weight", first.shape, typed, typed.mesh)
    shards = Shards.replicated(first.ndim) if sharding is None else Shards.of(sharding, first.ndim)
    whole = all(divides(shards.parts[d], first.shape[d], SIDE) for d in (-2, -1))
    if sharding is None or not whole:
        return left_to_xla(run, (typed, None) if results == 2 else None, *arrays, key)

    def on_a_device(*operands: PyTree) -> PyTree:
        *parts, whole_key = operands
        return run(*parts, _key_of_shard(whole_key, shards, first.shape))

    spec = sharding.spec
    return on_each_device(
        on_a_device, sharding.mesh, bool(sharding.mesh.explicit_axes),
        (*(None if x is None else spec for x in arrays), PartitionSpec()),
        spec if results == 1 else (spec,) * results,
        *arrays, key,
    )  # fmt: skip


def _key_of_shard(key: jax.Array, shards: Shards, shape: tuple[int, ...]) -> jax.Array:
    """Return the key with which this device's shard draws the words that the whole array has there.

    A word serves eight rows. A sharded axis of rows has whole words, and one that is not sharded
    begins at 0, so the number of words before the shard is exact.
    """
    *rest, rows, columns = shards.local(shape)
    return random.key_of_part(key, *shards.starts([*rest, rows // EIGHT, columns]))


# ---- the choice of the implementation ------------------------------------------------------------


def no_kernel_reason(x: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> str | None:
    """Return why no kernel supports an array here, or None if one does."""
    if step_arguments.current().implementation == "xla":
        return "implementation='xla'"
    return platform.no_array_reason(x, shape, dtype)


def _fastest(
    name: str,
    plain: functools.partial[PyTree],
    shape: tuple[int, ...],
    dtype: DTypeLike,
    *args: PyTree,
    results: Sequence[Names],
    unit: int = SIDE,
) -> PyTree:
    """Call a kernel by name with the arguments of `plain`, if supported, else `plain`.

    `shape` and `dtype` are of the array that has noise. The arguments are arrays of this shape or
    of its blocks, and at last the key; `results` names the axes of the results. One device must
    have `unit` rows, as in `along_axes`.
    """
    if no_kernel_reason(args[0], shape, dtype) is not None:
        return plain(*args)
    from optax_lowmem._src.layers.noise import noise_kernel

    backend, static = platform.backend(), plain.keywords
    function = functools.partial(getattr(noise_kernel, name), backend=backend)
    names = _names(shape)

    def part(cut: Cut, *args: PyTree) -> PyTree:
        shards = cut.shards(names)
        local = {"shape": shards.local(shape)} if "shape" in static else {}
        return function(*args[:-1], _key_of_shard(args[-1], shards, shape), **static | local)

    of_args = [names if x.shape == shape else in_groups(*names) for x in args[:-1] if x is not None]
    return along_axes(
        name, functools.partial(function, **static), plain, *args,
        operands=[*of_args, (None,) * args[-1].ndim], results=results,
        axes=factors_of(names, shape, m=unit, n=SIDE if unit == SIDE else 1), part=part,
    )  # fmt: skip


def _names(shape: tuple[int, ...]) -> Names:
    return names_of(len(shape), "m", "n")


def sample(
    w: jax.Array,
    correction: jax.Array | None,
    factor: jax.Array,
    key: jax.Array,
    noise: Noise,
    to: Format,
    dtype: jnp.dtype,
    path: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute `sample_plain`, in one kernel if supported; `path`: the leaf's, for its sharding."""
    plain = functools.partial(sample_plain, noise=noise, to=to, dtype=dtype)

    def run(w: jax.Array, *rest: jax.Array | None) -> PyTree:
        names = _names(w.shape)
        return _fastest(
            "sample", plain, w.shape, w.dtype, w, *rest, results=[names, in_groups(*names)]
        )

    results: tuple[jax.Array, jax.Array] = _on_shards(run, path, [w, correction, factor], key, 2)
    return reshard_like(results, (w, factor))


def noise_sums(g: jax.Array, key: jax.Array, noise: Noise, path: str | None = None) -> jax.Array:
    """Compute `noise_sums_plain`, in one kernel if supported; `path`: as in `sample`."""
    plain = functools.partial(noise_sums_plain, noise=noise)

    def run(g: jax.Array, key: jax.Array) -> PyTree:
        results = [in_groups(*_names(g.shape))]
        return _fastest("noise_sums", plain, g.shape, g.dtype, g, key, results=results)

    return _on_shards(run, path, [g], key, 1)


def noise_of(key: jax.Array, shape: tuple[int, ...], noise: Noise, dtype: jnp.dtype) -> jax.Array:
    """Compute `noise_of_plain` in a dtype, in one kernel if supported."""
    plain = functools.partial(noise_of_plain, shape=shape, noise=noise, dtype=dtype)
    return _fastest("noise_of", plain, shape, dtype, key, results=[_names(shape)], unit=EIGHT)
