"""Loops that add updates to the weights: by `optax.apply_updates`, or Equinox's, without a cast."""

import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import Storage
from tests.compilation import SAME_BITS
from tests.contract_cases import assert_same
from tests.tiers import in_turn, rows

PARAMS = {"w": jnp.linspace(-1, 1, 6144).reshape(48, 128), "b": jnp.ones(8), "s": jnp.float32(2)}
SOFTSIGN = {"mu": lowmem.codecs.softsign()}
MADE = {
    "flash_adamw": lambda dtype: lowmem.flash_adamw(1e-2, storage=Storage(update_dtype=dtype)),
    "flash_sgd": lambda dtype: lowmem.flash_sgd(1e-2, storage=Storage(update_dtype=dtype)),
    "split": lambda dtype: lowmem.split_master_weights(
        lowmem.compress_state(optax.adamw(1e-2), **SOFTSIGN), update_dtype=dtype
    ),
    "around": lambda dtype: optax.apply_if_finite(
        lowmem.flash_adamw(1e-2, storage=Storage(update_dtype=dtype)), 5
    ),
}


@jax.jit
def gradient(params):
    return jax.tree.map(lambda p: (p - 0.1).astype(p.dtype), params)


@pytest.mark.parametrize(
    "name, dtype", in_turn([name for name in MADE if name != "around"], ["float16", "bfloat16"])
)
def test_a_promoted_weight_is_named_with_the_cure(name, dtype):
    tx = MADE[name]("float32")  # optax's own condition refuses f32 updates of 16-bit gradients
    params, state = lowmem.init(tx, PARAMS, dtype)
    updates, state = tx.update(gradient(params), state, params)
    promoted = eqx.apply_updates(params, updates)
    assert promoted["w"].dtype == jnp.float32
    message = r"'\w' is float32, .*16-bit.*without a cast.*Storage\(update_dtype='param'\)"
    with pytest.raises(ValueError, match=message):
        tx.update(gradient(promoted), state, promoted)


@pytest.mark.parametrize(
    "name, dtype",
    rows(
        itertools.product(MADE, ["bfloat16", "float16"]),
        [("flash_sgd", "float16"), ("split", "bfloat16")],
    ),
)
def test_updates_in_the_dtype_of_the_weights(name, dtype):
    make = MADE[name]
    tx = make("param")
    params, state = lowmem.init(tx, PARAMS, dtype)
    start = lowmem.master_params(params, state)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(gradient(params), state, params)
        return optax.apply_updates(params, updates), eqx.apply_updates(params, updates), state

    for _ in range(3):
        cast, params, state = step(params, state)
        assert_same(params, cast)  # in its dtypes too
    end = lowmem.master_params(params, state)
    assert (np.abs(end["w"] - start["w"]) > 0).mean() > 0.9


FORMS = {
    "bits-24": {}, "bits-32": {"master_weight_bits": 32}, "ulp-24": {"split": "ulp"},
    "ulp-32": {"split": "ulp", "master_weight_bits": 32}, "none": {"master_weight_bits": None},
    "none-stochastic": {"master_weight_bits": None, "master_rounding": "stochastic"},
}  # fmt: skip
RATES = (2.0**-20, 2.0**-14, 2.0**-8, 0.5)  # no product with one is rounded, in either program
LONG = [
    (1000, form, dtype, update_dtype)
    for form in FORMS
    for dtype in ("bfloat16", "float16")[: 1 if form == "none-stochastic" else 2]
    for update_dtype in ("float32", "gradient")
]
SHORT = [(200, *case) for _, *case in LONG[::3]]


@pytest.mark.parametrize("steps, form, dtype, update_dtype", rows([*SHORT, *LONG], SHORT))
def test_a_framework_that_adds_updates_has_the_weights_of_step(steps, form, dtype, update_dtype):
    """Weights and corrections, bit for bit, at any rate; gradients are in 16 bits."""
    storage = Storage(update_dtype=update_dtype, **FORMS[form])

    def by_step(tx, grads, state, params):
        return lowmem.step(tx, grads, state, params)

    def by_framework(tx, grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def run(advance):
        @functools.partial(jax.jit, compiler_options=SAME_BITS)
        def trained(rate, params):
            tx = lowmem.flash_sgd(rate, storage=storage)

            def body(i, carry):
                params, state = carry
                noise = jax.random.normal(jax.random.key(i), params["w"].shape)
                grads = {"w": (params["w"] + noise).astype(dtype)}
                return advance(tx, grads, state, params)

            return jax.lax.fori_loop(0, steps, body, lowmem.init(tx, params, dtype))

        return trained

    ours, theirs = run(by_step), run(by_framework)
    start = {"w": jnp.linspace(-1, 1, 64).reshape(2, 32)}
    for rate in RATES:
        found = ours(jnp.float32(rate), start)
        assert_same(found, theirs(jnp.float32(rate), start))
        assert bool(jnp.isfinite(found[0]["w"]).all())


def test_what_updates_in_16_bits_miss():
    """Weights that a step leaves nearer to 0 than twice its length: why float32 is the default."""
    start = {"w": jax.random.normal(jax.random.key(0), (64, 256)) / 50}
    grads = {"w": jax.random.normal(jax.random.key(1), (64, 256)).astype("bfloat16")}
    masters = {}
    for update_dtype in ("float32", "gradient"):
        tx = lowmem.flash_adamw(1e-3, storage=Storage(update_dtype=update_dtype))
        params, state = lowmem.init(tx, start)
        after = jax.jit(functools.partial(lowmem.step, tx))(grads, state, params)
        masters[update_dtype] = np.float64(lowmem.master_params(*after)["w"])
    exact, found = masters.values()
    step = np.abs(exact - np.float64(start["w"]))
    missed = np.abs(found - exact) > 2.0**-15 * np.abs(exact)
    assert 0.001 < missed.mean() < 0.05
    assert (np.abs(exact) < 2 * step)[missed].all()
    assert (np.abs(found - exact) <= 2.0**-7 * step).all()
