"""FlashLion (FlashOptim Algorithm 6)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from optax_lowmem._src.arrays.hyperparameters import (
    Formula,
    as_f32,
    check_choice,
    check_range,
    complement,
)
from optax_lowmem._src.arrays.typing import Arrays, PyTree, Scalar, ScalarOrSchedule
from optax_lowmem._src.optim.optimizers.arguments import with_common_arguments
from optax_lowmem._src.optim.step.engine import direction, optimizer
from optax_lowmem._src.optim.step.rule import Slot, UpdateRule
from optax_lowmem._src.optim.step.storage import Storage

_MODES = ("hard", "smooth", "refined")


class FlashLionState(NamedTuple):
    """State of Lion; every tree has the parameters' structure."""

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=jnp.int32
    seed: jax.Array  # shape=(), dtype=jnp.uint32
    mu: PyTree  # int8 codes of the parameter's shape, or f32
    mu_scale: PyTree  # shape[:-1] + (groups,), or 0-d
    correction: PyTree  # int8 or int16 beside 16-bit weights, or 0-d; None in a bare direction


@dataclasses.dataclass(frozen=True)
class LionRule(UpdateRule):
    """sign(b1 m + (1-b1) g), the sign replaced according to `mode`, then m = b2 m + (1-b2) g."""

    mode: str = "hard"
    smooth_beta: float = 1.0

    slots = (Slot("mu", signed=True),)
    state_type = FlashLionState

    def _direction(self, x: jax.Array) -> jax.Array:
        if self.mode == "smooth":
            return jnp.tanh(jnp.float32(self.smooth_beta) * x)
        return jnp.sign(x) if self.mode == "hard" else jnp.clip(x, -1, 1)

    def update(self, g: jax.Array, slots: Arrays, h: Arrays) -> tuple[jax.Array, Arrays]:
        mu = slots["mu"]
        interpolated = h["b1"] * mu + h["one_minus_b1"] * g
        return self._direction(interpolated), {"mu": h["b2"] * mu + h["one_minus_b2"] * g}


def _formula(b1: Scalar, b2: Scalar) -> Formula:
    check_range("b1", b1, 0.0, 1.0)
    check_range("b2", b2, 0.0, 1.0)

    return Formula(_hyperparameters_at, (b1, b2))


def _hyperparameters_at(b1: Scalar, b2: Scalar, count: jax.Array) -> Arrays:
    return {
        "b1": as_f32("b1", b1),
        "one_minus_b1": complement("b1", b1),
        "b2": as_f32("b2", b2),
        "one_minus_b2": complement("b2", b2),
    }


@with_common_arguments
def scale_by_flash_lion(
    b1: float | jax.Array = 0.9,
    b2: float | jax.Array = 0.99,
    mu_dtype: DTypeLike | None = None,
    *,
    mode: str = "hard",
    smooth_beta: float = 1.0,
    storage: Storage = Storage(),  # noqa: B008 (frozen)
) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_lion` with 8-bit momentum; 1.06 bytes of state per parameter.

    Args:
      b1: weight of the momentum in the sign, in [0, 1).
      b2: decay of mu, in [0, 1).
      mode: `hard`, the sign; `smooth`, tanh(smooth_beta x); or `refined`, x clipped to [-1, 1]. As
        in optax, only the direction has this argument.
      smooth_beta: factor inside the tanh of `smooth`.
      storage: codec, group size, rounding, policy.

    Raises:
      ValueError: for an unknown mode.

    Example:
      >>> import optax, optax_lowmem as lowmem
      >>> tx = optax.chain(lowmem.scale_by_flash_lion(), optax.scale(-1e-4))
    """
    check_choice("mode", mode, _MODES)
    if isinstance(smooth_beta, bool) or not isinstance(smooth_beta, int | float):
        raise TypeError(
            f"smooth_beta must be a number known when tracing, got {smooth_beta!r}. Inside "
            "optax.inject_hyperparams, list it in static_args, or use lowmem.inject_hyperparams."
        )
    rule = LionRule(mode, float(smooth_beta) if mode == "smooth" else 1.0)
    return direction(rule, _formula(b1, b2), storage, {"mu": mu_dtype})


@with_common_arguments
def flash_lion(
    learning_rate: ScalarOrSchedule,
    b1: float | jax.Array = 0.9,
    b2: float | jax.Array = 0.99,
    mu_dtype: DTypeLike | None = None,
    weight_decay: ScalarOrSchedule = 1e-3,
    mask: optax.MaskOrFn = None,
    *,
    storage: Storage = Storage(),  # noqa: B008 (frozen)
    decouple_lr: bool | float = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Lion with 8-bit momentum and split master weights.

    .. math::
      u_t = \mathrm{sign}(b_1 m_{t-1} + (1-b_1) g_t), \quad
      \theta_t = \theta_{t-1} - \eta_t (u_t + \lambda \theta_{t-1}), \quad
      m_t = b_2 m_{t-1} + (1-b_2) g_t

    (FlashOptim, Algorithm 6). The first six arguments, their order and their defaults are those of
    `optax.lion`; the others, and the errors and deviations, are those of `flash_adamw`.

    Args:
      b1: weight of the momentum in the sign, in [0, 1).
      b2: decay of mu, in [0, 1).

    Returns:
      An optax transformation.

    Memory: 2.06 bytes of state beside a 2-byte weight (`optax.lion`: 4 beside 4).

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> tx = lowmem.flash_lion(1e-4, weight_decay=0.1)
      >>> params, state = lowmem.init(tx, {"w": jnp.ones((64, 128))})
      >>> state.mu["w"].dtype
      dtype('int8')

    References:
      Chen et al., Symbolic Discovery of Optimization Algorithms, 2023; FlashOptim, 2026,
      arXiv 2602.23349.
    """
    return optimizer(
        LionRule(), _formula(b1, b2), learning_rate, storage,
        weight_decay=weight_decay, mask=mask, decouple_lr=decouple_lr, slot_dtypes={"mu": mu_dtype},
    )  # fmt: skip
