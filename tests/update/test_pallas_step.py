"""The fused step in Pallas: the reference bit for bit when interpreted; lowered without a GPU."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lowmem as lowmem
from optax_lowmem import codecs
from optax_lowmem._src.core import numerics, tiles
from optax_lowmem._src.core.groups import Tile, Tiling
from optax_lowmem._src.core.rules import OF_BLOCK
from optax_lowmem._src.update import dispatch, operands, pallas_triton, reference, tuning
from tests import launch_cases, tolerances
from tests.compilation import FULL_COMPILE, SAME_BITS
from tests.contract_cases import RULES, covering, pairwise
from tests.launch_cases import storage
from tests.lowering import kernels_in, lower_for_cuda
from tests.tiers import in_turn, rows
from tests.update.test_fused_update import compare

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
GROUP_SIZES = (32, 64, 48)
# rank 1 to 3; whole groups, tails, rows of part of a group; the first two share a launch
SHAPES = [((7, 33), (3, 5, 64)), ((96,),), ((20, 3),)]
SMALL = tuning.Tuning(
    Tile(elements=512, warps=4)
)  # most leaves are several tiles, the last partial


def grid(*more, whole=True):
    """Cases of a test: in the default tier each value of each factor, in the full one every pair,
    and every codec and weight with one rule (with or without an update to add, in turn).

    Args:
      *more: further factors, which take turns beyond the pairwise cases.
      whole: whether the full tier has more than those.
    """
    factors = [[n for n in RULES if n in launch_cases.ALIKE], list(STORED), WEIGHTS, (True, False)]
    pairs = pairwise([*factors, *more])
    fast = covering(pairs)
    product = [
        (*row, *(values[i % len(values)] for values in [factors[3], *more]))
        for i, row in enumerate(itertools.product(["flash_adamw"], *factors[1:3]))
    ]
    every = dict.fromkeys([*pairs, *product] if whole else pairs)
    rest = [row for row in every if row not in fast]

    def name(optimizer, stored, weights, *rest):
        return "-".join(map(str, [optimizer, stored, weights[0], jnp.dtype(weights[1]), *rest]))

    return [pytest.param(*row, id=name(*row)) for row in fast] + [
        pytest.param(*row, id=name(*row), marks=pytest.mark.full) for row in rest
    ]


def builder(optimizer):
    """storage -> optimizer, of a name of the table, or such a function itself."""
    if callable(optimizer):
        return optimizer
    row = lowmem.OPTIMIZERS[optimizer]
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
        f"leaf{i}": jax.ShapeDtypeStruct(plan.shape, plan.dtype)
        for i, plan in enumerate(case.plans)
    }
    wanted = engine.plans(tree)
    for i, (plan, state) in enumerate(zip(case.plans, case.states, strict=True)):
        new, plain = wanted[i], [slot.codec is None for slot in wanted[i].slots]
        rows = zip(plan.slots, state.slots, state.scales, plain, strict=True)
        kept = [
            (
                codecs.decode_array(slot.codec, codes, scales, plan.group_size, plan.shape[-1]),
                jnp.zeros(()),
            )
            if drop
            else (codes, scales)
            for slot, codes, scales, drop in rows
        ]
        case.plans[i] = dataclasses.replace(new, direct=plan.direct)
        case.states[i] = state._replace(
            slots=tuple(row[0] for row in kept), scales=tuple(row[1] for row in kept)
        )
        leaf = case.leaves[i]
        arrays = leaf.g, leaf.p, case.states[i], leaf.of_block
        case.leaves[i] = operands.leaf_of(case.plans[i], *arrays)
    return case


@pytest.fixture
def interpreted(on_a_gpu, monkeypatch):
    """The kernel runs as plain JAX; the launches and how many leaves each has are listed."""
    launches = []
    compiled = pallas_triton.launch

    def launch(*args):
        launches.append(len(args[1]))
        return compiled(*args, interpret=True)

    monkeypatch.setattr(pallas_triton, "launch", launch)
    return launches


def both(case, tuned=SMALL, options=SAME_BITS, implementation="pallas"):
    """[(update, state)] of the reference and of the kernel, in one compiled call."""

    def run(leaves, states, h, keys):
        gradients, weights = ([leaf[i] for leaf in leaves] for i in (0, 1))
        hs = []
        for plan, leaf, state in zip(case.plans, leaves, states, strict=True):
            own = reference.prepare(case.rule, plan, leaf.g, leaf.p, state, h)
            hs.append(own if leaf.of_block is None else own | {OF_BLOCK: leaf.of_block})
        found = dispatch.fused_updates(
            case.rule, case.plans, gradients, weights, states, hs,
            keys[jnp.asarray(case.numbers)], implementation, tuned,
        )  # fmt: skip
        wanted = []
        for plan, leaf, state, number, own in zip(
            case.plans, leaves, states, case.numbers, hs, strict=True
        ):
            arrays = leaf.g, leaf.p, state, own, keys[number]
            wanted.append(reference.fused_update(case.rule, plan, *arrays))
        return wanted, found

    arrays = case.leaves, case.states, case.h, case.keys
    return jax.jit(run, compiler_options=options)(*arrays)


def close(case, wanted, found, step=LEARNING_RATE * tolerances.REORDERED_STEP):
    for plan, leaf, one, other in zip(case.plans, case.leaves, wanted, found, strict=True):
        compare(plan, leaf.p, one, other, step if leaf.p is not None else step / LEARNING_RATE)


def check(case, **how):
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
    old, new = (jax.tree.leaves(x) for x in (case.states, [state for _, state in found]))
    assert any((a != b).any() for a, b in zip(old, new, strict=True))


# ---- numerics --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer, stored, weights, direct, rounding, group_size, shapes",
    grid(ROUNDINGS, GROUP_SIZES, SHAPES),
)
def test_is_the_reference(
    interpreted, optimizer, stored, weights, direct, rounding, group_size, shapes
):
    bits, dtype = weights
    how = dict(master_weight_bits=bits, rounding=rounding, group_size=group_size)
    gradient_dtype = (BF16, F32, F16)[group_size % 3]
    options = dict(dtype=dtype, direct=direct, gradient_dtype=gradient_dtype)
    check(make(optimizer, shapes, STORED[stored], how, **options))
    assert interpreted == [len(shapes)]


ROUNDED = {"master_weight_bits": None, "master_rounding": "stochastic"}
VARIANTS = {
    "a direction": (lowmem.scale_by_flash_adam, {}, {}),
    "nesterov": (functools.partial(lowmem.flash_adam, LEARNING_RATE, nesterov=True), {}, {}),
    "eps in the root": (functools.partial(lowmem.flash_adam, LEARNING_RATE, eps_root=1e-8), {}, {}),
    "no decay here": (functools.partial(lowmem.flash_adamw, LEARNING_RATE, mask=False), {}, {}),
    "sgd nesterov": (functools.partial(lowmem.flash_sgd, LEARNING_RATE, 0.9, True), {}, {}),
    "clipped": ("flash_adamw", {}, {"gradient_scale": 0.25}),
    "accumulated": ("flash_sgd", {}, {"share": 0.25, "momentum": 1.0}),
    "bf16 updates": ("flash_lion", {"update_dtype": "param"}, {}),
    "ulp split": ("flash_adamw", {"split": "ulp"}, {}),
    "rounded weights": ("flash_adamw", ROUNDED, {}),
}


@pytest.mark.parametrize("name", rows(VARIANTS, ["clipped", "ulp split", "rounded weights"]))
def test_variants(interpreted, name):
    optimizer, how, more = VARIANTS[name]
    check(make(optimizer, SHAPES[0], how=how, direct=False, more=more))


OTHERWISE = [("flash_sgd", 32), ("flash_adamw", 24), ("flash_lion", None)]


@pytest.mark.parametrize("optimizer, bits", rows(OTHERWISE, OTHERWISE[-1:]))
def test_as_it_is_compiled_otherwise(interpreted, optimizer, bits):
    """LLVM fuses multiply-adds where it sees them, and sees others in a kernel's loop."""
    case = make(optimizer, [*SHAPES[0], *SHAPES[1]], how={"master_weight_bits": bits})
    wanted, found = both(case, options=FULL_COMPILE)
    close(case, wanted, found)
    for plan, one, other in zip(case.plans, wanted, found, strict=True):
        for slot, codes, codes2 in zip(plan.slots, one[1].slots, other[1].slots, strict=True):
            off = np.abs(np.asarray(codes, np.int32) - np.asarray(codes2, np.int32))
            assert off.max() <= 1, slot.name


