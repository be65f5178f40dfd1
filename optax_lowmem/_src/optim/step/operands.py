"""Backend-independent parts of the kernels: operands, results and aliases, step of a tile."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_lowmem._src.arrays import random
from optax_lowmem._src.arrays.groups import Tiling, result_like
from optax_lowmem._src.arrays.typing import Arrays
from optax_lowmem._src.optim.step import reference
from optax_lowmem._src.optim.step.batch import Leaf, LeafState, Result
from optax_lowmem._src.optim.step.plan import LeafPlan
from optax_lowmem._src.optim.step.rule import UpdateRule


class AnyHyperparameters(Mapping[str, jax.Array]):
    """A mapping that contains every name, so that a traced step includes all its branches."""

    def __getitem__(self, name: str) -> jax.Array:
        return jnp.float32(0.5)

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def update_dtype(plan: LeafPlan, p: jax.Array | None) -> jnp.dtype:
    """Return the dtype of `Result.update`, the weight's if the plan writes it."""
    if p is None:
        return plan.update_dtype
    return p.dtype if plan.returns_params or plan.writes_weight else plan.update_dtype


def views(plan: LeafPlan, tiling: Tiling, leaf: Leaf) -> Leaf:
    """Reshape the arrays of a leaf to the views that its kernel reads."""
    g, p, correction = jax.tree.map(tiling.element_view, (leaf.g, leaf.p, leaf.state.correction))
    pairs = zip(plan.slots, leaf.state.slots, strict=True)
    slots = tuple(tiling.of_bytes(slot.codes_per_byte).element_view(x) for slot, x in pairs)
    scales, of_block = jax.tree.map(tiling.scale_view, (leaf.state.scales, leaf.of_block))
    return Leaf(g, p, LeafState(slots, scales, correction), of_block)


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


def step_tile(
    rule: UpdateRule, plan: LeafPlan, leaf: Leaf, h: Arrays, seeds: random.Seeds | None
) -> Result:
    """Step one tile [groups, lanes], one group per row: decode, rule, split, encode.

    `plan` may be that of any leaf in the launch, since they differ only in shape, which is unused.
    """
    lanes = leaf.g.shape[-1]
    layout, correction = reference.TileLayout(lanes, lanes), leaf.state.correction
    moved, values = reference.advance(rule, plan, leaf, h, layout)
    if leaf.p is not None:
        # the weight even if the step returns updates: XLA fuses the update with its consumer
        random_bits = reference.master_bits(plan, seeds, layout)
        moved, correction = reference.move(plan, leaf.p, moved, correction, random_bits)
    # encode last, when the weight's registers are free: encoding needs the most registers
    slots, scales = reference.encode_slots(plan, values, seeds, layout)
    update = moved.astype(update_dtype(plan, leaf.p))
    return Result(update, LeafState(slots, scales, correction))
