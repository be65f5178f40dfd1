"""FlashAdam and FlashAdamW (FlashOptim Algorithm 4), and COAT's AdamW with other codecs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.codecs import expanded_e4m3
from optax_lowmem._src.arrays.hyperparameters import (
    Formula,
    PowerDecay,
    as_f32,
    bias_correction,
    check_decay,
    check_range,
    complement,
    decay_at,
    following,
    is_zero,
)
from optax_lowmem._src.arrays.typing import Arrays, PyTree, Scalar, ScalarOrSchedule
from optax_lowmem._src.optim.optimizers.arguments import with_common_arguments
from optax_lowmem._src.optim.step.engine import direction, optimizer
from optax_lowmem._src.optim.step.rule import Slot, UpdateRule
from optax_lowmem._src.optim.step.storage import Storage, completed


class FlashAdamState(NamedTuple):
    """State of Adam; every tree has the parameters' structure."""

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=jnp.int32
    seed: jax.Array  # shape=(), dtype=jnp.uint32
    mu: PyTree  # int8 codes of the parameter's shape, or f32
    mu_scale: PyTree  # shape[:-1] + (groups,), or 0-d
    nu: PyTree  # uint8 codes, or f32
    nu_scale: PyTree
    correction: PyTree  # int8 or int16 beside 16-bit weights, or 0-d; None in a bare direction


@dataclasses.dataclass(frozen=True)
class AdamRule(UpdateRule):
    r"""m = b1 m + (1-b1) g, v = b2 v + (1-b2) g^2, mhat / (sqrt(vhat + eps_root) + eps)."""

    nesterov: bool = False
    eps_root_is_zero: bool = True

    slots: ClassVar[tuple[Slot, ...]] = (Slot("mu", signed=True), Slot("nu", signed=False))
    state_type = FlashAdamState

    def second_moment(self, g: jax.Array, slots: Arrays, h: Arrays) -> jax.Array:
        """Return the new nu."""
        return h["b2"] * slots["nu"] + h["one_minus_b2"] * (g * g)

    def update(self, g: jax.Array, slots: Arrays, h: Arrays) -> tuple[jax.Array, Arrays]:
        mu = h["b1"] * slots["mu"] + h["one_minus_b1"] * g
        nu = self.second_moment(g, slots, h)
        numerator = h["mu_bias_correction"] * mu + h["g_scale"] * g if self.nesterov else mu
        return numerics.quotient(numerator, self.denominator(nu, h)), {"mu": mu, "nu": nu}

    def momentum_divisor(self, slots: Arrays, h: Arrays) -> jax.Array:
        divisor = self.denominator(slots["nu"], h)
        return numerics.quotient(divisor, h["mu_bias_correction"]) if self.nesterov else divisor

    def denominator(self, nu: jax.Array, h: Arrays) -> jax.Array:
        """Return sqrt(vhat + eps_root) + eps; without Nesterov, times 1 - b1^t.

        So mu needs no bias correction there.
        """
        if self.eps_root_is_zero:  # the codec uses sqrt(nu) too: one square root serves both
            root = jnp.sqrt(nu) * h["root_nu_bias_correction"]
        else:
            root = jnp.sqrt(nu * h["nu_bias_correction"] + h["eps_root"]) * h["root_scale"]
        return root + h["eps"]

    def accumulating(self, h: Arrays, first: jax.Array, every: int) -> Arrays:
        """Return `h` for one of k = `every` micro-batches, whose steps add up.

        m = b1 m + (1-b1) sum g_i / k and v = b2 v + (1-b2) sum (g_i / k)^2 (Adam Accumulation):
        moments decay in the `first` only. Raises with `nesterov`.
        """
        if self.nesterov:
            return super().accumulating(h, first, every)
        share = 1 / every
        return {
            **h,
            "b1": jnp.where(first, h["b1"], 1),
            "b2": jnp.where(first, h["b2"], 1),
            "one_minus_b1": h["one_minus_b1"] * share,
            "one_minus_b2": h["one_minus_b2"] * share**2,
        }


def adam_moments(
    b1: Scalar, b2: ScalarOrSchedule, eps: Scalar, eps_root: Scalar, nesterov: bool
) -> Formula:
    """Return the formula of `AdamRule`'s hyperparameters from the count before a step."""
    check_range("b1", b1, 0.0, 1.0)
    check_decay("b2", b2)
    check_range("eps", eps, 0.0)
    check_range("eps_root", eps_root, 0.0)

    return Formula(_hyperparameters_at, (b1, b2, eps, eps_root, nesterov))


