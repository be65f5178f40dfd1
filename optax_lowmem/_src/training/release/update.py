"""The update of one layer of stacked parameters, or of parameters outside of stacks."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.arrays import random
from optax_lowmem._src.arrays.shards import Shards
from optax_lowmem._src.arrays.typing import Arrays
from optax_lowmem._src.kernels import step_arguments
from optax_lowmem._src.optim.step import LeafPlan
from optax_lowmem._src.optim.step.engine import Engine, count_and_keys, step_leaves
from optax_lowmem._src.optim.step.rule import MatrixRule, UpdateRule
from optax_lowmem._src.optim.step.state import Leaf, LeafBatch
from optax_lowmem._src.optim.wrappers.chain import clipping_factor, norm_of
from optax_lowmem._src.training.release.model import Parts, Stack

# ---- one layer of stacked leaves: whether it can be stepped alone; reading and writing it --------


def layer_plan(rule: UpdateRule, plan: LeafPlan, layers: int, per_layer: bool) -> LeafPlan:
    """Return the plan of one layer from that of its stacked leaf; axis 0 is kept, with size 1.

    `layers` is the number in the stack. With `per_layer`, a rule that reduces over a whole tensor
    reduces over each layer. Raises ValueError if the layers cannot be stepped one by one.
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
    rule = rule.for_leaf(plan.matrices)
    measures = rule.prepares == "leaf" or (isinstance(rule, MatrixRule) and rule.of_whole_leaf)
    if measures and not per_layer:
        return (
            f"{type(rule).__name__} reduces over a whole tensor before it steps. per_layer=True "
            "reduces over each layer separately, as in the same model with unrolled layers."
        )
    if plan.matrices is not None and 0 in (*plan.matrices.rows, *plan.matrices.columns):
        return (
            "axis 0 is a row or column axis of its matrices. Leave it out of its "
            "MuonDimensionNumbers."
        )
    sharding = step_arguments.sharding(plan.path)
    if sharding is not None and Shards.of(sharding, len(plan.shape)).parts[0] > 1:
        return f"axis 0 is sharded ({sharding.spec}). Shard another axis."
    if plan.quantized and len(plan.shape) == 1:
        return (
            "its only axis is the layer axis, so groups of codes span layers. Leave it "
            f"uncompressed: Policy(exclude=('{plan.path}',))."
        )
    if plan.block is None:
        return None
    block = plan.block.fit(plan.shape, plan.path)
    if 0 in block.axes or (block.heads is not None and block.heads[0] == 0):
        kept = tuple(range(1, len(plan.shape)))
        instead = f"Structure(rules=[('{plan.path}', {kept})])"
        if len(block.parts) > 1:
            instead = f"min_dim_size_to_factor={plan.shape[0] + 1}"
        return (
            "the layers share a second moment "
            f"({block.description or f'a mean over {block.axes}'}). "
            f"Give each layer a separate one: {instead}."
        )
    values = block.values((1, *plan.shape[1:]))
    for slot in plan.blockwise:
        if slot.codec is not None and values % plan.group_size:
            return (
                f"its {slot.name} has {values} values per layer in groups of {plan.group_size}, "
                "which span layers. Keep it in f32: "
                f"Policy(exclude=('{slot.name}:{plan.path}',))."
            )
    return None


def read_layer(tree: object, layer: jax.Array, layers: int) -> Any:
    """Slice one layer of each array, behind an optimization barrier.

    Without the barrier, XLA's CPU backend copies the whole stack, since it is read and written.
    """

    def part(x: jax.Array) -> jax.Array:
        size = x.shape[0] // layers
        return lax.dynamic_slice_in_dim(x, layer * size, size, 0)

    return lax.optimization_barrier(jax.tree.map(part, tree))


def write_layer(tree: object, parts: object, layer: jax.Array, layers: int) -> Any:
    """Write one layer of each array, in place if the old array is not used any more."""

    def whole(x: jax.Array, part: jax.Array) -> jax.Array:
        size = x.shape[0] // layers
        return lax.dynamic_update_slice_in_dim(x, part, layer * size, 0)

    return jax.tree.map(whole, tree, lax.optimization_barrier(parts))


# weights, states, states of block-wise slots
LeafArrays = tuple[list[jax.Array], list[Leaf], list[Leaf]]


