"""The paths for XLA against the reference, leaf by leaf, and a clipping folded into the step."""

import dataclasses
import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import codecs
from optax_lowmem._src.arrays import random
from optax_lowmem._src.optim.optimizers import every_record
from optax_lowmem._src.optim.step import reference, xla
from optax_lowmem._src.optim.step.prepare import prepare_leaves
from optax_lowmem._src.optim.step.state import LeafBatch
from tests import small_leaves, tolerances
from tests.launch_cases import joined, same_scales, stored_slots, units
from tests.tiers import rows

SHAPES = {"a": (96,), "b": (7, 33), "c": (64, 256), "d": (3, 5, 1000)}
LEARNING_RATE = 1e-3
CASES = {
    "adamw": lambda s: lowmem.flash_adamw(LEARNING_RATE, weight_decay=0.1, storage=s),
    "coat": lambda s: lowmem.coat_adamw(
        LEARNING_RATE,
        storage=dataclasses.replace(
            s, mu=codecs.expanded_e4m3(), nu=codecs.expanded_e4m3(signed=False)
        ),
    ),
    "formats": lambda s: lowmem.flash_adamw(
        LEARNING_RATE,
        storage=dataclasses.replace(s, mu=codecs.affine(), nu=codecs.dynamic(signed=False)),
    ),
    "narrow": lambda s: lowmem.flash_lion(
        LEARNING_RATE, storage=dataclasses.replace(s, mu=codecs.linear4())
    ),
    "narrow adamw": lambda s: lowmem.flash_adamw(
        LEARNING_RATE,
        storage=dataclasses.replace(s, mu=codecs.linear4(), nu=codecs.linear4(signed=False)),
    ),
    "stable": lambda s: lowmem.stable_adamw(LEARNING_RATE, threshold=0.5, storage=s),
    "mini": lambda s: lowmem.flash_adam_mini(
        LEARNING_RATE,
        storage=s,
        blocks=lowmem.blocks.Structure(rules=(("d", (1,)),), default="whole"),
    ),
    "lion": lambda s: lowmem.flash_lion(LEARNING_RATE, storage=s),
    "sgd": lambda s: lowmem.flash_sgd(LEARNING_RATE, momentum=0.9, weight_decay=1e-2, storage=s),
}
_KNOWN = {type(make(lowmem.Storage()).engine.rule) for make in CASES.values()}
CASES |= {
    name: lambda s, make=record.make: make(LEARNING_RATE, storage=s)
    for name, record in ((name, small_leaves.record(name)) for name in lowmem.OPTIMIZERS)
    if type(record.rule) not in _KNOWN
}
# block-wise second moments in codes too
STORAGE = functools.partial(lowmem.Storage, nu=codecs.sqrt(), policy=lowmem.Policy(min_size=0))
FAST = {
    ("adamw", 24, jnp.bfloat16),
    ("mini", 24, jnp.bfloat16),
    ("lion", 32, jnp.float16),
    ("sgd", None, jnp.float32),
}
ONCE = {("formats", None, jnp.float32), ("narrow adamw", 24, jnp.bfloat16)}
BITS, DTYPES = (24, 32, None), (jnp.bfloat16, jnp.float16, jnp.float32)
FORMATS = ("coat", "formats", "narrow", "narrow adamw")  # with some rule, once
# One rule with every weight, the others with each width and each dtype once.
GRID = [
    (name, bits, dtype)
    for name in CASES
    for (i, bits), (j, dtype) in itertools.product(enumerate(BITS), enumerate(DTYPES))
    if (name, bits, dtype) in (*FAST, *ONCE)
    or name not in FORMATS
    and (name == "adamw" or (i + j) % len(DTYPES) == 0)
]
# Rounding to nearest differs in the codec alone: with one kind of weight each rule.
NEAREST = [row for row in GRID if row[1:] == (24, jnp.bfloat16)]
ROWS = rows(
    [*((*row, "stochastic") for row in GRID), *((*row, "nearest") for row in NEAREST)],
    [(*row, "stochastic") for row in FAST],
)


