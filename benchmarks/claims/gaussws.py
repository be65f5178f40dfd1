"""Claims of GaussWS on noise on weights, and our measurements.

The records are of `gaussws` (training on an accelerator, one seed; section 3's numbers,
anywhere) and `noise` (Figure 5, Table 1).
"""

import math
import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.claims import (
    ONE_SEED,
    Claim,
    Finding,
    Ratios,
    judged,
    measure,
    some,
    values_of,
)
from benchmarks.claims.findings import about, newest_run, of_one_seed, over, percent
from benchmarks.records import Rows, alike, grouped, last, on_gpus, select

# names of variants and kinds of matrices
BASE, OD, ALL, DIFFQ = "no noise", "gaussws[od]", "gaussws[all]", "diffq[all]"
OTHER_START = "no noise, other start"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
MATRICES = (*ATTENTION, *FEED_FORWARD)

FOLLOWS = 0.01  # of the loss: follows the baseline closely
SAFE = 0.005  # of the loss: a cast loses nothing
TOWARDS = 5.0  # mean b_t, from 6 to 4: has moved more than half the way
RISES = 0.05  # over its own lowest loss: diverges and fails to recover
STUCK = 0.5  # over the best of all rates: has learned little
FACTOR = 3.0  # Figure 5, over PyTorch's (here JAX's) normal numbers
MEMORY = 2.1  # bytes per parameter
OVERHEADS = {  # Table 1, AdamW and Adam-mini: geometric means over 134M, 360M and 1B
    "flash_adamw": {OD: 0.0047, ALL: 0.0163, DIFFQ: 0.1295},
    "flash_adam_mini": {OD: 0.0260, ALL: 0.0929, DIFFQ: 0.1452},
}
FEW = 1e-3  # of a share
CASTS = {6: "e3m4", 5: "e3m3", 4: "e3m2", 3: "e2m1"}  # b_t -> format


def _analysis(rows: Rows, case: str) -> dict[str, dict]:
    """metric -> record, of section 3's numbers."""
    return grouped(select(rows, bench="gaussws", case=case), "metric")


def _probabilities(rows: Rows) -> Finding:
    found = _analysis(rows, "equation 8")
    (zero, one, two), used = values_of(*(found.get(f"share of {m}") for m in (0, 1, 2)))
    wanted = (1 - 2 * (9 / 64 + 3 / 2048), 9 / 32, 3 / 1024)
    same = max(abs(a - b) for a, b in zip((zero, one, two), wanted, strict=True)) < FEW
    return judged(f"1/{2 / two:.1f}, 1/{2 / one:.2f}, {zero:.4f}", same, used)


def _rounded_normal(rows: Rows) -> Finding:
    found = _analysis(rows, "equation 8")
    shares, used = values_of(*(found.get(f"share of {m}") for m in (0, 1)))
    within_1, within_3 = (math.erf(s / math.sqrt(2)) for s in (1, 3))
    both = list(zip(("0", "±1"), shares, (within_1, within_3 - within_1), strict=True))
    text = ", ".join(f"P({m}) {share:.3f} (normal: {p:.3f})" for m, share, p in both)
    return judged(text, max(abs(share / p - 1) for _, share, p in both) < 0.05, used)


def _nullified(rows: Rows) -> Finding:
    shares, used = values_of(*some(_analysis(rows, "section 3.5")).values())
    text = f"{min(shares):.3f} to {max(shares):.4f}, the smaller the value the more"
    return judged(text, abs(max(shares) - 0.284) < FEW and min(shares) == 0, used)


@measure
def _underflow(rows: Rows, case: str, to: str) -> Finding:
    found = {m: row for m, row in _analysis(rows, case).items() if m.startswith(to)}
    shares, used = values_of(*some(found).values())
    most = 100 * max(shares)
    text = f"at most {most:.2f} % of the noise underflows"
    return judged(text, most == 0, used)


def rates_of_noise(rows: Rows, metric: str) -> dict[str, dict[str, dict]]:
    """shape -> implementation -> record, on the accelerator measured last; small shapes first."""
    shapes = grouped(alike(select(on_gpus(rows), bench="noise", metric=metric)), "case", "impl")
    return dict(sorted(shapes.items(), key=lambda one: math.prod(map(int, one[0].split("x")))))


@measure
def _faster(rows: Rows, other: str, least: float) -> Finding:
    """Equation 1's forward pass against another's, over shapes."""
    gains = Ratios(rates_of_noise(rows, "gelem_per_s"), "gaussws", other)
    return judged(f"{gains} over {gains.count} shapes", gains.least >= least, gains.rows)


