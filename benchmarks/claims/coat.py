"""Claims of COAT on 8-bit optimizer states, and our measurements.

The records are of `formats`; errors are those of one encoding in groups of 128, as in the
paper's tables.
"""

import numpy as np

from benchmarks.claims import Claim, Finding, graded, judged, measure, some
from benchmarks.claims.equivalence import Margin
from benchmarks.claims.findings import Several, Trained
from benchmarks.records import Rows
from benchmarks.suites.formats.formats import DE8, DE8_X, E4M3, E4M3_X, E5M2, E5M2_X, MU, NU
from benchmarks.suites.formats.tables import PAPER, SPAN, measured, number

EXPANDED = {E4M3: E4M3_X, E5M2: E5M2_X, DE8: DE8_X}
BOTH, DE8_BEST = 1.63, 1.41  # §4.2 and §6.3.1
WORSE = PAPER[DE8, DE8_X] / PAPER[DE8, DE8]  # Table 9
NEAR = 0.15  # two ratios of errors are alike within this share
CLOSE = 0.03  # and two errors within this
MOST = 0.9  # of groups: "typically"

Pair = tuple[str, str]
Variants = tuple[str, str]  # the baseline and ours
Matrix = dict[Pair, float]


def _gains(slot: str, name: str, matrix: Matrix = PAPER) -> list[float]:
    """The gains from expanding one format in one slot, of the pairs that the paper prints."""
    at, wide = (0 if slot == MU else 1), EXPANDED[name]
    pairs = {(mu, nu): (wide, nu) if slot == MU else (mu, wide) for mu, nu in PAPER}
    return [matrix[pair] / matrix[more] for pair, more in pairs.items()
            if pair[at] == name and more in PAPER]  # fmt: skip


def _span(ratios: list[float]) -> str:
    return f"x {min(ratios):.2f} to {max(ratios):.2f}"


def _once(rows: Rows) -> tuple[Matrix, Rows]:
    """MSE of the step for each pair in the paper's groups, and the records."""
    found = some(measured(rows))
    return found.matrix("once at 128", "mse"), found.of("once at 128")


@measure
def _gain(rows: Rows, plain: Pair, better: Pair, printed: float) -> Finding:
    matrix, used = _once(rows)
    gain = matrix[plain] / matrix[better]
    near = abs(gain / printed - 1) <= NEAR
    return judged(f"x {gain:.2f}", graded(gain > printed and not near, near), used)


@measure
def _improves(rows: Rows, slot: str, name: str) -> Finding:
    matrix, used = _once(rows)
    ours, theirs = _gains(slot, name, matrix), _gains(slot, name)
    agree = sum((a > 1) == (b > 1) for a, b in zip(ours, theirs, strict=True))
    return judged(f"{_span(ours)}; {agree} of {len(ours)} pairs", agree == len(ours), used)


def _order(rows: Rows) -> Finding:
    matrix, used = _once(rows)
    ours, theirs = (np.argsort(np.argsort([m[p] for p in PAPER])) for m in (matrix, PAPER))
    rho = float(np.corrcoef(ours, theirs)[0, 1])
    return judged(f"rank correlation {rho:.2f} over {len(PAPER)} pairs", rho > 0.9, used)


def _formats(rows: Rows) -> Finding:
    matrix, used = _once(rows)
    gains = [matrix[E5M2, nu] / matrix[E4M3, nu] for mu, nu in PAPER if mu == E4M3]
    return judged(f"E5M2's error over E4M3's: {_span(gains)}", min(gains) > 1, used)


def _seconds(rows: Rows) -> Finding:
    matrix, used = _once(rows)
    mus = (E4M3, E4M3_X, E5M2, E5M2_X, DE8, DE8_X)
    plain = [matrix[mu, E5M2] / matrix[mu, E4M3] for mu in mus]
    wide = [matrix[mu, E5M2_X] / matrix[mu, E4M3_X] for mu in mus]
    text = f"E5M2's error over E4M3's {_span(plain)}, expanded {_span(wide)}"
    return judged(text, min(plain) > 1 and max(wide) <= 1 + CLOSE, used)


def _lowest(rows: Rows) -> Finding:
    matrix, used = _once(rows)
    mu, nu = min(PAPER, key=matrix.__getitem__)
    return judged(f"m {mu}, v {nu}", mu == DE8_X and nu in (E4M3_X, E5M2_X), used)


def _worse(rows: Rows) -> Finding:
    matrix, used = _once(rows)
    ratios = [matrix[mu, DE8_X] / matrix[mu, DE8] for mu in (E4M3_X, DE8, DE8_X)]
    return judged(_span(ratios), min(ratios) > 1, used)


