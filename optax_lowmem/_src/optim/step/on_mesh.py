"""The step of sharded leaves: each device steps its part, of whole groups, like a leaf.

XLA's partitioner cannot partition a kernel call and would gather its operands. In a `shard_map`
there is one call per device, and no communication. In a program whose shardings XLA chooses, it
asks a `StepPartition` how to cut a launch.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import SdyShardingRule
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from optax_lowmem._src.arrays import random
from optax_lowmem._src.arrays.sharding import (
    Placement,
    entry,
    on_each_device,
    placement,
    reshard_like,
)
from optax_lowmem._src.kernels import step_arguments
from optax_lowmem._src.kernels.partitioned import EVERY, Factor, Partition, Tiles, sharding_rule
from optax_lowmem._src.optim.step.batch import LeafBatch, LeafState, Result
from optax_lowmem._src.optim.step.plan import LeafPlan
from optax_lowmem._src.optim.step.rule import OF_BLOCK
from optax_lowmem._src.optim.step.scopes import scope

# ---- in a shard_map ------------------------------------------------------------------------------


def place_of(plan: LeafPlan, state: LeafState, g: jax.Array) -> Placement | None:
    """Return a leaf's sharding, from `lowmem.step` or from Explicit axes, or None."""
    given = step_arguments.placement(plan.path)
    if given is not None:
        return given
    for x in jax.tree.leaves((state.slots, state.correction, g)):  # packed codes have another shape
        sharding = jax.typeof(x).sharding
        if x.shape == plan.shape and _explicit(sharding.mesh):
            return placement(plan.path, plan.shape, sharding, sharding.mesh)
    return None


def _explicit(mesh: Mesh | AbstractMesh) -> bool:
    return bool(mesh.axis_types) and all(axis == AxisType.Explicit for axis in mesh.axis_types)


def unsupported(plan: LeafPlan, place: Placement) -> str | None:
    """Return the reason why a leaf's shards cannot be stepped separately, or None."""
    if not plan.shape:
        return "a 0-d leaf has no shards"
    reasons = [plan.cut_reason(d, place.parts(d)) for d in range(len(plan.shape))]
    return next(filter(None, reasons), None)


def _block_specs(plan: LeafPlan, place: Placement) -> Any:
    """Return the partition specs of `Block.operands`.

    A block may span several devices, each of which then has its value.
    """
    assert plan.block is not None
    specs = []
    for part in plan.block.fit(plan.shape).parts:
        axes = [() if axis in part.axes else own for axis, own in enumerate(place.axes)]
        specs.append(PartitionSpec(*map(entry, axes)))
    return specs[0] if len(specs) == 1 else tuple(specs)


def fused_updates(
    step: Callable[[LeafBatch], list[Result]], batch: LeafBatch, places: Sequence[Placement]
) -> list[Result]:
    """Step parameters on one mesh; `step` steps the shards of one device."""
    batch = batch.with_keys_in_order()
    mesh, every = places[0].mesh, PartitionSpec()
    typed = _explicit(mesh)
    partitioned: dict[str, Any] = {
        "gradients": [place.spec for place in places],
        "weights": [
            None if p is None else place.spec
            for p, place in zip(batch.weights, places, strict=True)
        ],
        "states": [  # scales are sharded like their codes
            jax.tree.map(lambda _, place=place: place.spec, state)
            for state, place in zip(batch.states, places, strict=True)
        ],
        "hyperparameters": dict.fromkeys(batch.hyperparameters, every),
        "operands": [
            {name: _block_specs(plan, place) if name == OF_BLOCK else every for name in own}
            for plan, place, own in zip(batch.plans, places, batch.operands, strict=True)
        ],
        "keys": every,
    }
    specs = dataclasses.replace(batch, **partitioned)

    def on_a_device(part: LeafBatch) -> list[Result]:
        local = [
            dataclasses.replace(plan, shape=place.local(plan.shape))
            for plan, place in zip(batch.plans, places, strict=True)
        ]
        keys = [
            random.key_of_part(key, *place.starts(plan.part_sizes(place.parts(-1) > 1)))
            for plan, place, key in zip(local, places, part.keys, strict=True)
        ]
        return step(dataclasses.replace(part, plans=tuple(local), keys=jnp.stack(keys)))

    results = on_each_device(
        on_a_device, mesh, typed, (specs,),
        list(map(Result, specs.gradients, specs.states)), batch,
    )  # fmt: skip
    if typed:
        likes = [batch.leaf(i).result_like for i in range(len(batch.plans))]
        results = [reshard_like(one, like) for one, like in zip(results, likes, strict=True)]
    return results


# ---- by XLA's partitioner ------------------------------------------------------------------------


