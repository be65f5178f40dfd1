"""`Shards`: how an array is divided among devices, in a `shard_map` or by XLA's partitioner."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

Axes = tuple[str, ...]  # mesh axes that shard one dimension, outermost first
EVERY = "every device"  # the mesh axis of all devices, where XLA partitions a call


def axes_of(spec: PartitionSpec, rank: int) -> list[Axes]:
    """Return the mesh axes that shard each dimension."""
    entries = [*spec, *[None] * (rank - len(spec))]
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]


def spec_of(axes: Iterable[Axes]) -> PartitionSpec:
    """Return the PartitionSpec with these mesh axes for each dimension; invert `axes_of`."""
    return PartitionSpec(*(None if not a else a[0] if len(a) == 1 else a for a in axes))


def divides(parts: int, size: int, unit: int = 1) -> bool:
    """Return whether a dimension can have this number of shards of equal size, of whole units.

    A unit is a number of neighbours that must be on one device: a group, a block. A dimension of 96
    in groups of 32 can have 3 shards, not 2 or 4. A replicated dimension may have a partial unit.
    """
    return parts == 1 or size % (parts * unit) == 0


def cut_reason(size: int, parts: int, group_size: int) -> str | None:
    """Describe how shards of a last axis cut through groups; None if they do not."""
    if divides(parts, size, group_size):
        return None
    return (
        f"shards of {size // parts} on the last axis, but groups of {group_size}: some groups span "
        "two devices"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Shards:
    """Division of an array into shards of equal size, each on one or more devices.

    Attributes:
      parts: number of shards along each dimension.
      index: what selects the shard of a device along each dimension: mesh axes in a `shard_map`;
        where XLA partitions a call, the index of the shard of device 0, 1, ...

    Example, a matrix of 2 x 2 shards on devices 0, 2 (first row) and 1, 3:
      >>> shards = Shards.of_tiles(np.array([[[0], [2]], [[1], [3]]]))
      >>> shards.local((64, 96)), [index.tolist() for index in shards.index]
      ((32, 48), [[0, 1, 0, 1], [0, 0, 1, 1]])
      >>> shards.replicate(1).tiles(4).tolist()  # [parts of each dimension..., copies]
      [[[0, 2]], [[1, 3]]]
    """

    parts: tuple[int, ...]
    index: tuple[Axes | np.ndarray, ...]

    @classmethod
    def replicated(cls, rank: int) -> "Shards":
        """Return the one shard of an array that every device has."""
        return cls((1,) * rank, ((),) * rank)

    @classmethod
    def of(cls, sharding: NamedSharding, rank: int) -> "Shards":
        """Return the shards of an array, by mesh axes."""
        axes, sizes = axes_of(sharding.spec, rank), sharding.mesh.shape
        return cls(tuple(math.prod(sizes[name] for name in names) for names in axes), tuple(axes))

    @classmethod
    def of_tiles(cls, devices: np.ndarray) -> "Shards":
        """Return the shards that have these devices: [parts of each dimension..., copies]."""
        *index, _ = np.unravel_index(np.argsort(devices, axis=None), devices.shape)
        return cls(devices.shape[:-1], tuple(index))

    def tiles(self, count: int) -> np.ndarray:
        """Return the devices of each shard, of `count` devices; invert `of_tiles`."""
        index = [np.asarray(self.index[d]) for d, parts in enumerate(self.parts) if parts > 1]
        order = np.lexsort(index[::-1]) if index else np.arange(count)
        return order.reshape(*self.parts, -1)

    @property
    def count(self) -> int:
        """Number of different shards."""
        return math.prod(self.parts)

    def local(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a shard."""
        return tuple(size // parts for size, parts in zip(shape, self.parts, strict=True))

    def starts(self, sizes: Sequence[int]) -> list[jax.Array]:
        """Return where this device's shard begins along each dimension, in a device's program.

        `sizes` are those of a shard, in the unit of the result (elements or groups).
        """
        return [
            jnp.uint32(0) if parts == 1 else _here(index) * jnp.uint32(size)
            for parts, index, size in zip(self.parts, self.index, sizes, strict=True)
        ]

    def replicate(self, d: int) -> "Shards":
        """Return the shards with dimension `d` replicated."""
        return self._with(d, 1, np.zeros_like(self.index[d]))

    def move(self, d: int, to: int) -> "Shards":
        """Return the shards with dimension `d` replicated and each part of `to` divided.

        For shards by device, not by the names of mesh axes.
        """
        index = np.asarray(self.index[to]) * self.parts[d] + np.asarray(self.index[d])
        return self.replicate(d)._with(to, self.parts[to] * self.parts[d], index)

    def _with(self, d: int, parts: int, index: np.ndarray) -> "Shards":
        """Return the shards with other `parts` and `index` of dimension `d`."""
        return Shards(
            (*self.parts[:d], parts, *self.parts[d + 1 :]),
            (*self.index[:d], index, *self.index[d + 1 :]),
        )


def _here(index: Axes | np.ndarray) -> jax.Array:
    if isinstance(index, np.ndarray):
        return jnp.asarray(np.uint32(index))[lax.axis_index(EVERY)]
    return lax.axis_index(index).astype(jnp.uint32)
