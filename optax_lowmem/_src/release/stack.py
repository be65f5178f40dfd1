"""One layer of stacked leaves: which can be stepped on their own, reading and writing it."""

import dataclasses
from typing import Any

import jax
from jax import lax

from optax_lowmem._src.core import scope, varying
from optax_lowmem._src.core.rules import UpdateRule
from optax_lowmem._src.update import LeafPlan


def layer_plan(rule: UpdateRule, plan: LeafPlan, layers: int, per_layer: bool) -> LeafPlan:
    """The plan of one layer of a leaf that is planned as a whole: it keeps the axis, of size 1.

    Raises:
      ValueError: for a leaf whose layers cannot be stepped one by one.
    """
    reason = _reason(rule, plan, per_layer) if layers > 1 else None
    if reason is not None:
        raise ValueError(
            f"the layers of leaf '{plan.path}' {list(plan.shape)} cannot be updated one by one: "
            f"{reason}"
        )
    block = None if plan.block is None else plan.block.fit(plan.shape, plan.path)
    return dataclasses.replace(plan, shape=(1, *plan.shape[1:]), block=block)


def _reason(rule: UpdateRule, plan: LeafPlan, per_layer: bool) -> str | None:
    if rule.prepares == "leaf" and not per_layer:
        return (
            f"{type(rule).__name__} measures all of a tensor before it steps. per_layer=True "
            "measures each layer on its own, as in the same model with unrolled layers."
        )
    place = scope.placement(plan.path)
    if place is not None and place.parts(0) > 1:
        return f"they lie on several devices ({place.spec}). Cut another axis."
    if plan.grouped and len(plan.shape) == 1:
        return (
            "its only axis is that of the layers, and groups of codes lie along it. Leave it "
            f"uncompressed: Policy(exclude=('{plan.path}',))."
        )
    if plan.block is None:
        return None
    block = plan.block.fit(plan.shape, plan.path)
    if 0 in block.axes or (block.heads is not None and block.heads[0] == 0):
        kept = tuple(range(1, len(plan.shape)))
        return (
            f"the layers share a second moment ({block.words or f'a mean over {block.axes}'}). "
            f"Give each layer its own: Structure(rules=[('{plan.path}', {kept})])."
        )
    values = block.values((1, *plan.shape[1:]))
    for slot in plan.shared:
        if slot.codec is not None and values % plan.group_size:
            return (
                f"its {slot.name} has {values} values per layer in groups of {plan.group_size}, "
                "which lie across layers. Keep it in f32: "
                f"Policy(exclude=('{slot.name}:{plan.path}',))."
            )
    return None


def after(x: object, earlier: object) -> Any:
    """`x`, which must wait until `earlier` is there.

    Inside a `shard_map` with check_vma, where the fence would make what devices have in common
    differ from device to device, it does not wait: that costs memory only.
    """
    kinds = {varying.axes_of(leaf) for leaf in jax.tree.leaves(x)}
    if len(kinds) != 1 or not varying.axes_of(earlier) <= min(kinds):
        return x
    return lax.optimization_barrier((x, earlier))[0]


def groups_of_blocks(plan: LeafPlan, layers: int) -> int:
    """Of one layer, in the codes of shared slots."""
    if plan.block is None:
        return 0
    return plan.block.values(plan.shape) // layers // plan.group_size


def read(tree: object, layer: jax.Array, layers: int) -> Any:
    """A layer's part of each array, fenced; 0-d placeholders have none.

    Without the fence XLA's CPU backend sees that a part is read of what is written, and copies the
    whole stack.
    """

    def part(x: jax.Array) -> jax.Array:
        if x.ndim == 0:
            return x
        size = x.shape[0] // layers
        return lax.dynamic_slice_in_dim(x, layer * size, size, 0)

    return lax.optimization_barrier(jax.tree.map(part, tree))


def write(tree: object, parts: object, layer: jax.Array, layers: int) -> Any:
    """The arrays with a layer's part anew, in place where the old one is not used any more."""

    def whole(x: jax.Array, part: jax.Array) -> jax.Array:
        if x.ndim == 0:
            return x
        size = x.shape[0] // layers
        return lax.dynamic_update_slice_in_dim(x, part, layer * size, 0)

    return jax.tree.map(whole, tree, lax.optimization_barrier(parts))
