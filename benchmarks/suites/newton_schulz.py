"""Time of Newton-Schulz iterations on a matrix and on its Gram matrix, by shape and coefficients.

python -m benchmarks.run newton_schulz --record
"""

import argparse
import time
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import records
from benchmarks.records import Rows
from benchmarks.render import Rendered, Table
from optax_lowmem._src.optimizers import newton_schulz
from optax_lowmem._src.step.matrices import _ELEMENTS, _temporary_elements

STACKS = ((16, 2048, 8192), (16, 512, 2048), (16, 1024, 2048), (16, 2048, 2048))  # of Llama-3.2-1B
STANDARD = (newton_schulz.STANDARD,) * 5
# implementation -> (coefficients, preconditioning, least ratio of the sides of a Gram matrix)
VARIANTS = {
    "plain": (STANDARD, "frobenius", 1 << 30),
    "gram": (STANDARD, "frobenius", 1),
    "turbo plain": (newton_schulz.PRESETS["turbo"], "aol", 1 << 30),
    "turbo gram": (newton_schulz.PRESETS["turbo"], "aol", 1),
    "polar gram": (newton_schulz.PRESETS["polar_express"], "frobenius", 1),
}


def case(count: int, rows: int, columns: int) -> str:
    return f"{count} x {rows} x {columns}"


def measure(stack: tuple[int, int, int], impl: str, repeats: int) -> Rows:
    iterations, preconditioning, ratio = VARIANTS[impl]
    together = max(1, _ELEMENTS // _temporary_elements(*stack[1:]))

    def run(x: jax.Array) -> jax.Array:
        eps = jnp.float32(1e-8)
        one = lambda m: newton_schulz.polar_factors(m[None], iterations, preconditioning, eps)[0]  # noqa: E731
        return jax.lax.map(one, x, batch_size=together)

    x, times = jax.random.normal(jax.random.key(1), stack, jnp.bfloat16), []
    with mock.patch.object(newton_schulz, "_LONG", ratio):
        compiled = jax.jit(run).lower(x).compile()
    jax.block_until_ready(compiled(x))
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(x))
        times.append(time.perf_counter() - start)
    values = {"ms": (float(np.median(times)) * 1e3, "ms")}
    return records.records_of("newton_schulz", case(*stack), impl, values)


@records.suite(
    repeats={"type": int, "default": 7},
    stack={"type": int, "nargs": 3, "help": "matrices, rows and columns; default: Llama's"},
)
def main(args: argparse.Namespace) -> Iterator[Rows]:
    for stack in [tuple(args.stack)] if args.stack else STACKS:
        for impl in VARIANTS:
            yield measure(stack, impl, args.repeats)


def table(rows: Rows) -> Table:
    """Milliseconds of each stack, and relative to iterating on the matrix itself."""
    head, body, used = ["stack", *VARIANTS], [], []
    for name, of in records.grouped(
        records.newest(rows, bench="newton_schulz"), "case", "impl"
    ).items():
        if set(VARIANTS) <= set(of):
            cells = [
                f"{of[v]['value']:.2f} ({of[v]['value'] / of['plain']['value']:.2f})"
                for v in VARIANTS
            ]
            body.append([name, *cells])
            used += [of[v] for v in VARIANTS]
    return head, body, used


TABLES = {"newton_schulz": Rendered(table, "newton_schulz")}
