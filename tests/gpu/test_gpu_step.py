"""The fused step on a GPU: against the reference there, in place, and wherever it is called."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.groups import Tile
from optax_lowmem._src.kernels import step_arguments
from optax_lowmem._src.optim.optimizers.lion import LionRule
from optax_lowmem._src.optim.step import choose, tuning
from optax_lowmem._src.optim.step.gpu import launch
from tests import launch_cases, small_leaves, tolerances
from tests.contract_cases import pairwise
from tests.step.test_step_backends import OPTIONS, STORED

pytestmark = pytest.mark.gpu

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
LEARNING_RATE = launch_cases.LEARNING_RATE
STEPS = 3
# whole groups and tails, an odd vocabulary, rows of part of a group, one element; over 10^6 in all
SHAPES = {"a": (512, 1024), "b": (9, 50257), "c": (33, 1000), "d": (3, 5, 70), "e": (401, 3)}
SHAPES |= {"f": (1,), "norm": (768,)}
DTYPES = {"c": F16, "d": F32, "norm": F32}  # the others are bf16
POLICY = lowmem.Policy(min_size=0, exclude=("norm",))


@pytest.fixture(autouse=True)
def kernel(gpu_backend):
    """Either kernel: nothing needs Pallas' Triton lowering, which JAX deprecates."""
    return gpu_backend


def launcher(kernel):
    return functools.partial(launch, backend=kernel)


def build(optimizer, **storage):
    row = small_leaves.record(optimizer)
    how = lowmem.Storage(policy=POLICY, **storage)
    return row.make(LEARNING_RATE, **OPTIONS.get(optimizer, {}), storage=how)


@functools.cache
def drawn(seed, dtype, scale=1e-3):
    """A tree of numbers whose sizes differ from row to row and within a group."""
    rng = np.random.default_rng(seed)

    def leaf(shape):
        wide = np.exp(rng.normal(0, 1, (*shape[:-1], 1)) + rng.normal(0, 0.5, shape))
        return jnp.asarray(rng.normal(0, scale, shape) * wide, dtype)

    return {name: leaf(shape) for name, shape in SHAPES.items()}


def start(tx):
    return lowmem.init(tx, drawn(0, F32, 0.05), lambda path, leaf: DTYPES.get(path, BF16))


