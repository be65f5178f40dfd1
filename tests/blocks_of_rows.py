"""Functions as they are traced for a TPU that takes large arrays in blocks of rows, on a CPU."""

import jax

from optax_lowmem._src.core import platform, row_blocks
from optax_lowmem._src.noise import kernels
from tests.compilation import SAME_BITS


def both(monkeypatch, function, *args, elements):
    """A function's results as a whole, and in blocks of this many elements or a few more."""
    whole = _compiled(function, *args)
    loops = []
    looped = row_blocks.RowBlocks.map

    def counted(blocks, *given):
        loops.append(blocks)
        return looped(blocks, *given)

    with monkeypatch.context() as patch:
        patch.setattr(platform, "may_be_tpu", lambda *args: True)
        patch.setattr(platform, "no_tpu_kernel_reason", lambda x=None: None)
        patch.setattr(row_blocks, "ELEMENTS", elements)
        patch.setattr(kernels, "_STRIPS", elements)
        patch.setattr(row_blocks.RowBlocks, "map", counted)
        in_blocks = _compiled(function, *args)
    assert loops and all(blocks.count > 1 for blocks in loops)
    return whole, in_blocks


def _compiled(function, *args):
    # a new function, or JAX would remember how it was traced before
    return jax.jit(lambda *args: function(*args), compiler_options=SAME_BITS)(*args)
