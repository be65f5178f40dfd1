"""Wrappers of optax, one inside another, around an optimizer of 16-bit weights."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lowmem as lowmem
from tests.contract_cases import assert_same, skip_old_multi_steps
from tests.tiers import in_turn

PARAMS = {"w": jnp.linspace(-1, 1, 64 * 64).reshape(64, 64), "b": jnp.ones(8)}
WRAPPERS = {
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, lambda step, **_: step < 3),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "skips": lambda tx: optax.MultiSteps(
        tx, 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "masked": lambda tx: optax.masked(tx, True),
    "clipped": lambda tx: optax.chain(optax.clip(1.0), tx),
}


def made(outer, inner, update_dtype):
    storage = lowmem.Storage(update_dtype=update_dtype)
    return WRAPPERS[outer](WRAPPERS[inner](lowmem.flash_adamw(1e-2, storage=storage)))


def gradients(dtype):
    return jax.tree.map(lambda p: (p + 0.1).astype(dtype), PARAMS)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("outer, inner", in_turn(WRAPPERS, [*WRAPPERS][1:] + [*WRAPPERS][:1]))
def test_updates_in_the_dtype_of_gradients_pass_every_pair(outer, inner, dtype):
    """By `update` and by `step`; f32 updates, the default, pass with f32 gradients."""
    if {outer, inner} & {"MultiSteps", "skips"}:
        skip_old_multi_steps()
    for update_dtype in ["gradient", "float32"][: 2 if dtype == jnp.float32 else 1]:
        tx = made(outer, inner, update_dtype)

        def both(grads, tx=tx):
            params, state = lowmem.init(tx, PARAMS)
            return params, tx.update(grads, state, params), lowmem.step(tx, grads, state, params)

        params, (updates, _), (new, _) = jax.eval_shape(both, gradients(dtype))
        wanted = {name: p.dtype if dtype == p.dtype else jnp.float32 for name, p in params.items()}
        assert {name: u.dtype for name, u in updates.items()} == wanted
        assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, params)


@pytest.mark.parametrize("outer, inner", [("MultiSteps", "apply_if_finite"), ("clipped", "masked")])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_framework_adds_what_step_adds(outer, inner, dtype):
    """Bits of weights and corrections after five steps."""
    tx = made(outer, inner, "gradient")
    params, state = lowmem.init(tx, PARAMS)
    ours, theirs = (params, state), (params, state)
    step = jax.jit(functools.partial(lowmem.step, tx))

    @jax.jit
    def add(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(5):
        ours = step(gradients(dtype), *reversed(ours))
        theirs = add(gradients(dtype), *reversed(theirs))
    assert_same(ours[0], theirs[0])
    assert_same(*(lowmem.master_params(*pair) for pair in (ours, theirs)))
    assert bool(jnp.any(ours[0]["w"] != params["w"]))


def test_the_error_names_the_option():
    tx = made("MultiSteps", "apply_if_finite", "float32")
    params, state = lowmem.init(tx, PARAMS)
    with pytest.raises(TypeError) as error:
        lowmem.step(tx, gradients(jnp.bfloat16), state, params)
    assert "Storage(update_dtype='gradient')" in " ".join(error.value.__notes__)
