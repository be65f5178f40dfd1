"""Bit-level arithmetic that gives the same answer on CPU, GPU and TPU.

XLA removes `astype` round trips on GPU and flushes subnormals in f32 multiplies, so the exact
functions here operate on the bits. Rounding has no derivative: functions of it refuse one.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.arrays.typing import PyTree, Tree

MAGNITUDE_MASK = 0x7FFFFFFF
INF_BITS = 0x7F800000
_LARGEST_BF16_BITS = 0x7F7F0000
NAN_BITS = 0x7FC00000  # canonical: CUDA's 0x7fffffff would round to -0.0
MIN_NORMAL_BITS = 0x00800000
_F16_OVERFLOW_BITS = 0x477FF000  # 65520, half way from f16's largest number to the next

Elementwise = Callable[[jax.Array], jax.Array]


def _log2(x: jax.Array) -> jax.Array:
    return lax.log(x) * jnp.float32(math.log2(math.e))


@dataclasses.dataclass(frozen=True)
class Approximations:
    """Arithmetic of a backend's kernels: reciprocal, log2 and exp2 as single instructions.

    These instructions flush subnormal operands and results to 0.
    """

    # 1 / y, accurate to 2^-23; None if the kernel divides
    reciprocal: Elementwise | None = jnp.reciprocal
    log2: Elementwise = _log2  # accurate to 2^-22 in [1/2, 2], elsewhere to a relative 2^-22
    exp2: Elementwise = jnp.exp2  # accurate to 2^-22
    gpu: bool = True  # whether every computed NaN is 0x7fffffff, and uint32 converts to f32


# the arithmetic of the kernel whose body is being traced: codecs and rules, which XLA and kernels
# call alike, would otherwise pass it to every function of this module
_approximations: ContextVar[Approximations | None] = ContextVar("approximations", default=None)


def in_kernel() -> bool:
    """Return whether the body of a kernel is being traced."""
    return _approximations.get() is not None


def in_gpu_kernel() -> bool:
    """Return whether the body of a GPU kernel is being traced."""
    kernel = _approximations.get()
    return kernel is not None and kernel.gpu


def to_bits(x: jax.Array) -> jax.Array:
    """Return the bits of f32 values as uint32."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def from_bits(bits: jax.Array) -> jax.Array:
    """Return the f32 values of uint32 bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def canonical_nan(bits: jax.Array) -> jax.Array:
    """Replace every NaN in f32 bits by 0x7fc00000."""
    if in_gpu_kernel():  # which computes no NaN but 0x7fffffff
        signed = lax.bitcast_convert_type(bits, jnp.int32)
        return lax.bitcast_convert_type(jnp.minimum(signed, NAN_BITS), jnp.uint32)
    return jnp.where(jnp.isnan(from_bits(bits)), jnp.uint32(NAN_BITS), bits)


def at_most(bits: jax.Array, limit: int) -> jax.Array:
    """Return min(bits, limit) of uint32 bits under 2^31, by the integers that Mosaic compares."""
    signed = lax.bitcast_convert_type(bits, jnp.int32)
    return lax.bitcast_convert_type(jnp.minimum(signed, limit), jnp.uint32)


def at_least(bits: jax.Array, limit: int) -> jax.Array:
    """Return max(bits, limit); see `at_most`."""
    signed = lax.bitcast_convert_type(bits, jnp.int32)
    return lax.bitcast_convert_type(jnp.maximum(signed, limit), jnp.uint32)


def magnitude_bits(x: jax.Array, signed: bool = True) -> jax.Array:
    """Return the int32 bits of |x|, ordered like |x|, with every NaN above every number."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    if signed or not in_gpu_kernel():  # whose NaN has no sign
        bits = bits & MAGNITUDE_MASK
    return bits


def absmax_bits(
    x: jax.Array, signed: bool = True, axes: int | tuple[int, ...] | None = -1
) -> jax.Array:
    """Return the bits of max |x| over axes (None: all), by integers: float max may drop NaN."""
    return jnp.max(magnitude_bits(x, signed), axis=axes).astype(jnp.uint32)


