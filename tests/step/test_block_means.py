"""Means of squares over blocks: the kernel against float64 and the reference, and its launches."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lowmem as lowmem
from optax_lowmem._src.arrays.block import Factors
from optax_lowmem._src.kernels import platform
from optax_lowmem._src.optim.blocks import block_means, block_means_kernel
from optax_lowmem._src.optim.blocks.block_means import passes, sums_columns
from optax_lowmem.blocks import Block
from tests.lowering import kernels_in, lower_for_cuda
from tests.tiers import rows, triton_often

BF16, F32 = jnp.bfloat16, jnp.float32
# (shape, block): columns, stacked layers, heads after columns, heads with their own axis, all of
# it; rows of memory, heads along them, a vector, more parts than a launch sums
CASES = [
    ((256, 128), Block((0,))), ((300, 130), Block((0,))), ((3, 200, 96), Block((1,))),
    ((128, 96), Block((0,), heads=(1, 4))), ((130, 4, 33), Block((0, 2))),
    ((70, 50), Block((0, 1))), ((5, 7), Block((0,))), ((20_000, 3), Block((0,))),
    ((40, 300), Block((1,))), ((6, 96), Block(heads=(1, 4))), ((2048,), Block((0,))),
    ((70_000,), Block((0,))),
]  # fmt: skip
# rows and columns: one tile, ends within a tile, more parts than a launch sums,
# stacked layers, heads between rows and columns, both
BOTH = [
    ((40, 60), Factors((0, 1))), ((300, 130), Factors((0, 1))), ((129, 40_000), Factors((0, 1))),
    ((3, 200, 96), Factors((1, 2))), ((140, 3, 128), Factors((0, 2))),
    ((2, 140, 2, 256), Factors((1, 3))),
]  # fmt: skip
CASES += BOTH


def drawn(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    wide = np.exp(rng.normal(size=(*shape[:-1], 1)))
    return jnp.asarray(rng.normal(0, 1e-3, shape) * wide, dtype)


def exact(block, g, scale):
    """In float64, by the block's own numbering of a small integer array."""
    square = (np.float64(g) * scale) ** 2
    if isinstance(block, Factors):
        one, other = block.axes
        rows, columns = square.mean(axis=other), square.mean(axis=one)
        return np.concatenate(
            [np.moveaxis(rows, one, -1), np.moveaxis(columns, other - 1, -1)], axis=-1
        )
    kept = np.mean(square, axis=block.axes, keepdims=True)
    if block.heads is None:
        return kept
    axis, count = block.heads
    parts = np.stack(np.split(kept, count, axis=axis))
    return np.moveaxis(parts.mean(axis=axis + 1), 0, axis)


def by_kernel(block, g, scale=1.0, backend="interpret"):
    own = passes(block, g.shape)
    (mean,) = block_means_kernel.means(own, [g], jnp.float32(scale), backend)
    return mean.reshape(block.mean_shape(g.shape))


@pytest.mark.parametrize(
    "case, dtype",
    rows(
        itertools.product(CASES, [BF16, F32]),
        [(case, BF16 if i % 2 else F32) for i, case in enumerate(CASES[::3] + BOTH[1::3])],
    ),
    ids=str,
)
@triton_often
def test_against_float64(case, dtype, backend):
    shape, block = case
    g = drawn(shape, dtype)
    wanted = exact(block, g, 0.5)
    for found in (
        by_kernel(block, g, 0.5, backend),
        jax.jit(block_means.mean_of_squares, static_argnums=0)(block, g, jnp.float32(0.5)),
    ):
        assert found.shape == block.mean_shape(shape)
        # sums of positive numbers: each addition and factor loses at most 2^-24 of the sum
        np.testing.assert_allclose(np.float64(found), wanted, rtol=300 * 2.0**-24)


@pytest.mark.parametrize("case", [CASES[1], CASES[7], CASES[-1]], ids=str)
@triton_often
def test_several_leaves_of_a_launch(case, backend):
    shape, block = case
    gradients = [drawn(shape, BF16, i) for i in range(3)]
    own = passes(block, shape)
    together = block_means_kernel.means(own, gradients, jnp.float32(1), backend)
    for g, mean in zip(gradients, together, strict=True):
        (alone,) = block_means_kernel.means(own, [g], jnp.float32(1), backend)
        np.testing.assert_array_equal(mean, alone)


def test_passes():
    assert {len(passes(block, shape)) for shape, block in CASES} == {1, 2, 3}
    assert {len(passes(block, shape)) for shape, block in BOTH} == {1, 2, 3}


