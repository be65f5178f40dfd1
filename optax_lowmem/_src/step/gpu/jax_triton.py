"""The step of several leaves in one GPU kernel: Triton code generated from a tile's jaxpr.

Called through jax_triton, for JAX versions whose Pallas has no Triton lowering.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.core import groups, numerics, random
from optax_lowmem._src.core.block import Block, product
from optax_lowmem._src.core.groups import MAX_ELEMENTS, Tile, Tiling
from optax_lowmem._src.kernels import jax_triton_call, jaxpr_to_triton
from optax_lowmem._src.step.batch import Leaf, LeafState, Result
from optax_lowmem._src.step.operands import (
    AnyHyperparameters,
    aliases,
    output,
    step_tile,
)
from optax_lowmem._src.step.plan import LeafPlan
from optax_lowmem._src.step.rule import UpdateRule

_MAX_LANES = 1 << 16
_MAX_POINTERS = 480  # CUDA limits arguments to 4 KiB
_VECTOR = 8  # neighbours that a thread loads at once

_OF_PARTS = ("of_block", "of_block_too")  # block-wise values of the one or two parts of a block
_TABLES = ("scalars", "keys", "lane_bits")
_STATICS = (
    "LEAVES",
    "GROUP_SIZE",
    "ROWS",
    "LANES",
    "FLAT",
    "ALIGNMENT",
    "MASKED",
    "BY_LANE",
)


def supported(rule: UpdateRule, plan: LeafPlan) -> str | None:
    """Return the reason why the kernel cannot step a leaf, or None."""
    if not 0 < math.prod(plan.shape) <= MAX_ELEMENTS:
        return f"{math.prod(plan.shape)} elements; the kernel takes 1 to {MAX_ELEMENTS}"
    if Tiling(plan.shape, plan.group_size, 1).lanes > _MAX_LANES:
        return f"groups of {plan.group_size}; the kernel takes up to {_MAX_LANES} elements"
    for slot in plan.slots:
        if slot.codec is not None and slot.codec.no_tile_reason is not None:
            return slot.codec.no_tile_reason
    unknown = _unknown(rule, plan.shapeless)
    return unknown and f"the step uses `{unknown}`, which the Triton generator does not support"


@functools.cache
def _unknown(rule: UpdateRule, plan: LeafPlan) -> str | None:
    """Return a primitive of the step that the Triton generator does not support, or None."""
    slots: Any = tuple(
        slot.codec.storage((plan.group_size,), plan.group_size).codes.dtype
        if slot.codec
        else slot.dtype
        for slot in plan.slots
    )
    scales: Any = tuple(slot.codec.scale.dtype for slot in plan.slots if slot.codec)
    g, p, split = jnp.float32, plan.dtype, plan.split
    correction: Any = None if split is None else split.dtype
    dtypes: Any = jax.tree.map(jnp.dtype, (g, p, LeafState(slots, scales, correction)))
    lanes = Tiling((32,), plan.group_size, 1).lanes
    body = _Body(rule, plan, Leaf(*dtypes), (), False, 4, lanes, (False, False))
    return jaxpr_to_triton.missing(body.jaxpr(AnyHyperparameters()))


@functools.partial(jax.jit, static_argnames=("rule", "plans", "names", "tile"), inline=False)
def launch(
    rule: UpdateRule,
    plans: tuple[LeafPlan, ...],
    leaves: tuple[Leaf, ...],
    names: tuple[str, ...],
    scalars: jax.Array,
    keys: jax.Array,
    leaf_numbers: jax.Array,
    tile: Tile,
) -> list[Result]:
    """Step leaves whose plans differ only in path and shape.

    Args:
      rule: the optimizer's arithmetic.
      plans: one per leaf, all `supported`.
      leaves: the arrays of each leaf.
      names: names of the hyperparameters.
      scalars: the hyperparameters, f32 [1, len(names)], or [len(plans), len(names)] if they differ
        between leaves.
      keys: random keys of all leaves of the tree, uint32 [leaves], or of their shards, [leaves, 2].
      leaf_numbers: indices of these leaves' keys, int32 [len(plans)].
      tile: size of a tile, and its warps.
    """
    kinds = [_Kind.of(plan, tile) for plan in plans]
    most = _MAX_POINTERS // (2 * len(jax.tree.leaves(leaves[0])) + 1)
    results: dict[int, Result] = {}
    for kind in dict.fromkeys(kinds):
        alike = [i for i, other in enumerate(kinds) if other == kind]
        for first in range(0, len(alike), most):
            batch = alike[first : first + most]
            result = _launch(
                rule,
                kind,
                [plans[i] for i in batch],
                [leaves[i] for i in batch],
                names,
                scalars if len(scalars) == 1 else scalars[jnp.asarray(batch)],
                keys[leaf_numbers[jnp.asarray(batch)]],
                tile,
            )
            results.update(zip(batch, result, strict=True))
    return [results[i] for i in range(len(plans))]


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Properties that all leaves of one Triton launch share, besides their plans.

    Attributes:
      lanes: lanes per group.
      flat: whether all groups are full.
      alignment: a divisor of the offsets and sizes of all groups.
      elements: elements per tile.
      by_lane: for the two parts that a block may have, whether a group spans several blocks.
    """

    lanes: int
    flat: bool
    alignment: int
    elements: int
    by_lane: tuple[bool, ...]

    @classmethod
    def of(cls, plan: LeafPlan, tile: Tile) -> "_Kind":
        tiling = Tiling(plan.shape, plan.group_size, tile.elements)
        alignment = math.gcd(_VECTOR, plan.shape[-1], plan.group_size)
        # without vector loads, neighbours go to different threads; each thread then handles many
        # groups, whose offsets take registers
        vectors = tiling.flat or alignment == _VECTOR
        elements = tile.elements if vectors else tile.elements // 2
        by_lane = tuple(any(axis[-1] for axis in part) for part in _block_axes(plan))
        return cls(tiling.lanes, tiling.flat, alignment, max(elements, tiling.lanes), by_lane)

    def tiling(self, plan: LeafPlan) -> Tiling:
        return Tiling(plan.shape, plan.group_size, self.elements)