def absmax(x: jax.Array, axes: tuple[int, ...], least: int) -> jax.Array:
    """Return max(|x|, f32 of the bits `least`) over axes, outside of kernels.

    `least` is the initial value of the reduction, and the result is bitcast: a separate maximum or
    a conversion would each be another kernel launch on a GPU.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) & MAGNITUDE_MASK
    return lax.bitcast_convert_type(lax.reduce(bits, jnp.int32(least), lax.max, axes), jnp.float32)


def round_to_byte(x: jax.Array) -> jax.Array:
    """Round f32 values in [0, 255] to uint8, to nearest, ties to even.

    Adding 2^23 leaves the integer in the low bits; taking 2^23 off in integers is what XLA cannot
    fold away. Converting the float would add checks for NaN and range.
    """
    code = lax.bitcast_convert_type(x + jnp.float32(2.0**23), jnp.int32) - 0x4B000000
    return low_byte(code, jnp.uint8)


def round_to_signed_byte(magnitude: jax.Array, sign: jax.Array) -> jax.Array:
    """Round f32 magnitudes in [0, 127], with the sign of another number, to int8 (nearest even).

    As `round_to_byte`, but adds 1.5 * 2^23, which leaves room for negative integers.
    """
    negative = to_bits(sign) & jnp.uint32(~MAGNITUDE_MASK & 0xFFFFFFFF)
    return low_byte(round_to_int(from_bits(to_bits(magnitude) | negative)), jnp.int8)


def round_to_int(x: jax.Array) -> jax.Array:
    """Round f32 values within 2^21 of 0 to int32, to nearest, ties to even."""
    return lax.bitcast_convert_type(x + jnp.float32(1.5 * 2.0**23), jnp.int32) - 0x4B400000


def uniform(bits: jax.Array) -> jax.Array:
    """Return f32 in [0, 1) from uint32 bits; in a GPU kernel in [0, 1].

    Stochastic rounding allows a 1: it rounds up if u < p, and p < 1.
    """
    if in_gpu_kernel():  # without the shift: the conversion rounds all 32 bits
        return bits.astype(jnp.float32) * jnp.float32(2.0**-32)
    return (bits >> 8).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-24)


def low_byte(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Convert int32 values to int8 or uint8, whose range they must not exceed.

    If the values are a float's bits minus a constant, XLA on a GPU (jax 0.11.2) converts the float
    instead, and saturates. A clamp prevents this; kernels need none.
    """
    if not in_kernel():
        info = jnp.iinfo(dtype)
        bits = jnp.clip(bits, jnp.int32(info.min), jnp.int32(info.max))
    return bits.astype(dtype)


def negative(x: jax.Array) -> jax.Array:
    """Return -x with -0.0 for 0.0: Pallas lowers `-x` to 0 - x for Triton, which has no -0.0."""
    return x * jnp.float32(-1)


