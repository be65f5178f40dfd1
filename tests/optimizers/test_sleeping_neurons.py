"""A neuron that sleeps beside live ones: its m decays, or its shrinking v makes its steps grow."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lowmem as lowmem
from tests.tiers import rows

RATE, STEPS = 1e-3, 400
PLAIN = lowmem.adam_mini
BLOCKS = lowmem.blocks.Structure(default="whole")


def drift(make, **options):
    """Largest change of the sleeping neurons' weights, in learning rates."""
    tx = make(RATE, b2=0.95, weight_decay=0.0, blocks=BLOCKS, **options)
    rng = np.random.default_rng(0)
    params = {"up_proj": {"kernel": jnp.asarray(rng.normal(0, 0.02, (32, 256)), jnp.float32)}}
    asleep = np.arange(256) % 4 == 0  # in every group

    @jax.jit
    def run(params, state, grads):
        def step(carry, g):
            params, state = carry
            return lowmem.step(tx, {"up_proj": {"kernel": g}}, state, params), None

        return jax.lax.scan(step, (params, state), grads)[0]

    grads = rng.normal(0, 1e-3, (STEPS, 32, 256)).astype(np.float32)
    grads[10:, :, asleep] = 0
    params, state = run(params, tx.init(params), jnp.asarray(grads[:10]))
    after, _ = run(params, state, jnp.asarray(grads[10:]))
    change = np.asarray(after["up_proj"]["kernel"] - params["up_proj"]["kernel"])
    return np.abs(change[:, asleep]).max() / RATE


@pytest.mark.parametrize("make", rows([lowmem.q_adam_mini, lowmem.flash_adam_mini], []))
def test_it_goes_where_f32_takes_it(make):
    """Within the noise of rounding; the same with nearest rounding runs away."""
    exact, ours = drift(PLAIN), drift(make)
    default = make(RATE, blocks=BLOCKS).engine.storage
    nearest = drift(make, storage=dataclasses.replace(default, rounding="nearest"))
    assert exact < 30
    assert ours < 10 * exact
    assert nearest > 30 * exact
