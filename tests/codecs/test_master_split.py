"""Splits of f32 master weights, exhaustively on bits, and what lands through optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optax_lowmem as lowmem
from optax_lowmem import codecs
from optax_lowmem._src.optim.step import split_update
from tests import tolerances as tol
from tests.oracle import split as oracle
from tests.tiers import in_turn

BF16, F16 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)
FORMS = [("bits-24", BF16), ("bits-32", BF16), ("ulp-24", BF16), ("ulp-32", BF16)]
FORMS += [("ulp-24", F16), ("ulp-32", F16)]
EVERY_P = np.arange(2**16, dtype=np.uint16)


def bits_of(x):
    width = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return lax.bitcast_convert_type(x, width)


def f32(bits):
    return lax.bitcast_convert_type(jnp.asarray(bits, jnp.uint32), jnp.float32)


def bf16(bits):
    return lax.bitcast_convert_type(jnp.asarray(bits, jnp.uint16), jnp.bfloat16)


def canonical(p, c):
    """Return whether `split` can make the pair: all but three kinds that join as another pair.

    p = +-0 with c < 0 (counts as c = 0); p = +-inf with c > 0 and NaNs but (0x7fc0, 0), which are
    NaN. p = +-inf with c < 0 is a finite weight over bf16's largest.
    """
    magnitude = p & 0x7FFF
    zero = (magnitude == 0) & (c < 0)
    nan = ((magnitude == 0x7F80) & (c > 0)) | ((magnitude > 0x7F80) & ~((p == 0x7FC0) & (c == 0)))
    return ~zero & ~nan


@functools.partial(jax.jit, static_argnums=0)
def again(split, p, c):
    """Bits of the pair after join and split, of the joined weight, and of it joined again."""
    w = split.join(bf16(p), c)
    q, d = split.split(w, BF16)
    return bits_of(q), d, bits_of(w), bits_of(split.join(q, d))


def check_pairs(split, corrections):
    c = jnp.asarray(corrections, split.dtype)
    q, d, w, w_again = again(split, jnp.asarray(EVERY_P)[:, None], c[None])
    p, c = EVERY_P[:, None], np.asarray(c)[None]
    known = canonical(p, c)
    np.testing.assert_array_equal(((np.asarray(q) == p) & (np.asarray(d) == c)), known)
    # what is not canonical joins to the same weight as its canonical form, NaN as NaN
    w, w_again = np.asarray(w), np.asarray(w_again)
    nan = (w & 0x7FFFFFFF) > 0x7F800000
    np.testing.assert_array_equal(w_again[~nan], w[~nan])
    assert (w_again[nan] == 0x7FC00000).all()
    np.testing.assert_array_equal(nan, ~known & ((p & 0x7FFF) != 0) | (p == 0x7FC0) & (c == 0))


def test_every_bf16_with_every_int8_correction_is_idempotent():
    check_pairs(codecs.SPLITS["bits-24"], np.arange(-128, 128))


def test_every_bf16_with_sampled_int16_corrections_is_idempotent():
    edges = [-32768, -32767, -1, 0, 1, 32766, 32767]
    drawn = np.random.default_rng(1).integers(-32768, 32768, 57)
    check_pairs(codecs.SPLITS["bits-32"], np.concatenate([edges, drawn]))


def sweep(samples, seed=0):
    """f32 bits with every upper half (or an even sample of them), lower bits hashed."""
    i = np.arange(samples, dtype=np.uint64)
    low = (i * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)) >> np.uint64(40)
    return ((i * np.uint64(2**32 // samples)) | (low % np.uint64(2**32 // samples))).astype(
        np.uint32
    )


@functools.partial(jax.jit, static_argnums=(0, 2))
def rebuilt(split, bits, dtype):
    p, c = split.split(f32(bits), dtype)
    return bits_of(split.join(p, c)), bits_of(p)


def test_32_bits_return_every_sampled_finite_float_bit_for_bit():
    bits = sweep(2**24)
    back = np.asarray(rebuilt(codecs.SPLITS["bits-32"], bits, BF16)[0])
    finite = (bits & 0x7FFFFFFF) < 0x7F800000
    assert finite.mean() > 0.99
    assert (back == bits)[finite].all()
    assert (back[~finite & (bits & 0x7FFFFF != 0)] == 0x7FC00000).all()


@pytest.mark.parametrize("name,dtype", FORMS)
def test_all_of_exponent_255_keeps_nan_nan_and_inf_inf(name, dtype):
    mantissa = np.arange(2**23, dtype=np.uint32)
    for sign in (0, 0x80000000):
        back, p = rebuilt(codecs.SPLITS[name], mantissa | np.uint32(0x7F800000 | sign), dtype)
        back, p = np.asarray(back), np.asarray(p) & 0x7FFF
        infinity = 0x7F80 if dtype == BF16 else 0x7C00
        assert back[0] == 0x7F800000 | sign and p[0] == infinity
        assert ((back[1:] & 0x7FFFFFFF) > 0x7F800000).all() and (p[1:] > infinity).all()


def test_24_bits_are_within_a_relative_2_to_the_minus_16():
    bits = sweep(2**22, seed=1)
    exponent = (bits >> 23) & 0xFF
    bits = bits[(exponent > 0) & (exponent < 255)]
    back = np.asarray(rebuilt(codecs.SPLITS["bits-24"], bits, BF16)[0])
    w = np.float64(bits.view(np.float32))
    # a weight within 2^-17 of f32's end rounds to inf, as it would to bf16
    inside = np.abs(w) < 2.0**128 * (1 - 2.0**-17)
    error = np.abs(np.float64(back.view(np.float32))[inside] / w[inside] - 1)
    assert error.max() <= tol.MASTER_24_MAX and error.mean() <= tol.MASTER_24_MEAN
    assert error.max() > 0.99 * tol.MASTER_24_MAX


def test_24_bit_ties_go_to_even():
    split = codecs.master_split(BF16, 24)
    halves = np.uint32([0x3F800080, 0x3F800180, 0xBF800080, 0xBF800180, 0x3F80FF80, 0x3F807F80])
    even = np.uint32([0x3F800000, 0x3F800200, 0xBF800000, 0xBF800200, 0x3F810000, 0x3F808000])
    joined = split.join(*split.split(f32(halves), BF16))
    np.testing.assert_array_equal(bits_of(joined), even)


@pytest.mark.parametrize("exponent", range(-14, 16))
def test_fp16_weights(exponent):
    """In fp16's normal range 24 bits are within 1e-6 in the mean, 32 bits exact."""
    w = oracle.weights_of_exponent(exponent, 2**16)
    w = np.concatenate([w, -w])
    w = w[np.abs(w) < 65520]  # what rounds to fp16's largest, or under it
    back, _ = rebuilt(codecs.SPLITS["ulp-24"], w.view(np.uint32), F16)
    error = np.abs(np.float64(np.asarray(back).view(np.float32)) / np.float64(w) - 1)
    assert error.mean() < tol.FP16_24_MEAN
    back, _ = rebuilt(codecs.SPLITS["ulp-32"], w.view(np.uint32), F16)
    np.testing.assert_array_equal(back, w.view(np.uint32))


