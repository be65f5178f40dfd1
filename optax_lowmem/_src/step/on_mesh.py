"""The step of sharded leaves: each device steps its shard like a leaf.

XLA's partitioner cannot partition a kernel call and would gather its operands. In a `shard_map`
there is one call per device, and no communication.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from optax_lowmem._src.core import context, explicit, random
from optax_lowmem._src.core.placement import Placement, entry, placement
from optax_lowmem._src.step.batch import LeafBatch, LeafState, Result
from optax_lowmem._src.step.plan import LeafPlan
from optax_lowmem._src.step.rule import OF_BLOCK


def place_of(plan: LeafPlan, state: LeafState, g: jax.Array) -> Placement | None:
    """Return a leaf's sharding, from `lowmem.step` or from Explicit axes, or None."""
    given = context.placement(plan.path)
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
    """Step parameters on one mesh.

    Args:
      step: steps the shards of one device.
      batch: the parameters.
      places: the sharding of each parameter.
    """
    batch = batch.with_keys_in_order()
    mesh, every = places[0].mesh, PartitionSpec()
    typed = _explicit(mesh)
    specs = batch.replace(
        gradients=[place.spec for place in places],
        weights=[
            None if p is None else place.spec
            for p, place in zip(batch.weights, places, strict=True)
        ],
        states=[_specs_of(s, place.spec) for s, place in zip(batch.states, places, strict=True)],
        hyperparameters=dict.fromkeys(batch.hyperparameters, every),
        operands=[
            {name: _block_specs(plan, place) if name == OF_BLOCK else every for name in own}
            for plan, place, own in zip(batch.plans, places, batch.operands, strict=True)
        ],
        keys=every,
    )

    def on_a_device(part: LeafBatch) -> list[Result]:
        local = [
            dataclasses.replace(plan, shape=place.local(plan.shape))
            for plan, place in zip(batch.plans, places, strict=True)
        ]
        keys = [_part_key(*row) for row in zip(local, places, part.keys, strict=True)]
        return step(part.replace(plans=tuple(local), keys=jnp.stack(keys)))

    results = explicit.on_each_device(
        on_a_device, mesh, typed, (specs,),
        list(map(Result, specs.gradients, specs.states)), batch,
    )  # fmt: skip
    if typed:
        likes = [batch.leaf(i).result_like for i in range(len(batch))]
        results = [
            explicit.reshard_like(one, like) for one, like in zip(results, likes, strict=True)
        ]
    return results


def _specs_of(state: LeafState, spec: PartitionSpec) -> LeafState:
    """Return the partition specs of a state: scales are sharded like their codes."""
    return jax.tree.map(lambda _: spec, state)


def _part_key(plan: LeafPlan, place: Placement, key: jax.Array) -> jax.Array:
    """Return the key of this device's shard."""
    return random.key_of_part(key, *place.starts(plan.part_sizes(place.parts(-1) > 1)))
