"""The step in blocks of rows, XLA's on a TPU: the reference's bits, block by block."""

import functools

import jax
import numpy as np
import pytest

import optax_lowmem as lowmem
from optax_lowmem._src.core import row_blocks
from optax_lowmem._src.update import by_rows
from tests import launch_cases
from tests.compilation import SAME_BITS
from tests.tiers import rows

NEAREST, STOCHASTIC = (
    lowmem.Storage(policy=launch_cases.POLICY, rounding=rounding)
    for rounding in ("nearest", "stochastic")
)
FOUR_BITS = lowmem.Storage(
    mu=lowmem.codecs.linear4(),
    nu=lowmem.codecs.linear4(signed=False),
    policy=launch_cases.POLICY,
)


def mini(**block):
    structure = lowmem.blocks.Structure(rules=[("leaf*", lowmem.blocks.Block(**block))])
    return lowmem.flash_adam_mini(1e-3, blocks=structure, storage=STOCHASTIC)


# how -> transformation, shape, whether it returns new weights
CASES = {
    "new weights": (lowmem.flash_adamw(1e-3, storage=STOCHASTIC), (192, 96), True),
    "an update": (lowmem.flash_adamw(1e-3, storage=STOCHASTIC), (192, 96), False),
    "a direction": (lowmem.scale_by_flash_adam(storage=NEAREST), (192, 96), False),
    "part of a group": (lowmem.flash_lion(1e-3, storage=STOCHASTIC), (128, 70), True),
    "two loops": (lowmem.flash_adamw(1e-3, storage=STOCHASTIC), (3, 128, 64), True),
    "three loops": (lowmem.flash_sgd(1e-3, momentum=0.9, storage=NEAREST), (2, 2, 128, 64), True),
    "many small matrices": (lowmem.flash_lion(1e-3, storage=STOCHASTIC), (21, 32, 64), True),
    "four bits": (lowmem.flash_adamw(1e-3, storage=FOUR_BITS), (192, 96), True),
    "expanded": (lowmem.coat_adamw(1e-3), (192, 96), True),
    "of a leaf": (lowmem.stable_adamw(1e-3, storage=STOCHASTIC), (192, 96), True),
    "a value a column": (mini(axes=(0,)), (192, 96), True),
    "a value a row": (mini(axes=(1,)), (192, 96), True),
    "a value a head": (mini(axes=(0,), heads=(1, 3)), (192, 96), True),
}
DEFAULT = ["new weights", "an update", "two loops", "a value a row"]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(row_blocks, "ELEMENTS", 64 * 96)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", rows(CASES, DEFAULT))
def test_the_bits_of_the_reference(name):
    tx, shape, direct = CASES[name]
    case = launch_cases.make(tx, [shape], direct=direct)
    (plan,), (leaf,), (state,) = case.plans, case.leaves, case.states
    assert by_rows.supported(plan) is None
    args = (leaf.g, leaf.p, state, case.of_leaves[0], case.keys[0])
    found, expected = (
        jax.jit(functools.partial(path, case.rule, plan), compiler_options=SAME_BITS)(*args)
        for path in (by_rows.fused_update, by_rows.reference.fused_update)
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.usefixtures("small_blocks")
def test_what_takes_another_path():
    def reason(tx, shape):
        (plan,) = tx.engine.plans({"leaf": jax.ShapeDtypeStruct(shape, "bfloat16")})
        return by_rows.supported(plan)

    tx = CASES["an update"][0]
    assert reason(tx, (192, 96)) is None
    assert "as a whole" in reason(tx, (64, 96)) and "as a whole" in reason(tx, (64 * 97,))
    assert "multiple of 32" in reason(tx, (200, 96))
    assert "heads" in reason(mini(axes=(1,), heads=(0, 8)), (192, 96))
    assert "no slot" in reason(
        lowmem.flash_adamw(1e-3, storage=lowmem.Storage.full_precision()), (192, 96)
    )


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((32000, 2048), [320]),  # 512 would leave some over
        ((128256, 2048), [384]),
        ((16, 2048, 8192), [1, 128]),
        ((3, 3, 512, 512), [1, 3, 512]),
        ((64, 1 << 18), [32]),
        ((33, 2048), [None]),
    ],
)
def test_blocks_are_whole_tiles_that_divide_the_rows(shape, blocks):
    assert [by_rows._rows(shape, axis) for axis in range(len(shape) - 1)] == blocks
