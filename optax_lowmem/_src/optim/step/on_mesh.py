"""The step of sharded leaves: each device steps its part, of whole groups, like a leaf.

XLA's partitioner cannot partition a kernel call and would gather its operands. In a `shard_map`
there is one call per device, and no communication. In a program whose shardings XLA chooses, it
asks a `StepPartition` how to cut a launch.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import SdyShardingRule
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from optax_lowmem._src.arrays import random
from optax_lowmem._src.arrays.sharding import named_sharding, on_each_device, reshard_like
from optax_lowmem._src.arrays.shards import Shards, axes_of, spec_of
from optax_lowmem._src.arrays.typing import PyTree
from optax_lowmem._src.kernels import step_arguments
from optax_lowmem._src.kernels.partitioned import Factor, Partition, sharding_rule
from optax_lowmem._src.kernels.step_arguments import scope
from optax_lowmem._src.optim.step.plan import LeafPlan
from optax_lowmem._src.optim.step.state import Leaf, LeafBatch

# ---- in a shard_map ------------------------------------------------------------------------------


def leaf_sharding(plan: LeafPlan, leaf: Leaf) -> NamedSharding | None:
    """Return a leaf's sharding, from `lowmem.step` or from Explicit axes, or None."""
    given = step_arguments.sharding(plan.path)
    if given is not None:
        return given
    # packed codes have another shape
    for x in jax.tree.leaves((leaf.slots, leaf.correction, leaf.g)):
        sharding = jax.typeof(x).sharding
        if x.shape == plan.shape and _explicit(sharding.mesh):
            return named_sharding(plan.path, plan.shape, sharding, sharding.mesh)
    return None


def _explicit(mesh: Mesh | AbstractMesh) -> bool:
    return bool(mesh.axis_types) and all(axis == AxisType.Explicit for axis in mesh.axis_types)


def unsupported(plan: LeafPlan, sharding: NamedSharding) -> str | None:
    """Return the reason why a leaf's shards cannot be stepped separately, or None."""
    if not plan.shape:
        return "a 0-d leaf has no shards"
    parts = Shards.of(sharding, len(plan.shape)).parts
    return next(filter(None, map(plan.cut_reason, range(len(parts)), parts)), None)


