"""From an update rule to an optax transformation whose state is stored as `Storage` says."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.core import (
    boxes,
    derivative,
    explicit,
    numerics,
    platform,
    random,
    scope,
    trees,
    varying,
)
from optax_lowmem._src.core.compiled import (
    FEW,
    as_given,
    compiled,
    each,
    is_eager,
    is_free,
    unstacked,
    widened,
)
from optax_lowmem._src.core.policy import warn_of_patterns
from optax_lowmem._src.core.rules import UpdateRule
from optax_lowmem._src.update import LeafPlan, LeafState, SlotPlan, fused_updates, shared_updates
from optax_lowmem._src.update.masters import (
    NO_CORRECTION,
    check_order,
    initial_correction,
    promoted,
)
from optax_lowmem._src.update.planner import Planner

Hyperparameters = Callable[[jax.Array], Mapping[str, jax.Array]]


class Optimizer(optax.GradientTransformationExtraArgs):
    """An optax transformation that remembers the engine behind it."""

    engine: "Engine"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Engine(Planner):
    """One optimizer: what is static (`Planner`), and the hyperparameters of a step.

    Attributes:
      hyperparameters: f32 scalars of a step from the count before it.
      schedules: names of the hyperparameters that were given as schedules.
    """

    hyperparameters: Hyperparameters
    schedules: frozenset[str] = frozenset()

    def transformation(self) -> "Optimizer":
        """The optax transformation."""
        transformation = Optimizer(self.init, self.update)
        transformation.engine = self
        return transformation

    # ---- state -------------------------------------------------------------------------------

    def init(self, params: Any) -> Any:
        """Zero state, of the parameters' sharding; f32 moments are never allocated on the way."""
        leaves = jax.tree.leaves(params)
        plans = self.plans(params)
        warn_of_patterns(self.storage.policy, params)
        if self.structure is not None:
            self.structure.warn(params)
        if is_free(leaves):
            slots, (count, scales, shared, none) = compiled(_zero_state)(plans, leaves)
        else:
            slots = _zero_slots(plans, leaves)
            count, scales, shared, none = compiled(_zeros)(plans)
        corrections = [
            nothing if plan.split is None else initial_correction(plan.split, plan.path, leaf)
            for plan, leaf, nothing in zip(plans, leaves, none, strict=True)
        ]
        rows = list(zip(plans, leaves, strict=True))
        scales, shared = _laid(rows, scales, shared)
        states = list(map(LeafState, slots, scales, corrections))
        seed = scope.provided_seed(self.storage.seed)
        return self._pack(count, seed, states, shared, params)

    def _pack(
        self,
        count: jax.Array,
        seed: jax.Array,
        states: list[LeafState],
        shared: list[LeafState],
        params: Any,
        before: Any = None,
    ) -> Any:
        def like(field: str, arrays: list[Any]) -> Any:
            return boxes.like(params, arrays, getattr(before, field, None))

        fields: dict[str, Any] = {"count": count, "seed": seed}
        for slots, of_leaves in ((self._slots(False), states), (self._slots(True), shared)):
            for i, name in enumerate(slots):
                fields[name] = like(name, [s.slots[i] for s in of_leaves])
                fields[f"{name}_scale"] = like(f"{name}_scale", [s.scales[i] for s in of_leaves])
        corrections = [s.correction for s in states]
        fields["correction"] = like("correction", corrections) if self.weights else None
        return self.rule.state_type(**fields)

    def _slots(self, shared: bool) -> list[str]:
        return [slot.name for slot in self.rule.slots if slot.shared == shared]

    def _unpack(self, state: Any, plans: list[LeafPlan]) -> tuple[list[LeafState], list[LeafState]]:
        def column(field: str) -> list[jax.Array]:
            leaves = jax.tree.leaves(getattr(state, field))
            if len(leaves) != len(plans):
                raise ValueError(
                    f"the state's {field} has {len(leaves)} leaves for {len(plans)} parameters: "
                    "it was made for another tree. Call init on these parameters."
                )
            return leaves

        def rows(shared: bool) -> list[Any]:
            names = self._slots(shared)
            fields = [names, [f"{name}_scale" for name in names]]
            slots, scales = (
                list(zip(*map(column, field), strict=True)) or [()] * len(plans) for field in fields
            )
            return list(zip(slots, scales, strict=True))

        corrections = column("correction") if self.weights else [NO_CORRECTION] * len(plans)
        states, shared = (
            [
                LeafState(s, scales, c)
                for (s, scales), c in zip(rows(which), corrections, strict=True)
            ]
            for which in (False, True)
        )
        for plan, leaf, of_blocks in zip(plans, states, shared, strict=True):
            _check_leaf(plan, leaf)
            if plan.block is not None:
                _check_slots(plan.of_blocks, of_blocks, plan.block.mean_shape(plan.shape))
        return states, shared

    # ---- step --------------------------------------------------------------------------------

    def update(
        self,
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        gradient_scale: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[Any, Any]:
        """One step; `extra` is accepted as optax's wrappers pass it, and not used."""
        del extra
        return self._next(updates, state, params, gradient_scale, direct=False)

    def apply(
        self, updates: Any, state: Any, params: Any, gradient_scale: jax.Array | None = None
    ) -> tuple[Any, Any]:
        """New parameters and state: `update` and `optax.apply_updates` at once."""
        return self._next(updates, state, params, gradient_scale, direct=True)

    def _next(
        self,
        updates: Any,
        state: Any,
        params: Any,
        gradient_scale: jax.Array | None,
        direct: bool,
    ) -> tuple[Any, Any]:
        trees.check_state(state, self.rule.state_type)
        h = self.hyperparameters(state.count)
        if gradient_scale is not None:
            h = {**h, "gradient_scale": gradient_scale}
        return self.step(updates, state, params, h, direct=direct)

    def step(
        self,
        updates: Any,
        state: Any,
        params: Any,
        h: Mapping[str, jax.Array],
        count: jax.Array | None = None,
        direct: bool = False,
    ) -> tuple[Any, Any]:
        """Updates (or new parameters, if `direct`) and state; `count` is the new one, if given."""
        if self.weights and params is None:
            params = self._stand_in(updates, state, h)
        reference = updates if params is None else params
        plans = self.plans(reference, state)
        gradients = trees.match("gradient", updates, reference)
        weights = jax.tree.leaves(params) if self.weights else [None] * len(plans)
        if self.weights:
            check_order(gradients, params, state.correction)
        if any(plan.split or any(s.codec for s in (*plan.slots, *plan.shared)) for plan in plans):
            gradients, weights, h = derivative.without((gradients, weights, dict(h)))
        opened = self.open(state, plans, h, count)
        static = [dataclasses.replace(plan, direct=direct) for plan in plans]
        results, states, shared = opened.advance(
            static, gradients, weights, opened.states, opened.shared, opened.keys
        )
        for plan, update in zip(plans, results, strict=True):
            if plan.split is not None and not direct:
                scope.emit(plan.path, update)
        if not self.weights and self.storage.update_dtype == "param":
            results = as_given(results, gradients)
        results = jax.tree.unflatten(jax.tree.structure(reference), results)
        return results, opened.close(states, shared, reference)

    def _stand_in(self, updates: Any, state: Any, h: Mapping[str, jax.Array]) -> Any:
        """Return stand-ins for parameters that are not given: f32 arrays whose values are not read.

        Raises:
          ValueError: where the step needs the parameters themselves, with the reason.
        """
        reason = None
        narrow_masters = self.storage.master_weight_bits is not None
        corrected = [name for name, c in trees.named_leaves(state.correction) if jnp.ndim(c)]
        corrected += [
            name
            for name, g in trees.named_leaves(updates)
            if narrow_masters and not jnp.ndim(g) and numerics.is_narrow(jnp.result_type(g))
        ]
        if corrected:
            reason = f"the state corrects the 16-bit weight '{corrected[0]}'"
        elif "decay" in h or "l2" in h:
            reason = "weight decay takes a share of it"
        elif self.storage.update_dtype == "param":
            reason = "update_dtype='param' asks for its dtype"
        if reason is not None:
            raise ValueError(f"{trees.NO_PARAMS_MSG} It is needed because {reason}.")
        return widened(updates)

    def open(
        self,
        state: Any,
        plans: list[LeafPlan],
        h: Mapping[str, jax.Array],
        count: jax.Array | None = None,
    ) -> "OpenStep":
        """A step whose leaves may be advanced one after another; `count` as of `step`."""
        states, shared = self._unpack(state, plans)
        paths = [plan.path for plan in plans]
        count, keys, alive = _of_step(state.seed, state.count, count, paths)
        return OpenStep(self, h, count, state, states, shared, keys, alive)


@dataclasses.dataclass(frozen=True)
class OpenStep:
    """One step of an engine between the old state and the new one.

    Attributes:
      engine: whose step it is.
      h: hyperparameters.
      count: the new one.
      before: the old state.
      states: the old states of the leaves.
      shared: the old states of their shared slots.
      keys: uint32 [leaves].
      alive: a traced True (see `fused_update.packed`).
    """

    engine: Engine
    h: Mapping[str, jax.Array]
    count: jax.Array
    before: Any
    states: list[LeafState]
    shared: list[LeafState]
    keys: jax.Array
    alive: jax.Array

    def advance(
        self,
        plans: list[LeafPlan],
        gradients: list[jax.Array],
        weights: list[Any],
        states: list[LeafState],
        shared: list[LeafState],
        keys: jax.Array,
        shared_keys: jax.Array | None = None,
    ) -> tuple[list[jax.Array], list[LeafState], list[LeafState]]:
        """(updates, states, states of shared slots) of some leaves, or of parts of them.

        Args:
          plans: what they are; `direct` ones get new weights instead of updates.
          gradients: f32 or 16-bit.
          weights: parameters, or None each for a bare direction.
          states: the old ones.
          shared: the old ones of the shared slots.
          keys: uint32 [leaves], or `random.part_keys` of them.
          shared_keys: those of the shared slots, where they are others.
        """
        own = keys if shared_keys is None else shared_keys
        implementation = scope.implementation()
        arrays = self.engine.rule, implementation, self.h, self.alive
        if (
            len(plans) > FEW
            and platform.no_device_reason() is not None
            and implementation in (None, "xla")
            and is_eager(jax.tree.leaves((gradients, weights, states, shared, keys, self.h)))
        ):
            rows = zip(
                [plan.nameless for plan in plans], gradients, weights, states, shared,
                unstacked(keys), unstacked(own), strict=True,
            )  # fmt: skip
            found = each(_advance_leaf, list(rows), *arrays)
            return [u for u, _, _ in found], [s for _, s, _ in found], [s for _, _, s in found]
        # on a mesh the leaves' places are known to the context, and to no program
        run = _advance if scope.is_placing() else compiled(_advance)
        return run(*arrays, plans, gradients, weights, states, shared, keys, own)

    def close(self, states: list[LeafState], shared: list[LeafState], params: Any) -> Any:
        """The new state, of a tree like the parameters."""
        before = self.before
        return self.engine._pack(self.count, before.seed, states, shared, params, before)


@compiled
def _of_step(
    seed: jax.Array, before: jax.Array, count: jax.Array | None, paths: list[str]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The new count, the keys of the leaves, and whether the count is over 0."""
    if count is None:
        count = optax.safe_increment(before)
    return count, random.leaf_keys(seed, count, paths), count > 0


def _advance(
    rule: UpdateRule,
    implementation: str | None,
    h: Mapping[str, jax.Array],
    alive: jax.Array,
    plans: list[LeafPlan],
    gradients: list[jax.Array],
    weights: list[Any],
    states: list[LeafState],
    shared: list[LeafState],
    keys: jax.Array,
    shared_keys: jax.Array,
) -> tuple[list[jax.Array], list[LeafState], list[LeafState]]:
    """`OpenStep.advance` of all that it depends on."""
    of_blocks = None
    if rule.of_blocks is not None:
        blocks = shared_updates(
            rule, plans, gradients, shared, h, shared_keys, alive, implementation
        )
        of_blocks, shared = [given for given, _ in blocks], [new for _, new in blocks]
    found = fused_updates(
        rule, plans, gradients, weights, states, h, keys, alive, implementation,
        of_blocks=of_blocks,
    )  # fmt: skip
    return [update for update, _ in found], [leaf for _, leaf in found], shared


def _advance_leaf(
    plan: LeafPlan,
    gradient: jax.Array,
    weight: Any,
    state: LeafState,
    shared: LeafState,
    key: jax.Array,
    shared_key: jax.Array,
    *arrays: Any,
) -> tuple[jax.Array, LeafState, LeafState]:
    """`_advance` of one leaf."""
    row = [plan], [gradient], [weight], [state], [shared], key[None], shared_key[None]
    advance: Any = _advance
    (update,), (new,), (of_blocks,) = advance(*arrays, *row)
    return update, new, of_blocks


def _zero_state(plans: list[LeafPlan], leaves: list[Any]) -> Any:
    return _zero_slots(plans, leaves), _zeros(plans)


def _zero_slots(plans: list[LeafPlan], leaves: list[Any]) -> list[tuple[jax.Array, ...]]:
    """Of each leaf the slots with a value an element, which lie where it does."""
    rows = zip(plans, leaves, strict=True)
    return [tuple(jnp.zeros_like(leaf, dtype=s.dtype) for s in plan.slots) for plan, leaf in rows]


def _zeros(
    plans: list[LeafPlan],
) -> tuple[jax.Array, list[tuple[jax.Array, ...]], list[LeafState], list[jax.Array]]:
    """The count, and of each leaf its scales, the state of its shared slots, and no correction."""
    scales = [tuple(_zero_scales(plan, slot) for slot in plan.slots) for plan in plans]
    shared = [_zero_shared(plan) for plan in plans]
    return jnp.zeros((), jnp.int32), scales, shared, [jnp.zeros((), jnp.int8) for _ in plans]


def _laid(
    leaves: list[tuple[LeafPlan, Any]], scales: list[Any], shared: list[LeafState]
) -> tuple[list[Any], list[LeafState]]:
    """Scales and shared slots where each parameter lies on Explicit axes, as steps leave them."""

    def laid(plan: LeafPlan, leaf: Any, tree: Any) -> Any:
        def one(x: jax.Array) -> jax.Array:
            own = explicit.of_state(plan.path, leaf, x.shape, plan.group_size)
            return explicit.laid(x, own)

        return jax.tree.map(one, tree)

    return (
        [laid(*row, own) for row, own in zip(leaves, scales, strict=True)],
        [laid(*row, own) for row, own in zip(leaves, shared, strict=True)],
    )


def _zero_shared(plan: LeafPlan) -> LeafState:
    nothing = jnp.zeros((), jnp.int8)
    if plan.block is None:
        return LeafState((), (), nothing)
    shape = plan.block.mean_shape(plan.shape)
    slots = tuple(jnp.zeros(shape, slot.dtype) for slot in plan.shared)
    scales = tuple(_zero_scales(plan.of_blocks, slot) for slot in plan.shared)
    return LeafState(slots, scales, nothing)


def _scale_dtype(slot: SlotPlan) -> jnp.dtype:
    return slot.codec.scale.dtype if slot.codec else jnp.dtype(jnp.float32)


def _zero_scales(plan: LeafPlan, slot: SlotPlan) -> jax.Array:
    return jnp.zeros(plan.scale_shape(slot), _scale_dtype(slot))


def _check_leaf(plan: LeafPlan, state: LeafState) -> None:
    """Raises where a state was made, or restored, with other settings than these."""
    _check_slots(plan, state, plan.shape)
    shape, dtype = (plan.shape, plan.split.dtype) if plan.split else ((), jnp.int8)
    _check_array(plan, "correction", state.correction, shape, dtype)


def _check_slots(plan: LeafPlan, state: LeafState, shape: tuple[int, ...]) -> None:
    for slot, stored, scales in zip(plan.slots, state.slots, state.scales, strict=True):
        _check_array(plan, slot.name, stored, shape, slot.dtype)
        scale_shape = plan.scale_shape(slot)
        _check_array(plan, f"{slot.name}_scale", scales, scale_shape, _scale_dtype(slot))


def _check_array(plan: LeafPlan, field: str, array: Any, shape: tuple, dtype: Any) -> None:
    if jnp.shape(array) == shape and jnp.dtype(array.dtype) == jnp.dtype(dtype):
        return
    hint = ""
    if field == "correction" and plan.dtype == jnp.float32 and jnp.shape(array) == plan.shape:
        raise ValueError(promoted(plan.path, array.dtype))
    if varying.of_parts() and field.endswith("_scale"):
        hint = (
            " In a shard_map a device's part has to be of whole groups, with the scales of those: "
            "see docs/sharding.md, or leave the step to jit with shardings."
        )
    if field == "correction":
        hint = (
            " If weights were cast after tx.init, begin with params, state = "
            "lowmem.init(tx, params_f32) instead."
        )
    raise ValueError(
        f"state field {field} of '{plan.path}' is {array.dtype}{list(jnp.shape(array))}, but this "
        f"storage (group_size={plan.group_size}, parameter {plan.dtype}{list(plan.shape)}) keeps "
        f"{jnp.dtype(dtype)}{list(shape)}. The state was made or restored with other settings: use "
        f"those, or call init again.{hint}"
    )