def test_an_odd_vocabulary(interpreted):
    """50257 = 29 * 1733: a row starts anywhere in memory, and every row ends in part of a group."""
    check(make("flash_adamw", [(2, 50257)]), tuned=tuning.Tuning())


@pytest.mark.full
def test_one_cut_is_as_good_as_another(interpreted):
    """Neither the tiles nor who shares a launch changes a bit."""
    case = make("flash_adamw", [(7, 33), (3, 5, 64), (96,)])
    for tuned in (
        tuning.Tuning(Tile(elements=64, warps=1), leaves=2),
        tuning.Tuning(Tile(elements=4096, warps=8), elements=1100),
    ):
        check(case, tuned=tuned)
    assert interpreted == [2, 1, 1, 2]


def launched(case, tile, **how):
    """Trace the kernel anew, with a test's changes, and run it on a case in interpret mode."""
    anew = functools.partial(pallas_triton.launch.__wrapped__, interpret=True, **how)
    names = tuple(sorted(case.h))
    scalars = case.scalars(names)
    numbers = jnp.asarray(case.numbers, jnp.int32)
    plans = tuple(plan.nameless for plan in case.plans)

    def run(leaves, scalars, keys):
        return anew(case.rule, plans, leaves, names, scalars, keys, numbers, tile)

    return jax.jit(run, compiler_options=SAME_BITS)(tuple(case.leaves), scalars, case.keys)


