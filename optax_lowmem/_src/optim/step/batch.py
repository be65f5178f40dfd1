"""The arrays of a step: `Leaf` of one parameter, `LeafBatch` of those stepped together."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_lowmem._src.arrays.typing import Arrays
from optax_lowmem._src.arrays.varying import result_like
from optax_lowmem._src.optim.step.plan import LeafPlan
from optax_lowmem._src.optim.step.rule import OF_BLOCK


class LeafState(NamedTuple):
    """The stored state of a parameter; tuples are in the order of `LeafPlan.slots`."""

    slots: tuple[jax.Array, ...]  # codes, or values without a codec
    scales: tuple[jax.Array, ...]  # of the slots with a codec: shape[:-1] + (groups,)
    correction: jax.Array | None = None  # of the parameter's shape


class Leaf(NamedTuple):
    """The arrays that the step of a parameter, or of a kernel's tile of it, reads."""

    g: jax.Array  # gradient, f32 or 16-bit, of the parameter's shape
    p: jax.Array | None  # parameter; None to return the rule's direction
    state: LeafState
    of_block: Any = None  # `Block.operands`: values shared by the elements of a block

    @property
    def result_like(self) -> "Result":
        """Arrays whose shapes and shardings are those of the result."""
        return Result(self.g if self.p is None else self.p, self.state)


class Result(NamedTuple):
    """The arrays that a step writes."""

    update: jax.Array  # or the new parameter, if the plan `returns_params`
    state: LeafState


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["gradients", "weights", "states", "hyperparameters", "operands", "keys",
                 "blockwise", "blockwise_keys"],
    meta_fields=["plans", "numbers", "implementation"],
)  # fmt: skip
@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafBatch:
    """The operands of a step: one entry per parameter in each list."""

    plans: tuple[LeafPlan, ...]  # static choices
    gradients: list[jax.Array]  # f32 or 16-bit, of the parameters' shapes
    weights: list[Any]  # the parameters; each None to return the rule's direction
    states: list[LeafState]  # stored slots, scales and corrections
    hyperparameters: Arrays  # f32 scalars of the step
    # additional hyperparameters of each entry, which override the shared ones
    operands: list[Arrays]
    keys: jax.Array  # random keys, uint32 [n] or [n, 2]; entry i uses `keys[numbers[i]]`
    numbers: tuple[int, ...]  # index of each entry's key
    # the implementation that the caller chose, or None for the fastest
    implementation: str | None = None
    # stored block-wise slots; their corrections are not used. Empty if the step does not read them
    blockwise: list[LeafState] = dataclasses.field(default_factory=list)
    blockwise_keys: jax.Array | None = None  # like `keys`, for block-wise slots

    @classmethod
    def of(
        cls,
        plans: Sequence[LeafPlan],
        leaves: tuple[list[jax.Array], list[Any], list[LeafState]],
        hyperparameters: Arrays,
        keys: jax.Array,
        **others: Any,
    ) -> "LeafBatch":
        """Return the batch of (gradients, weights, states), whose entry i uses `keys[i]`."""
        gradients, weights, states = leaves
        return cls(
            plans=tuple(plans), gradients=gradients, weights=weights, states=states,
            hyperparameters=hyperparameters, keys=keys,
            **{"operands": [{}] * len(plans), "numbers": tuple(range(len(plans))), **others},
        )  # fmt: skip

    def leaf(self, i: int) -> Leaf:
        """Return the arrays of an entry."""
        of_block = self.operands[i].get(OF_BLOCK)
        return Leaf(self.gradients[i], self.weights[i], self.states[i], of_block)

    def h(self, i: int) -> dict[str, jax.Array]:
        """Return the scalar hyperparameters of an entry."""
        h = {**self.hyperparameters, **self.operands[i]}
        return {name: value for name, value in h.items() if name != OF_BLOCK}

    def take(self, indices: Sequence[int]) -> "LeafBatch":
        """Select entries by index; the keys of all entries are kept."""
        names = ["gradients", "weights", "states", "operands"]
        names += ["blockwise"] if self.blockwise else []
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
    """Return the dtype of `Result.update`, the weight's if the plan writes it."""
    if p is None:
        return plan.update_dtype
    return p.dtype if plan.returns_params or plan.writes_weight else plan.update_dtype


def output(plan: LeafPlan, viewed: Leaf) -> Any:
    """Return the shapes and dtypes of a kernel's results for the views of a leaf."""
    update: Any = result_like(viewed.g, dtype=update_dtype(plan, viewed.p))
    return Result(update, jax.tree.map(result_like, viewed.state))


def aliases(
    plan: LeafPlan, inputs: Sequence[Leaf], outputs: Sequence[Result], first: int
) -> dict[int, int]:
    """Return `input_output_aliases` for the state, and for the weight if plans `returns_params`."""
    numbered: list[Any] = []
    for arrays, start in ((inputs, first), (outputs, 0)):
        leaves, structure = jax.tree.flatten(list(arrays))
        numbered.append(jax.tree.unflatten(structure, range(start, start + len(leaves))))
    results: dict[int, int] = {}
    for leaf, result in zip(*numbered, strict=True):
        pairs = zip(jax.tree.leaves(leaf.state), jax.tree.leaves(result.state), strict=True)
        results.update(pairs)
        if plan.returns_params:
            results[leaf.p] = result.update
    return results


def restored(plan: LeafPlan, leaf: Leaf, result: Result) -> Result:
    """Reshape the results of a kernel to the shapes of their leaf."""
    state = jax.tree.map(lambda new, old: new.reshape(old.shape), result.state, leaf.state)
    return Result(result.update.reshape(plan.shape), state)
