"""Results of training runs, and of pairs of runs by seed: what several papers claim of."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.claims import ONE_SEED, UNDECIDED, Claim, Finding, Missing, graded, some
from benchmarks.claims.equivalence import Interval, Margin, pairs_needed
from benchmarks.records import Rows, alike, select

F32, OURS = "optax-f32", "lowmem"
PAPER = "lowmem, paper's storage"
MARGIN = Margin(0.1)  # of a language model's loss
FAR = 0.05  # of a loss: a hundred times what equal runs of two seeds differ by
# Times of a step that are this close, as a share of the f32 step, are the same.
STEP_SHARE = 0.05
POWER = 0.8  # probability that enough seeds decide a row whose true difference is the claimed one
NO_WORSE = "not worse"  # undecided between the same and better


def newest_run(
    rows: Rows, of: Callable[[str], bool], **anchor: Any
) -> dict[tuple[str, str], dict[str, Any]]:
    """(variant, metric) -> record, of the case, device and jax of the last record.

    `of` says whether a case is one of these runs; `anchor` are fields of the last record.
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
    flags = row["flags"]
    return f"{flags['parameters'] / 1e6:.0f}M, {flags['steps']} steps of {flags['tokens']:,} tokens"


def count(seeds: int) -> str:
    return ONE_SEED if seeds == 1 else f"{seeds:,} seeds"


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return statistics.mean(values), error


@dataclass(frozen=True)
class Pair:
    """Two implementations over the same seeds of one case, both of a seed on one device and jax."""

    plain: list[float]
    ours: list[float]
    rows: Rows

    @staticmethod
    def of(lines: Iterable[Sequence[dict[str, Any]]]) -> "Pair":
        """Return the pair of the records of each seed: the reference's and ours."""
        first, second = zip(*some(list(lines)), strict=True)
        return Pair([r["value"] for r in first], [r["value"] for r in second], [*first, *second])

    @property
    def run(self) -> tuple[Any, ...]:
        """Return the settings that runs of a case must share to be of one kind."""
        flags = self.rows[0].get("flags", {})
        return tuple(flags.get(name) for name in ("parameters", "steps", "batch", "context"))

    def by_seed(self) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
        """Return the records of each seed: the reference's and ours."""
        count = len(self.plain)
        lines = zip(self.rows[:count], self.rows[count:], strict=True)
        return {plain["seed"]: (plain, ours) for plain, ours in lines}

    @property
    def differences(self) -> list[float]:
        """Ours less the reference of each seed, in percent of the references' mean."""
        mean = abs(statistics.mean(self.plain))
        return [100 * (b - a) / mean for a, b in zip(self.plain, self.ours, strict=True)]

    @property
    def interval(self) -> Interval:
        return Interval.of(self.differences)

    def verdict(self, margin: Margin = MARGIN) -> str:
        return self.interval.verdict(margin, self.rows[0]["metric"] != "val_accuracy")

    @property
    def means(self) -> str:
        plain, ours = statistics.mean(self.plain), statistics.mean(self.ours)
        return f"{plain:.4f} → {ours:.4f}"

    @property
    def perplexity(self) -> str:
        """The same differences of losses as one of perplexities: exp of the mean, less 1."""
        more = statistics.mean(b - a for a, b in zip(self.plain, self.ours, strict=True))
        return percent(math.expm1(more))

    @property
    def size(self) -> str:
        flags = self.rows[0]["flags"]
        own = f"{flags['parameters'] / 1e6:.3g}M weights, {flags['steps']:,} steps"
        if "batch" in flags and "context" in flags:
            own += f" of {flags['batch'] * flags['context']:,} tokens"
        return f"{own}, {count(len(self.plain))}"


def paired(
    rows: Rows,
    case: str,
    metric: str,
    plain: str = F32,
    ours: str = OURS,
    bench: str = "train",
    least: int = 2,
) -> Iterator[Pair]:
    """One pair for each device and jax with at least so many seeds in common, in stored order."""
    found = select(rows, bench=bench, case=case, metric=metric)
    for device, jax in dict.fromkeys((r["device"], r["jax"]) for r in found):
        here = select(found, device=device, jax=jax)
        first, second = ({r["seed"]: r for r in select(here, impl=i)} for i in (plain, ours))
        seeds = sorted(first.keys() & second.keys())
        if len(seeds) >= least:
            yield Pair.of((first[seed], second[seed]) for seed in seeds)


