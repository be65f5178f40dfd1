"""NF4 with double quantization: a matrix in 4.127 bits per element, as bitsandbytes stores it.

Dettmers et al., QLoRA, 2023, arXiv 2305.14314: an element's code is the nearest of 16 quantiles of
a normal distribution, relative to the largest magnitude (absmax) of its block of 64. The absmax of
each block, less their mean, is stored in 8 bits relative to the largest of 256 blocks.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from optax_lowmem._src.arrays.sharding import left_to_xla, sharding_of, sharding_of_values
from optax_lowmem._src.arrays.shards import axes_of, spec_of

BLOCK = 64  # elements that share an absmax
NESTED_BLOCK = 256  # absmax that share a scale
_BYTE = 2  # codes in a byte, the first in the high bits

# Quantiles of N(0, 1), evenly spaced in probability on either side of 0, divided by the largest;
# as published in f32 (QLoRA, appendix E).
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@functools.cache
def dynamic_map() -> np.ndarray:
    """Return the 256 values of the 8-bit codes of absmax, ascending (f32).

    Decade i of 7, from 10^(i - 7) to 10^(i - 6), has 2^i magnitudes of either sign: the centres of
    equal intervals (Dettmers, 8-bit approximations, 2015, arXiv 1511.04561). The others are 0, 1.
    """
    magnitudes = []
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2**decade + 1, dtype=np.float32)
        magnitudes += [10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2]
    positive = np.concatenate(magnitudes)
    return np.sort(np.concatenate([-positive, positive, [0, 1]])).astype(np.float32)


def _midpoints(values: Any) -> np.ndarray:
    values = np.asarray(values, np.float32)
    return (values[1:] + values[:-1]) / 2


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "absmax", "nested_absmax", "offset"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class NF4Array:
    """A matrix in NF4, or a stack of them; a pytree, which `jit`, `scan` and `vmap` take apart.

    - `shape[-1]` is a multiple of 64, so a row has whole blocks.
    - Axes before the last two are a stack: each matrix has an offset and nested scales of its own,
      and indexing axis 0 of every array gives one of them.
    - The matrix is LEVELS[codes] times absmax, and absmax is the decoded 8 bits plus the offset.
    - A block whose elements are all 0 decodes to 0. A matrix with NaN decodes to NaN.

    Attributes:
      codes: uint8 [..., rows, columns / 2], two elements per byte, the first in the high bits.
      absmax: uint8 [..., rows, columns / 64], codes of `dynamic_map`.
      nested_absmax: f32 [..., ceil(rows columns / 64 / 256)], over 256 blocks in row-major order.
      offset: f32 [...], the mean of absmax.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> w = lowmem.layers.nf4.quantize(jnp.ones((128, 256)))
      >>> w.shape, sum(x.nbytes for x in (w.codes, w.absmax, w.nested_absmax, w.offset))
      ((128, 256), 16908)
    """

    codes: Any
    absmax: Any
    nested_absmax: Any
    offset: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, or of the stack."""
        return (*self.codes.shape[:-1], _BYTE * self.codes.shape[-1])

    @property
    def ndim(self) -> int:
        """Number of axes of the matrix, or of the stack."""
        return int(self.codes.ndim)

    def shardings(self, sharding: NamedSharding) -> "NF4Array":
        """Return the shardings of the arrays, for `device_put`, `jit` and restored checkpoints.

        Args:
          sharding: of the matrix as a whole; the scales of 256 blocks and the offset are replicated
            but for the axes of a stack.

        Returns:
          An `NF4Array` of `NamedSharding`s.

        Raises:
          ValueError: if a part would not have whole rows or whole blocks.
        """
        return _shardings(self.shape, sharding)


