"""`Engine`: makes an optax transformation from an `UpdateRule` and a `Storage`.

A step plans the leaves, unpacks the state, steps the leaves and packs the new state.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.codecs import StoredSlot
from optax_lowmem._src.core import (
    array_metadata,
    context,
    derivative,
    explicit,
    numerics,
    random,
    trees,
    varying,
)
from optax_lowmem._src.core.block import BlockStructure
from optax_lowmem._src.core.compiled import (
    FEW,
    compiled,
    each,
    is_eager,
    is_free,
    unstacked,
)
from optax_lowmem._src.core.hyperparameters import check_schedule
from optax_lowmem._src.core.policy import warn_of_patterns
from optax_lowmem._src.kernels import platform
from optax_lowmem._src.step import LeafPlan, LeafState, choose, fused_updates, matrices
from optax_lowmem._src.step.batch import LeafBatch
from optax_lowmem._src.step.masters import check_order, initial_correction, promoted, rounds_weights
from optax_lowmem._src.step.matrix_axes import MatrixAxes
from optax_lowmem._src.step.plan import SlotPlan, plan_leaves, warn_of_four_bits
from optax_lowmem._src.step.prepare import prepare_leaves
from optax_lowmem._src.step.rule import MatrixRule, UpdateRule
from optax_lowmem._src.step.storage import Storage

Hyperparameters = Callable[[jax.Array], Mapping[str, jax.Array]]


class EngineTransformation(optax.GradientTransformationExtraArgs):  # type: ignore[misc]  # optax has no types
    """An optax transformation with a reference to its engine."""

    engine: "Engine"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Engine:
    """An optimizer: its static settings and its hyperparameters.

    Attributes:
      rule: the optimizer's arithmetic.
      storage: how the state is stored.
      hyperparameters: returns the f32 scalars of a step, given the count before it.
      schedules: the hyperparameters that were given as schedules, by name.
      weights: whether to update weights (learning rate, decay, split) or to return directions.
      decay_mask: optax-style mask of weight decay.
      slot_dtypes: dtypes of uncompressed slots, by default f32.
      structure: which elements share a value of block-wise slots.
      matrices: which leaves are matrices, for rules that treat these differently.
    """

    rule: UpdateRule
    storage: Storage
    hyperparameters: Hyperparameters
    schedules: Mapping[str, Callable[[jax.Array], Any]] = dataclasses.field(default_factory=dict)
    weights: bool = True
    decay_mask: optax.MaskOrFn = None
    slot_dtypes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    structure: BlockStructure | None = None
    matrices: MatrixAxes | None = None

    def transformation(self) -> "EngineTransformation":
        """Return the optax transformation."""
        transformation = EngineTransformation(self.init, self.update)
        transformation.engine = self
        return transformation

    def plans(
        self, params: optax.Params, state: optax.OptState | None = None, direct: bool = False
    ) -> list[LeafPlan]:
        """Return `plan_leaves` with the settings of this optimizer."""
        return plan_leaves(
            self.rule, self.storage, params, state, weights=self.weights,
            decay_mask=self.decay_mask, slot_dtypes=self.slot_dtypes, structure=self.structure,
            matrices=self.matrices, direct=direct,
        )  # fmt: skip

    # ---- state -------------------------------------------------------------------------------

    def init(self, params: optax.Params) -> Any:
        """Return a zero state with the parameters' sharding, without allocating f32 moments."""
        for name, schedule in self.schedules.items():
            check_schedule(name, schedule)
        leaves = jax.tree.leaves(params)
        plans = self.plans(params)
        for plan in plans:
            own = self.rule.of_leaf(plan.matrices)
            context.record(context.Decision(plan.path, "step", *choose(own, plan)))
        warn_of_patterns(self.storage.policy, params)
        if self.structure is not None:
            self.structure.warn(params)
        warn_of_four_bits(plans)
        forms, of_shared = [plan.storage for plan in plans], [p.shared_storage for p in plans]
        if is_free(leaves):
            made = compiled(_zero_state)(plans, leaves, forms, of_shared)
            slots, (count, scales, shared, none) = made
        else:
            slots = _zero_slots(plans, leaves, forms)
            count, scales, shared, none = compiled(_zeros)(forms, of_shared)
        columns = self._placeholders(len(plans))
        rows = zip(plans, leaves, slots, scales, shared, none, strict=True)
        for i, (plan, leaf, codes, of_codes, of_blocks, nothing) in enumerate(rows):
            columns["correction"][i] = nothing
            if plan.split is not None:
                columns["correction"][i] = initial_correction(plan.split, plan.path, leaf)
            of_codes, of_blocks = _resharded(plan, leaf, (of_codes, of_blocks))
            stored = [*zip(plan.slots, codes, of_codes, strict=True)]
            stored += zip(plan.shared, *of_blocks, strict=True)
            for slot, values, of_values in stored:
                columns[slot.name][i], columns[f"{slot.name}_scale"][i] = values, of_values
        seed = context.provided_seed(self.storage.seed)
        return self._state(count, seed, columns, params)

    def pack(
        self,
        count: jax.Array,
        plans: list[LeafPlan],
        states: list[LeafState],
        shared: list[LeafState],
        params: optax.Params,
        before: optax.OptState,
    ) -> Any:
        """Return the state after a step, which replaces arrays of the state before.

        Placeholders of missing slots, scales and corrections are reused: a new one would be a copy
        of a constant, and so one launch per parameter.
        """
        columns = {name: jax.tree.leaves(getattr(before, name)) for name in self._fields()}
        for i, (plan, state, of_blocks) in enumerate(zip(plans, states, shared, strict=True)):
            if state.correction is not None:
                columns["correction"][i] = state.correction
            for slots, stored in ((plan.slots, state), (plan.shared, of_blocks)):
                scales = iter(stored.scales)
                for slot, values in zip(slots, stored.slots, strict=True):
                    columns[slot.name][i] = values
                    if slot.codec is not None:
                        columns[f"{slot.name}_scale"][i] = next(scales)
        return self._state(count, before.seed, columns, params, before)

    def _state(
        self,
        count: jax.Array,
        seed: jax.Array,
        columns: Mapping[str, list[Any]],
        params: optax.Params,
        before: optax.OptState | None = None,
    ) -> Any:
        """Build a state, with trees like the parameters, from the arrays of each field."""
        trees_of = {
            name: array_metadata.like(params, arrays, getattr(before, name, None))
            for name, arrays in columns.items()
            if name != "correction" or self.weights
        }
        state = {"correction": None, **trees_of}
        return self.rule.state_type(count=count, seed=seed, **state)

    def _fields(self) -> list[str]:
        """Return the names of the state's fields that have one array per parameter."""
        slots = [field for slot in self.rule.slots for field in (slot.name, f"{slot.name}_scale")]
        return [*slots, "correction"] if self.weights else slots

    def _placeholders(self, count: int) -> dict[str, list[Any]]:
        """Return the fields of a new state, with placeholders for slots not all parameters have."""
        names = [slot.name for slot in self.rule.slots if slot.of_rest]
        fields = [field for name in names for field in (name, f"{name}_scale")]
        columns: dict[str, list[Any]] = {
            name: [None] * count for name in (*self._fields(), "correction")
        }
        return columns | (compiled(_zero_placeholders)(fields, count) if fields else {})

    def unpack(
        self, state: optax.OptState, plans: list[LeafPlan], params: optax.Params
    ) -> tuple[list[LeafState], list[LeafState]]:
        """Return the states of the leaves and of their shared slots, after checking both."""

        def column(field: str) -> list[jax.Array]:
            tree = getattr(state, field)
            leaves = jax.tree.leaves(tree)
            if len(leaves) != len(plans):
                raise ValueError(
                    f"the state's {field} has {len(leaves)} leaves for {len(plans)} parameters: "
                    "it was made for another tree, or in pack_small_leaves, which must then step "
                    "it. Call init with these parameters."
                )
            trees.check_state_tree(tree, params)
            return leaves

        columns = {name: column(name) for name in self._fields()}
        corrections = columns.pop("correction", [None] * len(plans))
        states: list[LeafState] = []
        shared: list[LeafState] = []
        for i, plan in enumerate(plans):
            arrays = {name: values[i] for name, values in columns.items()}
            for name in {slot.name for slot in self.rule.slots} - _names(plan):
                _check_array(plan, name, arrays[name], (), jnp.float32)
            _check_slots(plan, plan.slots, arrays, plan.storage)
            _check_slots(plan, plan.shared, arrays, plan.shared_storage)
            states.append(_leaf_state(plan.slots, arrays))
            shared.append(_leaf_state(plan.shared, arrays))
            if corrections[i] is not None:
                form = (plan.shape, plan.split.dtype) if plan.split else ((), jnp.int8)
                _check_array(plan, "correction", corrections[i], *form)
            if plan.split is not None:
                states[i] = states[i]._replace(correction=corrections[i])
        return states, shared

    # ---- step --------------------------------------------------------------------------------

    def update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        gradient_scale: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[Any, Any]:
        """Return updates and state; `extra` arguments of optax's wrappers are ignored."""
        del extra
        return self.run(updates, state, params, gradient_scale=gradient_scale)

    def step(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params,
        gradient_scale: jax.Array | None = None,
    ) -> tuple[Any, Any]:
        """Return new parameters and state: `update` and `optax.apply_updates` in one step."""
        return self.run(updates, state, params, gradient_scale=gradient_scale, direct=True)

    def run(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params,
        h: Mapping[str, jax.Array] | None = None,
        count: jax.Array | None = None,
        gradient_scale: jax.Array | None = None,
        direct: bool = False,
    ) -> tuple[Any, Any]:
        """Do `update`, or `step` if `direct`, optionally with other hyperparameters or count.

        Args:
          updates: gradients, f32 or 16-bit.
          state: the old state.
          params: the parameters, or None.
          h: hyperparameters; by default those at the state's count.
          count: the new count; by default the old one plus 1.
          gradient_scale: a factor of the gradients.
          direct: whether to return new parameters instead of updates.
        """
        trees.check_state(state, self.rule.state_type)
        h = self.hyperparameters(state.count) if h is None else h
        if gradient_scale is not None:
            h = {**h, "gradient_scale": gradient_scale}
        if self.weights and params is None:
            params = self._stand_in(updates, state, h)
        like = updates if params is None else params
        plans = self.plans(like, state, direct)
        gradients = trees.match("gradient", updates, like)
        weights = jax.tree.leaves(params) if self.weights else [None] * len(plans)
        if self.weights:
            check_order(gradients, params, state.correction)
        if any(plan.lands or any(s.codec for s in (*plan.slots, *plan.shared)) for plan in plans):
            gradients, weights, h = derivative.without((gradients, weights, dict(h)))
        states, shared = self.unpack(state, plans, like)
        paths = [plan.path for plan in plans]
        count, keys = count_and_keys(state.seed, state.count, count, paths)
        batch = LeafBatch(
            tuple(plans), gradients, weights, states, h, [{}] * len(plans), keys,
            tuple(range(len(plans))), context.step_arguments().implementation, shared, keys,
        )  # fmt: skip
        results, states, shared = step_leaves(self.rule, batch)
        for plan, update in zip(plans, results, strict=True):
            if not direct and plan.lands:
                context.emit(plan.path, update)
        if not self.weights and self.storage.update_dtype != "float32":
            results = trees.as_given(results, gradients)
        results = jax.tree.unflatten(jax.tree.structure(like), results)
        return results, self.pack(count, plans, states, shared, like, state)

    def _stand_in(
        self, updates: optax.Updates, state: optax.OptState, h: Mapping[str, jax.Array]
    ) -> Any:
        """Return substitutes for missing parameters: f32 arrays whose values are not used.

        Raises:
          ValueError: if the step needs the parameters, with the reason.
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
            reason = "weight decay uses its value"
        elif rounds_weights(self.storage) and any(map(_is_narrow, jax.tree.leaves(updates))):
            reason = "stochastic rounding of 16-bit weights uses its value"
        elif self.storage.update_dtype == "param":
            reason = "update_dtype='param' uses its dtype"
        if reason is not None:
            raise ValueError(f"{trees.NO_PARAMS_MSG} It is needed because {reason}.")
        return trees.widened(updates)


# ---- the leaves of a step ------------------------------------------------------------------------


def _is_narrow(x: jax.Array) -> bool:
    return numerics.is_narrow(jnp.result_type(x))


@compiled
def count_and_keys(
    seed: jax.Array, before: jax.Array, count: jax.Array | None, paths: list[str]
) -> tuple[jax.Array, jax.Array]:
    """Return the new count (or the given one) and the random keys, uint32 [leaves]."""
    if count is None:
        count = optax.safe_increment(before)
    return count, random.leaf_keys(seed, count, paths)


def step_leaves(
    rule: UpdateRule, batch: LeafBatch
) -> tuple[list[jax.Array], list[LeafState], list[LeafState]]:
    """Return (updates, states, states of block-wise slots) of parameters or their shards.

    Args:
      rule: the optimizer's arithmetic.
      batch: the parameters; if their plans are `direct`, the updates are new parameters.
    """
    rows = zip(batch.plans, batch.gradients, strict=True)
    batch = batch.replace(plans=tuple(plan.for_gradient(g.dtype) for plan, g in rows))
    if (
        len(batch) > FEW
        and platform.no_device_reason() is not None
        and batch.implementation in (None, "xla")
        and is_eager(jax.tree.leaves(batch))
    ):
        # compile once for all parameters of one shape
        assert batch.shared_keys is not None
        keys: list[Any] = unstacked(batch.keys)
        shared_keys: list[Any] = unstacked(batch.shared_keys)
        single = [
            (
                rule,
                batch.take([i]).nameless.replace(
                    keys=keys[number][None], shared_keys=shared_keys[number][None], numbers=(0,)
                ),
            )
            for i, number in enumerate(batch.numbers)
        ]
        columns = zip(*each(_step_leaves, single), strict=True)
        updates, states, shared = ([x for (x,) in column] for column in columns)
        return updates, states, shared
    # on a mesh the shardings are in the context, which is not part of the key of `compiled`
    run = _step_leaves if context.step_arguments().placements else compiled(_step_leaves)
    return run(rule, batch)


def _step_leaves(
    rule: UpdateRule, batch: LeafBatch
) -> tuple[list[jax.Array], list[LeafState], list[LeafState]]:
    """Do `step_leaves`, stepping the leaves of each rule `of_leaf` together."""
    parts: dict[UpdateRule, list[int]] = {}
    for i, plan in enumerate(batch.plans):
        parts.setdefault(rule.of_leaf(plan.matrices), []).append(i)
    if parts.keys() <= {rule}:
        return _step_alike(rule, batch)
    results: dict[int, tuple[jax.Array, LeafState, LeafState]] = {}
    for of_leaf, indices in parts.items():
        part = batch.take(indices).with_keys_in_order()
        h = rule.hyperparameters_of(part.plans[0].matrices, part.hyperparameters)
        result = _step_alike(of_leaf, part.replace(hyperparameters=h))
        results.update(zip(indices, zip(*result, strict=True), strict=True))
    updates, states, shared = zip(*(results[i] for i in range(len(batch))), strict=True)
    return list(updates), list(states), list(shared)


def _step_alike(
    rule: UpdateRule, batch: LeafBatch
) -> tuple[list[jax.Array], list[LeafState], list[LeafState]]:
    """Do `_step_leaves` for leaves with the same rule."""
    shared = batch.shared
    if isinstance(rule, MatrixRule):
        result = matrices.step_leaves(rule, batch.replace(shared=[], shared_keys=None))
    else:
        if rule.prepares is not None:
            batch, shared = prepare_leaves(rule, batch)
        result = fused_updates(rule, batch.replace(shared=[], shared_keys=None))
    return [update for update, _ in result], [leaf for _, leaf in result], shared


# ---- new states ----------------------------------------------------------------------------------


Forms = list[list[StoredSlot]]  # shapes and dtypes, indexed by leaf, then slot


def _zero_state(plans: list[LeafPlan], leaves: list[Any], forms: Forms, shared: Forms) -> Any:
    return _zero_slots(plans, leaves, forms), _zeros(forms, shared)


def _zero_slots(
    plans: list[LeafPlan], leaves: list[Any], forms: Forms
) -> list[tuple[jax.Array, ...]]:
    """Return the zero elementwise slots of each leaf, with its sharding."""
    return [
        tuple(explicit.filled(plan.path, leaf, s.codes, plan.group_size, 0) for s in own)
        for plan, leaf, own in zip(plans, leaves, forms, strict=True)
    ]


def _zeros(
    forms: Forms, shared: Forms
) -> tuple[jax.Array, list[tuple[jax.Array, ...]], list[Any], list[jax.Array]]:
    """Return zeros: count, scales, (block-wise slots, scales), and placeholders of corrections."""
    scales = [tuple(jnp.zeros_like(slot.scales) for slot in own) for own in forms]
    of_shared = [
        tuple(tuple(map(jnp.zeros_like, column)) for column in
              ([slot.codes for slot in own], [slot.scales for slot in own]))
        for own in shared
    ]  # fmt: skip
    return jnp.zeros((), jnp.int32), scales, of_shared, [jnp.zeros((), jnp.int8) for _ in forms]


def _zero_placeholders(fields: list[str], count: int) -> dict[str, list[jax.Array]]:
    """Return distinct 0-d placeholders: an array must not be donated twice."""
    return {field: [jnp.zeros((), jnp.float32) for _ in range(count)] for field in fields}


def _resharded(plan: LeafPlan, leaf: Any, tree: Any) -> Any:
    """Reshard scales and shared slots like their parameter on Explicit axes, as steps do."""
    return jax.tree.map(
        lambda x: explicit.reshard(x, explicit.of_state(plan.path, leaf, x.shape, plan.group_size)),
        tree,
    )


# ---- checks --------------------------------------------------------------------------------------


def _names(plan: LeafPlan) -> set[str]:
    return {slot.name for slot in (*plan.slots, *plan.shared)}


def _leaf_state(slots: Sequence[SlotPlan], arrays: Mapping[str, jax.Array]) -> LeafState:
    """Collect the stored slots of a parameter from the arrays of its state's fields."""
    scales = tuple(arrays[f"{slot.name}_scale"] for slot in slots if slot.codec is not None)
    return LeafState(tuple(arrays[slot.name] for slot in slots), scales)


