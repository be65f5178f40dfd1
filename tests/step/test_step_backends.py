"""The step by each kernel against the reference, and the leaves that each takes.

On a CPU Pallas' kernels are interpreted, and the generated one runs on NumPy; on a GPU both of the
GPU's run there.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, PartitionSpec

import optax_lowmem as lowmem
from optax_lowmem import codecs
from optax_lowmem._src.arrays import numerics, random
from optax_lowmem._src.arrays.block import Block
from optax_lowmem._src.arrays.groups import Tile, Tiling
from optax_lowmem._src.kernels import gpu_kernel
from optax_lowmem._src.kernels.gpu_kernel import Range
from optax_lowmem._src.optim.optimizers.adam import AdamRule
from optax_lowmem._src.optim.step import backend, reference, tuning
from optax_lowmem._src.optim.step import gpu as gpu_step
from optax_lowmem._src.optim.step.state import LeafBatch
from optax_lowmem._src.optim.step.tpu import pallas_tpu
from tests import launch_cases, small_leaves, tolerances, triton_on_numpy
from tests.compilation import FULL_COMPILE, SAME_BITS
from tests.contract_cases import RULES, covering, pairwise
from tests.launch_cases import storage
from tests.step.test_fused_update import compare
from tests.tiers import rows

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
    "mu in f32": {"mu": None, "nu": codecs.linear_paper(signed=False)},
    "nu in f32": {"mu": codecs.linear_paper(), "nu": None},
    "other formats": {"mu": codecs.affine(), "nu": codecs.e4m3(signed=False)},
    "expanded": {"mu": codecs.expanded_e4m3(), "nu": codecs.expanded_e4m3(signed=False)},
    "4 bits": {"mu": codecs.linear4(), "nu": codecs.linear4(signed=False)},
}
WEIGHTS = [(24, BF16), (32, BF16), (None, BF16), (24, F16), (32, F16), (None, F16), (None, F32)]
ROUNDINGS = ("stochastic", "nearest")
# rank 1 to 3; whole groups, tails, rows of part of a group; the first two share a launch
SHAPES = [((7, 33), (3, 5, 64)), ((96,),), ((20, 3),)]
# one block; rows that fill none, of three matrices; a row of more than a unit, which ends in part
# of one; scales that XLA keeps transposed, over all rows and in each matrix
ON_TPU = [((40, 512),), ((3, 40, 256),), ((8, 4864),), ((264, 256),), ((2, 128, 256),)]
ON_GPU = ((4097,), (8193, 64), (3, 5, 1000), (5, 50257), (7, 33), (256, 2), (2, 3, 4, 5))

KERNELS = ("pallas", "triton", "pallas_tpu")
GPU_KERNELS = ("pallas on a GPU", "triton on a GPU")
# of which most leaves are several, the last partial
TILES = {"pallas": Tile(512, 4), "triton": Tile(512, 4), "pallas_tpu": Tile(1 << 12)}
SMALL = tuning.Tuning(TILES["pallas"])
LAUNCH = gpu_step.launch.__wrapped__  # without jit, also where a test replaces `gpu_step.launch`


def by_triton(rule, plans, leaves, names, scalars, keys, numbers, tile):
    """A new program in each call: another would keep what runs in the place of Triton."""

    @jax.jit
    def run(*arrays):
        leaves, *others = arrays
        return LAUNCH(rule, plans, leaves, names, *others, tile, backend="triton")

    return run(leaves, scalars, keys, numbers)


def builder(optimizer):
    """storage -> optimizer, of a name of the table, or such a function itself."""
    if callable(optimizer):
        return optimizer
    row = small_leaves.record(optimizer)
    return functools.partial(row.make, LEARNING_RATE, **OPTIONS.get(optimizer, {}))


def make(optimizer, shapes, stored=None, how=None, **options):
    """A case of launch_cases; slots without a codec hold what the default's codes stand for.

    Args:
      optimizer: as of `builder`.
      shapes: of the leaves.
      stored: slot -> codec or None, where it is not the default.
      how: the other fields of Storage.
      **options: those of `launch_cases.make`.
    """
    build, stored, how = builder(optimizer), stored or {}, how or {}
    coded = {name: codec for name, codec in stored.items() if codec is not None}
    case = launch_cases.make(build(storage=storage(**coded, **how)), list(shapes), **options)
    engine = build(storage=storage(**stored, **how)).engine
    tree = {
        f"leaf{i:02}": jax.ShapeDtypeStruct(plan.shape, plan.dtype)
        for i, plan in enumerate(case.plans)
    }
    wanted = engine.plans(tree)
    for i, (plan, leaf) in enumerate(zip(case.plans, case.leaves, strict=True)):
        new, plain = wanted[i], [slot.codec is None for slot in wanted[i].slots]
        stored = launch_cases.stored_slots(plan.slots, leaf)
        kept = [
            (codecs.decode_array(slot.codec, *arrays, plan.group_size, plan.shape[-1]), None)
            if drop and slot.codec
            else arrays
            for slot, arrays, drop in zip(plan.slots, stored, plain, strict=True)
        ]
        case.plans[i] = dataclasses.replace(new, returns_params=plan.returns_params)
        scales = tuple(scale for _, scale in kept if scale is not None)
        slots = tuple(codes for codes, _ in kept)
        case.leaves[i] = leaf._replace(slots=slots, scales=scales)
    return case


def of(kernels, every, default=(), named=None):
    """Rows of a test for each of some kernels: those of `default` in the default tier."""
    found = []
    for kernel, row in itertools.product(kernels, every):
        values = (kernel, *(row if isinstance(row, tuple) else (row,)))
        marks = [pytest.mark.gpu] if kernel in GPU_KERNELS else [pytest.mark.full]
        marks = [] if row in default and kernel not in GPU_KERNELS else marks
        found.append(pytest.param(*values, marks=marks, id=named and named(*values)))
    return found


def lies_on_tpus(shape):
    return shape[-1] % 128 == 0


# ---- each kernel, as it runs here ----------------------------------------------------------------
def launch_on_tpu(rule, plans, leaves, names, scalars, keys, numbers, tile, interpret=True):
    """As `launch_cases.launch` takes it: a launch for each leaf, as plain JAX."""
    row_keys, lane_keys = random.row_and_lane_keys(keys[numbers], rank=1)
    seeds = pallas_tpu.register_seeds(lane_keys, plans[0].group_size)
    own = [scalars[i % len(scalars)] for i in range(len(plans))]
    return [
        pallas_tpu.launch(rule, plan, leaf, names, h, key, lanes, tile.elements, interpret)
        for plan, leaf, h, key, lanes in zip(plans, leaves, own, row_keys, seeds, strict=True)
    ]


@pytest.fixture
def launcher(kernel, monkeypatch):
    """The launch of the kernel of a test, as `launch_cases.launch` takes it."""
    if kernel == "triton":
        triton_on_numpy.install(monkeypatch)
    return {
        "pallas": functools.partial(gpu_step.launch, backend="interpret"),
        "triton": by_triton,
        "pallas_tpu": launch_on_tpu,
        "pallas on a GPU": gpu_step.launch,
        "triton on a GPU": functools.partial(gpu_step.launch, backend="triton"),
    }[kernel]


@pytest.fixture
def interpreted(on_a_gpu, monkeypatch):
    """A step's kernel runs as plain JAX; the launches and how many leaves each has are listed."""
    launches = []
    compiled = gpu_step.launch

    def launch(*args, backend):
        launches.append(len(args[1]))
        return compiled(*args, backend="interpret")

    monkeypatch.setattr(gpu_step, "launch", launch)
    return launches


