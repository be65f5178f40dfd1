"""Partition of a kernel over devices, by names of the axes of its arrays.

Axes with one name are cut into the same parts, in all operands and results. A product of a [64, 32]
and b [48, 32] has the operands ("rows0", "k") and ("m", "k") and the result ("rows0", "m"). If XLA
cuts a's rows over 8 devices, each computes [8, 48] of the result from [8, 32] of a and all of b. If
it cuts k, each multiplies [64, 4] by [48, 4], and `Cut.sum` adds the products of all devices.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import SdyShardingRule

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.shards import EVERY, Shards, divides
from optax_lowmem._src.arrays.typing import PyTree
from optax_lowmem._src.kernels.fallback import with_fallback
from optax_lowmem._src.kernels.partitioned import Factor, Partition, sharding_rule

# Names of an array's axes. Axes with one name share a sharding; `n groups` has the groups of `n`.
# Each device has the whole axis where the name is None.
Names = tuple[str | None, ...]
_GROUPS = " groups"


def names_of(rank: int, *last: str | None) -> Names:
    """Return names of an array's axes: `last` of the last ones, rows0, rows1... of the others."""
    return (*(f"rows{d}" for d in range(rank - len(last))), *last)


def in_groups(*names: str | None) -> Names:
    """Return names of the axes of groups."""
    return tuple(name and name + _GROUPS for name in names)


def broadcast(names: Sequence[Names], arrays: Sequence[PyTree]) -> list[Names]:
    """Return the names of arrays' axes without those of size 1."""
    return [
        tuple(None if size == 1 else name for name, size in zip(of_x, x.shape, strict=True))
        for of_x, x in zip(names, arrays, strict=True)
    ]


