"""8-bit formats of the operands of a matrix product."""

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Format:
    """Format that stores numbers between -largest and largest in a byte.

    Attributes:
      name: for example `int8`.
      dtype: of the codes.
      largest: the value that the largest magnitude of a row or tensor is scaled to.
    """

    name: str
    dtype: jnp.dtype
    largest: float

    @property
    def integer(self) -> bool:
        """Return whether codes are integers, whose products are summed exactly in int32."""
        return jnp.issubdtype(self.dtype, jnp.integer)

    def at_unit(self) -> "Format":
        """The format with the largest magnitude scaled to 1 (SwitchBack's simulated float8)."""
        return dataclasses.replace(self, name=f"{self.name}-unit", largest=1.0)


INT8 = Format("int8", jnp.dtype(jnp.int8), 127.0)
E4M3 = Format("e4m3", jnp.dtype(jnp.float8_e4m3fn), 448.0)
E5M2 = Format("e5m2", jnp.dtype(jnp.float8_e5m2), 57344.0)
FORMATS = {format.name: format for format in (INT8, E4M3, E5M2)}
