"""Store activations in FP8 while a norm or an activation function reads them, and restore them.

The plain JAX functions are the operations of COAT, section 5. While tracing, `supported` decides
whether a GPU kernel is used instead.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_lowmem._src.arrays import groups, numerics
from optax_lowmem._src.arrays.codecs.base import E8M8Scale
from optax_lowmem._src.arrays.groups import next_power_of_two
from optax_lowmem._src.arrays.typing import PyTree, Shaped
from optax_lowmem._src.kernels import platform
from optax_lowmem._src.kernels.along_axes import (
    Cut,
    along_axes,
    broadcast,
    factors_of,
    in_groups,
    names_of,
)
from optax_lowmem._src.layers.quantized_matmul import (
    E4M3,
    LONGEST_ROW,
    Format,
    Quantized,
    absmax_of,
    as_stored,
    codes_of,
    multiply,
    product_reason,
    scales_of,
)

SCALE = E8M8Scale()
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=True),
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
}


class Grouped(NamedTuple):
    """An array as 8-bit codes with a 16-bit scale per group.

    Attributes:
      codes: E4M3, in the array's shape.
      scales: [..., groups], the largest magnitude of each group, in `codecs.base.E8M8Scale`.
    """

    codes: jax.Array
    scales: jax.Array


# ---- a scale per group ---------------------------------------------------------------------------


def store(x: jax.Array, group_size: int) -> Grouped:
    r"""Quantize to codes round(x / s \cdot 448), with s each group's maximum rounded up to 16 bits.

    Args:
      x: [..., n] of any floating dtype; the last group of a row may be partial.
      group_size: number of neighbours on the last axis that share a scale.

    Returns:
      Codes and scales: |x - restored| is at most the larger of |x| / 16 and s / 448 / 2^10. A
      group with a value that is not finite is restored as NaN.
    """
    codes, scales = as_stored(store_groups(groups.to_groups(x, group_size)))
    return Grouped(groups.from_groups(codes, x.shape), scales)


def store_groups(x: jax.Array) -> Grouped:
    """Return codes and E8M8 scales of a group view [..., groups, lanes]: `store` in a kernel."""
    scales = SCALE.encode(numerics.to_bits(absmax_of(x, -1)[..., 0]))
    limit = SCALE.decode(scales)[..., None]
    # the largest scale is 2^126; without clipping, larger values would become NaN in E4M3
    codes = codes_of(x, limit, E4M3, clip=True)
    return Grouped(codes, scales)


def restore(stored: Grouped, group_size: int) -> jax.Array:
    """Return the f32 values of arrays that `store` returned."""
    view = Grouped(groups.to_groups(stored.codes, group_size), stored.scales)
    return groups.from_groups(restore_groups(view), stored.codes.shape)


def restore_groups(stored: Grouped) -> jax.Array:
    """Apply `restore` to a group view."""
    unit = scales_of(SCALE.decode(stored.scales), E4M3)
    return stored.codes.astype(jnp.float32) * unit[..., None]


# ---- a scale per tensor: Group Scaling -----------------------------------------------------------


def group_absmax(x: jax.Array, group_size: int) -> jax.Array:
    """Return each group's largest magnitude, f32 [..., groups], at least 2^-100.

    It is the first stage of Group Scaling.
    """
    return absmax_of(groups.to_groups(x, group_size), -1)[..., 0]


def tensor_absmax(x: jax.Array, group_size: int) -> jax.Array:
    """Return a tensor's largest magnitude, f32 [1, ..., 1], by both stages of Group Scaling."""
    return absmax_of(group_absmax(x, group_size) if x.ndim else x, None)


def quantized(x: jax.Array, absmax: jax.Array, to: Format = E4M3, clip: bool = False) -> Quantized:
    """Quantize an array whose largest magnitude is `absmax`; with `clip`, it may be larger."""
    codes = as_stored(codes_of(x, absmax, to, clip))
    return Quantized(codes, scales_of(absmax, to))


# ---- RMSNorm -------------------------------------------------------------------------------------


def inverse_rms(x: jax.Array, eps: float, group_size: int) -> jax.Array:
    """Return 1 / sqrt(mean(x^2) + eps) of each row, [..., 1], of f32 values."""
    return inverse_of(row_sum(jnp.square(x), group_size), x.shape[-1], eps)