def _of_shard(plan: LeafPlan, shards: Shards, key: jax.Array) -> tuple[LeafPlan, jax.Array]:
    """Return the plan and the key of this device's shard, which is stepped like a leaf.

    With this key it has its part of the leaf's random bits, which have the coordinates of groups.
    """
    *rest, last = shape = shards.local(plan.shape)
    key = random.key_of_part(key, *shards.starts([*rest, last // plan.group_size]))
    return dataclasses.replace(plan, shape=shape), key


def _block_specs(plan: LeafPlan, sharding: NamedSharding) -> PyTree:
    """Return the partition specs of `Block.operands`.

    A block may span several devices, each of which then has its value.
    """
    assert plan.block is not None
    axes = axes_of(sharding.spec, len(plan.shape))
    specs = [
        spec_of(() if d in part.axes else names for d, names in enumerate(axes))
        for part in plan.block.fit(plan.shape).parts
    ]
    return specs[0] if len(specs) == 1 else tuple(specs)


def _leaf_specs(plan: LeafPlan, leaf: Leaf, sharding: NamedSharding) -> Leaf:
    """Return the partition specs of a leaf's arrays; scales are sharded like their codes."""
    specs = jax.tree.map(lambda _: sharding.spec, leaf._replace(of_block=None))
    return specs if leaf.of_block is None else specs._replace(of_block=_block_specs(plan, sharding))


def fused_updates(
    step: Callable[[LeafBatch], list[Leaf]],
    batch: LeafBatch,
    shardings: Sequence[NamedSharding],
) -> list[Leaf]:
    """Step parameters on one mesh; `step` steps the shards of one device."""
    batch = batch.with_keys_in_order()
    mesh, every = shardings[0].mesh, PartitionSpec()
    typed = _explicit(mesh)
    partitioned: dict[str, PyTree] = {
        "leaves": list(map(_leaf_specs, batch.plans, batch.leaves, shardings)),
        "hyperparameters": dict.fromkeys(batch.hyperparameters, every),
        "own": [dict.fromkeys(own, every) for own in batch.own],
        "keys": every,
    }
    specs = dataclasses.replace(batch, **partitioned)
    shards = [Shards.of(sharding, len(sharding.spec)) for sharding in shardings]

    def on_a_device(part: LeafBatch) -> list[Leaf]:
        plans, keys = zip(*map(_of_shard, batch.plans, shards, part.keys), strict=True)
        return step(dataclasses.replace(part, plans=plans, keys=jnp.stack(keys)))

    results = on_each_device(
        on_a_device, mesh, typed, (specs,),
        [leaf.result_like for leaf in specs.leaves], batch,
    )  # fmt: skip
    if typed:
        likes = [leaf.result_like for leaf in batch.leaves]
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
        step: Callable[..., list[Leaf]],
        paths: Sequence[str],
        plans: tuple[LeafPlan, ...],
        numbers: tuple[int, ...],
        arguments: tuple[PyTree, ...],
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
            deciding = leaf.slots, leaf.correction, leaf.p, leaf.g
            self._deciding.append(jax.tree.leaves(deciding))
            self._owners.append(jax.tree.leaves(leaf))
            self._likes += jax.tree.leaves(leaf.result_like)

    @property
    def content(self) -> str:
        """The plans, and the `content` and `backend` that the caller gave."""
        return f"step {self._name[1]} {self._content} {self._plans} {self._numbers} {self._treedef}"

    def named(self) -> contextlib.AbstractContextManager[None]:
        """Name the work by leaves and implementation, for `step_arguments.implementations`."""
        return scope(*self._name)

    def cut(
        self, given: Sequence[Shards | None], wanted: Sequence[Shards | None], count: int
    ) -> tuple[list[Shards], list[Shards], Callable[..., list[jax.Array]]]:
        """Cut each leaf, and give each part the key of its place in the leaf."""
        del wanted, count  # results are cut as the arrays that they replace
        shards = [Shards.replicated(len(shape)) for shape in self._shapes]
        leaf_shards = []
        for plan, owners, deciding in zip(self._plans, self._owners, self._deciding, strict=True):
            whole = [given[j] for j in deciding if self._shapes[j] == plan.shape]
            leaf_shards.append(_finest(plan, whole))
            for j in owners:
                shards[j] = _like(leaf_shards[-1], self._shapes[j])

        def work(*arrays: jax.Array) -> list[jax.Array]:
            leaves, scalars, keys = jax.tree.unflatten(self._treedef, arrays)
            whole = [keys[number] for number in self._numbers]
            plans, own = zip(*map(_of_shard, self._plans, leaf_shards, whole), strict=True)
            result = self._step(plans, tuple(range(len(own))), leaves, scalars, jnp.stack(own))
            return jax.tree.leaves(result)

        return shards, [shards[j] for j in self._likes], work

    def rule(self) -> SdyShardingRule:
        """Return the rule: arrays of a leaf have one sharding, and groups stay whole."""
        operands: list[list[Factor | None]] = [[None] * len(shape) for shape in self._shapes]
        for i, (plan, owners) in enumerate(zip(self._plans, self._owners, strict=True)):
            for j in owners:
                operands[j] = _factors(f"leaf{i}_", plan, self._shapes[j])
        return sharding_rule(operands, [operands[j] for j in self._likes])


def _finest(plan: LeafPlan, given: Sequence[Shards | None]) -> Shards:
    """Return the finest of some shards of a leaf, none of which cut through groups."""
    allowed = [_of_whole_groups(plan, shards) for shards in given if shards is not None]
    whole = Shards.replicated(len(plan.shape))
    return max([whole, *allowed], key=lambda shards: shards.count)


def _of_whole_groups(plan: LeafPlan, shards: Shards) -> Shards:
    """Move cuts that the plan does not allow to an earlier dimension, or remove them."""
    for d, parts in enumerate(shards.parts):
        if plan.cut_reason(d, parts) is None:
            continue
        to = [e for e in range(d) if plan.cut_reason(e, shards.parts[e] * parts) is None]
        shards = shards.move(d, to[0]) if to else shards.replicate(d)
    return shards


def _like(leaf: Shards, shape: tuple[int, ...]) -> Shards:
    """Return the shards of an array of a leaf: the leaf's, but replicated along axes of size 1."""
    if len(shape) != len(leaf.parts):
        return Shards.replicated(len(shape))
    for d, size in enumerate(shape):
        if leaf.parts[d] > 1 and size == 1:
            leaf = leaf.replicate(d)
    return leaf


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
