"""Newton-Schulz iterations for the polar factor of each matrix in a stack (Muon)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

Coefficients = tuple[tuple[float, float, float], ...]  # a, b, c of each iteration

# coefficients of optax.contrib.muon, under its names
STANDARD = (3.4445, -4.7750, 2.0315)
PRESETS: dict[str, Sequence[float] | Sequence[Sequence[float]]] = {
    "standard": STANDARD,
    "dion": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
PRECONDITIONINGS = ("frobenius", "spectral", "aol", "schatten")
_SMALLEST = 1e-8  # lower bound of the divisors of 'aol' and 'schatten', as in optax


def polar_factors(
    stack: jax.Array, coefficients: Coefficients, preconditioning: str, eps: jax.Array
) -> jax.Array:
    """Approximate U V^T of each X = U S V^T by iterating f(X) = a X + (b A + c A^2) X, A = X X^T.

    For tall matrices A is X^T X, which is smaller, and f(X) = a X + X (b A + c A^2); no matrix is
    transposed.

    Args:
      stack: [matrices, rows, columns]; products are computed in this dtype.
      coefficients: (a, b, c) of each iteration.
      preconditioning: one of `PRECONDITIONINGS`: how singular values are bounded beforehand.
      eps: added to the norm by which a matrix is divided.
    """
    x = stack
    if preconditioning in ("frobenius", "spectral"):
        wide = stack.astype(jnp.float32)
        order = "fro" if preconditioning == "frobenius" else 2
        norm = jnp.linalg.norm(wide, ord=order, axis=(1, 2), keepdims=True)
        x = (wide / (norm + eps)).astype(stack.dtype)
    rows = jnp.asarray(coefficients, stack.dtype)
    if preconditioning in ("aol", "schatten"):
        x = _iterated(*_rescaled(x, _gram(x), preconditioning), rows[0])
        rows = rows[1:]
    # a loop frees the intermediates of each iteration
    return lax.fori_loop(0, len(rows), lambda i, x: _iterated(x, _gram(x), rows[i]), x)


def _is_tall(x: jax.Array) -> bool:
    return x.shape[1] > x.shape[2]


def _gram(x: jax.Array) -> jax.Array:
    """Return X X^T, or X^T X for matrices with more rows than columns."""
    return x.mT @ x if _is_tall(x) else x @ x.mT


def _iterated(x: jax.Array, gram: jax.Array, row: jax.Array) -> jax.Array:
    """Return a x + (b A + c A^2) x for A = x x^T, or a x + x (b A + c A^2) for A = x^T x."""
    a, b, c = row
    factor = b * gram + c * (gram @ gram)
    return a * x + (x @ factor if _is_tall(x) else factor @ x)


def _rescaled(x: jax.Array, gram: jax.Array, preconditioning: str) -> tuple[jax.Array, jax.Array]:
    """Scale x and its Gram matrix so that the singular values are at most about 1."""
    wide = gram.astype(jnp.float32)
    if preconditioning == "aol":  # one factor per row, from the sum of |elements| in A
        size = jnp.sum(jnp.abs(wide), axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.maximum(size, _SMALLEST))
        squared = scale * scale.mT
    else:  # one factor per matrix: |A|_F is the root of the sum of 4th powers of singular values
        size = jnp.linalg.norm(wide, ord="fro", axis=(1, 2), keepdims=True)
        scale = jax.lax.rsqrt(jnp.maximum(size, _SMALLEST))
        squared = scale * scale
    of_x = scale.mT if _is_tall(x) else scale
    scaled = (x.astype(jnp.float32) * of_x).astype(x.dtype)
    return scaled, (wide * squared).astype(x.dtype)
