"""The memory of a compiled step, and the micro-batches that it has room for."""

import resource
import sys
from collections.abc import Callable
from typing import Any

import jax
from _gpt.arguments import free_bytes, is_out_of_memory
from _gpt.train import planned_bytes

from optax_lowmem import plan

GIB = 2.0**30
_OF_FREE = 0.9  # of a CPU's free memory; of a GPU's, gaps between arrays need the rest


def used_bytes() -> int:
    """Return the peak memory: of the device, or on a CPU, of this process."""
    stats = jax.local_devices()[0].memory_stats() or {}
    unit = 1 if sys.platform == "darwin" else 1024
    return stats.get("peak_bytes_in_use") or (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    )


def limit_bytes(budget: str | None) -> int:
    """Return the bytes that a step may use."""
    given = plan.bytes_of(budget) if budget else None
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return int(_OF_FREE * free_bytes()) if given is None else max(given - used_bytes(), 0)
    limit = (device.memory_stats() or {}).get("bytes_limit", sys.maxsize)
    return int(0.95 * limit) if given is None else min(int(plan.USABLE * given), limit)


def room(budget: str | None, limit: int) -> str:
    """Return a clause that says how much a step may use."""
    gib = f"{limit / GIB:.2f} GiB"
    if budget is None:
        return f"{gib} may be used"
    beside = "what the process has" if jax.default_backend() == "cpu" else "gaps between arrays"
    return f"{gib} of --budget {budget} are left beside {beside}"


def step_that_fits(
    compile_step: Callable[[int], Any], numbers: list[int], limit: int
) -> tuple[int | None, Any, int]:
    """Compile a step with more and more micro-batches, until its bytes are at most `limit`.

    Returns:
      (number, compiled step, its bytes); the number is None if the last does not fit either.
    """
    compiled, size, least = None, 0, 0.0
    for number in numbers:
        if number < least and number != numbers[-1]:
            continue
        try:
            compiled = compile_step(number)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            continue
        size = planned_bytes(compiled)
        if size <= limit:
            return number, compiled, size
        # temporaries are at least those of one micro-batch over the number of them
        fixed = compiled.memory_analysis().argument_size_in_bytes
        least = number * (size - fixed) / max(limit - fixed, 1)
    return None, compiled, size
