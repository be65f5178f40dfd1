"""Appendix D of SwitchBack, measured: the error of each product against the length of its sums."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from optax_lowmem import layers
from optax_lowmem._src.quantized_matmul import INT8, quantize

WIDE = 128  # of the axes that are not summed over: 16,384 sums
LENGTHS = (256, 1024, 4096, 16384, 65536)
# The products of X [tokens, in] and W [in, out], and which of the three sizes each sums over.
PRODUCTS = {"forward": 1, "input gradient": 2, "weight gradient": 0}
Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
# Of variance 1. The maxima of n numbers of Student's grow as the fourth root of n.
DRAWS: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "student-t(4)": lambda rng, shape: rng.standard_t(4, shape) / 2**0.5,
}


@dataclasses.dataclass(frozen=True)
class Spread:
    """Of the sums of one product."""

    error: float  # variance of the error, in 8 bits
    exact: float  # variance of the sums themselves
    predicted: float  # of the error, by equation 12 with the measured variance of the quantizer
    quantizer: float  # that variance, mean of both operands

    @property
    def relative(self) -> float:
        """Variance of the error over that of the sums."""
        return self.error / self.exact


def operands(product: str, length: int, draw: Draw, seed: int) -> tuple[jax.Array, ...]:
    """X [tokens, in], W [in, out] and the gradient G [tokens, out]: one size is `length`."""
    sizes = [WIDE] * 3
    sizes[PRODUCTS[product]] = length
    tokens, width, out = sizes
    rng = np.random.default_rng(seed)
    shapes = ((tokens, width), (width, out), (tokens, out))
    return tuple(jnp.asarray(draw(rng, shape), jnp.float32) for shape in shapes)


def results(variant: str, x: jax.Array, w: jax.Array, g: jax.Array) -> dict[str, jax.Array]:
    """The three products of a linear layer."""
    dot = layers.switchback_dot_general(variant)

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return dot(x, w, (((1,), (0,)), ((), ())), precision=jax.lax.Precision.HIGHEST)

    y, pull = jax.vjp(layer, x, w)
    return dict(zip(PRODUCTS, (y, *pull(g)), strict=True))


def _quantizer_variance(x: jax.Array, axis: int) -> jax.Array:
    """Mean square of the error of int8, row-wise along `axis`."""
    codes, scales = quantize(x, axis, INT8)
    return jnp.mean((codes.astype(jnp.float32) * scales - x) ** 2)


@functools.partial(jax.jit, static_argnames=("variant", "product"))
def _spread(
    variant: str, product: str, x: jax.Array, w: jax.Array, g: jax.Array
) -> dict[str, jax.Array]:
    exact = results("standard", x, w, g)[product]
    error = results(variant, x, w, g)[product] - exact
    # the operands, with the axis that is summed over
    u, v = {
        "forward": ((x, 1), (w, 0)),
        "input gradient": ((g, 1), (w, 1)),
        "weight gradient": ((x, 0), (g, 0)),
    }[product]
    of_u, of_v = _quantizer_variance(*u), _quantizer_variance(*v)
    # equation 12 with a variance of its own for each operand
    more = of_u * jnp.mean(v[0] ** 2) + of_v * jnp.mean(u[0] ** 2) + of_u * of_v
    return {
        "error": jnp.mean(error**2),
        "exact": jnp.mean(exact**2),
        "predicted": u[0].shape[u[1]] * more,
        "quantizer": (of_u + of_v) / 2,
    }


def spread(variant: str, product: str, length: int, draw: str = "normal", seed: int = 0) -> Spread:
    """The error of one product of a variant, and what it is expected to be."""
    found = _spread(variant, product, *operands(product, length, DRAWS[draw], seed))
    return Spread(**{name: float(value) for name, value in found.items()})
