"""Shares of codes, the largest step, and weights that a learning rate cannot move."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import Storage, codecs, diagnostics


def state_with(mu, nu):
    """The state of an optimizer whose codes are replaced."""
    tx = lowmem.flash_adamw(1e-3)
    state = tx.init({"w": jnp.ones((64, 64), jnp.bfloat16), "b": jnp.ones((64,), jnp.bfloat16)})
    return state._replace(mu={**state.mu, "w": mu}, nu={**state.nu, "w": nu})


def test_code_shares():
    mu = jnp.zeros((64, 64), jnp.int8).at[0, :32].set(127).at[1, :16].set(-127).at[2].set(1)
    nu = jnp.full((64, 64), 9, jnp.uint8).at[:8].set(0).at[8:12].set(1).at[63, 0].set(255)
    for read in (diagnostics.code_shares, jax.jit(diagnostics.code_shares)):
        shares = read(state_with(mu, nu))
        assert {slot: list(leaves) for slot, leaves in shares.items()} == {"mu": ["w"], "nu": ["w"]}
        first, second = shares["mu"]["w"], shares["nu"]["w"]
        assert (first.saturated, first.floored) == (48 / 4096, 0)
        assert first.zero == 1 - (48 + 64) / 4096
        assert (second.saturated, second.zero, second.floored) == (1 / 4096, 8 / 64, 4 / 64)


@pytest.mark.parametrize("slot", ["mu", pytest.param("nu", marks=pytest.mark.full)])
def test_code_shares_of_two_codes_in_a_byte(slot):
    """Of an odd axis, whose last byte has one; only the optimizer can tell."""
    four, policy = codecs.linear4(signed=slot == "mu"), lowmem.Policy(min_size=0)
    one = Storage(mu=None, nu=None, policy=policy)
    tx = lowmem.flash_adamw(1e-3, storage=dataclasses.replace(one, **{slot: four}))
    params = {"w": jnp.ones((10, 33), jnp.bfloat16)}
    codes = jnp.zeros((10, 33), four.dtype).at[0].set(four.levels).at[1, :11].set(1)
    state = tx.init(params)._replace(**{slot: {"w": four.pack(codes)}})
    found = jax.jit(lambda s: diagnostics.code_shares(s, tx, params))(state)[slot]["w"]
    assert float(found.saturated) == pytest.approx(33 / 330)
    assert float(found.zero) == pytest.approx((330 - 44) / 330)
    assert float(found.floored) == pytest.approx(0 if slot == "mu" else 11 / 330)
    for read in (diagnostics.code_shares, lambda s: diagnostics.code_shares(s, None, params)):
        with pytest.raises(ValueError, match=rf"'{slot}' of 'w', uint8\[10, 17\], has several"):
            read(state)


def test_code_shares_through_wrappers():
    inner = lowmem.accumulate_gradients(lowmem.flash_lion(1e-3), 2, "bfloat16")
    tx = lowmem.chain(optax.clip(1.0), inner)
    state = tx.init({"w": jnp.ones((64, 64), jnp.bfloat16)})
    assert diagnostics.code_shares(state)["mu"]["w"].zero == 1
    assert diagnostics.code_shares(optax.adamw(1e-3).init({"w": jnp.ones((64, 64))})) == {}


def test_code_shares_of_what_it_cannot_read():
    """Packed codes, those of another library, and two states of one leaf."""
    packed = state_with(jnp.zeros((64, 1), jnp.int8), jnp.zeros((64, 64), jnp.uint8))
    with pytest.raises(ValueError, match=r"'mu' of 'w' is int8\[64, 1\] with scales"):
        diagnostics.code_shares(packed)
    foreign = optax.ScaleByAdamState(jnp.zeros(()), {"w": jnp.zeros((64,), jnp.int8)}, {})
    with pytest.raises(ValueError, match=r"'mu' of 'w' is int8\[64\] with no scales"):
        diagnostics.code_shares(foreign)
    state = lowmem.flash_lion(1e-3).init({"w": jnp.ones((64, 64))})
    with pytest.raises(ValueError, match="two states here have a slot 'mu' of 'w'"):
        diagnostics.code_shares((state, state))


@pytest.mark.parametrize(
    ("tx", "size"),
    [
        (lowmem.flash_adamw(1e-2, weight_decay=0.0), 1.0),
        (lowmem.flash_lion(1e-2, weight_decay=0.0), 1.0),
        (lowmem.flash_sgd(1e-2), 0.25),
    ],
    ids=["adamw", "lion", "sgd"],
)
def test_largest_step(tx, size):
    params, state = lowmem.init(tx, {"w": jnp.zeros((64, 64)), "b": jnp.zeros((8,))})
    grads = jax.tree.map(lambda p: jnp.full(p.shape, -0.25, jnp.float32), params)
    grads["b"] = jnp.zeros((8,))
    new_params, new_state = lowmem.step(tx, grads, state, params)
    steps = diagnostics.largest_step(params, state, new_params, new_state, 1e-2)
    assert float(steps["w"]) == pytest.approx(size, rel=2**-14)
    assert steps["b"] == 0


def weights(dtype=jnp.bfloat16):
    row = jnp.concatenate([jnp.full((32,), 8.0), jnp.full((32,), 0.01), jnp.zeros((64,))])
    return {"big": jnp.tile(row, (4, 1)).astype(dtype), "small": jnp.full((8, 8), 0.01, dtype)}


WIDTHS = [  # master_weight_bits, master_rounding, dtype, half the spacing at 8
    (24, "nearest", jnp.bfloat16, 2.0**-13),
    (24, "stochastic", jnp.bfloat16, 2.0**-21),
    (32, "stochastic", jnp.bfloat16, 2.0**-21),
    (None, "nearest", jnp.bfloat16, 2.0**-5),
    (24, "nearest", jnp.float16, 2.0**-16),
    (24, "stochastic", jnp.float16, 2.0**-21),
    (None, "stochastic", jnp.float32, 2.0**-21),
]


@pytest.mark.parametrize(("bits", "rounding", "dtype", "half"), WIDTHS)
def test_stalled_leaves(bits, rounding, dtype, half):
    tx = lowmem.flash_adamw(
        1e-3, storage=Storage(master_weight_bits=bits, master_rounding=rounding)
    )
    params = weights(dtype)
    (stall,) = diagnostics.stalled_leaves(tx, params, 0.99 * half, action="none")
    assert (stall.path, stall.largest, stall.half_spacing, stall.share) == ("big", 8, half, 0.25)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert diagnostics.stalled_leaves(tx, params, 1.01 * half) == []


def test_weights_that_are_rounded_stochastically_do_not_stall():
    storage = Storage(master_weight_bits=None, master_rounding="stochastic")
    tx = lowmem.flash_adamw(1e-3, storage=storage)
    assert diagnostics.stalled_leaves(tx, weights(), 2.0**-12, action="none") == []


@pytest.mark.parametrize(("bits", "rounding", "dtype", "half"), WIDTHS)
def test_stalled_weights_do_stand_still(bits, rounding, dtype, half):
    """The claim itself, of a step of plain SGD just a tenth under and over half the spacing."""
    for factor, moves in ((0.9, False), (1.1, True)):
        storage = Storage(master_weight_bits=bits, master_rounding=rounding)
        tx = lowmem.flash_sgd(factor * half, storage=storage)
        params, state = lowmem.init(tx, weights(jnp.float32), dtype)
        before = lowmem.master_params(params, state)["big"][:, :32]
        grads = jax.tree.map(lambda p: jnp.full(p.shape, -1, jnp.float32), params)
        params, state = lowmem.step(tx, grads, state, params)
        after = lowmem.master_params(params, state)["big"][:, :32]
        moved = after != before
        if moves and bits == 24 and rounding == "stochastic":
            assert not bool(jnp.all(moved))  # one in hundreds; what adds up: test_master_rounding
        else:
            assert bool(jnp.all(moved == moves))


def test_stalled_leaves_speak():
    tx = lowmem.flash_adamw(1e-3, storage=Storage(master_rounding="nearest"))
    message = r"step of 1e-06 cannot move .* big \(25\.0% of its weights\): use .*bits=32\)"
    with pytest.warns(UserWarning, match=message):
        diagnostics.stalled_leaves(tx, weights(), 1e-6, action="warn")
    for _ in range(2):  # the second time too, when JAX has traced tx.init before
        with pytest.raises(ValueError, match=message):
            diagnostics.stalled_leaves(tx, weights(), 1e-6, action="raise")
    with pytest.raises(ValueError, match="action must be one of warn, raise, none, got 'stop'"):
        diagnostics.stalled_leaves(tx, weights(), 1e-6, action="stop")