@pytest.mark.parametrize(
    "optimizer", rows(launch_cases.ALIKE, ["flash_adamw", "coat_adamw", "flash_adam_mini"])
)
def test_with_the_arithmetic_of_a_kernel(optimizer):
    """Its quotients, uniforms and shortcuts, here on a CPU: codes within one, steps within 2^-17.

    (Not for NaN: a CPU's have other bits than a GPU's.)
    """
    vectors = SHAPES[1] if optimizer != "flash_factored_adamw" else ()  # in a launch of their own
    case = make(optimizer, [*SHAPES[0], *vectors])
    with numerics.kernel_arithmetic():
        found = launched(case, SMALL.tile)
    results = [
        (result.update, operands.state_of(plan, state, result))
        for plan, state, result in zip(case.plans, case.states, found, strict=True)
    ]
    close(case, launch_cases.expected(case), results, LEARNING_RATE * tolerances.GPU_STEP)


@pytest.mark.parametrize("optimizer, direct", in_turn([None, *lowmem.OPTIMIZERS], [True, False]))
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
    shared = [slot.name for slot in tx.engine.rule.slots if slot.shared]
    shows = {"flash_lion": bad, "stable_adamw": everywhere}.get(optimizer, bad | infinite)
    shows = everywhere if shared or tx.engine.rule.prepares == "matrices" else shows
    np.testing.assert_array_equal(~np.isfinite(master), shows)
    for slot in ("mu", "nu"):
        if hasattr(state, slot) and getattr(state, slot)["w"].ndim:
            row = [scale["w"] for name, scale in state._asdict().items() if name == f"{slot}_scale"]
            codec = getattr(storage(), slot)
            gone = np.isnan(np.asarray(codec.scale.decode(row[0])))
            wanted = np.zeros_like(gone)
            where = ... if slot in shared else ([0, 1, 2], [0, 1, 2])
            wanted[where] = True
            np.testing.assert_array_equal(gone, wanted, err_msg=slot)


