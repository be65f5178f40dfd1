"""Claims of GaussWS on noise on weights, and our measurements.

The records are of `gaussws` (training on an accelerator, one seed; section 3's numbers,
anywhere) and `noise` (Figure 5, Table 1).
"""

import math
import statistics

from benchmarks.claims import Claim, Finding, all_of, judged, measure, some
from benchmarks.records import Rows, last, on_gpus, select

# names of variants and kinds of matrices, as in gaussws_training, which needs Flax
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
NOISES = ("gaussws", "box-muller", "jax-normal")
FEW = 1e-3  # of a share


# ---- Section 3 -----------------------------------------------------------------------------------


def analysis(rows: Rows, case: str) -> dict[str, dict]:
    """metric -> record, of the measurement stored last."""
    return {row["metric"]: row for row in select(rows, bench="gaussws", case=case)}


def _probabilities(rows: Rows) -> Finding:
    found = analysis(rows, "equation 8")
    used = all_of(*(found.get(f"share of {m}") for m in (0, 1, 2)))
    zero, one, two = (row["value"] for row in used)
    text = f"1/{2 / two:.1f}, 1/{2 / one:.2f}, {zero:.4f}"
    wanted = (1 - 2 * (9 / 64 + 3 / 2048), 9 / 32, 3 / 1024)
    same = max(abs(a - b) for a, b in zip((zero, one, two), wanted, strict=True)) < FEW
    return judged(text, same, used)


def _rounded_normal(rows: Rows) -> Finding:
    found = analysis(rows, "equation 8")
    used = all_of(*(found.get(f"share of {m}") for m in (0, 1)))
    zero, one = (math.erf(s / math.sqrt(2)) for s in (1, 3))
    normal = (zero, one - zero)
    text = ", ".join(
        f"P({m}) {row['value']:.3f} (normal: {p:.3f})"
        for m, row, p in zip(("0", "±1"), used, normal, strict=True)
    )
    off = max(abs(row["value"] / p - 1) for row, p in zip(used, normal, strict=True))
    return judged(text, off < 0.05, used)


def _nullified(rows: Rows) -> Finding:
    used = some(list(analysis(rows, "section 3.5").values()))
    most, least = (f(row["value"] for row in used) for f in (max, min))
    text = f"{least:.3f} to {most:.4f}, the smaller the value the more"
    return judged(text, abs(most - 0.284) < FEW and least == 0, used)


@measure
def _underflow(rows: Rows, case: str, to: str, bits: int) -> Finding:
    found = analysis(rows, case)
    used = some([row for name, row in found.items() if name.startswith(to)])
    most = max(row["value"] for row in used)
    text = f"b_t = {bits}: {100 * most:.2f} % of the noise underflows at most, over maxima"
    return judged(text, most == 0, used)


# ---- Speed and memory: bench_noise ---------------------------------------------------------------


def rates_of_noise(rows: Rows, metric: str) -> dict[str, dict[str, dict]]:
    """shape -> implementation -> record, on the accelerator measured last; small shapes first."""
    found = select(on_gpus(rows), bench="noise", metric=metric)
    shapes: dict[str, dict[str, dict]] = {}
    for row in found:
        if (row["device"], row["jax"]) == (found[-1]["device"], found[-1]["jax"]):
            shapes.setdefault(row["case"], {})[row["impl"]] = row
    return dict(sorted(shapes.items(), key=lambda one: math.prod(map(int, one[0].split("x")))))


@measure
def _faster(rows: Rows, other: str, least: float) -> Finding:
    """Equation 1's forward pass against another's, over shapes."""
    shapes = rates_of_noise(rows, "gelem_per_s").values()
    pairs = some([(of["gaussws"], of[other]) for of in shapes if {"gaussws", other} <= of.keys()])
    gains = [ours["value"] / theirs["value"] for ours, theirs in pairs]
    text = f"x {min(gains):.2f} to {max(gains):.2f} over {len(pairs)} shapes"
    used = [row for pair in pairs for row in pair]
    return judged(text, min(gains) >= least, used)


@measure
def _overhead(rows: Rows, optimizer: str, name: str) -> Finding:
    says = OVERHEADS[optimizer][name]
    steps = select(on_gpus(rows), bench="train", case=f"llama-134m/{optimizer}")
    row = some(last(steps, metric="overhead", impl=name))
    text = f"Llama-134M: {100 * row['value']:.2f} % of a step"
    return judged(text, row["value"] <= says, [row])


