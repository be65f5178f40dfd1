"""Times programs on the device: looped in one jit, taking turns."""

import functools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

CALL_SECONDS = 0.15
# A plan's bytes hardly depend on how kernels are chosen, which is most of compiling.
QUICK = {"xla_gpu_autotune_level": "0"}


class Timed:
    """A function of arrays, looped in one jit."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], guess_s: float) -> None:
        self.args, self.calls = args, max(3, min(400, round(CALL_SECONDS / guess_s)))
        # how often is known when compiling: else a GPU waits for the host before each turn
        loop = functools.partial(self._loop, function, calls=self.calls)
        self.run = jax.jit(loop).lower(args).compile()
        self.time()

    @classmethod
    def _loop(cls, function: Callable[..., Any], args: tuple[Any, ...], calls: int) -> Any:
        def body(turn: jax.Array, found: Any) -> Any:
            # arguments that wait for the result before: nothing moves out of the loop
            own, _ = lax.optimization_barrier((args, found))
            return function(*cls.arguments(own, turn))

        shapes = jax.eval_shape(function, *args)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return lax.fori_loop(0, calls, body, zeros)

    arguments = staticmethod(lambda own, turn: own)

    def time(self) -> float:
        started = time.perf_counter()
        jax.block_until_ready(self.run(self.args))
        return (time.perf_counter() - started) / self.calls * 1e3


class Keyed(Timed):
    """`Timed` whose last argument, a key, is the turn's number: nothing moves out of the loop."""

    # as it is: an addition would be a launch more, of kernels alone
    arguments = staticmethod(
        lambda own, turn: (*own[:-1], lax.bitcast_convert_type(turn, jnp.uint32))
    )


def in_turns(timed: dict[str, Any], repeats: int) -> dict[str, list[float]]:
    """Times of each, as its method `time` says them, in turns."""
    found: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(repeats):
        for name, one in timed.items():
            found[name].append(one.time())
    return found


def call_ms(program: Any, *args: Any, calls: int = 5, repeats: int = 3) -> float:
    """Milliseconds of one call, from calls that wait for the device at their end alone."""
    jax.block_until_ready(program(*args))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            found = program(*args)
        jax.block_until_ready(found)
        times.append(1e3 * (time.perf_counter() - begin) / calls)
    return statistics.median(times)


def middle(times: Iterable[float], unit: str = "ms") -> tuple[tuple[float, str], dict[str, Any]]:
    """The median with its unit, and the fields of a record that say how far turns differ."""
    times = list(times)
    spread = {"min": min(times), "max": max(times), "repeats": len(times)}
    return (statistics.median(times), unit), spread


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"
