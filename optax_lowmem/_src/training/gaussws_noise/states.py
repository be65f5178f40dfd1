"""Read bitwidths from a state of `gaussws_noise`, and print tables of them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lowmem._src.arrays import trees
from optax_lowmem._src.arrays.typing import Arrays, PyTree
from optax_lowmem._src.layers.noise.bitwidth import (
    SafeFormat,
    bitwidth,
    fake_cast,
    most_bits,
    safe_format,
)
from optax_lowmem._src.optim.step.masters import FIELD


def bitwidths(state: optax.OptState) -> dict[str, jax.Array]:
    """Return b_t of every sampled leaf, by path.

    Args:
      state: state of an optimizer that contains `gaussws_noise`.

    Returns:
      path -> f32 [..., ceil(m / 32), ceil(n / 32)].

    Raises:
      ValueError: for a state without `gaussws_noise`.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> from optax_lowmem import gaussws
      >>> tx = lowmem.gaussws_noise(lowmem.flash_adamw(1e-3), parts="*")
      >>> gaussws.bitwidths(tx.init({"w": jnp.ones((64, 40))}))["w"].tolist()
      [[6.0, 6.0], [6.0, 6.0]]
    """
    results = {
        path: bitwidth(b, *node.bits_range)
        for node in trees.states_with(state, FIELD, trees.is_ours)
        for path, b in trees.named_leaves(node.bits)
        if b.ndim
    }
    if not results:
        raise ValueError("the state holds no bitwidths: its optimizer has no gaussws_noise")
    return results


@dataclasses.dataclass(frozen=True)
class LayerBits:
    """Bitwidths of one layer, which may be part of a stack.

    Attributes:
      path: path of the leaf, with the index in a stack: `layers/mlp/down_proj/kernel[3]`.
      blocks: number of blocks.
      least: min b_t.
      mean: mean b_t over blocks.
      deviation: standard deviation of b_t over blocks.
      largest: max b_t.
      safe: the format of Table 2 for the largest b_t; None if that is under 2.
      over: share of blocks whose b_t exceeds `BitsTable.bound`.
    """

    path: str
    blocks: int
    least: float
    mean: float
    deviation: float
    largest: float
    safe: SafeFormat | None
    over: float


@dataclasses.dataclass(frozen=True)
class BitsTable:
    """Table of bitwidths, one row per layer (Figure 6, appendix C), to print.

    Attributes:
      rows: the layers.
      format: name of the format that sampled weights are cast to.
      bound: largest b_t whose noise does not underflow in it, for every block maximum.
    """

    rows: tuple[LayerBits, ...]
    format: str
    bound: int

    def __str__(self) -> str:
        """Return one line per layer, then the number of layers whose noise may underflow."""
        width = max([len(row.path) for row in self.rows], default=5)
        head = f"{'layer':<{width}}{'blocks':>8}{'min':>8}{'mean':>8}{'std':>8}{'max':>8}  safe"
        lines = [head]
        for row in self.rows:
            numbers = (row.least, row.mean, row.deviation, row.largest)
            safe = f"e{row.safe.exponent}m{row.safe.mantissa}" if row.safe else "-"
            cells = "".join(f"{x:>8.3f}" for x in numbers)
            lines.append(f"{row.path:<{width}}{row.blocks:>8}{cells}  {safe}")
        over = [row for row in self.rows if row.over]
        summary = f"{len(over)} of {len(self.rows)} layers have blocks over b_t = {self.bound}"
        return "\n".join([*lines, f"{summary}, where noise may underflow in {self.format}"])


def bits_table(bits: Arrays, format: str = "bfloat16", noise: str = "gaussws") -> BitsTable:
    """Tabulate bitwidths per layer, with safe formats and blocks whose noise may underflow.

    Args:
      bits: path -> b_t, as returned by `bitwidths`; axes before the last two index layers.
      format: name of the format that sampled weights are cast to.
      noise: the distribution of R.

    Returns:
      A `BitsTable`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem import gaussws
      >>> print(gaussws.bits_table({"down": jnp.asarray([[4.0, 6.0]])}, "mxfp8_e4m3"))
      layer  blocks     min    mean     std     max  safe
      down       2   4.000   5.000   1.000   6.000  e3m4
      1 of 1 layers have blocks over b_t = 4, where noise may underflow in mxfp8_e4m3
    """
    bound, rows = most_bits(format, noise, any_maximum=True), []
    for path, of_leaf in bits.items():
        whole = np.asarray(of_leaf, np.float64)
        layers = whole.reshape(-1, math.prod(whole.shape[-2:]))
        for index, layer in zip(np.ndindex(whole.shape[:-2]), layers, strict=True):
            name = path + (f"[{', '.join(map(str, index))}]" if index else "")
            top = float(layer.max())
            safe = safe_format(top) if top >= 2 else None
            numbers = float(layer.min()), float(layer.mean()), float(layer.std()), top
            rows.append(LayerBits(name, layer.size, *numbers, safe, float((layer > bound).mean())))
    return BitsTable(tuple(rows), format, bound)


def safe_cast(weights: optax.Params, bits: Arrays) -> PyTree:
    """Round each layer's weights to the format of Table 2 for its largest b_t.

    Args:
      weights: a tree of clean weights, or of weights of a control run without noise.
      bits: path -> b_t, as returned by `bitwidths`.

    Returns:
      The tree; leaves named in `bits` are rounded by `fake_cast` and keep their dtype.

    Raises:
      ValueError: for a path in `bits` that the tree does not have.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem import gaussws
      >>> cast = gaussws.safe_cast({"w": jnp.asarray([[1.0, 0.9]])}, {"w": jnp.full((1, 1), 3.0)})
      >>> cast["w"].tolist()
      [[1.0, 1.0]]
    """
    leaves = trees.named_leaves(weights)
    missing = sorted(bits.keys() - {path for path, _ in leaves})
    if missing:
        raise ValueError(f"bits has bitwidths of '{missing[0]}', which is no leaf of the weights")
    cast = [_cast(leaf, bits[path]) if path in bits else leaf for path, leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(weights), cast)


def _cast(w: jax.Array, bits: jax.Array) -> jax.Array:
    layers = w.reshape(-1, *w.shape[-2:])
    tops = np.asarray(bits, np.float64).reshape(len(layers), -1).max(axis=1)
    cast = [fake_cast(one, safe_format(top)) for one, top in zip(layers, tops, strict=True)]
    return jnp.stack(cast).reshape(w.shape).astype(w.dtype)
