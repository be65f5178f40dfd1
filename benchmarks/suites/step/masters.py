"""Cost per step of stochastic rounding of 24-bit masters on a GPU.

python -m benchmarks.run masters --record                  # steps, interleaved in one process
"""

import argparse
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import optax_lowmem as lowmem
from benchmarks import records, timing
from benchmarks.peers import cases, device_loop, in_jax

KERNELS = ["xla", "pallas", "triton"]
ROUNDINGS = ("nearest", "stochastic")
SECONDS_TBPS = 3.5  # of an H200's copy: how many steps a call takes


def implementation(rounding: str, kernel: str, optimizer: str) -> in_jax.Implementation:
    """`lowmem.step` by one kernel, with masters rounded so."""
    make = cases.RECORDS[optimizer].make
    tx = make(**cases.OPTIMIZERS[optimizer], storage=lowmem.Storage(master_rounding=rounding))

    def step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return lowmem.step(tx, grads, state, params, implementation=kernel)

    return in_jax.Implementation(tx.init, step, jnp.bfloat16, f"optax-lowmem {records.commit()}")


def rows_of(
    leaf_set: str, kernel: str, optimizer: str, repeats: int, steps: int | None
) -> records.Rows:
    """One record a rounding, with its ratio to nearest; the roundings take turns."""

    def steps_for(moved: int) -> int:
        return steps or device_loop.steps_for(moved, SECONDS_TBPS)

    runners = {}
    for rounding in ROUNDINGS:
        made = implementation(rounding, kernel, optimizer)
        runners[rounding] = device_loop.Runner(made, cases.LEAF_SETS[leaf_set](), steps_for)
        runners[rounding].start()
    rows = []
    for rounding, times in timing.in_turns(runners, repeats).items():
        value, spread = timing.middle(times)
        more = {"least": spread["min"], "most": spread["max"], "repeats": repeats}
        case, impl = f"{leaf_set}/{optimizer}", f"{kernel}-{rounding}"
        rows.append(records.record("masters", case, impl, "device_ms", *value, **more))
    return [row | {"ratio_to_nearest": row["value"] / rows[0]["value"]} for row in rows]


@records.suite(
    leaf_set={"nargs": "+", "default": ["llama-3.2-1b", "gpt2-124m"], "choices": cases.LEAF_SETS},
    kernel={"nargs": "+", "default": KERNELS[1:], "choices": KERNELS},
    optimizer={"default": "adamw", "choices": ["adamw", "lion", "sgd"]},
    repeats={"type": int, "default": 9},
    steps={"type": int, "help": "in one jit; default: 0.6 s at copy speed"},
)
def main(args: argparse.Namespace) -> Iterator[records.Rows]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for leaf_set in args.leaf_set:
        for kernel in args.kernel:
            yield rows_of(leaf_set, kernel, args.optimizer, args.repeats, args.steps)
            jax.clear_caches()