def inverse_of(squares: jax.Array, length: int, eps: float) -> jax.Array:
    """Return `inverse_rms`, given each row's sum of squares and the rows' length."""
    return jax.lax.rsqrt(squares / length + eps)


def row_sum(x: jax.Array, group_size: int) -> jax.Array:
    """Sum over the last axis, keeping it with size 1."""
    return groups.to_groups(x, group_size).sum(-1).sum(-1, keepdims=True)


def row(w: jax.Array, like: jax.Array) -> jax.Array:
    """Reshape weights [n] for broadcasting with [..., n], in f32."""
    return w.astype(jnp.float32).reshape((1,) * (like.ndim - 1) + (-1,))


def store_normed_plain(
    x: jax.Array, scale: jax.Array, eps: float, group_size: int, exact: bool, keep: bool = True
) -> tuple[Grouped | None, jax.Array, jax.Array]:
    """Quantize the input [..., n] of RMSNorm, and compute the largest magnitude of its output.

    If not `exact`, the norm is computed from the quantized x. Returns (quantized x, or None if not
    `keep`; 1 / RMS of rows [..., 1]; largest magnitude of the output [1, ..., 1]).
    """
    stored = store(x, group_size)
    given = numerics.widen(x) if exact else restore(stored, group_size)
    inverse = inverse_rms(given, eps, group_size)
    # a row's maximum of y = r x w is r times that of x w, so one pass over x computes both
    largest = group_absmax(given * row(scale, x), group_size) * inverse
    return stored if keep else None, inverse, absmax_of(largest, None)


# ---- activation functions ------------------------------------------------------------------------


def gated(activation: str, *given: jax.Array) -> jax.Array:
    """Return f(gate), or f(gate) * up if `given` is (gate, up), for f32 values."""
    y = ACTIVATIONS[activation](given[0])
    return y * given[1] if len(given) == 2 else y


def store_gated_plain(
    given: tuple[jax.Array, ...], activation: str, group_size: int, exact: bool, keep: bool = True
) -> tuple[tuple[Grouped, ...], jax.Array]:
    """Quantize the inputs of an activation function, and compute its output's largest magnitude.

    `given` is gate [..., n], or gate and up. If not `exact`, the output is computed from the
    quantized inputs. Returns (each input quantized, largest magnitude [1, ..., 1]); inputs that are
    not to `keep` are not quantized, which requires `exact`.
    """
    stored = tuple(store(x, group_size) for x in given)
    if exact:
        values = [numerics.widen(x) for x in given]
    else:
        values = [restore(one, group_size) for one in stored]
    return stored if keep else (), tensor_absmax(gated(activation, *values), group_size)


# ---- the choice of the implementation ------------------------------------------------------------

LARGEST_GROUP = 256
# Pallas' Triton lowering has no erf (no upstream issue known; jax 0.10.2 and 0.12.0)
_NOT_LOWERED = {"pallas": ("gelu_exact",), "triton": ()}


def lowers(activation: str) -> bool:
    """Return whether GPU kernels can compute an activation function."""
    return activation not in _NOT_LOWERED[platform.backend()]


def unsupported(x: Shaped, group_size: int, whole_rows: bool = False) -> str | None:
    """Return why the kernels cannot store an array of this shape, or None if they can.

    With `whole_rows` one program reads a whole row, as in norms, and rows have a largest length.
    """
    reason = platform.no_array_reason(x)
    if reason is not None:
        return reason
    if group_size != next_power_of_two(group_size) or group_size > LARGEST_GROUP:
        return f"groups of {group_size} are not a power of two up to {LARGEST_GROUP}"
    if whole_rows and next_power_of_two(x.shape[-1]) > LONGEST_ROW:
        return f"rows of {x.shape[-1]} are longer than {LONGEST_ROW}"
    return None


