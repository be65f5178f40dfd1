"""The step of leaves that lie on several devices: each steps its own part, as a leaf of its own.

A kernel call is opaque to XLA's partitioner, which would gather its operands. Inside a `shard_map`
it is one call a device, and nothing moves.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from optax_lowmem._src.core import explicit, random, scope
from optax_lowmem._src.core.placement import Placement, entry, placement
from optax_lowmem._src.core.rules import OF_BLOCK, UpdateRule
from optax_lowmem._src.update.plan import LeafPlan, LeafState


def place_of(plan: LeafPlan, state: LeafState, g: jax.Array) -> Placement | None:
    """Return a leaf's sharding, as given to `lowmem.step` or by Explicit axes, or None."""
    given = scope.placement(plan.path)
    if given is not None:
        return given
    for x in (*state.slots, state.correction, g):  # bytes may hold several codes
        sharding = jax.typeof(x).sharding
        if x.shape == plan.shape and _explicit(sharding.mesh):
            return placement(plan.path, plan.shape, sharding, sharding.mesh)
    return None


def _explicit(mesh: Mesh | AbstractMesh) -> bool:
    return bool(mesh.axis_types) and all(axis == AxisType.Explicit for axis in mesh.axis_types)


def supported(rule: UpdateRule, plan: LeafPlan, place: Placement) -> str | None:
    """Return the reason why a leaf's shards cannot be stepped separately, or None."""
    if plan.block is not None and _of_block(plan, place) is None:
        return "its heads lie on several devices"
    if not plan.shape:
        return "a 0-d leaf has no parts"
    return place.cut_groups(plan.shape, plan.group_size) if plan.grouped or plan.noisy else None


def _of_block(plan: LeafPlan, place: Placement) -> Any:
    """Return how `Block.operands` lie beside the parts of a leaf; None where parts cut heads.

    Blocks may lie on several devices: each has their value.
    """
    assert plan.block is not None
    block = plan.block.fit(plan.shape)
    if block.heads and place.parts(block.heads[0]) > 1:
        return None
    specs = []
    for part in block.parts:
        axes = [() if axis in part.axes else own for axis, own in enumerate(place.axes)]
        specs.append(PartitionSpec(*map(entry, axes)))
    return specs[0] if len(specs) == 1 else tuple(specs)


def fused_updates(
    step: Callable[..., list[tuple[jax.Array, LeafState]]],
    plans: Sequence[LeafPlan],
    places: Sequence[Placement],
    gradients: Sequence[jax.Array],
    weights: Sequence[jax.Array | None],
    states: Sequence[LeafState],
    of_leaves: Sequence[Mapping[str, jax.Array]],
    keys: jax.Array,
) -> list[tuple[jax.Array, LeafState]]:
    """The step of some leaves on one mesh.

    Args:
      step: (plans, gradients, weights, states, of_leaves, keys) -> results, of one device.
      plans: the leaves' static choices.
      places: where they lie.
      gradients: one a leaf.
      weights: parameters, or None each.
      states: stored states.
      of_leaves: the hyperparameters of each.
      keys: uint32 [leaves] or [leaves, 2].
    """
    mesh, specs = places[0].mesh, [place.spec for place in places]
    typed, every = _explicit(mesh), PartitionSpec()
    operands = [
        {name: _of_block(plan, place) if name == OF_BLOCK else every for name in h}
        for plan, place, h in zip(plans, places, of_leaves, strict=True)
    ]
    own = [_specs_of(state, spec) for state, spec in zip(states, specs, strict=True)]
    local = [
        dataclasses.replace(plan, shape=place.local(plan.shape))
        for plan, place in zip(plans, places, strict=True)
    ]

    def on_a_device(
        gradients: list[jax.Array],
        weights: list[jax.Array | None],
        states: list[LeafState],
        of_leaves: list[Mapping[str, jax.Array]],
        keys: jax.Array,
    ) -> list[tuple[jax.Array, LeafState]]:
        rows = zip(local, places, keys, strict=True)
        keys = jnp.stack([_part_key(*row) for row in rows])
        return step(local, gradients, weights, states, of_leaves, keys)

    found = explicit.on_each_device(
        on_a_device, mesh, typed,
        (specs, [None if p is None else s for p, s in zip(weights, specs, strict=True)],
         own, operands, every),
        [(spec, of_state) for spec, of_state in zip(specs, own, strict=True)],
        list(gradients), list(weights), list(states), [dict(h) for h in of_leaves], keys,
    )  # fmt: skip
    if typed:
        likes = map(result_like, gradients, weights, states)
        found = [explicit.laid_like(one, like) for one, like in zip(found, likes, strict=True)]
    return found


def result_like(
    gradient: jax.Array, weight: jax.Array | None, state: LeafState
) -> tuple[jax.Array, LeafState]:
    """Arrays that lie where a leaf's update and its new state do on Explicit axes."""
    return (gradient if weight is None else weight), state


def _specs_of(state: LeafState, spec: PartitionSpec) -> LeafState:
    """Scales lie as their codes; a placeholder, which has no dimension, everywhere."""
    return jax.tree.map(lambda x: spec if x.ndim else PartitionSpec(), state)


def _part_key(plan: LeafPlan, place: Placement, key: jax.Array) -> jax.Array:
    """Of this device's part of a leaf; the last axis counts groups."""
    sizes = [*plan.shape[:-1], plan.shape[-1] // plan.group_size if place.parts(-1) > 1 else 0]
    return random.key_of_part(key, *place.starts(sizes))
