"""Times a JAX step on the device: looped in one jit, with donated buffers."""

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.peers import cases
from benchmarks.peers.in_jax import Implementation

Carry = tuple[Any, Any, Any]  # weights, state, gradients
CALL_SECONDS = 0.6  # of device work in one call, beside which its launch is little
MAX_STEPS = 1200


@functools.partial(jax.jit, static_argnums=(0, 1))  # with no f32 copy of a leaf
def _noise(shape: tuple[int, ...], dtype: Any, scale: jax.Array, salt: jax.Array) -> jax.Array:
    """Uniform, mean 0, standard deviation `scale`; cheap to compile."""
    x = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) + salt * jnp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    centred = (x >> 8).astype(jnp.float32) * 2.0**-23 - 1.0
    return (centred * (scale * 3.0**0.5)).astype(dtype)


class Setup:
    """Shapes of weights, state and gradients, which a call makes.

    One program for all leaves would compile longer than the step.
    """

    def __init__(self, own: Implementation, shapes: Any) -> None:
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, own.dtype), shapes)
        self.init = jax.jit(own.init) if own.compiles_init else own.init
        self.shapes = params, jax.eval_shape(own.init, params), params

    def __call__(self) -> Carry:
        leaves, treedef = jax.tree.flatten(self.shapes[0])

        def random(scale: float, first: int) -> Any:
            made = (_noise(x.shape, x.dtype, scale, jnp.uint32(first + i))
                    for i, x in enumerate(leaves))  # fmt: skip
            return treedef.unflatten(made)

        params = random(cases.WEIGHT_SCALE, 0)
        return params, self.init(params), random(cases.GRADIENT_SCALE, len(leaves))


def moved_bytes(implementation: Implementation, carry: Carry) -> int:
    """Compute the bytes a step must move: gradients read, weights and state read and written."""
    params, state, grads = carry
    return live_bytes(grads) + implementation.rereads(grads) + 2 * live_bytes((params, state))


def live_bytes(tree: Any) -> int:
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def looped(step: Callable, steps: int, shardings: Any = None) -> Callable:
    """`steps` steps in one jit, whose weights and state may have shardings."""

    def body(_: jax.Array, carry: Carry) -> Carry:
        params, state, grads = carry
        # Without this the gradient is the same value in every step, and XLA moves what depends
        # on it alone (the gradient times 1 - b1, its square) out of the loop.
        params, grads = jax.lax.optimization_barrier((params, grads))
        params, state = step(grads, state, params)
        return params, state, grads

    where = (*shardings, shardings[0]) if shardings else None
    loop = lambda carry: jax.lax.fori_loop(0, steps, body, carry)  # noqa: E731
    return jax.jit(loop, donate_argnums=0, out_shardings=where)


def steps_for(moved: int, tbps: float) -> int:
    """Steps of one call: CALL_SECONDS of them at the speed of a copy."""
    return max(4, min(MAX_STEPS, round(CALL_SECONDS * tbps * 1e12 / moved)))


class Runner:
    """A compiled step and loop, and their buffers, which `start` makes."""

    def __init__(self, own: Implementation, make: Any, steps: Callable[[int], int]) -> None:
        """Compiles; `make` has shapes of leaves, or is a `Setup`; `steps` follow a step's bytes."""
        self.make = make if hasattr(make, "shapes") else Setup(own, make)
        carry = params, state, grads = self.make.shapes
        moved = moved_bytes(own, carry)
        self.steps = steps(moved)
        jax.clear_caches()  # traces of other implementations would be found again
        started = time.perf_counter()
        step = jax.jit(own.step, donate_argnums=(1, 2), out_shardings=own.shardings)
        self.step = step.lower(grads, state, params).compile()
        seconds, memory = time.perf_counter() - started, self.step.memory_analysis()
        self.loop = looped(own.step, self.steps, own.shardings).lower(carry).compile()
        nothing = looped(lambda grads, state, params: (params, state), 0, own.shardings)
        self.no_loop = nothing.lower(carry).compile()
        self.found: dict[str, Any] = {
            "compile_s": seconds,
            "temp_bytes": memory.temp_size_in_bytes,
            "unaliased_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
            "moved_bytes": moved,
            "live_bytes": live_bytes(carry),
            "steps": self.steps,
            "loop_temp_bytes": self.loop.memory_analysis().temp_size_in_bytes,
            "version": own.version,
        }

    def start(self) -> None:
        """Takes the first steps, and notes the device's peak over one, where the device counts.

        The peak is that of this step only in a process that did nothing else.
        """
        device = jax.local_devices()[0]
        params, state, grads = jax.block_until_ready(self.make())
        before = device.memory_stats()
        self.carry = (*jax.block_until_ready(self.step(grads, state, params)), grads)
        if before and (after := device.memory_stats()):
            peaks = {"peak_bytes": after, "setup_peak_bytes": before}
            self.found |= {name: of["peak_bytes_in_use"] for name, of in peaks.items()}
        self.found["call_ms"] = self._call_ms()
        self.time()

    def _call_ms(self) -> float:
        """Milliseconds of a call without a step: at most this is in a time of `steps` steps."""
        loop, self.loop = self.loop, self.no_loop
        times = [self.time() for _ in range(4)]
        self.loop = loop
        return min(times) * self.steps

    def time(self) -> float:
        started = time.perf_counter()
        self.carry = jax.block_until_ready(self.loop(self.carry))
        return (time.perf_counter() - started) / self.steps * 1e3


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def _copies(x: jax.Array, times: int) -> jax.Array:
    """Reads and writes all of x `times` times: each needs the one before."""
    return jax.lax.fori_loop(0, times, lambda i, x: x ^ i.astype(jnp.uint32), x)


def copy_tbps(elements: int, times: int, repeats: int) -> list[float]:
    """TB/s, read and written, of passes over `elements` 32-bit words."""
    x = jax.block_until_ready(_copies(jnp.zeros(elements, jnp.uint32), times))
    rates = []
    for _ in range(repeats):
        started = time.perf_counter()
        x = jax.block_until_ready(_copies(x, times))
        rates.append(2 * x.nbytes * times / (time.perf_counter() - started) / 1e12)
    return rates
