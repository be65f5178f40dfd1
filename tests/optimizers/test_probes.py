"""Closed loops of thousands of steps beside f32: where 8-bit states drift, stick or blow up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import codecs
from tests.compilation import FULL_COMPILE

EVERYTHING = lowmem.Policy(min_size=0)
# thousands of steps take longer than LLVM's passes
loop = functools.partial(jax.jit, compiler_options=FULL_COMPILE)


def decoded(codec, codes, scales, group_size=32):
    return np.asarray(codecs.decode_array(codec, codes, scales, group_size))


# -- scale -----------------------------------------------------------------------------------------
SCALED = {
    "adamw": lambda **options: lowmem.flash_adamw(1e-3, eps=0.0, weight_decay=0.1, **options),
    "lion": lambda **options: lowmem.flash_lion(1e-3, weight_decay=0.1, **options),
}


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", SCALED)
def test_gradients_of_any_size_give_the_same_codes_and_weights(name, rounding):
    """1e-3 times 2^k, k in -30..60: equal bits of codes, weights and corrections."""
    storage = lowmem.Storage(rounding=rounding, policy=EVERYTHING)
    tx, rng = SCALED[name](storage=storage), np.random.default_rng(1)
    grads = np.float32(1e-3 * rng.normal(size=(20, 8, 96)) * np.exp(rng.normal(size=(8, 96))))
    w = jnp.asarray(rng.normal(size=(8, 96)), jnp.float32)

    @jax.jit
    @jax.vmap
    def run(scale):
        def body(carry, g):
            updates, state = tx.update(g * scale, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(body, lowmem.init(tx, w), jnp.asarray(grads))[0]

    params, state = run(jnp.asarray(2.0 ** np.arange(-30, 61), jnp.float32))
    slots = [getattr(state, slot) for slot in ("mu", "nu") if hasattr(state, slot)]
    for every in [params, state.correction, *slots]:
        every = np.asarray(every)
        assert (every != every[30]).sum() == 0
        assert np.unique(np.float32(every[30])).size > 20
    for slot in ("mu_scale", "nu_scale"):  # which the size has gone into, exactly
        if hasattr(state, slot):
            scale = np.asarray(getattr(state, slot))
            step = (
                np.int64(scale[31].astype(np.int64) - scale[30])
                if scale.dtype == np.uint16
                else None
            )
            if step is not None:
                assert (step == 256).all()
            else:
                np.testing.assert_array_equal(scale[31], scale[30] * 2)


# -- a second moment that falls --------------------------------------------------------------------
def falling(storage):
    """3000 steps of gradients of size sigma, then 6000 of sigma / 10; ours beside f32."""
    rng = np.random.default_rng(2)
    sigma = np.float32(1e-3 * np.exp(rng.normal(size=(2, 512)) * 0.5))
    ours = lowmem.flash_adamw(1e-4, weight_decay=0.0, storage=storage)
    plain = optax.adamw(1e-4, weight_decay=0.0)

    def body(t, carry):
        p, s, q, r = carry
        size = jnp.where(t < 3000, sigma, sigma / 10)
        g = size * jax.random.normal(jax.random.fold_in(jax.random.key(3), t), sigma.shape)
        updates, s = ours.update(g, s, p)
        p = optax.apply_updates(p, updates)
        updates, r = plain.update(g, r, q)
        return p, s, optax.apply_updates(q, updates), r

    @loop
    def run(zero):
        start = (zero, ours.init(zero), zero, plain.init(zero))
        change = jax.lax.fori_loop(0, 3000, body, start)
        return change, jax.lax.fori_loop(3000, 9000, body, change)

    (p0, _, q0, _), (p, s, q, r) = run(jnp.zeros(sigma.shape))
    nu = decoded(storage.nu, s.nu, s.nu_scale)
    ratio = np.median(np.sqrt(nu / np.asarray(r[0].nu)))
    moved = [float(jnp.linalg.norm(b - a)) for a, b in [(p0, p), (q0, q)]]
    return ratio, moved[0] / moved[1]


@pytest.mark.full
def test_second_moment_follows_gradients_that_fall_tenfold():
    ratio, moved = falling(lowmem.Storage(nu="sqrt", policy=EVERYTHING))
    print("sqrt(v / v_fp32), median:", ratio, "moved, of fp32:", moved)
    assert 0.9 <= ratio <= 1.1
    assert abs(moved - 1) <= 0.05


@pytest.mark.parametrize("size", [1.0, 1e-3, 3.7e-5])
def test_constant_gradient_moves_by_the_learning_rate(size):
    """Step 6000: |update| / lr in [0.95, 1.05] for every element."""
    sign = np.where(np.arange(2048) % 3, 1, -1)
    g = jnp.asarray(size * sign, jnp.float32)
    tx = lowmem.flash_adamw(1e-3, weight_decay=0.0, storage=lowmem.Storage(policy=EVERYTHING))

    @loop
    def run(p):
        def body(_, carry):
            updates, state = tx.update(g, carry[1], p)
            return updates, state

        return jax.lax.fori_loop(0, 6000, body, (jnp.zeros_like(p), tx.init(p)))[0]

    moved = np.abs(np.asarray(run(jnp.zeros(2048)))) / 1e-3
    print("constant gradient: |update| / lr from", moved.min(), "to", moved.max())
    assert 0.95 <= moved.min() and moved.max() <= 1.05
