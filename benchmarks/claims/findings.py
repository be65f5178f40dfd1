"""Results of training runs, and of pairs of runs by seed: what several papers claim of."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.claims import SAME, Finding, graded, judged, measure, some
from benchmarks.records import Rows, alike, select

F32, OURS = "optax-f32", "lowmem"
PAPER = "lowmem, paper's storage"
# A difference of training results under this share, or under two standard errors, is none.
TRAIN_SHARE = 0.001
# Times of a step that are this close, as a share of the f32 step, are the same.
STEP_SHARE = 0.05


def newest_run(
    rows: Rows, of: Callable[[str], bool], **anchor: Any
) -> dict[tuple[str, str], dict[str, Any]]:
    """(variant, metric) -> record, of the case, device and jax of the last record.

    Args:
      rows: the records.
      of: whether a case is one of these runs.
      anchor: fields of the record that counts as the last.
    """
    here = [row for row in rows if of(row["case"])]
    last = select(here, **anchor)[-1:]
    same = alike([*here, *last], "case", "device", "jax")[: -len(last) or None] if last else []
    return {(row["impl"], row["metric"]): row for row in same}


def over(loss: float, base: float) -> float:
    """The share by which a loss is over another; infinite where it is not a number."""
    share = loss / base - 1
    return share if math.isfinite(share) else math.inf


def percent(share: float) -> str:
    """A difference in percent, with its sign."""
    return f"{100 * share:+.2f} %"


def about(row: dict[str, Any]) -> str:
    """The size of a run."""
    flags = row["flags"]
    return f"{flags['parameters'] / 1e6:.0f}M, {flags['steps']} steps of {flags['tokens']:,} tokens"


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return statistics.mean(values), error


@dataclass(frozen=True)
class Pair:
    """Two implementations over the same seeds of one case, on one device and jax."""

    plain: list[float]
    ours: list[float]
    rows: Rows

    @property
    def difference(self) -> tuple[float, float]:
        """Ours less the reference: the mean over seeds, and its standard error."""
        return mean_and_error([b - a for a, b in zip(self.plain, self.ours, strict=True)])

    def verdict(self, theirs: float = 0.0) -> str:
        """Same within max(0.1 %, two standard errors) of the paper's difference, as a share."""
        plain, (mean, error) = abs(statistics.mean(self.plain)), self.difference
        same = abs(mean - theirs * plain) <= max(TRAIN_SHARE * plain, 2 * error)
        lower_is_better = self.rows[0]["metric"] == "val_loss"
        return SAME if same else graded((mean < 0) == lower_is_better, False)

    def text(self) -> str:
        plain, ours = statistics.mean(self.plain), statistics.mean(self.ours)
        share, error = (100 * x / abs(plain) for x in self.difference)
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
      rows: the records.
      case: of the records.
      metric: of them.
      theirs: the difference that the paper itself finds, as a share; 0: none worth the name.
    """
    pair = some(list(paired(rows, case, metric)))[-1]
    flags, name = pair.rows[0]["flags"], metric.replace("val_", "held-out ")
    size = f"{flags['parameters']:,} weights, {flags['steps']} steps, {len(pair.plain)} seeds"
    text = f"{case.partition('/')[0]} ({size}): {name} {pair.text()}"
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