def both(tx, direct=True):
    """(grads, state, params) -> (params, state) of the reference and of the kernel, compiled."""

    def run(grads, state, params):
        one = lowmem.step(tx, grads, state, params, implementation="xla")
        if direct:
            return one, lowmem.step(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        return one, (optax.apply_updates(params, updates), state)

    return jax.jit(run)


def on_gpu(tree):
    return all(d.platform == "gpu" for x in jax.tree.leaves(tree) for d in x.devices())


# ---- against the reference -----------------------------------------------------------------------
def check_codes(plan, slot, one, other):
    """At most a unit apart; scales next to each other. How many codes differ."""
    (codes, scales), (codes2, scales2) = one, other
    if slot.codec is None:
        atol = tolerances.REORDERED_SLOT * np.abs(codes).max()
        np.testing.assert_allclose(codes2, codes, rtol=tolerances.REORDERED_SLOT, atol=atol)
        return 0
    length = plan.shape[-1] if slot in plan.slots else codes.shape[-1]  # of blocks: 8-bit codes
    codes, codes2 = (np.asarray(slot.codec.unpack(x, length), np.int32) for x in (codes, codes2))
    off = np.abs(codes - codes2)
    assert off.max() <= 1, (plan.path, slot.name)
    assert (off > 0).sum() <= tolerances.rare(tolerances.REORDERED_CODES, off.size), plan.path
    decoded, decoded2 = (launch_cases.decoded_scales(slot.codec, x) for x in (scales, scales2))
    spacing = 2 * slot.codec.scale.relative_error
    rtol, atol = tolerances.GPU_STATE + spacing, 2 * slot.codec.scale.absolute_error
    np.testing.assert_allclose(decoded2, decoded, rtol=rtol, atol=atol, err_msg=plan.path)
    return int((off > 0).sum())


def master(plan, p, correction):
    """f32, joined as any user joins them."""
    if plan.split is None:
        return np.asarray(numerics.widen(p))
    return np.asarray(plan.split.join(p, correction))


def check_weights(plan, old, one, other, flips):
    """Weight and correction, joined: within their last unit and the step's own error."""
    before, wanted, found = (master(plan, *pair) for pair in (old, one, other))
    bits = plan.split and plan.split.bits
    last = [tolerances.reordered_master(bits, plan.dtype, w) for w in (wanted, before)]
    gap = np.abs(found - wanted)
    step = tolerances.GPU_STEP * (LEARNING_RATE + np.abs(wanted - before))
    off = gap > last[0] + step
    assert off.sum() <= (tolerances.rare(tolerances.GPU_SIGNS, off.size) if flips else 0), plan.path
    # a sign that differs is a step the other way, or none
    limit = 2 * LEARNING_RATE * (1 + tolerances.GPU_STEP) + 2 * last[1]
    assert (gap <= limit)[off].all(), plan.path


def stored_in(slots, *states):
    """(slot, (values, scales) in each state) of every slot."""
    arrays = [jax.tree.map(np.asarray, launch_cases.stored_slots(slots, s)) for s in states]
    return zip(slots, *arrays, strict=True)


def check_step(tx, old, one, other):
    """Two results of (params, state) from the same (params, state)."""
    plans, lion = tx.engine.plans(old[0]), isinstance(tx.engine.rule, LionRule)
    unpacked = [tx.engine.unpack(state, plans, p) for p, state in (old, one, other)]
    rows = [
        list(zip(jax.tree.leaves(params), states, strict=True))
        for (params, _), (states, _) in zip((old, one, other), unpacked, strict=True)
    ]
    for plan, wanted, found in zip(plans, unpacked[1][1], unpacked[2][1], strict=True):
        for slot, *stored in stored_in(plan.blockwise, wanted, found):
            check_codes(plan, slot, *stored)
    differ = elements = 0
    for plan, before, wanted, found in zip(plans, *rows, strict=True):
        for slot, *stored in stored_in(plan.slots, wanted[1], found[1]):
            differ += check_codes(plan, slot, *stored)
            elements += math.prod(plan.shape) if slot.codec else 0
        check_weights(plan, *((p, s.correction) for p, s in (before, wanted, found)), lion)
    assert differ <= tolerances.REORDERED_CODES * elements
    assert [int(state.count) for _, state in (one, other)] == [int(old[1].count) + 1] * 2


CASES = pairwise([launch_cases.ALIKE, (24, 32, None), (True, False), ("stochastic", "nearest")])


@pytest.mark.parametrize("optimizer, bits, direct, rounding", CASES)
def test_is_the_reference(kernel, optimizer, bits, direct, rounding):
    """Teacher-forced: each step of both starts from what the kernel made of the one before."""
    tx = build(optimizer, master_weight_bits=bits, rounding=rounding)
    params, state = start(tx)
    assert on_gpu((params, state))
    plans = tx.engine.plans(params)
    assert {choose(tx.engine.rule.for_leaf(plan.matrices), plan)[0] for plan in plans} == {kernel}
    step = both(tx, direct)
    for i in range(STEPS):
        one, other = step(drawn(1 + i % 2, BF16), state, params)
        check_step(tx, (params, state), one, other)
        params, state = other


@pytest.mark.parametrize("products", ["float32", "bfloat16"])
def test_matrices_of_muon(kernel, products):
    """Momenta of each matrix by the kernel, and directions of the same matrices, in bf16 too.

    What comes before the products differs in last bits, so that each has roundings of its own.
    """
    rows = lowmem.OPTIMIZERS["flash_muon"]
    how = lowmem.Storage(policy=POLICY)
    tx = rows.make(LEARNING_RATE, storage=how, ns_dtype=products, weight_decay=0.1)
    params, state = start(tx)
    plans = tx.engine.plans(params)
    assert {choose(tx.engine.rule.for_leaf(plan.matrices), plan)[0] for plan in plans} == {kernel}
    step = both(tx)
    before = lowmem.master_params(params, state)
    for i in range(STEPS):
        one, other = step(drawn(1 + i % 2, BF16), state, params)
        for plan, wanted, found in zip(
            plans, *(tx.engine.unpack(new, plans, p)[0] for p, new in (one, other)), strict=True
        ):
            for slot, *stored in stored_in(plan.slots, wanted, found):
                check_codes(plan, slot, *stored)
        masters = [lowmem.master_params(*pair) for pair in (one, other)]
        for plan in (plan for plan in plans if plan.matrices is not None):
            a, b, w = (np.asarray(tree[plan.path], np.float64) for tree in (*masters, before))
            assert np.linalg.norm(a - b) <= 2 * tolerances.MUON_BF16 * np.linalg.norm(a - w), (
                plan.path
            )
        (params, state), before = other, masters[1]


def check_two_steps(tx, dtype=BF16):
    """Teacher-forced, with gradients of a dtype."""
    params, state = start(tx)
    step = both(tx)
    for i in range(2):
        one, other = step(drawn(1 + i, dtype), state, params)
        check_step(tx, (params, state), one, other)
        params, state = other


@pytest.mark.parametrize("name", [name for name in STORED if name != "default"])
def test_codecs(name):
    check_two_steps(build("flash_adamw", group_size=48, **STORED[name]), F32)


@pytest.mark.parametrize("mode", ["smooth", "refined"])
def test_modes_of_lion(mode):
    """Steps from zero: new weights are the directions."""
    tx = lowmem.scale_by_flash_lion(mode=mode, storage=lowmem.Storage(policy=POLICY))
    zeros = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    state, step, plans = tx.init(zeros), both(tx), tx.engine.plans(zeros)
    for i in range(2):
        (wanted, _), (found, new) = results = step(drawn(1 + i, BF16, 0.3), state, zeros)
        rows = [tx.engine.unpack(each, plans, zeros)[0] for _, each in results]
        for plan, *pair in zip(plans, *rows, strict=True):
            for slot, *stored in stored_in(plan.slots, *pair):
                check_codes(plan, slot, *stored)
        for one, other in zip(*map(jax.tree.leaves, (wanted, found)), strict=True):
            limit = tolerances.GPU_STEP * float(jnp.abs(one).max())
            np.testing.assert_allclose(other, one, rtol=tolerances.GPU_STEP, atol=limit)
        state = new


@pytest.mark.parametrize("optimizer", ["flash_adamw", "flash_lion"])
def test_master_weights_to_nearest(optimizer):
    check_two_steps(build(optimizer, master_rounding="nearest"))


@pytest.mark.parametrize("bits", [24, 32])
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "update"])
def test_weights_land_bit_for_bit(kernel, bits, direct):
    how = lowmem.Storage(bits, policy=launch_cases.POLICY)
    launch_cases.check_landing(launcher(kernel), how, direct, Tile())


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "sgd"])
def test_what_is_not_finite_shows(kernel, optimizer):
    launch_cases.check_not_finite(launcher(kernel), optimizer, Tile())