@measure
def _spans(rows: Rows, slot: str, decades: int) -> Finding:
    found = some(measured(rows))
    values = found.values("spans")
    within, median = 1 - values[slot, f"over_1e{decades}"], 10 ** values[slot, "p50"]
    text = f"under 1e{decades} in {100 * within:.0f} % of groups, median {number(median)}"
    return judged(text, within >= MOST, found.of("spans", impl=slot))


@measure
def _k(rows: Rows, slot: str, least: float, most: float) -> Finding:
    """Return a measure of whether the median k of E4M3 lies in the paper's span."""
    found = some(measured(rows))
    low, middle, high = (SPAN / found.values("spans")[slot, f"p{p}"] for p in (95, 50, 5))
    text = f"median {middle:.1f}, {low:.1f} to {high:.1f} in 90 % of groups"
    return judged(text, least <= middle <= most, found.of("spans", impl=slot))


STATES = Margin(0.1, claimed=0.10)


LLAMAS = {"Llama 58M": "llama-58m"}  # of `pairs`


def of_llamas(case: str, margin: Margin, *, f32: Variants, split: Variants) -> Several:
    """Return results of runs whose weights are f32 in both, and split in both."""
    named = {"f32 weights": f32, "split weights": split}
    return Several({
        says: Trained(f"{case}/adam", *both, margin, bench="pairs") for says, both in named.items()
    })  # fmt: skip


CLAIMS: tuple[Claim, ...] = (
    # tables
    *(Claim(f"{('Table 9' if name == DE8 else 'Table 1')}, expansion of {name} for {letter}",
            f"error {_span(_gains(slot, name))} smaller", _improves(slot, name),
            "better where theirs is")
      for slot, letter in ((MU, "m"), (NU, "v"))
      for name in (EXPANDED if slot == MU else (E4M3, E5M2))),
    Claim("§4.2, expansion of E4M3 for both", f"x {BOTH} smaller",
          _gain((E4M3, E4M3), (E4M3_X, E4M3_X), BOTH), f"the ratio ± {NEAR:.0%}"),
    Claim("§6.3.1, DE8 for both → DE8 + expansion for m, E4M3 + expansion for v",
          f"x {DE8_BEST} smaller", _gain((DE8, DE8), (DE8_X, E4M3_X), DE8_BEST),
          f"the ratio ± {NEAR:.0%}"),
    Claim("Table 9, DE8 for v",
          f"expansion makes it worse (x {WORSE:.2f} beside DE8 for m)",
          _worse, "a larger error"),
    Claim("Table 1, m", "E4M3 is more suitable than E5M2", _formats, "a smaller error"),
    Claim("Table 1, v", "E4M3 is better; expanded nearly the same", _seconds,
          f"errors ± {CLOSE:.0%}"),
    Claim("Table 9, the lowest error", "m DE8 + expansion, v E4M3 or E5M2 + expansion",
          _lowest, "this pair"),
    Claim("Tables 1 and 9", "the order of all pairs", _order, "a correlation over 0.9"),
    # ranges
    Claim("Figure 2a, m", "max / min of a group typically under 1e4", _spans(MU, 4),
          f"in {MOST:.0%} of groups"),
    Claim("Figure 2a, v", "max / min of a group usually under 1e1", _spans(NU, 1),
          f"in {MOST:.0%} of groups"),
    Claim("Figure 2c, k of m", "1 to 3", _k(MU, 1, 3), "the median in it"),
    Claim("Figure 2c, k of v", "5 to 15", _k(NU, 5, 15), "the median in it"),
    # training
    # Table 13's "Train PPL" of 2.995 is a loss: see docs/results/claims.md
    *(Claim(f"Table 13, FP8 states, {what}",
            "training loss 2.995 → 2.998 (+0.10 %)",
            how)
      for what, how in (
          *((model, of_llamas(case, STATES, f32=("adamw", "coat_adamw-f32"),
                              split=("split", "coat_adamw")))
            for model, case in LLAMAS.items()),
          ("GPT 42M", Trained("gpt-42m/adam", "adamw", "coat_adamw", STATES,
                                              bench="pairs")),
      )),
    Claim("Tables 3 and 4, Figures 5 and 6, OLMo", "training loss 2.551 → 2.568, 2.366 → 2.379",
          "needs 250 to 300 billion tokens"),
    Claim("Tables 5 and 6, Figures 7 and 8, fine-tuning", "average 55.7 → 55.5, VILA 62.80 → 62.51",
          "needs the weights of Llama-2-7B and VILA1.5-7B"),
)  # fmt: skip
