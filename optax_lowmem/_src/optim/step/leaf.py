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


class Leaf(NamedTuple):
    """The arrays of a parameter, or of a kernel's tile of it, before a step or after it.

    A part of them is the stored state: `slots`, `scales` and `correction`. The state of block-wise
    slots is a leaf with `slots` and `scales`.
    """

    g: Any = None  # gradient, f32 or 16-bit, of the parameter's shape; None after a step
    # the parameter, or None to return the rule's direction; after a step the update, or the new
    # parameter if the plan `returns_params`
    p: Any = None
    slots: tuple[Any, ...] = ()  # codes, or values without a codec, in the order of the plan's
    scales: tuple[Any, ...] = ()  # of the slots with a codec: shape[:-1] + (groups,)
    correction: Any = None  # of the parameter's shape
    of_block: Any = None  # `Block.operands`: values shared by the elements of a block

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
    numbered: list[Any] = []
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
