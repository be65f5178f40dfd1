"""The state that `compress_state` starts with, without an f32 array of any slot."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_lowmem._core import boxes, groups, trees
from optax_lowmem._core.compiled import compiled, is_free
from optax_lowmem.codecs import GroupCodec, encode_array
from optax_lowmem.transforms.slots import facts, map_slots, scale_name


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """States whose slots start as constants.

    Attributes:
      codec_of: (state, field) -> codec, or None.
      decide: records how a leaf of a slot is stored, and gives the reason if it is not compressed.
      group_size: neighbours that share a scale.
    """

    codec_of: Callable[[Any, str], GroupCodec | None]
    decide: Callable[..., str | None]
    group_size: int

    def is_constant(self, abstract: Any) -> bool:
        """Whether all that is large in a state are slots known to start as a constant."""
        constant = True

        def visit(node: Any, slot: str, value: Any) -> Any:
            nonlocal constant
            if self.codec_of(node, slot) is None:
                return value
            constant = constant and facts(node, slot).constant_init
            return ()

        rest = map_slots(visit, abstract)
        return constant and all(leaf.size <= 1 for leaf in jax.tree.leaves(rest))

    def others(self, state: Any) -> Any:
        """A state with () in the place of its compressed slots."""

        def visit(node: Any, slot: str, value: Any) -> Any:
            return value if self.codec_of(node, slot) is None else ()

        return map_slots(visit, state)

    def put(self, others: Any, encoded: Any) -> Any:
        """What `others` leaves of a state, with the slots of another one."""
        slots = self._slots(encoded)

        def visit(node: Any, slot: str, value: Any) -> Any:
            return value if self.codec_of(node, slot) is None else slots.pop(0)

        return map_slots(visit, others)

    def spread(
        self, abstract: Any, small: Any, params: Any, masked: set[str]
    ) -> tuple[Any, dict[str, Any]]:
        """The encoded state of `abstract`'s shapes from that of one-element parameters."""
        weights = dict(trees.named_leaves(params))
        shapes = iter(jax.tree.leaves(self._slots(abstract)))
        scales: dict[str, Any] = {}

        def spread(node: Any, slot: str, value: Any) -> Any:
            codec = self.codec_of(node, slot)
            if codec is None:
                return value
            pairs, of_slot = [], []
            for key_path, one in jax.tree_util.tree_leaves_with_path(value):
                path, shape = trees.path_name(key_path), next(shapes)
                of_slot.append(shape)
                reason = self.decide(path, shape, slot, masked, codec, facts(node, slot))
                pairs.append(
                    self._spread_leaf(None if reason else codec, one, shape, weights[path])
                )
            treedef = jax.tree.structure(value)
            full = jax.tree.unflatten(treedef, of_slot)
            scales[scale_name(slot, scales)] = boxes.like(full, [s for _, s in pairs])
            return jax.tree.unflatten(treedef, [c for c, _ in pairs])

        return map_slots(spread, small), scales

    def _slots(self, state: Any) -> list[Any]:
        """The compressed slots of a state, in order."""
        slots: list[Any] = []

        def visit(node: Any, slot: str, value: Any) -> Any:
            if self.codec_of(node, slot) is None:
                return value
            slots.append(value)
            return ()

        map_slots(visit, state)
        return slots

    def _spread_leaf(
        self, codec: GroupCodec | None, one: jax.Array, full: Any, weight: Any
    ) -> tuple[jax.Array, jax.Array]:
        if full.shape == one.shape and codec is None:
            return one, jnp.zeros((), jnp.float32)
        spread = compiled(_spread) if is_free([weight]) else _spread
        return spread(codec, one, full.shape, full.dtype, weight, self.group_size)


def _spread(
    codec: GroupCodec | None,
    one: jax.Array,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    weight: jax.Array,
    group_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of a slot that is the number `one` everywhere, and lies as its weight."""
    if codec is None:
        return jnp.full_like(weight, one.reshape(()), dtype=dtype), jnp.zeros((), jnp.float32)
    code, scale = encode_array(codec, one.astype(jnp.float32), group_size)
    codes = jnp.full_like(weight, code.reshape(()), dtype=codec.dtype)
    return codes, jnp.full(groups.scale_shape(shape, group_size), scale.reshape(()))