def _percents(shares: Iterable[float]) -> str:
    return ", ".join(f"{100 * share:.2f}" for share in shares) + " %"


@measure
def _overhead(rows: Rows, optimizer: str) -> Finding:
    steps = select(on_gpus(rows), bench="train", case=f"llama-134m/{optimizer}")
    theirs = OVERHEADS[optimizer]
    ours, used = values_of(*(last(steps, metric="overhead", impl=name) for name in theirs))
    holds = all(a <= b for a, b in zip(ours, theirs.values(), strict=True))
    return judged(f"{_percents(ours)} of a step", holds, used)


def _memory(rows: Rows) -> Finding:
    steps = select(on_gpus(rows), bench="train", metric="extra_bytes")
    used = [r for r in steps if r["case"].startswith("llama-134m/") and r["impl"] in (OD, ALL)]
    most = max(row["value"] for row in some(used))
    return judged(f"at most {most:.3f}, over optimizers and parts", most <= MEMORY, used)


def run_of(rows: Rows, part: str = "") -> dict[tuple[str, str], dict[str, Any]]:
    """(variant, metric) -> record, of the model and accelerator trained last."""
    end, rates = f"{part}/gaussws", "-rates/gaussws"
    return newest_run(on_gpus(rows), lambda case: case.endswith(end)
                      and (bool(part) or not case.endswith(rates)))  # fmt: skip


@measure
def _loss(rows: Rows, name: str, base: str, most: float) -> Finding:
    """A run's held-out loss over another's, without noise in either."""
    run = run_of(rows)
    (plain, own), used = values_of(*(run.get((one, "val_loss")) for one in (base, name)))
    more, chance = over(own, plain), run.get((OTHER_START, "val_loss"))
    text, size = f"{plain:.4f} → {own:.4f} ({percent(more)})", about(used[0])
    if chance is not None and base == BASE:
        size += f"; another start: {percent(over(chance['value'], plain))}"
        used.append(chance)
    return judged(text, of_one_seed(more, more <= most), used, size)


def diverges(losses: dict[float, tuple[float, float]]) -> dict[float, bool]:
    """Factor -> whether training with that rate fails, from (last, least) losses of all."""
    finite = [last for last, _ in losses.values() if math.isfinite(last)]
    best = min(finite, default=math.nan)
    return {
        factor: not math.isfinite(last) or over(last, least) > RISES or over(last, best) > STUCK
        for factor, (last, least) in losses.items()
    }


def _stability(rows: Rows) -> Finding:
    run, said, failing = run_of(rows, "-rates"), [], {}
    ends = {impl: row for (impl, metric), row in run.items() if metric == "val_loss"}
    for name in (BASE, ALL):
        losses = {
            float(impl.rpartition("x")[2]): (row["value"], run[impl, "least_val_loss"]["value"])
            for impl, row in ends.items()
            if impl.rpartition(" x")[0] == name
        }
        failing[name] = {factor for factor, fails in diverges(some(losses)).items() if fails}
        shown = ", ".join(f"{f:g}" for f in sorted(failing[name])) or "none"
        said.append(f"{name}: {shown} of {', '.join(f'{f:g}' for f in sorted(losses))}")
    text = "factors on the rate that fail: " + "; ".join(said)
    return judged(text, failing[ALL] < failing[BASE], list(ends.values()), ONE_SEED)


def _bits(rows: Rows, what: str, kinds: tuple[str, ...]) -> tuple[list[float], Rows]:
    """b_t of kinds of matrices: `mean`, `least`, `largest`, `mean_second`, ..."""
    run = run_of(rows)
    return values_of(*(run.get((ALL, f"bits_{kind}_{what}")) for kind in kinds))


def _towards(rows: Rows) -> Finding:
    (means, used), (low, _), (high, _) = (
        _bits(rows, what, MATRICES) for what in ("mean", "least", "largest")
    )
    mean = statistics.mean(means)
    return judged(
        f"mean {mean:.2f}, {min(low):.2f} to {max(high):.2f}", mean < TOWARDS, used, ONE_SEED
    )


@measure
def _more(
    rows: Rows, what: str, kinds: tuple[str, ...], other: str, less: tuple[str, ...]
) -> Finding:
    found = _bits(rows, what, kinds), _bits(rows, other, less)
    high, low = (statistics.mean(bits) for bits, _ in found)
    text = f"mean b_t {high:.3f} against {low:.3f}"
    return judged(text, high > low, [row for _, used in found for row in used], ONE_SEED)


