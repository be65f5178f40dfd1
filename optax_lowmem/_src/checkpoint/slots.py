"""The slots of our states: where they lie in a state, and how each leaf of them is stored."""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_lowmem._src.codecs import group_codec
from optax_lowmem._src.core import numerics, random, scope, trees
from optax_lowmem._src.update.slots import map_slots
from optax_lowmem._src.wrappers.compress import CompressedState

# one compiled call a leaf: eager, every operation of a codec would store its result
_encode = jax.jit(group_codec.encode, static_argnames=("codec", "group_size", "slot"))
_decode = jax.jit(group_codec.decode, static_argnames=("codec", "group_size"))


class Decisions:
    """The decisions of an `init`, handed out in the order in which they were taken."""

    def __init__(self, decisions: list[scope.Decision]):
        self._left: dict[tuple[str, str], list[scope.Decision]] = collections.defaultdict(list)
        for decision in decisions:
            self._left[decision.path, decision.slot].append(decision)
        self._blocks = {(d.path, d.slot): d.block for d in decisions}
        self._outside: set[tuple[str, str]] = set()

    def take(self, path: str, slot: str) -> scope.Decision:
        """The next one of a slot of a leaf."""
        return self._left[path, slot].pop(0)

    def take_own(self, path: str, slot: str) -> scope.Decision:
        """`take` for a state that may be inside a `CompressedState`: f32 if that has the codes."""
        if (path, slot) in self._outside:
            reason = "coded outside"
            return scope.Decision(path, slot, None, reason, block=self._blocks[path, slot])
        return self.take(path, slot)

    def code_outside(self, state: CompressedState) -> None:
        """Says that the coded slots of this state are f32 to the states inside it."""

        def visit(slot: str, name: str, codes: Any) -> Any:
            del name
            self._outside.update((path, slot) for path, _ in trees.named_leaves(codes))
            return codes

        coded_slots(state, state.inner_state, visit)


def encode_leaf(
    decision: scope.Decision, x: jax.Array, like: jax.Array, seed: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Slot and scales of f32 values, as the optimizer of a decision stores them.

    Args:
      decision: how.
      x: f32 values, one an element; the mean over each block is taken where a block shares one.
      like: the stored slot, for its dtype and shape.
      seed: of the state.
      count: steps so far; the next step has other random bits.
    """
    if decision.block is not None and x.shape != like.shape:
        x = decision.block.mean(x)
    if decision.codec is None:
        return x.astype(like.dtype), jnp.zeros((), jnp.float32)
    key = random.leaf_key(seed, count, decision.path) if decision.stochastic else None
    flat = x.reshape(-1) if decision.block is not None else x  # the values of blocks lie in one row
    codes, scales = _encode(
        decision.codec, numerics.widen(flat), decision.group_size, key, slot=decision.slot
    )
    return codes.reshape(like.shape), scales


def decode_leaf(
    decision: scope.Decision, stored: jax.Array, scales: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """f32 values of a stored slot, one an element of a leaf of this shape."""
    x = numerics.widen(stored) if decision.codec is None else None
    if x is None:
        flat = stored.reshape(-1) if decision.block is not None else stored
        x = _decode(decision.codec, flat, scales, decision.group_size).reshape(stored.shape)
    if decision.block is not None and x.shape != shape:
        return decision.block.spread(x, shape)
    return x


def coded_slots(
    state: CompressedState, inner: Any, function: Callable[[str, str, Any], Any]
) -> Any:
    """`inner`, a state like `state.inner_state`, with its coded slots replaced.

    Args:
      state: says by its scales which slots are coded.
      inner: the state whose slots are visited.
      function: (slot, key of its scales, its value) -> another value.
    """
    seen: collections.Counter[str] = collections.Counter()

    def visit(node: Any, field: str, value: Any) -> Any:
        del node
        name = f"{field}_scale" + (f"_{seen[field]}" if seen[field] else "")
        if name not in state.scales:
            return value
        seen[field] += 1
        return function(field, name, value)

    return map_slots(visit, inner)
