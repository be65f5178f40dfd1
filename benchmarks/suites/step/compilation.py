"""CPU time and temporaries of compiling a step of many leaves: ours and optax's.

python -m benchmarks.run compile --record
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_lowmem as lowmem
from benchmarks import records

CASES = ("mixed-100", "mixed-400", "equal-200", "equal-1000")
NAMES = ("optax.adamw", "lowmem.step")
PACKED = "lowmem.step, small leaves packed"
Step = Callable[[Any, Any, Any], tuple[Any, Any]]  # (gradients, state, weights) -> the new two
Prepared = tuple[Step, tuple[Any, ...]]


def shapes(case: str) -> list[tuple[int, int]]:
    """Shapes of the leaves of a case: `equal-<n>`, or `mixed-<n>`, of 40 shapes."""
    kind, count = case.split("-")
    if kind not in ("equal", "mixed"):
        raise ValueError(f"no case {case!r}: equal-<leaves> or mixed-<leaves>")
    return [(64, 64) if kind == "equal" else (32 + 8 * (i % 40), 64) for i in range(int(count))]


def implementation(name: str) -> tuple[Callable[[Any], tuple[Any, Any]], Step]:
    """Weights and state from parameters, and the step, of one of `NAMES` or `PACKED`."""
    if name != "optax.adamw":
        tx = lowmem.flash_adamw(1e-3)
        if name == PACKED:
            tx = lowmem.pack_small_leaves(tx)
        return lambda p: lowmem.init(tx, p), lambda g, s, p: lowmem.step(tx, g, s, p)
    theirs = optax.adamw(1e-3)

    def step(g: Any, s: Any, p: Any) -> tuple[Any, Any]:
        updates, s = theirs.update(g, s, p)
        return optax.apply_updates(p, updates), s

    return lambda p: (p, theirs.init(p)), step


def prepared(name: str, case: str) -> Prepared:
    """A step and its abstract arguments."""
    params = {
        f"w{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i, shape in enumerate(shapes(case))
    }
    init, step = implementation(name)
    weights, state = jax.eval_shape(init, params)
    return step, (weights, state, weights)


def measure(name: str, case: str) -> dict[str, float]:
    """CPU milliseconds of tracing and compilation a leaf, and bytes of temporaries."""
    step, arguments = prepared(name, case)
    start = time.process_time()
    program = jax.jit(step).lower(*arguments).compile()
    milliseconds = 1e3 * (time.process_time() - start)
    return {
        "cpu_ms_per_leaf": milliseconds / len(shapes(case)),
        "temp_bytes": float(program.memory_analysis().temp_size_in_bytes),
    }


@records.suite(case={"nargs": "+", "default": list(CASES)})
def main(args: argparse.Namespace) -> Iterator[records.Rows]:
    jax.config.update("jax_enable_compilation_cache", False)
    jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()  # XLA's own
    units = {"cpu_ms_per_leaf": "ms", "temp_bytes": "B"}
    for case in args.case:
        for name in NAMES:
            values = {m: (value, units[m]) for m, value in measure(name, case).items()}
            yield records.records_of("compile", case, name, values)