def _shardings(shape: tuple[int, ...], sharding: NamedSharding) -> NF4Array:
    spec = axes_of(sharding.spec, len(shape))
    sizes = (*shape[:-1], shape[-1] // BLOCK)
    for axis, (size, names) in enumerate(zip(sizes, spec, strict=True)):
        parts = math.prod(sharding.mesh.shape[name] for name in names)
        if size % parts:
            what = "blocks of 64" if axis == len(shape) - 1 else "elements"
            raise ValueError(
                f"the {size} {what} along axis {axis} of a matrix {list(shape)} cannot be divided "
                f"over the {parts} devices of {', '.join(names)}: shard another axis, or use mesh "
                "axes that divide them"
            )
    of_stack, whole = (sharding.update(spec=spec_of([*spec[:-2], *more])) for more in ([()], []))
    both = sharding.update(spec=spec_of([*spec]))
    return NF4Array(both, both, of_stack, whole)


def check_shape(shape: tuple[int, ...], what: str = "w") -> None:
    """Raise a ValueError for a shape that `quantize` does not support."""
    if len(shape) < 2 or shape[-1] % BLOCK or 0 in shape:
        raise ValueError(
            f"{what} has the shape {list(shape)}: NF4 stores matrices, or stacks of them, whose "
            f"last axis is a multiple of {BLOCK}; keep this one in 16 bits"
        )


def quantize(w: jax.Array) -> NF4Array:
    """Quantize a matrix [rows, columns], or a stack of them [..., rows, columns].

    Args:
      w: of a floating-point dtype; the arithmetic is f32. Blocks are along the last axis. PyTorch's
        [outputs, inputs] is what bitsandbytes quantizes.

    Returns:
      An `NF4Array`, whose elements differ from w by at most 0.152 of their block's largest
      magnitude (half the widest gap between levels) plus that magnitude's own error, at most
      0.0071 of the largest deviation from the mean magnitude among 256 blocks.

    Raises:
      ValueError: if the last axis is no multiple of 64, or there is no axis of rows.
      TypeError: if the dtype is not floating-point.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> w = jnp.tile(jnp.array([1.0, -2.0, 0.5, 0.0]), (2, 16))
      >>> q = lowmem.layers.nf4.quantize(w)
      >>> (100 * lowmem.layers.nf4.dequantize(q)[0, :4]).astype(int).tolist()
      [88, -200, 49, 0]
    """
    if not jnp.issubdtype(w.dtype, jnp.floating):
        raise TypeError(f"w is {w.dtype}; quantize takes floating-point matrices")
    check_shape(w.shape)
    return _quantized(w)


@jax.jit
def _quantized(w: jax.Array) -> NF4Array:
    sharding = sharding_of(w)
    return left_to_xla(_quantize, sharding and _shardings(w.shape, sharding), w)


def _quantize(w: jax.Array) -> NF4Array:
    *rows, columns = w.shape
    blocks = w.astype(jnp.float32).reshape(*rows, columns // BLOCK, BLOCK)
    largest = jnp.max(jnp.abs(blocks), -1)
    codes = _nearest_level(_relative(blocks, largest[..., None])).reshape(*rows, -1, _BYTE)
    packed = codes[..., 0] << 4 | codes[..., 1]
    offset = jnp.mean(largest, (-2, -1))
    above = _in_nested_blocks(largest - offset[..., None, None])
    nested = jnp.max(jnp.abs(above), -1)
    relative = _relative(above, nested[..., None])
    bytes_ = jnp.searchsorted(_midpoints(dynamic_map()), relative).astype(jnp.uint8)
    return NF4Array(packed, _from_nested_blocks(bytes_, largest.shape), nested, offset)


def _relative(x: jax.Array, largest: jax.Array) -> jax.Array:
    """Return x / largest, from -1 to 1; 0 where the largest is 0."""
    return jnp.clip(x * (1 / jnp.maximum(largest, jnp.finfo(jnp.float32).tiny)), -1, 1)


def _nearest_level(x: jax.Array) -> jax.Array:
    """Return the code of the nearest level; halfway between two, the lower."""
    bounds = _midpoints(LEVELS)
    return sum(((x > bound).astype(jnp.uint8) for bound in bounds), jnp.zeros(x.shape, jnp.uint8))


def _in_nested_blocks(x: jax.Array) -> jax.Array:
    """Reshape [..., rows, blocks] to [..., n, 256], in row-major order, padded with zeros."""
    flat = x.reshape(*x.shape[:-2], -1)
    padding = -flat.shape[-1] % NESTED_BLOCK
    if padding:
        flat = jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, padding)])
    return flat.reshape(*flat.shape[:-1], -1, NESTED_BLOCK)


