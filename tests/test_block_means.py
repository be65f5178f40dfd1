"""Means of squares over blocks: the kernel against float64 and the reference, and its launches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lowmem as lowmem
from optax_lowmem.blocks import Block
from optax_lowmem.kernels import block_means, platform
from optax_lowmem.kernels.block_means import dispatch, pallas_triton, reference
from optax_lowmem.kernels.block_means.columns import Columns, has_columns
from tests.lowering import kernels_in, lower_for_cuda

BF16, F32 = jnp.bfloat16, jnp.float32
# (shape, block): columns, stacked layers, heads after columns, heads with their own axis, the whole
CASES = [
    ((256, 128), Block((0,))),
    ((300, 130), Block((0,))),
    ((3, 200, 96), Block((1,))),
    ((128, 96), Block((0,), heads=(1, 4))),
    ((130, 4, 33), Block((0, 2))),
    ((70, 50), Block((0, 1))),
    ((5, 7), Block((0,))),
    ((20_000, 3), Block((0,))),
]


def drawn(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    wide = np.exp(rng.normal(size=(*shape[:-1], 1)))
    return jnp.asarray(rng.normal(0, 1e-3, shape) * wide, dtype)


def exact(block, g, scale):
    """In float64, by the block's own numbering of a small integer array."""
    square = (np.float64(g) * scale) ** 2
    kept = np.mean(square, axis=block.axes, keepdims=True)
    if block.heads is None:
        return kept
    axis, count = block.heads
    parts = np.stack(np.split(kept, count, axis=axis))
    return np.moveaxis(parts.mean(axis=axis + 1), 0, axis)


def by_kernel(block, g, scale=1.0):
    columns = (Columns.of(block, g.shape),)
    (mean,) = pallas_triton.column_means(columns, (g,), jnp.float32(scale), interpret=True)
    return dispatch._rest(block, g.shape, mean)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape, block", CASES, ids=str)
def test_against_float64(shape, block, dtype):
    g = drawn(shape, dtype)
    wanted = exact(block, g, 0.5)
    for found in (by_kernel(block, g, 0.5), reference.mean_of_squares(block, g, jnp.float32(0.5))):
        assert found.shape == block.mean_shape(shape)
        # sums of positive numbers: each addition and factor loses at most 2^-24 of the sum
        np.testing.assert_allclose(np.float64(found), wanted, rtol=300 * 2.0**-24)


def test_several_leaves_of_a_launch():
    """Each has the sums that it has alone."""
    blocks = [block for _, block in CASES]
    gradients = tuple(drawn(shape, BF16, i) for i, (shape, _) in enumerate(CASES))
    columns = tuple(map(Columns.of, blocks, (g.shape for g in gradients)))
    together = pallas_triton.column_means(columns, gradients, jnp.float32(1), interpret=True)
    for column, g, mean in zip(columns, gradients, together, strict=True):
        alone = pallas_triton.column_means((column,), (g,), jnp.float32(1), interpret=True)[0]
        np.testing.assert_array_equal(mean, alone)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_not_finite(bad):
    """In its column, and in no other."""
    found = np.asarray(by_kernel(Block((0,)), drawn((256, 128), F32).at[77, 5].set(bad)))[0]
    assert not np.isfinite(found[5]) and np.isfinite(np.delete(found, 5)).all()


def test_rows_of_memory_are_left_to_xla():
    assert not has_columns(Block((1,)), (32_000, 512))
    assert not has_columns(Block((0,)), (512,))
    assert not has_columns(Block(), (64, 64))
    assert has_columns(Block((0, 1)), (64, 64))


@pytest.fixture
def a_gpu(on_a_gpu, monkeypatch):
    monkeypatch.setattr(dispatch, "_SMALL", 0)


def means(blocks, gradients, implementation=None):
    return block_means.means_of_squares(blocks, list(gradients), None, implementation)


def test_lowers_for_cuda(a_gpu):
    """Leaves of one shape in one launch, and one more for their parts; rows go to XLA."""
    blocks = [Block((0,))] * 3 + [Block((1,)), Block((0,), heads=(1, 2))]
    shapes = [(512, 256)] * 3 + [(512, 256), (100, 64)]
    gradients = [jax.ShapeDtypeStruct(shape, BF16) for shape in shapes]
    text = lower_for_cuda(lambda *g: means(blocks, g), *gradients)
    assert kernels_in(text) == ["block_means"] * 4
    assert kernels_in(lower_for_cuda(lambda *g: means(blocks, g, "xla"), *gradients)) == []


def test_where_the_kernel_runs_the_optimizer_agrees(a_gpu, monkeypatch):
    """flash_adam_mini's second moments, interpreted, beside XLA's."""
    launch = functools.partial(pallas_triton.column_means, interpret=True)
    monkeypatch.setattr(dispatch, "_by_kernel", by_launch(launch))
    params = {"up_proj": {"kernel": drawn((256, 160), BF16)}}
    tx = lowmem.adam_mini(1e-3, blocks=lowmem.blocks.Structure(default="whole"))
    state, grads = tx.init(params), {"up_proj": {"kernel": drawn((256, 160), BF16, 1)}}
    one, other = (
        lowmem.step(tx, grads, state, params, implementation=name)[1].nu for name in (None, "xla")
    )
    a, b = (np.asarray(nu["up_proj"]["kernel"]) for nu in (one, other))
    assert a.shape == (1, 160) and (a > 0).all()
    np.testing.assert_allclose(a, b, rtol=300 * 2.0**-24)


def by_launch(launch):
    def kernel(blocks, gradients, scale, automatic):
        assert automatic and scale is None
        columns = tuple(map(Columns.of, blocks, (g.shape for g in gradients)))
        sums = launch(columns, tuple(gradients), jnp.float32(1))
        rows = zip(blocks, gradients, sums, strict=True)
        return [dispatch._rest(block, g.shape, mean) for block, g, mean in rows]

    return kernel


def test_on_a_cpu_xla_takes_all():
    reason = dispatch.supported(Block((0,)), drawn((512, 256), F32))
    assert reason == platform.no_device_reason() and "cpu" in reason


@pytest.mark.gpu
@pytest.mark.parametrize("shape, block", CASES, ids=str)
def test_on_a_gpu(shape, block):
    g = drawn(shape, BF16)
    columns = (Columns.of(block, shape),)
    (mean,) = pallas_triton.column_means(columns, (g,), jnp.float32(1))
    found = dispatch._rest(block, shape, mean)
    np.testing.assert_allclose(np.float64(found), exact(block, g, 1.0), rtol=300 * 2.0**-24)
