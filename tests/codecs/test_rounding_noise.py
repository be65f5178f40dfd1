"""Noise that stochastic rounding leaves in second moments: of the codes' distance, not of b2."""

import functools

import jax
import jax.numpy as jnp
import pytest

from optax_lowmem import codecs
from tests.compilation import FULL_COMPILE
from tests.tolerances import ROUNDING_NOISE, ROUNDING_NOISE_ON_STEPS, STANDARD_ERRORS

GROUPS, GROUP = 64, 64
LINEAR, ROOT = codecs.linear4(signed=False), codecs.sqrt()
# E |z^2 - 1| of a normal z: 4 times its density at 1
ABSOLUTE_DEVIATION = 0.9679


@pytest.mark.parametrize(
    ("codec", "v", "gap", "b2"),
    [
        pytest.param(LINEAR, 5 / 15, 1 / 15, 0.99, marks=pytest.mark.full),
        pytest.param(LINEAR, 5 / 15, 1 / 15, 0.998, marks=pytest.mark.full),
        (ROOT, 0.1, 2 * 0.1**0.5 / 255, 0.998),
    ],
    ids=["linear4-0.99", "linear4-0.998", "sqrt-0.998"],
)
def test_variance_is_that_of_the_codes_distance(codec, v, gap, b2):
    """E |g^2 - v| gap / 2 of normal gradients, at two b2; the mean step is longer by 3/8 of it.

    Args:
      codec: of v, in groups whose first element stays 1 and keeps the scale.
      v: mean square of the gradients of the others.
      gap: between the codes beside v.
      b2: decay; a step of v is shorter than a gap.
    """

    def stored(value, key):
        noise = jax.random.uniform(key, value.shape)
        coded = codecs.encode_array(codec, value, GROUP, noise)
        return codecs.decode_array(codec, *coded, GROUP, length=GROUP)

    def step(moment, key):
        of_gradient, of_noise = jax.random.split(key)
        square = v * jax.random.normal(of_gradient, moment.shape) ** 2
        square = square.at[:, 0].set(1)
        moment = stored(b2 * moment + (1 - b2) * square, of_noise)
        own = moment[:, 1:] / v
        return moment, (own.mean(), ((own - 1) ** 2).mean(), (own**-0.5).mean())

    # thousands of steps take longer than LLVM's passes
    @functools.partial(jax.jit, compiler_options=FULL_COMPILE)
    def run(key):
        first, begin, go = jax.random.split(key, 3)
        moment = stored(jnp.full((GROUPS, GROUP), v).at[:, 0].set(1), first)
        # of the start 2 e^-3 of a mean is left and e^-6 of a variance
        moment, _ = jax.lax.scan(step, moment, jax.random.split(begin, round(3 / (1 - b2))))
        moment, found = jax.lax.scan(step, moment, jax.random.split(go, round(6 / (1 - b2))))
        return moment, [x.mean() for x in found]

    moment, (mean, variance, steps) = run(jax.random.key(0))
    assert float(moment[:, 0].max()) == pytest.approx(1, rel=2.0**-20)  # the scale stayed
    expected = ABSOLUTE_DEVIATION * gap / v / 2
    # each remembers its noise for 1 / (1 - b2) steps before and after: 3 independent ones in 6
    error = (expected / (3 * GROUPS * (GROUP - 1))) ** 0.5
    assert float(mean) == pytest.approx(1, abs=STANDARD_ERRORS * error)
    assert float(variance) == pytest.approx(expected, rel=ROUNDING_NOISE)
    longer = float(steps * mean**0.5) - 1
    series = 3 / 8 * expected + 105 / 128 * expected**2  # of a normal v
    assert longer == pytest.approx(series, rel=ROUNDING_NOISE_ON_STEPS)
