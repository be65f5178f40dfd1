"""The arrays of parameters: those of a step (`Leaf`), and an optimizer's state.

A state has a tree per field, with an array or 0-d placeholder per parameter.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.arrays import array_metadata, numerics, trees
from optax_lowmem._src.arrays.codecs import MasterSplit
from optax_lowmem._src.arrays.compiled import compiled, is_free
from optax_lowmem._src.arrays.sharding import (
    filled_like,
    reshard,
    sees_shards,
    sharding_of,
    state_sharding,
)
from optax_lowmem._src.arrays.typing import Arrays, PyTree
from optax_lowmem._src.arrays.varying import result_like
from optax_lowmem._src.optim import context
from optax_lowmem._src.optim.step.plan import LeafPlan
from optax_lowmem._src.optim.step.rule import UpdateRule

# a jax.Array, its shape and dtype, a kernel's reference to it, or None
Array: TypeAlias = Any


class Leaf(NamedTuple):
    """The arrays of a parameter, or of a kernel's tile of it, before a step or after it.

    A part of them is the stored state: `slots`, `scales` and `correction`. The state of block-wise
    slots is a leaf with `slots` and `scales`.
    """

    g: Array = None  # gradient, f32 or 16-bit, of the parameter's shape; None after a step
    # the parameter, or None to return the rule's direction; after a step the update, or the new
    # parameter if the plan `returns_params`
    p: Array = None
    slots: tuple[Array, ...] = ()  # codes, or values without a codec, in the order of the plan's
    scales: tuple[Array, ...] = ()  # of the slots with a codec: shape[:-1] + (groups,)
    correction: Array = None  # of the parameter's shape
    of_block: PyTree = None  # `Block.operands`: values shared by the elements of a block

    @property
    def result_like(self) -> "Leaf":
        """Arrays whose shapes and shardings are those of the leaf after the step."""
        return self._replace(g=None, p=self.g if self.p is None else self.p, of_block=None)

    @property
    def state(self) -> "Leaf":
        """The stored state alone."""
        return Leaf(slots=self.slots, scales=self.scales, correction=self.correction)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["leaves", "hyperparameters", "own", "keys", "blockwise", "blockwise_keys"],
    meta_fields=["plans", "numbers", "implementation"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafBatch:
    """The operands of a step: one entry per parameter in each list."""

    plans: tuple[LeafPlan, ...]  # static choices
    leaves: list[Leaf]
    hyperparameters: Arrays  # f32 scalars of the step
    own: list[Arrays]  # scalar hyperparameters of each entry, which override the shared ones
    keys: jax.Array  # random keys, uint32 [n] or [n, 2]; entry i uses `keys[numbers[i]]`
    numbers: tuple[int, ...]  # index of each entry's key
    # the implementation that the caller chose, or None for the fastest
    implementation: str | None = None
    # states of block-wise slots. Empty if the step does not read them
    blockwise: list[Leaf] = dataclasses.field(default_factory=list)
    blockwise_keys: jax.Array | None = None  # like `keys`, for block-wise slots

    @classmethod
    def of(
        cls,
        plans: Sequence[LeafPlan],
        leaves: list[Leaf],
        hyperparameters: Arrays,
        keys: jax.Array,
        **others: Any,
    ) -> "LeafBatch":
        """Return the batch of leaves whose entry i uses `keys[i]`."""
        return cls(
            plans=tuple(plans), leaves=leaves, hyperparameters=hyperparameters, keys=keys,
            **{"own": [{}] * len(plans), "numbers": tuple(range(len(plans))), **others},
        )  # fmt: skip

    def h(self, i: int) -> Arrays:
        """Return the scalar hyperparameters of an entry."""
        return {**self.hyperparameters, **self.own[i]}

    def take(self, indices: Sequence[int]) -> "LeafBatch":
        """Select entries by index; the keys of all entries are kept."""
        names = ["leaves", "own"] + (["blockwise"] if self.blockwise else [])
        columns: dict[str, Any] = {
            name: [getattr(self, name)[i] for i in indices] for name in names
        }
        plans, numbers = zip(*((self.plans[i], self.numbers[i]) for i in indices), strict=True)
        return dataclasses.replace(self, plans=plans, numbers=numbers, **columns)

    def with_keys_in_order(self) -> "LeafBatch":
        """Drop the keys of other entries, so that entry i has key i."""
        order = tuple(range(len(self.plans)))
        if self.numbers == order and len(self.keys) == len(order):
            return self
        places = jnp.asarray(self.numbers)
        blockwise_keys = None if self.blockwise_keys is None else self.blockwise_keys[places]
        return dataclasses.replace(
            self, keys=self.keys[places], blockwise_keys=blockwise_keys, numbers=order
        )

    @property
    def nameless(self) -> "LeafBatch":
        """The batch without parameter names, so that equal leaves share a compiled step."""
        return dataclasses.replace(self, plans=tuple(plan.nameless for plan in self.plans))


# ---- the operands and results of a kernel --------------------------------------------------------


def update_dtype(plan: LeafPlan, p: jax.Array | None) -> jnp.dtype:
    """Return the dtype of a kernel's result `p`, the weight's if the plan writes it."""
    if p is None:
        return plan.update_dtype
    return p.dtype if plan.returns_params or plan.writes_weight else plan.update_dtype


def output(plan: LeafPlan, viewed: Leaf) -> Leaf:
    """Return the shapes and dtypes of a kernel's results for the views of a leaf."""
    state: Leaf = jax.tree.map(result_like, viewed.state)
    return state._replace(p=result_like(viewed.g, dtype=update_dtype(plan, viewed.p)))


