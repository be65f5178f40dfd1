"""The body of the TPU kernel: a block of a leaf, some rows and registers at a time."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from optax_lowmem._src.codecs import GroupCodec
from optax_lowmem._src.core import numerics, random
from optax_lowmem._src.core.block import product
from optax_lowmem._src.step import reference
from optax_lowmem._src.step.operands import Leaf
from optax_lowmem._src.step.plan import LeafPlan, LeafState, SlotPlan
from optax_lowmem._src.step.rule import OF_BLOCK, UpdateRule
from optax_lowmem._src.step.tpu import lanes
from optax_lowmem._src.step.tpu.lanes import LANES, ROWS, Blocks

# Divisions, logarithms and powers as Mosaic has them; what it computes is as on a CPU otherwise.
ARITHMETIC = numerics.Approximations(reciprocal=None, gpu=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Registers:
    """Arrays [rows, 128] of one place along a row; values of groups lie on the lanes of a unit."""

    register: jax.Array  # along the row of the block
    place: int  # among those that are stepped together
    group_of_lane: jax.Array
    group_size = 1  # random bits of groups are those of elements already
    length = LANES

    @property
    def columns(self) -> Any:
        """The place in a row of a block."""
        return columns_of(self.register)

    def to_groups(self, x: jax.Array) -> jax.Array:
        """Not used: groups are measured by `lanes.tree`."""
        raise NotImplementedError("the groups of registers have no axis of their own")

    def to_elements(self, of_groups: Any) -> Any:
        """Values of groups for each of their elements."""
        return jax.tree.map(lambda x: lanes.gather(x, self.group_of_lane), of_groups)

    def operands(self, h: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """Hyperparameters that broadcast to the elements."""
        return h

    def unpack(self, codec: GroupCodec, stored: jax.Array) -> jax.Array:
        """Codes of what is stored, which is a register of bytes for several of codes."""
        several = codec.codes_per_byte
        if several == 1:
            return stored
        lane = lanes.bytes_of_lane(self.place % several, several)
        return codec.of_bytes(lanes.gather(stored.astype(jnp.int32), lane))

    def pack(self, codec: GroupCodec, codes: jax.Array) -> jax.Array:
        """Codes, or what each of them is in its byte."""
        return codes if codec.codes_per_byte == 1 else codec.bits_in_byte(codes)


# ---- a block ----------------------------------------------------------------------------------


class Scratch(NamedTuple):
    """A core's memory that a block is stepped in."""

    units: dict[str, Any]  # of each codec, what its codes are decoded with: [rows, 128]
    scales: dict[str, Any]  # new ones, in words of 32 bits: [rows, 128]
    values: dict[str, Any]  # of each slot, new ones of a row of the block: [ROWS, width]
    ends: dict[str, Any]  # of each codec's spans, of some registers each: [n, ROWS, 128]
    of_rows: Any = None  # the operand of blocks of whole rows: [rows, 128]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The static part of a kernel.

    Attributes:
      rule: the optimizer's arithmetic.
      plan: the leaf's.
      blocks: how its arrays are cut.
      names: of the hyperparameters.
    """

    rule: UpdateRule
    plan: LeafPlan
    blocks: Blocks
    names: tuple[str, ...]

    @property
    def codecs(self) -> dict[str, GroupCodec]:
        """The codec of each slot that has one."""
        return {slot.name: slot.codec for slot in self.plan.slots if slot.codec is not None}

    def scratch(self) -> Scratch:
        """Shapes of the memory of a block."""
        blocks, codecs = self.blocks, self.codecs
        of_rows = jax.ShapeDtypeStruct((blocks.block_rows, LANES), jnp.float32)
        registers = jax.ShapeDtypeStruct((ROWS, LANES), jnp.float32)

        def units(codec: GroupCodec) -> Any:
            scales = jax.ShapeDtypeStruct(of_rows.shape, codec.scale.dtype)
            return jax.eval_shape(codec.units, scales)

        def ends(codec: GroupCodec) -> Any:
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

    # ---- body --------------------------------------------------------------------------------

    def run(
        self, scalars: Any, key: Any, lane_bits: Any, read: Any, written: Any, scratch: Scratch
    ) -> None:
        """Step a block."""
        h = {name: scalars[j] for j, name in enumerate(self.names)}
        block = pl.program_id(0), pl.program_id(1)
        with numerics.kernel_arithmetic(ARITHMETIC):
            self.decode(read, scratch)

            def step(i: jax.Array, nothing: None) -> None:
                rows = Rows(self, block, i, h, key, lane_bits, read, written, scratch)
                rows.advance()
                rows.encode(rows.measure())

            lax.fori_loop(0, self.blocks.block_rows // ROWS, step, None)
            if self.blocks.transposed:
                for name, ref in zip(self.codecs, written.scales, strict=True):
                    scales = scratch.scales[name][...].T[: self.blocks.block_groups]
                    ref[...] = scales.astype(ref.dtype)

    def decode(self, read: Any, scratch: Scratch) -> None:
        """Write what a block's scales, and values of blocks of rows, are to its elements."""
        for (name, codec), ref in zip(self.codecs.items(), read.scales, strict=True):
            self.decode_scales(codec, ref, scratch.units[name])
        if scratch.of_rows is not None:
            shape = (LANES, self.blocks.block_rows)
            scratch.of_rows[...] = jnp.broadcast_to(read.of_block.rows[...], shape).T

    def decode_scales(self, codec: GroupCodec, ref: Any, units: Any) -> None:
        """Write what the codes of a block are decoded with."""
        blocks = self.blocks
        found = codec.units(ref[...])
        for value, out in zip(jax.tree.leaves(found), jax.tree.leaves(units), strict=True):
            if blocks.transposed:
                missing = jnp.zeros((LANES - blocks.block_groups, blocks.block_rows), value.dtype)
                out[...] = (jnp.concatenate([value, missing]) if missing.size else value).T
            else:
                out[:, : blocks.block_groups] = value


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """ROWS rows of a block.

    Attributes:
      kernel: the static part.
      block: its place among the blocks.
      i: which rows of it.
      h: hyperparameters.
      key: of the bits R.
      lane_bits: the bits C of a register, or of those of a group, [1, lanes].
      read: references, as a `Leaf`.
      written: references, as a `Result`.
      scratch: a core's memory.
    """

    kernel: Kernel
    block: tuple[jax.Array, jax.Array]
    i: jax.Array
    h: Mapping[str, jax.Array]
    key: Any
    lane_bits: Any
    read: Any
    written: Any
    scratch: Scratch

    @property
    def rows(self) -> Any:
        """The rows, as an index of the block's arrays."""
        return pl.ds(pl.multiple_of(self.i * ROWS, ROWS), ROWS)

    @property
    def repeated(self) -> Any:
        """The rows, as an index of values that repeat after some."""
        period = self.read.of_block.columns.shape[0]
        if period == 1:
            return slice(None)
        first = self.block[0] * self.kernel.blocks.block_rows + self.i * ROWS
        return pl.ds(pl.multiple_of(lax.rem(first, jnp.int32(period)), ROWS), ROWS)

    @property
    def registers(self) -> int:
        """Registers along a row that are stepped together."""
        return self.kernel.blocks.at_once

    def every(self, step: Callable[[jax.Array], None]) -> None:
        """step(first register of some) along the row."""
        count = self.kernel.blocks.steps(self.block[1])

        def body(j: jax.Array, nothing: None) -> None:
            step(j)

        lax.fori_loop(0, count, body, None)

    def registers_of(self, step: jax.Array) -> Iterator[Registers]:
        """Yield the layouts of a step's registers."""
        for place in range(self.registers):
            register = step * self.registers + place
            group = self.kernel.blocks.group_of_lane(register)
            yield Registers(register, place, group)

    def load(self, layout: Registers) -> Leaf:
        """A register of each array of the leaf, but for scales and values of blocks."""

        def elements(ref: Any, register: jax.Array = layout.register) -> jax.Array:
            return ref[self.rows, columns_of(register)]

        g, p, correction = jax.tree.map(elements, self.read[:3])
        several = map(several_in_a_byte, self.kernel.plan.slots)
        slots = zip(self.read.slots, several, strict=True)
        stored = tuple(elements(ref, _byte(layout.register, codes)) for ref, codes in slots)
        return Leaf(g, p, correction, stored, ())

    def hyperparameters(self, layout: Registers) -> Mapping[str, jax.Array]:
        """Those of the step, with the operand of blocks."""
        if self.read.of_block is None:
            return self.h
        values = []
        if self.scratch.of_rows is not None:
            values.append(self.scratch.of_rows[self.rows, :])
        if self.read.of_block.columns is not None:
            values.append(self.read.of_block.columns[self.repeated, columns_of(layout.register)])
        return {**self.h, OF_BLOCK: product(values)}

    @functools.cached_property
    def random_bits(self) -> jax.Array | None:
        """R of the groups of the unit, [ROWS, 128]."""
        if not self.kernel.plan.noisy:
            return None
        first = self.block[0] * self.kernel.blocks.block_rows + self.i * ROWS
        places = self.kernel.blocks.coordinates(first, self.block[1])
        return random.row_bits(self.key[0], places)

    def noise(self, layout: Registers) -> tuple[jax.Array, jax.Array] | None:
        """R of elements, and C of lanes."""
        bits = self.random_bits
        if bits is None:
            return None
        first = layout.place % self.kernel.blocks.of_group * LANES
        return layout.to_elements(bits), self.lane_bits[:, first : first + LANES]

    def advance(self) -> None:
        """Moves the weight; writes new values of the slots, and the ends of their groups."""
        kernel, plan, scratch = self.kernel, self.kernel.plan, self.scratch
        units = jax.tree.map(lambda ref: ref[self.rows, :], scratch.units)
        self.random_bits  # noqa: B018 (drawn here, for both loops)

        def step(j: jax.Array) -> None:
            spans: dict[str, list[Any]] = {name: [] for name in kernel.codecs}
            for layout in self.registers_of(j):
                leaf, h, columns = self.load(layout), self.hyperparameters(layout), layout.columns
                correction = leaf.correction
                state = LeafState(leaf.slots, (), correction)  # `units` are there already
                moved, values = reference.advance(
                    kernel.rule, plan, leaf.g, leaf.p, state, h, layout, units
                )
                if leaf.p is not None:
                    own = reference.master_noise(plan, self.noise(layout), layout)
                    moved, correction = reference.move(plan, leaf.p, moved, correction, own)
                update = self.written.update
                update[self.rows, columns] = moved.astype(update.dtype)
                if self.written.correction is not None:
                    self.written.correction[self.rows, columns] = correction
                for name, value in values.items():
                    scratch.values[name][:, columns] = value
                for name, codec in kernel.codecs.items():
                    spans[name].append(codec.spans(values[name]))
            for name, parts in spans.items():
                for ref, alike in zip(scratch.ends[name], zip(*parts, strict=True), strict=True):
                    of_two, several = alike[0].of_two, kernel.blocks.of_group
                    of_registers = [span.values for span in alike]
                    groups = [
                        functools.reduce(of_two, of_registers[k : k + several])
                        for k in range(0, len(of_registers), several)
                    ]
                    ref[j] = lanes.tree(groups, of_two)

        self.every(step)

    def measure(self) -> reference.Measured:
        """Writes new scales, and gives the divisors of codes."""
        kernel, blocks = self.kernel, self.kernel.blocks
        measured: dict[str, Any] = {}
        something = jnp.zeros((ROWS, LANES), jnp.float32)
        for i, (name, codec) in enumerate(kernel.codecs.items()):
            ends = []
            for ref, span in zip(self.scratch.ends[name], codec.spans(something), strict=True):
                missing = blocks.lanes_of_group // blocks.parts - ref.shape[0]
                parts = [*(ref[j] for j in range(ref.shape[0])), *([None] * missing)]
                ends.append(blocks.in_order(lanes.tree(parts, span.of_two, blocks.parts)))
            stored, divisor = codec.scaled(tuple(ends))
            if blocks.transposed:
                self.scratch.scales[name][self.rows, :] = stored.astype(_word(stored.dtype))
            else:
                self.written.scales[i][self.rows, :] = stored[:, : blocks.block_groups]
            measured[name] = None, divisor
        return measured

    def encode(self, measured: reference.Measured) -> None:
        """Writes codes of the new values."""
        plan = self.kernel.plan

        def step(j: jax.Array) -> None:
            stored: list[list[jax.Array]] = [[] for _ in plan.slots]
            layouts = list(self.registers_of(j))
            for layout in layouts:
                values = {name: ref[:, layout.columns] for name, ref in self.scratch.values.items()}
                noise = self.noise(layout) if plan.stochastic else None
                slots, _ = reference.encode(plan, values, noise, layout, measured)
                for registers, codes in zip(stored, slots, strict=True):
                    registers.append(codes)
            rows = zip(plan.slots, self.written.slots, stored, strict=True)
            for slot, ref, registers in rows:
                several = several_in_a_byte(slot)
                for first in range(0, len(registers), several):
                    parts = registers[first : first + several]
                    whole = parts[0] if several == 1 else lanes.in_bytes(parts, several)
                    place = columns_of(_byte(layouts[first].register, several))
                    ref[self.rows, place] = whole.astype(ref.dtype)

        self.every(step)


def several_in_a_byte(slot: SlotPlan) -> int:
    """Return the number of codes in a byte of a slot; 1 of one without a codec."""
    return 1 if slot.codec is None else slot.codec.codes_per_byte


def _byte(register: jax.Array, several: int) -> jax.Array:
    """The register of the bytes of one of codes, `several` in each."""
    return register if several == 1 else lax.div(register, jnp.int32(several))


def columns_of(register: jax.Array) -> Any:
    """The place of a register along a row of a block."""
    return pl.ds(pl.multiple_of(register * LANES, LANES), LANES)


def _word(dtype: jnp.dtype) -> jnp.dtype:
    """A dtype of 32 bits that holds a scale's."""
    return jnp.dtype(jnp.int32) if dtype == jnp.uint16 else jnp.dtype(dtype)