def store_normed(
    x: jax.Array, scale: jax.Array, eps: float, group_size: int, exact: bool, keep: bool = True
) -> tuple[Grouped | None, jax.Array, jax.Array]:
    """Compute `store_normed_plain`, with one kernel that reads x once where it is supported."""
    plain = partial(store_normed_plain, eps=eps, group_size=group_size, exact=exact, keep=keep)
    if unsupported(x, group_size, whole_rows=True) is not None:
        return plain(x, scale)
    from optax_lowmem._src.layers.fp8_flow import fp8_kernel

    backend = platform.backend()

    def kernel(x: jax.Array, scale: jax.Array) -> tuple[Grouped | None, jax.Array, jax.Array]:
        rows = x.reshape(-1, x.shape[-1])
        stored, inverse, largest = fp8_kernel.store_normed(
            rows, scale, **plain.keywords, backend=backend
        )
        if stored is not None:
            scales = stored.scales.reshape(groups.scale_shape(x.shape, group_size))
            stored = Grouped(stored.codes.reshape(x.shape), scales)
        return stored, inverse.reshape(*x.shape[:-1], 1), _maximum(largest, x)

    def part(cut: Cut, x: jax.Array, scale: jax.Array) -> PyTree:
        stored, inverse, largest = kernel(x, scale)
        return stored, inverse, cut.max(largest, *cut.index)

    names = names_of(x.ndim, None)
    return along_axes(
        "store_normed", kernel, plain, x, scale,
        operands=[names, (None,)], results=[*[names] * (3 if keep else 1), (None,) * x.ndim],
        axes=factors_of(names, x.shape), part=part,
    )  # fmt: skip


def store_gated(
    given: tuple[jax.Array, ...], activation: str, group_size: int, exact: bool, keep: bool = True
) -> tuple[tuple[Grouped, ...], jax.Array]:
    """Compute `store_gated_plain`, with one kernel that reads each input once where supported."""
    plain = partial(
        store_gated_plain, activation=activation, group_size=group_size, exact=exact, keep=keep
    )
    if not lowers(activation) or unsupported(given[0], group_size) is not None:
        return plain(given)
    from optax_lowmem._src.layers.fp8_flow import fp8_kernel

    backend = platform.backend()

    def kernel(*given: jax.Array) -> tuple[tuple[Grouped, ...], jax.Array]:
        stored, largest = fp8_kernel.store_gated(given, **plain.keywords, backend=backend)
        return stored, _maximum(largest, given[0])

    def part(cut: Cut, *given: jax.Array) -> PyTree:
        stored, largest = kernel(*given)
        return stored, cut.max(largest, *cut.index)

    names = names_of(given[0].ndim, "n")
    of_stored = [names, (*names[:-1], *in_groups("n"))] * (len(given) if keep else 0)
    return along_axes(
        "store_gated", kernel, lambda *given: plain(given), *given,
        operands=[names] * len(given), results=[*of_stored, (None,) * len(names)],
        axes=factors_of(names, given[0].shape, n=group_size), part=part,
    )  # fmt: skip


def transposes_reason(x: Shaped, g: Shaped, dtype: DTypeLike) -> str | None:
    """Return why XLA computes the sum over tokens of X^T G, or None if a kernel does.

    The kernel takes transposed codes of x; x may also be the array that is quantized.
    """
    reason = platform.no_kernel_reason(x) or platform.no_backend_reason()
    if reason is not None:
        return reason
    of_x, of_g = (
        jax.ShapeDtypeStruct((a.shape[-1], math.prod(x.shape[:-1])), a.dtype) for a in (x, g)
    )
    return product_reason(of_x, of_g, 1, dtype)


def sums_by_kernel(x: Quantized, g: Shaped, to: Format, dtype: DTypeLike) -> bool:
    """Return whether `multiply_over_tokens` uses a kernel, which takes transposed codes."""
    like = jax.ShapeDtypeStruct(g.shape, to.dtype)
    return g.dtype in platform.FLOATS and transposes_reason(x.codes, like, dtype) is None


class Transposed(NamedTuple):
    """Codes [..., k] transposed to [k, ...], for a kernel that sums over tokens.

    They have one scale.
    """

    codes: jax.Array
    scales: jax.Array


_COLUMNS = 256  # assumed of a gradient not known yet; `multiply_over_tokens` checks again


