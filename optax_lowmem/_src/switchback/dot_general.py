"""Quantized products for whatever takes a `dot_general`, and for what is written as an einsum."""

import dataclasses
import functools
import math
import string
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from optax_lowmem._src.quantized_matmul import E4M3, E5M2, INT8, Format
from optax_lowmem._src.switchback.choice import IMPLEMENTATIONS, Choice, choose
from optax_lowmem._src.switchback.products import VARIANTS, ProductSettings, Variant, matmul

T = TypeVar("T")
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
    r"""A `jax.lax.dot_general` whose products run in 8 bits, forward and backward.

    Y = s_X s_W / 127^2 * Q_{row}(X) Q_{tensor}(W) (SwitchBack, eq. 2), likewise the gradient of X;
    the gradient of W, whose sums are the longest, stays in the inputs' precision.

    Args:
      variant: `switchback` (Algorithm 1), `switchback_m` (Algorithm 3: only codes of X are kept for
        the backward pass), `switchback_q` (Algorithm 4: a scale for each row and column of W),
        `llm_int8` (all three products row-wise), `tensorwise` (all three, one scale per tensor:
        section 2.3's float8), `standard` (`jax.lax.dot_general` itself).
      format: `int8`; `fp8` (E4M3); `fp8-e5m2` (E5M2 for gradients).
      scaling: what a maximum becomes: `format`, the format's largest number, or `unit`, 1, as in
        the paper's simulated float8.
      implementation: `quantized`, in 8 bits whatever the sizes; `auto`, the standard products where
        a Hopper GPU is estimated to be faster with them (narrow layers, few tokens), and 8 bits
        elsewhere. Not the default, since numerics then depend on sizes and on the machine. Sizes
        are as traced: under `vmap` those of one example, in a `shard_map` of one device. What it
        does is `.choose(tokens, inputs, outputs)` of the result, with the reason.

    Returns:
      A function to pass as `dot_general=` of `nn.Dense`, `nn.DenseGeneral`, `nnx.Linear`,
      `nnx.LinearGeneral`, as `qkv_dot_general=` and `out_dot_general=` of attention (for
      `nnx.Einsum`: `switchback_einsum`). The right operand is the weight. On axes of a batch (of
      both operands) each product has scales of its own.

    Raises:
      ValueError: for another variant, format, scaling or implementation; in a product, for int8
        sums over more than 133,144 numbers.
      TypeError: where gradients are differentiated again.

    Numerics: rounding to nearest, ties to even; sums exact in int32, and of FP8 in f32 or as the
    GPU has them (Hopper keeps about 14 bits of a sum: errors of 0.3 % rms at 16,384 terms, by XLA
    as well, a tenth of what E4M3's rounding gives a product); scales f32. Zero rows give 0. Where a
    row's maximum is not finite its outputs are not. Elements of a row whose maximum is under 2^-100
    round as if it was that. Straight-through gradients.

    On a mesh, left to XLA: data-parallel tokens add no collective, sharded weights one scalar per
    pass (they are gathered as codes, once per pass). Where a sum lies over devices (of Y under
    row-wise, of dX under column-wise tensor parallelism) a maximum per token is reduced, and int8
    sums travel as int32. `switchback_q` and `llm_int8` reduce a maximum for each row and column
    that is cut. On Explicit axes a gradient has the sharding of its operand, and `out_sharding` is
    as of `jax.lax.dot_general`. In a `jax.shard_map` of one's own each device has scales of its
    own.

    Deviation: `switchback_m` quantizes W again in the backward pass instead of keeping its codes.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from optax_lowmem import layers
      >>> layer = nn.Dense(3, dot_general=layers.switchback_dot_general("switchback", "fp8"))
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 8)))[0].shape
      (2, 3)
    """
    formats = tuple(_choice("format", format, FORMATS))
    if scaling not in SCALINGS:
        raise ValueError(f"scaling must be one of {SCALINGS}, got {scaling!r}")
    if scaling == "unit":
        if format == "int8":
            raise ValueError("scaling='unit' is of float8: integers between -1 and 1 are three.")
        formats = tuple(one.at_unit() for one in formats)
    variants: dict[str, Variant | None] = {STANDARD: None, **VARIANTS}
    found = _choice("variant", variant, variants)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}; "
            'for the standard products use variant="standard"'
        )
    if found is None:
        return lax.dot_general
    return _DotGeneral(found, formats[0], formats[1], implementation)