@pytest.mark.parametrize("bits", [24, 32])
def test_fp16_subnormal_weights(bits):
    """Under 6.1e-5 the spacing of fp16 is fixed: the master keeps 2^-25 / 127 (32767)."""
    split = codecs.SPLITS[f"ulp-{bits}"]
    w = np.float32([[1], [-1]] * np.linspace(0, 2.0**-14, 4097)).ravel()
    w = np.concatenate([w, np.float32(np.random.default_rng(5).normal(size=4096) * 1e-5)])
    p, c = jax.jit(split.split, static_argnums=1)(w, F16)
    np.testing.assert_array_equal(
        np.asarray(p).view(np.uint16), w.astype(np.float16).view(np.uint16)
    )
    back = np.float64(jax.jit(split.join)(p, c))
    step = 2.0**-25 / (split.zero - 1)
    assert (np.abs(back - w) <= 0.51 * step + 2.0**-24 * np.abs(w)).all()


@pytest.mark.parametrize("bits", [24, 32])
@pytest.mark.parametrize("fmt", ["bfloat16", "float16"])
def test_ulp_split_is_algorithm_1(fmt, bits):
    split, rng = codecs.SPLITS[f"ulp-{bits}"], np.random.default_rng(2)
    low, high = (-126, 120) if fmt == "bfloat16" else (-14, 15)
    size = 2.0 ** rng.integers(low, high, 2**16)
    w = np.float32(rng.choice([-1, 1], 2**16) * rng.uniform(1, 2, 2**16) * size)
    w = np.concatenate([w, np.float32([0.0, -0.0, 1.0, -1.5])])
    p, c = jax.jit(split.split, static_argnums=1)(w, jnp.dtype(fmt))
    want_p, want_c = oracle.split_ulp(w, fmt, bits)
    np.testing.assert_array_equal(np.asarray(p).view(np.uint16), want_p.view(np.uint16))
    off = np.abs(np.int32(c) - split.zero - np.int32(want_c))
    assert off.max() <= 1 and off.mean() <= tol.ULP_TIES[bits]
    joined = np.asarray(jax.jit(split.join)(p, c))
    want = oracle.join_ulp(want_p, np.int32(c) - split.zero, fmt, bits)
    np.testing.assert_allclose(joined, want, rtol=2.0**-23)