def quantized_for_products(
    function: Callable[..., jax.Array],
    given: tuple[jax.Array, ...],
    absmax: jax.Array,
    over_tokens: bool,
    now: bool,
) -> tuple[Quantized, jax.Array | None]:
    """Quantize a function's result, and transpose the codes if `multiply_over_tokens` takes these.

    Returns the codes and their scale, and the codes as [n, ...], or None. The function is hashable
    and elementwise, of f32 arrays that broadcast to the first one [..., n]: they have its shape, or
    size 1 on the last axis or on all others. `absmax` is the largest magnitude of its result. With
    `now` one kernel writes both and reads the arguments once. Otherwise a separate kernel
    transposes, which XLA removes if its result is not used.
    """
    shape, dtype = given[0].shape, given[0].dtype

    def plain(absmax: jax.Array, *given: jax.Array) -> tuple[Quantized, jax.Array]:
        codes = quantized(function(*map(numerics.widen, given)), absmax)
        return codes, jnp.moveaxis(codes.codes, -1, 0)

    like = jax.ShapeDtypeStruct((*shape[:-1], _COLUMNS), E4M3.dtype)
    if not over_tokens or transposes_reason(given[0], like, dtype) is not None:
        return plain(absmax, *given)[0], None
    from optax_lowmem._src.layers.fp8_flow import fp8_kernel

    backend = platform.backend()

    def both(absmax: jax.Array, *given: jax.Array) -> tuple[Quantized, jax.Array]:
        x, *beside = given
        return fp8_kernel.quantize_both(x, absmax, E4M3, backend, function, tuple(beside))

    def apart(absmax: jax.Array, *given: jax.Array) -> tuple[Quantized, jax.Array]:
        codes, _ = plain(absmax, *given)
        return codes, fp8_kernel.transpose(codes.codes, backend=backend)

    names = names_of(len(shape), "n")
    return along_axes(
        "quantized_for_products", both if now else apart, plain, absmax, *given,
        operands=[(None,) * absmax.ndim, *broadcast([names] * len(given), given)],
        results=[names, (None,) * len(shape), (names[-1], *names[:-1])],
        axes=factors_of(names, shape),
    )  # fmt: skip


def multiply_over_tokens(
    x: Quantized | Transposed,
    g: jax.Array,
    absmax: jax.Array,
    to: Format,
    dtype: jnp.dtype,
    sharding: jax.sharding.NamedSharding | None = None,
) -> tuple[Quantized, jax.Array]:
    """Quantize G, and return it with X^T G, the gradient of a weight; x may be transposed."""
    sums = g.ndim - 1

    def plain(
        x: Quantized | Transposed, g: jax.Array, absmax: jax.Array
    ) -> tuple[Quantized, jax.Array]:
        codes = quantized(g, absmax, to)
        if isinstance(x, Transposed):
            x = Quantized(jnp.moveaxis(x.codes, 0, -1), x.scales)
        return codes, multiply(x, codes, sums, dtype, transposed=True, sharding=sharding)

    if not isinstance(x, Transposed) and not sums_by_kernel(x, g, to, dtype):
        return plain(x, g, absmax)
    from optax_lowmem._src.layers.fp8_flow import fp8_kernel

    backend = platform.backend()

    def kernel(
        x: Quantized | Transposed, g: jax.Array, absmax: jax.Array
    ) -> tuple[Quantized, jax.Array]:
        codes, of_g = fp8_kernel.quantize_both(g, absmax, to, backend=backend)
        of_x = x.codes
        if not isinstance(x, Transposed):
            of_x = fp8_kernel.transpose(of_x, backend=backend)
        left, right = (
            Quantized(a.reshape(a.shape[0], -1), scales.reshape(1, 1))
            for a, scales in ((of_x, x.scales), (of_g, codes.scales))
        )
        return codes, multiply(left, right, 1, dtype)

    def part(
        cut: Cut, x: Quantized | Transposed, g: jax.Array, absmax: jax.Array
    ) -> tuple[Quantized, jax.Array]:
        # rounded before the sum over devices, as XLA rounds products of bf16: half of the bytes
        codes, product = multiply_over_tokens(x, g, absmax, to, dtype)
        return codes, cut.sum(product, ("k", "m"))

    of_x, of_g = names_of(g.ndim, "k"), names_of(g.ndim, "m")
    of_codes = (of_x[-1], *of_x[:-1]) if isinstance(x, Transposed) else of_x
    return along_axes(
        "multiply_over_tokens", kernel, plain, x, g, absmax,
        operands=[of_codes, (None,) * x.scales.ndim, of_g, (None,) * absmax.ndim],
        results=[of_g, (None,) * g.ndim, ("k", "m")],
        axes=factors_of(of_codes, x.codes.shape) | factors_of(of_g, g.shape), part=part, adds=True,
    )  # fmt: skip


def _maximum(parts: jax.Array, like: jax.Array) -> jax.Array:
    """Return the maximum of the parts, [1, ..., 1]: the second stage of Group Scaling."""
    return absmax_of(parts, None).reshape((1,) * like.ndim)