def unsupported(kernel, rule, plan):
    """Return the reason why a kernel does not take a leaf, or None."""
    if kernel == "pallas_tpu":
        return pallas_tpu.unsupported(rule, plan)
    return gpu_step.triton_unsupported(rule, plan) if "triton" in kernel else None


def check(kernel, case, launcher, tile=None):
    """Against the reference: codes and scales at most one apart, where each weight lands.

    Kernel and reference are two programs, and one contracts multiply-adds that the other does not.
    """
    for plan in case.plans:
        assert unsupported(kernel, case.rule, plan) is None
    tile = tile or TILES.get(kernel, Tile())
    found = launch_cases.launch(case, launcher, tile)
    launch_cases.compare(case, found, approximate=kernel in GPU_KERNELS)


def both(case, tuned=SMALL, options=SAME_BITS):
    """The leaves after a step of the reference and of Pallas' kernel, in one compiled call."""

    def run(leaves, h, keys):
        plans, numbers = tuple(case.plans), tuple(case.numbers)
        own = [reference.prepare(case.rule, *row, h) for row in zip(plans, leaves, strict=True)]
        batch = LeafBatch.of(
            plans, leaves, h, keys, own=own, numbers=numbers, implementation="pallas"
        )
        found = backend.fused_updates(case.rule, batch, tuned)
        wanted = []
        for i, (plan, leaf, number) in enumerate(zip(plans, leaves, numbers, strict=True)):
            arrays = leaf, batch.h(i), keys[number]
            wanted.append(reference.fused_update(case.rule, plan, *arrays))
        return wanted, found

    arrays = case.leaves, case.h, case.keys
    return jax.jit(run, compiler_options=options)(*arrays)


def close(case, wanted, found, step=LEARNING_RATE * tolerances.REORDERED_STEP):
    for plan, leaf, one, other in zip(case.plans, case.leaves, wanted, found, strict=True):
        compare(plan, leaf.p, one, other, step if leaf.p is not None else step / LEARNING_RATE)


