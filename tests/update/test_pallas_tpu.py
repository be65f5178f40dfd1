"""The fused step for TPUs: the reference when interpreted, and the leaves that it takes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

import optax_lowmem as lowmem
from optax_lowmem import codecs
from optax_lowmem._src.core import random
from optax_lowmem._src.core.block import Block
from optax_lowmem._src.core.groups import Tile
from optax_lowmem._src.optimizers.adam import AdamRule
from optax_lowmem._src.update import pallas_tpu
from tests import launch_cases
from tests.tiers import rows
from tests.update.test_pallas_step import STORED, VARIANTS, make

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
# one block; rows that fill none, of three matrices; a row of more than a unit, which ends in part
# of one; scales that XLA keeps transposed, over all rows and in each matrix
SHAPES = [(40, 512), (3, 40, 256), (8, 4736), (264, 128), (2, 128, 256)]
WEIGHTS = [(24, BF16), (32, BF16), (None, BF16), (None, F32)]
ROUNDINGS = ("stochastic", "nearest")
OPTIMIZERS = ["flash_adamw", "flash_lion", "flash_sgd", "coat_adamw", "flash_adam_mini"]
OPTIMIZERS += ["q_adamw", "stable_adamw"]
SMALL = Tile(elements=1 << 12)  # several blocks of most leaves


def launcher(interpret=True):
    """As `launch_cases.launch` takes it: a launch for each leaf, as plain JAX."""

    def launch(rule, plans, leaves, names, scalars, keys, numbers, tile):
        row_keys, lane_keys = random.row_and_lane_keys(keys[numbers], rank=1)
        bits = pallas_tpu.register_bits(lane_keys, plans[0].group_size)
        own = [scalars[i % len(scalars)] for i in range(len(plans))]
        return [
            pallas_tpu.launch(rule, plan, leaf, names, h, key, lanes, tile.elements, interpret)
            for plan, leaf, h, key, lanes in zip(plans, leaves, own, row_keys, bits, strict=True)
        ]

    return launch


def check(case, interpret=True):
    """Next to the reference everywhere: codes and scales of both differ in a last bit at most.

    A CPU contracts multiply-adds in one program and not in the other, so that a moment, and the
    scale or the code made of it, may be off by its rounding.
    """
    for plan in case.plans:
        assert pallas_tpu.unsupported(case.rule, plan) is None
    launch_cases.compare(case, launch_cases.launch(case, launcher(interpret), SMALL))


# ---- numerics ------------------------------------------------------------------------------------


EVERY = [
    (
        optimizer,
        *WEIGHTS[i % len(WEIGHTS)],
        SHAPES[i % len(SHAPES)],
        ROUNDINGS[i // 2 % 2],
        i % 3 > 0,
    )
    for i, optimizer in enumerate(OPTIMIZERS * 3)
]


@pytest.mark.parametrize(
    "optimizer, bits, dtype, shape, rounding, direct", rows(EVERY, [EVERY[0], EVERY[8]])
)
def test_is_the_reference(optimizer, bits, dtype, shape, rounding, direct):
    how = {"master_weight_bits": bits, "rounding": rounding, "master_rounding": rounding}
    check(make(optimizer, [shape], how=how, dtype=dtype, direct=direct))


@pytest.mark.full
@pytest.mark.parametrize(
    "stored", ["linear", "other formats", "expanded", "4 bits", "mu in f32", "nu in f32"]
)
def test_codecs(stored):
    slots = {name: codec for name, codec in STORED[stored].items() if "paper" not in str(codec)}
    slots = {
        name: codec if codec is None or codec.guarded else codecs.linear(codec.signed)
        for name, codec in slots.items()
    }
    check(make("flash_adamw", [(40, 512)], slots))


@pytest.mark.full
@pytest.mark.parametrize("group_size", [8, 64, 128])
def test_group_sizes(group_size):
    check(make("flash_adamw", [(40, 1280)], how={"group_size": group_size}))


@pytest.mark.full
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name):
    optimizer, how, more = VARIANTS[name]
    check(make(optimizer, [(3, 8, 256)], how=how, direct=False, more=more))


BLOCKS = {
    "all": ((40, 256), Block((0, 1))),
    "rows": ((40, 256), Block((1,))),
    "columns": ((40, 256), Block((0,))),
    "columns of each matrix": ((2, 128, 256), Block((1,))),
    "rows of each matrix": ((2, 128, 256), Block((2,))),
    "heads of rows": ((40, 256), Block((1,), heads=(0, 4))),
    "heads of columns": ((40, 256), Block((0,), heads=(1, 4))),
}


@pytest.mark.full
@pytest.mark.parametrize("name", BLOCKS)
def test_values_of_blocks(name):
    shape, block = BLOCKS[name]
    tx = functools.partial(
        lowmem.flash_adam_mini,
        1e-3,
        blocks=lowmem.blocks.Structure(rules=[("leaf0", block)]),
    )
    case = make(tx, [shape])
    assert case.plans[0].block == block
    check(case)


@pytest.mark.full
@pytest.mark.parametrize(
    "bits, rounding, direct", list(itertools.product((24, 32), ROUNDINGS, (0, 1)))
)
def test_where_weights_land(bits, rounding, direct):
    how = dict(policy=launch_cases.POLICY, master_weight_bits=bits, master_rounding=rounding)
    launch_cases.check_landing(launcher(), lowmem.Storage(**how), bool(direct), SMALL)


@pytest.mark.parametrize("optimizer", rows(["adamw", "lion", "sgd"], ["adamw"]))
def test_not_finite(optimizer):
    launch_cases.check_not_finite(launcher(), optimizer, SMALL, width=128)


@pytest.mark.full
def test_as_pallas_interprets_tpus():
    """Memory, semaphores and buffers as on a TPU; of whole blocks (jax 0.12 fails at others)."""
    check(make("flash_adamw", [(64, 4096)]), pltpu.InterpretParams())
    check(make("flash_lion", [(256, 256)]), pltpu.InterpretParams())


# ---- leaves that it takes ------------------------------------------------------------------------


def reason(shape=(64, 512), optimizer=lowmem.flash_adamw, dtype=BF16, **how):
    tx = optimizer(1e-3, storage=lowmem.Storage(policy=launch_cases.POLICY, **how))
    (plan,) = tx.engine.plans({"w": jax.ShapeDtypeStruct(shape, dtype)})
    return pallas_tpu.unsupported(tx.engine.rule, plan)


def test_what_stays_with_xla():
    assert reason() is None and reason((3, 64, 512)) is None
    assert "vectors" in reason((4096,))
    assert "100, is not a multiple of 128" in reason((64, 100))
    assert "5, is not a multiple of 8" in reason((3, 5, 512))
    assert "groups of 48" in reason(group_size=48) and "groups of 256" in reason(group_size=256)
    assert "float16" in reason(dtype=F16)
    assert "float16" in reason(mu=codecs.softsign_paper())
    assert "multiple of 256" in reason((64, 384), nu=codecs.linear4(signed=False))
    assert "`expm1`" in reason(mu=codecs.expanded_dynamic())


def test_an_arithmetic_that_mosaic_may_not_have():
    class Rule(AdamRule):
        def update(self, g, slots, h):
            return super().update(jnp.cbrt(g), slots, h)

    tx = lowmem.flash_adamw(1e-3)
    (plan,) = tx.engine.plans({"w": jax.ShapeDtypeStruct((64, 512), BF16)})
    assert pallas_tpu.unsupported(tx.engine.rule, plan) is None
    assert "`cbrt`" in pallas_tpu.unsupported(Rule(), plan)


def test_every_optimizer_and_split_is_taken():
    for record in lowmem.OPTIMIZERS.values():
        for split, bits in itertools.product(("bits", "ulp"), (24, 32)):
            default = record.make(1e-3).engine.storage
            how = dict(mu=default.mu, nu=default.nu, split=split, master_weight_bits=bits)
            assert reason(optimizer=record.make, **how) is None
