"""Group codecs: store a slot as low-bit codes with one scale per group, and decode it.

A codec works on a group view [..., groups, lanes] and is pure jnp, so that the XLA path and a
kernel body call the same functions. Only `GroupCodec.storage` defines the stored shapes and dtypes.
"""

import abc
import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.arrays import groups, numerics
from optax_lowmem._src.arrays.reprs import ShowsChanges
from optax_lowmem._src.arrays.typing import PyTree, Tree

# ---- the scale of a group: f32, 16 bits with an 8-bit exponent, or the paper's FP16 --------------

MAX_SCALE = 2.0**126  # its reciprocal is still normal
_MAX_BITS = (126 + 127) << 23


def guard(bits: jax.Array) -> jax.Array:
    """Guard scale bits: subnormal -> 0, over 2^126 -> 2^126 (codes saturate), inf or NaN -> NaN."""
    clamped = numerics.at_most(bits, _MAX_BITS)
    kept = jnp.where(bits < numerics.MIN_NORMAL_BITS, jnp.uint32(0), clamped)
    return jnp.where(bits >= numerics.INF_BITS, jnp.uint32(numerics.NAN_BITS), kept)


@dataclasses.dataclass(frozen=True)
class ScaleFormat(ShowsChanges):
    """Storage format of scales, with bounds of its rounding errors.

    `encode` returns stored scales from the bits of the group maxima, `decode` f32 scales.
    """

    name: ClassVar[str]
    dtype: ClassVar[jnp.dtype]
    relative_error: ClassVar[float] = 0.0
    absolute_error: ClassVar[float] = 0.0


@dataclasses.dataclass(frozen=True)
class Float32Scale(ScaleFormat):
    """f32, four bytes per group: resolves second moments that change by 5e-4 per step."""

    name = "f32"
    dtype = jnp.dtype(jnp.float32)

    def encode(self, absmax: jax.Array) -> jax.Array:
        return numerics.from_bits(guard(absmax))

    def decode(self, stored: jax.Array) -> jax.Array:
        return stored


@dataclasses.dataclass(frozen=True)
class E8M8Scale(ScaleFormat):
    """Unsigned float with 8 exponent and 8 mantissa bits: two bytes per group, the range of f32.

    Encoding rounds up: a scale below the group maximum would clip the largest value a little at
    every step, and a slow moving average would end up to 16 % too small.
    """

    name = "e8m8"
    dtype = jnp.dtype(jnp.uint16)
    relative_error = 2.0**-8

    def encode(self, absmax: jax.Array) -> jax.Array:
        """Return stored scales from the bits of the group maxima, rounded up to 8 mantissa bits."""
        return ((guard(absmax) + 0x7FFF) >> 15).astype(jnp.uint16)

    def decode(self, stored: jax.Array) -> jax.Array:
        return numerics.from_bits(stored.astype(jnp.uint32) << 15)


@dataclasses.dataclass(frozen=True)
class Float16Scale(ScaleFormat):
    """FP16 as in the paper, two bytes per group; unguarded: 0 under 3e-8, inf over 65504."""

    name = "f16"
    dtype = jnp.dtype(jnp.float16)
    relative_error = 2.0**-11
    absolute_error = 2.0**-25  # half the spacing of its subnormals

    def encode(self, absmax: jax.Array) -> jax.Array:
        return numerics.from_bits(absmax).astype(jnp.float16)

    def decode(self, stored: jax.Array) -> jax.Array:
        return stored.astype(jnp.float32)


class StoredSlot(NamedTuple):
    """Codes and scales of a slot, as arrays or as shapes and dtypes."""

    codes: PyTree
    scales: PyTree

    def is_like(self, other: "StoredSlot") -> bool:
        """Return whether both have the same shapes and dtypes."""
        rows = zip(self, other, strict=True)
        return all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in rows)

    @property
    def text(self) -> str:
        """Return for example `int8[64, 64] codes with float32[64, 2] scales`."""
        codes, scales = (f"{x.dtype}{list(x.shape)}" for x in self)
        return f"{codes} codes with {scales} scales"