def _hyperparameters_at(
    b1: Scalar,
    b2: ScalarOrSchedule,
    eps: Scalar,
    eps_root: Scalar,
    nesterov: bool,
    count: jax.Array,
) -> Arrays:
    step = following(count)
    beta1, one_minus_b1 = as_f32("b1", b1), complement("b1", b1)
    decay2 = decay_at("b2", b2, count)
    nu_bias_correction = 1 / decay2.correction
    mu_bias_correction = 1 / bias_correction("b1", b1, step)
    h = {
        "b1": beta1,
        "one_minus_b1": one_minus_b1,
        "b2": decay2.value,
        "one_minus_b2": decay2.complement,
        "nu_bias_correction": nu_bias_correction,
        "eps_root": as_f32("eps_root", eps_root),
    }
    root_scale = jnp.float32(1)
    if nesterov:  # Dozat: the next step's momentum, with its own debiasing
        h["mu_bias_correction"] = beta1 / bias_correction("b1", b1, following(step))
        h["g_scale"] = one_minus_b1 * mu_bias_correction
    else:  # divide the denominator by mu's debiasing instead, which costs nothing
        root_scale = 1 / mu_bias_correction
    h["root_scale"] = root_scale
    h["root_nu_bias_correction"] = jnp.sqrt(nu_bias_correction) * root_scale
    h["eps"] = as_f32("eps", eps) * root_scale
    return h


def b2_schedule(power: float = 0.8) -> Callable[[ArrayLike], jax.Array]:
    r"""Return a schedule for `b2=` of Adam-like optimizers that grows with the step.

    .. math:: b_{2,t} = 1 - t^{-\lambda}, \qquad
      v_t = (1 - t^{-\lambda}) v_{t-1} + t^{-\lambda} g_t^2

    (SwitchBack and StableAdamW, Figure 14; Adafactor, section 7.2.) Since b2 is 0 at step 1, the
    weights of :math:`g_1^2 \dots g_t^2` in v_t sum to 1: v_t is an exact weighted mean and needs no
    debiasing. With power 1 it is the plain mean of all.

    Args:
      power: lambda, in (0, 1]; Adafactor uses 0.8, the paper tries 0.45, 0.5 and 0.65.

    Returns:
      An optax schedule, count -> b2, with t = count + 1; hashable. The optimizers compute 1 - b2 as
      t^-power, with a relative error of at most 3e-6 up to t = 10^6; computed as 1 - b2(t) in f32,
      the error reaches 0.2 %.

    Raises:
      TypeError: for a power that is not a number.
      ValueError: for a power out of range.

    `lowmem.inject_hyperparams` does not inject it. Under `optax.inject_hyperparams` pass
    `static_args="b2"`: otherwise each step gets a number, and is debiased by 1 - b2^t as if b2 were
    constant (v up to 26 % too large).

    Example:
      >>> import optax_lowmem as lowmem
      >>> schedule = lowmem.b2_schedule(0.5)
      >>> [float(schedule(count)) for count in (0, 3, 9_999)]
      [0.0, 0.5, 0.9900000095367432]
      >>> tx = lowmem.flash_adamw(1e-3, b2=schedule)
    """
    return PowerDecay(power)


