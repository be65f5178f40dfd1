"""Hyperparameters: checked when they are numbers, f32 operands when they are traced."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check_range(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """Raises unless a number is in [low, high); arrays and schedules pass."""
    if value is None or isinstance(value, str):
        raise TypeError(f"{name} must be a number, an f32 scalar or a schedule, got {value!r}")
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return
    if not low <= value < high:
        span = f">= {low:g}" if high == math.inf else f"in [{low:g}, {high:g})"
        raise ValueError(f"{name} must be {span}, got {value!r}")


def as_f32(name: str, value: Any) -> jax.Array:
    """A hyperparameter as an f32 scalar.

    Raises:
      TypeError: for a 16-bit one, in which 0.999 would be 1.
    """
    dtype = getattr(value, "dtype", None)
    if dtype is not None and jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16):
        raise TypeError(
            f"hyperparameter {name} is {dtype}, in which 0.999 is 1. With inject_hyperparams pass "
            "hyperparam_dtype=jnp.float32."
        )
    return jnp.asarray(value, jnp.float32)


def complement(name: str, decay: Any) -> jax.Array:
    """1 - decay in f32, taken in float64 where decay is a number."""
    if isinstance(decay, int | float):
        return jnp.float32(1.0 - decay)
    return 1 - as_f32(name, decay)


def bias_correction(name: str, decay: Any, step: jax.Array) -> jax.Array:
    """1 - decay^step, without the cancellation of that expression (6e-5 at step 1 in f32)."""
    if isinstance(decay, int | float):
        log = jnp.float32(math.log(decay) if decay > 0 else -math.inf)
    else:
        log = jnp.log(as_f32(name, decay))
    return -jnp.expm1(step.astype(jnp.float32) * log)
