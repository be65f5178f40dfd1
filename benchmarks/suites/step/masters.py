"""Cost per step of stochastic rounding of 24-bit masters on a GPU, and runs' differences in loss.

    python -m benchmarks.run masters --record                  # steps, interleaved in one process
    python -m benchmarks.run masters --interval RECORDS.jsonl  # of examples/train_gpt.py --record

The second reads the paired seeds of a training record, f32 and ours, and prints the 90 % interval
of the difference of the final held-out loss.
"""

import argparse
import dataclasses
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import optax_lowmem as lowmem
from benchmarks import records
from benchmarks.peers import cases, device_loop, in_jax

ROUNDINGS = ("nearest", "stochastic")
SECONDS_TBPS = 3.5  # of an H200's copy: how many steps a call takes
# two-sided 90 % of Student's t for 1, 2, ... degrees of freedom
T90 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812,
       1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725)  # fmt: skip


def implementation(rounding: str, kernel: str, optimizer: str) -> in_jax.Implementation:
    """`lowmem.step` by one kernel, with masters rounded so."""
    make = cases.RECORDS[optimizer].make
    tx = make(**cases.OPTIMIZERS[optimizer], storage=lowmem.Storage(master_rounding=rounding))

    def step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return lowmem.step(tx, grads, state, params, implementation=kernel)

    return in_jax.Implementation(tx.init, step, jnp.bfloat16, f"optax-lowmem {records.commit()}")


def measure(
    leaf_set: str, kernel: str, optimizer: str, repeats: int, steps: int | None
) -> dict[str, list[float]]:
    """Milliseconds a step of every repeat, the roundings taking turns: rounding -> times."""

    def steps_for(moved: int) -> int:
        return steps or device_loop.steps_for(moved, SECONDS_TBPS)

    runners = {}
    for rounding in ROUNDINGS:
        made = implementation(rounding, kernel, optimizer)
        runners[rounding] = device_loop.Runner(made, leaf_set, steps_for)
        runners[rounding].start()
    times: dict[str, list[float]] = {rounding: [] for rounding in ROUNDINGS}
    for _ in range(repeats):
        for rounding, runner in runners.items():
            times[rounding].append(runner.time())
    return times


def as_records(case: str, kernel: str, times: dict[str, list[float]]) -> Iterator[dict[str, Any]]:
    """One record a rounding, with its ratio to nearest."""
    base = statistics.median(times["nearest"])
    for rounding, found in times.items():
        middle = statistics.median(found)
        yield records.record(
            "masters",
            case,
            f"{kernel}-{rounding}",
            "device_ms",
            middle,
            "ms",
            least=min(found),
            most=max(found),
            repeats=len(found),
            ratio_to_nearest=middle / base,
        )


@dataclasses.dataclass(frozen=True)
class Interval:
    """The 90 % interval of the mean of paired differences, as shares of f32's mean."""

    seeds: int
    mean: float
    half: float

    @classmethod
    def of(cls, plain: Sequence[float], ours: Sequence[float]) -> "Interval":
        """Of two rows of losses, a pair a seed."""
        if not 2 <= len(plain) == len(ours) <= len(T90) + 1:
            raise SystemExit(f"{len(plain)} and {len(ours)} runs: give 2 to {len(T90) + 1} pairs")
        base = statistics.mean(plain)
        differences = [(b - a) / base for a, b in zip(plain, ours, strict=True)]
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        return cls(len(plain), statistics.mean(differences), T90[len(plain) - 2] * error)

    def __str__(self) -> str:
        low, high = (100 * (self.mean + sign * self.half) for sign in (-1, 1))
        return f"{self.seeds} seeds: {100 * self.mean:+.3f} %, 90 % in [{low:+.3f}, {high:+.3f}] %"


def intervals(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Interval]]:
    """(case, interval) of each training case with f32 and ours."""
    losses: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        if row["bench"] == "train" and row["metric"] == "val_loss":
            losses.setdefault((row["case"], row["impl"]), {})[row["seed"]] = row["value"]
    for (case, impl), plain in losses.items():
        ours = losses.get((case, "lowmem"))
        if impl == "optax-f32" and ours is not None:
            seeds = sorted(plain.keys() & ours.keys())
            yield case, Interval.of([plain[s] for s in seeds], [ours[s] for s in seeds])


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; `--record` also stores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Callable[..., Any] = parser.add_argument
    add("--leaf-set", nargs="+", default=["llama-3.2-1b", "gpt2-124m"], choices=cases.LEAF_SETS)
    add("--kernel", nargs="+", default=["pallas", "triton"], choices=["xla", "pallas", "triton"])
    add("--optimizer", default="adamw", choices=["adamw", "lion", "sgd"])
    add("--repeats", type=int, default=9)
    add("--steps", type=int, help="in one jit; default: 0.6 s at copy speed")
    records.add_option(parser)
    add("--interval", type=Path, metavar="FILE", help="read training records instead")
    args = parser.parse_args(argv)
    if args.interval:
        for case, interval in intervals(records.load(args.interval)):
            print(f"{case}: {interval}")
        return 0
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for leaf_set in args.leaf_set:
        for kernel in args.kernel:
            times = measure(leaf_set, kernel, args.optimizer, args.repeats, args.steps)
            found = list(as_records(f"{leaf_set}/{args.optimizer}", kernel, times))
            for row in found:
                print(
                    f"{row['case']:<22}{row['impl']:<20}{row['value']:>9.3f} ms  "
                    f"[{row['least']:.3f}, {row['most']:.3f}]  x {row['ratio_to_nearest']:.4f}",
                    flush=True,
                )
            records.keep(found, args.record)
            jax.clear_caches()
    return 0
