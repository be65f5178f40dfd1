"""Training results of two implementations, paired by seed: what several papers claim of."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.claims import BETTER, NOT, SAME, Finding, judged, measure, some
from benchmarks.records import Rows, select

F32, OURS = "optax-f32", "lowmem"
PAPER = "lowmem, paper's storage"
# A difference of training results under this share, or under two standard errors, is none.
TRAIN_SHARE = 0.001
# Times of a step that are this close, as a share of the f32 step, are the same.
STEP_SHARE = 0.05


@dataclass(frozen=True)
class Pair:
    """Two implementations over the same seeds of one case, on one device and jax."""

    plain: list[float]
    ours: list[float]
    rows: Rows

    @property
    def difference(self) -> float:
        """Mean of ours less the reference."""
        return statistics.mean(b - a for a, b in zip(self.plain, self.ours, strict=True))

    @property
    def error(self) -> float:
        """Standard error of the mean difference."""
        each = [b - a for a, b in zip(self.plain, self.ours, strict=True)]
        return statistics.stdev(each) / len(each) ** 0.5

    def verdict(self, theirs: float = 0.0) -> str:
        """Same within max(0.1 %, two standard errors) of the paper's difference, as a share."""
        plain = abs(statistics.mean(self.plain))
        bound = max(TRAIN_SHARE * plain, 2 * self.error)
        if abs(self.difference - theirs * plain) <= bound:
            return SAME
        lower_is_better = self.rows[0]["metric"] == "val_loss"
        return BETTER if (self.difference < 0) == lower_is_better else NOT

    def text(self) -> str:
        """The numbers."""
        plain, ours = statistics.mean(self.plain), statistics.mean(self.ours)
        share, error = (100 * x / abs(plain) for x in (self.difference, self.error))
        return f"{plain:.4f} → {ours:.4f}: {share:+.2f} % ± {error:.2f} %"


def paired(
    rows: Rows, case: str, metric: str, plain: str = F32, ours: str = OURS
) -> Iterator[Pair]:
    """One pair for each device and jax with at least two seeds in common, in stored order."""
    found = select(rows, bench="train", case=case, metric=metric)
    for device, jax in dict.fromkeys((r["device"], r["jax"]) for r in found):
        here = select(found, device=device, jax=jax)
        first, second = ({r["seed"]: r for r in select(here, impl=i)} for i in (plain, ours))
        seeds = sorted(first.keys() & second.keys())
        if len(seeds) > 1:
            used = [one[seed] for one in (first, second) for seed in seeds]
            values = [row["value"] for row in used]
            yield Pair(values[: len(seeds)], values[len(seeds) :], used)


@measure
def training(rows: Rows, case: str, metric: str, theirs: float = 0.0) -> Finding:
    """Our result against f32's, over the seeds of the device measured last.

    Args:
      case: of the records.
      metric: of them.
      theirs: the difference that the paper itself finds, as a share; 0: none worth the name.
    """
    pairs = some(list(paired(rows, case, metric)))
    pair = pairs[-1]
    flags = pair.rows[0]["flags"]
    size = f"{flags['parameters']:,} weights, {flags['steps']} steps"
    name = metric.replace("val_", "held-out ")
    text = f"{case.partition('/')[0]} ({size}, {len(pair.plain)} seeds): {name} {pair.text()}"
    return judged(text, pair.verdict(theirs), pair.rows)


def all_pairs(rows: Rows) -> tuple[list[list[str]], Rows]:
    """Every pair: against f32, and a chosen implementation of lowmem.step against the default."""
    body, used = [], []
    cases = dict.fromkeys((r["case"], r["metric"], r["impl"]) for r in rows)
    for case, metric, impl in cases:
        if not metric.startswith("val_"):
            continue
        for plain in {F32: (), OURS: (F32,)}.get(impl, (F32, OURS)):
            for pair in paired(rows, case, metric, plain, impl):
                device, seeds = pair.rows[0]["device"], str(len(pair.plain))
                against = f"{impl} against {plain}"
                body.append([case, device, against, metric, seeds, pair.text(), pair.verdict()])
                used += pair.rows
    return body, used
