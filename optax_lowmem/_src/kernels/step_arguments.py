"""Arguments of `lowmem.step` that every implementation reads, and the names of its operations."""

import contextlib
import dataclasses
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jax
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


# ---- names of steps in compiled programs ---------------------------------------------------------

_SCOPE = re.compile(r"lowmem_step\(([^()]*)\)/by_(\w+)")


def scope(paths: Iterable[str], implementation: str) -> contextlib.AbstractContextManager[None]:
    """Name the operations that step some parameters by their paths and the implementation."""
    names = ",".join(urllib.parse.quote(path) for path in paths)
    return jax.named_scope(f"lowmem_step({names})/by_{implementation}")


def implementations(compiled: Any) -> dict[str, str]:
    """Return the implementation that steps each parameter in a compiled program.

    `explain` tells what a step on this machine is traced for; whether its kernels run depends on
    the devices that the program is for.

    Args:
      compiled: `jax.jit(step).lower(...).compile()`, or its text.

    Returns:
      `pallas`, `triton` or `pallas_tpu` for kernels, or `xla`, by the parameter's path. Means over
      blocks of a parameter have an entry of their own. If a program steps a parameter in two ways,
      as in branches, both are named. `pallas_or_xla` and `triton_or_xla` are those of a parameter
      of 2^31 or more elements: the kernel steps it if each shard has fewer, otherwise XLA does. The
      program's names do not tell which.

    Example:
      >>> import jax, jax.numpy as jnp, optax_lowmem as lowmem
      >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
      >>> tx = lowmem.flash_lion(1e-4)
      >>> step = jax.jit(lambda *args: lowmem.step(tx, *args))
      >>> lowmem.implementations(step.lower(params, tx.init(params), params).compile())
      {'w': 'xla'}
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    found: dict[str, set[str]] = {}
    for names, implementation in _SCOPE.findall(text):
        for name in names.split(","):
            found.setdefault(urllib.parse.unquote(name), set()).add(implementation)
    return {path: " and ".join(sorted(found[path])) for path in sorted(found)}
