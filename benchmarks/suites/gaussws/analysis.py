"""Properties of noise in square blocks (section 3 of GaussWS), measured on drawn noise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from optax_lowmem import gaussws

# equation 8
P1, P2 = 2 * (3 / 4) ** 2 * 2**-2, 2 * (3 / 4) * 2**-9  # of both signs together
P0 = 1 - P1 - P2
NORMAL = tuple(  # of the magnitudes 0, 1, 2, 3 and more of round(N(0, 1) / 2)
    float(p) for p in np.diff([0.0, *jax.scipy.special.erf(np.array([1, 3, 5]) / np.sqrt(2)), 1.0])
)
SIDE, SHAPE = 32, (1024, 1024)
MAXIMA = tuple(float(m) for m in np.linspace(1, 1.999, 9))  # of blocks: within a binade


def shares(seed: int = 0, elements: int = 2**24, noise: str = "gaussws") -> dict[int, float]:
    """Magnitude of R -> share of the elements drawn that have it."""
    side = int(np.sqrt(elements))
    r = np.abs(gaussws.draw(jax.random.key(seed), (side, side), noise))
    values, counts = np.unique(r, return_counts=True)
    return {int(v): int(c) / r.size for v, c in zip(values, counts, strict=True)}


def of_maxima(maximum: float, rest: jax.Array) -> jax.Array:
    """`rest`, with the maximum in the corner of each block."""
    at = np.zeros((SIDE, SIDE), bool)
    at[0, 0] = True
    tiled = np.tile(at, (rest.shape[0] // SIDE, rest.shape[1] // SIDE))
    return jnp.where(tiled, jnp.float32(maximum), rest)


def nullified(
    exponent: int, to: str = "bfloat16", bits: float = 6.0, maximum: float = 1.5, seed: int = 0
) -> float:
    """The share of sampled weights 2^exponent whose cast is that of 0 with the same noise (3.5)."""
    r = gaussws.draw(jax.random.key(seed), SHAPE)
    with_it, without = (
        of_maxima(maximum, jnp.full(SHAPE, value)) for value in (2.0**exponent, 0.0)
    )
    found, of_zero = (
        gaussws.fake_cast(gaussws.perturb(w, bits, r), to) for w in (with_it, without)
    )
    own = np.asarray(with_it) != maximum
    return float(np.mean((np.asarray(found) == np.asarray(of_zero))[own]))


def underflow(maximum: float, to: str, bits: float, seed: int = 0) -> float:
    """The share of noisy elements whose noise a cast rounds away, in blocks of a maximum."""
    of_weights, of_noise = jax.random.split(jax.random.key(seed))
    w = of_maxima(maximum, maximum * jax.random.uniform(of_weights, SHAPE, minval=-1.0))
    r = gaussws.draw(of_noise, SHAPE)
    return float(gaussws.underflow_share(w, gaussws.perturb(w, bits, r), r, to))
