"""Figures 3 to 5 of FlashOptim as numbers; minutes on a CPU.

JAX_PLATFORMS=cpu python -m benchmarks.run flashoptim --record
"""

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import optax

import optax_lowmem as lowmem
from benchmarks import records
from benchmarks.suites.flashoptim import measure
from benchmarks.suites.flashoptim.training import Size, Task, warmup_cosine
from optax_lowmem import codecs

PEAK, ADAMW = 3e-3, {"b1": 0.9, "b2": 0.99, "weight_decay": 0.1}
VARIANCES = {
    "sqrt, paper": (codecs.sqrt_paper(), "nearest"),
    "linear, paper": (codecs.linear_paper(signed=False), "nearest"),
    "sqrt, ours": (codecs.sqrt(), "stochastic"),
}
PERCENTILES = {"median_nmse": 50, "p95_nmse": 95}
LOWEST = -100  # below, the correction of a bf16 weight is a denormal f32, which devices flush


def splits(samples: int) -> Iterator[dict[str, Any]]:
    """Figure 3: range over the normal exponents of the mean relative error of a rebuilt f32."""
    for target in measure.DTYPES:
        normal = measure.normal_range(target) & (measure.EXPONENTS >= LOWEST)
        for name, errors in measure.reconstruction_error(target, samples).items():
            case, within = f"split/{target}", errors[normal]
            for end, value in (("min", within.min()), ("max", within.max())):
                metric = f"{end}_mean_relative_error"
                yield records.record("claims", case, name, metric, float(value), "share")
    for name in ("ulp-32", measure.BY_SIDE, "bits-32"):
        share = measure.exact_share(name, samples, LOWEST)
        yield records.record("claims", "split/bf16", name, "exact_share", share, "share")


def moments(task: Task, steps: int) -> Iterator[dict[str, Any]]:
    """Figure 4: percentiles over tensors and steps of the NMSE of a real run's moments."""
    optimizers = {
        "SGD": optax.sgd(warmup_cosine(0.1, steps), momentum=0.9),
        "AdamW": optax.adamw(warmup_cosine(PEAK, steps), **ADAMW),
        "Lion": optax.lion(warmup_cosine(PEAK / 10, steps), b1=0.9, b2=0.99, weight_decay=1.0),
    }
    for name, tx in optimizers.items():
        watch = measure.StateErrors(every=max(1, steps // 30))
        task.train(tx, steps, watch)
        for slot in ("m", "v"):
            for codec, values in watch.values.get(slot, {}).items():
                case = f"moments/{name}-{slot}"
                for metric, percent in PERCENTILES.items():
                    nmse = float(np.percentile(values, percent))
                    yield records.record("claims", case, codec, metric, nmse, "share")


def variances(task: Task, steps: int) -> Iterator[dict[str, Any]]:
    """Figure 5: whether AdamW becomes NaN with a stored variance."""
    for name, (nu, rounding) in VARIANCES.items():
        mu = codecs.softsign() if rounding == "stochastic" else codecs.softsign_paper()
        storage = lowmem.Storage(mu=mu, nu=nu, rounding=rounding, policy=lowmem.Policy(min_size=1))
        rate = warmup_cosine(PEAK, steps)
        run = task.train(lowmem.flash_adamw(rate, **ADAMW, storage=storage), steps)
        diverged = float(not np.isfinite(run.final()))
        yield records.record("claims", "variance/adamw", name, "diverged", diverged, "yes or no")


PARTS = {"splits": "Figure 3", "moments": "Figure 4", "variances": "Figure 5"}


@records.suite(
    samples={"type": int, "default": 2**16, "help": "f32 weights an exponent"},
    steps={"type": int, "default": 300, "help": "of each training run"},
    only={"nargs": "+", "choices": list(PARTS), "default": list(PARTS), "help": "parts (all)"},
)
def main(args: argparse.Namespace) -> Iterator[records.Rows]:
    if "splits" in args.only:
        yield list(splits(args.samples))
    task = Task(Size())
    if "moments" in args.only:
        yield list(moments(task, args.steps))
    if "variances" in args.only:
        yield list(variances(task, args.steps))