def some_steps_in(tx, dtype, step=None):
    """Parameters, gradients and a state some steps old; of the whole step without a `step`."""
    rng = np.random.default_rng(0)

    def draw(scale, dtype):
        return {n: jnp.asarray(rng.normal(0, scale, s), dtype) for n, s in SHAPES.items()}

    params, state = lowmem.init(tx, draw(0.1, jnp.float32), dtype)
    step = step or jax.jit(functools.partial(lowmem.step, tx))
    for _ in range(3):
        params, state = step(draw(1e-3, jnp.bfloat16), state, params)
    return params, draw(1e-3, jnp.bfloat16), state


two_passes = functools.partial(reference.fused_update, two_passes=True)


def packed(rule, plan, leaf, h, key):
    return xla.packed_update(rule, plan, leaf, h, key[None], jnp.uint32(0))


@pytest.mark.parametrize("path", [packed, two_passes], ids=["packed", "two passes"])
@pytest.mark.parametrize("name, bits, dtype, rounding", ROWS)
def test_a_path_is_the_reference(name, bits, dtype, rounding, path):
    run, plans, params, wanted = by_reference(name, bits, dtype, rounding)
    assert all(xla.packs(plan, "cpu") for plan in plans)
    for plan, p, one, other in zip(plans, params.values(), wanted, run(path), strict=True):
        compare(plan, p if plan.matrices is None else None, one, other)


@functools.lru_cache(maxsize=4)
def by_reference(name, bits, dtype, rounding):
    """A step of each leaf with any implementation, and what the reference's gives.

    The steps before it take the program of a path, which a test needs anyway.
    """
    tx = CASES[name](STORAGE(master_weight_bits=bits, rounding=rounding))
    engine = tx.engine

    @functools.partial(jax.jit, static_argnums=0)
    def run(update_leaf, params, grads, state):
        plans = engine.plans(params)
        states, shared = engine.unpack(state, plans, params)
        h = engine.hyperparameters(state.count)
        key = random.leaf_key(state.seed, state.count, "w")
        columns = (grads.values(), params.values(), states, shared)
        found, of_blocks = [], []
        for plan, g, p, own, own_shared in zip(plans, *columns, strict=True):
            rule = engine.rule.for_leaf(plan.matrices)
            h_leaf = engine.rule.hyperparameters_of(plan.matrices, h)
            leaf = own._replace(g=g, p=p)
            if rule.prepares == "matrices":  # a step without weights is what they are made of
                leaf = leaf._replace(p=None)
            elif rule.prepares is not None:
                shared_arrays = {"blockwise": [own_shared], "blockwise_keys": key[None]}
                batch = LeafBatch.of([plan], [leaf], h_leaf, key[None], **shared_arrays)
                batch, (own_shared,) = prepare_leaves(rule, batch)
                h_leaf, leaf = batch.h(0), batch.leaves[0]
            found.append(update_leaf(rule, plan, leaf, h_leaf, key))
            of_blocks.append(own_shared)
        return found, engine.pack(state.count + 1, plans, found, of_blocks, state)

    def step(grads, state, params):
        found, state = run(packed, params, grads, state)
        updates = dict(zip(params, (leaf.p for leaf in found), strict=True))
        return optax.apply_updates(params, updates), state

    of_matrices = engine.rule.prepares == "matrices"  # whose updates a path does not make
    params, grads, state = some_steps_in(tx, dtype, None if of_matrices else step)

    def with_arrays(update_leaf):
        return run(update_leaf, params, grads, state)[0]

    return with_arrays, engine.plans(params), params, with_arrays(reference.fused_update)


def test_every_rule_is_among_the_cases():
    rules = {make(STORAGE()).engine.rule for make in CASES.values()}
    assert {record.rule for record in lowmem.OPTIMIZERS.values()} <= rules


def test_records_have_the_rules_of_their_constructors():
    for record in every_record():
        assert record.make(LEARNING_RATE).engine.rule == record.rule


