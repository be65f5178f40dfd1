"""COAT's optimizer: AdamW whose moments are FP8 after dynamic range expansion (COAT, section 4)."""

from __future__ import annotations

import jax
import optax
from jax.typing import DTypeLike

from optax_lowmem._src.codecs import expanded_e4m3
from optax_lowmem._src.core.typing import ScalarOrSchedule
from optax_lowmem._src.optimizers.adam import flash_adamw
from optax_lowmem._src.update.storage import Storage

_COAT = Storage(mu=expanded_e4m3(), nu=expanded_e4m3(signed=False), group_size=128)


def coat_adamw(
    learning_rate: ScalarOrSchedule,
    b1: float | jax.Array = 0.9,
    b2: ScalarOrSchedule = 0.999,
    eps: float | jax.Array = 1e-8,
    eps_root: float | jax.Array = 0.0,
    mu_dtype: DTypeLike | None = None,
    weight_decay: ScalarOrSchedule = 1e-4,
    mask: optax.MaskOrFn = None,
    *,
    nesterov: bool = False,
    storage: Storage = _COAT,
    decouple_lr: bool | float = False,
) -> optax.GradientTransformationExtraArgs:
    r"""AdamW with both moments in FP8 E4M3, each group's range expanded to that of the format.

    .. math::
      m_t = b_1 m_{t-1} + (1-b_1) g_t, \quad v_t = b_2 v_{t-1} + (1-b_2) g_t^2, \\
      \theta_t = \theta_{t-1} - \eta_t \left(\frac{\hat m_t}{\sqrt{\hat v_t + \bar\epsilon} +
      \epsilon} + \lambda \theta_{t-1}\right), \\
      f(x) = \mathrm{sign}(x) |x|^k, \quad k = \log_{R_X} R_{E4M3}, \quad R_X = \max|x| / \min|x|

    (COAT, equation 1 and section 4.2), with m and v as the codes of f(m) and f(v), a maximum and a
    k for each group of 128. It is `flash_adamw` with other codecs; the first nine arguments, their
    order and their defaults are those of `optax.adamw`.

    Args:
      learning_rate: number, f32 scalar or schedule.
      b1: decay of mu, in [0, 1).
      b2: decay of nu, in [0, 1), or a schedule that starts at 0 such as `b2_schedule()`.
      eps: added outside the root.
      eps_root: added inside the root, where the paper's table has its epsilon.
      mu_dtype: dtype of mu where it is not compressed; f32 by default.
      weight_decay: number, f32 scalar or schedule; decoupled, times the learning rate.
      mask: where weight decay applies.
      nesterov: as in `optax.nadamw`.
      storage: codecs, group size, width of the master weights, rounding, policy.
      decouple_lr: decay by `weight_decay * lr / peak`: True for a constant rate, or a schedule's
        peak as a number.

    Returns:
      An optax transformation. f32 parameters are their own master weights; 16-bit ones get a
      correction.

    Raises:
      ValueError: for a hyperparameter out of range; in `init` and `update` for leaves that cannot
        be optimized and trees that do not match, by name.
      TypeError: for a 16-bit hyperparameter.

    Numerics: see `codecs.expanded`. A value that is not 0 never has code 0, so the denominator
    never underflows where v > 0.

    Memory: 2.06 bytes of state beside an f32 weight, 3.06 beside a 2-byte one (the published
    optimizer: 2.19 beside an f32 weight).

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> params = {"w": jnp.ones((256, 128), jnp.bfloat16)}
      >>> report = lowmem.memory.report(lowmem.coat_adamw(1e-3), params)
      >>> print(round(report.bytes_per_param, 2))
      5.06

    References:
      Xi et al., COAT: Compressing Optimizer States and Activation for Memory-Efficient FP8
      Training, 2025.

    Deviations from the paper: stochastic rounding (`Storage(rounding="nearest")` for its own), and
    those of `codecs.expanded`.
    """
    return flash_adamw(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask,
        nesterov=nesterov, storage=storage, decouple_lr=decouple_lr,
    )  # fmt: skip