@pytest.mark.parametrize("case", [CASES[1], CASES[5], BOTH[1]], ids=str)
def test_sums_of_large_squares_are_finite(case, backend):
    """A finite mean has finite sums, however many squares there are."""
    shape, block = case
    g = jnp.sign(drawn(shape, F32)) * 1.5e19
    found = by_kernel(block, g, backend=backend)
    np.testing.assert_allclose(np.float64(found), exact(block, g, 1.0), rtol=300 * 2.0**-24)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_not_finite(bad, backend):
    found = np.asarray(
        by_kernel(Block((0,)), drawn((256, 128), F32).at[77, 5].set(bad), backend=backend)
    )[0]
    assert not np.isfinite(found[5]) and np.isfinite(np.delete(found, 5)).all()


def test_rows_of_memory_are_left_to_xla():
    assert not sums_columns(Block((1,)), (32_000, 512))
    assert not sums_columns(Block((0,)), (512,))
    assert not sums_columns(Block(), (64, 64))
    assert not sums_columns(Block((1,), heads=(0, 4)), (64, 64))
    assert sums_columns(Block((0, 1)), (64, 64))
    assert sums_columns(Block(heads=(0, 4)), (64, 64))


def means(blocks, gradients, implementation=None):
    return block_means.means_of_squares(blocks, list(gradients), None, implementation)


def test_lowers_for_cuda(on_a_gpu):
    """Leaves that are alike share a launch, and one more for each further pass."""
    rows = [((512, 256), Block((0,)))] * 3 + [((512, 256), Block((1,))), ((256,), Block((0,)))]
    rows += [((100, 640), Block((0,), heads=(1, 2)))] * 2 + [((256,), Block((0,)))]
    gradients = [jax.ShapeDtypeStruct(shape, BF16) for shape, _ in rows]
    blocks = [block for _, block in rows]
    text = lower_for_cuda(lambda *g: means(blocks, g), *gradients)
    # parts and their sums of three; of two, and then of heads; the vectors at once; rows by XLA
    assert kernels_in(text) == ["block_means"] * (2 + 3 + 1)
    assert kernels_in(lower_for_cuda(lambda *g: means(blocks, g, "xla"), *gradients)) == []


def test_rows_and_columns_are_read_at_once(on_a_gpu):
    """One launch, where no tile has parts of two rows; else XLA takes the rows."""

    def lowered(shape, axes):
        gradients = [jax.ShapeDtypeStruct(shape, BF16)] * 2
        text = lower_for_cuda(lambda *g: means([Factors(axes)] * 2, g), *gradients)
        return kernels_in(text), text.count("stablehlo.reduce(")

    # parts of both, and their sums
    assert lowered((512, 1024), (0, 1)) == (["block_means"] * 2, 0)
    assert lowered((512, 4, 256), (0, 2)) == (["block_means"] * 2, 0)
    kernels, by_xla = lowered((512, 4, 200), (0, 2))
    assert kernels == ["block_means"] * 2 and by_xla > 0
    kernels, by_xla = lowered((4, 512, 256, 2), (1, 2))  # both are columns of memory
    assert kernels == ["block_means"] * (2 + 1) and by_xla == 0


FACTORED = [((130, 700), (0, 1)), ((8192, 3), (0, 1)), ((3, 140, 2, 256), (1, 3))]


@pytest.mark.parametrize("shape, axes", FACTORED, ids=str)
@pytest.mark.parametrize("bad", [None, 0.0, np.inf], ids=str)
def test_factors_are_the_blocks_own(shape, axes, bad, backend):
    """R over its mean and C, for each of several leaves; 0 of zeros, NaN of what is infinite."""
    block = Factors(axes)
    values = [jnp.square(drawn(block.mean_shape(shape), F32, i)) for i in range(2)]
    if bad is not None:
        values[1] = values[1].at[..., : shape[axes[0]]].set(bad)
    for v, found in zip(
        values, block_means_kernel.factors(block, shape, values, backend), strict=True
    ):
        for one, other in zip(found, block.operands(v, shape), strict=True):
            assert one.shape == other.shape
            np.testing.assert_allclose(one, other, rtol=30 * 2.0**-24)


def test_each_of_many_leaves_has_its_own_factors(monkeypatch):
    """More leaves of one shape than a launch takes."""

    def by_kernel(block, shape, values, _):
        assert len(values) <= block_means._LEAVES
        return [block.operands(v, shape) for v in values]

    monkeypatch.setattr(block_means, "_no_kernel_reason", lambda *_: None)
    monkeypatch.setattr(block_means, "_factors_by_kernel", by_kernel)
    block, shape, count = Factors((0, 1)), (4, 6), 2 * block_means._LEAVES + 3
    values = [jnp.square(drawn(block.mean_shape(shape), F32, i)) for i in range(count)]
    found = block_means.operands([block] * count, values, [shape] * count)
    for v, operands in zip(values, found, strict=True):
        for one, other in zip(operands, block.operands(v, shape), strict=True):
            np.testing.assert_array_equal(one, other)


