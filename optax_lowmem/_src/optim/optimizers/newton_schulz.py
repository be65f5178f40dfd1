"""Newton-Schulz iterations for the polar factor of each matrix in a stack (Muon)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from optax_lowmem._src.arrays.typing import PyTree

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
# Amsel et al., arXiv 2505.16932, Algorithm 1 with five iterations, for singular values from 1e-3 to
# 1. Each polynomial divides them by 1.01: rounding may leave them above 1, where it diverges.
# Algorithm 1 divides the matrix by 1.01 of its norm besides, unlike Algorithm 2 and 'frobenius'.
_POLAR_EXPRESS = tuple(
    (a / 1.01, b / 1.01**3, c / 1.01**5)
    for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    )
)
PRESETS: dict[str, Sequence[float] | Sequence[Sequence[float]]] = {
    "standard": STANDARD,
    "dion": _DION,
    "polar_express": _POLAR_EXPRESS,
    "turbo": _DION[1:],  # Boissin et al., arXiv 2512.04632: AOL replaces the first iteration
}
PRECONDITIONINGS = ("frobenius", "spectral", "aol", "schatten")
_LONG = 2  # ratio of the sides from which iterations on the Gram matrix take less time on a GPU
# Rounding errors of the Gram matrix grow with small singular values. All iterations use one if they
# multiply these by at most the first number (`standard`: 485, `dion`: 494), else each as many as
# multiply them by at most the second.
_GROWTH, _GROWTH_OF_SEGMENT = 512, 64
_SMALLEST = 1e-8  # lower bound of the divisors of 'aol' and 'schatten', as in optax


def polar_factors(
    stack: jax.Array, coefficients: Coefficients, preconditioning: str, eps: jax.Array
) -> jax.Array:
    """Approximate U V^T of each X = U S V^T by iterating f(X) = a X + (b A + c A^2) X, A = X X^T.

    For tall matrices A is X^T X, which is smaller, and f(X) = a X + X (b A + c A^2); no matrix is
    transposed. Matrices with one side at least `_LONG` times the other are iterated on A and
    multiplied once. The stack is [matrices, rows, columns], and products are computed in its dtype;
    coefficients are (a, b, c) of each iteration. `preconditioning` bounds singular values
    beforehand, by norms plus `eps` in `frobenius` and `spectral`.
    """
    x, (short, long) = stack, sorted(stack.shape[1:])
    if long >= _LONG * max(short, 1) and all(a for a, _, _ in coefficients):
        for i, segment in enumerate(_segments(coefficients)):
            gram = _gram(x, jnp.float32)
            scale = jnp.ones((1, 1, 1)) if i else _scale(x, gram, preconditioning, eps)
            x = _multiplied_once(x, gram, scale, segment)
        return x
    known = _gram(x, jnp.float32) if preconditioning in ("aol", "schatten") else None
    scale = _scale(x, known, preconditioning, eps)
    x = (x.astype(jnp.float32) * (scale.mT if _is_tall(x) else scale)).astype(x.dtype)
    rows = jnp.asarray(coefficients, jnp.float32)
    if known is not None:
        x, rows = _iterated(x, (known * (scale * scale.mT)).astype(x.dtype), rows[0]), rows[1:]
    # a loop frees the intermediates of each iteration
    return lax.fori_loop(0, len(rows), lambda i, x: _iterated(x, _gram(x), rows[i]), x)


def _segments(coefficients: Coefficients) -> list[Coefficients]:
    """Divide iterations into segments, each of which starts from a new Gram matrix."""
    factors = [abs(a) for a, _, _ in coefficients]
    if math.prod(factors) <= _GROWTH:
        return [coefficients]
    segments: list[Coefficients] = []
    growth = math.inf
    for row, factor in zip(coefficients, factors, strict=True):
        growth *= factor
        if growth > _GROWTH_OF_SEGMENT:
            segments, growth = [*segments, ()], factor
        segments[-1] += (row,)
    return segments


def _multiplied_once(
    x: jax.Array, gram: jax.Array, scale: jax.Array, coefficients: Coefficients
) -> jax.Array:
    """Return the result of several iterations on the Gram matrix, which multiply x once.

    With B = (b A + c A^2) / a, an iteration turns X into a (I + B) X and A into a^2 (I + B) A (I +
    B)^T. These are sums of f32 matrices with products of rounded ones, so that rounding hardly
    changes small singular values; `coefficients` of B absorb the factors a, which are not 0.
    `scale` multiplies each row of x, or column if it is tall, beforehand: f32 [., short, 1] or [.,
    1, 1].
    """
    rows, growth = [], 1.0
    for a, b, c in coefficients:
        rows.append((b / a * growth**2, c / a * growth**4))
        growth *= a
    # hidden from XLA, which would otherwise compile and tune the products of each iteration (no
    # upstream issue known)
    constants = lax.optimization_barrier(jnp.asarray(rows, jnp.float32))

    def plus(total: jax.Array, one: jax.Array, other: jax.Array) -> jax.Array:
        pair = one.astype(x.dtype), other.astype(x.dtype)
        return total + jnp.matmul(*pair, preferred_element_type=jnp.float32)

    def operands_of(gram: jax.Array, row: jax.Array) -> tuple[jax.Array | None, jax.Array]:
        rounded = None if x.dtype == gram.dtype else gram.astype(x.dtype)
        return rounded, _factor(gram, row[0], row[1], x.dtype)

    def iterated(i: jax.Array, carry: PyTree) -> PyTree:
        gram, rounded, factor, total = carry
        gram = plus(gram, gram if rounded is None else rounded, factor.mT)
        gram = plus(gram, factor, gram)
        rounded, factor = operands_of(gram, constants[i])
        return gram, rounded, factor, plus(total, factor, total)

    gram = gram * (scale * scale.mT)
    rounded, factor = operands_of(gram, constants[0])
    total = jnp.eye(gram.shape[-1])[None] + factor
    *_, total = lax.fori_loop(1, len(rows), iterated, (gram, rounded, factor, total))
    total = (total * (growth * scale.mT)).astype(x.dtype)
    return x @ total.mT if _is_tall(x) else total @ x


def _factor(gram: jax.Array, b: jax.Array, c: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return b A + c A^2 in a dtype."""
    return (b * gram).astype(dtype) + gram.astype(dtype) @ (c * gram).astype(dtype)


