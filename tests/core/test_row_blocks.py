"""Large arrays in blocks of rows, for XLA on a TPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from optax_lowmem._src.core import platform, row_blocks
from optax_lowmem._src.core.row_blocks import RowBlocks


@pytest.mark.parametrize("shape", [(96, 5), (2, 3, 64, 5)])
def test_a_map_sees_each_row_once_and_joins_them(shape):
    """With where each block begins; results of another form are one a block."""
    blocks = RowBlocks(shape, 32)
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    of_eights = x[..., ::8, :2]

    def function(block, x, small):
        *leading, row = blocks.starts(block)
        assert x.shape == blocks.part and small["a"].shape == (*blocks.part[:-2], 4, 2)
        place = sum(jnp.int32(0) * axis for axis in leading) + row
        return x + 1, small["a"] * 2, x.sum(), place

    one, other, sums, rows = jax.jit(lambda *args: blocks.map(function, *args))(x, {"a": of_eights})
    np.testing.assert_array_equal(one, x + 1)
    np.testing.assert_array_equal(other, of_eights * 2)
    np.testing.assert_array_equal(sums, x.reshape(blocks.count, -1).sum(axis=1))
    starts = [*range(0, shape[-2], 32)]
    np.testing.assert_array_equal(rows, starts * (blocks.count // len(starts)))


def test_blocks_begin_in_their_matrix():
    blocks = RowBlocks((2, 3, 64, 5), 32)
    starts = [[int(x) for x in blocks.starts(jnp.int32(i))] for i in range(blocks.count)]
    assert starts == [[i, j, row] for i in range(2) for j in range(3) for row in (0, 32)]


@pytest.mark.parametrize(
    ("shape", "elements", "rows"),
    [((32000, 2048), 1 << 20, 320), ((64, 1 << 18), 1 << 20, 32), ((33, 2048), 1 << 20, None)],
)
def test_blocks_are_whole_tiles_that_divide_the_rows(shape, elements, rows):
    assert row_blocks.rows_of(shape, 0, elements) == rows


def test_arrays_are_cut_for_one_tpu_alone(monkeypatch):
    """Known by the mesh, or by this host; not what is small, or spread over several devices."""
    large, small = jnp.zeros((64, 1 << 15)), jnp.zeros((32, 1 << 15))
    assert row_blocks.on_tpu(large) is None
    monkeypatch.setattr(platform, "target", lambda *args: "tpu")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    assert row_blocks.on_tpu(large) == RowBlocks((64, 1 << 15), 32)
    assert row_blocks.on_tpu(small) is None and row_blocks.on_tpu(small, large.shape) is not None
    assert row_blocks.on_tpu(large, (65, 1 << 15)) is None
    with jax.set_mesh(mesh):
        assert row_blocks.on_tpu(large) is None
