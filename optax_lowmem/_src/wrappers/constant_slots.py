"""Encode slots that start as constants without allocating them in f32."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.codecs import GroupCodec, encode_array
from optax_lowmem._src.core import array_metadata, explicit, trees
from optax_lowmem._src.core.compiled import compiled, is_free
from optax_lowmem._src.wrappers.slots import facts, map_slots, scale_name


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """Encoder of states whose slots start as constants.

    Attributes:
      codec_of: (state, field) -> codec, or None.
      decide: records how a leaf of a slot is stored, and returns whether it is compressed.
      group_size: number of neighbors that share a scale.
    """

    codec_of: Callable[[Any, str], GroupCodec | None]
    decide: Callable[..., bool]
    group_size: int

    def is_constant(self, abstract: optax.OptState) -> bool:
        """Return whether all arrays with several elements are slots that start as a constant."""
        constant = True

        def visit(node: optax.OptState, slot: str, value: Any) -> Any:
            nonlocal constant
            if self.codec_of(node, slot) is None:
                return value
            constant = constant and facts(node, slot).constant_init
            return ()

        rest = map_slots(visit, abstract)
        return constant and all(leaf.size <= 1 for leaf in jax.tree.leaves(rest))

    def others(self, state: optax.OptState) -> Any:
        """Return a state with each compressed slot replaced by ()."""

        def visit(node: optax.OptState, slot: str, value: Any) -> Any:
            return value if self.codec_of(node, slot) is None else ()

        return map_slots(visit, state)

    def put(self, others: optax.OptState, encoded: optax.OptState) -> Any:
        """Return the state `others` with the compressed slots of the state `encoded`."""
        slots = self._slots(encoded)

        def visit(node: optax.OptState, slot: str, value: Any) -> Any:
            return value if self.codec_of(node, slot) is None else slots.pop(0)

        return map_slots(visit, others)

    def spread(
        self,
        abstract: optax.OptState,
        small: optax.OptState,
        params: optax.Params,
        masked: set[str],
    ) -> tuple[Any, dict[str, Any]]:
        """Return the encoded state with `abstract`'s shapes, and its scales.

        The constants are those of `small`, the state of one-element parameters.
        """
        weights = dict(trees.named_leaves(params))
        shapes = iter(jax.tree.leaves(self._slots(abstract)))
        trees_of: list[Any] = []  # for each slot, the tree of its abstract leaves
        rows: list[Any] = []

        def visit(node: optax.OptState, slot: str, value: Any) -> Any:
            codec = self.codec_of(node, slot)
            if codec is None:
                return value
            of_slot = []
            for path, one in trees.named_leaves(value):
                full = next(shapes)
                of_slot.append(full)
                known, weight = facts(node, slot), jnp.shape(weights[path])
                kept = self.decide(path, full, slot, masked, codec, known, weight=weight)
                rows.append((codec if kept else None, one, full.dtype, weights[path]))
            trees_of.append(jax.tree.unflatten(jax.tree.structure(value), of_slot))
            return ()

        map_slots(visit, small)
        spread = compiled(_spread) if is_free([row[-1] for row in rows]) else _spread
        pairs = iter(spread(rows, self.group_size))
        scales: dict[str, Any] = {}

        def put(node: optax.OptState, slot: str, value: Any) -> Any:
            if self.codec_of(node, slot) is None:
                return value
            full = trees_of.pop(0)
            own = [next(pairs) for _ in jax.tree.leaves(full)]
            scales[scale_name(slot, scales)] = array_metadata.like(
                full, [scale for _, scale in own]
            )
            return jax.tree.unflatten(jax.tree.structure(value), [codes for codes, _ in own])

        return map_slots(put, small), scales

    def _slots(self, state: optax.OptState) -> list[Any]:
        """Return the compressed slots of a state, in order."""
        slots: list[Any] = []

        def visit(node: optax.OptState, slot: str, value: Any) -> Any:
            if self.codec_of(node, slot) is None:
                return value
            slots.append(value)
            return ()

        map_slots(visit, state)
        return slots


def _spread(
    rows: list[tuple[GroupCodec | None, jax.Array, jnp.dtype, jax.Array]], group_size: int
) -> list[tuple[jax.Array, jax.Array]]:
    """Return codes and scales of constant slots, with the sharding of their weights.

    Args:
      rows: (codec, the constant, the slot's dtype, the weight) of each leaf.
      group_size: number of neighbors that share a scale.
    """
    pairs = []
    for codec, one, dtype, weight in rows:
        if codec is None:
            same = one.shape == weight.shape
            whole = one if same else jnp.full_like(weight, one.reshape(()), dtype=dtype)
            pairs.append((whole, jnp.zeros((), jnp.float32)))
            continue
        # codes_per_byte values, to encode one whole byte
        row = jnp.broadcast_to(one.astype(jnp.float32).reshape(1), (codec.codes_per_byte,))
        code, scale = encode_array(codec, row, group_size)
        codes, scales = codec.storage(weight.shape, group_size)
        code = explicit.filled("a leaf", weight, codes, group_size, code.reshape(()))
        own = explicit.of_state("a leaf", weight, scales.shape, group_size)
        pairs.append((code, explicit.reshard(jnp.full(scales.shape, scale.reshape(())), own)))
    return pairs
