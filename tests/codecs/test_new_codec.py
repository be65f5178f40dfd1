"""A new codec says itself what it stores: the one of docs/internals, with five codes in a byte."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lowmem as lowmem
from optax_lowmem import checkpoint, codecs
from optax_lowmem._src.kernels import group_codec
from optax_lowmem._src.optim.step import choose
from tests.pages import page_block

CODEC = page_block("docs/internals/extending.md", "class TernaryCodec")["TernaryCodec"]()
STORAGE = lowmem.Storage(mu=CODEC, group_size=40, policy=lowmem.Policy(min_size=0))


def test_its_storage():
    assert (CODEC.name, CODEC.levels) == ("ternary-int2", 1)
    codes = np.random.default_rng(0).integers(-1, 2, (2, 33)).astype(np.int8)
    stored, again = jax.jit(lambda c: (CODEC.pack(c), CODEC.unpack(CODEC.pack(c), 33)))(codes)
    assert stored.shape == (2, 7)
    np.testing.assert_array_equal(again, codes)
    encode = functools.partial(codecs.encode_array, CODEC, group_size=40)
    found = jax.eval_shape(encode, jax.ShapeDtypeStruct((2, 33), jnp.float32))
    assert CODEC.storage((2, 33), 40).is_like(codecs.StoredSlot(*found))
    assert not np.asarray(CODEC.unpack(np.zeros((2, 2), np.uint8), 7)).any()


def test_a_run_from_optax_and_back():
    """Steps, conversion and the memory report ask the codec; weights follow optax's."""
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(8, 83)), jnp.float32)}
    plain, tx = optax.sgd(0.1, 0.9), lowmem.flash_sgd(0.1, 0.9, storage=STORAGE)
    updates, old = plain.update(params, plain.init(params), params)
    weights, state = checkpoint.from_optax(tx, old, params, jnp.float32)
    assert (state.mu["w"].shape, state.mu["w"].dtype) == ((8, 17), jnp.uint8)
    report = lowmem.memory.report(tx, weights)
    assert report.by_slot["mu"] == 8 * 17 and report.by_slot["mu_scale"] == 8 * 3 * 4
    weights, state = jax.jit(functools.partial(lowmem.step, tx))(params, state, weights)
    assert state.mu["w"].shape == (8, 17)
    _, back = checkpoint.to_optax(tx, state, weights, plain)
    trace = optax.tree.get(back, "trace")["w"]
    assert 0.5 < np.corrcoef(np.ravel(trace), np.ravel(params["w"]))[0, 1] < 0.99


def test_kernels_say_why_not(on_a_gpu):
    reason = "ternary-int2 stores 5 codes per byte, and kernel tiles need a power of two"
    (plan,) = lowmem.flash_sgd(0.1, 0.9, storage=STORAGE).engine.plans({"w": jnp.ones((8, 80))})
    assert reason in choose(lowmem.OPTIMIZERS["flash_sgd"].rule, plan)[1]
    assert reason in group_codec.unsupported(jnp.ones((8, 80)), 40, CODEC)
    other = dataclasses.replace(plan, slots=(dataclasses.replace(plan.slots[0], codec=None),))
    assert reason not in choose(lowmem.OPTIMIZERS["flash_sgd"].rule, other)[1]