def _launch(
    rule: UpdateRule,
    kind: _Kind,
    plans: Sequence[LeafPlan],
    leaves: Sequence[Leaf],
    names: tuple[str, ...],
    scalars: jax.Array,
    keys: jax.Array,
    tile: Tile,
) -> list[Result]:
    """Step leaves in one Triton launch; `keys[i]` is the key of leaf i."""
    tilings = [kind.tiling(plan) for plan in plans]
    starts = itertools.accumulate((tiling.tiles for tiling in tilings), initial=0)
    layout = tuple(
        (start, plan.shape[-1], tiling.groups, _places(plan), *_block_axes(plan))
        for start, plan, tiling in zip(starts, plans, tilings, strict=False)
    )
    results = [output(plan, leaf) for plan, leaf in zip(plans, leaves, strict=True)]
    statics = (
        layout,
        plans[0].group_size,
        tilings[0].rows,
        kind.lanes,
        kind.flat,
        kind.alignment,
        not kind.flat or any(tiling.groups % tiling.rows for tiling in tilings),
        kind.by_lane,
    )
    row_keys, lane_keys = random.row_and_lane_keys(keys, rank=1)
    lanes = lax.iota(jnp.uint32, kind.lanes)[None]
    # computed once here, since all tiles of a leaf use the same lane bits
    tables = [scalars, row_keys, random.lane_bits(lane_keys[:, None], lanes)]
    body = _Body(
        rule,
        plans[0].shapeless,
        jax.tree.map(lambda x: x.dtype, leaves[0]),
        names,
        len(scalars) > 1,
        tilings[0].rows,
        kind.lanes,
        kind.by_lane,
    )
    roles = jax.tree.leaves(body.roles)
    named = [[f"{role}{i}" for role in roles] for i in range(len(plans))]

    def kernel(parameters: tuple[str, ...], written: tuple[str, ...]) -> Any:
        updates = written[:: len(body.results)]  # the first result of every leaf
        pointers = ((*own, update) for own, update in zip(named, updates, strict=True))
        return _kernel(body, parameters, tuple(pointers))

    outputs = jax_triton_call.call(
        kernel,
        [*_TABLES, *itertools.chain(*named)],
        [*tables, *jax.tree.leaves(leaves)],
        jax.tree.leaves(results),
        aliases(plans[0], leaves, results, first=len(_TABLES)),
        grid=(sum(tiling.tiles for tiling in tilings),),
        num_warps=tile.warps,
        num_stages=1,
        name="fused_update",
        **dict(zip(_STATICS, statics, strict=True)),
    )
    return jax.tree.unflatten(jax.tree.structure(results), outputs)


def _places(plan: LeafPlan) -> tuple[tuple[int, int], ...]:
    """Return (divisor, factor) per axis, to compute `random.row_bits` from a group's number.

    The index along an axis of size s is number // divisor, minus s times the same quotient of the
    previous axis. The factors include both terms, so that the bits are a sum over axes of
    (number // divisor) * factor.
    """
    shape = groups.scale_shape(plan.shape, plan.group_size)
    odd = [zlib.crc32(b"axis %d" % axis) | 1 for axis in range(len(shape))]
    carried = [o * size for o, size in zip(odd[1:], shape[1:], strict=True)] + [0]
    return tuple(
        (math.prod(shape[axis + 1 :]), (odd[axis] - carried[axis]) % 2**32)
        for axis in range(len(shape))
    )


