"""The leaves of a tree while a step updates them, some before others have a gradient."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.core import random, trees
from optax_lowmem._src.release import stack as stacks
from optax_lowmem._src.release.model import Layered, Parts, Stack, take_apart
from optax_lowmem._src.update import LeafPlan, LeafState
from optax_lowmem._src.update.engine import Engine, count_and_keys, step_leaves

Gradient = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(eq=False)
class Run:
    """One step: every leaf of the tree, old until it is updated.

    Attributes:
      engine: the optimizer.
      h: hyperparameters of the step.
      count: the new one.
      keys: of the leaves, uint32 [leaves].
      before: the old state.
      parts: the parameters taken apart.
      plans: of the whole leaves.
      of_layers: plans of one layer of stacked leaves, by index.
      weights: parameters.
      states: of the leaves.
      shared: of their shared slots.
      totals: gradients so far of leaves of the rest, by index.
      each: to be applied to every gradient.
    """

    engine: Engine
    h: Mapping[str, jax.Array]
    count: jax.Array
    keys: jax.Array
    before: Any
    parts: Parts
    plans: list[LeafPlan]
    of_layers: dict[int, LeafPlan]
    weights: list[jax.Array]
    states: list[LeafState]
    shared: list[LeafState]
    totals: dict[int, jax.Array]
    each: Gradient

    @classmethod
    def begin(
        cls,
        engine: Engine,
        model: Layered,
        params: optax.Params,
        state: optax.OptState,
        each: Gradient | None,
        per_layer: bool,
    ) -> "Run":
        """Everything old, and checked: each leaf of a stack can be stepped layer by layer."""
        trees.check_state(state, engine.rule.state_type)
        plans = engine.plans(params, state, direct=True)
        parts = take_apart(params, tuple(model.layers))
        of_layers = {
            i: stacks.layer_plan(engine.rule, plans[i], stack.layers, per_layer)
            for stack in parts.stacks.values()
            for i in stack.indices
        }
        h = engine.hyperparameters(state.count)
        states, shared = engine.unpack(state, plans)
        paths = [plan.path for plan in plans]
        count, keys = count_and_keys(state.seed, state.count, None, paths)
        return cls(
            engine, h, count, keys, state, parts, plans, of_layers, jax.tree.leaves(params), states,
            # theirs is that of the leaf, which is in its state
            [s._replace(correction=jnp.zeros((), jnp.int8)) for s in shared],
            {}, each or (lambda g: g),
        )  # fmt: skip

    def result(self, params: optax.Params) -> tuple[Any, Any]:
        """The new parameters and state."""
        treedef: Any = jax.tree.structure(params)
        before = self.before
        state = self.engine.pack(self.count, before.seed, self.states, self.shared, params, before)
        return treedef.unflatten(self.weights), state

    def add(self, positions: Sequence[int], gradients: Sequence[jax.Array]) -> None:
        """Gradients of leaves of the rest, by position in it."""
        for at, g in zip(positions, gradients, strict=True):
            i = self.parts.indices[at]
            self.totals[i] = self.totals[i] + g if i in self.totals else g

    def update_rest(self, positions: Sequence[int], then: object) -> Any:
        """Steps leaves of the rest; what comes `then` waits for it, and so frees the gradients."""
        indices = [self.parts.indices[at] for at in positions]
        if not indices:
            return then
        unread = [i for i in indices if i not in self.totals]
        gradients = {i: jnp.zeros_like(self.weights[i]) for i in unread} | self.totals
        found = step_leaves(
            self.engine.rule,
            self.h,
            [self.plans[i] for i in indices],
            [self.each(gradients[i]) for i in indices],
            *self.of(indices),
            self.keys[jnp.asarray(indices)],
        )
        for i in indices:
            self.totals.pop(i, None)
        self.set(indices, *found)
        return stacks.after(then, found)

    def update_layer(
        self, stack: Stack, layer: jax.Array, gradients: list[jax.Array], leaves: Any
    ) -> Any:
        """The `leaves` of one layer (weights, states, shared states), stepped.

        Args:
          stack: which leaves.
          layer: which layer.
          gradients: of the layer, with `each` applied.
          leaves: with the axis of layers, of size 1.
        """
        plans = [self.of_layers[i] for i in stack.indices]
        weights, states, shared = leaves
        keys = self.keys[jnp.asarray(stack.indices)]
        own = random.part_keys(keys, layer)
        single = [len(self.plans[i].shape) == 1 for i in stack.indices]
        if any(single):
            of_elements = random.element_keys(keys, layer, plans[0].group_size)
            own = jnp.where(jnp.asarray(single)[:, None], of_elements, own)
        groups = [stacks.groups_of_blocks(self.plans[i], stack.layers) for i in stack.indices]
        return step_leaves(
            self.engine.rule,
            self.h,
            plans,
            [g[None] for g in gradients],
            weights,
            states,
            shared,
            own,
            random.part_keys(keys, layer * jnp.asarray(groups, jnp.int32)),
        )

    def of(
        self, indices: Sequence[int]
    ) -> tuple[list[jax.Array], list[LeafState], list[LeafState]]:
        """Weights, states and states of shared slots of some leaves."""
        weights = [self.weights[i] for i in indices]
        return weights, [self.states[i] for i in indices], [self.shared[i] for i in indices]

    def set(self, indices: Sequence[int], weights: Any, states: Any, shared: Any) -> None:
        """Puts the new ones in their place."""
        for i, *new in zip(indices, weights, states, shared, strict=True):
            self.weights[i], self.states[i], self.shared[i] = new
