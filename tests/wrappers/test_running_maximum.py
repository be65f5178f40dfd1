"""A running maximum in 8 bits, which stochastic rounding would let climb."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lowmem as lowmem
from optax_lowmem.codecs import sqrt


def test_it_stays_where_its_values_stay():
    tx = lowmem.compress_state(optax.amsgrad(0.1, b2=0.0), nu_max=sqrt())  # of g^2 itself
    params = {"w": jnp.zeros((64, 64))}
    grads = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)}
    step = jax.jit(lambda state: tx.update(grads, state, params)[1])
    states = [step(tx.init(params))]
    for _ in range(8):
        states.append(step(states[-1]))
    first, last = (np.asarray(optax.tree.get(s, "nu_max")["w"]) for s in (states[0], states[-1]))
    assert first.dtype == np.uint8 and len(np.unique(first)) > 100
    np.testing.assert_array_equal(last, first)