def check_bits(case, **how):
    """Every bit of codes, scales, corrections and 16-bit weights: the expression is one.

    Without LLVM's passes few multiply-adds are fused, and those show in f32 updates and moments
    alone, in the 16 bits of correction made of such a moment, and in what goes through a logarithm.
    Where a leaf is measured first, its mean is summed in the order of its fusion.
    """
    wanted, found = both(case, **how)
    plan = case.plans[0]
    in_f32 = any(slot.codec is None for slot in plan.slots)
    through_logarithms = any(slot.codec and "expanded" in slot.codec.name for slot in plan.slots)
    wide = plan.split is not None and plan.split.bits == 32
    if case.rule.prepares == "leaf" or through_logarithms or (in_f32 and wide):
        return close(case, wanted, found)
    for plan, one, other in zip(case.plans, wanted, found, strict=True):
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            if a.dtype == F32 and a.shape == plan.shape:
                size = np.abs(a).max(initial=0) * tolerances.REORDERED_SLOT
                np.testing.assert_allclose(a, b, rtol=0, atol=size, err_msg=f"{plan.shape}")
            else:
                np.testing.assert_array_equal(a, b, err_msg=f"{plan.shape}")
    old, new = (
        jax.tree.leaves(x) for x in ([x.state for x in case.leaves], [x.state for x in found])
    )
    assert any((a != b).any() for a, b in zip(old, new, strict=True))


# ---- numerics ------------------------------------------------------------------------------------
def stored_for(kernel, name):
    """The codecs of STORED; on a TPU others in place of those with scales in fp16."""
    return {
        slot: codecs.linear(codec.signed)
        if kernel == "pallas_tpu" and codec is not None and not codec.guarded
        else codec
        for slot, codec in STORED[name].items()
    }


def grid(kernel):
    """Cases of a kernel: each value of each factor; of Pallas', in the full tier, every pair, and
    every codec and weight with one rule.
    """
    tpu, on_gpu = kernel == "pallas_tpu", kernel in GPU_KERNELS
    factors = [
        # rows and columns of small leaves are not factored, which a TPU leaves to XLA
        [n for n in launch_cases.ALIKE if not (tpu and n == "flash_factored_adamw")],
        list(STORED),
        [row for row in WEIGHTS if not (tpu and row[1] == F16)],
        (True, False),
        ROUNDINGS,
        (8, 32, 64, 128) if tpu else (32, 64, 48),
        (BF16, F32, F16),
        ON_TPU if tpu else [ON_GPU] if on_gpu else SHAPES,
    ]
    every = pairwise(factors)
    default = covering(every)
    if kernel == "pallas":  # the other half by Triton, in less time
        default = default[::2]
        every += [
            (*row, *(values[i % len(values)] for values in factors[3:]))
            for i, row in enumerate(itertools.product(["flash_adamw"], *factors[1:3]))
        ]
    elif not on_gpu:
        every, default = default, default[:3] + (default[3::2] if kernel == "triton" else [])
    return of([kernel], dict.fromkeys(every), default, named)


def named(kernel, optimizer, stored, weights, *rest):
    return f"{kernel}-{optimizer}-{stored}-{weights[0]}-{jnp.dtype(weights[1])}"


@pytest.mark.filterwarnings("ignore:second moments that many elements share")
@pytest.mark.parametrize(
    "kernel, optimizer, stored, weights, direct, rounding, group_size, gradient, shapes",
    [row for kernel in (*KERNELS, *GPU_KERNELS) for row in grid(kernel)],
)
def test_is_the_reference(
    kernel, optimizer, stored, weights, direct, rounding, group_size, gradient, shapes,
    launcher, request,
):  # fmt: skip
    bits, dtype = weights
    how = dict(master_weight_bits=bits, rounding=rounding, group_size=group_size)
    options = dict(dtype=dtype, direct=direct, gradient_dtype=gradient)
    case = make(optimizer, shapes, stored_for(kernel, stored), how, **options)
    if kernel != "pallas":
        return check(kernel, case, launcher)
    launches = request.getfixturevalue("interpreted")
    check_bits(case)
    assert launches == [len(shapes)]