def aliases(
    plan: LeafPlan, inputs: Sequence[Leaf], outputs: Sequence[Leaf], first: int
) -> dict[int, int]:
    """Return `input_output_aliases` for the state, and for the weight if plans `returns_params`."""
    numbered: list[list[Leaf]] = []
    for arrays, start in ((inputs, first), (outputs, 0)):
        leaves, structure = jax.tree.flatten(list(arrays))
        numbered.append(jax.tree.unflatten(structure, range(start, start + len(leaves))))
    results: dict[int, int] = {}
    for leaf, result in zip(*numbered, strict=True):
        pairs = zip(jax.tree.leaves(leaf.state), jax.tree.leaves(result.state), strict=True)
        results.update(pairs)
        if plan.returns_params:
            results[leaf.p] = result.p
    return results


def restored(plan: LeafPlan, leaf: Leaf, result: Leaf) -> Leaf:
    """Reshape the results of a kernel to the shapes of their leaf."""
    state = jax.tree.map(lambda new, old: new.reshape(old.shape), result.state, leaf.state)
    return state._replace(p=result.p.reshape(plan.shape))


# ---- the state of an optimizer -------------------------------------------------------------------

_PLACEHOLDER = jax.ShapeDtypeStruct((), jnp.float32)  # of a slot that a parameter does not have


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StateFormat:
    """Makes the states of an optimizer, and divides them into the states of parameters.

    Without `weights` (learning rate, decay, split) the optimizer returns directions.
    """

    rule: UpdateRule
    weights: bool = True

    def zeros(self, plans: list[LeafPlan], params: optax.Params, seed: jax.Array) -> optax.OptState:
        """Return the state before the first step, sharded like the parameters.

        All zeros, but for corrections that `lowmem.init` provides; no f32 moments are allocated.
        One program makes the zeros, unless parameters are committed to devices, or traced: then
        slots are made one by one, where their parameters are.
        """
        leaves, fields = jax.tree.leaves(params), self.fields()
        if is_free(leaves):
            slots, (count, others) = compiled(_zeros)(plans, leaves, fields)
        else:
            slots, (count, others) = _zero_slots(plans, leaves), compiled(_zero_rest)(plans, fields)
        for plan, leaf, row, other in zip(plans, leaves, slots, others, strict=True):
            names = {slot.name for slot in (*plan.slots, *plan.blockwise)}
            for name, x in other.items():
                if name.removesuffix("_scale") in names:  # on Explicit axes, as steps shard it
                    sharding = state_sharding(
                        plan.path, leaf.shape, sharding_of(leaf), x.shape, (plan.group_size,)
                    )
                    x = reshard(x, sharding)  # noqa: PLW2901
                row[name] = x
            if plan.split is not None:
                row["correction"] = initial_correction(plan.split, plan.path, leaf)
        columns = {name: [row[name] for row in slots] for name in fields}
        return self.of_columns(count, seed, columns, params)

    def unpack(
        self, state: optax.OptState, plans: list[LeafPlan], params: optax.Params
    ) -> tuple[list[Leaf], list[Leaf]]:
        """Return the states of the leaves and of their block-wise slots, after checking both."""
        columns = {}
        for name in self.fields():
            tree = getattr(state, name)
            columns[name] = leaves = jax.tree.leaves(tree)
            if len(leaves) != len(plans):
                raise ValueError(
                    f"the state's {name} has {len(leaves)} leaves for {len(plans)} parameters: "
                    "it was made for another tree. Call init with these parameters."
                )
            trees.check_state_tree(tree, params)
        rows = []
        for i, plan in enumerate(plans):
            forms = plan.forms
            row = {name: arrays[i] for name, arrays in columns.items()}
            for name, x in row.items():
                form = forms.get(name, _PLACEHOLDER)
                if jnp.shape(x) != form.shape or jnp.dtype(x.dtype) != form.dtype:
                    raise ValueError(_misfit(plan, name, x, form))
            rows.append(from_row(plan, row))
        states, blockwise = zip(*rows, strict=True) if rows else ((), ())
        return list(states), list(blockwise)

    def pack(
        self,
        count: jax.Array,
        plans: list[LeafPlan],
        states: list[Leaf],
        blockwise: list[Leaf],
        before: optax.OptState,
    ) -> optax.OptState:
        """Return the state after a step, which replaces arrays of the state before.

        Placeholders of missing slots, scales and corrections are reused: a new one would be a copy
        of a constant, and so one launch per parameter.
        """
        columns = {name: jax.tree.leaves(getattr(before, name)) for name in self.fields()}
        for i, row in enumerate(map(to_row, plans, states, blockwise)):
            for name, x in row.items():
                columns[name][i] = x
        trees = {
            name: jax.tree.unflatten(jax.tree.structure(getattr(before, name)), arrays)
            for name, arrays in columns.items()
        }
        return before._replace(count=count, **trees)

    def fields(self) -> list[str]:
        """Return the names of the state's fields that have one array per parameter."""
        slots = [field for slot in self.rule.slots for field in (slot.name, f"{slot.name}_scale")]
        return [*slots, "correction"] if self.weights else slots

    def of_columns(
        self,
        count: jax.Array,
        seed: jax.Array,
        columns: Mapping[str, list[jax.Array]],
        params: optax.Params,
        before: optax.OptState | None = None,
    ) -> optax.OptState:
        """Build a state, with trees like the parameters, from the arrays of each field."""
        fields = {
            name: array_metadata.with_metadata_of(params, arrays, getattr(before, name, None))
            for name, arrays in columns.items()
        }
        return self.rule.state_type(count=count, seed=seed, **{"correction": None, **fields})


