"""The generated kernel's numerics in Triton's interpreter; run by test_jax_triton.py.

Not a test file by its name: TRITON_INTERPRET=1 must be set before Triton is imported, and then
nothing else that uses Triton runs in the process.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

import optax_lowmem as lowmem
from optax_lowmem._src.core import triton_library
from optax_lowmem._src.core.groups import Tile
from tests import launch_cases, triton_interpreter
from tests.launch_cases import storage

TILE = Tile(512, 4)
# rank 1 and 3, partial groups and tiles, aligned rows of partial groups, several tiles
SHAPES = [(96,), (7, 33), (3, 5, 40), (33, 64)]
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


@pytest.fixture(scope="module")
def launcher():
    return triton_interpreter.install("0.3").launch.__wrapped__


def check(launcher, tx, shapes=SHAPES, tile=TILE, **options):
    case = launch_cases.make(tx, shapes, **options)
    launch_cases.compare(case, launch_cases.launch(case, launcher, tile))


@pytest.mark.parametrize(
    "optimizer, bits, dtype, gradient, direct",
    [
        ("adamw", 24, BF16, BF16, True),
        ("lion", None, F16, F16, True),
        ("sgd", 32, BF16, F32, False),
        ("sgd", None, BF16, BF16, False),
        ("adamw", 24, BF16, F32, False),
        ("adamw", 32, BF16, F16, True),
        ("adamw", None, F32, F32, False),
        ("adamw", None, BF16, BF16, False),
        ("lion", 24, BF16, BF16, True),
        ("sgd", None, BF16, F16, True),
        ("sgd", None, F32, BF16, True),
        ("nesterov", 24, BF16, BF16, True),
        ("direction", None, BF16, BF16, False),
    ],
)
def test_is_the_reference(launcher, optimizer, bits, dtype, gradient, direct):
    tx = launch_cases.OPTIMIZERS[optimizer](storage(master_weight_bits=bits))
    check(launcher, tx, dtype=dtype, gradient_dtype=gradient, direct=direct)


@pytest.mark.parametrize("shape", SHAPES[1:])
@pytest.mark.parametrize("name", ["flash_adam_mini", "flash_factored_adamw"])
def test_second_moments_of_blocks_and_of_rows_and_columns(launcher, name, shape):
    check(launcher, lowmem.OPTIMIZERS[name].make(1e-3, storage=storage()), [shape, shape])


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("bits, dtype", [(24, BF16), (None, BF16), (None, F16)])
def test_updates_of_the_parameters_dtype(launcher, bits, dtype, direct):
    options = {"master_weight_bits": bits, "update_dtype": "param"}
    check(
        launcher, launch_cases.OPTIMIZERS["adamw"](storage(**options)), dtype=dtype, direct=direct
    )


@pytest.mark.parametrize("size", [1, 4, 8, 64, 256])
def test_group_sizes(launcher, size):
    tx = launch_cases.OPTIMIZERS["adamw"](storage(group_size=size))
    check(launcher, tx, [(130,), (3, 5), (9, 300), (256, 2), (64, 1)])


@pytest.mark.parametrize("size", [2, 4, 32])
def test_codes_that_share_bytes(launcher, size):
    """Whole groups, rows of whole bytes, and rows that end in half of one."""
    four = {"mu": lowmem.codecs.linear4(), "nu": lowmem.codecs.linear4(signed=False)}
    tx = launch_cases.OPTIMIZERS["adamw"](storage(group_size=size, **four))
    check(launcher, tx, [*SHAPES, (5, 1), (3, 50), (4, 3)])
    check(launcher, launch_cases.OPTIMIZERS["adamw"](storage(group_size=size, nu=four["nu"])))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_nearest(launcher, optimizer):
    check(launcher, launch_cases.OPTIMIZERS[optimizer](storage(rounding="nearest")))


def test_more_hyperparameters(launcher):
    """Of clipping, and of accumulation into the moments."""
    tx = launch_cases.OPTIMIZERS["sgd"](storage())
    check(launcher, tx, more={"gradient_scale": 0.25, "share": 0.5})


def test_without_decay(launcher):
    tx = lowmem.flash_adamw(1e-3, weight_decay=0.1, mask=False, storage=storage())
    check(launcher, tx)


def test_many_leaves(launcher, monkeypatch):
    """More than a launch takes, of two kinds that take turns."""
    monkeypatch.setattr(triton_interpreter.install("0.3"), "_MAX_POINTERS", 40)
    shapes = [(2 + i, 32 if i % 3 else 33) for i in range(7)]
    check(launcher, launch_cases.OPTIMIZERS["lion"](storage()), shapes, Tile(128, 4))


def test_the_convention_of_jax_triton_04(launcher):
    """Also with a result that takes nothing's place."""
    del launcher
    newer = triton_interpreter.install("0.4").launch.__wrapped__
    try:
        for direct in (True, False):
            check(newer, launch_cases.OPTIMIZERS["adamw"](storage()), SHAPES[1:3], direct=direct)
    finally:
        triton_interpreter.install("0.3")


@pytest.mark.parametrize(
    "update_dtype, bits, direct",
    [
        *itertools.product(["float32", "param"], [32], [True, False]),
        ("float32", 24, True),
        ("float32", 24, False),
        ("param", 24, True),
    ],
)
def test_weights_land_bit_for_bit(launcher, update_dtype, bits, direct):
    options = storage(master_weight_bits=bits, update_dtype=update_dtype)
    launch_cases.check_landing(launcher, options, direct, TILE)


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "sgd"])
def test_what_is_not_finite_shows(launcher, optimizer):
    launch_cases.check_not_finite(launcher, optimizer, TILE)


# ---- E4M3 where a GPU has no conversion ----------------------------------------------------------


@triton.jit
def _to_e4m3(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, triton_library.to_e4m3_by_bits(tl.load(x + at)))


@triton.jit
def _of_e4m3(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, triton_library.of_e4m3_by_bits(tl.load(x + at)))


def converted(kernel, x, dtype):
    y = np.zeros(x.shape, dtype)
    with np.errstate(all="ignore"):
        kernel[(1,)](*map(triton_interpreter._tensor, (x, y)), N=x.size)
    return y


def test_e4m3_by_bits():
    """Every code; numbers of every size, all ties, and those beyond the largest number."""
    codes = np.arange(256, dtype=np.uint8)
    every = codes.view(jnp.float8_e4m3fn).astype(np.float32)
    found = converted(_of_e4m3, codes, np.float32)
    np.testing.assert_array_equal(found.view(np.uint32)[every == every],
                                  every.view(np.uint32)[every == every])  # fmt: skip
    assert np.isnan(found[np.isnan(every)]).all()

    rng = np.random.default_rng(0)
    x = (rng.normal(size=1 << 14) * 2.0 ** rng.integers(-14, 12, 1 << 14)).astype(np.float32)
    numbers = np.sort(every[np.isfinite(every)])
    ties = (numbers[1:] + numbers[:-1]) / 2
    x[: ties.size], x[-4:] = ties, [np.nan, np.inf, -np.inf, 3e38]
    wanted = np.clip(x, -448, 448).astype(jnp.float8_e4m3fn).view(np.uint8)
    found, numbers = converted(_to_e4m3, x, np.uint8), ~np.isnan(x)
    np.testing.assert_array_equal(found[numbers], wanted[numbers])
    assert (found[~numbers] & 0x7F == 0x7F).all()
