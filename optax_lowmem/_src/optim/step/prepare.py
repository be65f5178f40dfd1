"""Operands that a rule computes before its elementwise step, from a whole leaf or from its blocks.

A block may span its leaf, so an additional pass over the gradient computes the means. The means are
then stepped like the gradient of a small leaf with one element per block.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from optax_lowmem._src.arrays import varying
from optax_lowmem._src.arrays.block import Block
from optax_lowmem._src.arrays.sharding import left_to_xla, sharding_of
from optax_lowmem._src.arrays.typing import Arrays, PyTree
from optax_lowmem._src.kernels import step_arguments
from optax_lowmem._src.optim.blocks import block_means
from optax_lowmem._src.optim.step import reference
from optax_lowmem._src.optim.step.backend import fused_updates
from optax_lowmem._src.optim.step.plan import LeafPlan
from optax_lowmem._src.optim.step.rule import OF_BLOCK, Slot, UpdateRule
from optax_lowmem._src.optim.step.state import Leaf, LeafBatch

# traced once per shape and plan
_prepare = jax.jit(reference.prepare, static_argnames=("rule", "plan"))


def prepare_leaves(rule: UpdateRule, batch: LeafBatch) -> tuple[LeafBatch, list[Leaf]]:
    """Add the operands of `rule.prepare` to a batch; also returns the new block-wise slots.

    The batch has f32 hyperparameters; for a rule that prepares `blocks`, without `l2`.
    """
    if rule.prepares == "leaf":
        prepared = []
        for i, plan in enumerate(batch.plans):
            prepare = functools.partial(_prepare, rule, plan.nameless)
            leaf, h = batch.leaves[i], batch.hyperparameters
            names = jax.eval_shape(prepare, leaf, h)  # scalars, replicated on Explicit axes
            prepared.append(left_to_xla(prepare, dict.fromkeys(names), leaf, h))
        return dataclasses.replace(batch, own=prepared), batch.blockwise
    # XLA partitions the means of blocks that span several devices, also on Explicit axes
    blocks = [plan.block or Block() for plan in batch.plans]
    gradients = [leaf.g for leaf in batch.leaves]
    rows = zip(batch.plans, blocks, gradients, batch.blockwise, strict=True)
    for plan, block, *arrays in rows:
        if not block.elementwise:
            work_of = "a mean over each of its blocks, rows or columns"
            varying.check_whole(plan.path, arrays, work_of)
    shardings = [
        (
            # of `Block.operands`: v's sharding if there is one part, else XLA's choice
            sharding_of(s.slots[0]) if len(block.parts) == 1 else (None,) * len(block.parts),
            jax.tree.map(sharding_of, (s.slots, s.scales)),
        )
        for block, s in zip(blocks, batch.blockwise, strict=True)
    ]
    keys = batch.blockwise_keys
    work = functools.partial(
        _prepare_blocks, rule, batch.plans, blocks, batch.numbers, batch.implementation
    )
    operands = gradients, batch.blockwise, batch.hyperparameters, keys
    result = left_to_xla(work, shardings, *operands)
    leaves = [
        leaf._replace(of_block=of_block)
        for leaf, (of_block, _) in zip(batch.leaves, result, strict=True)
    ]
    new = [Leaf(slots=slots, scales=scales) for _, (slots, scales) in result]
    return dataclasses.replace(batch, leaves=leaves), new


@dataclasses.dataclass(frozen=True)
class _BlockRule(UpdateRule):
    """A rule whose `update` is another rule's `prepare`: one element per block."""

    rule: UpdateRule

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The block-wise slots of the rule, here elementwise."""
        return tuple(
            dataclasses.replace(s, blockwise=False) for s in self.rule.slots if s.blockwise
        )

    @property
    def state_type(self) -> Any:
        return self.rule.state_type

    def update(self, g: jax.Array, slots: Arrays, h: Arrays) -> tuple[jax.Array, Arrays]:
        """Return the operand of each block as the direction, and the new slots."""
        operands, new = self.rule.prepare(g, slots, h)
        return operands[OF_BLOCK], new


def _prepare_blocks(
    rule: UpdateRule,
    plans: Sequence[LeafPlan],
    blocks: Sequence[Block],
    numbers: tuple[int, ...],
    implementation: str | None,
    gradients: Sequence[jax.Array],
    blockwise: Sequence[Leaf],
    h: Arrays,
    keys: jax.Array,
) -> list[tuple[PyTree, tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]]]:
    """Return (`Block.operands`, (new block-wise slots, scales)) of each parameter."""
    scale = h.get("gradient_scale")
    means = block_means.means_of_squares(blocks, gradients, scale, implementation)
    leaves = [
        s._replace(g=mean.reshape(-1), slots=tuple(x.reshape(-1) for x in s.slots))
        for s, mean in zip(blockwise, means, strict=True)
    ]
    # the means already include the gradient scale
    h = {name: value for name, value in h.items() if name != "gradient_scale"}
    named = [
        dataclasses.replace(plan.blockwise_plan, path=f"{plan.path} (means over blocks)")
        for plan in plans
    ]
    of_blocks = LeafBatch.of(named, leaves, h, keys, numbers=numbers, implementation=implementation)
    with step_arguments.stepping(shardings=None):  # those are of leaves, not of blocks
        result = fused_updates(_BlockRule(rule), of_blocks)
    values = [new.p.reshape(mean.shape) for new, mean in zip(result, means, strict=True)]
    shapes = [plan.shape for plan in plans]
    of_steps = block_means.operands(blocks, values, shapes, implementation)
    shaped = []
    for old, new, operands in zip(blockwise, result, of_steps, strict=True):
        slots = tuple(x.reshape(o.shape) for x, o in zip(new.slots, old.slots, strict=True))
        shaped.append((operands, (slots, new.scales)))
    return shaped