def _is_tall(x: jax.Array) -> bool:
    return x.shape[1] > x.shape[2]


def _gram(x: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Return X X^T, or X^T X for matrices with more rows than columns."""
    pair = (x.mT, x) if _is_tall(x) else (x, x.mT)
    return jnp.matmul(*pair, preferred_element_type=dtype)


def _iterated(x: jax.Array, gram: jax.Array, row: jax.Array) -> jax.Array:
    """Return a x + (b A + c A^2) x for A = x x^T, or a x + x (b A + c A^2) for A = x^T x."""
    a, b, c = row
    factor = _factor(gram, b, c, x.dtype)
    return (a * x).astype(x.dtype) + (x @ factor if _is_tall(x) else factor @ x)


def _scale(x: jax.Array, gram: jax.Array | None, preconditioning: str, eps: jax.Array) -> jax.Array:
    """Return the factor with which singular values are at most about 1, f32.

    It is [matrices, short side, 1] for 'aol', else [matrices, 1, 1]. Without the Gram matrix,
    'frobenius' and 'spectral' compute their norms, to which they add `eps`, from x.
    """
    if preconditioning in ("aol", "schatten"):
        assert gram is not None
        if preconditioning == "aol":  # one factor per row, from the sum of |elements| in A
            size = jnp.sum(jnp.abs(gram), axis=-1, keepdims=True)
        else:  # |A|_F is the root of the sum of 4th powers of singular values
            size = jnp.linalg.norm(gram, ord="fro", axis=(1, 2), keepdims=True)
        return lax.rsqrt(jnp.maximum(size, _SMALLEST))
    if preconditioning == "frobenius" and gram is not None:
        norm = jnp.sqrt(jnp.trace(gram, axis1=1, axis2=2))[:, None, None]
    else:
        order = "fro" if preconditioning == "frobenius" else 2
        norm = jnp.linalg.norm(x.astype(jnp.float32), ord=order, axis=(1, 2), keepdims=True)
    return 1 / (norm + eps)
