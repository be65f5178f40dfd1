"""Adam-mini and the affine quantizer of Q-Adam-mini in float64, from its section 2.1 alone.

`v` holds one value a block, flat, in the order of the blocks' numbers; codes are eq. 1's, from -128
to 127, on a group view (..., groups, lanes) with delta and z of shape (..., groups).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from .codecs import Array, round_half_away

LOWEST, LEVELS = -128, 255  # INT8, and how many codes lie above the lowest
FLOOR = 1e-5  # of the range, in the authors' implementation


# -- the step --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Block:
    """Elements that share a second moment: all along `axes`, and those of one head.

    heads: (axis, count); the axis holds `count` heads of equally many neighbours.
    """

    axes: tuple[int, ...] = ()
    heads: tuple[int, int] | None = None

    def numbers(self, shape: tuple[int, ...]) -> Array:
        """For each element the number of its block, counted in the order of the axes."""
        numbers = np.zeros(shape, np.int64)
        for axis, (length, index) in enumerate(zip(shape, np.indices(shape), strict=True)):
            if axis - len(shape) in self.axes or axis in self.axes:
                continue
            count = length
            if self.heads and self.heads[0] % len(shape) == axis:
                count = self.heads[1]
                index = index // (length // count)
            numbers = numbers * count + index
        return numbers

    def average(self, x: Array) -> Array:
        """The mean of each block, in the order of the numbers."""
        numbers = self.numbers(x.shape).ravel()
        return np.bincount(numbers, np.float64(x).ravel()) / np.bincount(numbers)


def init(theta: Array, block: Block) -> tuple[Array, Array]:
    """m and v_mean of 0."""
    return np.zeros(np.shape(theta)), np.zeros(block.numbers(np.shape(theta)).max(initial=0) + 1)


def step(
    theta: Array,
    m: Array,
    v: Array,
    g: Array,
    t: int,
    block: Block,
    *,
    lr: float | Callable[[int], float],
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    weight_decay: float = 0.0,
    peak_lr: float | None = None,
    debias: bool = True,
) -> tuple[Array, Array, Array]:
    """Section 2.1.2, t from 1: weights, m, v_mean.

    Its formula is eps = 0, eps_root for its epsilon, debias=False. A schedule is called with t - 1;
    peak_lr: weight decay is scaled by lr / peak_lr instead of by lr.
    """
    theta, g = np.float64(theta), np.float64(g)
    rate = lr(t - 1) if callable(lr) else lr
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * block.average(g**2)
    m_hat, v_hat = (m / (1 - b1**t), v / (1 - b2**t)) if debias else (m, v)
    root = (np.sqrt(v_hat + eps_root) + eps)[block.numbers(g.shape)]
    decay = weight_decay * (rate if peak_lr is None else rate / peak_lr)
    return theta - rate * m_hat / root - decay * theta, m, v


def trajectory(
    theta: Array, grads: Sequence[Array], block: Block, **hyper
) -> list[tuple[Array, Array, Array]]:
    """[(weights, m, v_mean)] after every step on a fixed stream of gradients."""
    states = [(np.float64(theta), *init(theta, block))]
    for t, g in enumerate(grads, start=1):
        states.append(step(*states[-1], g, t, block, **hyper))
    return states[1:]


# -- eq. 1 -----------------------------------------------------------------------------------------


def quantize(
    x: Array, delta: Array, z: Array, rounding: Callable[[Array], Array] = np.rint
) -> Array:
    """clamp(round(x / delta) + z, -128, 127); a delta of 0 (a group of zeros) takes z."""
    steps = x / np.where(delta > 0, delta, 1.0)[..., None]
    return np.clip(rounding(steps) + z[..., None], LOWEST, LOWEST + LEVELS).astype(np.int8)


def codes_of(stored: Array, z: Array) -> Array:
    """The codes in [-128, 127] of what is stored: code - z modulo 256."""
    return (np.int32(stored) + np.int32(z)[..., None] - LOWEST) % (LEVELS + 1) + LOWEST


def dequantize(codes: Array, delta: Array, z: Array) -> Array:
    """delta (code - z)."""
    return delta[..., None] * (np.float64(codes) - z[..., None])


def reference(x: Array) -> tuple[Array, Array, Array]:
    """Codes, delta and z as the authors choose them, their 0 to 255 moved to -128 to 127.

    Half goes to even; the range need not hold 0, so z of a group of one sign is clipped too.
    """
    x = np.float64(x)
    low, high = x.min(-1), x.max(-1)
    delta = np.maximum(high - low, FLOOR) / LEVELS
    z = np.clip(-np.rint(low / delta), 0, LEVELS) + LOWEST
    return quantize(x, delta, z), delta, z


def zero_inside(x: Array) -> tuple[Array, Array, Array]:
    """Codes, delta and z of the range widened to hold 0, in 254 steps; nothing is clipped.

    The range rounds to at most 255 steps, at half a step either end, and these fit in 256 codes.
    """
    x = np.float64(x)
    low, high = np.minimum(x.min(-1), 0), np.maximum(x.max(-1), 0)
    delta = (high - low) / (LEVELS - 1)
    z = LOWEST - round_half_away(low / np.where(delta > 0, delta, 1.0))
    return quantize(x, delta, z, round_half_away), delta, z
