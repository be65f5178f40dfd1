"""Comparison of claims with our records: functions from records to a `Finding`.

Records are the newest of each case (`records.newest`); a finding is None while some are missing.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.records import Rows, last, on_gpus, select

F32, OURS = "optax-f32", "lowmem"
PAPER = "lowmem, paper's storage"
SAME, BETTER, NOT = "same", "better", "not the same"
# A difference of training results under this share, or under two standard errors, is none.
TRAIN_SHARE = 0.001
# Bytes a parameter of scales (0.19) and of one layer's gradients beside the paper's 5.
RELEASE_SLACK = 0.3
# Times of a step that are this close, as a share of the f32 step, are the same.
STEP_SHARE = 0.05


@dataclass(frozen=True)
class Finding:
    """Our measurement of a claim, its verdict, and the records it rests on."""

    measured: str
    verdict: str
    rows: Rows


Measure = Callable[[Rows], Finding | None]
Holds = Callable[[float], bool]


def all_of(*found: dict[str, Any] | None) -> Rows | None:
    """The records, or None where one is missing."""
    rows = [row for row in found if row is not None]
    return rows if len(rows) == len(found) else None


# ---- Memory: the paper's number to the digits it prints -----------------------------------------


def _agree(value: float, printed: str) -> bool:
    return f"{value:.{len(printed.partition('.')[2])}f}" == printed


def gib(case: str, metric: str, plain: str, flash: str, impl: str = PAPER) -> Measure:
    """GiB of f32 and of `impl`, as printed in the paper's tables; our default beside them."""

    def measure(rows: Rows) -> Finding | None:
        wanted = {"bench": "memory", "case": case, "metric": metric}
        found = all_of(*(last(rows, impl=name, **wanted) for name in (F32, impl, OURS)))
        if found is None:
            return None
        before, after, default = (row["value"] for row in found)
        places = len(flash.partition(".")[2])
        text = f"{before:.{places}f} → {after:.{places}f} GiB"
        if impl == PAPER and not _agree(default, flash):
            text += f" ({default:.{places}f} with our default storage)"
        same = _agree(before, plain) and _agree(after, flash)
        return Finding(text, SAME if same else NOT, found)

    return measure


def bytes_a_parameter(case: str, plain: str, flash: str, gradients: bool) -> Measure:
    """Bytes of weights, state and perhaps gradients of the weights' size, scales included."""

    def measure(rows: Rows) -> Finding | None:
        wanted = {"bench": "memory", "case": case, "metric": "bytes_per_param"}
        found = all_of(*(last(rows, impl=name, **wanted) for name in (F32, PAPER, OURS)))
        if found is None:
            return None
        more = (4, 2, 2) if gradients else (0, 0, 0)
        before, after, default = (r["value"] + g for r, g in zip(found, more, strict=True))
        same = _agree(before, plain) and _agree(after, flash)
        text = f"{before:.2f} → {after:.2f} with scales ({default:.2f} with our default storage)"
        return Finding(text, SAME if same else NOT, found)

    return measure


def gradient_release(rows: Rows) -> Finding | None:
    """All that a step of an 8B Llama holds but what forward and backward pass need alone."""
    found = [
        row
        for row in select(rows, bench="train", impl=OURS, metric="beside_backward")
        if row["case"].startswith("llama-8b") and row["flags"]["release"]
    ]
    if not found:
        return None
    value = found[-1]["value"]
    text = f"Llama-3.1-8B on one GPU: {value:.2f} bytes, scales included"
    # the paper counts codes alone: 0.1875 bytes of scales are ours to add
    return Finding(text, SAME if value <= 5 + RELEASE_SLACK else NOT, found[-1:])


def scale_overhead(rows: Rows) -> Finding | None:
    """Bytes of scales a parameter and moment: what two moments take beyond 5 bytes."""
    wanted = {"case": "llama-3.1-8b/adamw", "metric": "bytes_per_param"}
    found = all_of(last(rows, impl=PAPER, **wanted))
    if found is None:
        return None
    each = (found[0]["value"] - 5) / 2
    return Finding(f"{each:.4f}", SAME if _agree(each, "0.0625") else NOT, found)


# ---- The time of a step, against the f32 step of the same run -----------------------------------


