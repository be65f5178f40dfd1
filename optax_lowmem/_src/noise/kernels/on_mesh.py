"""Noise on sharded arrays: each device makes that of its own part.

A part's noise is what the whole array has there, since words are made of coordinates in it. Where
parts would cut through blocks, XLA finds the maxima of the whole.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_lowmem._src.core import random, scope
from optax_lowmem._src.core.placement import Placement, placement
from optax_lowmem._src.noise.kernels.noise import EIGHT
from optax_lowmem._src.noise.kernels.reference import SIDE


def place_of(path: str | None, x: jax.Array) -> Placement | None:
    """Return an array's sharding, as given to `lowmem.step` or by Explicit axes, or None."""
    given = scope.placement(path) if path is not None else None
    if given is not None:
        return given
    sharding = jax.typeof(x).sharding
    if not _explicit(sharding.mesh):
        return None
    return placement(path or "a sampled weight", x.shape, sharding, sharding.mesh)


def _explicit(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> bool:
    return AxisType.Explicit in mesh.axis_types


def on_explicit_axes(place: Placement) -> bool:
    """Return whether an array's mesh has Explicit axes, so that its type has its sharding."""
    return _explicit(place.mesh)


def laid_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """An array with the sharding of another, if Explicit axes make that part of its type."""
    sharding = jax.typeof(other).sharding
    if not _explicit(sharding.mesh) or jax.typeof(x).sharding == sharding:
        return x
    return jax.sharding.reshard(x, sharding)


def whole_blocks(place: Placement, shape: tuple[int, ...]) -> bool:
    """Return whether each block is on one device."""
    return all(
        place.parts(d) == 1 or shape[d] // place.parts(d) % SIDE == 0
        for d in (len(shape) - 2, len(shape) - 1)
    )


def each_part(
    run: Callable[..., Any],
    place: Placement,
    arrays: list[jax.Array | None],
    key: jax.Array,
    results: int,
) -> Any:
    """run(*parts of arrays, key of the part) on each device.

    Args:
      run: gives one array, or a tuple of `results` of them.
      place: sharding of the first of `arrays`, and of the others, which may count blocks instead.
      arrays: the operands.
      key: of the whole.
      results: how many.
    """
    first = arrays[0]
    assert first is not None
    local, spec, every = place.local(first.shape), place.spec, PartitionSpec()
    specs: list[Any] = [None if x is None else spec for x in arrays]

    def on_a_device(*operands: Any) -> Any:
        *parts, whole_key = operands
        return run(*parts, _part_key(place, local, whole_key))

    if _explicit(place.mesh):  # the sharding is part of their type
        lies = NamedSharding(place.mesh, spec)
        arrays = [None if x is None else jax.sharding.reshard(x, lies) for x in arrays]
    mapped = jax.shard_map(
        on_a_device,
        mesh=place.mesh,
        in_specs=(*specs, every),
        out_specs=spec if results == 1 else (spec,) * results,
        check_vma=False,
    )
    return mapped(*arrays, key)


def _part_key(place: Placement, local: tuple[int, ...], key: jax.Array) -> jax.Array:
    sizes = [*local[:-2], local[-2] // EIGHT, local[-1]]
    starts = [
        jax.lax.axis_index(axes).astype(jnp.uint32) * jnp.uint32(size) if axes else jnp.uint32(0)
        for axes, size in zip(place.axes, sizes, strict=True)
    ]
    row, own = random.row_and_lane_keys(key)
    return jnp.stack([random.part_keys(row, *starts)[0], own])


def gathered(
    run: Callable[..., Any],
    place: Placement,
    arrays: list[jax.Array | None],
    key: jax.Array,
    results: int,
) -> Any:
    """run(*arrays, key), of arrays on Explicit axes whose parts cut through blocks, left to XLA.

    Of two results the first has the sharding `place`; what counts blocks is replicated.
    """
    lies = NamedSharding(place.mesh, place.spec)
    blocks = NamedSharding(place.mesh, PartitionSpec())
    free = jax.sharding.auto_axes(
        run, axes=place.mesh.axis_names, out_sharding=(lies, blocks) if results == 2 else blocks
    )
    return free(*arrays, key)