@dataclasses.dataclass(frozen=True)
class _DotGeneral:
    """Compares equal to one of the same settings, so that modules and jit know it again."""

    variant: Variant
    forward: Format
    gradient: Format
    implementation: str = "quantized"

    def choose(
        self, tokens: int, inputs: int, outputs: int, dtype: DTypeLike = "bfloat16"
    ) -> Choice:
        """Choose 8-bit or standard products, with a reason, for the sizes of a layer's operands."""
        if self.implementation == "quantized":
            return Choice(True, 'in 8 bits: implementation="quantized"')
        settings = ProductSettings(self.variant, self.forward, self.gradient)
        return choose(settings, tokens, inputs, outputs, jnp.dtype(dtype))

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: lax.DotDimensionNumbers,
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: jax.sharding.Sharding | None = None,
        **more: object,
    ) -> jax.Array:
        """As `jax.lax.dot_general`; the weight is `rhs`."""
        if given := [name for name, value in more.items() if value is not None]:
            raise TypeError(f"a quantized dot_general takes no {', '.join(given)}")
        dtype = jnp.result_type(lhs, rhs)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"a quantized dot_general takes floats, got {lhs.dtype}, {rhs.dtype}")
        result = jnp.dtype(preferred_element_type or dtype)
        if out_sharding is not None and rhs.ndim != 2:
            raise TypeError(f"out_sharding is for weights that are matrices, not {rhs.shape}")
        lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
        if not self.choose(*_sizes(lhs, rhs, dimension_numbers), dtype).quantized:
            return lax.dot_general(
                lhs, rhs, dimension_numbers, precision, preferred_element_type,
                out_sharding=out_sharding,
            )  # fmt: skip
        own = (self.variant, self.forward, self.gradient)
        settings = ProductSettings(*own, precision, result, out_sharding)
        return _as_matrices(settings, lhs, rhs, dimension_numbers)


def _sizes(
    lhs: jax.Array, rhs: jax.Array, numbers: lax.DotDimensionNumbers
) -> tuple[int, int, int]:
    """Tokens, inputs and outputs of a product, of one entry of a batch."""
    (sum_l, sum_r), (batch_l, batch_r) = (tuple(map(tuple, pair)) for pair in numbers)
    sizes = (
        [lhs.shape[axis] for axis in _others(lhs, sum_l + batch_l)],
        [rhs.shape[axis] for axis in sum_r],
        [rhs.shape[axis] for axis in _others(rhs, sum_r + batch_r)],
    )
    tokens, inputs, outputs = map(math.prod, sizes)
    return tokens, inputs, outputs


def _as_matrices(
    settings: ProductSettings, lhs: jax.Array, rhs: jax.Array, numbers: lax.DotDimensionNumbers
) -> jax.Array:
    """The product [*batch, *rest of lhs, *rest of rhs]."""
    (sum_l, sum_r), (batch_l, batch_r) = (tuple(map(tuple, pair)) for pair in numbers)
    rest_l = _others(lhs, sum_l + batch_l)
    rest_r = _others(rhs, sum_r + batch_r)
    x = lhs.transpose(batch_l + rest_l + sum_l)
    w = rhs.transpose(batch_r + sum_r + rest_r)
    batch, out = len(batch_l), [rhs.shape[axis] for axis in rest_r]
    length = math.prod(rhs.shape[axis] for axis in sum_r)
    if len(sum_l) != 1:
        x = x.reshape(*x.shape[: batch + len(rest_l)], length)
    if len(sum_r) != 1 or len(out) != 1:
        w = w.reshape(*w.shape[:batch], length, math.prod(out))
    product = functools.partial(matmul, settings)
    for _ in range(batch):
        product = jax.vmap(product)
    y = product(x, w)
    return y if len(out) == 1 else y.reshape(*y.shape[:-1], *out)