def _check_slots(
    plan: LeafPlan,
    slots: Sequence[SlotPlan],
    arrays: Mapping[str, jax.Array],
    forms: list[StoredSlot],
) -> None:
    """Raise if the arrays of a state do not fit the plan."""
    for slot, form in zip(slots, forms, strict=True):
        for field, like in ((slot.name, form.codes), (f"{slot.name}_scale", form.scales)):
            _check_array(plan, field, arrays[field], like.shape, like.dtype)


def _check_array(
    plan: LeafPlan, field: str, array: Any, shape: tuple[int, ...], dtype: Any
) -> None:
    if jnp.shape(array) == shape and jnp.dtype(array.dtype) == jnp.dtype(dtype):
        return
    hint = blocks = ""
    if plan.block is not None and plan.block.words and field in {slot.name for slot in plan.shared}:
        blocks = f", {field}: {plan.block.words}"
        if varying.sees_shards():
            hint = (
                " In a shard_map or pmap, means over blocks, rows or columns may involve several "
                "devices: call the step in jit with shardings instead."
            )
    if field == "correction" and plan.dtype == jnp.float32 and jnp.shape(array) == plan.shape:
        raise ValueError(promoted(plan.path, array.dtype))
    if varying.sees_shards() and field.endswith("_scale"):
        hint = (
            " In a shard_map each shard must consist of whole groups, with the scales of those: "
            "see docs/guides/sharding.md, or call the step in jit with shardings instead."
        )
    if field == "correction":
        hint = (
            " If weights were cast after tx.init, start with params, state = "
            "lowmem.init(tx, params_f32) instead."
        )
    raise ValueError(
        f"state field {field} of '{plan.path}' is {array.dtype}{list(jnp.shape(array))}, but this "
        f"storage (group_size={plan.group_size}, parameter {plan.dtype}{list(plan.shape)}{blocks}) "
        f"keeps {jnp.dtype(dtype)}{list(shape)}. The state was made or restored with other "
        f"settings: use those, or call init again.{hint}"
    )
