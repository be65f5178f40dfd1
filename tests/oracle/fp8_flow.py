"""COAT's activations in float64: storage by groups, norms, gated products, and their gradients.

COAT, section 3 (Q and DQ), section 5.2 (1 x G groups, per-tensor scales for products), figure 1.
Gradients are straight through: those of the operation where its input is as it was kept. A scale is
kept with 8 bits behind the leading one, rounded up (the paper: bf16, to nearest).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .switchback import LARGEST, cast

Array = np.ndarray
BITS = 8  # of a scale's mantissa


class Stored(NamedTuple):
    """codes * limits / 448, with a limit for each element."""

    codes: Array
    limits: Array

    @property
    def scale(self) -> Array:
        return self.limits / LARGEST["e4m3"]

    @property
    def value(self) -> Array:
        return self.codes * self.scale


def rounded_up(x: Array) -> Array:
    """Positive numbers with BITS bits behind the leading one."""
    unit = 2.0 ** (np.floor(np.log2(x)) - BITS)
    return np.ceil(x / unit) * unit


def limits(x: Array, group_size: int, least: float = 2.0**-100) -> Array:
    """The scale of each element's group: the maximum of `group_size` neighbours."""
    found = np.empty(x.shape)
    for start in range(0, x.shape[-1], group_size):
        group = x[..., start : start + group_size]
        most = np.abs(group).max(axis=-1, keepdims=True)
        found[..., start : start + group_size] = rounded_up(np.maximum(most, least))
    return found


def store(x: Array, group_size: int) -> Stored:
    """Q of each group."""
    x = np.float64(x)
    most = limits(x, group_size)
    return Stored(cast(x / most * LARGEST["e4m3"], "e4m3"), most)


def near_a_tie(position: Array, by: float) -> Array:
    """Return the mask of positions whose E4M3 code a relative error of `by` may change."""
    return cast(position * (1 - by), "e4m3") != cast(position * (1 + by), "e4m3")


# ---- norms ---------------------------------------------------------------------------------------


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def rms_norm_gradients(x: Array, scale: Array, eps: float, g: Array) -> tuple[Array, Array]:
    """Of x and scale."""
    r = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    dx = r * scale * g - x * r**3 * (scale * g * x).mean(-1, keepdims=True)
    return dx, (g * x * r).reshape(-1, x.shape[-1]).sum(0)


def layer_norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return rms_norm(centred, scale, eps) + bias


def layer_norm_gradients(
    x: Array, scale: Array, eps: float, g: Array
) -> tuple[Array, Array, Array]:
    """Of x, scale and bias."""
    centred = x - x.mean(-1, keepdims=True)
    dx, dscale = rms_norm_gradients(centred, scale, eps, g)
    return dx - dx.mean(-1, keepdims=True), dscale, g.reshape(-1, x.shape[-1]).sum(0)


# ---- activation functions ------------------------------------------------------------------------

_erf = np.vectorize(math.erf)
_ROOT = math.sqrt(2 / math.pi)


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(x / 2))


def _tanh(x: Array) -> Array:
    return np.tanh(_ROOT * (x + 0.044715 * x**3))


def activation(name: str, x: Array) -> tuple[Array, Array]:
    """f(x) and f'(x)."""
    if name == "silu":
        s = _sigmoid(x)
        return x * s, s * (1 + x * (1 - s))
    if name == "relu":
        return np.maximum(x, 0), np.float64(x > 0)
    if name == "gelu_exact":
        cdf = 0.5 * (1 + _erf(x / math.sqrt(2)))
        return x * cdf, cdf + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    t = _tanh(x)
    inner = _ROOT * (1 + 3 * 0.044715 * x**2)
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * inner


def gated(name: str, gate: Array, up: Array) -> Array:
    return activation(name, gate)[0] * up


def gated_gradients(name: str, gate: Array, up: Array, g: Array) -> tuple[Array, Array]:
    """Of gate and up."""
    value, slope = activation(name, gate)
    return slope * up * g, value * g
