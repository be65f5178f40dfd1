"""Hyperparameters: checked if they are numbers, f32 operands if they are traced."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from optax_lowmem._src.arrays.compiled import compiled
from optax_lowmem._src.arrays.typing import Arrays


def check_choice(name: str, value: object, choices: Iterable[str | None]) -> None:
    """Raise unless an option has one of these values."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")


def is_zero(value: object) -> bool:
    """Return whether a hyperparameter is the number 0, not a schedule or an array."""
    return isinstance(value, int | float) and value == 0


LEAST = 1e-30  # what divides instead of a hyperparameter of 0
INJECT = " To inject hyperparameters, use lowmem.inject_hyperparams."  # which makes them arrays


def check_count(name: str, value: object, least: int, what: str, advice: str = "") -> None:
    """Raise unless an option is an int of at least `least`; `what` is counted."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"{name} must be a number of {what}, at least {least}, got {value!r}.{advice}"
        )


def check_range(name: str, value: object, low: float, high: float = math.inf) -> None:
    """Raise unless a number is in [low, high); schedules and 32-bit arrays pass."""
    if not callable(value):
        _check_real(name, value, f"{name} must be a number, an f32 scalar or a schedule, got %r")
    if not isinstance(value, int | float | np.number):
        return
    if not low <= value < high:
        span = f">= {low:g}" if high == math.inf else f"in [{low:g}, {high:g})"
        raise ValueError(f"{name} must be {span}, got {value!r}")


def check_schedule(name: str, schedule: Callable[[jax.Array], ArrayLike]) -> None:
    """Raise unless the first value of a schedule is a real number >= 0."""
    with jax.ensure_compile_time_eval():
        first = schedule(jnp.zeros((), jnp.int32))
        if first is not None:
            error = (
                f"the schedule of {name} gives %r in the first step, and must be a function that "
                "returns a number or an f32 scalar."
            )
            _check_real(name, first, error)
        value = as_f32(name, first)
        if not isinstance(value, jax.core.Tracer) and not float(value) >= 0:
            raise ValueError(
                f"the schedule of {name} gives {first!r} in the first step, and must be >= 0."
            )


def _check_real(name: str, value: object, error: str) -> None:
    """Raise for a complex number or bool, and for a 16-bit hyperparameter, in which 0.9999 is 1."""
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        real = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    if not real:
        raise TypeError(error % (value,))
    if dtype is not None and jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16):
        raise TypeError(
            f"hyperparameter {name} is {dtype}, in which 0.9999 is 1. Give f32, in schedules too; "
            "optax.inject_hyperparams casts to the dtype of the parameters: use "
            "lowmem.inject_hyperparams, or pass hyperparam_dtype=jnp.float32."
        )


def as_f32(name: str, value: object) -> jax.Array:
    """Convert a hyperparameter to f32; raises for 16-bit values, schedules, arrays and None."""
    if value is None:
        raise TypeError(f"the schedule of {name} returned None: let it return a number.")
    if callable(value):
        raise TypeError(
            f"{name} takes a number or an f32 scalar here, not a schedule ({value!r}): schedule it "
            "with lowmem.inject_hyperparams."
        )
    _check_real(name, value, f"{name} must be a number or an f32 scalar, got %r")
    scalar = jnp.asarray(value, jnp.float32)
    if scalar.ndim:
        raise TypeError(
            f"{name} must be a scalar, got an array of shape {scalar.shape}: for per-leaf values "
            "use optax.partition."
        )
    return scalar


def complement(name: str, decay: float | jax.Array) -> jax.Array:
    """Return 1 - decay in f32, computed in float64 if decay is a number."""
    if isinstance(decay, int | float):
        return jnp.float32(1.0 - decay)
    return 1 - as_f32(name, decay)


def following(count: jax.Array) -> jax.Array:
    """Return count + 1, without overflow: the largest integer stays as it is."""
    return jnp.maximum(count + 1, count)


def bias_correction(name: str, decay: float | jax.Array, step: jax.Array) -> jax.Array:
    """1 - decay^step, without the cancellation of that expression (6e-5 at step 1 in f32)."""
    if isinstance(decay, int | float):
        log = jnp.float32(math.log(decay) if decay > 0 else -math.inf)
    else:
        log = jnp.log(as_f32(name, decay))
    return -jnp.expm1(step.astype(jnp.float32) * log)


@dataclasses.dataclass(frozen=True)
class PowerDecay:
    r"""The decay 1 - t^-power of step t = count + 1, as an optax schedule."""

    power: float

    def __post_init__(self) -> None:
        if isinstance(self.power, bool) or not isinstance(self.power, int | float | np.number):
            raise TypeError(f"power must be a number known when tracing, got {self.power!r}")
        if not 0 < self.power <= 1:  # over 1 the sum of t^-power converges: nothing is forgotten
            raise ValueError(f"power must be in (0, 1], got {self.power!r}")

    def _exponent(self, count: ArrayLike) -> jax.Array:
        step = jnp.asarray(count).astype(jnp.float32) + 1
        return -jnp.float32(self.power) * jnp.log(step)

    def __call__(self, count: ArrayLike) -> jax.Array:
        """Return the decay after `count` steps: 0 at first."""
        return -jnp.expm1(self._exponent(count))

    def complement(self, count: ArrayLike) -> jax.Array:
        """Return t^-power; computed as 1 - decay it would be up to 0.2 % off by t = 10^6."""
        return jnp.exp(self._exponent(count))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["arguments"], meta_fields=["function"]
)
@dataclasses.dataclass(frozen=True)
class Formula:
    """Computes the hyperparameters of a step from the count before it.

    `function`, at module level, takes `arguments` (numbers, arrays, schedules, other formulas) and
    the count.
    """

    function: Callable[..., Arrays]
    arguments: tuple[object, ...] = ()

    def __call__(self, count: jax.Array) -> Arrays:
        """Return f32 scalars; a user's schedule is called outside of `compiled`."""
        schedules = [value for value in jax.tree.leaves(self.arguments) if callable(value)]
        if not all(isinstance(schedule, PowerDecay) for schedule in schedules):
            return self.function(*self.arguments, count)
        return compiled(self.function)(*self.arguments, count)


