"""Choice of the implementation of noise and of sampled weights, made while tracing."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_lowmem._src.core import platform, scope
from optax_lowmem._src.core.tiles import MAX_ELEMENTS
from optax_lowmem._src.noise.kernels import on_mesh, reference
from optax_lowmem._src.noise.kernels.formats import Format
from optax_lowmem._src.noise.kernels.noise import Noise

_DTYPES = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16")))


def no_kernel_reason(x: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> str | None:
    """Return the reason why no kernel takes an array here, or None where one does."""
    if scope.implementation() == "xla":
        return "implementation='xla'"
    reason = platform.no_kernel_reason(x)
    if reason is not None:
        return reason
    if not platform.has_pallas_triton():
        return "this JAX has no Pallas-Triton lowering"
    if dtype not in _DTYPES:
        return f"{dtype} is not one of {', '.join(one.name for one in _DTYPES)}"
    size = math.prod(shape)
    if not 0 < size <= MAX_ELEMENTS:
        return f"{size} elements, not 1 to {MAX_ELEMENTS}"
    return None


def _either(name: str, plain: Callable[..., Any], *args: jax.Array | None) -> Any:
    """A kernel by name, or for a host's CPU the reference, with the same static arguments."""
    from optax_lowmem._src.noise.kernels import pallas_triton

    assert isinstance(plain, functools.partial)
    kernel = functools.partial(getattr(pallas_triton, name), **plain.keywords)
    return platform.on_cuda(kernel, plain, *args)


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
    """`reference.sample`, in one kernel where there is one; `path`: of the leaf, for a mesh."""
    plain = functools.partial(reference.sample, noise=noise, to=to, dtype=dtype)

    def run(w: jax.Array, correction: jax.Array | None, factor: jax.Array, key: jax.Array) -> Any:
        if no_kernel_reason(w, w.shape, w.dtype) is not None:
            return plain(w, correction, factor, key)
        return _either("sample", plain, w, correction, factor, key)

    sampled, scale = _laid_out(run, path, [w, correction, factor], key, 2)
    return on_mesh.laid_like(sampled, w), on_mesh.laid_like(scale, factor)


def noise_sums(g: jax.Array, key: jax.Array, noise: Noise, path: str | None = None) -> jax.Array:
    """`reference.noise_sums`, in one kernel where there is one; `path`: as of `sample`."""
    plain = functools.partial(reference.noise_sums, noise=noise)

    def run(g: jax.Array, key: jax.Array) -> Any:
        if no_kernel_reason(g, g.shape, g.dtype) is not None:
            return plain(g, key)
        return _either("noise_sums", plain, g, key)

    return _laid_out(run, path, [g], key, 1)


def _laid_out(
    run: Callable[..., Any],
    path: str | None,
    arrays: list[jax.Array | None],
    key: jax.Array,
    results: int,
) -> Any:
    """run(*arrays, key), on a mesh where the first of them is known to be sharded."""
    first = arrays[0]
    assert first is not None
    place = on_mesh.place_of(path, first)
    if place is None:
        return run(*arrays, key)
    if on_mesh.whole_blocks(place, first.shape):
        return on_mesh.each_part(run, place, arrays, key, results)
    if on_mesh.on_explicit_axes(place):
        return on_mesh.gathered(run, place, arrays, key, results)
    return run(*arrays, key)


def noise_of(key: jax.Array, shape: tuple[int, ...], noise: Noise, dtype: jnp.dtype) -> jax.Array:
    """`reference.noise_of` in a dtype, in one kernel where there is one."""
    plain = functools.partial(reference.noise_of, shape=shape, noise=noise, dtype=dtype)
    if no_kernel_reason(key, shape, jnp.dtype(dtype)) is not None:
        return plain(key)
    return _either("noise_of", plain, key)


def packed_noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`reference.packed_noise`, in one kernel where there is one."""
    plain = functools.partial(reference.packed_noise, shape=shape)
    if no_kernel_reason(key, shape, jnp.dtype(jnp.float32)) is not None:
        return plain(key)
    return _either("packed_noise", plain, key)
