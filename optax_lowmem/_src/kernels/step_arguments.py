"""Arguments of `lowmem.step` that every implementation below it reads."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from jax.sharding import NamedSharding


@dataclasses.dataclass(frozen=True)
class StepArguments:
    """Arguments of `lowmem.step` that optax's wrappers would not pass to the optimizer inside."""

    # the implementation that the caller chose, or None for the fastest
    implementation: str | None = None
    shardings: Mapping[str, NamedSharding] | None = None  # of each leaf, by path
    tuning: Any = None  # tile and launch sizes that a tuner tries, or None for those of the device


# optax's wrappers are closures that call `update` with arguments of their choice, so these have no
# other way in: https://github.com/google-deepmind/optax/issues/1
_step_arguments: ContextVar[StepArguments] = ContextVar("step", default=StepArguments())  # noqa: B039 (frozen)


@contextlib.contextmanager
def stepping(**changes: Any) -> Iterator[None]:
    """Set some of the `StepArguments` of steps that are traced in this context."""
    token = _step_arguments.set(dataclasses.replace(_step_arguments.get(), **changes))
    try:
        yield
    finally:
        _step_arguments.reset(token)


def current() -> StepArguments:
    """Return the `StepArguments` that an enclosing `stepping` set."""
    return _step_arguments.get()


def sharding(path: str) -> NamedSharding | None:
    """Return the sharding of a leaf in the enclosing `stepping` context, or None."""
    return (_step_arguments.get().shardings or {}).get(path)