def pooled(pairs: Sequence[Pair]) -> Pair:
    """Return the pairs of all devices that ran the case as the one with the most seeds did.

    A seed counts once, on the device with more seeds: its text and start are the same on others.
    """
    most, *others = sorted(reversed(pairs), key=lambda one: -len(one.plain))
    lines = most.by_seed()
    for other in others:
        if other.run == most.run:
            lines = other.by_seed() | lines
    return Pair.of(lines[seed] for seed in sorted(lines))


def beside(rows: Rows, case: str, plain: str, ours: str, bench: str = "pairs") -> Pair:
    """Return the pairs of held-out losses of all seeds, those that two devices ran included.

    A seed's start, text and batches are the same on all; the settings must be. Where our run and
    the baseline's have a device and jax in common, they are of these.
    """
    found = select(rows, bench=bench, case=case, metric="val_loss")
    lines = {}
    for own in select(found, impl=ours):
        others = select(found, impl=plain, seed=own["seed"], flags=own["flags"])
        here = select(others, device=own["device"], jax=own["jax"])
        if here or (others and own["seed"] not in lines):
            lines[own["seed"]] = ((here or others)[-1], own)
    return Pair.of(lines[seed] for seed in sorted(lines))


@dataclass(frozen=True)
class Trained:
    """A measure: our result against the baseline's, over the seeds of all devices.

    One seed has an interval of the held-out text alone, which the row says, and is undecided: how
    far other seeds come apart is not known.

    `case`, `metric` and `bench` are of the records.
    """

    case: str
    plain: str = F32  # the baseline
    ours: str = OURS
    margin: Margin = MARGIN  # what counts as the same
    metric: str = "val_loss"
    bench: str = "train"

    def pair(self, rows: Rows) -> Pair:
        names = (self.metric, self.plain, self.ours, self.bench)
        return pooled(some(list(paired(rows, self.case, *names, least=1))))

    def __call__(self, rows: Rows) -> Finding:
        pair = self.pair(rows)
        lower = self.metric != "val_accuracy"
        text = f"{self.metric.replace('val_', 'held-out ')} {pair.means}: {pair.interval}"
        groups = [row.get("held_out_groups", []) for row in pair.rows]
        if len(groups) == 2 and all(groups):
            parts = [100 * (b - a) / pair.plain[0] for a, b in zip(*groups, strict=True)]
            text += f" ({Interval.of(parts)} over {len(parts)} parts of the held-out text)"
        if lower and math.isfinite(pair.interval.mean):
            text += f"; perplexity {pair.perplexity}"
        verdict = pair.verdict(self.margin)
        if verdict == UNDECIDED and pair.interval.no_worse(self.margin, lower):
            text += f"; {NO_WORSE}"
        return Finding(text, verdict, list(pair.rows), pair.size)


def undecided(rows: Rows, claims: Sequence[Claim]) -> tuple[list[list[str]], Rows]:
    """Return the undecided results of training runs, with the seeds that would decide them."""
    body, used = [], []
    for claim in claims:
        if not isinstance(claim.how, Trained):
            continue
        try:
            pair = claim.how.pair(rows)
        except Missing:
            continue
        if pair.verdict(claim.how.margin) != UNDECIDED:
            continue
        seeds, deviation, needed = len(pair.plain), "", "2 first, for a deviation"
        if seeds > 1:
            of_pairs = statistics.stdev(pair.differences)
            deviation = f"{of_pairs:.2f} %"
            needed = f"{pairs_needed(of_pairs, claim.how.margin, POWER):,}"
        body.append([claim.where, str(seeds), deviation, claim.margin, needed])
        used += pair.rows
    return body, used


def of_one_seed(share: float, holds: bool) -> str:
    """Return the verdict on a difference of losses of one seed: none, if other seeds may differ."""
    return graded(False, holds) if not abs(share) <= FAR else UNDECIDED


def all_pairs(rows: Rows) -> tuple[list[list[str]], Rows]:
    """Every pair: against f32, and a chosen implementation of lowmem.step against the default."""
    body, used = [], []
    cases = dict.fromkeys((r["case"], r["metric"], r["impl"]) for r in select(rows, bench="train"))
    for case, metric, impl in cases:
        if not metric.startswith("val_"):
            continue
        for plain in {F32: (), OURS: (F32,)}.get(impl, (F32, OURS)):
            for pair in paired(rows, case, metric, plain, impl):
                device, seeds = pair.rows[0]["device"], str(len(pair.plain))
                against, text = f"{impl} against {plain}", f"{pair.means}: {pair.interval}"
                body.append([case, device, against, metric, seeds, text, pair.verdict()])
                used += pair.rows
    return body, used
