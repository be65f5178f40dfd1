"""The fused step for TPUs: the reference when interpreted, and the leaves that it takes."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
from optax_lowmem import codecs
from optax_lowmem._src.core import platform, random
from optax_lowmem._src.core.block import Block
from optax_lowmem._src.core.groups import Tile
from optax_lowmem._src.optimizers.adam import AdamRule
from optax_lowmem._src.update import pallas_tpu
from optax_lowmem.sharding import state_shardings
from tests import launch_cases, tolerances
from tests.compilation import SAME_BITS
from tests.lowering import lower_for_tpu, tpu_kernels_in, tpu_mesh
from tests.tiers import rows
from tests.update.test_pallas_step import STORED, VARIANTS, make
from tests.update.test_sharding import COLLECTIVES

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
    "optimizer, bits, dtype, shape, rounding, direct", rows(EVERY, [EVERY[0], EVERY[8], EVERY[9]])
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
@pytest.mark.parametrize("group_size", [8, 64, 128, 256, 1024])
def test_group_sizes(group_size):
    check(make("flash_adamw", [(40, 3072)], how={"group_size": group_size}))


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


MATRICES = {
    "one": (40, 256),
    "two": (2, 128, 256),
    "two of two": (2, 2, 128, 256),
    "heads between both axes": (72, 24, 128),
}


@pytest.mark.parametrize("matrices", rows(MATRICES, ["two", "heads between both axes"]))
def test_values_of_rows_and_columns(matrices):
    tx = functools.partial(lowmem.flash_factored_adamw, 1e-3, min_dim_size_to_factor=32)
    case = make(tx, [MATRICES[matrices]])
    assert len(case.plans[0].block.parts) == 2
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
    return pallas_tpu.unsupported(tx.engine.rule.of_leaf(plan.matrices), plan)


def test_what_stays_with_xla():
    assert reason() is None and reason((3, 64, 512)) is None
    assert "vectors" in reason((4096,))
    assert "100, is not a multiple of 128" in reason((64, 100))
    assert "5, is not a multiple of 8" in reason((3, 5, 512))
    assert "groups of 48" in reason(group_size=48) and "groups of 2048" in reason(group_size=2048)
    assert "groups of 256 do not divide" in reason((64, 384), group_size=256)
    assert "float16" in reason(dtype=F16)
    assert "float16" in reason(mu=codecs.softsign_paper())
    assert "multiple of 256" in reason((64, 384), nu=codecs.linear4(signed=False))
    assert "`expm1`" in reason(mu=codecs.expanded_dynamic())
    factored = functools.partial(reason, optimizer=lowmem.flash_factored_adamw, nu=None)
    assert factored((128, 256)) is None and "plain elementwise" in factored((64, 256))
    assert factored((256, 8, 256)) is None and factored((4096, 32, 128)) is None
    assert "along both of its last axes" in factored((512, 384, 256))  # the first two are larger


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


# ---- programs for a TPU --------------------------------------------------------------------------

TREE = {"w": (64, 512), "stack": (2, 64, 256), "odd": (64, 100), "bias": (64,)}


def abstract(tx, shapes=TREE):
    params = {name: jax.ShapeDtypeStruct(shape, BF16) for name, shape in shapes.items()}
    return params, jax.eval_shape(tx.init, params), params


@pytest.mark.parametrize("optimizer", rows(lowmem.OPTIMIZERS, ["stable_adamw"]))
def test_traced_anywhere(optimizer):
    """A program for a TPU has its kernels, whatever machine traces it."""
    # the leaves here have fewer rows and columns than are factored by default
    more = {"min_dim_size_to_factor": 64} if optimizer == "flash_factored_adamw" else {}
    tx = lowmem.OPTIMIZERS[optimizer].make(1e-3, **more)
    text = lower_for_tpu(functools.partial(lowmem.step, tx), *abstract(tx))
    assert set(tpu_kernels_in(text)) == {"fused_update"}


def test_a_mesh_says_what_a_program_is_for():
    one = AbstractDevice("TPU v5 lite", platform="tpu", num_cores=1)
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=one)
    assert platform.target() is None and platform.target(mesh=mesh) == "tpu"
    seen = []
    see = jax.jit(lambda x: seen.append(platform.target(x)))
    see.trace(jax.ShapeDtypeStruct((8,), F32, sharding=NamedSharding(mesh, P())))
    with jax.sharding.use_abstract_mesh(mesh):
        see.trace(jax.ShapeDtypeStruct((9,), F32))
    with jax.default_device(jax.devices("cpu")[0]):
        see.trace(jax.ShapeDtypeStruct((10,), F32))
    here = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:1])
    see.trace(jax.device_put(jnp.ones(11), NamedSharding(here, P())))
    see.trace(jnp.ones(12))
    assert seen == ["tpu", "tpu", "cpu", "cpu", None]


def test_arrays_on_a_mesh_of_tpus():
    """Nothing but their NamedSharding tells, and Pallas finds which TPU it is."""
    tx, mesh = lowmem.flash_lion(1e-3), tpu_mesh(x=1)
    given = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())),
        abstract(tx),
    )
    traced = jax.jit(functools.partial(lowmem.step, tx)).trace(*given)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert set(tpu_kernels_in(text)) == {"fused_update"}


def test_reasons():
    tx = lowmem.flash_adamw(1e-3, storage=lowmem.Storage(policy=launch_cases.POLICY))
    params = abstract(tx)[0]
    with jax.sharding.use_abstract_mesh(tpu_mesh()):
        found = str(lowmem.explain(tx, params))
    assert "step by pallas_tpu for 2 of 4 leaves: fused kernel" in found
    assert "pallas_tpu: its last axis, 100, is not a multiple of 128" in found
    with jax.sharding.use_abstract_mesh(tpu_mesh(x=4)):
        found = str(lowmem.explain(tx, params))
    assert "step by xla for 4 of 4 leaves: 4 devices are visible" in found


def test_asked_for():
    tx = lowmem.flash_adamw(1e-3)
    step = functools.partial(lowmem.step, tx, implementation="pallas_tpu")
    with pytest.raises(ValueError, match="leaf 'w': the default backend is cpu"):
        jax.eval_shape(step, *abstract(tx, {"w": (64, 512)}))
    with (
        jax.sharding.use_abstract_mesh(tpu_mesh()),
        pytest.raises(ValueError, match="leaf 'w': its last axis, 100"),
    ):
        jax.eval_shape(step, *abstract(tx, {"w": (64, 100)}))


def test_on_a_machine_with_a_tpu_the_compiler_chooses(monkeypatch):
    """Both branches are traced where nothing says what a program is for."""
    tx, shapes = lowmem.flash_adamw(1e-3), {"w": (64, 512)}
    params = {"w": jnp.ones((64, 512), BF16)}
    step = functools.partial(lowmem.step, tx)
    wanted = jax.jit(lambda *tree: step(*tree))(params, tx.init(params), params)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    traced = str(jax.make_jaxpr(lambda *tree: step(*tree))(*abstract(tx, shapes)))
    assert "platform_index" in traced and traced.count("pallas_call") == 1
    found = jax.jit(lambda *tree: step(*tree))(params, tx.init(params), params)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def interpreted(monkeypatch):
    """Programs are traced for a TPU, and the kernel runs as plain JAX."""
    launch = functools.partial(pallas_tpu.launch, interpret=True)
    monkeypatch.setattr(pallas_tpu, "launch", launch)
    monkeypatch.setattr(platform, "target", lambda *args, **named: "tpu")


@pytest.mark.parametrize(
    "optimizer, spec",
    rows(
        itertools.product(["flash_adamw", "flash_lion"], [P("a"), P(None, "a"), P("b", "a")]),
        [("flash_lion", P("b", "a"))],
    ),
)
def test_on_a_mesh(optimizer, spec, interpreted):
    """Each device steps its part, with the random bits that the whole leaf has there."""
    tx = lowmem.OPTIMIZERS[optimizer].make(1e-3)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(0)
    masters = {"w": jnp.asarray(rng.normal(0, 0.1, (256, 512)), F32)}
    g = {"w": jnp.asarray(rng.normal(0, 1e-3, (256, 512)), BF16)}
    params, state = lowmem.init(tx, masters, BF16)
    same_bits = functools.partial(jax.jit, compiler_options=SAME_BITS)
    one = same_bits(functools.partial(lowmem.step, tx))(g, state, params)
    place = {"w": NamedSharding(mesh, spec)}
    of_state = state_shardings(tx, params, place)
    step = functools.partial(lowmem.step, tx, specs={"w": spec}, mesh=mesh)
    placed = [jax.device_put(x, s) for x, s in ((g, place), (state, of_state), (params, place))]
    compiled = same_bits(step, out_shardings=(place, of_state)).lower(*placed).compile()
    assert not re.findall(COLLECTIVES, compiled.as_text())
    for a, b in zip(jax.tree.leaves(compiled(*placed)), jax.tree.leaves(one), strict=True):
        np.testing.assert_array_equal(a, b)


AXES = {"one": (0, 1), "of columns": (0,), "of rows": (1,)}


@pytest.mark.parametrize(
    ("blocks", "spec"),
    rows(
        itertools.product(AXES, [P("a"), P(None, "a"), P("b", "a")]),
        [("one", P("a")), ("of columns", P("b", "a"))],
    ),
)
def test_blocks_on_a_mesh(blocks, spec, interpreted):
    """Each part takes the values of its blocks, which may lie on several devices."""
    rules = [("w", lowmem.blocks.Block(axes=AXES[blocks]))]
    tx = lowmem.flash_adam_mini(1e-3, blocks=lowmem.blocks.Structure(rules=rules))
    one, several, text = on_one_and_several(tx, spec)
    assert set(re.findall(COLLECTIVES, text)) <= {"all-reduce", "all-gather"}
    for a, b in zip(jax.tree.leaves(several), jax.tree.leaves(one), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("spec", rows([P("a"), P("b", "a")], [P("b", "a")]))
def test_rows_and_columns_on_a_mesh(spec, interpreted):
    """As for blocks: each part takes the values of its rows and of its columns.

    Their array has both after each other, so that its parts are not those of either.
    """
    one, several, text = on_one_and_several(lowmem.flash_factored_adamw(1e-3), spec)
    assert set(re.findall(COLLECTIVES, text)) <= {"all-reduce", "all-gather", "collective-permute"}
    for a, b in zip(jax.tree.leaves(several), jax.tree.leaves(one), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("spec", rows([P("a"), P("b", "a")], [P("b", "a")]))
def test_a_mean_on_a_mesh(spec, interpreted):
    """That of a device's part, averaged with the others'."""
    one, several, text = on_one_and_several(lowmem.stable_adamw(1e-3, threshold=0.5), spec)
    assert set(re.findall(COLLECTIVES, text)) == {"all-reduce"}
    (params, state), (own, own_state) = several, one
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(own_state), strict=True):
        near = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)) <= 1
        share = np.mean(np.asarray(a) != np.asarray(b))
        # codes of moments do not depend on the mean; the correction of a weight does
        assert near.all() or share <= tolerances.REORDERED_CODES
    np.testing.assert_allclose(
        np.asarray(params["w"], np.float32), np.asarray(own["w"], np.float32), rtol=2.0**-8
    )


def on_one_and_several(tx, spec):
    """A step on one device and on eight, and the latter's program."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(0)
    masters = {"w": jnp.asarray(rng.normal(0, 0.1, (256, 512)), F32)}
    # whose squares have one sum, in any order
    g = {
        "w": jnp.asarray(
            2.0 ** rng.integers(-9, -7, (256, 512)) * rng.choice([-1, 1], (256, 512)), BF16
        )
    }
    params, state = lowmem.init(tx, masters, BF16)
    same_bits = functools.partial(jax.jit, compiler_options=SAME_BITS)
    one = same_bits(functools.partial(lowmem.step, tx))(g, state, params)
    place = {"w": NamedSharding(mesh, spec)}
    of_state = state_shardings(tx, params, place)
    step = functools.partial(lowmem.step, tx, specs={"w": spec}, mesh=mesh)
    placed = [jax.device_put(x, s) for x, s in ((g, place), (state, of_state), (params, place))]
    compiled = same_bits(step, out_shardings=(place, of_state)).lower(*placed).compile()
    return one, compiled(*placed), compiled.as_text()
