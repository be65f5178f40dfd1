"""SwitchBack's Figures 1 and 2 on a Llama of bytes, and appendix D.

    python -m benchmarks.run switchback --part run --record     # minutes on a GPU
    python -m benchmarks.run switchback --part large --record   # 65,536 tokens a step, likewise
    python -m benchmarks.run switchback --part variance --record          # seconds, anywhere
    python -m benchmarks.run switchback --part run --preset cpu # a tiny model, minutes on a CPU

`run` and `large` store curves in benchmarks/results/switchback.npz after each variant.
"""

import functools
import itertools

from benchmarks import records
from benchmarks.suites.switchback import variance
from benchmarks.suites.switchback.training import PRESETS, VARIANTS, Experiment
from benchmarks.training import Part, built, parser, usual

CURVES = records.RESULTS / "switchback.npz"
# what a large batch is told apart with; all variants of a run at a usual batch
PARTS = {
    "run": list(VARIANTS),
    "large": ["standard", "standard-other-start", "switchback-int8", "switchback-fp8", "llm_int8"],
    "variance": [],
}


def variances(small: bool) -> records.Rows:
    """The error of each product in int8 against the length of its sums."""
    rows, lengths = [], variance.LENGTHS[:2] if small else variance.LENGTHS
    for draw, product, length in itertools.product(variance.DRAWS, variance.PRODUCTS, lengths):
        found = variance.spread("llm_int8", product, length, draw)
        values = {f"{name}_variance": (value, None) for name, value in found.items()}
        case = f"variance/{product} of {length}"
        rows += records.records_of("switchback", case, draw, values, length=length)
    return rows


def main(arguments: list[str] | None = None) -> None:
    made = parser(__doc__, 530, CURVES, VARIANTS)
    made.add_argument("--part", nargs="+", choices=PARTS, default=["run"])
    args = made.parse_args(arguments)
    for part in args.part:
        if part == "variance":
            rows = variances(args.preset == "smoke")
            records.show(rows)
            records.keep(rows, args.record)
        else:
            make = functools.partial(built, args, Experiment, usual(PRESETS, args.preset)[part])
            Part(args, make, args.variants or PARTS[part], CURVES, part).train_all()
