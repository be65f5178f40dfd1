"""Properties of noise in square blocks (section 3 of GaussWS), measured on drawn noise."""

import jax
import jax.numpy as jnp
import numpy as np

from optax_lowmem import gaussws

SIDE, SHAPE = 32, (1024, 1024)
MAXIMA = tuple(float(m) for m in np.linspace(1, 1.999, 9))  # of blocks: within a binade


def shares(seed: int, elements: int) -> dict[int, float]:
    """Magnitude of R -> share of the elements drawn that have it."""
    side = int(np.sqrt(elements))
    r = np.abs(gaussws.draw(jax.random.key(seed), (side, side)))
    values, counts = np.unique(r, return_counts=True)
    return {int(v): int(c) / r.size for v, c in zip(values, counts, strict=True)}


def of_maxima(maximum: float, rest: jax.Array) -> jax.Array:
    """`rest`, with the maximum in the corner of each block."""
    return rest.at[::SIDE, ::SIDE].set(maximum)


def nullified(exponent: int, bits: float = 6.0, maximum: float = 1.5) -> float:
    """The share of sampled weights 2^exponent whose cast is that of 0 with the same noise (3.5)."""
    r = gaussws.draw(jax.random.key(0), SHAPE)
    weights = of_maxima(maximum, jnp.full(SHAPE, 2.0**exponent))
    found, of_zero = (
        gaussws.fake_cast(gaussws.perturb(w, bits, r), "bfloat16")
        for w in (weights, of_maxima(maximum, jnp.zeros(SHAPE)))
    )
    return float(jnp.mean(found == of_zero, where=weights != maximum))


def underflow(maximum: float, to: str, bits: float) -> float:
    """The share of noisy elements whose noise a cast rounds away, in blocks of a maximum."""
    of_weights, of_noise = jax.random.split(jax.random.key(0))
    w = of_maxima(maximum, maximum * jax.random.uniform(of_weights, SHAPE, minval=-1.0))
    r = gaussws.draw(of_noise, SHAPE)
    return float(gaussws.underflow_share(w, gaussws.perturb(w, bits, r), r, to))