class Span(NamedTuple):
    """Elementwise values whose maximum (or minimum) over a group determines the group's scale."""

    values: jax.Array
    largest: bool = True  # reduce by the maximum, else by the minimum

    def of_two(self, one: jax.Array, other: jax.Array) -> jax.Array:
        """Return the elementwise maximum (or minimum) of two arrays."""
        return (jnp.maximum if self.largest else jnp.minimum)(one, other)


@dataclasses.dataclass(frozen=True)
class GroupCodec(ShowsChanges, abc.ABC):
    """Store a slot as codes of up to 8 bits and one scale per group.

    8-bit codes are stored unchanged. Narrower codes share a byte with their neighbours on the last
    axis, the first in the lowest bits.

    Attributes:
      scale: storage format of the group scales.
      guarded: whether codes use the scale as stored, zero groups decode to 0 and non-finite groups
        to NaN. False is the paper's form.
      signed: whether values may be negative.
    """

    scale: ScaleFormat
    guarded: bool = True
    signed: bool = True

    bits = 8  # per code: 8, 4 or 2

    @property
    def dtype(self) -> jnp.dtype:
        """Return the dtype of the codes before packing."""
        return jnp.dtype(jnp.int8 if self.signed else jnp.uint8)

    @property
    def name(self) -> str:
        """Return for example `softsign-int8`, `sqrt-uint8-paper` or `linear-int4`."""
        kind = type(self).__name__.removesuffix("Codec").lower()
        form = f"{kind}-{'int' if self.signed else 'uint'}{self.bits}"
        return form + ("" if self.guarded else "-paper")

    # ---- storage -----------------------------------------------------------------------------

    @property
    def codes_per_byte(self) -> int:
        """Return the number of codes that share a byte."""
        return 8 // self.bits

    @property
    def no_tile_reason(self) -> str | None:
        """Return why tiles of a GPU kernel cannot hold the stored array, or None."""
        several = self.codes_per_byte
        if several & (several - 1) == 0:
            return None
        return f"{self.name} stores {several} codes per byte, and kernel tiles need a power of two"

    def storage(self, shape: tuple[int, ...], group_size: int) -> StoredSlot:
        """Return the shapes and dtypes of codes and scales, for values of rank 1 or more.

        Raises:
          ValueError: if a byte would hold codes of two groups.
        """
        codes = jax.ShapeDtypeStruct(shape, self.dtype)
        if self.bits < 8:
            self.check_group_size(group_size)
            codes = jax.ShapeDtypeStruct(groups.scale_shape(shape, self.codes_per_byte), jnp.uint8)
        scales = groups.scale_shape(shape, group_size)
        return StoredSlot(codes, jax.ShapeDtypeStruct(scales, self.scale.dtype))

    def check_group_size(self, group_size: int) -> None:
        """Raise if a byte would hold codes of two groups."""
        if group_size % self.codes_per_byte:
            raise ValueError(
                f"{self.name} stores {self.codes_per_byte} codes per byte, so its group_size must "
                f"be a multiple of {self.codes_per_byte}, got {group_size}"
            )

    def pack(self, codes: jax.Array) -> jax.Array:
        """Return the stored form of codes [..., n]; unused bits of a row's last byte are 0."""
        if self.bits == 8:
            return codes
        in_bytes = groups.to_groups(self.bits_in_byte(codes), self.codes_per_byte)
        return jnp.sum(in_bytes, axis=-1, dtype=jnp.int32).astype(jnp.uint8)

    def bits_in_byte(self, codes: jax.Array) -> jax.Array:
        """Return each code shifted to its place in its byte (int32); bytes are sums of these."""
        fields = codes.astype(jnp.int32) & (2**self.bits - 1)
        return fields << (self.place_in_byte(codes.shape) * self.bits)

    def unpack(self, stored: jax.Array, length: int) -> jax.Array:
        """Return the codes [..., length] of a stored array; a byte of 0 gives codes of 0."""
        if self.bits == 8:
            return stored
        return self.of_bytes(groups.spread(stored.astype(jnp.int32), length, self.codes_per_byte))

    def of_bytes(self, spread: jax.Array) -> jax.Array:
        """Return the codes, given for each element the byte (int32) that contains its code."""
        offsets = self.place_in_byte(spread.shape) * self.bits
        fields = (spread >> offsets) & (2**self.bits - 1)
        sign = 2 ** (self.bits - 1) if self.signed else 0
        return ((fields ^ sign) - sign).astype(self.dtype)

    def place_in_byte(self, shape: tuple[int, ...]) -> jax.Array:
        """Return the index of each code within its byte, for codes of this shape."""
        lane = lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
        return lax.rem(lane, jnp.uint32(self.codes_per_byte)).astype(jnp.int32)

    # ---- arithmetic --------------------------------------------------------------------------

    def measure(self, x: jax.Array) -> tuple[jax.Array, PyTree]:
        """Return the stored scales [..., groups] of a group view, and divisors for `quantize`."""
        spans = self.spans(x)
        ends = tuple((jnp.max if s.largest else jnp.min)(s.values, axis=-1) for s in spans)
        return self.scaled(ends)

    @abc.abstractmethod
    def spans(self, x: jax.Array) -> tuple[Span, ...]:
        """Return the elementwise values that are reduced over each group for `scaled`.

        The reduction is separate, so that a kernel whose groups are not on the last axis can reduce
        in its own way.
        """

    @abc.abstractmethod
    def scaled(self, ends: tuple[jax.Array, ...]) -> tuple[jax.Array, PyTree]:
        """Return stored scales and divisors for `quantize`, from the reduced `spans`."""

    @abc.abstractmethod
    def quantize(
        self, x: jax.Array, divisor: PyTree, uniforms: jax.Array | None = None
    ) -> jax.Array:
        """Return codes of f32 values, elementwise; `divisor` and `uniforms` broadcast.

        Args:
          x: f32 values of any shape.
          divisor: result of `measure` for each element's group.
          uniforms: numbers in [0, 1) for stochastic rounding; None rounds to nearest.
        """

    @abc.abstractmethod
    def units(self, stored: jax.Array) -> PyTree:
        """Return what `dequantize` needs per group, from the stored scales."""

    @abc.abstractmethod
    def dequantize(self, codes: jax.Array, unit: PyTree) -> jax.Array:
        """Return f32 values of codes, elementwise; the group's `unit` broadcasts."""

    @abc.abstractmethod
    def error_bound(self, x: jax.Array, stochastic: bool = False) -> jax.Array:
        """Return an upper bound of |decode(encode(x)) - x| per element of a finite group view.

        For guarded codecs it holds for all of f32, including values over 2^126, which saturate, and
        values that are flushed to 0. Subnormal values count as 0.
        """

    def encode(
        self, x: jax.Array, uniforms: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return codes [..., groups, lanes] and stored scales [..., groups] of a group view."""
        stored, divisor = self.measure(x)
        return self.quantize(x, _per_element(divisor), uniforms), stored

    def decode(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
        """Return f32 values [..., groups, lanes] of codes and stored scales [..., groups]."""
        return self.dequantize(codes, _per_element(self.units(scales)))


@dataclasses.dataclass(frozen=True)
class Layout:
    """Layout of arrays in groups; here of whole arrays, [..., n], with groups on the last axis."""

    # number of neighbours on the last axis that share a scale, and one value of the random bits R
    group_size: int
    length: int  # of the last axis

    def to_groups(self, x: jax.Array) -> jax.Array:
        """Reshape an array to [..., groups, lanes]."""
        return groups.to_groups(x, self.group_size)

    def to_elements(self, of_groups: Tree) -> Tree:
        """Broadcast values per group to their elements."""
        return jax.tree.map(lambda x: groups.spread(x, self.length, self.group_size), of_groups)

    def unpack(self, codec: GroupCodec, stored: jax.Array) -> jax.Array:
        """Unpack stored bytes into codes."""
        return codec.unpack(stored, self.length)

    def pack(self, codec: GroupCodec, codes: jax.Array) -> jax.Array:
        """Pack codes into stored bytes."""
        return codec.pack(codes)


def _per_element(of_groups: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[..., None], of_groups)