@pytest.mark.parametrize("tile", [Tile(256, 1), Tile(4096, 8)], ids=str)
def test_one_cut_is_as_good_as_another(tile):
    tx = build("flash_adamw")
    params, state = start(tx)
    grads = drawn(1, BF16)
    with step_arguments.stepping(tuning=tuning.Tuning()):
        wanted = jax.jit(functools.partial(lowmem.step, tx))(grads, state, params)
    with step_arguments.stepping(tuning=tuning.Tuning(tile, leaves=3, elements=1 << 19)):
        found = jax.jit(functools.partial(lowmem.step, tx))(grads, state, params)
    check_step(tx, (params, state), wanted, found)


def test_a_clipping_is_folded_in():
    tx = build("flash_adamw")
    params, inner = start(tx)
    grads = drawn(1, BF16)
    norm = float(optax.tree.norm(jax.tree.map(lambda g: g.astype(F32), grads)))
    link = optax.clip_by_global_norm(norm / 8)
    state = (optax.EmptyState(), inner)
    chained = lowmem.chain(link, tx)
    new, (_, other) = jax.jit(functools.partial(lowmem.step, chained))(grads, state, params)
    plain = functools.partial(lowmem.step, chained, implementation="xla")
    wanted, (_, one) = jax.jit(plain)(grads, state, params)
    check_step(tx, (params, inner), (wanted, one), (new, other))
    _, unclipped = jax.jit(functools.partial(lowmem.step, tx))(grads, inner, params)
    ratio = np.asarray(unclipped.nu_scale["a"]) / np.asarray(other.nu_scale["a"])
    np.testing.assert_allclose(ratio, 8, rtol=1e-3)  # of sqrt(nu), whose maximum f32 keeps


# ---- in place ------------------------------------------------------------------------------------
LARGE = {"embed": (2048, 1024), "odd": (257, 4099), "bias": (4096,), "norm": (1024,)}
LARGE |= {f"w{i}": (1024, 1024) for i in range(4)}


def large(tx):
    rng = np.random.default_rng(0)
    tree = {n: jnp.asarray(rng.normal(0, 0.05, s), F32) for n, s in LARGE.items()}
    params, state = lowmem.init(tx, tree, BF16)
    return jax.tree.map(lambda p: p * 0.01, params), state, params


def bytes_of(*trees):
    return sum(x.nbytes for x in jax.tree.leaves(trees))


IN_PLACE = [*lowmem.OPTIMIZERS, "clipped"]