Row = dict[str, jax.Array]  # the arrays of one parameter, by field of the state


def from_row(plan: LeafPlan, row: Row) -> tuple[Leaf, Leaf]:
    """Return the state of a leaf and that of its block-wise slots."""
    state, blockwise = (
        Leaf(
            slots=tuple(row[slot.name] for slot in slots),
            scales=tuple(row[f"{slot.name}_scale"] for slot in slots if slot.codec is not None),
        )
        for slots in (plan.slots, plan.blockwise)
    )
    return state._replace(correction=row["correction"] if plan.split else None), blockwise


def stored_fields(plan: LeafPlan) -> list[str]:
    """Return the fields of a state that have an array of a leaf, no placeholder."""
    names = ["correction"] if plan.split else []
    for slot in (*plan.slots, *plan.blockwise):
        names += [slot.name] if slot.codec is None else [slot.name, f"{slot.name}_scale"]
    return names


def to_row(plan: LeafPlan, state: Leaf, blockwise: Leaf) -> Row:
    """Do the opposite of `from_row`; placeholders of what the leaf does not have are left out."""
    row = {} if state.correction is None else {"correction": state.correction}
    for slots, stored in ((plan.slots, state), (plan.blockwise, blockwise)):
        row |= {slot.name: x for slot, x in zip(slots, stored.slots, strict=True)}
        coded = [slot for slot in slots if slot.codec is not None]
        row |= {f"{slot.name}_scale": x for slot, x in zip(coded, stored.scales, strict=True)}
    return row


def _zeros(plans: list[LeafPlan], leaves: list[jax.Array], fields: list[str]) -> PyTree:
    return _zero_slots(plans, leaves), _zero_rest(plans, fields)


