"""Clipping by the global norm, which becomes a factor of the optimizer's gradients."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem

GRADIENT = np.float32([3.0, -4.0, 12.0])  # of norm 13
SCALES = {  # of the gradient, with a largest norm of 1
    "clipped": 1.0,
    "left as it is": 2.0**-5,
    "squares underflow": 1e-30,
    "all zero": 0.0,
    "squares overflow": 1e30,
}


def change(clip, scale, advance):
    """Return the decrease of weights of 0 in one step of gradient descent at learning rate 1."""
    params = {"w": jnp.zeros(3)}
    tx = clip(optax.clip_by_global_norm(1.0), lowmem.flash_sgd(1.0))
    grads = {"w": jnp.asarray(GRADIENT * np.float32(scale))}
    return -np.asarray(advance(tx, grads, tx.init(params), params)["w"])


def stepped(tx, grads, state, params):
    return lowmem.step(tx, grads, state, params)[0]


def updated(tx, grads, state, params):
    return tx.update(grads, state, params)[0]


@pytest.mark.parametrize("advance", [stepped, updated])
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_it_is_optaxs_clipping(scale, advance):
    advance = jax.jit(advance, static_argnums=0)
    folded = change(lowmem.chain, scale, advance)
    chex.assert_trees_all_close(folded, change(optax.chain, scale, advance), rtol=1e-6)
    if scale == SCALES["clipped"]:
        np.testing.assert_allclose(folded, GRADIENT / 13, rtol=1e-6)
    if scale in (SCALES["left as it is"], SCALES["squares underflow"]):
        np.testing.assert_array_equal(folded, GRADIENT * np.float32(scale))
