"""Kernels that quantize against their reference: interpreted, lowered, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lowmem._src.layers import quantized_matmul
from optax_lowmem._src.layers import quantized_matmul as kernels
from optax_lowmem._src.layers.quantized_matmul import FORMATS, INT8, quantize_kernel
from tests import tolerances
from tests.compilation import FULL_COMPILE
from tests.lowering import kernels_in, lower_for_cuda

SHAPES = [(5, 40), (64, 128), (3, 5000), (130, 33), (1, 1)]
of_rows = functools.partial(jax.jit, static_argnums=(1, 2))(quantized_matmul.quantize_plain)


def drawn(shape, dtype, seed=0):
    """Rows of very different sizes."""
    rng = np.random.default_rng(seed)
    size = np.exp(3 * rng.normal(size=(shape[0], 1)))
    return jnp.asarray(rng.normal(size=shape) * size, dtype)


def raw(codes):
    return np.asarray(codes).view(np.uint8)


def same_codes(found, wanted, backend):
    """Bits; of generated Triton but for ties, and by one code.

    There the product and the rounding to an integer are one FMA on a GPU, and two roundings of the
    product and the code on NumPy, of FP8 codes too.
    """
    integer, on_numpy = found.dtype == jnp.int8, jax.default_backend() == "cpu"
    ties = backend == "triton" and (integer or on_numpy)
    differ = raw(found) != raw(wanted)
    assert differ.mean() <= (tolerances.FUSED_TIES if ties else 0)
    if integer:
        apart = np.asarray(found, np.int32) - np.asarray(wanted, np.int32)
        assert np.abs(apart).max() <= 1


def compiled(function, *static, **options):
    """A function of arrays, and of `static` behind them.

    Optimized as a user's: without it, jax 0.10 contracts the rounding of bf16 rows in one of two
    equal programs.
    """
    return jax.jit(lambda *x: function(*x, *static, **options), compiler_options=FULL_COMPILE)


def compare_rows(shape, dtype, to, backend):
    x = drawn(shape, dtype)
    found = compiled(quantize_kernel.quantize_rows, to, backend)(x)
    wanted = compiled(of_rows, 1, to)(x)
    same_codes(found.codes, wanted.codes, backend)
    np.testing.assert_array_equal(found.scales, wanted.scales)


def compare_transposed(shape, dtype, to, backend):
    x = drawn(shape, dtype)
    absmax, wanted = quantized_matmul.absmax_of(x, None), compiled(of_rows, None, to)(x)
    found = compiled(quantize_kernel.quantize_transposed, to, backend=backend)(x, absmax)
    same_codes(found.codes.T, wanted.codes, backend)
    np.testing.assert_array_equal(found.scales, wanted.scales)
    # with a maximum that was found when the largest was half as large
    wanted = compiled(quantized_matmul.codes_of, to, True)(x, absmax / 2)
    found = compiled(quantize_kernel.quantize_transposed, to, True, backend)(x, absmax / 2)
    same_codes(found.codes.T, wanted, backend)
    np.testing.assert_array_equal(found.scales, quantized_matmul.scales_of(absmax / 2, to))
    assert np.abs(np.asarray(wanted, np.float32)).max() == to.largest


@pytest.mark.parametrize("axes", [None, (1, 2), (-2, -1), (0, -1), 1])
def test_maxima(axes):
    """2^-100 at least; NaN and infinity show."""
    x = jax.random.normal(jax.random.key(0), (3, 4, 5))
    for sample in (x, x * 0, x.at[1, 2, 3].set(jnp.nan), x.at[1, 2, 3].set(-jnp.inf)):
        found = jax.jit(quantized_matmul.absmax_of, static_argnums=1)(sample, axes)
        wanted = np.maximum(np.abs(sample).max(axis=axes, keepdims=True), 2.0**-100)
        np.testing.assert_array_equal(found, wanted)


FORMS = [("int8", "bfloat16"), ("e4m3", "float32"), ("e5m2", "bfloat16")]


@pytest.mark.full
@pytest.mark.parametrize("name, dtype", FORMS)
def test_is_the_reference(name, dtype, backend):
    to, dtype = FORMATS[name], jnp.dtype(dtype)
    for shape in SHAPES:
        compare_rows(shape, dtype, to, backend)
        compare_transposed(shape, dtype, to, backend)


def test_rows_that_are_not_finite(backend):
    x = drawn((4, 40), jnp.float32).at[0, 3].set(jnp.nan).at[2, 1].set(-jnp.inf)
    codes, scales = quantize_kernel.quantize_rows(x, INT8, backend)
    assert np.isnan(scales[0, 0]) and np.isinf(scales[2, 0])
    np.testing.assert_array_equal(codes[1::2], of_rows(x, 1, INT8).codes[1::2])


def step(x, w):
    return kernels.multiply(
        kernels.quantize(x, x.ndim - 1, INT8),
        kernels.quantize_transposed(w, None, INT8),
        1,
        x.dtype,
    )


def lowered(shape, columns, dtype=jnp.bfloat16):
    x = jax.ShapeDtypeStruct(shape, dtype)
    return kernels_in(lower_for_cuda(step, x, jax.ShapeDtypeStruct((shape[-1], columns), dtype)))


def test_lowers_for_gpus(on_a_gpu):
    assert sorted(lowered((2, 64, 256), 512)) == ["quantize_rows", "quantize_transposed"]
    assert sorted(lowered((130, 40), 33)) == ["quantize_rows", "quantize_transposed"]
    assert lowered((4, 1 << 16), 64) == ["quantize_transposed"]  # rows longer than a program's


def test_left_to_xla_without_a_gpu():
    assert lowered((128, 256), 512) == []


def test_a_host_runs_the_reference(on_a_gpu):
    x, w = drawn((128, 128), jnp.float32), drawn((128, 256), jnp.float32, 1)
    found = jax.jit(step)(x, w)
    turned = kernels.Quantized(*(a.T for a in of_rows(w, None, INT8)))
    np.testing.assert_array_equal(
        found, quantized_matmul.multiply_plain(of_rows(x, 1, INT8), turned, 1, x.dtype)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("to", FORMATS.values(), ids=lambda to: to.name)
def test_on_a_gpu(to, dtype, gpu_backend):
    for shape in [*SHAPES, (7, 16384), (4096, 1024)]:
        compare_rows(shape, dtype, to, gpu_backend)
        compare_transposed(shape, dtype, to, gpu_backend)
