"""Stochastic rounding keeps the mean of what is decoded, not of the codes: over a grid of noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lowmem import codecs

DRAWS = 4096
NOISE = ((np.arange(DRAWS) + 0.5) / DRAWS).astype(np.float32)
# the group's maximum, small values and, where codes of softsign bend most, large ones
VALUES = np.float32([*np.linspace(1, 0.9, 31), *np.geomspace(0.9, 1e-4, 33)])
# of a gap between neighbours: the grid's, and a rounding of f32; in code space 4 to 1000 times it
BIAS = 1 / DRAWS + 2.0**-12
CODECS = {
    "softsign": codecs.softsign(), "sqrt": codecs.sqrt(), "linear": codecs.linear(),
    "dynamic": codecs.dynamic(), "e4m3": codecs.e4m3(), "e5m2": codecs.e5m2(),
}  # fmt: skip


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_the_mean_over_all_noise_is_the_value(codec):
    @jax.jit
    def decoded(x, noise):
        stored, divisor = codec.measure(x[None])
        codes = codec.quantize(x[:, None], divisor[None], noise[None])
        return codes, codec.dequantize(codes, codec.units(stored)[None])

    codes, values = (np.float64(a) for a in decoded(jnp.asarray(VALUES), jnp.asarray(NOISE)))
    gap = np.ptp(values, axis=1)
    live = codes.min(axis=1) >= 1  # an unsigned code has a floor
    assert (gap[live] > 0).sum() > 20
    assert (np.ptp(codes, axis=1) <= 1).all()
    assert (np.abs(values.mean(axis=1) - VALUES) <= gap * BIAS + 1e-6 * VALUES)[live].all()