def stepped(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return jax.tree.map(lambda p, u: (p.astype(F32) + u).astype(p.dtype), params, updates), state


# ---- nothing beyond an array ---------------------------------------------------------------------

TILINGS = [
    Tiling((7, 33), 32, 64),
    Tiling((3, 5, 64), 32, 512),
    Tiling((96,), 32, 64),
    Tiling((20, 3), 32, 16),
    Tiling((2, 3, 50), 24, 256),
    Tiling((4, 1), 32, 2),
    Tiling((5, 300), 256, 64),
    Tiling((1, 50257), 32, 1024),
]


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_every_element_belongs_to_one_tile(tiling):
    """And no tile has another."""
    shape, found, scales = tiling.element_view(jnp.zeros(tiling.shape)).shape, [], []
    for i in range(tiling.tiles):
        tile = jnp.int32(i)
        index, mask = tiles._elements(tiling, tile)
        if tiling.flat:
            index = np.meshgrid(*(int(s.start) + np.arange(s.size) for s in index), indexing="ij")
        mask = np.ones(tiling.tile_shape, bool) if mask is None else np.asarray(mask)
        row, column = (np.asarray(part)[mask] for part in index)
        assert (column < shape[1]).all() and (row < shape[0]).all()
        found.append(row * shape[1] + column)
        at, kept = (
            tiles._scales(tiling, tile),
            tiles._row_mask(tiling, tile),
        )
        numbers = int(at.start) + np.arange(at.size)
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
    plain = pallas_triton.views

    def views(*args):
        return jax.tree.map(lambda x: padded(x, sentinel), plain(*args))

    monkeypatch.setattr(pallas_triton, "views", views)
    monkeypatch.setattr(pallas_triton, "restored", lambda plan, leaf, result: result)
    (found,) = launched(case, tile)
    tiling = Tiling(shape, size, tile.elements)
    update, *state = wanted
    inside = views(case.plans[0], tiling, operands.Leaf(update, None, *state))
    for one, other in zip(jax.tree.leaves(inside), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(other, one)


# ---- lowering --------------------------------------------------------------------------------


def lowered(tx, shapes, dtype, direct, gradient_dtype=BF16):
    """Lower a step, or an update, for CUDA and return its StableHLO."""
    params = {f"leaf{i}": jax.ShapeDtypeStruct(s, dtype) for i, s in enumerate(shapes)}
    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, gradient_dtype), params)
    run = functools.partial(lowmem.step, tx) if direct else functools.partial(tx.update)
    return lower_for_cuda(run, grads, jax.eval_shape(tx.init, params), params)


def alias_counts(text):
    """(results, those that take the place of an operand) of each launch."""
    found = []
    for line in text.splitlines():
        if "@__gpu$xla.gpu.triton" not in line:
            continue
        operands_of, results = re.search(r": \(([^()]*)\) -> \(?([^()]*)\)?$", line).groups()
        types = [re.findall(r"tensor<[^>]*>", part) for part in (operands_of, results)]
        pairs = re.findall(r"indices = \[(\d*)\], operand_index = (\d+)", line)
        for result, operand in pairs:
            assert types[0][int(operand)] == types[1][int(result or 0)]
        assert len({operand for _, operand in pairs}) == len(pairs)
        found.append((len(types[1]), len({result for result, _ in pairs})))
    return found


