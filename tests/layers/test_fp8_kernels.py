"""Kernels that keep activations in FP8, against their reference: interpreted, lowered, on a GPU."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from optax_lowmem._src.arrays.groups import Tile
from optax_lowmem._src.layers import quantized_matmul as matmul
from optax_lowmem._src.layers.fp8_flow import fp8_kernel, kernels, norm
from optax_lowmem._src.layers.fp8_flow.storage import ArrayFunction, Recipe
from optax_lowmem._src.layers.quantized_matmul import E4M3, E5M2, Quantized
from optax_lowmem.layers import fp8_flow
from tests import tolerances as tol
from tests.lowering import gpu_mesh, kernels_in, lower_for_cuda
from tests.tiers import rows, triton_often

EPS = 1e-6
SHAPES = [(5, 40), (3, 1), (2, 4100), (9, 256), (130, 33)]


def jitted(function, **static):
    return jax.jit(functools.partial(function, **static))


def drawn(shape, dtype, seed=0):
    """Rows of very different sizes, one of zeros, and a spike."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp(3 * rng.normal(size=(shape[0], 1)))
    x[0] = 0
    x[1, shape[1] // 2] = 1e6
    return jnp.asarray(x, dtype)


def raw(stored):
    return np.asarray(stored.codes).view(np.uint8), np.asarray(stored.scales)


def same_codes(found, want):
    """Bits. On a GPU `exact=False` changes none either: codes come before everything else."""
    for mine, theirs in zip(raw(found), raw(want), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def compare_normed(shape, dtype, size, exact, backend):
    x, scale = drawn(shape, dtype), 1 + drawn((2, shape[1]), jnp.float32, 1)[1] / 8
    static = dict(eps=EPS, group_size=size, exact=exact)
    stored, inverse, largest = fp8_kernel.store_normed(x, scale, backend=backend, **static)
    want = jitted(kernels.store_normed_plain, **static)(x, scale)
    same_codes(stored, want[0])
    lost = 2 * tol.of_row_sum(shape[1])
    np.testing.assert_allclose(inverse, want[1], rtol=lost)
    assert largest.shape == (shape[0],)
    np.testing.assert_allclose(largest.max(), want[2].item(), rtol=lost)


def compare_gated(shape, dtype, size, exact, activation, inputs, backend):
    given = tuple(drawn(shape, dtype, i) for i in range(inputs))
    static = dict(activation=activation, group_size=size, exact=exact)
    tile = Tile() if backend == "interpret" else Tile(elements=2048)
    stored, largest = fp8_kernel.store_gated(given, tile=tile, backend=backend, **static)
    want, absmax = jitted(kernels.store_gated_plain, **static)(given)
    for mine, theirs in zip(stored, want, strict=True):
        same_codes(mine, theirs)
    np.testing.assert_allclose(largest.max(), absmax.item(), rtol=tol.ACTIVATION)


FORMS = [(16, "bfloat16", True), (4, "float32", False)]


@triton_often
@pytest.mark.parametrize("size,dtype,exact", rows(FORMS, FORMS[:1]))
def test_is_the_reference(size, dtype, exact, backend):
    for shape in SHAPES:
        compare_normed(shape, dtype, size, exact, backend)
    for shape, activation, inputs in zip(
        SHAPES, ("silu", "relu", "gelu", "gelu_exact", "silu"), (2, 1, 2, 1, 1), strict=True
    ):
        compare_gated(shape, dtype, size, exact, activation, inputs, backend)


def test_numbers_that_are_none_show(backend):
    x = drawn((4, 64), jnp.float32).at[2, 20].set(jnp.nan).at[3, 60].set(jnp.inf)
    stored, inverse, largest = fp8_kernel.store_normed(x, jnp.ones(64), EPS, 16, True, backend)
    back = np.asarray(kernels.restore(stored, 16))
    assert np.isnan(back[2, 16:32]).all() and np.isnan(back[3, 48:]).all()
    assert np.isnan(back).sum() == 32
    assert np.isfinite(largest[:2]).all() and np.isnan(largest[2:]).all()
    _, largest = fp8_kernel.store_gated((x, x), "silu", 16, True, Tile(), backend)
    assert np.isnan(largest).any()


TRANSPOSED = [(5, 40), (300, 70), (128, 64), (1, 1)]


def compare_transposed(shape, dtype, to, backend):
    x = drawn((max(2, shape[0]), shape[1]), dtype)[: shape[0]]
    absmax = kernels.tensor_absmax(x, 16)
    codes, transposed = fp8_kernel.quantize_both(x, absmax, to, backend)
    want = jitted(kernels.quantized, to=to)(x, absmax)
    for found in (codes.codes, transposed.T, fp8_kernel.transpose(want.codes, backend).T):
        assert found.dtype == to.dtype
        np.testing.assert_array_equal(np.asarray(found).view(np.uint8), raw_of(want.codes))
    np.testing.assert_array_equal(codes.scales, want.scales)


def raw_of(codes):
    return np.asarray(codes).view(np.uint8)


NORMED = ArrayFunction(norm._scaled, norm._Norm(Recipe(), EPS))
GATED = ArrayFunction(kernels.gated, "silu")


def compare_of_function(shape, dtype, backend):
    """A norm's rows and columns beside the matrix, and a gate's second matrix."""
    rows, columns = shape
    x, up = (drawn((max(2, rows), columns), dtype, i)[:rows] for i in (0, 1))
    scale = 1 + drawn((2, columns), jnp.float32, 2)[1][None] / 8
    inverse = jnp.exp2(jnp.arange(rows) % 5.0)[:, None]
    for function, beside in ((NORMED, (scale, inverse)), (GATED, (up,))):
        given = [a.astype(jnp.float32) for a in (x, *beside)]
        y = jax.jit(function)(*given)
        absmax = kernels.tensor_absmax(y, 16)
        found, transposed = fp8_kernel.quantize_both(x, absmax, E4M3, backend, function, beside)
        want = raw_of(jitted(kernels.quantized)(y, absmax).codes)
        np.testing.assert_array_equal(raw_of(transposed.T), raw_of(found.codes))
        # codes by another sigmoid may be neighbours, whose bytes are too
        apart = np.abs(raw_of(found.codes).astype(int) - want)
        assert apart.max() <= (function is GATED) and (apart > 0).mean() <= tol.EAGER_JIT_SHARE


@triton_often
def test_codes_of_a_function_in_both_layouts(backend):
    for shape in TRANSPOSED[:-1]:
        compare_of_function(shape, "bfloat16", backend)


def test_nothing_is_stored_for_no_backward_pass(backend):
    """The same maxima, and the same roots."""
    x, up = drawn((9, 100), jnp.bfloat16), drawn((9, 100), jnp.bfloat16, 1)
    static = dict(group_size=16, exact=True, backend=backend)
    _, *want = fp8_kernel.store_normed(x, jnp.ones(100), EPS, **static)
    stored, *found = fp8_kernel.store_normed(x, jnp.ones(100), EPS, keep=False, **static)
    assert stored is None
    jax.tree.map(np.testing.assert_array_equal, found, want)
    _, want = fp8_kernel.store_gated((x, up), "silu", **static)
    stored, found = fp8_kernel.store_gated((x, up), "silu", keep=False, **static)
    assert stored == ()
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize(
    "to,dtype", rows([(E4M3, "bfloat16"), (E5M2, "float32")], [(E5M2, "float32")])
)
def test_transposed_codes(to, dtype, backend):
    for shape in TRANSPOSED:
        compare_transposed(shape, dtype, to, backend)


def gradient(x, scale, g, absmax):
    return kernels.multiply_over_tokens(Quantized(x, scale), g, absmax, E4M3, g.dtype)


def of_gradient(tokens, columns, dtype=jnp.bfloat16, kind=jnp.float8_e4m3fn):
    one = jax.ShapeDtypeStruct((1, 1, 1), jnp.float32)
    return (
        jax.ShapeDtypeStruct((2, tokens // 2, 256), kind), one,
        jax.ShapeDtypeStruct((2, tokens // 2, columns), dtype), one,
    )  # fmt: skip


def test_weight_gradients_transpose_codes_for_the_kernel_of_products(on_a_gpu, monkeypatch):
    """Codes are transposed where the product kernel takes them; elsewhere XLA sums over tokens."""
    given = of_gradient(512, 384)
    assert kernels_in(lower_for_cuda(gradient, *given)) == []  # no Hopper
    assert "Hopper" in kernels.transposes_reason(given[0], given[0], jnp.bfloat16)
    monkeypatch.setattr(kernels, "product_reason", lambda *_: None)
    monkeypatch.setattr(kernels, "multiply", reference_product)
    found = lower_for_cuda(functools.partial(gradient), *given)  # not the trace of before
    assert sorted(kernels_in(found)) == ["fp8_quantize_both", "fp8_transpose"]


def reference_product(a, b, sums, dtype, **more):
    return matmul.multiply_plain(a, b, sums, dtype, **more)


def mlp(x, scale, gate, up, down):
    n = fp8_flow.rms_norm(x, scale)
    h = fp8_flow.gated_product(fp8_flow.linear(n, gate), fp8_flow.linear(n, up))
    return fp8_flow.linear(h, down)


def step_of_mlp(*args):
    y, pull = jax.vjp(mlp, *args)
    return y, pull(jnp.ones_like(y))


def of_mlp(tokens=256, width=256, hidden=384):
    shapes = (2, tokens // 2, width), (width,), (width, hidden), (width, hidden), (hidden, width)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.full
def test_codes_are_written_in_both_layouts_where_they_are_computed(on_a_gpu, monkeypatch):
    """Each tensor is read once for its maximum and once for its codes, and no code is read again.

    The backward pass is given the transposed ones alone; without it nothing is stored.
    """
    args = of_mlp()
    want = jax.jit(step_of_mlp)(*args)
    monkeypatch.setattr(kernels, "product_reason", lambda *_: None)
    monkeypatch.setattr(kernels, "multiply", reference_product)
    jax.clear_caches()
    launched = collections.Counter(kernels_in(lower_for_cuda(step_of_mlp, *args)))
    stored = {"fp8_store_normed": 1, "fp8_store_gated": 1}
    # two inputs, and gradients of two sizes: what gate and up launch is one function of the text
    assert launched == stored | {"quantize_transposed": 2, "fp8_quantize_both": 2 + 2}
    kept = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(mlp, *args)[1], *args))
    codes = collections.Counter(x.shape for x in kept if x.dtype == jnp.float8_e4m3fn)
    assert codes == {(2, 128, 256): 1, (2, 128, 384): 2, (256, 2, 128): 1, (384, 2, 128): 1}
    # traced for a GPU, computed here
    jax.tree.map(np.testing.assert_array_equal, jax.jit(step_of_mlp)(*args), want)


def test_a_weight_gradient_is_the_same_either_way(monkeypatch):
    x, g = drawn((96, 40), jnp.float32), drawn((96, 24), jnp.float32, 1)
    codes, absmax = kernels.quantized(x, kernels.tensor_absmax(x, 16)), kernels.tensor_absmax(g, 16)
    of_g, want = jitted(kernels.multiply_over_tokens, to=E4M3, dtype=g.dtype)(
        codes, g, absmax=absmax
    )
    same, transposed = fp8_kernel.quantize_both(g, absmax, E4M3, "interpret")
    np.testing.assert_array_equal(raw_of(same.codes), raw_of(of_g.codes))
    rows = Quantized(fp8_kernel.transpose(codes.codes, "interpret"), codes.scales)
    found = matmul.multiply_plain(rows, Quantized(transposed, same.scales), 1, g.dtype)
    np.testing.assert_allclose(found, want, atol=96 * tol.U * np.abs(want).max())


def step(x, scale, group_size=16, activation="silu"):
    normed = kernels.store_normed(x, scale, EPS, group_size, True)
    return normed, kernels.store_gated((x, x), activation, group_size, False)


def lowered(shape, dtype=jnp.bfloat16, **more):
    given = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[-1:], jnp.float32)
    return sorted(kernels_in(lower_for_cuda(functools.partial(step, **more), *given)))


@pytest.mark.parametrize("activation", kernels.ACTIVATIONS)
def test_lowers_for_gpus(on_a_gpu, activation):
    both = ["fp8_store_gated", "fp8_store_normed"]
    if activation == "gelu_exact":  # Pallas' Triton backend has no erf
        both = both[1:]
    assert lowered((2, 64, 256), activation=activation) == both
    assert lowered((7, 100), jnp.float32, group_size=4, activation=activation) == both


def test_what_is_left_to_xla(on_a_gpu):
    assert lowered((7, 100), group_size=12) == []
    assert lowered((2, 1 << 16)) == ["fp8_store_gated"]  # rows longer than a program's
    x = jax.ShapeDtypeStruct((2, 8), jnp.int8)
    assert "int8 is not one of" in kernels.unsupported(x, 16)
    assert "0 elements" in kernels.unsupported(jax.ShapeDtypeStruct((0, 8), jnp.float32), 16)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: kernels.restore(kernels.store(x, 16), 16),
        lambda x: kernels.quantized(x, kernels.tensor_absmax(x, 16)),
        lambda x: matmul.quantize(x, 1, E4M3),
        lambda x: matmul.quantize_transposed(x, None, E4M3),
    ],
)
def test_xla_uses_what_is_stored(function):
    """But for this, XLA on a GPU drops f32 -> FP8 -> f32 (seen with `exact=False` below)."""
    assert "optimization_barrier" in str(jax.make_jaxpr(function)(jnp.ones((8, 64))))


def test_left_to_xla_without_a_gpu():
    assert lowered((128, 256)) == []
    assert "the default backend is cpu" in kernels.unsupported(jnp.ones(8), 16)


def test_on_a_mesh(on_a_gpu):
    mesh = gpu_mesh(data=8)
    parts = P("data")
    run = jax.shard_map(
        lambda x, scale: jax.tree.map(lambda a: a.reshape(1, -1), step(x, scale)),
        mesh=mesh,
        in_specs=(parts, P()),
        out_specs=parts,
    )
    given = (
        jax.ShapeDtypeStruct((64, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((256,), jnp.float32),
    )
    text = lower_for_cuda(run, *given, mesh=mesh)
    assert sorted(kernels_in(text)) == ["fp8_store_gated", "fp8_store_normed"]


def test_a_host_runs_the_reference(on_a_gpu):
    x, scale = drawn((8, 100), jnp.float32), jnp.ones(100)
    found = jitted(step)(x, scale)
    same_codes(found[0][0], jitted(kernels.store, group_size=16)(x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("exact", [True, False])
def test_on_a_gpu(dtype, exact, gpu_backend):
    for shape in [*SHAPES, (64, 4096), (16, 11008), (3, 16384)]:
        compare_normed(shape, dtype, 16, exact, gpu_backend)
    for activation in ("silu", "gelu", "relu"):
        compare_gated((64, 1024), dtype, 16, exact, activation, 2, gpu_backend)
        compare_gated((31, 100), dtype, 4, exact, activation, 1, gpu_backend)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("to", [E4M3, E5M2], ids=lambda to: to.name)
def test_transposes_on_a_gpu(to, dtype, gpu_backend):
    for shape in [*TRANSPOSED, (4096, 1024)]:
        compare_transposed(shape, dtype, to, gpu_backend)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_codes_of_a_function_on_a_gpu(dtype, gpu_backend):
    for shape in [*TRANSPOSED[:-1], (4096, 1024)]:
        compare_of_function(shape, dtype, gpu_backend)


@pytest.mark.gpu
def test_weight_gradients_on_a_gpu(gpu_backend):
    """The kernels' sum over tokens and XLA's, of the same codes."""
    x, g = (jax.random.normal(jax.random.key(i), (2, 512, 512), jnp.bfloat16) for i in (0, 1))
    codes, absmax = kernels.quantized(x, kernels.tensor_absmax(x, 16)), kernels.tensor_absmax(g, 16)
    run = functools.partial(kernels.multiply_over_tokens, to=E4M3, dtype=jnp.dtype("bfloat16"))
    of_g, found = jax.jit(run)(codes, g, absmax)
    want = jnp.einsum("btk,btm->km", *(np.float32(a.codes) * a.scales for a in (codes, of_g)))
    # tensor cores keep 13 bits or more of a sum; the result is bf16
    np.testing.assert_allclose(np.float32(found), want, atol=2.0**-7 * np.abs(want).max())
