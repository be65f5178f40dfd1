"""How a launch of a step is cut over devices: in parts of whole groups, stepped like leaves."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule

from optax_lowmem._src.core import random
from optax_lowmem._src.core.groups import group_count
from optax_lowmem._src.kernels.partitioned import EVERY, Partition, Tiles
from optax_lowmem._src.step.plan import LeafPlan
from optax_lowmem._src.step.scopes import scope


class StepPartition(Partition):
    """The cut of a launch.

    A leaf is cut as its codes are, or as its correction, weight or gradient if that is finer. A cut
    through groups, or through heads of a block, is moved to an earlier dimension, or undone.
    """

    def __init__(
        self,
        backend: str,
        content: str,
        step: Callable[..., Any],
        paths: Sequence[str],
        plans: tuple[LeafPlan, ...],
        numbers: tuple[int, ...],
        arguments: tuple[Any, ...],
    ) -> None:
        """Partition step(plans, numbers, leaves, scalars, keys).

        Args:
          backend: name of the implementation.
          content: all that the step depends on but its arguments.
          step: steps leaves; it must not close over arrays.
          paths: of the leaves.
          plans: of the leaves, without paths.
          numbers: indices of their keys.
          arguments: (leaves, scalars, keys), or their types.
        """
        super().__init__()
        self._content, self._step, self._plans, self._numbers = content, step, plans, numbers
        self._name = paths, backend
        arrays, self._treedef = jax.tree.flatten(arguments)
        self._shapes = [x.shape for x in arrays]
        leaves, *_ = jax.tree.unflatten(self._treedef, range(len(arrays)))
        self._owners: list[list[int]] = []  # operands of each leaf, which are cut alike
        self._likes: list[int] = []  # of each result, the operand that it is cut like
        self._deciding: list[list[int]] = []  # operands that say how a leaf is cut, the first most
        for leaf in leaves:
            state = leaf.state.slots, leaf.state.correction
            self._deciding.append(jax.tree.leaves((state, leaf.p, leaf.g)))
            self._owners.append(jax.tree.leaves(leaf))
            self._likes += jax.tree.leaves(leaf.result_like)

    @property
    def content(self) -> str:
        """The plans and what the caller says."""
        return f"step {self._name[1]} {self._content} {self._plans} {self._numbers} {self._treedef}"

    def named(self) -> contextlib.AbstractContextManager[None]:
        """Name the work by the leaves and the implementation, for `scopes.implementations`."""
        return scope(*self._name)

    def cut(
        self, given: Sequence[Tiles | None], wanted: Sequence[Tiles | None], count: int
    ) -> tuple[list[Tiles], list[Tiles], Callable[..., list[jax.Array]]]:
        """Cut each leaf, and give each part the key of its place in the leaf."""
        del wanted  # results are cut as the arrays that they replace
        tiles = [Tiles.whole(len(shape), count) for shape in self._shapes]
        parts, starts = [], []
        for plan, owners, deciding in zip(self._plans, self._owners, self._deciding, strict=True):
            cut = _finest(
                plan, [given[j] for j in deciding if self._shapes[j] == plan.shape], count
            )
            local = dataclasses.replace(plan, shape=cut.local(plan.shape))
            for j in owners:
                tiles[j] = _like(plan, cut, self._shapes[j], count)
            parts.append(local)
            starts.append(cut.starts(local.part_sizes(cut.parts[-1] > 1)))

        def work(*arrays: jax.Array) -> list[jax.Array]:
            leaves, scalars, keys = jax.tree.unflatten(self._treedef, arrays)
            here = jax.lax.axis_index(EVERY)
            own = [
                random.key_of_part(keys[number], *jnp.asarray(table)[here])
                for number, table in zip(self._numbers, starts, strict=True)
            ]
            numbers = tuple(range(len(own)))
            result = self._step(tuple(parts), numbers, leaves, scalars, jnp.stack(own))
            return jax.tree.leaves(result)

        return tiles, [tiles[j] for j in self._likes], work

    def rule(self) -> SdyShardingRule:
        """Return the rule: arrays of a leaf are cut alike, the last dimension between groups."""
        factors = [_Factors(f"leaf{i}_", plan) for i, plan in enumerate(self._plans)]
        owner = {j: i for i, owners in enumerate(self._owners) for j in owners}
        whole: list[str] = []
        mappings = []
        for j, shape in enumerate(self._shapes):
            if j in owner and len(shape) == len(self._plans[owner[j]].shape):
                mappings.append(factors[owner[j]].of(shape, whole))
            else:
                names = [f"operand{j}_{d}" for d in range(len(shape))]
                whole += names
                mappings.append(ArrayMapping(*names))
        sizes: dict[str, Any] = {}
        for own in factors:
            sizes |= own.sizes
        alone = {name for mapping in mappings for name in mapping if isinstance(name, str)}
        return SdyShardingRule(
            tuple(mappings),
            tuple(mappings[j] for j in self._likes),
            need_replication_factors=tuple(dict.fromkeys(whole)),
            **{name: size for name, size in sizes.items() if name not in alone},
        )


def _finest(plan: LeafPlan, given: Sequence[Tiles | None], count: int) -> Tiles:
    """Return the finest of some tiles of a leaf, none of whose parts cut through groups."""
    best = Tiles.whole(len(plan.shape), count)
    for tiles in given:
        cut = best if tiles is None else _mended(plan, tiles)
        best = cut if cut.count > best.count else best
    return best


def _mended(plan: LeafPlan, tiles: Tiles) -> Tiles:
    for d in range(len(plan.shape)):
        parts = tiles.parts[d]
        if plan.cut_reason(d, parts) is None:
            continue
        to = [e for e in range(d) if plan.cut_reason(e, tiles.parts[e] * parts) is None]
        tiles = tiles.moved(d, to[0]) if to else tiles.uncut(d)
    return tiles


def _like(plan: LeafPlan, cut: Tiles, shape: tuple[int, ...], count: int) -> Tiles:
    """Return the tiles of an array of a leaf: as the leaf's, but whole where it has one value."""
    if len(shape) != len(plan.shape):
        return Tiles.whole(len(shape), count)
    for d, size in enumerate(shape):
        if cut.parts[d] > 1 and size == 1:
            cut = cut.uncut(d)
    return cut


