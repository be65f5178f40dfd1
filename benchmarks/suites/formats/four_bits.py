"""Moments in 4 bits, in closed loop beside a run of AdamW in f32: each map in either slot.

As `formats`, whose sample, errors and options it has.
"""

from benchmarks import records
from benchmarks.suites.formats import formats
from benchmarks.suites.formats.bench import METRICS, UNITS, command_line, make_experiment
from benchmarks.suites.formats.formats import EXACT, FOUR_BITS, MU, NEAREST, NU, STOCHASTIC, Copy
from benchmarks.training import say

GROUP = 64
BASE = "flash_adamw"  # whose 8 bits are measured beside them


def compared() -> list[formats.Pair]:
    """Return each map of either slot, by either rounding, beside the other slot in f32."""
    copies = [Copy(slot, name, GROUP, rounding) for slot in (MU, NU) for name in FOUR_BITS
              for rounding in (STOCHASTIC, NEAREST)]  # fmt: skip
    copies += formats.OPTIMIZERS[BASE]
    return [(c, EXACT[NU]) if c.slot == MU else (EXACT[MU], c) for c in copies]


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