class Cut:
    """The shards of all arrays of a call, by the names of their axes, and sums over devices.

    Attributes:
      index: name of each axis that is cut -> the index of the shard of device 0, 1, ...

    Example, "m" in 2 parts and "k" in 2 parts, on 4 devices:
      >>> cut = Cut(4)
      >>> cut.add("m", np.array([0, 0, 1, 1])), cut.add("k", np.array([0, 1, 0, 1]))
      (True, True)
      >>> cut.shards(["m"]).tiles(4).tolist(), cut.groups(["k"])  # 0 and 1 have part 0 of "m"
      ([[0, 1], [2, 3]], [[0, 1], [2, 3]])
    """

    def __init__(self, count: int) -> None:
        """Start with no axis cut, on `count` devices."""
        self.index: dict[str, np.ndarray] = {}
        self._count = count
        self._scattered: tuple[str, np.ndarray] | None = None

    def __contains__(self, axis: str) -> bool:
        return axis in self.index

    def parts(self, axis: str | None) -> int:
        """Return the number of parts of an axis."""
        return int(self.index[axis].max()) + 1 if axis in self.index else 1

    def add(self, axis: str, index: np.ndarray) -> bool:
        """Cut one more axis, and return whether this is possible.

        It is not if the axis is cut already, or if not every combination of parts of the axes would
        be on the same number of devices: a result would then lack some of its parts.
        """
        more = {**self.index, axis: index}
        found, counts = np.unique(np.stack([*more.values()]), axis=1, return_counts=True)
        every = math.prod(int(x.max()) + 1 for x in more.values())
        fits = axis not in self and found.shape[1] == every and len(set(counts)) == 1
        if fits:
            self.index = more
        return fits

    def shards(self, names: Sequence[str | None]) -> Shards:
        """Return the shards of an array whose axes have these names."""
        index = tuple(self.index.get(name or "", ()) for name in names)
        return Shards(tuple(map(self.parts, names)), index)

    def groups(self, axes: Sequence[str]) -> list[list[int]] | None:
        """Return groups of devices over which to reduce along some axes.

        A group has each part of these axes once, and the same part of every other axis. None means
        that none of the axes is cut: there is nothing to reduce.
        """
        cut = [axis for axis in axes if axis in self.index]
        rest = [axis for axis in self.index if axis not in cut]
        every = self.shards(rest + cut).tiles(self._count)  # [rest..., cut..., copies]
        size = math.prod(map(self.parts, cut))
        every = every.reshape(-1, size, every.shape[-1]).swapaxes(1, 2).reshape(-1, size)
        return every.tolist() if size > 1 else None

    def result_of_sum(self, names: Names, wanted: Mapping[str, np.ndarray]) -> "Cut":
        """Return the cut of the result of `sum`, and have `sum` return these parts.

        If one more axis is to be cut over the devices whose arrays are added, each device gets only
        its part of the sum (reduce-scatter), which moves half of the bytes. `wanted`, as `index`,
        has the axes of the result that XLA cuts.
        """
        result = Cut(self._count)
        result.index = {axis: self.index[axis] for axis in names if axis and axis in self}
        groups = self._added(names) or [[]]
        for axis, index in wanted.items():
            parts = int(index.max()) + 1
            alike, rest = divmod(len(groups[0]), parts)
            every = np.repeat(np.arange(parts), alike)  # each group has as many of each part
            if alike and not rest and (np.sort(index[groups], axis=1) == every).all():
                if result.add(axis, index):
                    self._scattered = axis, index
                    break
        return result

    def _added(self, names: Names) -> list[list[int]] | None:
        return self.groups([axis for axis in self.index if axis not in names])

    def sum(self, x: jax.Array, names: Names) -> jax.Array:
        """Add arrays over all devices that differ in their parts of axes that the array lacks."""
        groups = self._added(names)
        if self._scattered is not None:
            axis, index = self._scattered
            order = np.argsort(index[groups], axis=1, kind="stable")
            # [groups, parts, devices that get the same part]
            members = np.take_along_axis(np.asarray(groups), order, 1)
            members = members.reshape(len(order), int(index.max()) + 1, -1)
            x = lax.psum_scatter(
                x, EVERY, scatter_dimension=names.index(axis), tiled=True,
                axis_index_groups=members.swapaxes(1, 2).reshape(-1, members.shape[1]).tolist(),
            )  # fmt: skip
            alike = members.shape[2]
            groups = members.reshape(-1, alike).tolist() if alike > 1 else None
        return lax.psum(x, EVERY, axis_index_groups=groups) if groups else x

    def like_sum(self, x: jax.Array, names: Names) -> jax.Array:
        """Return the part of an array that belongs to this device's part of the result of `sum`.

        It is the array, unless `sum` scatters its result along one of the array's axes.
        """
        axis, index = self._scattered or (None, np.zeros(0))
        d = names.index(axis) if axis in names else None
        if d is None or x.shape[d] == 1:  # one scale for all
            return x
        shards = Shards((int(index.max()) + 1,), (index,))
        (size,) = shards.local((x.shape[d],))
        (start,) = shards.starts([size])
        return lax.dynamic_slice_in_dim(x, start, size, d)

    def max(self, x: jax.Array, *axes: str) -> jax.Array:
        """Return the maximum over all parts of some axes of f32 values without a sign bit.

        NaN counts as the largest.
        """
        groups = self.groups(axes)
        if not groups:
            return x
        bits = lax.bitcast_convert_type(x, jnp.int32)
        return numerics.from_bits(
            lax.pmax(bits, EVERY, axis_index_groups=groups).astype(jnp.uint32)
        )


