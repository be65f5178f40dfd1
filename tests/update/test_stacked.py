"""Small equal leaves stepped as one: which ones, with the bits of steps alone, in how little."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lowmem as lowmem
from optax_lowmem._src.update import stacked
from optax_lowmem.codecs import linear4
from tests.compilation import SAME_BITS
from tests.tiers import rows

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="stacks are for CPUs")
OPTIMIZERS = {
    "adamw": lowmem.flash_adamw,
    "a value of a block": functools.partial(
        lowmem.q_adam_mini, blocks=lowmem.blocks.Structure(rules=[("w*", (1,))])
    ),
    "4 bits": functools.partial(
        lowmem.flash_adamw, storage=lowmem.Storage(mu=linear4(), nu=linear4(signed=False))
    ),
}


@pytest.fixture
def one_device(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def tree(count, shape):
    return {f"w{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i in range(count)}


def stacks_of(counts, direct=True, make=lowmem.flash_adamw):
    """The leaves of each stack among leaves of some shapes, {shape: how many}."""
    tx, plans, weights = make(1e-3), [], []
    for shape, count in counts.items():
        weight = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        (plan,) = tx.engine.plans({"w": weight})
        plans += [dataclasses.replace(plan, path=f"w{i}", direct=direct) for i in range(count)]
        weights += [weight] * count
    return list(stacked.stacks(tx.engine.rule, plans, weights, weights, range(len(plans))))


@pytest.mark.usefixtures("one_device")
def test_lengths():
    """One length for all of a shape, at most 32 and an eighth of its leaves, with few left over."""
    lengths = [[len(s) for s in stacks_of({(64, 64): n})] for n in (63, 64, 100, 250, 1000)]
    assert lengths == [[], [8] * 8, [10] * 10, [25] * 10, [25] * 40]


@pytest.mark.usefixtures("one_device")
def test_leaves_of_a_stack_are_alike():
    found = stacks_of({(64, 64): 64, (65, 64): 70})
    assert len(found) == 16
    assert sorted(sum(found[:8], [])) == list(range(64))
    assert sorted(sum(found[8:], [])) == list(range(64, 128))


@pytest.mark.usefixtures("one_device")
def test_what_is_not_stacked(monkeypatch):
    assert not stacks_of({(1024, 64): 64})  # copies of large leaves take time
    assert not stacks_of({(4, 4): 64})  # kept in f32
    assert not stacks_of({(64, 64): 64}, direct=False)
    assert not stacks_of({(64, 64): 64}, make=lowmem.stable_adamw)  # prepares of a leaf
    assert stacks_of({(64, 64): 64})
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert not stacks_of({(64, 64): 64})


@pytest.mark.parametrize("name", rows(OPTIMIZERS, ["adamw", "a value of a block"]))
def test_a_stack_has_the_bits_of_its_leaves_alone(name, monkeypatch):
    """Two stacks and a leaf left over, of the same shape, with gradients of unlike sizes."""
    tx = OPTIMIZERS[name](1e-2)
    rng = np.random.default_rng(0)
    start = {f"w{i}": rng.normal(size=(65, 66)).astype(np.float32) for i in range(5)}
    params, state = lowmem.init(tx, start)
    grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
    grads = {leaf: g * 10.0**-i for i, (leaf, g) in enumerate(grads.items())}
    used = []

    def step():
        # a function of its own: it is traced anew
        run = jax.jit(functools.partial(lowmem.step, tx), compiler_options=SAME_BITS)
        once = run(grads, state, params)
        return once, run(grads, once[1], once[0])

    def counted(*args, original=stacked.fused_updates):
        found = original(*args)
        used.append(len(found))
        return found

    monkeypatch.setattr(stacked, "fused_updates", counted)
    alone = step()
    assert not used
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    for limit, value in (("_FEW", 2), ("_MOST", 2), ("_PARTS", 2)):
        monkeypatch.setattr(stacked, limit, value)
    together = step()
    assert used == [2, 2]
    chex.assert_trees_all_equal_shapes_and_dtypes(together, alone)
    for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures("one_device")
def test_many_equal_leaves_compile_to_little():
    """A leaf adds 110 instructions, and 620 alone; temporaries are less than a word an element."""
    tx, count, size = lowmem.flash_adamw(1e-3), 64, 64 * 64
    params, state = jax.eval_shape(lambda p: lowmem.init(tx, p), tree(count, (64, 64)))
    step = jax.jit(functools.partial(lowmem.step, tx))
    program = step.lower(params, state, params).compile()
    assert program.as_text().count(" = ") < 250 * count
    assert program.memory_analysis().temp_size_in_bytes < 0.75 * 4 * size * count