@with_common_arguments
def scale_by_flash_adam(
    b1: float | jax.Array = 0.9,
    b2: ScalarOrSchedule = 0.999,
    eps: float | jax.Array = 1e-8,
    eps_root: float | jax.Array = 0.0,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = False,
    storage: Storage = Storage(),  # noqa: B008 (frozen)
) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam` with 8-bit moments: no learning rate, weight decay or master weights.

    2.19 bytes of state per parameter.

    Args:
      storage: codecs, group size, rounding, policy.

    Example:
      >>> import optax, optax_lowmem as lowmem
      >>> tx = optax.chain(lowmem.scale_by_flash_adam(), optax.scale(-1e-3))
    """
    rule = AdamRule(nesterov, is_zero(eps_root))
    return direction(rule, adam_moments(b1, b2, eps, eps_root, nesterov), storage, {"mu": mu_dtype})


@with_common_arguments
def flash_adamw(
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
    storage: Storage = Storage(),  # noqa: B008 (frozen)
    decouple_lr: bool | float = False,
) -> optax.GradientTransformationExtraArgs:
    r"""AdamW with 8-bit moments and split master weights.

    .. math::
      m_t = b_1 m_{t-1} + (1-b_1) g_t, \quad v_t = b_2 v_{t-1} + (1-b_2) g_t^2, \\
      \theta_t = \theta_{t-1} - \eta_t \left(\frac{\hat m_t}{\sqrt{\hat v_t + \bar\epsilon} +
      \epsilon} + \lambda \theta_{t-1}\right)

    (FlashOptim, Algorithm 4), with m as companded int8 (equation 3), sqrt(v) as uint8 (equation 4)
    and theta as a 16-bit weight and an 8-bit correction. The first nine arguments, their order and
    their defaults are those of `optax.adamw`.

    Returns:
      An optax transformation. f32 parameters get compressed moments; bf16 and f16 parameters also
      get a correction, so that `optax.apply_updates` results in the rounded master weight.

    Raises:
      ValueError: for a hyperparameter out of range; in `init` and `update` for leaves that cannot
        be optimized and trees that do not match, by name.
      TypeError: for a 16-bit hyperparameter.

    Numerics: moments are computed in f32 and rounded without bias to one of the two nearest codes.
    The denominator never underflows where v > 0, so |update| stays near the learning rate. Master
    weights have a relative precision of 2^-16 (24 bits).

    Memory: 3.19 bytes of state beside a 2-byte weight (`optax.adamw`: 8 beside 4).

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_lowmem as lowmem
      >>> tx = lowmem.flash_adamw(1e-3)
      >>> params, state = lowmem.init(tx, {"w": jnp.ones((64, 128))})
      >>> grads = {"w": jnp.ones((64, 128), jnp.bfloat16)}
      >>> params, state = lowmem.step(tx, grads, state, params)
      >>> print(params["w"].dtype, lowmem.master_params(params, state)["w"][0, 0])
      bfloat16 0.9990082

    References:
      Gonzalez Ortiz et al., FlashOptim: Optimizers for Memory Efficient Training, 2026,
      arXiv 2602.23349.

    Deviations from the paper, all undone by `Storage.paper()`: scales with the range of f32,
    stochastic rounding, a variance code of at least 1, a split of the weight's bits.
    """
    rule = AdamRule(nesterov, is_zero(eps_root))
    return optimizer(
        rule, adam_moments(b1, b2, eps, eps_root, nesterov), learning_rate, storage, b1,
        weight_decay=weight_decay, mask=mask, decouple_lr=decouple_lr, slot_dtypes={"mu": mu_dtype},
    )  # fmt: skip


@with_common_arguments
def flash_adam(
    learning_rate: ScalarOrSchedule,
    b1: float | jax.Array = 0.9,
    b2: ScalarOrSchedule = 0.999,
    eps: float | jax.Array = 1e-8,
    eps_root: float | jax.Array = 0.0,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = False,
    storage: Storage = Storage(),  # noqa: B008 (frozen)
) -> optax.GradientTransformationExtraArgs:
    """`flash_adamw` without weight decay; the arguments of `optax.adam`.

    As in optax, `update(grads, state)` needs no parameters, unless they are 16-bit with a
    correction.

    Example:
      >>> import optax, optax_lowmem as lowmem
      >>> tx = lowmem.flash_adam(1e-3)
    """
    return flash_adamw(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, 0.0, nesterov=nesterov, storage=storage
    )


_COAT = Storage(mu=expanded_e4m3(), nu=expanded_e4m3(signed=False), group_size=128)


@with_common_arguments
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

    (COAT, equation 1 and section 4.2), storing the codes of f(m) and f(v), with a maximum and
    a k for each group of 128. It is `flash_adamw` with other codecs; the first nine arguments,
    their order and their defaults are those of `optax.adamw`.

    Args:
      eps_root: added inside the root, where the paper's table has its epsilon.

    Returns:
      An optax transformation. 16-bit parameters get a correction for their master weights; f32
      parameters need none.

    Raises:
      ValueError: for a hyperparameter out of range; in `init` and `update` for leaves that cannot
        be optimized and trees that do not match, by name.
      TypeError: for a 16-bit hyperparameter.

    Numerics: see `codecs.expanded`. A nonzero value never gets code 0, so the denominator never
    underflows where v > 0.

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
      Training, 2025, arXiv 2410.19313.

    Deviations from the paper: stochastic rounding (the paper uses `Storage(rounding="nearest")`),
    and those of `codecs.expanded`.
    """
    return flash_adamw(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask,
        nesterov=nesterov, storage=completed(storage, _COAT), decouple_lr=decouple_lr,
    )  # fmt: skip
