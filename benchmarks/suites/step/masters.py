"""Cost per step of stochastic rounding of 24-bit masters on a GPU.

python -m benchmarks.run masters --record                  # steps, interleaved in one process
"""

import argparse
import os
from collections.abc import Iterator

import jax
import jax.numpy as jnp

import optax_lowmem as lowmem
from benchmarks import records, timing
from benchmarks.peers import cases, device_loop, in_jax

SECONDS_TBPS = 3.5  # of an H200's copy: how many steps a call takes


@records.suite(
    leaf_set={"default": "llama-3.2-1b", "choices": cases.LEAF_SETS},
    kernel={"nargs": "+", "default": ["pallas", "triton"]},
    repeats={"type": int, "default": 9},
    steps={"type": int, "help": "in one jit; default: 0.6 s at copy speed"},
)
def main(args: argparse.Namespace) -> Iterator[records.Rows]:
    """A record of each kernel and rounding, with its ratio to nearest; the roundings take turns."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    def steps(moved: int) -> int:
        return args.steps or device_loop.steps_for(moved, SECONDS_TBPS)

    for kernel in args.kernel:
        runners = {}
        for rounding in ("nearest", "stochastic"):
            storage = lowmem.Storage(master_rounding=rounding)
            tx = in_jax.ours("adamw", args.leaf_set, storage=storage)
            made = in_jax.Implementation(tx.init, in_jax.step_of(tx, kernel), jnp.bfloat16)
            runners[rounding] = device_loop.Runner(made, cases.LEAF_SETS[args.leaf_set](), steps)
            runners[rounding].start()
        rows = []
        for rounding, times in timing.in_turns(runners, args.repeats).items():
            value, spread = timing.middle(times)
            more = {"least": spread["min"], "most": spread["max"], "repeats": args.repeats}
            case = f"{args.leaf_set}/adamw", f"{kernel}-{rounding}"
            rows.append(records.record("masters", *case, "device_ms", *value, **more))
        yield [row | {"ratio_to_nearest": row["value"] / rows[0]["value"]} for row in rows]
        jax.clear_caches()
