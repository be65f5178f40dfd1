"""Tests of `Shards`, which a `shard_map` and XLA's partitioner give in two forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from optax_lowmem._src.arrays.shards import EVERY, Shards, cut_reason, divides
from tests.meshes import mesh_of

SHAPE = (16, 64)
SPECS = {
    "one axis": P("a"),
    "both axes": P("b", "a"),
    "two axes of one dimension": P(None, ("b", "a")),
    "replicated": P(),
}


def of_devices(sharding):
    """The shards of an array, by the devices that XLA gives each."""
    positions = {device: i for i, device in enumerate(sharding.mesh.devices.ravel())}
    parts = Shards.of(sharding, len(SHAPE)).parts
    tiles = np.empty(parts, object)
    for at in np.ndindex(parts):
        tiles[at] = []
    for device, slices in sharding.devices_indices_map(SHAPE).items():
        at = tuple(
            (s.start or 0) * n // size for s, n, size in zip(slices, parts, SHAPE, strict=True)
        )
        tiles[at].append(positions[device])
    return Shards.of_tiles(np.array(tiles.tolist()))


def starts(shards, mesh, spec, sizes):
    """Where the shard of each device begins, [devices, dimensions], in a device's program."""
    each = jax.shard_map(
        lambda: jnp.stack(shards.starts(sizes))[None], mesh=mesh, in_specs=(), out_specs=spec
    )
    return np.asarray(jax.jit(each)())


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_two_forms_agree(spec):
    mesh = mesh_of(a=2, b=4)
    by_axes = Shards.of(NamedSharding(mesh, spec), len(SHAPE))
    by_devices = of_devices(NamedSharding(mesh, spec))
    assert by_axes.parts == by_devices.parts
    sizes = by_axes.local(SHAPE)
    assert sizes == by_devices.local(SHAPE) == NamedSharding(mesh, spec).shard_shape(SHAPE)
    numbered = jax.sharding.Mesh(mesh.devices.ravel(), (EVERY,))
    np.testing.assert_array_equal(
        starts(by_axes, mesh, P(("a", "b")), sizes),
        starts(by_devices, numbered, P(EVERY), sizes),
    )


def test_tiles():
    devices = np.random.default_rng(0).permutation(24).reshape(2, 3, 2, 2)
    shards = Shards.of_tiles(devices)
    assert shards.count == 12
    np.testing.assert_array_equal(shards.tiles(24), np.sort(devices, axis=-1))
    moved = shards.move(2, 0)  # each of 2 parts in 2
    wanted = np.moveaxis(devices, 2, 1).reshape(4, 3, 1, 2)
    np.testing.assert_array_equal(moved.tiles(24), np.sort(wanted, axis=-1))
    copies = np.moveaxis(devices, 1, -1).reshape(2, 1, 2, 6)
    np.testing.assert_array_equal(shards.replicate(1).tiles(24), np.sort(copies, axis=-1))
    assert Shards.replicated(2).tiles(3).tolist() == [[[0, 1, 2]]]


def test_whole_units():
    assert divides(3, 96, 32) and not divides(2, 96, 32) and not divides(5, 96)
    assert divides(1, 100, 32)  # a partial last group, on one device
    assert cut_reason(96, 3, 32) is None
    assert cut_reason(96, 2, 32).startswith("shards of 48 on the last axis, but groups of 32")
