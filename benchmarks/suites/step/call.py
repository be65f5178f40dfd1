"""Host time of calling a compiled step of many leaves, ours (as it is, packed) and optax's.

python -m benchmarks.run call --record

The device has nothing to do when a call begins. A call that does not wait for its results takes the
host so long; a program whose steps take the device longer than that hides it.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import records
from benchmarks.peers import cases
from benchmarks.suites.step import compilation

CASES = ("gpt2-124m", "equal-1000")
NAMES = (*compilation.NAMES, compilation.PACKED)
CALLS = 60


def shapes(case: str) -> Any:
    """Shapes of the leaves: a leaf set of the peers' benchmark, or `equal-<leaves>` of 64 x 64."""
    if not case.startswith("equal-"):
        return cases.LEAF_SETS[case]()
    count = int(case.removeprefix("equal-"))
    return {f"w{i}": jax.ShapeDtypeStruct((64, 64), jnp.float32) for i in range(count)}


def measure(name: str, case: str) -> dict[str, tuple[float, Any]]:
    """Median milliseconds of a call, and how many arrays go in and come out."""
    init, step = compilation.implementation(name)
    params, state = init(jax.tree.map(lambda s: jnp.full(s.shape, 0.01, jnp.float32), shapes(case)))
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 0.01, p.dtype), params)
    compiled = jax.jit(step, donate_argnums=(1, 2))
    arrays = len(jax.tree.leaves((2 * [state, params], grads)))
    times = []
    for _ in range(CALLS):
        jax.block_until_ready((state, params))
        start = time.perf_counter()
        params, state = compiled(grads, state, params)
        times.append(1e3 * (time.perf_counter() - start))
    return {"host_ms": (statistics.median(times[5:]), "ms"), "arrays": (arrays, "")}


@records.suite(case={"nargs": "+", "default": list(CASES)})
def main(args: argparse.Namespace) -> Iterator[records.Rows]:
    for case in args.case:
        for name in NAMES:
            yield records.records_of("call", case, name, measure(name, case))