def _zero_slots(plans: list[LeafPlan], leaves: list[jax.Array]) -> list[dict[str, jax.Array]]:
    """Return the zero elementwise slots of each leaf, with its sharding."""
    return [
        {
            slot.name: filled_like(plan.path, leaf, forms[slot.name], plan.group_size, 0)
            for slot in plan.slots
        }
        for plan, leaf, forms in zip(plans, leaves, [plan.forms for plan in plans], strict=True)
    ]


def _zero_rest(
    plans: list[LeafPlan], fields: list[str]
) -> tuple[jax.Array, list[dict[str, jax.Array]]]:
    """Return a zero count, and the other zeros of each leaf, also placeholders of corrections."""
    rows = []
    for plan in plans:
        forms, made = plan.forms, {slot.name for slot in plan.slots}
        made |= set() if plan.split is None else {"correction"}
        others = {name: forms.get(name, _PLACEHOLDER) for name in fields if name not in made}
        rows.append({name: jnp.zeros(form.shape, form.dtype) for name, form in others.items()})
    return jnp.zeros((), jnp.int32), rows


def check_order(gradients: list[jax.Array], params: optax.Params, correction: optax.Params) -> None:
    """Raise if the dtypes show that gradients and parameters were swapped."""
    rows = zip(jax.tree.leaves(params), gradients, jax.tree.leaves(correction), strict=False)
    for i, (p, g, kept) in enumerate(rows):
        if p.dtype == jnp.float32 and numerics.is_narrow(g.dtype) and jnp.ndim(kept):
            path, _ = trees.named_leaves(params)[i]
            raise ValueError(
                f"the gradient of '{path}' is {g.dtype} and the weight float32, but the state "
                "corrects a 16-bit weight: they are in each other's place, or the weight was cast. "
                "Call tx.update(grads, state, params), lowmem.step(tx, grads, state, params)."
            )


def promoted(path: str, correction: jnp.dtype) -> str:
    """Return the error message for an f32 weight whose state corrects a 16-bit weight."""
    return (
        f"weight '{path}' is float32, but the state corrects a 16-bit weight (by {correction}). "
        "Four things cause this. An f32 update was added without a cast, as eqx.apply_updates and "
        "params + updates do: use optax.apply_updates or lowmem.step, or update_dtype='param' "
        "(storage=Storage(update_dtype='param'), or the argument of split_master_weights). "
        "master_params or ema_params were put into the model that is trained: put them into a "
        "copy. The weights were cast, or the state restored for other weights: begin with "
        "params, state = lowmem.init(tx, params_f32). Gradients and weights are in each other's "
        "place: call tx.update(grads, state, params)."
    )


def initial_correction(split: MasterSplit, path: str, leaf: jax.Array) -> jax.Array:
    """Return the correction that `lowmem.init` provides, or else zero correction."""
    provided = context.provided_correction(path)
    if provided is not None:
        return provided
    return jnp.full_like(leaf, split.zero, dtype=split.dtype)


def _misfit(plan: LeafPlan, field: str, array: jax.Array, form: jax.ShapeDtypeStruct) -> str:
    """Return the error message for an array of a state that does not fit the plan."""
    hint = blocks = ""
    description = plan.block.description if plan.block is not None else ""
    if description and field in {slot.name for slot in plan.blockwise}:
        blocks = f", {field}: {description}"
        if sees_shards():
            hint = (
                " In a shard_map or pmap, means over blocks, rows or columns may involve several "
                "devices: call the step in jit with shardings instead."
            )
    if field == "correction" and plan.dtype == jnp.float32 and jnp.shape(array) == plan.shape:
        return promoted(plan.path, array.dtype)
    if sees_shards() and field.endswith("_scale"):
        hint = (
            " In a shard_map each shard must consist of whole groups, with the scales of those: "
            "see docs/guides/sharding.md, or call the step in jit with shardings instead."
        )
    if field == "correction":
        hint = (
            " If weights were cast after tx.init, start with params, state = "
            "lowmem.init(tx, params_f32) instead."
        )
    return (
        f"state field {field} of '{plan.path}' is {array.dtype}{list(jnp.shape(array))}, but this "
        f"storage (group_size={plan.group_size}, parameter {plan.dtype}{list(plan.shape)}{blocks}) "
        f"keeps {form.dtype}{list(form.shape)}. The state was made or restored with other "
        f"settings: use those, or call init again.{hint}"
    )
