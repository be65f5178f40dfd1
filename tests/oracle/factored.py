"""AdamW whose second moment is the outer product of means, in float64, from Adafactor's section 3.

Algorithm 4 of Shazeer & Stern (2018) has sums R and C over rows and columns, and R C / 1^T R; with
means instead that is R C / mean(R).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .codecs import Array


def second_moment(sums: tuple[Array, Array], shape: tuple[int, int]) -> Array:
    """Equation of section 3: the rank-one matrix with these sums over rows and over columns."""
    rows, columns = sums
    return np.outer(rows, columns) / rows.sum() * np.ones(shape)


def trajectory(
    theta: Array,
    grads: Sequence[Array],
    *,
    lr: float,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    weight_decay: float = 0.0,
) -> list[tuple[Array, Array, tuple[Array, Array]]]:
    """Weights [m, n], m and (sums over rows, sums over columns) after every step."""
    theta = np.float64(theta)
    m, rows, columns = np.zeros(theta.shape), np.zeros(len(theta)), np.zeros(theta.shape[1])
    found = []
    for t, g in enumerate(map(np.float64, grads), start=1):
        m = b1 * m + (1 - b1) * g
        rows = b2 * rows + (1 - b2) * (g**2).sum(1)
        columns = b2 * columns + (1 - b2) * (g**2).sum(0)
        v = second_moment((rows, columns), theta.shape) / (1 - b2**t)
        u = m / (1 - b1**t) / (np.sqrt(v + eps_root) + eps)
        theta = theta - lr * (u + weight_decay * theta)
        found.append((theta, m, (rows, columns)))
    return found