_Axes = tuple[tuple[int | bool, ...], ...]


def _block_axes(plan: LeafPlan) -> tuple[_Axes, _Axes]:
    """Return `_part_axes` of the two parts that a block may have."""
    if plan.block is None:
        return (), ()
    first, *more = (_part_axes(plan, part) for part in plan.block.fit(plan.shape).parts)
    return first, more[0] if more else ()


def _part_axes(plan: LeafPlan, block: Block) -> _Axes:
    """Return the constants by which the kernel computes a block's number from a group's number.

    For each axis with several blocks: stride in groups, length in groups, number of neighbours that
    share a value, stride in blocks, and whether these neighbours are lanes (instead of groups).
    """
    size, values = plan.group_size, block.mean_shape(plan.shape)
    shape = groups.scale_shape(plan.shape, size)
    results: list[tuple[int | bool, ...]] = []
    for axis, (length, count) in enumerate(zip(plan.shape, values, strict=True)):
        if count == 1:
            continue
        width = length // count
        last = axis == len(values) - 1
        by_lane = last and width % size != 0
        neighbours = width // size if last and not by_lane else width
        below = math.prod(shape[axis + 1 :])
        results.append((below, shape[axis], neighbours, math.prod(values[axis + 1 :]), by_lane))
    return tuple(results)


