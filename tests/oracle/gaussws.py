"""GaussWS in float64 NumPy, written from the paper: equations 1 to 3, 8 to 10, Table 2, casts."""

from itertools import product

import numpy as np

Array = np.ndarray
SIDE = 32
# equation 8
PROBABILITIES = {
    -2: 3 / 4 * 2.0**-9,
    -1: (3 / 4) ** 2 * 2.0**-2,
    0: 1 - 2 * (3 / 4 * 2.0**-9 + (3 / 4) ** 2 * 2.0**-2),
    1: (3 / 4) ** 2 * 2.0**-2,
    2: 3 / 4 * 2.0**-9,
}


def blocks_of(shape: tuple[int, ...]):
    """(index of a block, slices of its elements) of an array [..., m, n]."""
    rows, columns = (range(0, size, SIDE) for size in shape[-2:])
    for lead in np.ndindex(shape[:-2]):
        for (i, top), (j, left) in product(enumerate(rows), enumerate(columns)):
            yield (*lead, i, j), (*lead, slice(top, top + SIDE), slice(left, left + SIDE))


def block_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], *(int(np.ceil(size / SIDE)) for size in shape[-2:]))


def maxima(w: Array) -> Array:
    """max |w| of each block."""
    found = np.zeros(block_shape(w.shape))
    for index, part in blocks_of(w.shape):
        found[index] = np.abs(w[part]).max()
    return found


def sample(w: Array, bits: Array, r: Array, held: Array | None = None) -> Array:
    """Equation 1; `held`: maxima that do not follow w."""
    w = np.asarray(w, np.float64)
    top, found = maxima(w) if held is None else held, np.empty_like(w)
    for index, part in blocks_of(w.shape):
        found[part] = w[part] + r[part] * (top[index] * 2.0 ** (1 - bits[index]))
    return found


def gradients(w: Array, bits: Array, r: Array, g: Array) -> tuple[Array, Array]:
    """Equations 2 and 3: of w and of b_t, from that of the sampled weights."""
    top, of_bits = maxima(np.asarray(w, np.float64)), np.zeros(block_shape(w.shape))
    for index, part in blocks_of(w.shape):
        total = (np.float64(g[part]) * r[part]).sum()
        of_bits[index] = -np.log(2) * top[index] * 2.0 ** (1 - bits[index]) * total
    return np.float64(g), of_bits


def bitwidth(b: Array, init: float, target: float) -> Array:
    """Equation 9."""
    return target + b * (init - target)


def loss(bits: list[Array], target: float, weight: float) -> float:
    """Compute the loss term of equation 10."""
    every = np.concatenate([np.ravel(b) for b in bits])
    return weight / every.size * np.abs(every - target).sum()


# ---- formats -------------------------------------------------------------------------------------


def numbers(mantissa: int, ranges: int, largest: float) -> Array:
    """The magnitudes of a format whose highest binade is [1, 2), in order."""
    steps = 2**mantissa
    lowest = 2.0 ** (1 - ranges)
    subnormal = [lowest * k / steps for k in range(steps)]
    normal = [
        2.0 ** (1 - ranges + e) * (1 + k / steps) for e in range(ranges) for k in range(steps)
    ]
    return np.array([x for x in subnormal + normal if x <= largest])


def cast(x: Array, mantissa: int, ranges: int, largest: float) -> Array:
    """Each block's values as the nearest numbers, ties to even codes, saturating.

    The block's maximum lies in the highest binade (OCP MX's shared exponent).
    """
    x = np.asarray(x, np.float64)
    table, found = numbers(mantissa, ranges, largest), np.zeros_like(x)
    for _, part in blocks_of(x.shape):
        top = np.abs(x[part]).max()
        scale = 2.0 ** np.floor(np.log2(top)) if top else 1.0
        size = np.abs(x[part]) / scale
        above = np.clip(np.searchsorted(table, size), 0, len(table) - 1)
        below = np.maximum(above - 1, 0)
        up, down = table[above] - size, size - table[below]
        tie = np.where(above % 2 == 0, table[above], table[below])
        near = np.where(up < down, table[above], np.where(up > down, table[below], tie))
        found[part] = np.sign(x[part]) * np.where(size >= table[-1], table[-1], near) * scale
    return found


def safe(bits: int) -> tuple[int, int, int]:
    """Exponent bits, normal ranges and mantissa bits (Table 2 and section 5).

    |w| under 2^(1 - b_t) of the scaled maximum is subnormal; equation 6 has the mantissa.
    """
    ranges = sum(2.0**-e >= 2.0 ** (1 - bits) for e in range(64))
    exponent = next(e for e in range(1, 9) if 2**e >= ranges + 1)
    return exponent, ranges, bits - 2
