"""The body of the TPU kernel: steps a block of a leaf, a few registers at a time."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from optax_lowmem._src.arrays import numerics, random
from optax_lowmem._src.arrays.block import product
from optax_lowmem._src.arrays.codecs import GroupCodec, Layout
from optax_lowmem._src.arrays.codecs.base import Span
from optax_lowmem._src.arrays.typing import Arrays, PyTree, Tree
from optax_lowmem._src.optim.step import reference
from optax_lowmem._src.optim.step.plan import LeafPlan
from optax_lowmem._src.optim.step.rule import UpdateRule
from optax_lowmem._src.optim.step.state import Leaf
from optax_lowmem._src.optim.step.tpu import lanes
from optax_lowmem._src.optim.step.tpu.lanes import LANES, ROWS, Blocks

Ref: TypeAlias = Any  # a reference to an array in a Pallas kernel
Slice: TypeAlias = slice | pl.Slice

# Divisions, logarithms and powers in the form that Mosaic supports, otherwise as on a CPU.
ARITHMETIC = numerics.Approximations(reciprocal=None, gpu=False)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Registers(Layout):
    """Layout of one register, [ROWS, 128]; values of groups are on the lanes of a unit."""

    register: jax.Array  # index along the row of the block
    place: int  # index among the registers that are stepped together
    group_of_lane: jax.Array
    group_size: int = 1  # the random bits R are already broadcast to elements
    length: int = LANES

    @property
    def columns(self) -> Slice:
        """The slice of the register along a row of the block."""
        return columns_of(self.register)

    def to_groups(self, x: jax.Array) -> jax.Array:
        """Raise; `lanes.tree` reduces groups instead."""
        raise NotImplementedError("groups in registers have no separate axis")

    def to_elements(self, of_groups: Tree) -> Tree:
        """Broadcast values per group to their elements."""
        return jax.tree.map(lambda x: lanes.gather(x, self.group_of_lane), of_groups)

    def unpack(self, codec: GroupCodec, stored: jax.Array) -> jax.Array:
        """Unpack codes; one register of bytes may hold several registers of codes."""
        several = codec.codes_per_byte
        if several == 1:
            return stored
        lane = lanes.lane_of_byte(self.place % several, several)
        return codec.of_bytes(lanes.gather(stored.astype(jnp.int32), lane))

    def pack(self, codec: GroupCodec, codes: jax.Array) -> jax.Array:
        """Return codes, or with several per byte, each code shifted to its bits in the byte."""
        return codes if codec.codes_per_byte == 1 else codec.bits_in_byte(codes)


class Scratch(NamedTuple):
    """VMEM for intermediate results of a block: shapes and dtypes, or references."""

    units: dict[str, PyTree]  # per slot, decoded old scales: [rows, 128]
    scales: dict[str, PyTree]  # per slot, new scales in 32-bit words: [rows, 128]
    values: dict[str, PyTree]  # per slot, new values of ROWS rows: [ROWS, width]
    ends: dict[str, PyTree]  # per slot, partial reductions of its codec's spans: [n, ROWS, 128]
    of_rows: Ref = None  # values of block-wise operands per row: [rows, 128]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The static part of a kernel."""

    rule: UpdateRule
    plan: LeafPlan
    blocks: Blocks
    names: tuple[str, ...]

    @property
    def codecs(self) -> dict[str, GroupCodec]:
        """The codec of each slot that has one."""
        return {slot.name: slot.codec for slot in self.plan.slots if slot.codec is not None}

    def scratch(self) -> Scratch:
        """Return shapes and dtypes of the scratch memory."""
        blocks, codecs = self.blocks, self.codecs
        of_rows = jax.ShapeDtypeStruct((blocks.block_rows, LANES), jnp.float32)
        registers = jax.ShapeDtypeStruct((ROWS, LANES), jnp.float32)

        def units(codec: GroupCodec) -> PyTree:
            scales = jax.ShapeDtypeStruct(of_rows.shape, codec.scale.dtype)
            return jax.eval_shape(codec.units, scales)

        def ends(codec: GroupCodec) -> PyTree:
            several = blocks.width // (LANES * blocks.at_once)
            spans = jax.eval_shape(lambda x: [s.values for s in codec.spans(x)], registers)
            return [jax.ShapeDtypeStruct((several, *s.shape), s.dtype) for s in spans]

        return Scratch(
            {name: units(codec) for name, codec in codecs.items()},
            {
                name: jax.ShapeDtypeStruct(of_rows.shape, _word(codec.scale.dtype))
                for name, codec in codecs.items()
                if blocks.transposed
            },
            {
                slot.name: jax.ShapeDtypeStruct((ROWS, blocks.width), jnp.float32)
                for slot in self.plan.slots
            },
            {name: ends(codec) for name, codec in codecs.items()},
            of_rows if blocks.of_rows else None,
        )

    def run(
        self, scalars: Ref, key: Ref, lane_seeds: Ref, read: Leaf, written: Leaf, scratch: Scratch
    ) -> None:
        """Step a block."""
        h = {name: scalars[j] for j, name in enumerate(self.names)}
        block = pl.program_id(0), pl.program_id(1)
        with numerics.kernel_arithmetic(ARITHMETIC):
            self.decode(read, scratch)

            def body(i: jax.Array, nothing: None) -> None:
                rows = Rows(self, block, i, h, key, lane_seeds, read, written, scratch)
                rows.advance_and_move()
                rows.write_codes(rows.measure())

            lax.fori_loop(0, self.blocks.block_rows // ROWS, body, None)
            if self.blocks.transposed:
                for name, ref in zip(self.codecs, written.scales, strict=True):
                    scales = scratch.scales[name][...].T[: self.blocks.block_groups]
                    ref[...] = scales.astype(ref.dtype)

    def decode(self, read: Leaf, scratch: Scratch) -> None:
        """Decode the scales of a block, and transpose its values per row, to scratch memory."""
        for (name, codec), ref in zip(self.codecs.items(), read.scales, strict=True):
            self.decode_scales(codec, ref, scratch.units[name])
        if scratch.of_rows is not None:
            shape = (LANES, self.blocks.block_rows)
            scratch.of_rows[...] = jnp.broadcast_to(read.of_block.rows[...], shape).T

    def decode_scales(self, codec: GroupCodec, ref: Ref, units: PyTree) -> None:
        """Decode the scales of a block, padded to 128 groups and not transposed, to `units`."""
        blocks = self.blocks
        result = codec.units(ref[...])
        for value, out in zip(jax.tree.leaves(result), jax.tree.leaves(units), strict=True):
            if blocks.transposed:
                missing = jnp.zeros((LANES - blocks.block_groups, blocks.block_rows), value.dtype)
                out[...] = (jnp.concatenate([value, missing]) if missing.size else value).T
            else:
                out[:, : blocks.block_groups] = value


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """ROWS rows of a block."""

    kernel: Kernel  # the static part
    block: tuple[jax.Array, jax.Array]  # indices of the block in the grid
    i: jax.Array  # index of these rows in the block, in units of ROWS
    h: Arrays  # hyperparameters
    key: Ref  # key of the random bits R
    lane_seeds: Ref  # C of a register's or a larger group's lanes, [1, lanes]
    read: Leaf  # references to the operands, as a `Leaf`
    written: Leaf  # references to the results, as a `Leaf`
    scratch: Scratch  # references to scratch memory

    @property
    def rows(self) -> Slice:
        """The slice of these rows in the block's arrays."""
        return pl.ds(pl.multiple_of(self.i * ROWS, ROWS), ROWS)

    @property
    def repeated(self) -> Slice:
        """The slice of these rows in values that repeat periodically over the rows."""
        period = self.read.of_block.columns.shape[0]
        if period == 1:
            return slice(None)
        first = self.block[0] * self.kernel.blocks.block_rows + self.i * ROWS
        return pl.ds(pl.multiple_of(lax.rem(first, jnp.int32(period)), ROWS), ROWS)

    @property
    def registers(self) -> int:
        """Number of registers along a row that are stepped together."""
        return self.kernel.blocks.at_once

    def every(self, step: Callable[[jax.Array], None]) -> None:
        """Call step(j) for each step j along the row."""
        count = self.kernel.blocks.steps(self.block[1])

        def body(j: jax.Array, nothing: None) -> None:
            step(j)

        lax.fori_loop(0, count, body, None)

    def registers_of(self, step: jax.Array) -> Iterator[Registers]:
        """Yield the layout of each register of a step."""
        for place in range(self.registers):
            register = step * self.registers + place
            group = self.kernel.blocks.group_of_lane(register)
            yield Registers(register=register, place=place, group_of_lane=group)

    def load(self, layout: Registers) -> Leaf:
        """Load a register of each array of the leaf, except its scales."""

        def elements(ref: Ref, register: jax.Array = layout.register) -> jax.Array:
            return ref[self.rows, columns_of(register)]

        read, of_block = self.read, []
        g, p, correction = jax.tree.map(elements, (read.g, read.p, read.correction))
        several = (slot.codes_per_byte for slot in self.kernel.plan.slots)
        slots = zip(read.slots, several, strict=True)
        stored = tuple(elements(ref, _byte(layout.register, codes)) for ref, codes in slots)
        if self.scratch.of_rows is not None:
            of_block.append(self.scratch.of_rows[self.rows, :])
        if read.of_block is not None and read.of_block.columns is not None:
            of_block.append(read.of_block.columns[self.repeated, columns_of(layout.register)])
        # without scales, which `units` replace
        return Leaf(g, p, stored, (), correction, product(of_block) if of_block else None)

    @functools.cached_property
    def row_seeds(self) -> jax.Array | None:
        """R of the groups in the unit, [ROWS, 128]."""
        if not self.kernel.plan.noisy:
            return None
        first = self.block[0] * self.kernel.blocks.block_rows + self.i * ROWS
        places = self.kernel.blocks.coordinates(first, self.block[1])
        return random.mix(random.counter(self.key[0], places))

    def seeds(self, layout: Registers) -> random.Seeds | None:
        """Return R of the elements and C of the lanes."""
        rows = self.row_seeds
        if rows is None:
            return None
        first = layout.place % self.kernel.blocks.registers_per_group * LANES
        return layout.to_elements(rows), self.lane_seeds[:, first : first + LANES]

    def advance_and_move(self) -> None:
        """Write new weights (or updates) and corrections, and the new values of the slots.

        Step j also writes one register for each span of a codec, in which its groups are partly
        reduced; `measure` reduces the rest.
        """
        kernel, plan, scratch = self.kernel, self.kernel.plan, self.scratch
        units = jax.tree.map(lambda ref: ref[self.rows, :], scratch.units)
        self.row_seeds  # noqa: B018 (cached here: a value of one loop cannot be used in the other)

        def body(j: jax.Array) -> None:
            spans: dict[str, list[tuple[Span, ...]]] = {name: [] for name in kernel.codecs}
            for layout in self.registers_of(j):
                leaf, columns = self.load(layout), layout.columns
                bits = None
                if leaf.p is not None:
                    bits = reference.master_bits(plan, self.seeds(layout), layout)
                moved, correction, values = reference.advance_weight(
                    kernel.rule, plan, leaf, self.h, bits, layout, units
                )
                written = self.written.p
                written[self.rows, columns] = moved.astype(written.dtype)
                if correction is not None:
                    self.written.correction[self.rows, columns] = correction
                for name, value in values.items():
                    scratch.values[name][:, columns] = value
                for name, codec in kernel.codecs.items():
                    spans[name].append(codec.spans(values[name]))
            for name, of_registers in spans.items():
                for ref, alike in zip(
                    scratch.ends[name], zip(*of_registers, strict=True), strict=True
                ):
                    ref[j] = self.reduced(alike)

        self.every(body)

    def reduced(self, spans: tuple[Span, ...]) -> jax.Array:
        """Reduce the registers of each group to one, and these to one of several groups."""
        of_two, per_group = spans[0].of_two, self.kernel.blocks.registers_per_group
        registers = [span.values for span in spans]
        groups = [
            functools.reduce(of_two, registers[k : k + per_group])
            for k in range(0, len(registers), per_group)
        ]
        return lanes.tree(groups, of_two)

    def measure(self) -> reference.Measured:
        """Write the new scales, and return the divisors of the codes."""
        kernel, blocks = self.kernel, self.kernel.blocks
        measured: dict[str, tuple[jax.Array | None, PyTree]] = {}
        something = jnp.zeros((ROWS, LANES), jnp.float32)
        for i, (name, codec) in enumerate(kernel.codecs.items()):
            ends = []
            for ref, span in zip(self.scratch.ends[name], codec.spans(something), strict=True):
                missing = blocks.lanes_per_group // blocks.parts - ref.shape[0]
                parts = [*(ref[j] for j in range(ref.shape[0])), *([None] * missing)]
                ends.append(blocks.in_order(lanes.tree(parts, span.of_two, blocks.parts)))
            stored, divisor = codec.scaled(tuple(ends))
            if blocks.transposed:
                self.scratch.scales[name][self.rows, :] = stored.astype(_word(stored.dtype))
            else:
                self.written.scales[i][self.rows, :] = stored[:, : blocks.block_groups]
            measured[name] = None, divisor
        return measured

    def write_codes(self, measured: reference.Measured) -> None:
        """Encode the new values, and write their codes."""
        plan = self.kernel.plan

        def body(j: jax.Array) -> None:
            stored: list[list[jax.Array]] = [[] for _ in plan.slots]
            layouts = list(self.registers_of(j))
            for layout in layouts:
                values = {name: ref[:, layout.columns] for name, ref in self.scratch.values.items()}
                seeds = self.seeds(layout) if plan.stochastic else None
                slots, _ = reference.encode_slots(plan, values, seeds, layout, measured)
                for registers, codes in zip(stored, slots, strict=True):
                    registers.append(codes)
            rows = zip(plan.slots, self.written.slots, stored, strict=True)
            for slot, ref, registers in rows:
                several = slot.codes_per_byte
                for first in range(0, len(registers), several):
                    parts = registers[first : first + several]
                    whole = parts[0] if several == 1 else lanes.in_bytes(parts, several)
                    place = columns_of(_byte(layouts[first].register, several))
                    ref[self.rows, place] = whole.astype(ref.dtype)

        self.every(body)


def _byte(register: jax.Array, several: int) -> jax.Array:
    """Return the register of bytes that holds a register of codes, `several` per byte."""
    return register if several == 1 else lax.div(register, jnp.int32(several))


def columns_of(register: jax.Array) -> Slice:
    """Return the slice of a register along a row of a block."""
    return pl.ds(pl.multiple_of(register * LANES, LANES), LANES)


def _word(dtype: jnp.dtype) -> jnp.dtype:
    """Return a 32-bit dtype that can hold scales of a dtype."""
    return jnp.dtype(jnp.int32) if dtype == jnp.uint16 else jnp.dtype(dtype)
