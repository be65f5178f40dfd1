"""Quantized products for what is written as an einsum."""

import dataclasses
import string

import jax
from jax.typing import DTypeLike

from optax_lowmem._src.switchback.dot_general import DotGeneral, switchback_dot_general


def switchback_einsum(
    variant: str = "switchback",
    format: str = "int8",
    *,
    scaling: str = "format",
    implementation: str = "quantized",
) -> "Einsum":
    """An einsum of an activation and a weight, in this order, whose product runs in 8 bits.

    (`jnp.einsum(..., _dot_general=...)` may exchange the operands, and a weight would get the
    scales of an activation.)

    Args:
      variant: as of `switchback_dot_general`, which has the mathematics and its limits.
      format: likewise.
      scaling: likewise.
      implementation: likewise.

    Returns:
      (subscripts, activation, weight, precision=, preferred_element_type=) -> array; for
      `nnx.Einsum(einsum_op=...)` too.

    Raises:
      ValueError: in a call, for subscripts that are no single product: of other than two operands,
        with a letter twice in one, or a sum over a letter that only one has.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem import layers
      >>> einsum = layers.switchback_einsum()
      >>> einsum("...d,dnh->...nh", jnp.ones((2, 5, 8)), jnp.ones((8, 4, 3))).shape
      (2, 5, 4, 3)
    """
    how = {"scaling": scaling, "implementation": implementation}
    return Einsum(switchback_dot_general(variant, format, **how))


@dataclasses.dataclass(frozen=True)
class Einsum:
    """Compares equal to one of the same settings."""

    dot_general: DotGeneral

    def __call__(
        self,
        subscripts: str,
        x: jax.Array,
        w: jax.Array,
        *,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        **more: object,
    ) -> jax.Array:
        """The product of `x` and the weight `w`."""
        left, right, out = _terms(subscripts, x.ndim, w.ndim)
        if len(set(out)) < len(out) or not set(out) <= {*left, *right}:
            raise ValueError(f"'{subscripts}': each letter of the result is once in an operand")
        batch = [c for c in left if c in right and c in out]
        summed = [c for c in left if c in right and c not in out]
        for own in (left, right):
            alone = set(own) - set(out) - set(summed)
            if alone or len(set(own)) < len(own):
                raise ValueError(
                    f"'{subscripts}' is no product of two arrays with one sum: a letter may not be "
                    "twice in an operand, nor be summed over in one alone."
                )
        numbers = tuple(
            tuple(tuple(own.index(c) for c in letters) for own in (left, right))
            for letters in (summed, batch)
        )
        y = self.dot_general(
            x, w, numbers, precision=precision, preferred_element_type=preferred_element_type,
            **more,
        )  # fmt: skip
        order = [*batch, *(c for c in left + right if c not in batch and c not in summed)]
        return y.transpose([order.index(c) for c in out])


def _terms(subscripts: str, *ranks: int) -> tuple[str, ...]:
    """The letters of both operands and of the result, without ellipses."""
    inputs, arrow, out = subscripts.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != 2:
        raise ValueError(f"'{subscripts}' has not the form 'xy,yz->xz'")
    spare = [c for c in string.ascii_letters if c not in subscripts]
    written = [len(term.replace("...", "")) for term in terms]
    wide = max(rank - count for rank, count in zip(ranks, written, strict=True))
    dots = "".join(spare[:wide])
    for i, (term, rank, count) in enumerate(zip(terms, ranks, written, strict=True)):
        own = rank - count
        if own < 0 or (own and "..." not in term):
            raise ValueError(f"'{term}' in '{subscripts}' is an array of rank {rank}")
        terms[i] = term.replace("...", dots[wide - own :])
    return terms[0], terms[1], out.replace("...", dots)
