"""Names of steps in compiled programs, from which to read what stepped each parameter."""

import re
import urllib.parse
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import jax

_SCOPE = re.compile(r"lowmem_step\(([^()]*)\)/by_(\w+)")


def scope(paths: Iterable[str], implementation: str) -> AbstractContextManager[None]:
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