class _Factors:
    """Names of the dimensions of a leaf's arrays, for Shardy."""

    def __init__(self, prefix: str, plan: LeafPlan) -> None:
        *rest, last = plan.shape
        self.shape, self.prefix = plan.shape, prefix
        self.sizes: dict[str, int] = {}
        self.rest = [f"{prefix}{d}" for d in range(len(rest))]
        size = plan.group_size if plan.in_groups else 1
        self.groups = group_count(last, size) if last % size == 0 else 1

    def of(self, shape: tuple[int, ...], whole: list[str]) -> ArrayMapping:
        """Return the names of an array's dimensions, adding those that are not cut to `whole`."""
        dims: list[Any] = []
        for d, size in enumerate(shape[:-1]):
            dims.append(self.rest[d] if size == self.shape[d] else self._whole(d, size, whole))
        last, groups = shape[-1], f"{self.prefix}groups"
        inner = last // self.groups
        if self.groups == 1 or last % self.groups:
            dims.append(self._whole(len(shape) - 1, last, whole))
        elif inner == 1:
            dims.append(groups)
        else:
            name = f"{self.prefix}lanes{inner}"
            self.sizes |= {name: inner, groups: self.groups}
            whole.append(name)
            dims.append(CompoundFactor(groups, name))
        return ArrayMapping(*dims)

    def _whole(self, d: int, size: int, whole: list[str]) -> str:
        whole.append(f"{self.prefix}{d}_of{size}")
        return whole[-1]