def maker(name):
    if name != "clipped":
        return build(name)
    return lowmem.chain(optax.clip_by_global_norm(1.0), build("flash_adamw"))


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_step_is_in_place(name):
    """At most 1 MB of temporaries; parameters and state are where they were.

    Muon's are 7 arrays of a stack, of 2^23 elements in bf16, and what cuBLAS works with.
    """
    tx = maker(name)
    grads, state, params = large(tx if name != "clipped" else tx.links[1])
    state = (optax.EmptyState(), state) if name == "clipped" else state
    step = jax.jit(functools.partial(lowmem.step, tx), donate_argnums=(1, 2))
    compiled = step.lower(grads, state, params).compile()
    memory = compiled.memory_analysis()
    stack = 7 * 2 * 2**23 + 2**25 if name == "flash_muon" else 0
    assert memory.temp_size_in_bytes <= 2**20 + stack
    arrays = [x for x in jax.tree.leaves((params, state)) if x.size > 1]
    assert memory.alias_size_in_bytes >= bytes_of(arrays)
    places = {x.unsafe_buffer_pointer() for x in arrays}
    new = compiled(grads, state, params)
    jax.block_until_ready(new)
    assert all(x.is_deleted() for x in arrays)
    assert not any(x.is_deleted() for x in jax.tree.leaves(grads))
    assert {x.unsafe_buffer_pointer() for x in jax.tree.leaves(new) if x.size > 1} == places


def test_nothing_is_overwritten_without_donation():
    tx = build("flash_adamw")
    grads, state, params = large(tx)
    before = jax.tree.map(lambda x: np.array(x), (grads, state, params))
    jax.block_until_ready(jax.jit(functools.partial(lowmem.step, tx))(grads, state, params))
    jax.tree.map(np.testing.assert_array_equal, (grads, state, params), before)


@pytest.mark.parametrize("name", ["flash_adamw", "flash_lion", "clipped"])
def test_temporaries_of_an_update(name):
    """`update` and `apply_updates` in one jit: no more than an f32 copy of the largest leaf."""
    tx = maker(name)
    grads, state, params = large(tx if name != "clipped" else tx.links[1])
    state = (optax.EmptyState(), state) if name == "clipped" else state

    def run(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(run, donate_argnums=(1, 2)).lower(grads, state, params).compile()
    memory = compiled.memory_analysis()
    slack = 2**20  # of `step`: scalars, keys, and what XLA rounds up
    assert memory.temp_size_in_bytes <= 4 * max(map(math.prod, LARGE.values())) + slack
    assert memory.alias_size_in_bytes >= bytes_of([x for x in jax.tree.leaves(state) if x.size > 1])


# ---- wherever it is called -----------------------------------------------------------------------
def test_arrays_of_the_hosts_cpu():
    tx = build("flash_adamw")
    params, state = start(tx)
    grads = drawn(1, BF16)
    step = jax.jit(functools.partial(lowmem.step, tx))
    other = step(grads, state, params)
    cpu = jax.local_devices(backend="cpu")[0]
    on_cpu = jax.device_put((grads, state, params), cpu)
    one = step(*on_cpu)
    assert on_gpu(other)
    assert {d for x in jax.tree.leaves(one) for d in x.devices()} == {cpu}
    one = jax.device_put(one, jax.devices()[0])
    check_step(tx, (params, state), one, other)


def test_vmap():
    tx = lowmem.flash_adamw(LEARNING_RATE, storage=lowmem.Storage(policy=lowmem.Policy(min_size=0)))
    rng = np.random.default_rng(0)
    shapes = {"w": (3, 40, 96), "b": (3, 70)}
    tree = {n: jnp.asarray(rng.normal(0, 0.05, s), F32) for n, s in shapes.items()}
    params, state = jax.vmap(lambda p: lowmem.init(tx, p, BF16))(tree)
    grads = jax.tree.map(lambda p: p * 0.01, params)
    found = jax.jit(jax.vmap(functools.partial(lowmem.step, tx)))(grads, state, params)
    member = functools.partial(jax.tree.map, lambda x: x[1])
    one = jax.jit(functools.partial(lowmem.step, tx, implementation="xla"))(
        member(grads), member(state), member(params)
    )
    check_step(tx, (member(params), member(state)), one, member(found))


def test_in_a_scan_with_a_schedule():
    schedule = optax.linear_schedule(0.0, LEARNING_RATE, 3)
    tx = lowmem.flash_adamw(schedule, storage=lowmem.Storage(policy=POLICY))
    grads = drawn(1, BF16)

    @jax.jit
    def loop(state, params):
        def body(carry, _):
            params, state = carry
            new = lowmem.step(tx, grads, state, params)
            return new, new

        return jax.lax.scan(body, (params, state), None, length=3)

    params, state = start(tx)
    last, every = loop(state, params)
    second, third = (jax.tree.map(lambda x, i=i: x[i], every) for i in (1, 2))
    jax.tree.map(np.testing.assert_array_equal, last, third)
    plain = jax.jit(functools.partial(lowmem.step, tx, implementation="xla"))
    check_step(tx, second, plain(grads, second[1], second[0]), third)
