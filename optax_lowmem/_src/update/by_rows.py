"""The step of a large leaf for XLA on a TPU: a loop over blocks of its rows, in place.

Groups lie along the lanes of a TPU's registers. XLA transposes whatever it reduces along them and
the operands of that, nine copies a leaf, and it keeps copies of large leaves in HBM: 8 to 10 bytes
per parameter and two to four times the traffic of a step that moves each byte once. Those of a
block of rows fit into the chip's own memory, so that HBM has nothing but what is read and written.
What the program says: docs/how_to/tpu.md.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.core import random, row_blocks
from optax_lowmem._src.core.rules import OF_BLOCK, UpdateRule
from optax_lowmem._src.update import reference
from optax_lowmem._src.update.plan import LeafPlan, LeafState

_Carry = tuple[Any, LeafState]


def supported(plan: LeafPlan) -> str | None:
    """Return the reason why a leaf does not take this path on one TPU, or None where it does.

    On several devices XLA would gather what is sharded along its rows, but in a `shard_map`.
    """
    if not plan.grouped:
        return "no slot is compressed: plain elementwise work, which XLA fuses well"
    if row_blocks.fits(plan.shape):
        return "it fits into the chip's own memory as a whole"
    heads = plan.block and plan.block.fit(plan.shape).heads
    if heads and heads[0] != len(plan.shape) - 1:
        return "blocks of rows may cut through heads"
    if any(_rows(plan.shape, axis) is None for axis in range(len(plan.shape) - 1)):
        return f"its rows are no multiple of {row_blocks.TILE}, which blocks of rows are made of"
    return None


@functools.partial(jax.jit, static_argnames=("rule", "plan"))
def fused_update(
    rule: UpdateRule,
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    state: LeafState,
    h: Mapping[str, jax.Array],
    key: jax.Array,
) -> tuple[jax.Array, LeafState]:
    """As `reference.fused_update`."""
    moved = p  # the new weights take the place of the old ones
    if not plan.direct:
        result, _ = jax.eval_shape(_reference(rule, plan), g, p, state, h, key)
        moved = jnp.zeros(result.shape, result.dtype)
    keys = jnp.stack(random.row_and_lane_keys(key))
    return _blocks(rule, plan, g, None if plan.direct else p, (moved, state), h, keys, 0)


def _reference(rule: UpdateRule, plan: LeafPlan) -> Any:
    return functools.partial(reference.fused_update, rule, plan)


def _rows(shape: tuple[int, ...], axis: int) -> int | None:
    return row_blocks.rows_of(shape, axis, row_blocks.ELEMENTS)


def _of_block(
    plan: LeafPlan, h: Mapping[str, jax.Array], cut: Callable[[jax.Array], jax.Array]
) -> dict[str, Any]:
    """The block-wise values of some rows, where there are any."""
    if plan.block is None:
        return {}
    cuts = []
    for part, x in zip(plan.block.fit(plan.shape).parts, jax.tree.leaves(h[OF_BLOCK]), strict=True):
        viewed, axes = part.view(plan.shape)
        cuts.append(cut(x.reshape([1 if i in axes else size for i, size in enumerate(viewed)])))
    return {OF_BLOCK: jax.tree.unflatten(jax.tree.structure(h[OF_BLOCK]), cuts)}


def _blocks(
    rule: UpdateRule,
    plan: LeafPlan,
    g: jax.Array,
    p: jax.Array | None,
    carry: _Carry,
    h: Mapping[str, jax.Array],
    keys: jax.Array,
    axis: int,
) -> _Carry:
    """The step of blocks of rows along an axis; what is too large goes on along the next one.

    Args:
      rule: the optimizer's arithmetic.
      plan: the leaf's static choices.
      g: gradient.
      p: parameter; None where there is none, or where it is what is moved.
      carry: what takes the results, and the state.
      h: hyperparameters.
      keys: for R and for C.
      axis: before the last one.
    """
    shape = plan.shape
    size = _rows(shape, axis)
    assert size is not None  # `supported` has said so
    own = dataclasses.replace(plan, shape=(*shape[:axis], size, *shape[axis + 1 :]))

    def step(i: jax.Array, carry: _Carry) -> _Carry:
        start = i * size

        def cut(x: jax.Array) -> jax.Array:
            whole = x.ndim == 0 or x.shape[axis] == 1  # a number, or one for all of the rows
            return x if whole else lax.dynamic_slice_in_dim(x, start, size, axis)

        def put(x: jax.Array, part: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(x, part, start, axis) if x.ndim else part

        starts = [jnp.uint32(0)] * axis + [start.astype(jnp.uint32)]
        own_keys = random.key_of_part(keys, *starts)
        own_h = {**h, **_of_block(plan, h, cut)}
        part, weights, of_carry = jax.tree.map(cut, (g, p, carry))
        if math.prod(own.shape) > row_blocks.ELEMENTS and axis + 2 < len(shape):
            found = _blocks(rule, own, part, weights, of_carry, own_h, own_keys, axis + 1)
        else:
            weights = of_carry[0] if plan.direct else weights
            found = _reference(rule, own)(part, weights, of_carry[1], own_h, own_keys)
        return jax.tree.map(put, carry, found)

    return lax.fori_loop(0, shape[axis] // size, step, carry)
