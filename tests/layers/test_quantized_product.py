"""The product kernel against its reference: interpreted, lowered, and on a Hopper GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from optax_lowmem._src.kernels import platform
from optax_lowmem._src.layers import quantized_matmul
from optax_lowmem._src.layers.quantized_matmul import FORMATS, Quantized
from tests import tolerances as tol
from tests.lowering import gpu_mesh, kernels_in, lower_for_cuda, needs_mosaic
from tests.tiers import rows

PAIRS = [("int8", "int8"), ("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2")]
DTYPES = ("bfloat16", "float32", "float16")
# rows, columns, length: whole blocks; edges of each kind; one partial sum
SIZES = [(256, 512, 512), (136, 320, 256), (128, 256, 128), (648, 1344, 1280)]


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def quantized(shape, seed, per, to):
    """Rows of very different sizes in codes, with a scale a row or one for all."""
    keys = jax.random.split(jax.random.key(seed), 2)
    size = jnp.exp(jax.random.normal(keys[1], (shape[0], 1)))
    return quantized_matmul.quantize_plain(
        size * jax.random.normal(keys[0], shape), per, FORMATS[to]
    )


def operands(pair, sizes, per=(1, None)):
    (rows, columns, length), (a, b) = sizes, pair
    return quantized((rows, length), 1, per[0], a), quantized((columns, length), 2, per[1], b)


def exactly(a, b, dtype):
    """`multiply_plain` in NumPy: in f64, sums of int8 and of float8 products are exact."""
    wide = [np.asarray(x.codes).astype(np.float64) for x in (a, b)]
    sums = np.float32(wide[0] @ wide[1].T)
    scales_of_a, scales_of_b = np.asarray(a.scales), np.asarray(b.scales)
    return np.asarray(jnp.asarray(sums * scales_of_b.T * scales_of_a, dtype))


def compare(found, a, b, dtype, share=None):
    share = tol.float8_sum(jnp.dtype(dtype).name) if share is None else share
    wanted = exactly(a, b, dtype)
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    found, wanted = np.float32(found), np.float32(wanted)
    if a.codes.dtype == jnp.int8:  # sums are exact, and scaled in the same order
        np.testing.assert_array_equal(found, wanted)
    else:  # sums in another order
        size = np.abs(wanted).max(axis=1, keepdims=True)
        off = np.abs(found - wanted) / np.where(size, share * size, 2.0**-126)
        worst = np.unravel_index(off.argmax(), off.shape)
        assert off.max() <= 1, f"{off.max():.3g} of what is allowed, at {worst}"
        assert np.abs(wanted).max() > 0


def compare_on_hopper(found, a, b, dtype):
    """`compare`, of FP8 by tensor cores that keep few bits of a sum."""
    compare(found, a, b, dtype, share=tol.hopper_float8_sum(a.codes.shape[1], dtype))
    if a.codes.dtype != jnp.int8:
        wanted = np.float32(exactly(a, b, dtype))
        off = np.sqrt(np.mean((np.float32(found) - wanted) ** 2, axis=1))
        assert (off <= tol.HOPPER_FLOAT8_RMS * np.sqrt(np.mean(wanted**2, axis=1))).all()


# ---- interpreted ---------------------------------------------------------------------------------
@pytest.fixture
def interpreted(monkeypatch):
    """The kernel on two simulated multiprocessors."""
    from jax.experimental.pallas import mosaic_gpu

    from optax_lowmem._src.layers.quantized_matmul import mosaic as quantized_matmul_mosaic

    monkeypatch.setattr(platform, "multiprocessors", lambda: 2)
    how = mosaic_gpu.InterpretGPUParams(detect_races=True)
    return functools.partial(quantized_matmul_mosaic.multiply, interpret=how)


FORMS = [
    (("int8", "int8"), (256, 512, 640), "bfloat16", (1, None)),
    (("int8", "int8"), (136, 320, 128), "float32", (None, 1)),
    (("e4m3", "e4m3"), (8, 64, 256), "float16", (1, 1)),
    (("e5m2", "e4m3"), (136, 832, 256), "float32", (1, None)),
]


@needs_mosaic
@pytest.mark.parametrize("pair, sizes, dtype, per", rows(FORMS, FORMS[1::2]))
def test_interpreted(pair, sizes, dtype, per, interpreted):
    """More blocks than programs, edges, scales of rows and of tensors."""
    a, b = operands(pair, sizes, per)
    compare(interpreted(a, b, jnp.dtype(dtype)), a, b, dtype)


# ---- lowered -------------------------------------------------------------------------------------
def shapes(pair, rows, columns, length):
    def of(shape, name):
        scales = jax.ShapeDtypeStruct((*shape[:-1], 1), jnp.float32)
        return Quantized(jax.ShapeDtypeStruct(shape, FORMATS[name].dtype), scales)

    rows = (rows,) if isinstance(rows, int) else rows
    return of((*rows, length), pair[0]), of((columns, length), pair[1])


def product(a, b, dtype="bfloat16"):
    return quantized_matmul.multiply(a, b, 1, jnp.dtype(dtype))


@needs_mosaic
@pytest.mark.parametrize(
    "pair", rows([(pair,) for pair in PAIRS], [(PAIRS[0],), (PAIRS[-1],)]), ids="-".join
)
def test_lowers_for_hopper(pair, on_hopper):
    for dtype in DTYPES:
        run = functools.partial(product, dtype=dtype)
        assert kernels_in(lower_for_cuda(run, *shapes(pair, 264, 320, 384))) == [
            "quantized_product"
        ]


@needs_mosaic
def test_transformations_keep_the_kernel(on_hopper):
    one = ["quantized_product"]
    a, b = shapes(("int8", "int8"), (3, 256), 512, 256)
    assert kernels_in(lower_for_cuda(product, a, b)) == one
    assert kernels_in(lower_for_cuda(jax.vmap(product, (0, None)), a, b)) == one
    assert kernels_in(lower_for_cuda(jax.checkpoint(product), a, b)) == one

    def scanned(a, b):
        zero = jnp.zeros((256, 512), jnp.bfloat16)
        return jax.lax.scan(lambda total, part: (total + product(part, b), None), zero, a)[0]

    assert kernels_in(lower_for_cuda(scanned, a, b)) == one
    mesh = gpu_mesh(data=8)
    a, b = shapes(("e4m3", "e4m3"), 2048, 512, 256)
    whole = jax.NamedSharding(mesh, P())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), (a, b))
    assert kernels_in(lower_for_cuda(product, *placed, mesh=mesh)) == []
    for check in (True, False):
        part = jax.shard_map(
            product, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=check
        )
        assert kernels_in(lower_for_cuda(part, a, b, mesh=mesh)) == one


@needs_mosaic
def test_a_host_runs_the_reference(on_hopper):
    a, b = operands(("int8", "int8"), SIZES[0])
    np.testing.assert_array_equal(
        np.float32(jax.jit(product)(a, b)), np.float32(exactly(a, b, "bfloat16"))
    )


# ---- reasons -------------------------------------------------------------------------------------
INT8 = ("int8", "int8")
LEFT = [
    (INT8, (256, 512, 130), "bfloat16", "not multiples of"),
    (INT8, (256, 500, 128), "bfloat16", "not multiples of"),
    (INT8, (250, 512, 128), "bfloat16", "not multiples of"),
    (INT8, (64, 512, 128), "bfloat16", "less than a block"),
    (INT8, (1 << 20, 1 << 12, 128), "bfloat16", "more than 2147483647"),
    (INT8, (256, 512, 128), "float64", "float32, bfloat16, float16, not float64"),
    (("int8", "e4m3"), (256, 512, 128), "bfloat16", "int8 by float8_e4m3fn"),
]


@needs_mosaic
@pytest.mark.parametrize("pair, sizes, dtype, reason", LEFT)
def test_what_the_kernel_does_not_take(pair, sizes, dtype, reason, on_hopper):
    product_reason = functools.partial(
        quantized_matmul.product_reason, *(x.codes for x in shapes(pair, *sizes)), 1, dtype
    )
    assert reason in product_reason()
    assert "last axis" in product_reason(transposed=True)


def test_where_the_kernel_does_not_run(on_a_gpu, monkeypatch):
    a, b = shapes(INT8, 256, 512, 256)
    reason = functools.partial(quantized_matmul.product_reason, a.codes, b.codes, 1, "bfloat16")
    assert "9.0 (Hopper), not None" in reason()  # of this machine's CPU
    assert kernels_in(lower_for_cuda(product, a, b)) == []
    monkeypatch.setattr(platform, "not_hopper_reason", lambda: None)
    monkeypatch.setattr(platform, "has_mosaic_gpu", lambda: False)
    assert "Mosaic GPU of JAX 0.11.2" in reason()
    assert kernels_in(lower_for_cuda(product, a, b)) == []
    monkeypatch.setattr(platform, "no_gpu_reason", lambda: "there is no GPU")
    assert reason() == "there is no GPU"


# ---- on a GPU ------------------------------------------------------------------------------------
@pytest.fixture
def hopper():
    if reason := platform.not_hopper_reason():
        pytest.skip(reason)


ON_A_GPU = [
    (SIZES[0], "bfloat16", (1, None)), (SIZES[1], "bfloat16", (1, 1)),
    (SIZES[1], "float32", (1, None)), (SIZES[2], "float16", (None, 1)),
    (SIZES[3], "bfloat16", (None, None)), (SIZES[3], "float32", (1, 1)),
]  # fmt: skip


@pytest.mark.gpu
@needs_mosaic
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_on_a_gpu(pair, hopper):
    run = jax.jit(product, static_argnums=2)
    for sizes, dtype, per in ON_A_GPU:
        a, b = operands(pair, sizes, per)
        assert quantized_matmul.product_reason(a.codes, b.codes, 1, dtype) is None
        compare_on_hopper(run(a, b, dtype), a, b, dtype)


@pytest.mark.gpu
@needs_mosaic
def test_transformed_on_a_gpu(hopper):
    a, b = operands(INT8, (4096, 4096, 1024))
    compare(jax.jit(product)(a, b), a, b, "bfloat16")
    stacked = [operands(INT8, SIZES[1], per) for per in [(1, None), (1, 1)]]
    first = jax.tree.map(lambda *x: jnp.stack(x), *(a for a, _ in stacked))
    for axes, second in [((0, None), stacked[0][1]), ((0, 0), None)]:
        both = second or jax.tree.map(lambda *x: jnp.stack(x), *([stacked[0][1]] * 2))
        found = jax.jit(jax.vmap(product, axes))(first, both)
        for i, (a, _) in enumerate(stacked):
            compare(found[i], a, stacked[0][1], "bfloat16")
    a, b = stacked[0]
    spoilt = Quantized(a.codes, a.scales.at[5].set(jnp.nan))
    found = np.float32(jax.jit(product)(spoilt, b))
    assert np.isnan(found[5]).all() and np.isfinite(np.delete(found, 5, 0)).all()
