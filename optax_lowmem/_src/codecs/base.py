"""The codec of an 8-bit slot: scaling by what a group's values span, rounding, and back.

A codec works on a group view [..., groups, lanes] and is pure jnp, so that the XLA path and a
kernel body call the same functions.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from optax_lowmem._src.core.shown import ShowsChanges


@dataclasses.dataclass(frozen=True)
class GroupCodec(ShowsChanges, abc.ABC):
    """Stores a slot as 8-bit codes and one scale per group.

    Attributes:
      scale: how the scale of a group is stored; it has a `dtype`.
      guarded: codes use the scale as stored, zero and non-finite groups are exact. False is the
        paper's form.
      signed: whether values may be negative.
    """

    scale: Any
    guarded: bool = True
    signed: bool = True

    bits = 8
    zero_code: ClassVar[bool] = True  # code 0 stands for 0 in every group

    @property
    def dtype(self) -> jnp.dtype:
        """dtype of the codes."""
        return jnp.dtype(jnp.int8 if self.signed else jnp.uint8)

    @property
    def name(self) -> str:
        """For example `softsign-int8` or `sqrt-uint8-paper`."""
        kind = type(self).__name__.removesuffix("Codec").lower()
        return f"{kind}-{self.dtype.name}" + ("" if self.guarded else "-paper")

    @abc.abstractmethod
    def measure(self, x: jax.Array) -> tuple[jax.Array, Any]:
        """Stored scales [..., groups] of a group view, and what `quantize` needs of each group."""

    @abc.abstractmethod
    def quantize(self, x: jax.Array, divisor: Any, noise: jax.Array | None = None) -> jax.Array:
        """Codes of f32 values, elementwise; `divisor` (of `measure`) and `noise` broadcast.

        Args:
          x: f32 values of any shape.
          divisor: of each element's group.
          noise: uniforms in [0, 1) for stochastic rounding; None rounds to nearest.
        """

    @abc.abstractmethod
    def units(self, stored: jax.Array) -> Any:
        """Return the values of each group that `dequantize` takes, from its stored scale."""

    @abc.abstractmethod
    def dequantize(self, codes: jax.Array, unit: Any) -> jax.Array:
        """f32 values of codes, elementwise; the group's `unit` broadcasts."""

    @abc.abstractmethod
    def error_bound(self, x: jax.Array, stochastic: bool = False) -> jax.Array:
        """Upper bound of |decode(encode(x)) - x| for each element of a finite group view."""

    def encode(self, x: jax.Array, noise: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Codes [..., groups, lanes] and stored scales [..., groups] of a group view."""
        stored, divisor = self.measure(x)
        return self.quantize(x, _of_elements(divisor), noise), stored

    def decode(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
        """f32 values [..., groups, lanes] of codes and stored scales [..., groups]."""
        return self.dequantize(codes, _of_elements(self.units(scales)))


def _of_elements(of_groups: Any) -> Any:
    return jax.tree.map(lambda x: x[..., None], of_groups)
