"""Quantized products in the form of a `dot_general`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from optax_lowmem._src.arrays.hyperparameters import check_choice
from optax_lowmem._src.layers.quantized_matmul import E4M3, E5M2, INT8, Format
from optax_lowmem._src.layers.switchback.choice import IMPLEMENTATIONS, Choice, choose
from optax_lowmem._src.layers.switchback.products import VARIANTS, ProductSettings, matmul

DotGeneral = Callable[..., jax.Array]
# name -> formats of (activations and weights, gradients)
FORMATS: dict[str, tuple[Format, Format]] = {
    "int8": (INT8, INT8),
    "fp8": (E4M3, E4M3),
    "fp8-e5m2": (E4M3, E5M2),
}
SCALINGS = ("format", "unit")
STANDARD = "standard"


def switchback_dot_general(
    variant: str = "switchback",
    format: str = "int8",
    *,
    scaling: str = "format",
    implementation: str = "quantized",
) -> DotGeneral:
    r"""Return a `jax.lax.dot_general` whose products run in 8 bits, forward and backward.

    Y = s_X s_W / 127^2 * Q_{row}(X) Q_{tensor}(W) (SwitchBack, eq. 2), likewise the gradient of X;
    the gradient of W, whose sums are the longest, stays in the inputs' precision.

    Args:
      variant: `switchback` (Algorithm 1), `switchback_m` (Algorithm 3: saves X only as codes for
        the backward pass), `switchback_q` (Algorithm 4: a scale for each row and column of W),
        `llm_int8` (all three products row-wise), `tensorwise` (all three, one scale per tensor:
        section 2.3's float8), `standard` (`jax.lax.dot_general` itself).
      format: `int8`; `fp8` (E4M3); `fp8-e5m2` (E5M2 for gradients).
      scaling: the code of the largest magnitude: `format`, the format's largest number, or `unit`,
        1, as in the paper's simulated float8.
      implementation: `quantized`, always 8 bits; `auto`, the standard products where they are
        estimated to be faster on a Hopper GPU (narrow layers, few tokens), otherwise 8 bits. `auto`
        is not the default, since numerics then depend on sizes and on the machine. Sizes are as
        traced: under `vmap` those of one example, in a `shard_map` those of one device. The
        result's `.choose(tokens, inputs, outputs)` returns the choice and its reason.

    Returns:
      A function to pass as `dot_general=` of `nn.Dense`, `nn.DenseGeneral`, `nnx.Linear`,
      `nnx.LinearGeneral`, as `qkv_dot_general=` and `out_dot_general=` of attention. The
      right operand is the weight. Batch axes (in both operands) have separate scales for each of
      their products.

    Raises:
      ValueError: for another variant, format, scaling or implementation; in a product, for int8
        sums of more than 133,144 terms.
      TypeError: if gradients are differentiated again.

    Numerics: rounding to nearest, ties to even; int8 sums exact in int32; FP8 sums in f32 or in the
    GPU's accumulator (Hopper keeps about 14 bits of a sum: errors of 0.3 % rms at 16,384 terms,
    also with XLA, a tenth of the error of a product by E4M3's rounding); f32 scales. Zero rows give
    0. If a row's maximum is not finite, its outputs are not finite. A maximum below 2^-100 counts
    as 2^-100. Straight-through gradients.

    On a mesh: each device multiplies its shards. Data-parallel tokens add no collective; sharded
    weights add one scalar per pass (they are gathered as codes, once per pass). If a contracted
    axis is sharded (Y's under row-wise, dX's under column-wise tensor parallelism), one maximum per
    token is reduced, and int8 partial sums are communicated as int32. `switchback_q` and `llm_int8`
    reduce a maximum for each sharded row and column. On Explicit axes a gradient has the sharding
    of its operand, and `out_sharding` is as in `jax.lax.dot_general`. In a `jax.shard_map` of yours
    each device has separate scales.

    Deviation: `switchback_m` quantizes W again in the backward pass instead of saving its codes.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from optax_lowmem import layers
      >>> layer = nn.Dense(3, dot_general=layers.switchback_dot_general("switchback", "fp8"))
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 8)))[0].shape
      (2, 3)
    """
    check_choice("format", format, FORMATS)
    check_choice("scaling", scaling, SCALINGS)
    check_choice("variant", variant, (STANDARD, *VARIANTS))
    formats = FORMATS[format]
    if scaling == "unit":
        if format == "int8":
            raise ValueError("scaling='unit' needs float8: int8 has only -1, 0 and 1 in [-1, 1]")
        formats = formats[0].at_unit(), formats[1].at_unit()
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}; "
            'for the standard products use variant="standard"'
        )
    if variant == STANDARD:
        return lax.dot_general
    return _DotGeneral(ProductSettings(VARIANTS[variant], *formats), implementation)


@dataclasses.dataclass(frozen=True)
class _DotGeneral:
    """A `dot_general` that compares by its settings, so that modules and jit caches reuse it."""

    settings: ProductSettings
    implementation: str

    def choose(
        self, tokens: int, inputs: int, outputs: int, dtype: DTypeLike = "bfloat16"
    ) -> Choice:
        """Choose 8-bit or standard products, with a reason, for the sizes of a layer's operands."""
        if self.implementation == "quantized":
            return Choice(True, 'in 8 bits: implementation="quantized"')
        return choose(self.settings, tokens, inputs, outputs, jnp.dtype(dtype))

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: lax.DotDimensionNumbers,
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: jax.sharding.NamedSharding | None = None,
        **more: object,
    ) -> jax.Array:
        """Compute `jax.lax.dot_general` in 8 bits; the weight is `rhs`."""
        if given := [name for name, value in more.items() if value is not None]:
            raise TypeError(f"a quantized dot_general takes no {', '.join(given)}")
        dtype = jnp.result_type(lhs, rhs)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"a quantized dot_general takes floats, got {lhs.dtype}, {rhs.dtype}")
        result = jnp.dtype(preferred_element_type or dtype)
        if out_sharding is not None and rhs.ndim != 2:
            raise TypeError(f"out_sharding needs a weight that is a matrix, got {rhs.shape}")
        lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
        (sum_l, sum_r), (batch_l, batch_r) = (tuple(map(tuple, pair)) for pair in dimension_numbers)
        rest_l, rest_r = _others(lhs, sum_l + batch_l), _others(rhs, sum_r + batch_r)
        tokens, inputs, outputs = (
            math.prod(x.shape[axis] for axis in axes)
            for x, axes in ((lhs, rest_l), (rhs, sum_r), (rhs, rest_r))
        )
        if not self.choose(tokens, inputs, outputs, dtype).quantized:
            return lax.dot_general(
                lhs, rhs, dimension_numbers, precision, preferred_element_type,
                out_sharding=out_sharding,
            )  # fmt: skip
        x = lhs.transpose(batch_l + rest_l + sum_l)
        w = rhs.transpose(batch_r + sum_r + rest_r)
        batch = len(batch_l)
        if len(sum_l) != 1:
            x = x.reshape(*x.shape[: batch + len(rest_l)], inputs)
        if len(sum_r) != 1 or len(rest_r) != 1:
            w = w.reshape(*w.shape[:batch], inputs, outputs)
        settings = dataclasses.replace(
            self.settings, precision=precision, result=result, sharding=out_sharding
        )
        product = functools.partial(matmul, settings)
        for _ in range(batch):
            product = jax.vmap(product)
        y = product(x, w)
        if len(rest_r) == 1:
            return y
        return y.reshape(*y.shape[:-1], *(rhs.shape[axis] for axis in rest_r))


def _others(x: jax.Array, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis in range(x.ndim) if axis not in axes)
