"""Results of training runs, and of pairs of runs by seed: what several papers claim of."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.claims import (
    BETTER,
    NOT,
    ONE_SEED,
    SAME,
    UNDECIDED,
    Finding,
    graded,
    some,
)
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
    """Return the size of a run of one seed."""
    flags = row["flags"]
    size = f"{flags['parameters'] / 1e6:.0f}M weights, {flags['steps']:,} steps of "
    return f"{size}{flags['tokens']:,} tokens, {ONE_SEED}"


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

    One seed is undecided: how far other seeds come apart is not known.

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
        text, verdict = f"{pair.means}: {pair.interval}", pair.verdict(self.margin)
        if verdict == UNDECIDED and pair.interval.no_worse(self.margin, lower):
            text += f"; {NO_WORSE}"
        if verdict == UNDECIDED and len(pair.plain) > 1:
            text += f"; needs {self.needed(pair):,} seeds"
        return Finding(text, verdict, list(pair.rows), pair.size)

    def needed(self, pair: Pair) -> int:
        """Return how many seeds would decide it."""
        return pairs_needed(statistics.stdev(pair.differences), self.margin, POWER)


def over_parts(pair: Pair) -> Interval:
    """Interval of one pair's difference over parts of the held-out text, not over seeds."""
    plain, ours = (row["held_out_groups"] for row in pair.rows)
    return Interval.of([100 * (b - a) / pair.plain[0] for a, b in zip(plain, ours, strict=True)])


def worst(verdicts: Iterable[str]) -> str:
    return max(verdicts, key=(BETTER, SAME, UNDECIDED, NOT).index)


@dataclass(frozen=True)
class Several:
    """A measure: several results of runs of one size, by name; the worst one decides."""

    named: Mapping[str, Trained]

    @property
    def margin(self) -> Margin:
        return next(iter(self.named.values())).margin

    def __call__(self, rows: Rows) -> Finding:
        pairs = {name: one.pair(rows) for name, one in self.named.items()}
        sizes = {pair.size for pair in pairs.values()}
        assert len(sizes) == 1, sizes
        text = "; ".join(f"{name} {pair.interval}" for name, pair in pairs.items())
        verdicts = {name: pair.verdict(self.margin) for name, pair in pairs.items()}
        verdict = worst(verdicts.values())
        needed = [self.named[name].needed(pair) for name, pair in pairs.items()
                  if verdicts[name] == UNDECIDED and len(pair.plain) > 1]  # fmt: skip
        if verdict == UNDECIDED and needed:
            text += f"; needs {max(needed):,} seeds"
        used = [row for pair in pairs.values() for row in pair.rows]
        return Finding(text, verdict, used, sizes.pop())


def of_one_seed(share: float, holds: bool) -> str:
    """Return the verdict on a difference of losses of one seed: none, if other seeds may differ."""
    return graded(False, holds) if not abs(share) <= FAR else UNDECIDED