ROUNDED = {"master_weight_bits": None, "master_rounding": "stochastic"}
FED = {**ROUNDED, "error_feedback": True}
F16_UPDATES = {"master_weight_bits": None, "update_dtype": "param"}
VARIANTS = {
    "a direction": (lowmem.scale_by_flash_adam, {}, {}),
    "nesterov": (functools.partial(lowmem.flash_adam, LEARNING_RATE, nesterov=True), {}, {}),
    "eps in the root": (functools.partial(lowmem.flash_adam, LEARNING_RATE, eps_root=1e-8), {}, {}),
    "no decay here": (functools.partial(lowmem.flash_adamw, LEARNING_RATE, mask=False), {}, {}),
    "sgd nesterov": (functools.partial(lowmem.flash_sgd, LEARNING_RATE, 0.9, True), {}, {}),
    "clipped": ("flash_adamw", {}, {"more": {"gradient_scale": 0.25}}),
    "accumulated": ("flash_sgd", {}, {"more": {"share": 0.25, "momentum": 1.0}}),
    "bf16 updates": ("flash_lion", {"update_dtype": "param"}, {}),
    "f16 updates": ("flash_adamw", F16_UPDATES, {"dtype": F16}),
    "ulp split": ("flash_adamw", {"split": "ulp"}, {}),
    "rounded weights": ("flash_adamw", ROUNDED, {}),
    "error feedback": ("flash_adamw", FED, {}),
    "error feedback, momentum": ("flash_sgd", FED, {}),
    "int8 weights": ("flash_adamw", {**FED, "weights": "int8"}, {}),
    "FP8 weights": ("flash_sgd", {**ROUNDED, "weights": "e4m3"}, {}),
    "error feedback, factored": (
        functools.partial(lowmem.flash_factored_adamw, LEARNING_RATE, min_dim_size_to_factor=32),
        {**FED, "nu": None},
        {},
    ),
}
NOT_ON_TPUS = {"f16 updates", "error feedback, factored", "int8 weights", "FP8 weights"}


@pytest.mark.parametrize(
    "kernel, name",
    of(["pallas"], VARIANTS, ["ulp split"])
    + of(["triton"], VARIANTS, ["clipped", "int8 weights"])
    + of(["pallas_tpu"], [name for name in VARIANTS if name not in NOT_ON_TPUS])
    + of(GPU_KERNELS, VARIANTS),
)
def test_variants(kernel, name, launcher, request):
    optimizer, how, options = VARIANTS[name]
    shapes = {"pallas_tpu": [(3, 8, 256)]}.get(kernel, SHAPES[0])
    case = make(optimizer, shapes, how=how, direct=False, **options)
    if kernel != "pallas":
        return check(kernel, case, launcher)
    request.getfixturevalue("interpreted")
    check_bits(case)


FOUR_BITS = STORED["4 bits"]
CODES = {"8 bits": {}, "4 bits": FOUR_BITS, "4-bit nu": {"nu": FOUR_BITS["nu"]}}
# rows of groups and of part of one, and of bytes that hold two codes, half of one at their ends
ENDS = [(130,), (3, 5), (9, 300), (256, 2), (64, 1), (33, 64), (4, 3)]
SIZES = {
    "pallas": [(4, "8 bits"), (2, "4 bits")],
    "triton": [(size, "8 bits") for size in (1, 4, 8, 64, 256)]
    + list(itertools.product((2, 4, 32), ("4 bits", "4-bit nu"))),
    "pallas_tpu": [(size, "8 bits") for size in (8, 64, 128, 256, 1024)],
    # not 1: a value that is its group's scale is rounded up by its last bit, which FMA changes
    **dict.fromkeys(
        GPU_KERNELS,
        [(size, "8 bits") for size in (2, 4, 8, 16, 48, 64, 128, 256)]
        + [(size, "4 bits") for size in (2, 32, 48, 256)],
    ),
}


@pytest.mark.parametrize(
    "kernel, size, stored", [row for kernel, sizes in SIZES.items() for row in of([kernel], sizes)]
)
def test_group_sizes(kernel, size, stored, launcher):
    shapes = {"pallas_tpu": [(40, 3072)], "pallas": ENDS, "triton": ENDS}.get(kernel, ON_GPU)
    check(kernel, make("flash_adamw", shapes, CODES[stored], {"group_size": size}), launcher)


BLOCKS = {
    "all": ((40, 256), Block((0, 1))),
    "rows": ((40, 256), Block((1,))),
    "columns": ((40, 256), Block((0,))),
    "columns of each matrix": ((2, 128, 256), Block((1,))),
    "rows of each matrix": ((2, 128, 256), Block((2,))),
    "heads of rows": ((40, 256), Block((1,), heads=(0, 4))),
    "heads of columns": ((40, 256), Block((0,), heads=(1, 4))),
    "all, of groups and less": ((7, 33), Block((0, 1))),
    "columns of groups and less": ((3, 5, 40), Block((1,))),
    "heads within a group": ((33, 66), Block((0,), heads=(1, 6))),
}
MATRICES = {
    "one": (40, 256),
    "two": (2, 128, 256),
    "two of two": (2, 2, 128, 256),
    "heads between both axes": (72, 24, 128),
    "of groups and less": (5, 40, 70),
}
ADAM_MINI = [("blocks", name) for name in BLOCKS]
FACTORED = [("rows and columns", name) for name in MATRICES]


