"""Moments in 4 bits, in closed loop beside a run of AdamW in f32: each map alone, and in pairs.

    python -m benchmarks.run four_bits --preset gpt-3m --steps 600 --record    # minutes on a CPU
    python -m benchmarks.run four_bits --record                                # gpt-42m, on a GPU

As `formats`, whose sample, errors and options it has; no sample is stored.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from benchmarks import records
from benchmarks.records import Rows
from benchmarks.suites.formats import errors as fe
from benchmarks.suites.formats import formats
from benchmarks.suites.formats.bench import CALLS, make_experiment, parse_arguments
from benchmarks.suites.formats.formats import EXACT, FOUR_BITS, MU, NEAREST, NU, STOCHASTIC, Copy
from benchmarks.suites.formats.training import Snapshot
from benchmarks.training import about, say

GROUPS = (16, 32, 64, 128)
BASE = "flash_adamw"  # whose 8 bits are measured beside them


def copies() -> list[Copy]:
    """Every map of either slot in every group, and one group size with either rounding."""
    ways = [(group, STOCHASTIC) for group in GROUPS] + [(64, NEAREST)]
    own = [Copy(slot, name, *way) for slot in (MU, NU) for name in FOUR_BITS for way in ways]
    return own + list(formats.OPTIMIZERS[BASE])


def compared() -> list[tuple[Copy, Copy]]:
    """Return each copy beside the other slot in f32, then pairs of one group size."""
    alone = [(c, EXACT[NU]) if c.slot == MU else (EXACT[MU], c) for c in copies()]
    names = itertools.product(FOUR_BITS, repeat=2)
    pairs = [(Copy(MU, mu, 64, STOCHASTIC), Copy(NU, nu, 64, STOCHASTIC)) for mu, nu in names]
    return [*alone, *pairs, formats.OPTIMIZERS[BASE]]


class Last:
    """The last snapshot of a run."""

    def __call__(self, snapshot: Snapshot, moments: dict[str, Any]) -> None:
        del moments
        self.snapshot = snapshot


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    experiment, last = make_experiment(args, copies()), Last()
    experiment.train_copies(last, CALLS, say)
    snapshot, sample = last.snapshot, experiment.sample
    values = {Copy.of(key): x for key, x in snapshot.values.items()}
    values |= {copy: snapshot.true[slot] for slot, copy in EXACT.items()}
    correction = fe.Correction.after(snapshot.step, experiment.decays)
    found = fe.errors(
        snapshot.true, values, sample.leaf_of_chunk, np.asarray(sample.sizes), correction
    )
    flags = about(experiment, experiment.parameters)
    shared = {key: flags[key] for key in ("parameters", "steps", "decays", "chunks_of_a_leaf")}
    rows: Rows = []
    for mu, nu in compared():
        numbers = dict(zip(("mse", "median_nmse"), found.at(mu, nu), strict=True))
        units = {"mse": "lr^2", "median_nmse": None}
        rows += records.records_of(
            "four_bits", args.preset, f"{mu.key} {nu.key}",
            {name: (value, units[name]) for name, value in numbers.items()},
            mu=mu.key, nu=nu.key, seed=args.seed, flags=shared,
        )  # fmt: skip
    records.show(rows)
    records.keep(rows, args.record)
