"""Update clipping of StableAdamW: RMS_t and the learning-rate factor (Algorithm 2)."""

import jax
import jax.numpy as jnp

from optax_lowmem._src.arrays.hyperparameters import check_range, is_zero
from optax_lowmem._src.arrays.varying import mean_of_leaf


def rms_of_ratio(g: jax.Array, u: jax.Array, eps: jax.Array) -> jax.Array:
    """Return RMS_t = sqrt(E[g^2 / max(u, eps^2)]) of a leaf (Wortsman et al., appendix F.2).

    `u` is the bias-corrected second moment that includes `g`; `eps` is f32, since in f16 the square
    of 1e-6 is 0.
    """
    return jnp.sqrt(mean_of_leaf(g * g / jnp.maximum(u, eps * eps)))


def clipped_share(rms: jax.Array, threshold: jax.Array) -> jax.Array:
    """Return the learning-rate factor 1 / max(1, RMS_t / d) (Algorithm 2); NaN if RMS_t is NaN."""
    return 1 / jnp.maximum(1, rms / threshold)


def check_threshold(threshold: object) -> None:
    """Raise unless a threshold of RMS_t is positive."""
    check_range("threshold", threshold, 0.0)
    if is_zero(threshold):
        raise ValueError("threshold must be > 0: it is the RMS_t up to which nothing is clipped")