def step_time(case: str, plain_ms: float, flash_ms: float) -> Measure:
    """Our step over the f32 step, on the accelerator measured last."""

    def measure(rows: Rows) -> Finding | None:
        wanted = {"bench": "step", "case": case, "metric": "device_ms"}
        steps = on_gpus(rows)
        ours = last(steps, impl="lowmem.step", **wanted)
        if ours is None:
            return None
        plain = last(steps, impl=F32, device=ours["device"], jax=ours["jax"], **wanted)
        found = all_of(plain, ours)
        if found is None:
            return None
        ratio, theirs = ours["value"] / plain["value"], flash_ms / plain_ms
        verdict = SAME if abs(ratio - theirs) <= STEP_SHARE else BETTER if ratio < theirs else NOT
        text = f"{plain['value']:.2f} → {ours['value']:.2f} ms (x {ratio:.2f})"
        return Finding(text, verdict, found)

    return measure


# ---- Training: paired differences over seeds ----------------------------------------------------


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


def training(case: str, metric: str, theirs: float = 0.0) -> Measure:
    """Our result against f32's, over the seeds of the device measured last.

    Args:
      case: of the records.
      metric: of them.
      theirs: the difference that the paper itself finds, as a share; 0: none worth the name.
    """

    def measure(rows: Rows) -> Finding | None:
        pairs = list(paired(rows, case, metric))
        if not pairs:
            return None
        pair = pairs[-1]
        flags = pair.rows[0]["flags"]
        size = f"{flags['parameters']:,} weights, {flags['steps']} steps"
        name = metric.replace("val_", "held-out ")
        text = f"{case.partition('/')[0]} ({size}, {len(pair.plain)} seeds): {name} {pair.text()}"
        return Finding(text, pair.verdict(theirs), pair.rows)

    return measure


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


# ---- Figures 3 to 5, measured by flashoptim ---------------------------------------------------


def split_error(target: str, scheme: str, holds: Holds) -> Measure:
    """The largest mean relative error over the normal exponents of a 16-bit format."""

    def measure(rows: Rows) -> Finding | None:
        wanted = {"case": f"split/{target}", "impl": scheme, "bench": "claims"}
        found = all_of(
            *(last(rows, metric=f"{end}_mean_relative_error", **wanted) for end in ("min", "max"))
        )
        if found is None:
            return None
        low, high = (row["value"] for row in found)
        verdict = SAME if holds(low) and holds(high) else NOT
        return Finding(f"{low:.1e} to {high:.1e}" if high else "0", verdict, found)

    return measure


def exact_share(rows: Rows) -> Finding | None:
    """Compare the share of f32 weights that the 32-bit schemes return bit for bit."""
    wanted = {"bench": "claims", "case": "split/bf16", "metric": "exact_share"}
    found = all_of(*(last(rows, impl=name, **wanted) for name in ("ulp-32", "bits-32")))
    if found is None:
        return None
    theirs, ours = (100 * row["value"] for row in found)
    text = f"{theirs:.2f} % with the paper's scheme, {ours:.2f} % with our split on the bits"
    return Finding(text, SAME if _agree(theirs, "99.92") else NOT, found)


def companding(*cases: str, metric: str = "median_nmse", share: float = 1.0) -> Measure:
    """The NMSE of the paper's companded codec: under `share` of its linear one's in every case."""

    def measure(rows: Rows) -> Finding | None:
        texts, verdict, used = [], SAME, []
        for case in cases:
            wanted = {"bench": "claims", "case": f"moments/{case}", "metric": metric}
            names = ("linear, paper", "companded, paper")
            found = all_of(*(last(rows, impl=name, **wanted) for name in names))
            if found is None:
                return None
            linear, companded = (row["value"] for row in found)
            texts.append(f"{case} {linear:.1e} → {companded:.1e}")
            verdict = verdict if companded < share * linear else NOT
            used += found
        name = {"median_nmse": "median", "p95_nmse": "95th percentile"}[metric]
        return Finding(f"{name}: {'; '.join(texts)}", verdict, used)

    return measure


def divergence(rows: Rows) -> Finding | None:
    """Compare variances: whether a linear one diverges where a companded one trains."""
    wanted = {"bench": "claims", "case": "variance/adamw", "metric": "diverged"}
    found = all_of(*(last(rows, impl=name, **wanted) for name in ("linear, paper", "sqrt, paper")))
    if found is None:
        return None
    linear, companded = (bool(row["value"]) for row in found)
    words = {True: "becomes NaN", False: "trains"}
    text = f"linear {words[linear]}, companded {words[companded]}"
    return Finding(text, SAME if linear and not companded else NOT, found)