@dataclasses.dataclass(frozen=True, eq=False)
class Plans:
    """Static decisions about the update of each leaf.

    `whole` are the plans of the whole leaves, `of_layers` those of one layer of stacked leaves.
    """

    engine: Engine
    parts: Parts
    whole: list[LeafPlan]
    of_layers: dict[int, LeafPlan]

    @classmethod
    def make(
        cls, engine: Engine, parts: Parts, params: Any, state: Any, per_layer: bool
    ) -> "Plans":
        """Plan; raise ValueError if a leaf of a stack cannot be stepped layer by layer."""
        whole = engine.plans(params, state, returns_params=True)
        of_layers = {
            i: layer_plan(engine.rule, whole[i], stack.layers, per_layer)
            for stack in parts.stacks.values()
            for i in stack.trained
        }
        return cls(engine, parts, whole, of_layers)


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """The update of one step.

    `limit`, if any, limits the norm of the gradient of each layer, and of each leaf of the rest.
    """

    plans: Plans
    h: Arrays
    count: jax.Array
    keys: jax.Array
    limit: float | None

    @classmethod
    def begin(
        cls, plans: Plans, count: jax.Array, seed: jax.Array, limit: Any, factor: jax.Array | None
    ) -> "Update":
        """Return the update after `count` steps; `factor` multiplies all gradients."""
        h = plans.engine.hyperparameters(count)
        count, keys = count_and_keys(seed, count, None, [plan.path for plan in plans.whole])
        return cls(plans, _scaled(h, factor), count, keys, limit)

    def layer(
        self, stack: Stack, layer: jax.Array, gradients: list[jax.Array], leaves: LeafArrays
    ) -> LeafArrays:
        """Step one layer and return its new (weights, states, block-wise states).

        `leaves` are the old ones, with a layer axis of size 1.
        """
        plans = [self.plans.of_layers[i] for i in stack.trained]
        whole = [self.plans.whole[i] for i in stack.trained]
        keys = self.keys[jnp.asarray(stack.trained)]
        layer_keys = random.part_keys(keys, layer)
        single = [len(plan.shape) == 1 for plan in whole]
        if any(single):
            of_elements = random.element_keys(keys, layer, plans[0].group_size)
            layer_keys = jnp.where(jnp.asarray(single)[:, None], of_elements, layer_keys)
        groups = [  # of codes per layer, for block-wise slots
            plan.block.values(plan.shape) // stack.layers // plan.group_size if plan.block else 0
            for plan in whole
        ]
        blockwise_keys = random.part_keys(keys, layer * jnp.asarray(groups, jnp.int32))
        gradients = [g[None] for g in gradients]
        return self._step(plans, gradients, leaves, layer_keys, blockwise_keys)

    def rest(
        self, indices: Sequence[int], gradients: list[jax.Array], leaves: LeafArrays
    ) -> LeafArrays:
        """Step leaves of the rest and return their new (weights, states, block-wise states)."""
        plans = [self.plans.whole[i] for i in indices]
        keys = self.keys[jnp.asarray(indices)]
        if self.limit is None:
            return self._step(plans, gradients, leaves, keys, keys)
        stepped: Any = [
            self._step([plan], [g], tuple([x] for x in leaf), key[None], key[None])
            for plan, g, key, *leaf in zip(plans, gradients, keys, *leaves, strict=True)
        ]
        weights, states, blockwise = ([row[i][0] for row in stepped] for i in range(3))
        return weights, states, blockwise

    def _step(
        self, plans: list[LeafPlan], gradients: Any, leaves: Any, keys: Any, blockwise_keys: Any
    ) -> LeafArrays:
        h, (weights, states, blockwise) = self.h, leaves
        if self.limit is not None:
            h = _scaled(h, clipping_factor(self.limit, norm_of(gradients)))
        batch = LeafBatch.of(
            plans,
            [s._replace(g=g, p=p) for s, g, p in zip(states, gradients, weights, strict=True)],
            h,
            keys,
            blockwise=blockwise,
            blockwise_keys=blockwise_keys,
            implementation=step_arguments.current().implementation,
        )
        new, blockwise = step_leaves(self.plans.engine.rule, batch)
        return [leaf.p for leaf in new], [leaf.state for leaf in new], blockwise


def _scaled(h: Arrays, factor: jax.Array | None) -> Arrays:
    return h if factor is None else {**h, "gradient_scale": factor}


def squares_of(gradients: Iterable[jax.Array]) -> jax.Array:
    """Return the sum of the squares of gradients, in f32."""
    return sum((jnp.sum(jnp.square(g.astype(jnp.float32))) for g in gradients), jnp.float32(0))