def _memory(rows: Rows) -> Finding:
    steps = select(on_gpus(rows), bench="train", metric="extra_bytes")
    used = [r for r in steps if r["case"].startswith("llama-134m/") and r["impl"] in (OD, ALL)]
    some(used)
    most = max(row["value"] for row in used)
    text = f"at most {most:.3f}, over optimizers and parts"
    return judged(text, most <= MEMORY, used)


# ---- Training: bench_gaussws ---------------------------------------------------------------------


def newest_run(rows: Rows, part: str = "") -> dict[tuple[str, str], dict]:
    """(variant, metric) -> record, of the model and accelerator trained last."""
    end = f"{part}/gaussws"
    found = [
        row
        for row in on_gpus(rows)
        if row["case"].endswith(end) and (part or not row["case"].endswith("-rates/gaussws"))
    ]
    if not found:
        return {}
    alike = {key: found[-1][key] for key in ("case", "device", "jax")}
    return {(row["impl"], row["metric"]): row for row in select(found, **alike)}


def over(loss: float, base: float) -> float:
    """The share by which a loss is over another; infinite where it is not a number."""
    share = loss / base - 1
    return share if math.isfinite(share) else math.inf


def _about(row: dict) -> str:
    flags = row["flags"]
    return f"{flags['parameters'] / 1e6:.0f}M, {flags['steps']} steps of {flags['tokens']:,} tokens"


@measure
def _loss(rows: Rows, name: str, base: str, most: float, metric: str = "val_loss") -> Finding:
    """A run's held-out loss over another's, without noise in either."""
    run = newest_run(rows)
    used = all_of(run.get((base, "val_loss")), run.get((name, metric)))
    more = over(used[1]["value"], used[0]["value"])
    chance, text = run.get((OTHER_START, "val_loss")), _about(used[0])
    text += f": {used[0]['value']:.4f} → {used[1]['value']:.4f} ({100 * more:+.2f} %"
    if chance is not None and base == BASE:
        other = over(chance["value"], used[0]["value"])
        text += f"; other initial weights {100 * other:+.2f} %"
        used.append(chance)
    return judged(text + ")", more <= most, used)


def diverges(losses: dict[float, tuple[float, float]]) -> dict[float, bool]:
    """Factor -> whether training with that rate fails, from (last, least) losses of all."""
    finite = [last for last, _ in losses.values() if math.isfinite(last)]
    best = min(finite, default=math.nan)
    return {
        factor: not math.isfinite(last) or over(last, least) > RISES or over(last, best) > STUCK
        for factor, (last, least) in losses.items()
    }


def _stability(rows: Rows) -> Finding:
    run, said, failing, used = newest_run(rows, "-rates"), [], {}, []
    for name in (BASE, ALL):
        losses = {
            float(impl.rpartition("x")[2]): (row["value"], run[impl, "least_val_loss"]["value"])
            for (impl, metric), row in run.items()
            if metric == "val_loss" and impl.rpartition(" x")[0] == name
        }
        some(losses)
        failing[name] = {factor for factor, fails in diverges(losses).items() if fails}
        shown = ", ".join(f"{f:g}" for f in sorted(failing[name])) or "none"
        said.append(f"{name}: {shown} of {', '.join(f'{f:g}' for f in sorted(losses))}")
        used += [row for (impl, metric), row in run.items() if metric == "val_loss"]
    helped = failing[BASE] - failing[ALL]
    text = "factors on the rate that fail: " + "; ".join(said)
    return judged(text, helped and failing[ALL] < failing[BASE], used)


# ---- Bitwidths and casts -------------------------------------------------------------------------


def bits_of(rows: Rows, what: str, kinds: tuple[str, ...], name: str = ALL) -> Rows:
    """Records of b_t of kinds of matrices: `mean`, `least`, `largest`, `mean_second`, ..."""
    run = newest_run(rows)
    return all_of(*(run.get((name, f"bits_{kind}_{what}")) for kind in kinds))


def _mean(rows: Rows) -> float:
    return statistics.mean(row["value"] for row in rows)


