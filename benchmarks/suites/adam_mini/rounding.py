"""Q-Adam-mini's Table 5: what stochastic rounding costs, encoding a matrix of a million rows.

    python -m benchmarks.run rounding --record               # [1,000,000, 2048] f32: 12 GB
    python -m benchmarks.run rounding --rows 1000            # anywhere

Both read f32 and write int8 codes and a scale for each 256 values. The random numbers are a hash of
the position, made where they are used. The copy is what reading and writing as many bytes takes.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import records
from optax_lowmem import codecs
from optax_lowmem._src.core import random

WIDTH, GROUP, TRIALS = 2048, 256, 10  # the paper's
ROUNDINGS = ("nearest", "stochastic")


def encoder(rounding: str) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """(matrix, uint32 step) -> codes and scales, compiled."""

    def encode(x: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        noise = None
        if rounding == "stochastic":
            key = random.leaf_key(jnp.uint32(0), step, "matrix")
            noise = random.uniforms(key, x.shape, GROUP)
        return codecs.encode_array(codecs.affine(), x, GROUP, noise)

    return jax.jit(encode)


def seconds(work: Callable[..., Any], x: jax.Array, trials: int) -> list[float]:
    """Each trial's time, after two that do not count."""
    times = []
    for step in range(trials + 2):
        begin = time.perf_counter()
        jax.block_until_ready(work(x, jnp.uint32(step)))
        times.append(time.perf_counter() - begin)
    return times[2:]


def measure(rows: int, trials: int = TRIALS) -> dict[str, list[float]]:
    """Seconds of every trial: how it rounds -> times; `convert` is the copy."""
    x = jax.random.normal(jax.random.key(0), (rows, WIDTH), jnp.float32)
    work = {name: encoder(name) for name in ROUNDINGS}
    # as many bytes with no work: a byte of each value
    work["convert"] = jax.jit(lambda x, step: (x.astype(jnp.int8), step))
    return {name: seconds(function, x, trials) for name, function in work.items()}


def as_records(rows: int, times: dict[str, list[float]]) -> records.Rows:
    """One record a way to round: the median, with the paper's mean beside it."""
    found, case = [], f"affine-int8/{rows}x{WIDTH}"
    base = statistics.median(times["nearest"])
    for name, own in times.items():
        middle = statistics.median(own)
        more = {"mean": 1e3 * statistics.mean(own), "ratio_to_nearest": middle / base}
        found.append(
            records.record("rounding", case, name, "device_ms", 1e3 * middle, "ms", **more)
        )
    return found


@records.suite(rows={"type": int, "default": 1_000_000}, trials={"type": int, "default": TRIALS})
def main(args: argparse.Namespace) -> Iterator[records.Rows]:
    yield as_records(args.rows, measure(args.rows, args.trials))