# ---- the kernel's source -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Body:
    """All that the generated code depends on, except the layout of the leaves.

    Attributes:
      rule: the optimizer's arithmetic.
      plan: the plan of the leaves, without path and shape.
      dtypes: dtypes of the arrays of a leaf.
      names: names of the hyperparameters.
      per_leaf: whether hyperparameters differ between leaves.
      rows: rows of a tile.
      lanes: lanes of a tile.
      by_lane: for the two parts that a block may have, whether values differ within a group.
    """

    rule: UpdateRule
    plan: LeafPlan
    dtypes: Leaf
    names: tuple[str, ...]
    per_leaf: bool
    rows: int
    lanes: int
    by_lane: tuple[bool, ...]

    @functools.cached_property
    def roles(self) -> Any:
        """Names of the arrays that are read, as a `Leaf`."""
        slots: Any = tuple(slot.name for slot in self.plan.slots)
        coded: Any = tuple(f"{slot.name}_scale" for slot in self.plan.slots if slot.codec)
        correction: Any = None if self.dtypes.state.correction is None else "correction"
        p: Any = None if self.dtypes.p is None else "p"
        g: Any = "g"
        return Leaf(g, p, LeafState(slots, coded, correction), self._of_block())

    def _of_block(self) -> Any:
        dtypes, structure = jax.tree.flatten(self.dtypes.of_block)
        return jax.tree.unflatten(structure, _OF_PARTS[: len(dtypes)])

    @property
    def packed(self) -> dict[str, int]:
        """Return the number of codes per byte, for slots where it is more than 1."""
        each = {slot.name: slot.codec.codes_per_byte for slot in self.plan.slots if slot.codec}
        return {name: codes for name, codes in each.items() if codes > 1}

    def bytes_of(self, codes: int) -> int:
        """Return the bytes per group, given the codes per byte."""
        return max(1, self.lanes // codes)

    @property
    def results(self) -> list[str]:
        """Names of the arrays that are written, in the order of `Result`."""
        return ["update", *jax.tree.leaves(self.roles.state)]

    def jaxpr(self, others: Mapping[str, jax.Array] | None = None) -> Any:
        """Return the closed jaxpr of `step_tile`.

        Args:
          others: constant hyperparameters, instead of those that are operands.
        """
        packed, struct = self.packed, jax.ShapeDtypeStruct
        per_group, per_element = (
            functools.partial(jax.tree.map, functools.partial(struct, shape))
            for shape in ((self.rows,), (self.rows, self.lanes))
        )
        state = self.dtypes.state
        slots: Any = tuple(
            struct((self.rows, self.bytes_of(packed.get(slot.name, 1))), dtype)
            for slot, dtype in zip(self.plan.slots, state.slots, strict=True)
        )
        of_block = [
            struct((self.rows, self.lanes if by_lane else 1), dtype)
            for by_lane, dtype in zip(
                self.by_lane, jax.tree.leaves(self.dtypes.of_block), strict=False
            )
        ]
        leaf = Leaf(
            per_element(self.dtypes.g),
            per_element(self.dtypes.p),
            LeafState(slots, per_group(state.scales), per_element(state.correction)),
            of_block,
        )
        h = {name: jax.ShapeDtypeStruct((), jnp.float32) for name in self.names}
        place = jax.ShapeDtypeStruct((self.rows,), jnp.uint32)
        lane = jax.ShapeDtypeStruct((self.lanes,), jnp.uint32)

        def traced(leaf: Leaf, h: Any, place: Any, lane: Any) -> Result:
            h = h if others is None else others
            leaf = leaf._replace(of_block=product(leaf.of_block) if leaf.of_block else None)
            noise = (random.mix(place)[:, None], lane) if self.plan.noisy else None
            with _arithmetic():
                return step_tile(self.rule, self.plan, leaf, h, noise)

        return jax.make_jaxpr(traced)(leaf, h, place, lane)

    @property
    def operands(self) -> list[str]:
        """Names of the operands of the generated function `step`."""
        scalars = [f"h_{name}" for name in sorted(self.names)]
        return [*jax.tree.leaves(self.roles), *scalars, "place", "lane"]

    def lines(self, leaves: Sequence[Sequence[str]]) -> list[str]:
        """Return the lines of the kernel: find the leaf, load, step, store.

        Args:
          leaves: names of each leaf's pointers: its operands, then its update.
        """
        roles, new = jax.tree.leaves(self.roles), {name: f"new_{name}" for name in self.results}
        pointers = "".join(f"({', '.join(names)}), " for names in leaves)
        lines = [
            f"arrays = ({pointers})",
            "(pointers, leaf, first, count, place, begin, size, row, length,",
            f"    {', '.join(f'number_{part}' for part in _OF_PARTS)}) = find_leaf(",
            "    arrays, tl.program_id(0), LEAVES, 0, len(LEAVES), GROUP_SIZE, ROWS, LANES,",
            "    ALIGNMENT, BY_LANE)",
            f"{', '.join(f'{role}_at' for role in [*roles, 'update'])} = pointers",
            "group = first + tl.arange(0, ROWS)",
            "exists = group < count",
            "lanes = tl.arange(0, LANES)",
            "offsets, mask = elements(group, exists, begin, size, lanes, LANES, FLAT, ALIGNMENT)",
        ]
        nothing = {
            "correction": self.plan.split.zero if self.plan.split is not None else 0,
            **dict.fromkeys(_OF_PARTS, 1.0),
        }
        # read by several programs, or repeatedly by one
        late = {*_OF_PARTS, *self.roles.state.scales}
        where = dict.fromkeys(roles, "offsets, mask")
        where |= dict.fromkeys(self.roles.state.scales, "group, exists")
        for role, codes in self.packed.items():
            where[role] = f"offsets_{role}, mask_{role}"
            lines += [
                f"{where[role]} = bytes_of_codes(group, exists, begin, size, row, length,",
                f"    {self.bytes_of(codes)}, FLAT, ALIGNMENT, {codes})",
            ]
        for part, by_lane in zip(_OF_PARTS, self.by_lane, strict=True):
            where[part] = f"number_{part}, {'mask' if by_lane else 'exists[:, None]'}"
        first = f"leaf * {len(self.names)} + " if self.per_leaf else ""
        lines += [  # tables first, so that no other load waits for them
            "lane = tl.load(lane_bits + leaf * LANES + lanes)",
            *(f"h_{name} = tl.load(scalars + {first}{i})" for i, name in enumerate(self.names)),
            "place = tl.load(keys + leaf) + place",
        ]
        for role in roles:
            how = f"{where[role]}, {nothing.get(role, 0)}, MASKED, {role not in late}"
            lines.append(f"{role} = load({role}_at, {how})")
        lines += [
            "there = tl.broadcast_to(mask, (ROWS, LANES))",
            f"{', '.join(new.values())} = step({', '.join(self.operands)})",
        ]
        where["update"] = "offsets, mask"
        for name, values in new.items():
            at, exists = where[name].split(", ")
            lines.append(f"store({name}_at, {at}, {values}, {exists}, MASKED)")
        return lines


def _arithmetic() -> contextlib.AbstractContextManager[None]:
    """Use approximations that match GPU instructions."""
    return numerics.kernel_arithmetic(jaxpr_to_triton.APPROXIMATIONS)


@functools.cache
def _step(body: _Body) -> str:
    """Return the Triton source of the step of a tile."""
    return jaxpr_to_triton.function(body.jaxpr(), "step", body.operands)


@functools.cache
def _kernel(body: _Body, parameters: tuple[str, ...], leaves: tuple[tuple[str, ...], ...]) -> Any:
    """Return the `triton.jit` function of a launch."""
    from optax_lowmem._src.kernels import triton_library
    from optax_lowmem._src.step.gpu import jax_triton_kernel

    entry = jax_triton_kernel.entry(parameters, _STATICS, body.lines(leaves))
    source = f"{_step(body)}\n\n{entry}"
    return triton_library.compiled_from(source, "fused_update", vars(jax_triton_kernel))