def _towards(rows: Rows) -> Finding:
    used = bits_of(rows, "mean", MATRICES)
    low, high = (bits_of(rows, what, MATRICES) for what in ("least", "largest"))
    mean = _mean(used)
    spans = [f(row["value"] for row in of) for f, of in ((min, low), (max, high))]
    text = f"mean {mean:.2f}, {spans[0]:.2f} to {spans[1]:.2f}"
    return judged(text, mean < TOWARDS, used)


@measure
def _more(
    rows: Rows, what: str, kinds: tuple[str, ...], other: str, less: tuple[str, ...]
) -> Finding:
    """Return a measure of whether the mean b_t of some matrices is over that of others."""
    high, low = bits_of(rows, what, kinds), bits_of(rows, other, less)
    text = f"mean b_t {_mean(high):.3f} against {_mean(low):.3f}"
    return judged(text, _mean(high) > _mean(low), [*high, *low])


@measure
def _cast(rows: Rows, name: str, which: str, control: bool = False) -> Finding:
    """The loss of a cast model over its own without."""
    run = newest_run(rows)
    names = (name, BASE) if control else (name,)
    used = all_of(*(run.get((n, f"cast {m}")) for n in names for m in ("clean", which)))
    shares = [
        over(cast["value"], clean["value"])
        for clean, cast in zip(used[::2], used[1::2], strict=True)
    ]
    text = f"{100 * shares[0]:+.2f} %"
    text += f" (trained without noise: {100 * shares[1]:+.2f} %)" if control else ""
    return judged(text, shares[0] <= SAFE, used)


CLAIMS: tuple[Claim, ...] = (
    # section 3
    Claim("Equation 8", "P(2) ≈ 1/682.7, P(1) ≈ 1/7.1, P(0) ≈ 0.716", _probabilities),
    Claim("§3.4", "approximates the rounded normal distribution", _rounded_normal),
    Claim("§3.5", "near-zero values are nullified with up to ≈ 0.284", _nullified),
    Claim("Equation 6, BF16", "b_t ≤ m + 2 - r = 9: no noise underflows",
          _underflow("equation 6", "bfloat16", 9)),
    Claim("Equation 6, FP8 E4M3", "b_t ≤ m + 2 - r = 5: no noise underflows",
          _underflow("equation 6", "mxfp8_e4m3", 5)),
    Claim("Equation 6 with m + 1 - r, BF16", "(ours: the bound for any maximum of a block)",
          _underflow("equation 6, any maximum", "bfloat16", 8)),
    # speed
    Claim("Figure 5, against the framework's normal numbers",
          "at least 3 x (PyTorch's; ours: jax.random.normal)", _faster("jax-normal", FACTOR)),
    Claim("Figure 5, against Box-Muller", "faster in all cases", _faster("box-muller", 1.0)),
    *(Claim(f"Table 1, {('AdamW' if optimizer == 'flash_adamw' else 'Adam-mini')}, {name}",
            f"{100 * share:.2f} % of tokens/s", _overhead(optimizer, name))
      for optimizer, of in OVERHEADS.items()
      for name, share in of.items()),
    Claim("Table 1, memory", "≈ 2 bytes per parameter", _memory),
    # training
    *(Claim(f"Figures 1b and 4, {name}", "closely follows the BF16 baseline",
            _loss(name, BASE, FOLLOWS))
      for name in (OD, ALL)),
    Claim("Figure 1b, [od]", "the least increase in loss", _loss(OD, ALL, 0.0)),
    *(Claim(f"Figure 1b, {name} against DiffQ[all]", "GaussWS consistently outperforms DiffQ",
            _loss(name, DIFFQ, 0.0))
      for name in (ALL, OD)),
    Claim("Figure 1b, learning rates",
          "a rate at which the baseline diverges and noise mitigates it", _stability),
    Claim("Figures 1b, 3 and 4",
          "OPT2-124M and Llama2-134M to 300 billion tokens, Llama2-1B to 100 billion",
          "needs C4 or OpenWebText and 900 to 2900 GPU-hours a run; above, a smaller model"),
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
            _cast(name, f"{parts} safe", control=True))
      for name, parts in ((ALL, "all"), (OD, "od"))),
    *(Claim(f"Table 2, {ALL} cast to FP {to}, of b_t = {bits}",
            "safe where b_t is at most that (ours: see Figure 6)",
            _cast(ALL, f"all {to}", control=True))
      for bits, to in ((6, "e3m4"), (5, "e3m3"), (4, "e3m2"), (3, "e2m1"))),
)  # fmt: skip
