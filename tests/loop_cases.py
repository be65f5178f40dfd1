"""Data, sizes and optimizers shared by the tests of other packages' training loops."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lowmem as lowmem
from optax_lowmem import Storage
from tests.tolerances import LOSS_OF_LOOPS

STEPS, RATE = 60, 3e-3
WIDTHS = (64, 128, 64)  # both kernels have 8192 elements: they are compressed
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, RATE, 5, STEPS)


@functools.cache
def data() -> tuple[jax.Array, jax.Array]:
    """More examples than the model can learn by heart, with noise: the loss has a floor."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, WIDTHS[0]))
    teacher = rng.normal(size=(WIDTHS[0], WIDTHS[-1])) / 8
    y = np.tanh(x @ teacher) + rng.normal(0, 0.3, (256, WIDTHS[-1]))
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def exchanged(make: Callable[..., Any], dtype: str, options: dict[str, Any]) -> Any:
    """Return our optimizer; `options` are those of `Storage` that 16-bit weights ask for."""
    storage = Storage(**({} if dtype == "float32" else options))
    return make(lowmem.flash_adam, lowmem.flash_adamw, storage=storage)


def compressed(state: Any) -> list[jax.Array]:
    """Return the first moments of a state that are stored as codes."""
    return [x for x in jax.tree.leaves(optax.tree.get(state, "mu")) if x.dtype == jnp.int8]


def assert_learns_as_optax(found: float, start: float, plain: float) -> None:
    assert plain < 0.5 * start
    assert abs(found - plain) <= LOSS_OF_LOOPS * plain
