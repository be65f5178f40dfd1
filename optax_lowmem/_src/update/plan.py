"""Static plan and stored state of the step of a leaf."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_lowmem._src.codecs import GroupCodec, MasterSplit
from optax_lowmem._src.core import groups
from optax_lowmem._src.core.block import Block


@dataclasses.dataclass(frozen=True)
class SlotPlan:
    """Storage of one slot of a leaf.

    Attributes:
      name: name of the slot.
      codec: None where the slot is stored as it is.
      dtype: of the stored slot.
      stochastic: whether its codes are rounded stochastically.
    """

    name: str
    codec: GroupCodec | None
    dtype: jnp.dtype
    stochastic: bool


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """Storage and update of a leaf.

    Attributes:
      path: its name in errors and in the random hash.
      shape: of the parameter.
      dtype: of the parameter.
      group_size: neighbours that share a scale.
      slots: one plan per slot with one value per element.
      split: split of the master weight; None for f32 parameters and without master weights.
      update_dtype: of the emitted update.
      decays: whether weight decay applies.
      direct: whether the step returns new parameters instead of updates.
      block: the elements that share a value of block-wise slots; None where the rule has none.
      shared: one plan per block-wise slot; groups are of all its values, as one row.
    """

    path: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    group_size: int
    slots: tuple[SlotPlan, ...]
    split: MasterSplit | None
    update_dtype: jnp.dtype
    decays: bool = True
    direct: bool = False
    block: Block | None = None
    shared: tuple[SlotPlan, ...] = ()

    @property
    def nameless(self) -> "LeafPlan":
        """The same for every leaf of this shape: what a compiled step depends on."""
        return dataclasses.replace(self, path="")

    @property
    def shapeless(self) -> "LeafPlan":
        """The same for every leaf that a kernel can take along: they differ in where things lie."""
        block = None if self.block is None else Block()
        return dataclasses.replace(self, path="", shape=(), block=block)

    @property
    def of_blocks(self) -> "LeafPlan":
        """The plan of the shared slots: a leaf with one element a block, all in one row."""
        assert self.block is not None
        return LeafPlan(
            path=self.path,
            shape=(self.block.values(self.shape),),
            dtype=jnp.dtype(jnp.float32),
            group_size=self.group_size,
            slots=self.shared,
            split=None,
            update_dtype=jnp.dtype(jnp.float32),
            decays=False,
        )

    @property
    def grouped(self) -> bool:
        """Return whether any slot is compressed."""
        return any(slot.codec is not None for slot in self.slots)

    @property
    def stochastic(self) -> bool:
        """Return whether any slot takes random bits."""
        return any(slot.stochastic for slot in self.slots)

    @property
    def stochastic_master(self) -> bool:
        """Return whether the master weight takes random bits."""
        return self.split is not None and self.split.stochastic

    @property
    def noisy(self) -> bool:
        """Return whether any slot or the master weight takes random bits, which come in groups."""
        return self.stochastic or self.stochastic_master

    def scale_shape(self, slot: SlotPlan) -> tuple[int, ...]:
        """Shape of a slot's scales; 0-d where it has none."""
        return groups.scale_shape(self.shape, self.group_size) if slot.codec else ()


class LeafState(NamedTuple):
    """The stored state of a leaf; tuples are in the order of `LeafPlan.slots`."""

    slots: tuple[jax.Array, ...]  # codes of the parameter's shape, or f32
    scales: tuple[jax.Array, ...]  # shape[:-1] + (groups,), or 0-d
    correction: jax.Array  # of the parameter's shape, or 0-d
