"""Steps of many leaves, ours and optax's: time of compiling them, host time of calling them.

python -m benchmarks.run compile --record   # CPU time and temporaries of compiling, nothing is run
python -m benchmarks.run call --record      # host time of a call

The device has nothing to do when a call begins. A call that does not wait for its results takes the
host so long; a program whose steps take the device longer than that hides it.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_lowmem as lowmem
from benchmarks import records
from benchmarks.peers import cases, in_jax

NAMES = ("optax.adamw", "lowmem.step")
CALLS = 60
Values = dict[str, tuple[float, Any]]  # metric -> value and unit


def shapes(case: str) -> Any:
    """Leaves of a case: a leaf set, `equal-<n>` of 64 x 64, or `mixed-<n>`, of 40 shapes."""
    if case in cases.LEAF_SETS:
        return cases.LEAF_SETS[case]()
    kind, count = case.split("-")
    rows = {"equal": lambda i: 64, "mixed": lambda i: 32 + 8 * (i % 40)}[kind]
    return {f"w{i}": jax.ShapeDtypeStruct((rows(i), 64), jnp.float32) for i in range(int(count))}


def implementation(name: str) -> tuple[Callable[[Any], tuple[Any, Any]], Callable[..., Any]]:
    """Weights and state from parameters, and the step, of one of `NAMES`."""
    if name == "optax.adamw":
        theirs = optax.adamw(1e-3)
        return lambda p: (p, theirs.init(p)), in_jax.update_and_apply(theirs)
    tx = lowmem.flash_adamw(1e-3)
    return lambda p: lowmem.init(tx, p), in_jax.step_of(tx)


def compiled(name: str, case: str) -> Values:
    """CPU milliseconds of tracing and compilation per leaf, and bytes of temporaries."""
    init, step = implementation(name)
    weights, state = jax.eval_shape(init, shapes(case))
    start = time.process_time()
    program = jax.jit(step).lower(weights, state, weights).compile()
    each = 1e3 * (time.process_time() - start) / len(shapes(case))
    temporaries = float(program.memory_analysis().temp_size_in_bytes)
    return {"cpu_ms_per_leaf": (each, "ms"), "temp_bytes": (temporaries, "B")}


def called(name: str, case: str) -> Values:
    """Median milliseconds of a call, and how many arrays go in and come out."""
    init, step = implementation(name)
    params, state = init(jax.tree.map(lambda s: jnp.full(s.shape, 0.01, jnp.float32), shapes(case)))
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 0.01, p.dtype), params)
    program = jax.jit(step, donate_argnums=(1, 2))
    arrays = len(jax.tree.leaves((2 * [state, params], grads)))
    times = []
    for _ in range(CALLS):
        jax.block_until_ready((state, params))
        start = time.perf_counter()
        params, state = program(grads, state, params)
        times.append(1e3 * (time.perf_counter() - start))
    return {"host_ms": (statistics.median(times[5:]), "ms"), "arrays": (arrays, "")}


@records.suite(case={"nargs": "+", "default": ["gpt2-124m", "equal-1000"]})
def call(args: argparse.Namespace) -> Iterator[records.Rows]:
    for case in args.case:
        for name in NAMES:
            yield records.records_of("call", case, name, called(name, case))


@records.suite(
    case={"nargs": "+", "default": ["mixed-100", "mixed-400", "equal-200", "equal-1000"]}
)
def compile(args: argparse.Namespace) -> Iterator[records.Rows]:  # noqa: A001 (the suite's name)
    jax.config.update("jax_enable_compilation_cache", False)
    jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()  # XLA's own
    for case in args.case:
        for name in NAMES:
            yield records.records_of("compile", case, name, compiled(name, case))