@pytest.mark.parametrize(
    "kernel, of_what, name",
    of(["pallas", *GPU_KERNELS], ADAM_MINI + FACTORED)
    + of(["triton"], ADAM_MINI + FACTORED, [ADAM_MINI[-1], FACTORED[-1]])
    + of(["pallas_tpu"],
         [row for row in ADAM_MINI if lies_on_tpus(BLOCKS[row[1]][0])]
         + [row for row in FACTORED if lies_on_tpus(MATRICES[row[1]])],
         [FACTORED[3]]),
)  # fmt: skip
def test_second_moments_of_blocks_and_of_rows_and_columns(kernel, of_what, name, launcher):
    if of_what == "blocks":
        shape, block = BLOCKS[name]
        structure = lowmem.blocks.Structure(rules=[("leaf*", block)])
        tx = functools.partial(lowmem.flash_adam_mini, 1e-3, blocks=structure)
    else:
        shape = MATRICES[name]
        tx = functools.partial(lowmem.flash_factored_adamw, 1e-3, min_dim_size_to_factor=32)
    case = make(tx, [shape] * (1 if kernel == "pallas_tpu" else 2))
    if of_what == "blocks":
        assert case.plans[0].block == block
    else:
        assert len(case.plans[0].block.parts) == 2
    check(kernel, case, launcher)


LANDING = list(itertools.product(("float32", "param"), (24, 32), ROUNDINGS, (True, False)))


@pytest.mark.parametrize(
    "kernel, update_dtype, bits, rounding, direct",
    of([*KERNELS, *GPU_KERNELS], LANDING, LANDING[:1]),
)
def test_weights_land_bit_for_bit(kernel, update_dtype, bits, rounding, direct, launcher):
    how = dict(master_weight_bits=bits, master_rounding=rounding, update_dtype=update_dtype)
    launch_cases.check_landing(launcher, storage(**how), direct, TILES.get(kernel, Tile()))


@pytest.mark.parametrize(
    "kernel, optimizer",
    of(["pallas"], ["adamw", "lion", "sgd"])
    + of(["triton", "pallas_tpu", *GPU_KERNELS], ["adamw", "lion", "sgd"], ["adamw"]),
)
def test_what_is_not_finite(kernel, optimizer, launcher):
    width = 128 if kernel == "pallas_tpu" else 32
    tile = TILES.get(kernel, Tile())
    launch_cases.check_not_finite(launcher, optimizer, tile, width=width)


ALONE = [pytest.param(kernel, marks=pytest.mark.gpu) for kernel in GPU_KERNELS]
IN_FULL = pytest.param("triton", marks=pytest.mark.full)


@pytest.mark.parametrize("kernel", [IN_FULL, *ALONE])
def test_many_leaves(kernel, launcher, monkeypatch):
    """More than a launch of generated Triton takes, of two kinds that take turns."""
    monkeypatch.setattr(gpu_step, "_MAX_POINTERS", 40)
    shapes = [(2 + i, 32 if i % 3 else 33) for i in range(7 if kernel == "triton" else 70)]
    case = make(lowmem.scale_by_flash_adam, shapes, dtype=F32, direct=False)
    check(kernel, case, launcher, Tile(128, 4))


@pytest.mark.parametrize("kernel", ALONE)
@pytest.mark.parametrize("tile", [Tile(1024, 4), Tile(2048, 4), Tile(512, 2), Tile(4096, 8)])
@pytest.mark.parametrize("how", [{}, {"rounding": "nearest"}, {"update_dtype": "param"}])
def test_tiles_and_options(kernel, how, tile, launcher):
    for direct in (True, False):
        check(kernel, make("flash_adamw", ON_GPU, how=how, direct=direct), launcher, tile)


@pytest.mark.parametrize("kernel", ALONE)
def test_vmap_and_shard_map(kernel, launcher):
    case = make("flash_adamw", [(33, 64)])

    def run(g):
        one = dataclasses.replace(case, leaves=[case.leaves[0]._replace(g=g)])
        return launch_cases.launch(one, launcher, Tile())

    gradients = jnp.stack([case.leaves[0].g, -2 * case.leaves[0].g])
    mapped = jax.vmap(run)(gradients)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    sharded = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)(gradients[0])
    jax.tree.map(np.testing.assert_array_equal, sharded, run(gradients[0]))
    for i in range(2):
        one = jax.tree.map(lambda x, i=i: x[i], mapped)
        jax.tree.map(np.testing.assert_array_equal, one, run(gradients[i]))


@pytest.mark.parametrize("direct", [True, pytest.param(False, marks=pytest.mark.full)])
def test_the_convention_of_jax_triton_04(monkeypatch, direct):
    """Also with a result that takes nothing's place."""
    triton_on_numpy.install(monkeypatch, triton_on_numpy.triton_call_04)
    check("triton", make("flash_adamw", SHAPES[0], direct=direct), by_triton)


