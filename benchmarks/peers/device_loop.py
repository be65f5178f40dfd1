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
CALL_SECONDS = 0.3  # of device work in one call, beside which its launch is little
MAX_STEPS = 600


# ---- what a step works on ------------------------------------------------------------------------


def _noise(shape: tuple[int, ...], scale: float, salt: jax.Array) -> jax.Array:
    """Uniform, mean 0, standard deviation `scale`; cheap to compile, made where it is used."""
    x = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) + salt * jnp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    centred = (x >> 8).astype(jnp.float32) * 2.0**-23 - 1.0
    return centred * (scale * 3.0**0.5)


def _random(leaf_set: str, scale: float, salt: jax.Array) -> Any:
    leaves, treedef = jax.tree.flatten(cases.LEAF_SETS[leaf_set]())
    first = salt * jnp.uint32(len(leaves))
    made = [_noise(leaf.shape, scale, first + i) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(treedef, made)


def build(init: Callable, gradients: Any, leaf_set: str, salt: jax.Array) -> Carry:
    """Weights, state and gradients; in a jit no f32 copy of them is stored."""
    params = _random(leaf_set, cases.WEIGHT_SCALE, salt)
    grads = _random(leaf_set, cases.GRADIENT_SCALE, salt + 1)
    return *init(params), jax.tree.map(lambda g: g.astype(gradients), grads)


@functools.cache  # implementations with one state share it
def _compiled_build(init: Callable, gradients: Any, leaf_set: str) -> Callable:
    made = jax.jit(functools.partial(build, init, gradients, leaf_set))
    return made.lower(jnp.uint32(0)).compile()


def setup(implementation: Implementation, leaf_set: str) -> Carry:
    """What `build` makes, on the device."""
    made = _compiled_build(implementation.init, implementation.gradients, leaf_set)
    params, state, grads = made(jnp.uint32(0))
    if implementation.late_init is not None:
        state = implementation.late_init(params)
    return jax.block_until_ready((params, state, grads))


def moved_bytes(carry: Carry) -> int:
    """What a step must move: gradients are read, weights and state read and written."""
    params, state, grads = carry
    return live_bytes(grads) + 2 * live_bytes((params, state))


def live_bytes(tree: Any) -> int:
    """Bytes of the arrays of a tree."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


# ---- one step ------------------------------------------------------------------------------------


def compile_step(implementation: Implementation, carry: Carry) -> tuple[Any, dict[str, Any]]:
    """One step with donated weights and state, and what its compiler says."""
    params, state, grads = carry
    jax.clear_caches()  # traces of other implementations would be found again
    started = time.perf_counter()
    step = jax.jit(implementation.step, donate_argnums=(1, 2)).lower(grads, state, params).compile()
    seconds = time.perf_counter() - started
    memory = step.memory_analysis()
    return step, {
        "compile_s": seconds,
        "temp_bytes": memory.temp_size_in_bytes,
        "unaliased_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
    }


def peak_bytes(implementation: Implementation, leaf_set: str) -> dict[str, Any]:
    """The device's peak over one step; of this step only in a process that did nothing else."""
    device = jax.local_devices()[0]
    if device.memory_stats() is None:
        return {"skipped": f"a {device.platform} device keeps no memory statistics"}
    carry = setup(implementation, leaf_set)
    before = device.memory_stats()["peak_bytes_in_use"]
    step, _ = compile_step(implementation, carry)
    params, state, grads = carry
    live = live_bytes(carry)
    del carry
    jax.block_until_ready(step(grads, state, params))
    peak = device.memory_stats()["peak_bytes_in_use"]
    return {"peak_bytes": peak, "live_bytes": live, "setup_peak_bytes": before}


# ---- many steps ----------------------------------------------------------------------------------


def looped(step: Callable, steps: int) -> Callable:
    """`steps` steps in one jit."""

    def body(_: jax.Array, carry: Carry) -> Carry:
        params, state, grads = carry
        # Without this the gradient is the same value in every step, and XLA moves what depends
        # on it alone (the gradient times 1 - b1, its square) out of the loop.
        params, grads = jax.lax.optimization_barrier((params, grads))
        params, state = step(grads, state, params)
        return params, state, grads

    return jax.jit(lambda carry: jax.lax.fori_loop(0, steps, body, carry), donate_argnums=0)


def steps_for(moved: int, tbps: float) -> int:
    """Steps of one call: CALL_SECONDS of them at the speed of a copy."""
    return max(4, min(MAX_STEPS, round(CALL_SECONDS * tbps * 1e12 / moved)))


class Runner:
    """A compiled loop and its buffers."""

    def __init__(
        self, implementation: Implementation, leaf_set: str, steps: Callable[[int], int]
    ) -> None:
        self.carry = setup(implementation, leaf_set)
        moved = moved_bytes(self.carry)
        self.steps = steps(moved)
        _, self.found = compile_step(implementation, self.carry)
        self.loop = looped(implementation.step, self.steps).lower(self.carry).compile()
        self.found |= {
            "moved_bytes": moved,
            "live_bytes": live_bytes(self.carry),
            "steps": self.steps,
            "loop_temp_bytes": self.loop.memory_analysis().temp_size_in_bytes,
            "call_ms": self._call_ms(),
            "version": implementation.version,
        }
        self.time()

    def _call_ms(self) -> float:
        """Milliseconds of a call without a step: at most this is in a time of `steps` steps."""
        loop, self.loop = self.loop, looped(lambda grads, state, params: (params, state), 0)
        times = [self.time() for _ in range(4)]
        self.loop = loop
        return min(times) * self.steps

    def time(self) -> float:
        """Milliseconds a step of one call."""
        started = time.perf_counter()
        self.carry = jax.block_until_ready(self.loop(self.carry))
        return (time.perf_counter() - started) / self.steps * 1e3


# ---- the copy ------------------------------------------------------------------------------------


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