def same_state(plan, one, other):
    """Codes at most one apart and in few elements, scales next to each other, the rest f32."""
    both = (stored_slots(plan.slots, state) for state in (one, other))
    forms = plan.forms
    for slot, *pair in zip(plan.slots, *both, strict=True):
        form = codecs.StoredSlot(forms[slot.name], forms[f"{slot.name}_scale"])
        (stored, scale), (stored2, scale2) = pair
        if slot.codec is None:
            stored, stored2 = np.asarray(stored), np.asarray(stored2)
            size = np.abs(stored).max() * tolerances.REORDERED_SLOT
            np.testing.assert_allclose(stored2, stored, rtol=tolerances.REORDERED_SLOT, atol=size)
            continue
        assert all(codecs.StoredSlot(*found).is_like(form) for found in pair), slot.name
        codes = (slot.codec.unpack(codes, plan.shape[-1]) for codes in (stored, stored2))
        off = np.abs(np.subtract(*map(units, codes)))
        assert off.max() <= 1, slot.name
        assert (off > 0).sum() <= max(1, tolerances.REORDERED_CODES * off.size), slot.name
        same_scales(slot.codec, scale, scale2)
    forms = [jax.tree.map(lambda x: (x.dtype, x.shape), x.correction) for x in (one, other)]
    assert forms[0] == forms[1]


def master(plan, p, update, correction):
    """f32 of the master weight after an update, or after a direct step, which gives the weight."""
    landed = update if plan.returns_params else optax.apply_updates(p, update)
    assert (landed.shape, landed.dtype) == (p.shape, p.dtype)
    whole = landed if plan.split is None else joined(plan.split, landed, correction)
    return np.asarray(whole, np.float32)


def compare(plan, p, one, other, step=LEARNING_RATE * tolerances.REORDERED_STEP):
    """Two results of one leaf: codes, scales, and where the weight lands."""
    same_state(plan, one, other)
    if p is None:
        np.testing.assert_allclose(other.p, one.p, rtol=tolerances.REORDERED_SLOT, atol=step)
        return
    masters = [master(plan, p, leaf.p, leaf.correction) for leaf in (one, other)]
    bits = plan.split and plan.split.bits
    unit = tolerances.REORDERED_MASTER[bits, jnp.dtype(plan.dtype)]
    moved = np.abs(masters[1] - np.asarray(p, np.float32)) / LEARNING_RATE  # errors grow with it
    off = np.abs(masters[0] - masters[1])
    np.testing.assert_array_less(off, unit * np.abs(masters[1]) + step * (1 + moved))


def test_which_leaves_are_packed():
    tx = CASES["adamw"](lowmem.Storage())
    (plan,) = tx.engine.plans({"w": jnp.zeros((8, 8), jnp.bfloat16)})
    assert not xla.packs(plan, "cpu")  # no slot is compressed
    (plan,) = tx.engine.plans({"w": jnp.zeros((128, 64), jnp.bfloat16)})
    assert xla.packs(plan, "cpu") and not xla.packs(plan, "gpu")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the packed path is for CPUs")
def test_small_outputs_are_computed_in_calls_that_xla_keeps():
    """The compiled program keeps the calls on which the packed path relies."""
    tx = CASES["adamw"](lowmem.Storage())
    params, state = lowmem.init(tx, {"w": jnp.ones((128, 128))})
    grads = {"w": jnp.ones((128, 128))}
    compiled = jax.jit(functools.partial(lowmem.step, tx)).lower(grads, state, params).compile()
    calls = [line for line in compiled.as_text().splitlines() if " call(" in line]
    kept = [line for line in calls if 'inlineable="false"' in line]
    assert len(kept) == 4  # the leaf, its seeds, {weight, correction, mu} and nu


# ---- a clipping before the step --------------------------------------------------------------
@pytest.fixture
def folded(monkeypatch):
    """The limits of the clippings that became a factor."""
    module, found = importlib.import_module("optax_lowmem._src.optim.wrappers.chain"), []
    plain = module.clipping_factor

    def factor(limit, norm):
        found.append(limit)
        return plain(limit, norm)

    monkeypatch.setattr(module, "clipping_factor", factor)
    return found