@pytest.mark.full
@pytest.mark.parametrize(
    "optimizer, shape", [("flash_adamw", (64, 4096)), ("flash_lion", (256, 256))]
)
def test_as_pallas_interprets_tpus(optimizer, shape):
    """Memory, semaphores and buffers as on a TPU; of whole blocks (jax 0.12 fails at others)."""
    launch = functools.partial(launch_on_tpu, interpret=pltpu.InterpretParams())
    check("pallas_tpu", make(optimizer, [shape]), launch)


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["pallas", "triton"])
def test_outputs_of_muon_that_are_normalized(kernel, interpreted, monkeypatch):
    """A learning rate per leaf and a factor per column in one launch."""
    if kernel == "triton":
        triton_on_numpy.install(monkeypatch)
        monkeypatch.setattr(gpu_step, "launch", lambda *args, backend: by_triton(*args))
    how = launch_cases.storage(rounding="nearest")
    tx = lowmem.flash_muon(1e-2, normuon_b2=0.9, ns_dtype="float32", storage=how)
    rng = np.random.default_rng(0)
    grads, masters = ({"w": jnp.asarray(rng.normal(size=(32, 96)), F32)} for _ in range(2))
    params, state = lowmem.init(tx, masters, BF16)
    wanted, found = (
        jax.jit(functools.partial(lowmem.step, tx, implementation=name))(grads, state, params)
        for name in ("xla", "pallas")
    )
    one, other, before = (
        np.asarray(lowmem.master_params(*of)["w"]) for of in (wanted, found, (params, state))
    )
    assert np.linalg.norm(other - one) <= tolerances.MUON_ROUNDED * np.linalg.norm(one - before)
    np.testing.assert_allclose(found[1].nu["w"], wanted[1].nu["w"], tolerances.MUON_EXACT)


OTHERWISE = [("flash_sgd", 32), ("flash_adamw", 24), ("flash_lion", None)]


@pytest.mark.parametrize("optimizer, bits", rows(OTHERWISE, OTHERWISE[-1:]))
def test_as_it_is_compiled_otherwise(interpreted, optimizer, bits):
    """LLVM fuses multiply-adds where it sees them, and sees others in a kernel's loop."""
    case = make(optimizer, [*SHAPES[0], *SHAPES[1]], how={"master_weight_bits": bits})
    wanted, found = both(case, options=FULL_COMPILE)
    close(case, wanted, found)
    for plan, one, other in zip(case.plans, wanted, found, strict=True):
        for slot, codes, codes2 in zip(plan.slots, one.slots, other.slots, strict=True):
            off = np.abs(np.asarray(codes, np.int32) - np.asarray(codes2, np.int32))
            assert off.max() <= 1, slot.name


def test_an_odd_vocabulary(interpreted):
    """50257 = 29 * 1733: a row starts anywhere in memory, and every row ends in part of a group."""
    check_bits(make("flash_adamw", [(2, 50257)]), tuned=tuning.Tuning())


@pytest.mark.full
def test_one_cut_is_as_good_as_another(interpreted):
    case = make("flash_adamw", [(7, 33), (3, 5, 64), (96,)])
    for tuned in (
        tuning.Tuning(Tile(elements=64, warps=1), leaves=2),
        tuning.Tuning(Tile(elements=4096, warps=8), elements=1100),
    ):
        check_bits(case, tuned=tuned)
    assert interpreted == [2, 1, 1, 2]


def launched(case, tile):
    """Trace Pallas' kernel anew, with a test's changes, and run it on a case in interpret mode."""
    anew = functools.partial(LAUNCH, backend="interpret")
    run = functools.partial(launch_cases.launch, case, anew, tile)
    return jax.jit(run, compiler_options=SAME_BITS)()


@pytest.mark.parametrize("optimizer", rows(launch_cases.ALIKE, ["flash_adamw", "coat_adamw"]))
def test_with_the_arithmetic_of_a_kernel(optimizer):
    """Its quotients, uniforms and shortcuts, here on a CPU: codes within one, steps within 2^-17.

    (Not for NaN: a CPU's have other bits than a GPU's.)
    """
    vectors = SHAPES[1] if optimizer != "flash_factored_adamw" else ()  # in a launch of their own
    case = make(optimizer, [*SHAPES[0], *vectors])
    with numerics.kernel_arithmetic():
        found = launched(case, SMALL.tile)
    close(case, launch_cases.expected(case), found, LEARNING_RATE * tolerances.GPU_STEP)


