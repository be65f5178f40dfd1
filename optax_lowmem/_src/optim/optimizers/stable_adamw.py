"""StableAdamW: AdamW with AdaFactor's update clipping (SwitchBack & StableAdamW, Algorithm 2)."""

from __future__ import annotations

import dataclasses

import jax
import optax
from jax.typing import DTypeLike

from optax_lowmem._src.arrays.hyperparameters import Formula, as_f32
from optax_lowmem._src.arrays.typing import Arrays, Scalar, ScalarOrSchedule
from optax_lowmem._src.optim.clipping import check_threshold, clipped_share, rms_of_ratio
from optax_lowmem._src.optim.optimizers.adam import AdamRule, adam_moments
from optax_lowmem._src.optim.optimizers.arguments import with_common_arguments
from optax_lowmem._src.optim.step.engine import optimizer
from optax_lowmem._src.optim.step.rule import UpdateRule
from optax_lowmem._src.optim.step.storage import Storage


@dataclasses.dataclass(frozen=True)
class StableAdamRule(AdamRule):
    """Adam that divides each leaf's learning rate and weight decay by max(1, RMS_t / d)."""

    prepares = "leaf"

    def prepare(self, g: jax.Array, slots: Arrays, h: Arrays) -> tuple[Arrays, Arrays]:
        """Clip by RMS_t = sqrt(mean(g^2 / max(u, eps^2))); u is the new debiased second moment."""
        u = self.second_moment(g, slots, h) * h["nu_bias_correction"]
        share = clipped_share(rms_of_ratio(g, u, h["raw_eps"]), h["threshold"])
        return {name: h[name] * share for name in ("lr", "decay") if name in h}, {}

    def accumulating(self, h: Arrays, first: jax.Array, every: int) -> Arrays:
        """Raise an error: RMS_t needs the whole gradient."""
        return UpdateRule.accumulating(self, h, first, every)


def _hyperparameters_at(
    moments: Formula, eps: Scalar, threshold: Scalar, count: jax.Array
) -> Arrays:
    clipping = {"raw_eps": as_f32("eps", eps), "threshold": as_f32("threshold", threshold)}
    return {**moments(count), **clipping}


@with_common_arguments
def stable_adamw(
    learning_rate: ScalarOrSchedule,
    b1: float | jax.Array = 0.9,
    b2: ScalarOrSchedule = 0.99,
    eps: float | jax.Array = 1e-6,
    mu_dtype: DTypeLike | None = None,
    weight_decay: ScalarOrSchedule = 1e-2,
    mask: optax.MaskOrFn = None,
    *,
    threshold: float | jax.Array = 1.0,
    storage: Storage = Storage(),  # noqa: B008 (frozen)
    decouple_lr: bool | float = False,
) -> optax.GradientTransformationExtraArgs:
    r"""AdamW that takes smaller steps where its second moment lags behind the gradient.

    .. math::
      v_t = b_1 v_{t-1} + (1-b_1) g_t, \quad u_t = b_2 u_{t-1} + (1-b_2) g_t^2, \quad
      \mathrm{RMS}_t = \sqrt{\mathrm{E}\left[g_t^2 / \max(\hat u_t, \epsilon^2)\right]}, \\
      \eta_t = \alpha_t / \max(1, \mathrm{RMS}_t / d), \quad
      \theta_t = \theta_{t-1} - \eta_t \lambda \theta_{t-1} -
      \eta_t \hat v_t / \left(\sqrt{\hat u_t} + \epsilon\right)

    (Wortsman et al., Algorithm 2 and appendix F.2), with the mean E over each tensor, that is over
    all layers that are stacked in one. As in `flash_adamw`, moments are 8-bit and master weights
    are split; clipping precedes the split.

    Args:
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1), or a schedule such as `b2_schedule()`.
      eps: added outside the root; its square is the lower bound of u in RMS_t.
      weight_decay: number, f32 scalar or schedule; decoupled, times the clipped rate.
      threshold: d, the largest RMS_t that is not clipped.

    Returns:
      An optax transformation.

    Raises:
      ValueError: for a hyperparameter out of range; inside a `shard_map` with `check_vma=False`.
      TypeError: for a 16-bit hyperparameter.

    Numerics: RMS_t is computed in f32 from the gradient and the second moment decoded from storage.
    A NaN or infinity in a tensor's gradient makes that whole tensor NaN, and no other.

    Memory: 3.19 bytes of state beside a 2-byte weight. The step reads gradient and second moment
    twice, which moves 3.1 bytes per parameter more than the 12.4 of `flash_adamw`.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> tx = lowmem.stable_adamw(1e-3)
      >>> params, state = lowmem.init(tx, {"w": jnp.ones((64, 128))})
      >>> params, state = lowmem.step(tx, {"w": jnp.ones((64, 128))}, state, params)

    References:
      Wortsman et al., Stable and low-precision training for large-scale vision-language models,
      2023, arXiv 2304.13013. The first five arguments' defaults are those of optimi's StableAdamW.
    """
    check_threshold(threshold)
    moments = adam_moments(b1, b2, eps, 0.0, nesterov=False)
    formula = Formula(_hyperparameters_at, (moments, eps, threshold))
    return optimizer(
        StableAdamRule(), formula, learning_rate, storage, b1,
        weight_decay=weight_decay, mask=mask, decouple_lr=decouple_lr, slot_dtypes={"mu": mu_dtype},
    )  # fmt: skip