def _from_nested_blocks(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Invert `_in_nested_blocks`."""
    flat = x.reshape(*x.shape[:-2], -1)
    return flat[..., : math.prod(shape[-2:])].reshape(shape)


def decoded_absmax(w: NF4Array) -> jax.Array:
    """Return the absmax of each block, f32 [..., rows, columns / 64]."""
    return left_to_xla(_decoded_absmax, sharding_of(w.absmax), w)


def _decoded_absmax(w: NF4Array) -> jax.Array:
    scale = jnp.broadcast_to(w.nested_absmax[..., None], (*w.nested_absmax.shape, NESTED_BLOCK))
    codes = w.absmax.astype(jnp.int32)
    relative = jnp.asarray(dynamic_map()).at[codes].get(mode="promise_in_bounds")
    scale = _from_nested_blocks(scale, w.absmax.shape)
    # The minimum changes nothing, but keeps XLA from fusing product and sum into one operation:
    # bitsandbytes rounds between them.
    return jnp.minimum(relative * scale, scale) + w.offset[..., None, None]


def decode(codes: jax.Array, absmax: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return the matrix of packed codes and the absmax of blocks; the arithmetic is f32."""
    sharding = sharding_of_values(codes, _BYTE * codes.shape[-1])
    return left_to_xla(functools.partial(_decoded, dtype), sharding, codes, absmax)


def _decoded(dtype: DTypeLike, codes: jax.Array, absmax: jax.Array) -> jax.Array:
    *rows, size = codes.shape
    is_second = lax.broadcasted_iota(jnp.uint8, (*codes.shape, _BYTE), codes.ndim)
    of_elements = (codes[..., None] >> (4 - 4 * is_second) & jnp.uint8(15)).astype(jnp.int32)
    levels = jnp.array(LEVELS, jnp.float32).at[of_elements].get(mode="promise_in_bounds")
    blocks = levels.reshape(*rows, -1, BLOCK) * absmax[..., None]
    return blocks.astype(dtype).reshape(*rows, _BYTE * size)


@functools.partial(jax.jit, static_argnames="dtype")
def dequantize(w: NF4Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Return the matrix that the codes stand for, in a floating-point dtype.

    Args:
      w: the quantized matrix, or a stack of them.
      dtype: of the result, which is computed in f32 and rounded once.

    Returns:
      An array of the shape `w.shape`.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> w = lowmem.layers.nf4.quantize(jnp.full((2, 64), -3.0))
      >>> lowmem.layers.nf4.dequantize(w, jnp.bfloat16)[0, 0].item()
      -3.0
    """
    return decode(w.codes, decoded_absmax(w), dtype)


# ---- bitsandbytes --------------------------------------------------------------------------------

_STATE = "quant_state.bitsandbytes__nf4"


def from_bitsandbytes(tensors: Mapping[str, np.ndarray], name: str) -> NF4Array:
    """Return a matrix of a checkpoint that bitsandbytes quantized; its codes are kept as they are.

    Args:
      tensors: the checkpoint's, as safetensors reads them.
      name: of the matrix, such as `model.layers.0.mlp.up_proj.weight`. The others begin with it:
        `.absmax`, `.nested_absmax`, `.quant_map`, `.nested_quant_map`, and
        `.quant_state.bitsandbytes__nf4`, whose bytes are JSON.

    Returns:
      An `NF4Array` of the shape that the checkpoint names: PyTorch's [outputs, inputs].

    Raises:
      ValueError: if a tensor is missing, or the matrix has other blocks, another map, or no double
        quantization.

    Example:
      >>> tensors = safetensors.numpy.load_file("model.safetensors")  # doctest: +SKIP
      >>> w = from_bitsandbytes(tensors, "model.layers.0.mlp.up_proj.weight")  # doctest: +SKIP
    """
    parts = ("absmax", "nested_absmax", "quant_map", "nested_quant_map", _STATE)
    missing = [f"{name}.{part}" for part in parts if f"{name}.{part}" not in tensors]
    if name not in tensors or missing:
        raise ValueError(
            f"{', '.join(missing or [name])} not in the checkpoint: {name} is not stored in NF4 "
            "with double quantization (bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True)"
        )
    of = {part: np.asarray(tensors[f"{name}.{part}"]) for part in parts}
    state = json.loads(of[_STATE].astype(np.uint8).tobytes())
    sizes = {"blocksize": BLOCK, "nested_blocksize": NESTED_BLOCK}
    for key, size in sizes.items():
        if state.get(key) != size:
            raise ValueError(f"{name} has {key} {state.get(key)}; {size} is supported")
    for key, values in (("quant_map", LEVELS), ("nested_quant_map", dynamic_map())):
        if not np.allclose(of[key], values, rtol=0, atol=1e-6):
            raise ValueError(f"{name}.{key} is not the map that bitsandbytes publishes")
    *rows, columns = shape = tuple(state["shape"])
    check_shape(shape, name)
    return NF4Array(
        jnp.asarray(np.asarray(tensors[name]).reshape(*rows, columns // _BYTE)),
        jnp.asarray(of["absmax"].reshape(*rows, columns // BLOCK)),
        jnp.asarray(of["nested_absmax"], jnp.float32),
        jnp.float32(state["nested_offset"]),
    )