class Decay(NamedTuple):
    """The decay b_t of an average m_t = b_t m_(t-1) + (1 - b_t) x_t at one step, as f32 scalars."""

    value: jax.Array
    complement: jax.Array  # 1 - b_t
    correction: jax.Array  # 1 - b_1 b_2 ... b_t: the sum of the weights of x_1 ... x_t


def check_decay(name: str, decay: object) -> None:
    """Raise unless a decay is in [0, 1), or a schedule that starts at 0.

    Another schedule would need the product b_1 ... b_t in the state.
    """
    check_range(name, decay, 0.0, 1.0)
    if not callable(decay) or isinstance(decay, PowerDecay):
        return
    with jax.ensure_compile_time_eval():
        first = float(as_f32(name, decay(jnp.zeros((), jnp.int32))))
    if first != 0:
        raise ValueError(
            f"the schedule of {name} starts at {first:g}, not at 0: only then is the average a "
            "weighted mean without debiasing. Use lowmem.b2_schedule, or "
            "lowmem.inject_hyperparams, which debiases by the decay of the step."
        )


def decay_at(
    name: str, decay: float | jax.Array | Callable[[jax.Array], ArrayLike], count: jax.Array
) -> Decay:
    """Evaluate a decay (see `check_decay`) at the step after `count` steps."""
    if not callable(decay):
        after = bias_correction(name, decay, following(count))
        return Decay(as_f32(name, decay), complement(name, decay), after)
    one = jnp.float32(1)
    if isinstance(decay, PowerDecay):
        return Decay(decay(count), decay.complement(count), one)
    value = as_f32(name, decay(count))
    return Decay(value, 1 - value, one)