@measure
def _cast(rows: Rows, name: str, *casts: str) -> Finding:
    """Losses of a cast model over its own without, beside those of one trained without noise."""
    run, texts, every = run_of(rows), [], []
    for one in (name, BASE):
        losses, used = values_of(*(run.get((one, f"cast {cast}")) for cast in ("clean", *casts)))
        texts.append(", ".join(percent(over(loss, losses[0])) for loss in losses[1:]))
        every += used
    holds = all(over(row["value"], every[0]["value"]) <= SAFE for row in every[: len(casts) + 1])
    return judged(f"{texts[0]} (trained without noise: {texts[1]})", holds, every, ONE_SEED)


CLAIMS: tuple[Claim, ...] = (
    # section 3
    Claim("Equation 8", "P(2) ≈ 1/682.7, P(1) ≈ 1/7.1, P(0) ≈ 0.716", _probabilities),
    Claim("§3.4", "approximates the rounded normal distribution", _rounded_normal),
    Claim("§3.5", "near-zero values are nullified with up to ≈ 0.284", _nullified),
    Claim("Equation 6, BF16", "b_t ≤ m + 2 - r = 9: no noise underflows",
          _underflow("equation 6", "bfloat16")),
    Claim("Equation 6, FP8 E4M3", "b_t ≤ m + 2 - r = 5: no noise underflows",
          _underflow("equation 6", "mxfp8_e4m3")),
    Claim("Equation 6 with m + 1 - r, BF16", "(ours) b_t = 8: the bound for any maximum of a block",
          _underflow("equation 6, any maximum", "bfloat16")),
    # speed
    Claim("Figure 5, against the framework's normal numbers",
          "at least 3 x (PyTorch's; ours: jax.random.normal)", _faster("jax-normal", FACTOR)),
    Claim("Figure 5, against Box-Muller", "faster in all cases", _faster("box-muller", 1.0)),
    *(Claim(f"Table 1, {title}: {', '.join(OVERHEADS[optimizer])}",
            f"{_percents(OVERHEADS[optimizer].values())} of tokens/s", _overhead(optimizer))
      for optimizer, title in (("flash_adamw", "AdamW"), ("flash_adam_mini", "Adam-mini"))),
    Claim("Table 1, memory", "≈ 2 bytes per parameter", _memory),
    # training
    *(Claim(f"Figures 1b and 4, {name}", "closely follows the BF16 baseline",
            _loss(name, BASE, FOLLOWS), f"at most {percent(FOLLOWS)}")
      for name in (OD, ALL)),
    Claim("Figure 1b, [od]", "the least increase in loss", _loss(OD, ALL, 0.0)),
    *(Claim(f"Figure 1b, {name} against DiffQ[all]", "GaussWS consistently outperforms DiffQ",
            _loss(name, DIFFQ, 0.0))
      for name in (ALL, OD)),
    Claim("Figure 1b, learning rates",
          "a rate at which the baseline diverges and noise mitigates it", _stability),
    Claim("Figures 1b, 3 and 4",
          "OPT2-124M and Llama2-134M to 300 billion tokens, Llama2-1B to 100 billion",
          "needs C4 or OpenWebText and 900 to 2900 GPU-hours per run"),
    # bits
    Claim("Figure 6, b_t", "from 6 towards 4", _towards),
    Claim("§4.4, depth", "layers towards the end require more precision",
          _more("mean_second", MATRICES, "mean_first", MATRICES)),
    Claim("§4.4, feed-forward against attention", "more sensitive",
          _more("mean", FEED_FORWARD, "mean", ATTENTION)),
    Claim("§4.4, w2 against the others of the feed-forward module",
          "requires the highest precision",
          _more("mean", ("down_proj",), "mean", ("gate_proj", "up_proj"))),
    *(Claim(f"Table 2, {name} cast to the formats of its b_t", "safe for inference",
            _cast(name, f"{parts} safe"))
      for name, parts in ((ALL, "all"), (OD, "od"))),
    Claim(f"Table 2, {ALL} cast to FP {', '.join(CASTS.values())}",
          f"safe where b_t is at most {', '.join(map(str, CASTS))}",
          _cast(ALL, *(f"all {to}" for to in CASTS.values()))),
)  # fmt: skip