CLIPPED = [name for name in CASES if name not in ("coat", "formats")]


@pytest.mark.parametrize("name", rows(CLIPPED, ["sgd"]))
def test_a_clipping_is_folded_in(name, folded):
    """As clipping f32 gradients first, for a norm over the limit and one under it."""
    tx = CASES[name](STORAGE())
    params, grads, state = some_steps_in(tx, jnp.bfloat16)
    norm = float(optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads)))
    limits = [norm / 7, 7 * norm]
    links = list(map(optax.clip_by_global_norm, limits))

    def both(grads, state, params):
        for link in links:
            clipped = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
            clipped, _ = link.update(clipped, optax.EmptyState())
            apart = lowmem.step(tx, clipped, state, params)
            chained = (optax.EmptyState(), state)
            new, (_, inner) = lowmem.step(lowmem.chain(link, tx), grads, chained, params)
            updates, (_, other) = lowmem.chain(link, tx).update(grads, chained, params)
            updated = optax.apply_updates(params, updates)
            yield apart, (new, inner), (updated, other)

    run = jax.jit(lambda *args: list(both(*args)))
    results = run(grads, state, params)
    assert folded == [limit for limit in limits for _ in range(2)]
    codes = [state.mu["c"] for (_, state), *_ in results]
    assert (codes[0] != codes[1]).any()  # one of the clippings clips
    for apart, *others in results:
        for other in others:
            assert_clipped_alike(apart, other, tx.engine.plans(params))


def assert_clipped_alike(one, other, plans):
    """Of (parameters, state): what a gradient that differs by REORDERED_NORM makes."""
    wanted, found = ([*map(jax.tree.leaves, state)] for state in (one[1], other[1]))
    fields = dict(zip(one[1]._fields, zip(wanted, found, strict=True), strict=True))
    for slot in (slot for slot in ("mu", "nu") if slot in fields):
        for codes, codes2 in zip(*fields[slot], strict=True):
            off = np.abs(units(codes) - units(codes2))
            share = tolerances.REORDERED_CODES + 255 * tolerances.REORDERED_NORM
            assert off.max() <= 1 and (off > 0).sum() <= max(1, share * off.size), slot
        for scale, scale2 in zip(*fields[f"{slot}_scale"], strict=True):
            rtol = 2 * tolerances.REORDERED_NORM
            if scale.dtype == jnp.uint16:  # 8 bits of a mantissa
                assert np.abs(units(scale) - units(scale2)).max() <= 1
            else:
                np.testing.assert_allclose(scale2, scale, rtol=rtol, err_msg=slot)
    masters = [jax.tree.leaves(lowmem.master_params(*pair)) for pair in (one, other)]
    for plan, w, w2 in zip(plans, *masters, strict=True):
        unit = tolerances.REORDERED_MASTER[plan.split.bits, jnp.dtype(plan.dtype)]
        step = LEARNING_RATE * 4 * tolerances.REORDERED_NORM
        np.testing.assert_allclose(w2, w, rtol=unit, atol=step, err_msg=plan.path)


@pytest.mark.parametrize("largest", [0.0, jnp.inf, jnp.nan, 3e38], ids=str)
def test_norms_that_cannot_divide(largest, folded):
    """Zeros stay zeros; what optax makes NaN is NaN."""
    link, tx = optax.clip_by_global_norm(1.0), lowmem.flash_sgd(1.0)
    params = {"w": jnp.zeros(4), "v": jnp.ones(2)}
    grads = {"w": jnp.zeros(4).at[1].set(largest), "v": jnp.full(2, min(largest, 1e38))}
    wanted, _ = link.update(grads, optax.EmptyState())
    chained = lowmem.chain(link, tx)
    found, _ = jax.jit(chained.update)(grads, chained.init(params), params)
    assert folded
    for name in params:
        np.testing.assert_allclose(found[name], -wanted[name], rtol=tolerances.REORDERED_NORM)