@pytest.mark.parametrize(
    "optimizer, direct",
    rows(
        itertools.product([None, *lowmem.OPTIMIZERS], [True, False]),
        [(name, i % 2 == 0) for i, name in enumerate([None, *RULES])],
    ),
)
def test_what_is_not_finite_shows(interpreted, optimizer, direct):
    """NaN and infinite gradients: NaN in the moments of their group and in their weights alone.

    (In all weights where the step depends on the whole leaf or matrix.)
    """
    build = builder(optimizer or functools.partial(lowmem.flash_sgd, LEARNING_RATE))
    tx, params = build(storage=storage()), {"w": jnp.ones((4, 80), BF16)}
    g = jnp.ones((4, 80)).at[0, 3].set(jnp.nan).at[2, 79].set(jnp.inf).at[1, 40].set(-jnp.inf)
    run = lowmem.step if direct else lambda tx, g, s, p: stepped(tx, g, s, p)
    step = jax.jit(functools.partial(run, tx), compiler_options=SAME_BITS)
    params, state = step({"w": g}, tx.init(params), params)
    assert interpreted
    bad, infinite = np.isnan(np.asarray(g)), np.isinf(np.asarray(g))
    master = np.asarray(lowmem.master_params(params, state)["w"])
    # Lion takes the sign of an infinity, which moves a weight as any other does
    everywhere = np.ones_like(bad)
    blockwise = [slot.name for slot in tx.engine.rule.slots if slot.blockwise]
    shows = {"flash_lion": bad, "stable_adamw": everywhere}.get(optimizer, bad | infinite)
    shows = everywhere if blockwise or tx.engine.rule.prepares == "matrices" else shows
    np.testing.assert_array_equal(~np.isfinite(master), shows)
    for slot in ("mu", "nu"):
        if hasattr(state, slot) and getattr(state, slot)["w"].ndim:
            row = [scale["w"] for name, scale in state._asdict().items() if name == f"{slot}_scale"]
            codec = getattr(storage(), slot)
            gone = np.isnan(np.asarray(codec.scale.decode(row[0])))
            wanted = np.zeros_like(gone)
            where = ... if slot in blockwise else ([0, 1, 2], [0, 1, 2])
            wanted[where] = True
            np.testing.assert_array_equal(gone, wanted, err_msg=slot)


