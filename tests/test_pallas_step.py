"""The fused step in Pallas: against the reference, its lowering, and who takes what; no GPU."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lowmem as lowmem
from optax_lowmem import codecs
from optax_lowmem._core import numerics, random
from optax_lowmem.kernels import pallas_tiles, platform
from optax_lowmem.kernels.fused_update import dispatch, operands, pallas_triton, tuning
from optax_lowmem.kernels.tiles import Tile, Tiling
from tests import launch_cases, tolerances
from tests.contract_cases import QUICK_COMPILE, pairwise
from tests.lowering import kernels_in, lower_for_cuda
from tests.test_fused_update import compare

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
LEARNING_RATE = launch_cases.LEARNING_RATE
OPTIONS = {
    "flash_adamw": {"weight_decay": 0.1},
    "flash_lion": {"weight_decay": 0.1},
    "flash_sgd": {"weight_decay": 1e-2},
}
STORED = {
    "default": {},
    "paper": {"mu": codecs.softsign_paper(), "nu": codecs.sqrt_paper()},
    "linear": {"mu": codecs.linear(), "nu": codecs.linear(signed=False)},
    "mu in f32": {"mu": None},
    "nu in f32": {"nu": None},
}
WEIGHTS = [(24, BF16), (32, BF16), (None, BF16), (24, F16), (32, F16), (None, F16), (None, F32)]
ROUNDINGS = ("stochastic", "nearest")
# rank 1 to 3; whole groups, tails, rows of part of a group
SHAPES = [(96,), (7, 33), (3, 5, 64), (20, 3)]
SMALL = tuning.Tuning(Tile(elements=512, warps=4))  # most leaves are several tiles, the last partial

PRODUCT = list(itertools.product(lowmem.OPTIMIZERS, STORED, WEIGHTS, (True, False), ROUNDINGS))
FAST = pairwise([list(lowmem.OPTIMIZERS), list(STORED), WEIGHTS, (True, False), ROUNDINGS])
GROUP_SIZES = (32, 64, 48)
GRID = [
    pytest.param(
        *case,
        GROUP_SIZES[i % 3],
        id="-".join([case[0], case[1], f"{case[2][1].dtype}:{case[2][0]}", *map(str, case[3:])]),
        marks=() if case in FAST else pytest.mark.full,
    )
    for i, case in enumerate(PRODUCT)
]


def storage(**options):
    return lowmem.Storage(policy=launch_cases.POLICY, **options)


def make(optimizer, stored, shapes=None, **options):
    """A case of launch_cases; slots without a codec hold what the default's codes stand for."""
    how = {name: options.pop(name) for name in list(options) if name in _STORAGE_FIELDS}
    if callable(optimizer):
        build = optimizer
    else:
        row = lowmem.OPTIMIZERS[optimizer]
        build = functools.partial(row.make, LEARNING_RATE, **OPTIONS.get(optimizer, {}))
    coded = {name: codec for name, codec in stored.items() if codec is not None}
    case = launch_cases.make(build(storage=storage(**coded, **how)), shapes or SHAPES, **options)
    engine = build(storage=storage(**stored, **how)).engine
    plain = [slot.name in stored and stored[slot.name] is None for slot in engine.rule.slots]
    for i, (plan, state) in enumerate(zip(case.plans, case.states, strict=True)):
        new = engine._plan(plan.path, jax.ShapeDtypeStruct(plan.shape, plan.dtype), False, True)
        rows = zip(plan.slots, state.slots, state.scales, plain, strict=True)
        kept = [
            (codecs.decode_array(slot.codec, codes, scales, plan.group_size), jnp.zeros(()))
            if drop
            else (codes, scales)
            for slot, codes, scales, drop in rows
        ]
        case.plans[i] = dataclasses.replace(new, direct=plan.direct)
        case.states[i] = state._replace(
            slots=tuple(row[0] for row in kept), scales=tuple(row[1] for row in kept)
        )
        leaf = case.leaves[i]
        case.leaves[i] = operands.leaf_of(case.plans[i], leaf.g, leaf.p, case.states[i])
    return case


_STORAGE_FIELDS = {field.name for field in dataclasses.fields(lowmem.Storage)}


@pytest.fixture
def on_a_gpu(monkeypatch):
    """What is traced is for one."""
    monkeypatch.setattr(platform, "no_device_reason", lambda: None)
    monkeypatch.setattr(platform, "no_kernel_reason", lambda x=None: None)


@pytest.fixture
def interpreted(on_a_gpu, monkeypatch):
    """The kernel runs as plain JAX; the launches and how many leaves each has are listed."""
    launches = []

    def launch(*args):
        launches.append(len(args[1]))
        return pallas_triton.launch(*args, interpret=True)

    monkeypatch.setattr(dispatch, "_launcher", lambda kernel: launch)
    return launches


def updates(case, tuned=SMALL, implementation="pallas"):
    """`fused_updates` as a function of the arrays of a case."""

    def run(leaves, states, h, keys):
        gradients, weights = ([leaf[i] for leaf in leaves] for i in (0, 1))
        return dispatch.fused_updates(
            case.rule, case.plans, gradients, weights, states, h,
            keys[jnp.asarray(case.numbers)], jnp.array(True), implementation, tuned,
        )  # fmt: skip

    return run


def arrays_of(case):
    return case.leaves, case.states, case.h, case.keys


def check(case, tuned=SMALL):
    found = jax.jit(updates(case, tuned), compiler_options=QUICK_COMPILE)(*arrays_of(case))
    wanted = launch_cases.expected(case)
    for plan, leaf, one, other in zip(case.plans, case.leaves, wanted, found, strict=True):
        step = LEARNING_RATE if leaf.p is not None else 1.0
        compare(plan, leaf.p, one, other, step * tolerances.REORDERED_STEP)
    return found


# ---- numerics --------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer, stored, weights, direct, rounding, group_size", GRID)
def test_is_the_reference(interpreted, optimizer, stored, weights, direct, rounding, group_size):
    bits, dtype = weights
    how = dict(master_weight_bits=bits, rounding=rounding, group_size=group_size)
    gradient_dtype = (BF16, F32, F16)[group_size % 3]
    check(
        make(
            optimizer, STORED[stored], dtype=dtype, direct=direct,
            gradient_dtype=gradient_dtype, **how,
        )
    )  # fmt: skip
    assert sum(interpreted) == len(SHAPES) and max(interpreted) > 1