class StepPartition(Partition):
    """The cut of a launch.

    A leaf is cut as its codes are, or as its correction, weight or gradient if that is finer. A cut
    through groups, or through heads of a block, is moved to an earlier dimension, or undone.
    """

    def __init__(
        self,
        backend: str,
        content: str,
        step: Callable[..., Any],
        paths: Sequence[str],
        plans: tuple[LeafPlan, ...],
        numbers: tuple[int, ...],
        arguments: tuple[Any, ...],
    ) -> None:
        """Partition step(plans, numbers, leaves, scalars, keys), which must not close over arrays.

        `content` is all that the step depends on but its arguments; `plans` have no paths;
        `numbers` are the indices of the leaves' keys. `arguments` are (leaves, scalars, keys), or
        their types.
        """
        super().__init__()
        self._content, self._step, self._plans, self._numbers = content, step, plans, numbers
        self._name = paths, backend
        arrays, self._treedef = jax.tree.flatten(arguments)
        self._shapes = [x.shape for x in arrays]
        leaves, *_ = jax.tree.unflatten(self._treedef, range(len(arrays)))
        self._owners: list[list[int]] = []  # operands of each leaf, which are cut together
        self._likes: list[int] = []  # of each result, the operand that it is cut like
        self._deciding: list[list[int]] = []  # operands that decide how a leaf is cut
        for leaf in leaves:
            state = leaf.state.slots, leaf.state.correction
            self._deciding.append(jax.tree.leaves((state, leaf.p, leaf.g)))
            self._owners.append(jax.tree.leaves(leaf))
            self._likes += jax.tree.leaves(leaf.result_like)

    @property
    def content(self) -> str:
        """The plans, and the `content` and `backend` that the caller gave."""
        return f"step {self._name[1]} {self._content} {self._plans} {self._numbers} {self._treedef}"

    def named(self) -> contextlib.AbstractContextManager[None]:
        """Name the work by the leaves and the implementation, for `scopes.implementations`."""
        return scope(*self._name)

    def cut(
        self, given: Sequence[Tiles | None], wanted: Sequence[Tiles | None], count: int
    ) -> tuple[list[Tiles], list[Tiles], Callable[..., list[jax.Array]]]:
        """Cut each leaf, and give each part the key of its place in the leaf."""
        del wanted  # results are cut as the arrays that they replace
        tiles = [Tiles.whole(len(shape), count) for shape in self._shapes]
        parts, starts = [], []
        for plan, owners, deciding in zip(self._plans, self._owners, self._deciding, strict=True):
            cut = _finest(
                plan, [given[j] for j in deciding if self._shapes[j] == plan.shape], count
            )
            local = dataclasses.replace(plan, shape=cut.local(plan.shape))
            for j in owners:
                tiles[j] = _like(plan, cut, self._shapes[j], count)
            parts.append(local)
            starts.append(cut.starts(local.part_sizes(cut.parts[-1] > 1)))

        def work(*arrays: jax.Array) -> list[jax.Array]:
            leaves, scalars, keys = jax.tree.unflatten(self._treedef, arrays)
            here = jax.lax.axis_index(EVERY)
            own = [
                random.key_of_part(keys[number], *jnp.asarray(table)[here])
                for number, table in zip(self._numbers, starts, strict=True)
            ]
            numbers = tuple(range(len(own)))
            result = self._step(tuple(parts), numbers, leaves, scalars, jnp.stack(own))
            return jax.tree.leaves(result)

        return tiles, [tiles[j] for j in self._likes], work

    def rule(self) -> SdyShardingRule:
        """Return the rule: arrays of a leaf have one sharding, and groups stay whole."""
        operands = [[None] * len(shape) for shape in self._shapes]
        for i, (plan, owners) in enumerate(zip(self._plans, self._owners, strict=True)):
            for j in owners:
                operands[j] = _factors(f"leaf{i}_", plan, self._shapes[j])
        return sharding_rule(operands, [operands[j] for j in self._likes])


def _finest(plan: LeafPlan, given: Sequence[Tiles | None], count: int) -> Tiles:
    """Return the finest of some tiles of a leaf, none of whose parts cut through groups."""
    best = Tiles.whole(len(plan.shape), count)
    for tiles in given:
        cut = best if tiles is None else _mended(plan, tiles)
        best = cut if cut.count > best.count else best
    return best


def _mended(plan: LeafPlan, tiles: Tiles) -> Tiles:
    """Move cuts that the plan does not allow to an earlier dimension, or remove them."""
    for d in range(len(plan.shape)):
        parts = tiles.parts[d]
        if plan.cut_reason(d, parts) is None:
            continue
        to = [e for e in range(d) if plan.cut_reason(e, tiles.parts[e] * parts) is None]
        tiles = tiles.moved(d, to[0]) if to else tiles.uncut(d)
    return tiles


def _like(plan: LeafPlan, cut: Tiles, shape: tuple[int, ...], count: int) -> Tiles:
    """Return the tiles of an array of a leaf: as the leaf's, but whole where it has one value."""
    if len(shape) != len(plan.shape):
        return Tiles.whole(len(shape), count)
    for d, size in enumerate(shape):
        if cut.parts[d] > 1 and size == 1:
            cut = cut.uncut(d)
    return cut


def _factors(prefix: str, plan: LeafPlan, shape: tuple[int, ...]) -> list[Factor | None]:
    """Return the factors of an array of a leaf; only dimensions of whole groups may be sharded."""
    if len(shape) != len(plan.shape):
        return [None] * len(shape)
    factors = [
        Factor(f"{prefix}{d}", size) if size == plan.shape[d] else None
        for d, size in enumerate(shape[:-1])
    ]
    groups, rest = divmod(plan.shape[-1], plan.group_size if plan.in_groups else 1)
    whole = groups > 1 and not rest and shape[-1] % groups == 0
    of_last = Factor(f"{prefix}groups", groups, shape[-1] // groups) if whole else None
    return [*factors, of_last]