def test_factors_share_a_launch(on_a_gpu):
    def kernels(shape, axes, implementation=None):
        block = Factors(axes)
        values = [jax.ShapeDtypeStruct(block.mean_shape(shape), F32)] * 3
        run = lambda *v: block_means.operands([block] * 3, v, [shape] * 3, implementation)  # noqa: E731
        return kernels_in(lower_for_cuda(run, *values))

    assert kernels((2048, 512), (0, 1)) == ["block_factors"]
    assert kernels((2048, 4, 128), (0, 2)) == ["block_factors"]
    assert kernels((2048, 512), (0, 1), "xla") == []
    assert kernels((256, 512, 2), (0, 1)) == []
    assert kernels((10_000, 512), (0, 1)) == []


def test_a_step_of_rows_and_columns_leaves_nothing_to_xla(on_a_gpu):
    """A launch each: sums, their sums, the new means, what the step takes of them, the step."""
    tx = lowmem.flash_factored_adamw(1e-3)
    params = {f"w{i}": jax.ShapeDtypeStruct((512, 1024), BF16) for i in range(4)}
    state = jax.eval_shape(tx.init, params)
    step = lambda g, s, p: lowmem.step(tx, g, s, p)  # noqa: E731
    text = lower_for_cuda(step, params, state, params)
    means, update = ["block_means"] * 2, ["fused_update"]
    assert kernels_in(text) == [*means, *update, "block_factors", *update]
    assert "stablehlo.reduce(" not in text
    assert not re.search(r"stablehlo.divide .*tensor<\d", text)  # but of scalars


def test_a_small_leaf_alone_is_left_to_xla(on_a_gpu):
    gradients = [jax.ShapeDtypeStruct(shape, BF16) for shape in ((256,), (100, 64), (4, 4))]
    blocks = [Block((0,)), Block((0,), heads=(1, 2)), Block()]
    assert kernels_in(lower_for_cuda(lambda *g: means(blocks, g), *gradients)) == []
    assert "nothing to average" in block_means.unsupported(blocks[2], gradients[2])
    assert "contiguous" in block_means.unsupported(
        Block((1,)), jax.ShapeDtypeStruct((512, 512), F32)
    )


def test_launches_are_of_a_few_leaves(on_a_gpu):
    """Their gradients are needed at once, and a gradient that waits is memory."""
    rows = [(Block((0,)), jnp.zeros((4096, 1)))] * 40
    large = [(Block((0,)), jax.ShapeDtypeStruct((4096, 8192), BF16))] * 5
    counts = [len(batch) for batch in block_means._batches(rows + large, range(45))]
    assert counts == [8] * 5 + [2, 2, 1]


def test_where_the_kernel_runs_the_optimizer_agrees(on_a_gpu, monkeypatch):
    means = block_means_kernel.means
    interpreted = lambda *args, backend: means(*args, backend="interpret")  # noqa: E731
    monkeypatch.setattr(block_means_kernel, "means", interpreted)
    by_kernel = block_means._by_kernel
    always = lambda pairs, scale, _, how: by_kernel(pairs, scale, False, how)  # noqa: E731
    monkeypatch.setattr(block_means, "_by_kernel", always)
    params = {"up_proj": {"kernel": drawn((256, 320), BF16)}}
    tx = lowmem.adam_mini(1e-3, blocks=lowmem.blocks.Structure(default="whole"))
    state, grads = tx.init(params), {"up_proj": {"kernel": drawn((256, 320), BF16, 1)}}
    one, other = (
        lowmem.step(tx, grads, state, params, implementation=name)[1].nu for name in (None, "xla")
    )
    a, b = (np.asarray(nu["up_proj"]["kernel"]) for nu in (one, other))
    assert a.shape == (1, 320) and (a > 0).all()
    np.testing.assert_allclose(a, b, rtol=300 * 2.0**-24)


def test_on_a_cpu_xla_takes_all():
    reason = block_means.unsupported(Block((0,)), drawn((512, 256), F32))
    assert reason == platform.no_gpu_reason() and "cpu" in reason


@pytest.mark.gpu
@pytest.mark.parametrize("shape, block", CASES, ids=str)
def test_on_a_gpu(shape, block, gpu_backend):
    g = drawn(shape, BF16)
    found = by_kernel(block, g, backend=gpu_backend)
    np.testing.assert_allclose(np.float64(found), exact(block, g, 1.0), rtol=300 * 2.0**-24)


@pytest.mark.gpu
@pytest.mark.parametrize("shape, axes", FACTORED, ids=str)
def test_factors_on_a_gpu(shape, axes, gpu_backend):
    test_factors_are_the_blocks_own(shape, axes, None, gpu_backend)
