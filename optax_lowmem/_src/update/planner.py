"""Static decisions of an optimizer about each leaf, before any step, with reasons."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from optax_lowmem._src.codecs import GroupCodec
from optax_lowmem._src.core import scope, trees
from optax_lowmem._src.core.block import Block, BlockStructure
from optax_lowmem._src.core.rules import Slot, UpdateRule
from optax_lowmem._src.update import LeafPlan, SlotPlan, choose
from optax_lowmem._src.update.masters import choose_split
from optax_lowmem._src.update.storage import Storage


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Planner:
    """The static choices of an optimizer.

    Attributes:
      rule: its arithmetic.
      storage: how its state is kept.
      weights: whether it updates weights (learning rate, decay, split) or gives a bare direction.
      decay_mask: optax-style mask of weight decay.
      slot_dtypes: dtype of slots where they are not compressed, f32 unless given.
      structure: which elements share the slots that the rule's blocks share.
    """

    rule: UpdateRule
    storage: Storage
    weights: bool = True
    decay_mask: Any = None
    slot_dtypes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    structure: BlockStructure | None = None

    def plans(self, params: Any, state: Any = None) -> list[LeafPlan]:
        """The plan of each leaf; decisions are recorded.

        Args:
          params: the parameters, or in a `shard_map` this device's part of each.
          state: that is to be stepped; None before there is one.
        """
        leaves = trees.named_leaves(params)
        if not leaves:  # also optax.tree.map_params' placeholder, which no mask fits
            return []
        masked_out = self.storage.policy.masked_out(params)
        decays = self._decays(params)
        blocks = self.structure.infer(params) if self.structure else {}
        nearest = self._rounded_to_nearest(params)
        stored = self._stored(state, len(leaves))
        return [
            self._plan(
                path, leaf, path in masked_out, path in nearest, decay, blocks.get(path), own
            )
            for (path, leaf), decay, own in zip(leaves, decays, stored, strict=True)
        ]

    def _stored(self, state: Any, count: int) -> list[set[str]]:
        """Of each leaf the slots that a state has codes of: those with scales."""
        stored: list[set[str]] = [set() for _ in range(count)]
        for slot in () if state is None else self.rule.slots:
            scales = jax.tree.leaves(getattr(state, f"{slot.name}_scale"))
            for own, one in zip(stored, scales, strict=False):  # `open` compares their number
                if jnp.ndim(one):
                    own.add(slot.name)
        return stored

    def _rounded_to_nearest(self, params: Any) -> set[str]:
        """Paths of the leaves whose codes are not rounded stochastically."""
        rounding, every = self.storage.rounding, {path for path, _ in trees.named_leaves(params)}
        if rounding == "embeddings" and self.structure is not None:
            return every - self.structure.embeddings(params)
        return set() if rounding == "stochastic" else every

    def _decays(self, params: Any) -> list[bool]:
        mask = self.decay_mask(params) if callable(self.decay_mask) else self.decay_mask
        if mask is None:
            return [True] * len(jax.tree.leaves(params))
        return list(map(bool, trees.broadcast_prefix("the mask of weight decay", mask, params)))

    def _plan(
        self,
        path: str,
        leaf: Any,
        masked_out: bool,
        nearest: bool,
        decays: bool,
        block: Block | None,
        stored: set[str],
    ) -> LeafPlan:
        trees.check_param(path, leaf)
        storage, dtype = self.storage, jnp.dtype(leaf.dtype)
        in_dtype = self.weights and storage.update_dtype == "param"
        slots = {
            slot: self._slot_plan(
                path, tuple(leaf.shape), slot, masked_out, nearest, block, slot.name in stored
            )
            for slot in self.rule.slots
        }
        shared = tuple(plan for slot, plan in slots.items() if slot.shared)
        plan = LeafPlan(
            path=path,
            shape=tuple(leaf.shape),
            dtype=dtype,
            group_size=storage.group_size,
            slots=tuple(plan for slot, plan in slots.items() if not slot.shared),
            split=choose_split(storage, path, dtype) if self.weights else None,
            update_dtype=dtype if in_dtype else jnp.dtype(jnp.float32),
            decays=decays,
            block=block,
            shared=shared,
        )
        scope.record(scope.Decision(path, "step", *choose(self.rule, plan)))
        return plan

    def _slot_plan(
        self,
        path: str,
        shape: tuple,
        slot: Slot,
        masked_out: bool,
        nearest: bool,
        block: Block | None,
        stored: bool,
    ) -> SlotPlan:
        name = slot.name
        codec, reason = self._codec(path, shape, name, masked_out, stored)
        form = codec.name if codec else None
        if codec is not None:
            rounding = "nearest" if nearest else "stochastic"
            reason = f"groups of {self.storage.group_size}, {rounding} rounding"
        if slot.shared and block is not None:
            form = f"{form or 'f32'}, {block.words or 'a value a block'}"
            reason = block.reason
        size = self.storage.group_size if codec else None
        stochastic = codec is not None and not nearest
        shared = block if slot.shared else None
        scope.record(scope.Decision(path, name, form, reason, size, codec, stochastic, shared))
        dtype = codec.dtype if codec else jnp.dtype(self.slot_dtypes.get(name) or jnp.float32)
        return SlotPlan(name, codec, dtype, stochastic)

    def _codec(
        self, path: str, shape: tuple, slot: str, masked_out: bool, stored: bool
    ) -> tuple[GroupCodec | None, str]:
        codec = getattr(self.storage, slot)
        if codec is None:
            return None, f"storage.{slot} is None"
        if masked_out:
            return None, "the policy's mask is False here"
        reason = self.storage.policy.reason(path, shape, slot, stored)
        return (None, reason) if reason else (codec, "")
