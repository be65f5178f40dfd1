"""`optax.inject_hyperparams` with f32 hyperparameters also for 16-bit weights."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import optax

from optax_lowmem._src.arrays.hyperparameters import PowerDecay

# Arguments of this library's constructors that must be static under tracing, or are functions.
_STATIC = frozenset(
    ("accumulator_dtype", "below", "bits", "bits_init", "bits_loss", "bits_target", "blocks",
    "clean_dtype", "every", "group_size", "mask", "max_precondition_dim", "min_dim_size_to_factor",
    "mu_dtype", "muon_weight_dimension_numbers", "ns_coeffs", "ns_dtype", "ns_steps", "parts",
    "precondition_frequency", "seed", "smooth_beta", "weight_decay_mask")
)  # fmt: skip


def inject_hyperparams(
    inner_factory: Callable[..., optax.GradientTransformation],
    static_args: str | Iterable[str] = (),
) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """Store the hyperparameters of an optimizer in its state, in f32, where they can be changed.

    `optax.inject_hyperparams` casts hyperparameters, including defaults, to the dtype of the
    parameters. In bf16 b2 = 0.999 is 1: `optax.adamw` then returns NaN, and our optimizers raise.
    This calls it with `hyperparam_dtype=jnp.float32`; state and updates are the same. A
    `b2_schedule` is not injected, so that it remains an exact mean without debiasing.

    Args:
      inner_factory: function that returns the optimizer, such as `lowmem.flash_adamw`.
      static_args: names of its arguments that should not be injected, since they are neither
        numbers nor schedules. Those of this library's optimizers are known, such as `mask` and
        `ns_steps`.

    Returns:
      A function with the arguments of `inner_factory`, each a number or a schedule. It returns an
      optax transformation whose state has them as `state.hyperparams`.

    Raises:
      ValueError: for names that are not arguments of `inner_factory`.

    Memory: 4 bytes per hyperparameter.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> tx = lowmem.inject_hyperparams(lowmem.flash_adamw)(learning_rate=1e-3)
      >>> params, state = lowmem.init(tx, {"w": jnp.ones((64, 128))})
      >>> state.hyperparams["learning_rate"] = 5e-4
      >>> params, state = lowmem.step(tx, {"w": jnp.ones((64, 128))}, state, params)
      >>> state.hyperparams["b2"].dtype
      dtype('float32')
    """
    static = {static_args} if isinstance(static_args, str) else set(static_args)
    if _is_ours(inner_factory):
        static |= _STATIC & inspect.signature(inner_factory).parameters.keys()
    optax.inject_hyperparams(inner_factory, static)  # raises for unknown names

    @functools.wraps(inner_factory)
    def make(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        arguments = inspect.signature(inner_factory).bind(*args, **kwargs).arguments
        exact = {name for name, value in arguments.items() if isinstance(value, PowerDecay)}
        # https://github.com/google-deepmind/optax/issues/1414
        injected = optax.inject_hyperparams(inner_factory, static | exact, jnp.float32)
        return injected(*args, **kwargs)

    return make


def _is_ours(factory: Callable[..., object]) -> bool:
    while isinstance(factory, functools.partial):
        factory = factory.func
    return getattr(factory, "__module__", "").startswith(f"{__name__.split('.')[0]}.")