# -- landing ---------------------------------------------------------------------------------------
def test_zero_update_leaves_every_pair_alone():
    """Every bf16 weight but subnormal ones (optax's addition flushes those) x every correction."""
    split = codecs.SPLITS["bits-24"]

    @jax.jit
    def still(p, c):
        weight = bf16(p)
        update, d = split_update(split, weight, jnp.float32(0), c, jnp.dtype(jnp.float32))
        return bits_of(optax.apply_updates(weight, update)), d

    magnitude = EVERY_P & 0x7FFF
    normal = (magnitude == 0) | ((magnitude >= 0x0080) & (magnitude < 0x7F80))
    p = jnp.asarray(EVERY_P[normal])[:, None]
    c = jnp.arange(-128, 128, dtype=jnp.int8)[None]
    p, c = (np.array(x) for x in jnp.broadcast_arrays(p, c))
    known = canonical(p, c)
    q, d = (np.asarray(x) for x in still(p[known], c[known]))
    np.testing.assert_array_equal(q, p[known])
    np.testing.assert_array_equal(d, c[known])


@pytest.mark.parametrize("form,update_dtype", in_turn(FORMS, ["float32", "param"]))
def test_learning_rate_zero_leaves_weights_and_corrections_alone(form, update_dtype):
    name, dtype = form
    scheme, bits = name.split("-")
    zero = codecs.SPLITS[name].zero
    storage = lowmem.Storage(int(bits), split=scheme, update_dtype=update_dtype)
    tx = lowmem.flash_adamw(0.0, weight_decay=0.1, storage=storage)
    w = np.random.default_rng(3).normal(size=(64, 256)).astype(np.float32)
    w[0, :4] = [0.0, -0.0 if scheme == "bits" else 2.0, 1.0, 2.0**-14]  # p + 0 loses ulp's -0.0
    params, state = lowmem.init(tx, {"w": w}, dtype)
    step = jax.jit(functools.partial(lowmem.step, tx))
    after, then = params, state
    for _ in range(3):
        after, then = step({"w": jnp.asarray(w)}, then, after)
    masters = [lowmem.master_params(*pair)["w"] for pair in ((params, state), (after, then))]
    np.testing.assert_array_equal(*(bits_of(master) for master in masters))
    # Algorithm 1 may move a master half way between two weights from one to the other
    tied = np.asarray(scheme == "ulp") & (
        np.abs(np.int32(state.correction["w"]) - zero) == zero - 1
    )
    assert tied.mean() < 0.02
    for new, old in [(bits_of(after["w"]), bits_of(params["w"])),
                     (then.correction["w"], state.correction["w"])]:  # fmt: skip
        off = np.abs(np.int32(new) - np.int32(old))[~tied]
        # 1/32767 of half a bf16 ulp is under f32's spacing next to a power of two
        assert off.max() <= (1 if (name, dtype) == ("ulp-32", BF16) else 0)
    np.testing.assert_array_equal(bits_of(after["w"])[~tied], bits_of(params["w"])[~tied])
    assert np.asarray(then.mu["w"]).any()


