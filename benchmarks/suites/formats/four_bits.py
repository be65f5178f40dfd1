"""Moments in 4 bits, in closed loop beside a run of AdamW in f32: each map alone, and in pairs.

As `formats`, whose sample, errors and options it has.
"""

import itertools

from benchmarks import records
from benchmarks.suites.formats import formats
from benchmarks.suites.formats.bench import METRICS, UNITS, command_line, make_experiment
from benchmarks.suites.formats.formats import EXACT, FOUR_BITS, MU, NEAREST, NU, STOCHASTIC, Copy
from benchmarks.training import say

GROUPS = (16, 32, 64, 128)
BASE = "flash_adamw"  # whose 8 bits are measured beside them


def copies() -> list[Copy]:
    """Every map of either slot in every group, and one group size with either rounding."""
    ways = [(group, STOCHASTIC) for group in GROUPS] + [(64, NEAREST)]
    own = [Copy(slot, name, *way) for slot in (MU, NU) for name in FOUR_BITS for way in ways]
    return own + list(formats.OPTIMIZERS[BASE])


def compared() -> list[formats.Pair]:
    """Return each copy beside the other slot in f32, then pairs of one group size."""
    pairs = [(c, EXACT[NU]) if c.slot == MU else (EXACT[MU], c) for c in copies()]
    pairs += [(Copy(MU, mu, 64, STOCHASTIC), Copy(NU, nu, 64, STOCHASTIC))
              for mu, nu in itertools.product(FOUR_BITS, repeat=2)]  # fmt: skip
    return [*pairs, formats.OPTIMIZERS[BASE]]


def main(arguments: list[str] | None = None) -> None:
    args, pairs = command_line(__doc__).parse_args(arguments), compared()
    kept = sorted({copy for pair in pairs for copy in pair} - {*EXACT.values()})
    experiment = make_experiment(args, kept)
    experiment.train_copies(say)
    errors, rows = experiment.errors(experiment.last.values), []
    for mu, nu in pairs:
        numbers = {m: (x, UNITS.get(m)) for m, x in zip(METRICS, errors[mu, nu], strict=True)}
        own = {"mu": mu.key, "nu": nu.key, "seed": args.seed, "flags": experiment.flags()}
        name = f"{mu.key} {nu.key}"
        rows += records.records_of("four_bits", args.preset, name, numbers, **own)
    records.show(rows)
    records.keep(rows, args.record)
