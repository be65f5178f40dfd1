"""`lowmem.init`: 16-bit weights and their optimizer state."""

import warnings

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_lowmem._src.core import context
from optax_lowmem._src.core.policy import unmatched_patterns
from optax_lowmem._src.wrappers import explain
from optax_lowmem._src.wrappers.start import WeightDtype, start


def init(
    tx: optax.GradientTransformation,
    params: optax.Params,
    dtype: WeightDtype = jnp.bfloat16,
    *,
    seed: ArrayLike | None = None,
    allow_rounding: bool = False,
) -> tuple[optax.Params, optax.OptState]:
    """Return 16-bit weights and an optimizer state that together hold f32 parameters.

    Every split inside `tx` (through chain, masked, partition, MultiSteps, inject_hyperparams) gets
    the corrections of its leaves. A leaf without a split would be rounded to nearest, and every
    later step under half an ulp would be lost: this raises an error unless `allow_rounding` is set.

    Args:
      tx: an optimizer.
      params: f32 parameters.
      dtype: dtype of the weights: bfloat16, float16 or float32, or a function (path, leaf) ->
        dtype, for example to keep norms in f32.
      seed: seed of stochastic rounding, an integer that replaces `Storage.seed`; may be traced (one
        for each member of an ensemble). For a key of `jax.random`, pass `jax.random.bits(key)`.
      allow_rounding: round f32 leaves that no optimizer splits to 16-bit weights, for example
        frozen ones. Not needed for optimizers with `Storage(master_weight_bits=None)`.

    Returns:
      (weights, state). Leaves that are neither cast nor split are the given arrays, so a step that
      donates the weights also donates these. Under `gaussws_noise` weights have their first noise.
      Peak memory is that of params, weights and state, plus temporaries of one leaf.

    Raises:
      TypeError: for float64 parameters, and for parameters that are not floats unless a mask or
        partition excludes them; excluded ones are returned unmodified.
      ValueError: if two optimizers split one leaf, or an f32 leaf would lose precision.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> tx = lowmem.flash_adamw(1e-3)
      >>> weights, state = lowmem.init(tx, {"w": jnp.full((64, 64), 0.1)})
      >>> float(weights["w"][0, 0]), float(lowmem.master_params(weights, state)["w"][0, 0])
      (0.10009765625, 0.10000038146972656)
    """
    with context.noting_policies() as policies:
        weights, state = start(tx, params, dtype, seed, allow_rounding)
    for warning in unmatched_patterns(policies, params):
        warnings.warn(warning, stacklevel=2)
    stale = explain.stale_corrections(tx, weights) if explain.may_be_stale(state) else []
    for warning in [*stale, *explain.rounded_distances(state)]:
        warnings.warn(warning, stacklevel=2)
    return weights, state