def relative_steps(rng, w):
    """Steps of 2^-30 to 8 times the weight, and steps that leave 2^-10 to 2^-24 of it."""
    n = w.size // 2
    small = w[:n] * 2.0 ** rng.uniform(-30, 3, n) * rng.choice([-1, 1], n)
    left = w[n:] * (1 - 2.0 ** rng.uniform(-24, -10, n) * rng.choice([-1, 1], n))
    return np.float32(np.concatenate([small, left]))


@pytest.mark.parametrize("form,update_dtype", in_turn(FORMS, ["float32", "param"]))
def test_the_correction_is_of_what_apply_updates_produces(form, update_dtype):
    name, dtype = form
    split, rng = codecs.SPLITS[name], np.random.default_rng(4)
    kind = jnp.dtype(jnp.float32) if update_dtype == "float32" else dtype
    spread = 8 if dtype == F16 else 60
    w = np.float32(rng.normal(size=2**16) * 2.0 ** rng.uniform(-spread / 2, spread / 2, 2**16))
    p, c = jax.jit(split.split, static_argnums=1)(w, dtype)
    step = relative_steps(rng, w)

    @jax.jit
    def landing(p, step, c):
        update, c = split_update(split, p, step, c, kind)
        return update, c, optax.apply_updates(p, update), split.join(p, c)

    update, c_new, p_new, _ = landing(p, step, c)
    apart = jax.jit(optax.apply_updates)(p, update)  # in a program of its own
    np.testing.assert_array_equal(bits_of(apart), bits_of(p_new))
    np.testing.assert_array_equal(bits_of(optax.apply_updates(p, update)), bits_of(p_new))
    master = np.asarray(jax.jit(lambda p, c, step: split.join(p, c) - step)(p, c, step))
    joined = np.float64(jax.jit(split.join)(p_new, c_new))
    # p_new is at most `gap` away; a correction reaches half an ulp of p_new
    gap = np.abs(np.float64(np.float32(p_new)) - master)
    fmt = "bfloat16" if dtype == BF16 else "float16"
    half_ulp = 2.0 ** (oracle.ulp_exponent(np.asarray(p_new), fmt) - 1)
    # under a power of two the spacing halves, and the integer scheme's reach with it
    reach = np.where(np.float64(np.float32(p_new)) == 0, 0, half_ulp / 2)
    missed = np.maximum(gap - reach, 0)
    step_of = half_ulp / (127 if split.bits == 24 else 32767)
    old = np.abs(np.float64(np.float32(p)))
    bound = missed + step_of + 2.0**-23 * np.abs(master)
    if isinstance(split, codecs.BitSplit):
        bound += np.where(np.abs(master) < tol.LANDS[fmt] * old, tol.MISSED * old, 0)
    assert (np.abs(joined - master) <= bound).all()
    unmoved = master == np.asarray(jax.jit(split.join)(p, c))
    np.testing.assert_array_equal(bits_of(p_new)[unmoved], bits_of(p)[unmoved])
    np.testing.assert_array_equal(np.asarray(c_new)[unmoved], np.asarray(c)[unmoved])
    if update_dtype == "float32":
        rounded = split.round(jnp.asarray(master), dtype)
        exact_p = np.float64(np.float32(rounded))
        lands = np.abs(exact_p) >= tol.LANDS[fmt] * old
        assert 0.5 < lands.mean() < 0.95
        lands &= ~unmoved
        np.testing.assert_array_equal(np.float64(np.float32(p_new))[lands], exact_p[lands])
        kept = jax.jit(split.split, static_argnums=1)(master, dtype)
        np.testing.assert_array_equal(np.asarray(c_new)[lands], np.asarray(kept[1])[lands])
