"""SwitchBack's linear layers in float64, from eq. 1, 2 and 4 and Algorithms 1, 3 and 4.

Shapes are Flax's: X [b, k], W [k, m], the gradient G of Y [b, m]; the paper's W is our W^T, so
its rows are our columns. LLM.int8() is Algorithm 4 with the weight gradient row- and column-wise
in int8 too (section 2.2.3), `tensorwise` one scale for each of X, W and G in all three products
(section 2.3). Codes are exact; float8 values by ml_dtypes.
"""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

Array = np.ndarray
LARGEST = {"int8": 127.0, "e4m3": 448.0, "e5m2": 57344.0}
DTYPE = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
VARIANTS = ("switchback", "switchback_m", "switchback_q", "llm_int8", "tensorwise")


class Operand(NamedTuple):
    """codes * scale stands for an array; the scale is 1 long on the axes that share it."""

    codes: Array
    scale: Array

    @property
    def value(self) -> Array:
        return self.codes * self.scale


class Layer(NamedTuple):
    """A layer's three products, and what was multiplied: an array where it was not quantized."""

    y: Array
    dx: Array
    dw: Array
    operands: dict[str, tuple[Operand | Array, Operand | Array]]


def cast(position: Array, fmt: str) -> Array:
    """The nearest code of the format, ties to even, as a float64 value."""
    if fmt == "int8":
        return np.rint(position)
    return position.astype(DTYPE[fmt]).astype(np.float64)


def position(x: Array, axis: int | None, fmt: str, largest: float | None = None) -> Array:
    """x * largest / absmax before it is rounded (0 where the maximum is)."""
    x = np.asarray(x, np.float64)
    absmax = np.abs(x).max(axis=axis, keepdims=True)
    return x * ((largest or LARGEST[fmt]) / np.where(absmax > 0, absmax, 1))


def quantize(x: Array, axis: int | None, fmt: str, largest: float | None = None) -> Operand:
    """Q_row (an axis) or Q_tensor (None) and its state, absmax / largest."""
    absmax = np.abs(np.asarray(x, np.float64)).max(axis=axis, keepdims=True)
    return Operand(cast(position(x, axis, fmt, largest), fmt), absmax / (largest or LARGEST[fmt]))


def near_a_tie(x: Array, axis: int | None, fmt: str, by: float, largest=None) -> Array:
    """Return the mask of elements whose code a relative error of `by` in position may change."""
    at = position(x, axis, fmt, largest)
    return cast(at * (1 - by), fmt) != cast(at * (1 + by), fmt)


def multiply(a: Operand | Array, b: Operand | Array) -> Array:
    """Integers (or exact float8 values) summed exactly enough in float64, then scaled."""
    if isinstance(a, Operand) and isinstance(b, Operand):
        return (a.codes @ b.codes) * a.scale * b.scale
    return (a.value if isinstance(a, Operand) else a) @ (b.value if isinstance(b, Operand) else b)


def _axes(variant: str) -> tuple[int | None, int | None, int | None]:
    """Return the axis that shares a scale (None: all) for X and G, W forward, and W backward."""
    if variant in ("switchback", "switchback_m"):
        return 1, None, None
    if variant in ("switchback_q", "llm_int8"):
        return 1, 0, 1
    return None, None, None


def layer(
    x: Array,
    w: Array,
    g: Array,
    variant: str,
    formats: tuple[str, str] = ("int8", "int8"),
    largest: tuple[float | None, float | None] = (None, None),
) -> Layer:
    """Y = X W, dX = G W^T and dW = X^T G.

    Args:
      x: inputs [b, k].
      w: weights [k, m].
      g: gradient of the outputs [b, m].
      variant: of VARIANTS.
      formats: of X and W, and of G.
      largest: what their maxima become, where not the format's own.
    """
    x, w, g = (np.asarray(a, np.float64) for a in (x, w, g))
    rows, of_forward, of_backward = _axes(variant)
    forward, gradient = zip(formats, largest, strict=True)
    kept = quantize(x, rows, *forward)
    back = quantize(w, of_backward, *forward)
    transposed = Operand(back.codes.T, back.scale.T)
    used = {
        "y": (kept, quantize(w, of_forward, *forward)),
        "dx": (quantize(g, rows, *gradient), transposed),
    }
    if variant in ("llm_int8", "tensorwise"):  # sums over tokens: a scale for each column
        columns = None if variant == "tensorwise" else 0
        of_x = quantize(x, columns, *forward)
        used["dw"] = Operand(of_x.codes.T, of_x.scale.T), quantize(g, columns, *gradient)
    else:
        used["dw"] = (kept.value if variant == "switchback_m" else x).T, g
    return Layer(*(multiply(*used[name]) for name in ("y", "dx", "dw")), used)
