"""Stochastic rounding of 24-bit master weights: what adds up, what stays, which bits are drawn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import codecs
from optax_lowmem._src.arrays import random
from optax_lowmem._src.optim.step import MASTER, split_update
from tests.oracle import split as oracle
from tests.tiers import in_turn, rows

BF16, F16 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)
FORMS = [("bits-24", BF16), ("ulp-24", BF16), ("ulp-24", F16)]
KEY = random.leaf_key(jnp.uint32(0), jnp.int32(1), "w")


def draws(shape, key=KEY):
    return random.leaf_bits(key, shape, 32, MASTER)


@functools.partial(jax.jit, static_argnums=(0, 2))
def rounded(split, w, dtype, noise):
    """Weight, correction and what they join as."""
    p, c = split.split(w, dtype, noise)
    return p, c, split.join(p, c)


def test_as_the_oracle_and_nothing_overflows():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 2**16, dtype=np.uint32)
    edges = [0, 0x7F800000, 0x7FC00000, 0x7FFFFFFF, 0x7F7FFFFF, 0x7F7F7FFF, 0x7F7EFFFF, 1, 0xFF]
    bits[: 2 * 9 * 512] = np.tile(np.uint32([*edges, *(x | 1 << 31 for x in edges)]), 512)
    w, noise = bits.view(np.float32), draws(bits.shape)
    p, c, joined = map(np.asarray, rounded(codecs.SPLITS["bits-24"], w, BF16, noise))
    want_p, want_c = oracle.split_bits(w, 24, np.asarray(noise) >> 24)
    np.testing.assert_array_equal(p.view(np.uint16), want_p.view(np.uint16))
    np.testing.assert_array_equal(c, want_c)
    np.testing.assert_array_equal(np.isfinite(joined), np.isfinite(w))
    below = np.abs(w) < 2.0**127 * (2 - 2.0**-8)  # where bf16 itself rounds to infinity
    assert np.isfinite(p.astype(np.float32))[below].all()


@pytest.mark.parametrize("name,dtype", FORMS)
def test_what_is_kept_exactly_stays_under_any_noise(name, dtype):
    """A step of 0 moves no bit: of sampled weights, -0.0 and NaN too, with every correction."""
    split = codecs.SPLITS[name]
    info = jnp.finfo(dtype)
    edges = [0x8000, 0x7F80, 0xFF80, 0x7FC0]  # -0.0, infinities, NaN
    p = np.r_[np.arange(0, 2**16, 7 if name == "bits-24" else 37), edges].astype(np.uint16)
    p = p.view(dtype)
    if name != "bits-24":  # XLA's CPU has no subnormals, and Algorithm 1 no signed zero
        p = p[np.abs(np.float32(p)) >= max(float(info.tiny), 2.0**-100)]
        p = p[np.isfinite(np.float32(p))]
    c = np.arange(256, dtype=np.uint8)
    if name != "bits-24":  # half way between two weights it may be a correction of the other
        c = c[np.abs(np.int32(c) - split.zero) < split.zero - 1]
    c = c.view(split.dtype)
    p, c = (np.array(x) for x in np.broadcast_arrays(p[:, None], c[None]))
    w = np.asarray(jax.jit(split.join)(p, c))
    q, d, again = map(np.asarray, rounded(split, w, dtype, draws(w.shape)))
    nearest_q, nearest_d, _ = map(np.asarray, rounded(split, w, dtype, None))
    np.testing.assert_array_equal(q.view(np.uint16), nearest_q.view(np.uint16))
    np.testing.assert_array_equal(d, nearest_d)
    number = ~np.isnan(w)
    np.testing.assert_array_equal(again[number].view(np.uint32), w[number].view(np.uint32))


@pytest.mark.parametrize("name,dtype", FORMS)
def test_the_mean_of_a_step_is_the_step(name, dtype):
    """From 2^-22 of the weight up: within 4 standard errors, which are 2 % of the step at most."""
    split = codecs.SPLITS[name]

    @jax.jit
    def land(p, step, c, noise):
        update, c = split_update(split, p, step, c, jnp.dtype(jnp.float32), noise)
        return split.join(optax.apply_updates(p, update), c)

    w = np.float32(np.random.default_rng(1).uniform(1, 2, 2**20))
    p, c, old = rounded(split, w, dtype, None)
    old, noise = np.float64(old), draws(w.shape)
    for exponent in (-22, -20, -17, -15, -11):
        for sign in (1, -1):
            step = np.float32(sign * 1.37 * 2.0**exponent * old)
            share = (old - np.float64(land(p, step, c, noise))) / np.float64(step)
            error = share.std() / np.sqrt(share.size)
            assert error < 0.02, (exponent, sign, error)
            assert abs(share.mean() - 1) < 4 * error, (exponent, sign, share.mean(), error)


@pytest.mark.parametrize(
    "kind, bits, direct",
    in_turn([(BF16, "bits"), (BF16, "ulp"), (jnp.float16, "ulp")], [24, 32], [True, False]),
)
def test_no_bit_moves_at_rate_0(kind, bits, direct):
    dtype, split = kind
    """Neither do weights whose correction puts their master on a tie of two 16-bit weights."""
    w = np.random.default_rng(2).normal(size=(16, 2048)).astype(np.float32)
    for update_dtype in ("float32", "param"):
        storage = lowmem.Storage(
            master_weight_bits=bits, split=split, mu=None, update_dtype=update_dtype
        )
        tx = lowmem.flash_sgd(0.0, storage=storage)
        params, state = lowmem.init(tx, {"w": jnp.asarray(w)}, dtype)
        if direct:
            new, after = jax.jit(functools.partial(lowmem.step, tx))(params, state, params)
        else:
            updates, after = jax.jit(tx.update)(params, state, params)
            new = optax.apply_updates(params, updates)
        same = np.testing.assert_array_equal
        same(np.asarray(new["w"]).view(np.uint16), np.asarray(params["w"]).view(np.uint16))
        same(after.correction["w"], state.correction["w"])


# -- many steps ------------------------------------------------------------------------------------
def displacement(tx, steps, mean, deviation, dtype=BF16):
    """Measure the mean change of 1024 weights of 1 after `steps` steps, in one program."""
    params, state = lowmem.init(tx, {"w": jnp.ones(1024)}, dtype)

    def one(carry, index):
        key = random.leaf_key(jnp.uint32(7), index, "gradient")
        uniform = random.uniforms(key, (1024,), 32)
        g = mean + deviation * 12.0**0.5 * (uniform - 0.5)
        return lowmem.step(tx, {"w": g}, carry[1], carry[0]), None

    run = jax.jit(lambda carry: jax.lax.scan(one, carry, jnp.arange(steps))[0])
    masters = lowmem.master_params(*run((params, state)))["w"]
    return float(np.float64(masters).mean()) - 1


TABLE = {  # rate, decay, mean and deviation of the gradients, steps
    "5e-6": (5e-6, 0.0, 0.3, 1.0, 3_000),
    "1e-5": (1e-5, 0.0, 0.3, 1.0, 3_000),
    "one sign": (1e-5, 0.0, 1.0, 0.0, 3_000),
    "decay 0.01": (3e-4, 0.01, 0.0, 0.0, 10_000),
    "decay 0.1": (1e-4, 0.1, 0.0, 0.0, 10_000),
    "cosine": (optax.cosine_decay_schedule(1e-5, 3_000), 0.0, 0.3, 1.0, 3_000),
}


@pytest.mark.parametrize("kind", rows(TABLE, ["5e-6", "one sign"]))
def test_small_steps_add_up_as_in_f32(kind):
    rate, decay, mean, deviation, steps = TABLE[kind]
    f32 = displacement(optax.adamw(rate, weight_decay=decay), steps, mean, deviation, jnp.float32)
    tx = lowmem.flash_adamw(rate, weight_decay=decay)
    assert displacement(tx, steps, mean, deviation) == pytest.approx(f32, rel=0.02)


def test_nearest_masters_lose_them():
    """The control."""
    rate, decay, mean, deviation, steps = TABLE["5e-6"]
    storage = lowmem.Storage(master_rounding="nearest")
    tx = lowmem.flash_adamw(rate, weight_decay=decay, storage=storage)
    assert displacement(tx, steps, mean, deviation) == 0


def test_bits_are_uniform_and_those_of_neighbours_and_slots_independent():
    """Over keys: any byte as often as any other, and no correlation of two draws."""
    keys = random.leaf_keys(jnp.uint32(3), jnp.int32(1), [f"leaf {i}" for i in range(2**12)])
    drawn = {
        slot: np.asarray(
            jax.vmap(lambda key, slot=slot: random.leaf_bits(key, (2, 40), 32, slot) >> 24)(keys)
        ).reshape(len(keys), -1)
        for slot in (MASTER, "mu", "nu")
    }
    masters = drawn[MASTER]
    counts = np.bincount(masters.ravel(), minlength=256)
    expected = masters.size / 256
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * np.sqrt(2 * 255)
    centred = {slot: bits - bits.mean(0) for slot, bits in drawn.items()}
    bound = 6 / np.sqrt(len(keys))
    for slot, other in centred.items():
        products = centred[MASTER].T @ other / len(keys) / (256**2 / 12)
        if slot == MASTER:
            products -= np.diag(np.diag(products))
        assert np.abs(products).max() < bound, slot


# -- which bits ------------------------------------------------------------------------------------
def test_fused_and_composed_optimizers_draw_the_same_bits():
    """Lion, whose steps are the same numbers: weights and corrections agree bit for bit."""
    storage = lowmem.Storage(mu=None, group_size=16, seed=5)
    fused = lowmem.flash_lion(2.0**-20, b1=0.0, b2=0.0, storage=storage)
    composed = lowmem.split_master_weights(
        optax.lion(2.0**-20, b1=0.0, b2=0.0, weight_decay=0.0), seed=5, group_size=16
    )
    rng = np.random.default_rng(0)
    tree = {"w": rng.normal(size=(3, 40)), "b": rng.normal(size=7), "s": rng.normal(size=())}
    tree = jax.tree.map(np.float32, tree)
    both = {}
    for name, tx in (("fused", fused), ("composed", composed)):
        params, state = lowmem.init(tx, tree)
        step = jax.jit(functools.partial(lowmem.step, tx))
        for _ in range(3):
            params, state = step(tree, state, params)
        both[name] = jax.tree.map(np.asarray, (params, state.correction))
    jax.tree.map(np.testing.assert_array_equal, both["fused"], both["composed"])


@pytest.mark.parametrize(
    "made",
    [lambda **own: lowmem.split_master_weights(optax.sgd(1.0), **own),
     lambda **own: lowmem.Storage(**{f"master_{k}": v for k, v in own.items()})],
)  # fmt: skip
def test_other_roundings_are_refused(made):
    with pytest.raises(ValueError, match="rounding must be one of stochastic, nearest(, None)?,"):
        made(rounding="up")