@pytest.mark.filterwarnings("ignore:second moments that many elements share")
@pytest.mark.parametrize(
    "optimizer, stored, weights, direct, group_size",
    grid(GROUP_SIZES, whole=False),  # what is computed, the interpreted kernels show
)
def test_lowers_for_cuda(on_a_gpu, optimizer, stored, weights, direct, group_size):
    """Every rule, codec and width; in place but for updates, which are new arrays."""
    bits, dtype = weights
    how = dict(master_weight_bits=bits, group_size=group_size, **STORED[stored])
    shapes = [shape for pair in SHAPES for shape in pair]
    tx = builder(optimizer)(storage=storage(**how))
    gradient_dtype = (BF16, F32, F16)[group_size % 3]
    text = lowered(tx, shapes, dtype, direct, gradient_dtype)
    slots = tx.engine.rule.slots

    def stored_arrays(shared):
        names = [slot.name for slot in slots if slot.shared == shared]
        coded = [STORED[stored].get(name, "default") for name in names]
        return len(coded) + sum(codec is not None for codec in coded)

    arrays = 1 + (bits is not None) + stored_arrays(False)
    in_place = arrays if direct else arrays - 1
    wanted = [(3 * arrays, 3 * in_place), (arrays, in_place)]
    if tx.engine.rule.prepares == "blocks":  # a launch before, of all four leaves' one block
        count = stored_arrays(True)
        wanted.insert(0, (4 * (1 + count), 4 * count))
    named = list(zip(kernels_in(text), alias_counts(text), strict=True))
    found = [counts for kernel, counts in named if kernel == "fused_update"]
    # rows and columns taken apart, in new arrays: a launch for each shape with matrices
    apart = [counts for kernel, counts in named if kernel == "block_factors"]
    factored = optimizer == "flash_factored_adamw"
    assert apart == [(2, 0)] * (3 if factored else 0) and len(found) + len(apart) == len(named)
    if factored:  # matrices and vectors are no launch's together
        found, wanted = ([tuple(map(sum, zip(*rows, strict=True)))] for rows in (found, wanted))
    assert found == wanted


MORE = {
    **{name: builder(optimizer) for name, (optimizer, how, _) in VARIANTS.items() if not how},
    "no momentum": functools.partial(lowmem.flash_sgd, LEARNING_RATE),
    "lion's direction": lowmem.scale_by_flash_lion,
    "smooth lion": functools.partial(lowmem.scale_by_flash_lion, mode="smooth", smooth_beta=2.0),
    "refined lion": functools.partial(lowmem.scale_by_flash_lion, mode="refined"),
    "a trace": functools.partial(lowmem.flash_trace, 0.9),
    "f16 moments": functools.partial(lowmem.flash_adam, LEARNING_RATE, mu_dtype=F16),
    "rounded weights": lambda storage: lowmem.flash_adamw(
        LEARNING_RATE, storage=dataclasses.replace(storage, **ROUNDED)
    ),
    "into moments": lambda storage: lowmem.accumulate_gradients(
        lowmem.flash_adamw(LEARNING_RATE, storage=storage), 4, "moments"
    ),
}


@pytest.mark.parametrize("name, direct", in_turn(MORE, [True, False]))
def test_variants_lower_for_cuda(on_a_gpu, name, direct):
    more = MORE[name]
    mu = {"mu": None} if more is MORE["f16 moments"] else {}
    how = {"update_dtype": "param"} if direct else {"split": "ulp"}
    text = lowered(more(storage=storage(**how, **mu)), SHAPES[0], BF16, direct)
    assert kernels_in(text) == ["fused_update"]


TILES = [Tile(256, 1), Tile(1024, 4), Tile(4096, 8)]


@pytest.mark.parametrize("tile", rows(TILES, TILES[:1]), ids=str)
def test_tiles_lower_for_cuda(on_a_gpu, tile):
    shapes = [(64, 64), (3, 50257), (2, 3, 50), (5, 1)]
    with tuning.trying(tuning.Tuning(tile)):
        for size in (24, 32, 5000):
            tx = builder("flash_adamw")(storage=storage(group_size=size))
            assert kernels_in(lowered(tx, shapes, BF16, True))
