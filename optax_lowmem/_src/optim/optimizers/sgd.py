"""FlashSGD (FlashOptim Algorithm 5)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from optax_lowmem._src.arrays.hyperparameters import LEAST, Formula, as_f32, check_range
from optax_lowmem._src.arrays.typing import Arrays, PyTree, Scalar, ScalarOrSchedule
from optax_lowmem._src.optim.optimizers.arguments import with_common_arguments
from optax_lowmem._src.optim.step.engine import direction, optimizer
from optax_lowmem._src.optim.step.rule import Slot, UpdateRule
from optax_lowmem._src.optim.step.storage import Storage


class FlashSgdState(NamedTuple):
    """State of SGD with momentum; every tree has the parameters' structure."""

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=jnp.int32
    seed: jax.Array  # shape=(), dtype=jnp.uint32
    mu: PyTree  # int8 codes of the parameter's shape, or f32
    mu_scale: PyTree  # shape[:-1] + (groups,), or 0-d
    correction: PyTree  # int8 or int16 beside 16-bit weights, or 0-d; None in a bare direction


class PlainSgdState(NamedTuple):
    """State of SGD without momentum: only what the master weights need."""

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=jnp.int32
    seed: jax.Array  # shape=(), dtype=jnp.uint32
    correction: PyTree


@dataclasses.dataclass(frozen=True)
class MomentumRule(UpdateRule):
    """m = momentum m + g; the direction is m, or g + momentum m (Nesterov)."""

    nesterov: bool = False

    slots = (Slot("mu", signed=True),)
    state_type = FlashSgdState

    def update(self, g: jax.Array, slots: Arrays, h: Arrays) -> tuple[jax.Array, Arrays]:
        mu = h["momentum"] * slots["mu"] + h.get("share", 1) * g
        return (g + h["momentum"] * mu if self.nesterov else mu), {"mu": mu}

    def momentum_divisor(self, slots: Arrays, h: Arrays) -> jax.Array:
        return 1 / jnp.maximum(h["momentum"], LEAST) if self.nesterov else jnp.float32(1)

    def accumulating(self, h: Arrays, first: jax.Array, every: int) -> Arrays:
        """Compute m = momentum m + sum of g_i / k, exactly the step of the mean gradient."""
        if self.nesterov:
            return super().accumulating(h, first, every)
        kept = jnp.where(first, h["momentum"], 1)
        return {**h, "momentum": kept, "share": jnp.float32(1 / every)}


def _no_hyperparameters(count: jax.Array) -> Arrays:
    return {}


@dataclasses.dataclass(frozen=True)
class GradientRule(UpdateRule):
    """The direction is the gradient."""

    slots = ()
    state_type = PlainSgdState

    def update(self, g: jax.Array, slots: Arrays, h: Arrays) -> tuple[jax.Array, Arrays]:
        return g, {}


def _formula(momentum: Scalar) -> Formula:
    check_range("momentum", momentum, 0.0, 1.0)
    return Formula(_hyperparameters_at, (momentum,))


def _hyperparameters_at(momentum: Scalar, count: jax.Array) -> Arrays:
    return {"momentum": as_f32("momentum", momentum)}


def flash_trace(
    decay: float | jax.Array,
    nesterov: bool = False,
    accumulator_dtype: DTypeLike | None = None,
    *,
    storage: Storage = Storage(),  # noqa: B008 (frozen)
) -> optax.GradientTransformationExtraArgs:
    """`optax.trace` with 8-bit momentum; 1.06 bytes of state per parameter.

    Args:
      decay: decay of the momentum, in [0, 1).
      nesterov: whether the direction is g + decay m instead of m.
      accumulator_dtype: dtype of the momentum in leaves where it is not compressed; f32 by default.
      storage: codec (`mu`), group size, rounding, policy.

    Example:
      >>> import optax, optax_lowmem as lowmem
      >>> tx = optax.chain(lowmem.flash_trace(0.9), optax.scale(-0.1))
    """
    rule = MomentumRule(nesterov)
    return direction(rule, _formula(decay), storage, {"mu": accumulator_dtype})


@with_common_arguments
def flash_sgd(
    learning_rate: ScalarOrSchedule,
    momentum: float | jax.Array | None = None,
    nesterov: bool = False,
    accumulator_dtype: DTypeLike | None = None,
    *,
    weight_decay: ScalarOrSchedule = 0.0,
    decoupled: bool = False,
    mask: optax.MaskOrFn = None,
    storage: Storage = Storage(),  # noqa: B008 (frozen)
    decouple_lr: bool | float = False,
) -> optax.GradientTransformationExtraArgs:
    r"""SGD with 8-bit momentum and split master weights.

    .. math::
      m_t = \mu m_{t-1} + g_t, \quad \theta_t = \theta_{t-1} - \eta_t (m_t + \lambda \theta_{t-1})

    (FlashOptim, Algorithm 5: `decoupled=True`). By default the decay is coupled: lambda theta is
    added to g, as in PyTorch and in `optax.chain(optax.add_decayed_weights(...), optax.sgd(...))`.
    The first four arguments, their order and their defaults are those of `optax.sgd`; errors and
    deviations are those of `flash_adamw`. Without weight decay `update(grads, state)` needs no
    parameters, unless they are 16-bit with a correction.

    Args:
      momentum: decay of the momentum, in [0, 1); None for no momentum and no slot.
      nesterov: whether the direction is g + momentum m instead of m.
      accumulator_dtype: dtype of the momentum in leaves where it is not compressed; f32 by default.
      weight_decay: strength: number, f32 scalar or schedule.
      decoupled: subtract the decay from the weight instead of adding it to the gradient.
      storage: codec (`mu`), group size, width of the master weights, rounding, policy.
      decouple_lr: with `decoupled`, decay by `weight_decay * lr / peak`.

    Returns:
      An optax transformation; the momentum is the slot `mu` of its state.

    Memory: 2.06 bytes of state beside a 2-byte weight (`optax.sgd`: 4 beside 4), 1 without
    momentum.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> tx = lowmem.flash_sgd(0.1, momentum=0.9, weight_decay=5e-4)
      >>> params, state = lowmem.init(tx, {"w": jnp.ones((64, 128))})
      >>> state.mu["w"].dtype
      dtype('int8')

    References:
      FlashOptim, 2026, arXiv 2602.23349.
    """
    if decouple_lr is not False and not decoupled:
        raise ValueError("decouple_lr needs decoupled weight decay: also pass decoupled=True")
    rule: UpdateRule = GradientRule() if momentum is None else MomentumRule(nesterov)
    moments = Formula(_no_hyperparameters) if momentum is None else _formula(momentum)
    return optimizer(
        rule, moments, learning_rate, storage, momentum,
        weight_decay=weight_decay, mask=mask, decouple_lr=decouple_lr, coupled=not decoupled,
        slot_dtypes={"mu": accumulator_dtype},
    )  # fmt: skip
