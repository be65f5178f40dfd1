"""Newton-Schulz iterations for the polar factor of each matrix in a stack (Muon)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

Coefficients = tuple[tuple[float, float, float], ...]  # a, b, c of each iteration

# coefficients of optax.contrib.muon, under its names
STANDARD = (3.4445, -4.7750, 2.0315)
_DION = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
# Amsel et al., arXiv 2505.16932, Algorithm 1, for singular values from 1e-3 to 1; all but the last
# divide them by 1.01, since rounding may leave them above 1, where these polynomials diverge
_POLAR_EXPRESS = (
    *(
        (a / 1.01, b / 1.01**3, c / 1.01**5)
        for a, b, c in (
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        )
    ),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
PRESETS: dict[str, Sequence[float] | Sequence[Sequence[float]]] = {
    "standard": STANDARD,
    "dion": _DION,
    "polar_express": _POLAR_EXPRESS,
    "turbo": _DION[1:],  # Boissin et al., arXiv 2512.04632: AOL replaces the first iteration
}
PRECONDITIONINGS = ("frobenius", "spectral", "aol", "schatten")
_LONG = 2  # ratio of the sides from which iterations on the Gram matrix take less time on a GPU
# Iterations on one Gram matrix multiply small singular values by at most this. Its rounding errors
# grow along: without such a limit singular values come out as large as 30.
_GROWTH = 64
_SMALLEST = 1e-8  # lower bound of the divisors of 'aol' and 'schatten', as in optax


def polar_factors(
    stack: jax.Array, coefficients: Coefficients, preconditioning: str, eps: jax.Array
) -> jax.Array:
    """Approximate U V^T of each X = U S V^T by iterating f(X) = a X + (b A + c A^2) X, A = X X^T.

    For tall matrices A is X^T X, which is smaller, and f(X) = a X + X (b A + c A^2); no matrix is
    transposed. Matrices with one side at least `_LONG` times the other are multiplied only once
    per two or three iterations: f(X) = P X with P = a I + b A + c A^2, so the next A is P A P, and
    products of P accumulate on the short side.

    Args:
      stack: [matrices, rows, columns]; products are computed in this dtype.
      coefficients: (a, b, c) of each iteration.
      preconditioning: one of `PRECONDITIONINGS`: how singular values are bounded beforehand.
      eps: added to the norm by which `frobenius` and `spectral` divide a matrix.
    """
    x, gram = stack, None
    if preconditioning in ("frobenius", "spectral"):
        wide = stack.astype(jnp.float32)
        order = "fro" if preconditioning == "frobenius" else 2
        norm = jnp.linalg.norm(wide, ord=order, axis=(1, 2), keepdims=True)
        x = (wide / (norm + eps)).astype(stack.dtype)
    else:
        x, gram = _rescaled(x, _gram(x), preconditioning)
    short, long = sorted(x.shape[1:])
    if long >= _LONG * max(short, 1):
        for segment in _segments(coefficients):
            x, gram = _multiplied_once(x, _gram(x) if gram is None else gram, segment), None
        return x
    rows = jnp.asarray(coefficients, stack.dtype)
    if gram is not None:
        x, rows = _iterated(x, gram, rows[0]), rows[1:]
    # a loop frees the intermediates of each iteration
    return lax.fori_loop(0, len(rows), lambda i, x: _iterated(x, _gram(x), rows[i]), x)


def _segments(coefficients: Coefficients) -> list[Coefficients]:
    """Divide iterations into segments, each of which starts from a new Gram matrix."""
    segments: list[Coefficients] = []
    growth = math.inf
    for row in coefficients:
        growth *= abs(row[0])
        if growth > _GROWTH:
            segments, growth = [*segments, ()], abs(row[0])
        segments[-1] += (row,)
    return segments


def _multiplied_once(x: jax.Array, gram: jax.Array, coefficients: Coefficients) -> jax.Array:
    """Return the result of several iterations, which multiply x once."""

    def times(one: jax.Array, other: jax.Array) -> jax.Array:
        pair = one.astype(x.dtype), other.astype(x.dtype)
        return jnp.matmul(*pair, preferred_element_type=jnp.float32)

    gram, total = gram.astype(jnp.float32), None
    identity = jnp.eye(gram.shape[-1])[None]
    for i, (a, b, c) in enumerate(coefficients):
        factor = a * identity + b * gram + c * times(gram, gram)
        total = factor if total is None else times(factor, total)
        if i + 1 < len(coefficients):
            gram = times(times(factor, gram), factor)
    assert total is not None
    return (times(x, total) if _is_tall(x) else times(total, x)).astype(x.dtype)


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
