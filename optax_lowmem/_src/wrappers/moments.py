"""FlashOptim's two moment codecs as wrappers of a transformation, or as links of a chain."""

from typing import TypeGuard

import jax
import numpy as np
import optax

from optax_lowmem._src.codecs import GroupCodec, softsign, sqrt
from optax_lowmem._src.core.hyperparameters import check_range
from optax_lowmem._src.core.policy import Policy
from optax_lowmem._src.wrappers.compress import Select, compressed


def _of_moment(moment: int, codec: GroupCodec) -> Select:
    return lambda field, known: codec if known.moment == moment else None


def _is_decay(inner: object) -> TypeGuard[float]:
    if not isinstance(inner, int | float | np.number | jax.Array):
        return False
    check_range("the decay", inner, 0.0, 1.0)
    return True


def compand_momentum(
    inner: optax.GradientTransformation | float,
    *,
    codec: GroupCodec | None = None,
    group_size: int = 32,
    rounding: str = "stochastic",
    seed: int = 0,
    policy: Policy = Policy(),  # noqa: B008 (frozen)
    update_dtype: str = "gradient",
) -> optax.GradientTransformationExtraArgs:
    """Stores the first moment of a transformation as companded int8 (FlashOptim, equation 3).

    Args:
      inner: a transformation with a first moment in f32 (`mu`, `trace`, `m`, `ema`), of optax or
        `scale_by_adam_mini`; or a decay b for a plain link of a chain, m = b m + (1-b) g without
        debiasing.
      codec: softsign int8 by default.
      group_size: neighbours on the last axis that share a scale.
      rounding: `stochastic` or `nearest`.
      seed: of the hash behind stochastic rounding.
      policy: leaves to leave as they are.
      update_dtype: `gradient`, an update in the dtype of its gradient, or `float32`.

    Returns:
      An optax transformation; 1.06 bytes a value instead of 4.

    Example:
      >>> import optax, optax_lowmem as lowmem
      >>> tx = optax.chain(lowmem.compand_momentum(optax.trace(0.9)), optax.scale(-0.1))
    """
    if _is_decay(inner):
        inner = optax.ema(inner, debias=False)
    select = _of_moment(1, codec or softsign())
    return compressed(inner, select, (), group_size, rounding, seed, policy, update_dtype)


def sqrt_variance_quant(
    inner: optax.GradientTransformation | float,
    *,
    codec: GroupCodec | None = None,
    group_size: int = 32,
    rounding: str = "stochastic",
    seed: int = 0,
    policy: Policy = Policy(),  # noqa: B008 (frozen)
    update_dtype: str = "gradient",
) -> optax.GradientTransformationExtraArgs:
    """Stores the second moment of a transformation as uint8 of its root (FlashOptim, equation 4).

    Args:
      inner: a transformation with a non-negative second moment in f32 (`nu`, `n`,
        `sum_of_squares`), of optax or `scale_by_adam_mini`, whose values of blocks lie in one row;
        or a decay b for a plain link of a chain, g / sqrt(v) with v = b v + (1-b) g^2.
      codec: sqrt uint8 by default.
      group_size: neighbours on the last axis that share a scale.
      rounding: `stochastic` or `nearest`.
      seed: of the hash behind stochastic rounding.
      policy: leaves to leave as they are.
      update_dtype: `gradient`, an update in the dtype of its gradient, or `float32`.

    Returns:
      An optax transformation; 1.13 bytes a value instead of 4.

    Example:
      >>> import optax, optax_lowmem as lowmem
      >>> tx = lowmem.compand_momentum(lowmem.sqrt_variance_quant(optax.scale_by_adam()))
    """
    if _is_decay(inner):
        inner = optax.scale_by_rms(inner)
    select = _of_moment(2, codec or sqrt())
    return compressed(inner, select, (), group_size, rounding, seed, policy, update_dtype)