def _others(x: jax.Array, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis in range(x.ndim) if axis not in axes)


def _choice(name: str, value: str, table: Mapping[str, T]) -> T:
    if value not in table:
        raise ValueError(f"{name} must be one of {', '.join(table)}, got {value!r}")
    return table[value]


# ---- for what is written as an einsum ------------------------------------------------------------


def switchback_einsum(
    variant: str = "switchback",
    format: str = "int8",
    *,
    scaling: str = "format",
    implementation: str = "quantized",
) -> "Einsum":
    """An einsum of an activation and a weight, in this order, whose product runs in 8 bits.

    (`jnp.einsum(..., _dot_general=...)` may exchange the operands, and a weight would get the
    scales of an activation.)

    Args:
      variant: as of `switchback_dot_general`, which has the mathematics and its limits.
      format: likewise.
      scaling: likewise.
      implementation: likewise.

    Returns:
      (subscripts, activation, weight, precision=, preferred_element_type=) -> array; for
      `nnx.Einsum(einsum_op=...)` too.

    Raises:
      ValueError: in a call, for subscripts that are no single product: of other than two operands,
        with a letter twice in one, or a sum over a letter that only one has.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem import layers
      >>> einsum = layers.switchback_einsum()
      >>> einsum("...d,dnh->...nh", jnp.ones((2, 5, 8)), jnp.ones((8, 4, 3))).shape
      (2, 5, 4, 3)
    """
    how = {"scaling": scaling, "implementation": implementation}
    return Einsum(switchback_dot_general(variant, format, **how))


@dataclasses.dataclass(frozen=True)
class Einsum:
    """Compares equal to one of the same settings."""

    dot_general: DotGeneral

    def __call__(
        self,
        subscripts: str,
        x: jax.Array,
        w: jax.Array,
        *,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        **more: object,
    ) -> jax.Array:
        """The product of `x` and the weight `w`."""
        left, right, out = _terms(subscripts, x.ndim, w.ndim)
        if len(set(out)) < len(out) or not set(out) <= {*left, *right}:
            raise ValueError(f"'{subscripts}': each letter of the result is once in an operand")
        batch = [c for c in left if c in right and c in out]
        summed = [c for c in left if c in right and c not in out]
        for own in (left, right):
            alone = set(own) - set(out) - set(summed)
            if alone or len(set(own)) < len(own):
                raise ValueError(
                    f"'{subscripts}' is no product of two arrays with one sum: a letter may not be "
                    "twice in an operand, nor be summed over in one alone."
                )
        numbers = tuple(
            tuple(tuple(own.index(c) for c in letters) for own in (left, right))
            for letters in (summed, batch)
        )
        y = self.dot_general(
            x, w, numbers, precision=precision, preferred_element_type=preferred_element_type,
            **more,
        )  # fmt: skip
        order = [*batch, *(c for c in left + right if c not in batch and c not in summed)]
        return y.transpose([order.index(c) for c in out])


def _terms(subscripts: str, *ranks: int) -> tuple[str, ...]:
    """The letters of both operands and of the result, without ellipses."""
    inputs, arrow, out = subscripts.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != 2:
        raise ValueError(f"'{subscripts}' has not the form 'xy,yz->xz'")
    spare = [c for c in string.ascii_letters if c not in subscripts]
    written = [len(term.replace("...", "")) for term in terms]
    wide = max(rank - count for rank, count in zip(ranks, written, strict=True))
    dots = "".join(spare[:wide])
    for i, (term, rank, count) in enumerate(zip(terms, ranks, written, strict=True)):
        own = rank - count
        if own < 0 or (own and "..." not in term):
            raise ValueError(f"'{term}' in '{subscripts}' is an array of rank {rank}")
        terms[i] = term.replace("...", dots[wide - own :])
    return terms[0], terms[1], out.replace("...", dots)
