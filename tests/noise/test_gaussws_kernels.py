"""Kernels of noise and sampling against their reference: interpreted, lowered, and on a GPU."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lowmem import codecs, gaussws
from optax_lowmem._src.arrays import random
from optax_lowmem._src.layers.noise import kernels, noise_kernel
from optax_lowmem._src.layers.noise.distributions import BOX_MULLER, DIFFQ, GAUSSWS, NOISES
from optax_lowmem._src.layers.noise.formats import FORMATS
from optax_lowmem._src.layers.noise.noise_kernel import Strip
from tests import tolerances as tol
from tests.lowering import kernels_in, lower_for_cuda
from tests.tiers import rows, triton_often

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
# whole strips; partial ones along both axes; axes before, one of them of one entry
SHAPES = [(64, 512), (33, 300), (2, 1, 40, 70)]
KEY = random.leaf_key(jnp.uint32(3), jnp.uint32(7), "w")
of_reference = functools.partial(jax.jit, static_argnums=(4, 5, 6))(kernels.sample_plain)


def drawn(shape, seed=0):
    rng = np.random.default_rng(seed)
    factor = rng.uniform(0.01, 0.1, kernels.block_shape(shape))
    return jnp.asarray(rng.normal(size=shape), F32), jnp.asarray(factor, F32)


def share_that_differs(found, wanted):
    return (np.float32(found) != np.float32(wanted)).mean()


def compare(shape, noise, format, weights, strip, backend):
    """A sample and its scale; bit for bit where products with R are exact."""
    w, factor = drawn(shape)
    to, correction = FORMATS[format], None
    dtype = kernels.result_dtype(to)
    if weights in codecs.SPLITS:
        w, correction = codecs.SPLITS[weights].split(w, BF16)
    else:
        w = w.astype(weights)
    found, scale = noise_kernel.sample(w, correction, factor, KEY, noise, to, dtype, strip, backend)
    wanted, of_wanted = of_reference(w, correction, factor, KEY, noise, to, dtype)
    assert found.dtype == dtype and found.shape == shape
    np.testing.assert_array_equal(scale, of_wanted)
    # U(-0.5, 0.5) times a scale is rounded, or fused with the sum; logarithms differ in a last bit
    most = {GAUSSWS: 0, DIFFQ: 0.3 if dtype == F32 else 0.01, BOX_MULLER: 1e-3}[noise]
    assert share_that_differs(found, wanted) <= most, (shape, noise.name, format)


def compare_noise(shape, noise, dtype, backend):
    found = noise_kernel.noise_of(KEY, shape, noise, dtype, backend=backend)
    wanted = kernels.noise_of_plain(KEY, shape, noise, dtype)
    assert found.dtype == dtype
    most = 1e-3 if noise is BOX_MULLER else 0
    assert share_that_differs(found, wanted) <= most


def compare_sums(shape, noise, dtype, backend):
    g = drawn(shape, 1)[0].astype(dtype)
    found = noise_kernel.noise_sums(g, KEY, noise, backend=backend)
    wanted = kernels.noise_sums_plain(g, KEY, noise)
    size = kernels.sums(jnp.abs(g.astype(F32)) * jnp.abs(
        kernels.noise_of_plain(KEY, shape, noise)))  # fmt: skip
    assert (np.abs(found - wanted) <= tol.BITS_GRADIENT * size).all()


@triton_often
@pytest.mark.parametrize("shape", [pytest.param(s, marks=() if len(s) == 4 else pytest.mark.full)
                                   for s in SHAPES], ids=str)  # fmt: skip
def test_is_the_reference(shape, backend):
    narrow = Strip(columns=64)
    compare(shape, GAUSSWS, "bfloat16", "bits-24", Strip(), backend)
    compare(shape, GAUSSWS, "mxfp4", "float32", narrow, backend)
    compare(shape, DIFFQ, "bfloat16", "float16", Strip(), backend)
    compare_noise(shape, GAUSSWS, BF16, backend)
    compare_sums(shape, GAUSSWS, BF16, backend)


@pytest.mark.full
def test_baselines(backend):
    compare((40, 64), BOX_MULLER, "float32", "bfloat16", Strip(columns=64), backend)
    compare((40, 64), GAUSSWS, "float16", "ulp-32", Strip(columns=64), backend)
    compare_noise((40, 64), DIFFQ, BF16, backend)
    compare_sums((40, 64), DIFFQ, F32, backend)


def test_parts(backend):
    starts = (jnp.uint32(32 // 8), jnp.uint32(64))
    found = noise_kernel.noise_of(
        random.part_keys(KEY, *starts), (32, 64), GAUSSWS, BF16, Strip(columns=64), backend
    )
    whole = kernels.noise_of_plain(KEY, (64, 128), GAUSSWS, BF16)
    np.testing.assert_array_equal(found, whole[32:, 64:])


def test_what_is_not_finite_shows(backend):
    w, factor = drawn((64, 64))
    w = w.at[0, 0].set(jnp.nan)
    found, scale = noise_kernel.sample(
        w, None, factor, KEY, GAUSSWS, FORMATS["bfloat16"], BF16, Strip(columns=64), backend
    )
    assert np.isnan(scale[0, 0]) and np.isnan(np.float32(found[:32, :32])).all()
    assert np.isfinite(np.float32(found[32:])).all()


def step(w, bits, g):
    sampled, pull = jax.vjp(lambda w, b: gaussws.sample(w, b, jnp.uint32(3)), w, bits)
    return sampled, pull(g)


def lowered(shape, dtype=F32):
    w, g = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape, BF16)
    bits = jax.ShapeDtypeStruct(kernels.block_shape(shape), F32)
    return sorted(kernels_in(lower_for_cuda(step, w, bits, g)))


def test_lowers_for_gpus(on_a_gpu):
    every = ["noise_sums", "sample_weights"]
    for shape in ((2, 64, 256), (130, 33)):
        assert lowered(shape) == every
    for noise in NOISES:
        draw = functools.partial(gaussws.draw, shape=(40, 70), noise=noise, dtype=BF16)
        assert kernels_in(lower_for_cuda(draw, jax.ShapeDtypeStruct((), jnp.uint32))) == ["noise"]


@pytest.mark.parametrize(
    "noise, format",
    rows(
        itertools.product(NOISES, FORMATS),
        [("gaussws", "bfloat16"), ("diffq", "mxfp4"), ("box-muller", "mxfp8_e4m3")],
    ),
)
def test_every_kernel_lowers(on_a_gpu, noise, format):
    noise = NOISES[noise]
    for weights in ("float32", "bits-24", "ulp-32"):
        split = codecs.SPLITS.get(weights)
        w = jax.ShapeDtypeStruct((64, 300), BF16 if split else weights)
        correction = split and jax.ShapeDtypeStruct((64, 300), split.dtype)
        factor = jax.ShapeDtypeStruct((2, 10), F32)
        to = FORMATS[format]
        run = functools.partial(kernels.sample, noise=noise, to=to, dtype=kernels.result_dtype(to))
        text = lower_for_cuda(run, w, correction, factor, jax.ShapeDtypeStruct((), jnp.uint32))
        assert kernels_in(text) == ["sample_weights"]


def test_left_to_xla():
    assert lowered((64, 256)) == []
    assert "default backend is cpu" in kernels.no_kernel_reason(None, (64, 256), F32)


def test_reasons(on_a_gpu):
    assert kernels.no_kernel_reason(None, (64, 256), F32) is None
    assert "int8 is not one of" in kernels.no_kernel_reason(None, (4, 4), jnp.dtype(jnp.int8))
    assert "elements, not 1 to" in kernels.no_kernel_reason(None, (1 << 16, 1 << 16), F32)


def test_a_host_runs_the_reference(on_a_gpu):
    w, factor = drawn((40, 64))
    sample = functools.partial(kernels.sample, noise=GAUSSWS, to=FORMATS["bfloat16"], dtype=BF16)
    found, _ = jax.jit(sample)(w, None, factor, KEY)
    wanted, _ = of_reference(w, None, factor, KEY, GAUSSWS, FORMATS["bfloat16"], BF16)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_on_a_gpu(noise, gpu_backend):
    for weights in ("bfloat16", *codecs.SPLITS):
        compare((130, 1000), noise, "bfloat16", weights, Strip(), gpu_backend)
    for format in FORMATS:
        compare((2, 130, 300), noise, format, "float32", Strip(), gpu_backend)
    for shape in [*SHAPES, (1, 1), (4096, 1000), (3, 512, 1024)]:
        compare(shape, noise, "bfloat16", "float32", Strip(), gpu_backend)
        compare_noise(shape, noise, BF16, gpu_backend)
        compare_sums(shape, noise, BF16, gpu_backend)
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = np.float32(kernels.noise_of_plain(np.uint32(KEY), (512, 1000), noise))
    found = np.float32(gaussws.draw(KEY, (512, 1000), noise.name))
    assert share_that_differs(found, wanted) <= (1e-3 if noise is BOX_MULLER else 0)