def quotient(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return x / y for 0 <= y <= 2^126.

    A GPU kernel (`kernel_arithmetic`) multiplies x by the reciprocal of y: two instructions instead
    of the nine of a division. The result is accurate to 2^-22, enough for codes and steps.
    """
    kernel = _approximations.get()
    if kernel is None or kernel.reciprocal is None:
        return x / y
    return x * kernel.reciprocal(y)


def log2(x: jax.Array) -> jax.Array:
    """Return log2 of f32 values; -inf at 0. One instruction in a kernel (`Approximations`)."""
    return (_approximations.get() or _PORTABLE).log2(x)


def exp2(x: jax.Array) -> jax.Array:
    """Return 2^x of f32 values; exactly 1 at 0. One instruction in a kernel (`Approximations`)."""
    return (_approximations.get() or _PORTABLE).exp2(x)


_PORTABLE = Approximations()


@contextlib.contextmanager
def kernel_arithmetic(approximations: Approximations = _PORTABLE) -> Iterator[None]:
    """Trace the code inside as the body of a kernel, with the arithmetic of its backend."""
    token = _approximations.set(approximations)
    try:
        yield
    finally:
        _approximations.reset(token)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Return 2**exponent in f32, exactly, for integers in [-126, 127]."""
    return from_bits((exponent.astype(jnp.int32) + 127).astype(jnp.uint32) << 23)


def _round_bits(bits: jax.Array, dropped: int) -> jax.Array:
    """Round f32 bits (NaNs canonical) to nearest even; set the `dropped` lowest bits to 0."""
    rounded = bits + jnp.uint32((1 << (dropped - 1)) - 1) + ((bits >> dropped) & jnp.uint32(1))
    return (rounded >> dropped) << dropped


def round_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Round f32 values (nearest even) to a 16-bit float dtype; return them as f32.

    Operates on the bits: Pallas' Triton lowering has no `reduce_precision`, and XLA drops `astype`
    round trips.
    """
    # https://github.com/openxla/xla/issues/41605, https://github.com/jax-ml/jax/issues/6283
    bits = canonical_nan(to_bits(x))
    if jnp.dtype(dtype) == jnp.bfloat16:
        return from_bits(_round_bits(bits, 16))
    magnitude = bits & jnp.uint32(MAGNITUDE_MASK)
    overflows = (magnitude >= _F16_OVERFLOW_BITS) & (magnitude <= INF_BITS)
    infinity = (bits ^ magnitude) | jnp.uint32(INF_BITS)
    rounded = from_bits(jnp.where(overflows, infinity, _round_bits(bits, 13)))
    # subnormals of f16 are ordinary f32 numbers, 2^-24 apart
    steps = jnp.abs(x) * jnp.float32(2.0**24)
    whole = jnp.floor(steps)
    odd = whole - 2 * jnp.floor(whole * 0.5)
    rest = steps - whole
    up = (rest > 0.5) | ((rest == 0.5) & (odd > 0))
    subnormal = (whole + jnp.where(up, jnp.float32(1), jnp.float32(0))) * jnp.float32(2.0**-24)
    subnormal = from_bits(to_bits(subnormal) | (bits ^ magnitude))
    return jnp.where(jnp.abs(x) < jnp.float32(2.0**-14), subnormal, rounded)


def narrow(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Round f32 values to 16-bit floats (nearest even), in a way that XLA cannot undo."""
    rounded = round_to(x, dtype)
    if jnp.dtype(dtype) == jnp.bfloat16:  # the upper half is the number: no second rounding
        upper = (to_bits(rounded) >> 16).astype(jnp.uint16)
        return lax.bitcast_convert_type(upper, jnp.bfloat16)
    return rounded.astype(dtype)


def narrow_stochastically(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Round f32 values to bf16 stochastically and without bias, by random bits (uint32).

    bf16 values and NaN are unchanged; values that could become infinite are rounded towards 0.
    """
    words = canonical_nan(to_bits(x))
    finite = (words & jnp.uint32(MAGNITUDE_MASK)) < jnp.uint32(_LARGEST_BF16_BITS)
    lifted = words + jnp.where(finite, bits >> 16, jnp.uint32(0))
    return lax.bitcast_convert_type((lifted >> 16).astype(jnp.uint16), jnp.bfloat16)


def widen(x: jax.Array) -> jax.Array:
    """Convert bf16, f16 or f32 to f32, exactly."""
    # by the bits, so that XLA cannot substitute an unrounded f32:
    # https://github.com/openxla/xla/issues/41605
    if x.dtype == jnp.bfloat16:
        return from_bits(lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16)
    return x.astype(jnp.float32)


def is_narrow(dtype: jnp.dtype) -> bool:
    """Return whether a dtype is a float of 8 or 16 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4


# ---- derivatives: rounding has none --------------------------------------------------------------


@jax.custom_jvp
def forbid_differentiation(tree: Tree) -> Tree:
    """Return a tree unchanged, and raise if it is differentiated.

    JAX gives integers no tangent, and roundings none or the identity's, so that gradients through
    a state would silently lack a term.
    """
    return tree


@forbid_differentiation.defjvp
def _refuse_update(primals: tuple[PyTree], tangents: tuple[PyTree]) -> tuple[PyTree, PyTree]:
    raise TypeError(
        "an update that keeps 8-bit state or splits master weights has no derivative, and JAX "
        "would give a wrong one. Take the gradient of the loss alone, with the update outside of "
        "it or its arguments under jax.lax.stop_gradient; for gradients through training (of a "
        "learning rate, of initial weights) use optax's own optimizer, or "
        "storage=lowmem.Storage(mu=None, nu=None, master_weight_bits=None) on f32 weights."
    )


def _refuse_flow(*args: PyTree) -> PyTree:
    raise TypeError(
        "the gradients of an FP8 flow have no derivative: rounding has none. For second "
        "derivatives use the ordinary layers."
    )


def first_order_only(
    function: Callable[..., PyTree], static: int = 1, refuse: Callable[..., PyTree] = _refuse_flow
) -> Callable[..., PyTree]:
    """Make a function of a custom derivative rule raise if it is differentiated again.

    Rounding has no derivative, so second derivatives would silently lack a term. The function takes
    `static` static arguments, then arrays, and must not return an argument unchanged: JAX would
    then keep that array twice. `refuse` raises the error; its first arguments are the static ones.
    """
    rule = jax.custom_jvp(function, nondiff_argnums=tuple(range(static)))
    rule.defjvp(refuse)
    return rule
