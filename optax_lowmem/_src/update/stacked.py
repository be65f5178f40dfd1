"""The step of many small equal leaves for XLA on a CPU: stacks of them are stepped as one leaf.

XLA compiles the kernels of equal leaves once, but its passes work on a copy of the step for each
leaf, 600 instructions that take 40 ms and more. A stack has one copy; what a leaf adds are the
slices of its results. The arrays are copied twice for it, which small ones hardly notice: the step
is no slower, as its loops are longer. Measured: docs/results/cpu_speed.md.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.core import explicit
from optax_lowmem._src.core.rules import OF_BLOCK, UpdateRule
from optax_lowmem._src.core.typing import Tree
from optax_lowmem._src.update import packed
from optax_lowmem._src.update.plan import LeafPlan, LeafState

LeafArrays = tuple[jax.Array, jax.Array | None, LeafState]  # gradient, weight, state

_MOST = 32  # leaves of a stack
_FEW = 8  # leaves, below which a stack saves nothing
_ELEMENTS = 1 << 17  # of a stack: with twice as many it is a little slower than leaves alone
# A stack takes up to 15 bytes an element while it is stepped, and frees them before the next one;
# the words of all leaves, 4 bytes an element, are what a step may take: half of that.
_PARTS = 8


def supported(rule: UpdateRule, plan: LeafPlan, platform: str) -> str | None:
    """Return the reason why a leaf cannot be part of a stack, or None where it can."""
    if not plan.direct:
        return "an update is computed where it is used, outside of the step of the leaf"
    if rule.prepares == "leaf":
        return "XLA rounds what is computed of a whole leaf by what it is fused with"
    if math.prod(plan.shape) * _FEW > _ELEMENTS:
        return "too large: copies would cost more than they save"
    if jax.device_count() > 1:
        # which a trace does not show: leaves of a stack would all come to lie like one of them
        return "leaves may be sharded, each in another way"
    return packed.supported(plan, platform)


def stacks(
    rule: UpdateRule,
    plans: Sequence[LeafPlan],
    gradients: Sequence[jax.Array],
    weights: Sequence[jax.Array | None],
    leaves: Iterable[int],
) -> Iterator[list[int]]:
    """Yield the indices of the leaves of each stack; leaves in no stack are stepped alone.

    Args:
      rule: the optimizer's arithmetic.
      plans: of all leaves.
      gradients: of all leaves.
      weights: of all leaves, or None each.
      leaves: indices of the leaves to choose from.
    """
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for i in leaves:
        plan, g, p = plans[i], gradients[i], weights[i]
        if explicit.sharding_of(g) is not None:
            continue  # leaves of several types cannot be stacked, and on one device they may have
        if supported(rule, plan, jax.default_backend()) is None:
            kind = (plan.nameless, g.dtype, None if p is None else p.dtype)
            kinds.setdefault(kind, []).append(i)
    for (plan, *_), alike in kinds.items():
        size = max(1, math.prod(plan.shape))
        most = min(_MOST, _ELEMENTS // size, len(alike) // _PARTS)
        if most >= _FEW:
            # all of one length, since each length is another program: one that leaves few alone
            lengths = range(most, max(_FEW, most // 2) - 1, -1)
            length = min(lengths, key=lambda n: len(alike) % n)
            ends = range(length, len(alike) + 1, length)
            yield from (alike[end - length : end] for end in ends)


def fused_updates(
    rule: UpdateRule,
    plan: LeafPlan,
    rows: Sequence[LeafArrays],
    of_leaves: Sequence[Mapping[str, jax.Array]],
    keys: jax.Array,
    numbers: Sequence[jax.Array],
) -> list[tuple[jax.Array, LeafState]]:
    """`packed.fused_update` of each leaf of a stack.

    Args:
      rule: the optimizer's arithmetic.
      plan: that of every leaf.
      rows: gradient, weight and state of each.
      of_leaves: the hyperparameters of each; they differ in `OF_BLOCK` alone.
      keys: those of all leaves of the step.
      numbers: of these leaves among them, and then 0, 1, ... to number these alone: operands, as
        constants would make each stack another program.
    """
    # what is the same for all leaves stays one scalar
    own = [{name: x for name, x in h.items() if name == OF_BLOCK} for h in of_leaves]
    h = {name: x for name, x in of_leaves[0].items() if name != OF_BLOCK}
    return _step(rule, plan, list(rows), own, h, keys, list(numbers))


@packed.opaque
@functools.partial(jax.jit, static_argnames=("rule", "plan"))
def _step(
    rule: UpdateRule,
    plan: LeafPlan,
    rows: list[LeafArrays],
    own: list[dict[str, jax.Array]],
    h: Mapping[str, jax.Array],
    keys: jax.Array,
    numbers: list[jax.Array],
) -> list[tuple[jax.Array, LeafState]]:
    numbers, places = numbers[: len(rows)], numbers[len(rows) :]

    def one(
        row: LeafArrays, own: dict[str, jax.Array], key: jax.Array
    ) -> tuple[jax.Array, LeafState]:
        g, p, state = row
        return packed.fused_update(rule, plan, g, p, state, {**h, **own}, key)

    every, alike = _stack((rows, own))
    found = jax.vmap(one)(every, alike, keys[jnp.stack(numbers)])
    return [_of_place(found, place) for place in places]


@packed.opaque
@jax.jit
def _stack(columns: tuple[list[Any], ...]) -> list[Any]:
    """In a call, or each loop over a stack would look for its leaf at every element."""
    return [jax.tree.map(lambda *arrays: jnp.stack(arrays), *column) for column in columns]


@packed.opaque
@jax.jit
def _of_place(found: Tree, place: jax.Array) -> Tree:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, place, keepdims=False), found)