def stepped(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return jax.tree.map(lambda p, u: (p.astype(F32) + u).astype(p.dtype), params, updates), state


# ---- nothing beyond an array ---------------------------------------------------------------------
TILINGS = [
    Tiling((7, 33), 32, 64), Tiling((3, 5, 64), 32, 512), Tiling((96,), 32, 64),
    Tiling((20, 3), 32, 16), Tiling((2, 3, 50), 24, 256), Tiling((4, 1), 32, 2),
    Tiling((5, 300), 256, 64), Tiling((1, 50257), 32, 1024),
]  # fmt: skip


@pytest.mark.parametrize("tiling", rows(TILINGS, TILINGS[::2]), ids=str)
def test_every_element_belongs_to_one_tile(tiling):
    shape, found, scales = tiling.element_view(jnp.zeros(tiling.shape)).shape, [], []
    for i in range(tiling.tiles):
        place = gpu_kernel.Place.of(tiling, jnp.int32(i))
        index, mask = place.elements
        index = [run.indices() for run in index]
        index = np.meshgrid(*index, indexing="ij") if tiling.flat else index
        mask = np.ones(tiling.tile_shape, bool) if mask is None else np.asarray(mask)
        inside = [np.asarray(part)[mask] for part in index]
        assert all((part < size).all() for part, size in zip(inside, shape, strict=True))
        found.append(np.ravel_multi_index(inside, shape))
        at, kept = Range(place.first, tiling.rows), place.row_mask
        numbers = np.asarray(at.indices())
        scales.append(numbers if kept is None else numbers[np.asarray(kept)])
    np.testing.assert_array_equal(np.sort(np.concatenate(found)), range(math.prod(tiling.shape)))
    np.testing.assert_array_equal(np.concatenate(scales), range(tiling.groups))


def padded(x, value):
    """An array with more on every side on which a tile could leave it."""
    return jnp.pad(x, [(0, 70), (0, 70)][: x.ndim], constant_values=value)


@pytest.mark.parametrize(
    "shape, size, stored",
    [
        ((3, 5, 64), 32, "default"),
        pytest.param((2, 3, 50), 24, "default", marks=pytest.mark.full),
        pytest.param((2, 3, 51), 24, "4 bits", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_nothing_beyond_an_array_is_written(shape, size, stored, monkeypatch):
    """A kernel neither changes nor uses the values beside a leaf's elements and scales."""
    how, tile = {"group_size": size}, Tile(256, 4)
    case = make("flash_adamw", [shape], STORED[stored], how)
    (wanted,) = launched(case, tile)
    sentinel = 77  # of every dtype
    plain = gpu_step.views

    def views(*args):
        return jax.tree.map(lambda x: padded(x, sentinel), plain(*args))

    monkeypatch.setattr(gpu_step, "views", views)
    monkeypatch.setattr(gpu_step, "restored", lambda plan, leaf, result: result)
    (found,) = launched(case, tile)
    tiling = Tiling(shape, size, tile.elements)
    inside = views(case.plans[0], tiling, wanted._replace(g=wanted.p, p=None))
    for one, other in zip(jax.tree.leaves(inside), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(other, one)


# ---- leaves that it takes ------------------------------------------------------------------------
def reason(kernel, build, shape=(64, 512), dtype=BF16, **how):
    tx = build(1e-3, storage=storage(**how))
    (plan,) = tx.engine.plans({"w": jax.ShapeDtypeStruct(shape, dtype)})
    return unsupported(kernel, tx.engine.rule.for_leaf(plan.matrices), plan)


def with_a_step_of(function):
    """An optimizer whose direction goes through a function."""

    @dataclasses.dataclass(frozen=True)
    class Rule(AdamRule):
        def update(self, g, slots, h):
            direction, slots = super().update(g, slots, h)
            return function(direction), slots

    def build(learning_rate, **how):
        engine = lowmem.flash_adamw(learning_rate, **how).engine
        return dataclasses.replace(engine, rule=Rule()).transformation()

    return build


ADAMW, LION, FACTORED_ADAMW = lowmem.flash_adamw, lowmem.flash_lion, lowmem.flash_factored_adamw
NOT_KNOWN = with_a_step_of(jnp.arctan)


@pytest.mark.parametrize(
    "kernel, build, options, words",
    [
        ("triton", LION, dict(shape=(2, 1 << 17), group_size=1 << 17), "groups of 131072"),
        ("triton", NOT_KNOWN, {}, "`atan`, which the Triton generator does not support"),
        ("pallas_tpu", with_a_step_of(jnp.cbrt), {}, "`cbrt`"),
        ("pallas_tpu", ADAMW, dict(shape=(4096,)), "vectors"),
        ("pallas_tpu", ADAMW, dict(shape=(64, 100)), "100, is not a multiple of 128"),
        ("pallas_tpu", ADAMW, dict(shape=(3, 5, 512)), "5, is not a multiple of 8"),
        ("pallas_tpu", ADAMW, dict(group_size=48), "groups of 48"),
        ("pallas_tpu", ADAMW, dict(group_size=2048), "groups of 2048"),
        ("pallas_tpu", ADAMW, dict(shape=(64, 384), group_size=256), "groups of 256 do not divide"),
        ("pallas_tpu", ADAMW, dict(dtype=F16), "float16"),
        ("pallas_tpu", ADAMW, dict(mu=codecs.softsign_paper()), "float16"),
        ("pallas_tpu", ADAMW, dict(shape=(64, 384), nu=FOUR_BITS["nu"]), "multiple of 256"),
        ("pallas_tpu", ADAMW, dict(mu=codecs.expanded_dynamic()), "`expm1`"),
        ("pallas_tpu", FACTORED_ADAMW, dict(shape=(64, 256), nu=None), "plain elementwise"),
        # whose first two axes are larger
        ("pallas_tpu", FACTORED_ADAMW, dict(shape=(512, 384, 256), nu=None), "along both of its"),
    ],
)
def test_what_stays_with_xla(kernel, build, options, words):
    assert words in reason(kernel, build, **options)


@pytest.mark.parametrize(
    "kernel, build, options",
    [
        ("pallas_tpu", ADAMW, {}),
        ("pallas_tpu", ADAMW, dict(shape=(3, 64, 512))),
        *(
            ("pallas_tpu", FACTORED_ADAMW, dict(shape=shape, nu=None))
            for shape in ((128, 256), (256, 8, 256), (4096, 32, 128))
        ),
        *(
            ("triton", ADAMW, options)
            for options in (
                {"nu": None}, STORED["expanded"], FOUR_BITS, {"group_size": 48},
                {"group_size": 512}, {"mu": codecs.linear(), "nu": codecs.expanded_e4m3(False)},
            )
        ),
    ],
)  # fmt: skip
def test_what_it_takes(kernel, build, options):
    assert reason(kernel, build, **options) is None


@pytest.mark.parametrize("kernel", ["triton", "pallas_tpu"])
def test_it_takes_every_optimizer_and_weight(kernel):
    for record in map(small_leaves.record, lowmem.OPTIMIZERS):
        own = record.make(1e-3).engine.storage
        for split, bits in itertools.product(("bits", "ulp"), (24, 32)):
            how = dict(mu=own.mu, nu=own.nu, split=split, master_weight_bits=bits)
            assert reason(kernel, record.make, **how) is None
    for bits, dtype in WEIGHTS:
        for options in ({}, {"rounding": "nearest"}, {"group_size": 256}):
            found = reason(kernel, ADAMW, dtype=dtype, master_weight_bits=bits, **options)
            assert found is None or (kernel == "pallas_tpu" and dtype == F16)