def factors_of(names: Names, shape: tuple[int, ...], **units: int) -> dict[str, Factor]:
    """Return the axes of an array that may be cut, by name: those of several whole units.

    `units` has the units that are not 1.
    """
    return {
        name: Factor(name, size // unit, unit)
        for name, size in zip(names, shape, strict=True)
        if name is not None
        for unit in [units.get(name, 1)]
        if size % unit == 0 and size > unit
    }


class _AlongAxes(Partition):
    """The cut of a call along axes that have names; see `along_axes`."""

    def __init__(
        self,
        name: str,
        work: Callable[..., PyTree],
        args: PyTree,
        operands: Sequence[Names],
        results: Sequence[Names],
        axes: Mapping[str, Factor],
        adds: bool,
    ) -> None:
        super().__init__()
        self._treedef = jax.tree.structure(args)
        self._name, self._work, self._adds = name, work, adds
        self._operands, self._results, self._axes = tuple(operands), tuple(results), dict(axes)

    @property
    def content(self) -> str:
        """The name and the axes: the kernel's program is in the key too."""
        return f"{self._name} {self._operands} {self._results} {self._axes} {self._treedef}"

    def named(self) -> contextlib.AbstractContextManager[None]:
        """Name the work as the kernel."""
        return jax.named_scope(self._name)

    def _axis(self, name: str | None) -> str | None:
        """Return the axis that may be cut of a name."""
        axis = (name or "").removesuffix(_GROUPS)
        return axis if axis in self._axes else None

    def cut(
        self, given: Sequence[Shards | None], wanted: Sequence[Shards | None], count: int
    ) -> tuple[list[Shards], list[Shards], Callable[..., list[jax.Array]]]:
        """Cut each axis as in the first array, operands before results, that XLA cuts along it."""
        cut = Cut(count)
        every = (*self._operands, *self._results)
        asked = [dict(self._asked(*pair)) for pair in zip(every, (*given, *wanted), strict=True)]
        for axis, index in itertools.chain.from_iterable(one.items() for one in asked):
            cut.add(axis, index)

        def work(*arrays: jax.Array) -> list[jax.Array]:
            result = self._work(cut, *jax.tree.unflatten(self._treedef, arrays))
            return jax.tree.leaves(result)

        of_operands, of_results = (
            [cut.shards([*map(self._axis, names)]) for names in arrays]
            for arrays in (self._operands, self._results)
        )
        if self._adds:
            last = self._results[-1]
            summed = cut.result_of_sum(last, asked[-1])
            of_results[-1] = summed.shards([*map(self._axis, last)])
        return of_operands, of_results, work

    def _asked(self, names: Names, shards: Shards | None) -> Iterator[tuple[str, np.ndarray]]:
        """Return (axis, index) for each axis along which XLA cuts an array and this can too."""
        if shards is None:
            return
        rows = zip(map(self._axis, names), shards.parts, shards.index, strict=True)
        for axis, parts, index in rows:
            if axis and parts > 1 and divides(parts, self._axes[axis].units):
                yield axis, np.asarray(index)

    def rule(self) -> SdyShardingRule:
        """Return the rule: axes of one name have one sharding, in whole units."""

        def factor(name: str | None) -> Factor | None:
            axis = self._axis(name)
            if axis is None or name == axis:
                return self._axes.get(axis or "")
            return self._axes[axis]._replace(unit=1)

        arrays = self._operands, self._results
        return sharding_rule(*([[*map(factor, names)] for names in every] for every in arrays))


def along_axes(
    name: str,
    kernel: Callable[..., PyTree],
    plain: Callable[..., PyTree],
    *args: PyTree,
    operands: Sequence[Names],
    results: Sequence[Names],
    axes: Mapping[str, Factor],
    part: Callable[..., PyTree] | None = None,
    adds: bool = False,
) -> PyTree:
    """Return kernel(*args) on a GPU or of parts on several GPUs, else plain(*args).

    `operands` and `results` name the axes of each array of `args` and of the result; those in
    `axes` may be cut, others are gathered. `part`, (cut, *args) -> result, is what a device
    computes of its parts; by default `kernel`, which is right if no operation is along these axes.
    `adds` says that it returns `cut.sum` as the last result. The other arguments are as in
    `fallback.with_fallback`.
    """
    work = part if part is not None else lambda _, *args: kernel(*args)
    partition = _AlongAxes(name, work, args, operands, results, axes, adds)
    return with_fallback("cuda", kernel, plain, *args, partition=partition)
