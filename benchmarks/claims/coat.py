"""Claims of COAT on 8-bit optimizer states, and our measurements.

The records are of `formats`; errors are those of one encoding in groups of 128, as in the
paper's tables.
"""

from collections.abc import Callable

import numpy as np

from benchmarks.claims import (
    BETTER,
    NOT,
    SAME,
    Claim,
    Finding,
    Measure,
    findings,
    judged,
    measure,
    some,
)
from benchmarks.records import Rows
from benchmarks.suites.formats.formats import DE8, DE8_X, E4M3, E4M3_X, E5M2, E5M2_X, MU, NU
from benchmarks.suites.formats.tables import PAPER, Measured, measured, number

EXPANDED = {E4M3: E4M3_X, E5M2: E5M2_X, DE8: DE8_X}
BOTH, DE8_BEST = 1.63, 1.41  # §4.2 and §6.3.1
WORSE = PAPER[DE8, DE8_X] / PAPER[DE8, DE8]  # Table 9
NEAR = 0.15  # two ratios of errors are alike within this share
CLOSE = 0.03  # and two errors within this
MOST = 0.9  # of groups: "typically"

Pair = tuple[str, str]
Matrix = dict[Pair, float]
Says = Callable[[Matrix], tuple[str, bool]]


def once(found: Measured) -> Matrix:
    """MSE of the step for each pair, in the paper's groups."""
    return found.matrix("once at 128", "mse")


def expansions(slot: str, matrix: Matrix = PAPER) -> dict[tuple[Pair, Pair], float]:
    """(plain, expanded) pairs that differ in one slot and that the paper prints -> the gain."""
    found = {}
    for pair in PAPER:
        name = pair[0] if slot == MU else pair[1]
        if name in EXPANDED:
            more = (EXPANDED[name], pair[1]) if slot == MU else (pair[0], EXPANDED[name])
            if more in PAPER:
                found[pair, more] = matrix[pair] / matrix[more]
    return found


def rank_correlation(matrix: Matrix) -> float:
    """Spearman's, over the pairs that the paper prints."""
    ours, theirs = (np.argsort(np.argsort([m[p] for p in PAPER])) for m in (matrix, PAPER))
    return float(np.corrcoef(ours, theirs)[0, 1])


@measure
def _reading(rows: Rows, says: Says) -> Finding:
    found = some(measured(rows))
    text, holds = says(once(found))
    return judged(text, holds, found.of("once at 128"))


@measure
def _gain(rows: Rows, plain: Pair, better: Pair, printed: float) -> Finding:
    """Return a measure of the factor by which the better pair's error is smaller."""
    found = some(measured(rows))
    matrix = once(found)
    gain = matrix[plain] / matrix[better]
    verdict = SAME if abs(gain / printed - 1) <= NEAR else BETTER if gain > printed else NOT
    return judged(f"x {gain:.2f}", verdict, found.of("once at 128"))


def _improves(slot: str, name: str) -> Measure:
    """Return a measure of whether expanding a format in a slot helps where it does in the paper."""

    def says(matrix: Matrix) -> tuple[str, bool]:
        theirs = {p: g for p, g in expansions(slot).items() if name == _expanded(slot, p)}
        ours = {p: g for p, g in expansions(slot, matrix).items() if p in theirs}
        agree = sum((ours[p] > 1) == (theirs[p] > 1) for p in theirs)
        low, high = min(ours.values()), max(ours.values())
        return f"x {low:.2f} to {high:.2f}; {agree} of {len(theirs)} pairs", agree == len(theirs)

    return _reading(says)


def _expanded(slot: str, pairs: tuple[Pair, Pair]) -> str:
    """Return the name of the expanded format."""
    return pairs[0][0 if slot == MU else 1]


def _spread(slot: str, name: str) -> str:
    gains = [g for p, g in expansions(slot).items() if name == _expanded(slot, p)]
    return f"x {min(gains):.2f} to {max(gains):.2f}"


def _order(matrix: Matrix) -> tuple[str, bool]:
    rho = rank_correlation(matrix)
    return f"Spearman's rank correlation {rho:.2f} over {len(PAPER)} pairs", rho > 0.9


def _formats(matrix: Matrix) -> tuple[str, bool]:
    gains = [matrix[E5M2, nu] / matrix[E4M3, nu] for mu, nu in PAPER if mu == E4M3]
    return f"E5M2's error over E4M3's: x {min(gains):.2f} to {max(gains):.2f}", min(gains) > 1


def _seconds(matrix: Matrix) -> tuple[str, bool]:
    mus = (E4M3, E4M3_X, E5M2, E5M2_X, DE8, DE8_X)
    plain = [matrix[mu, E5M2] / matrix[mu, E4M3] for mu in mus]
    wide = [matrix[mu, E5M2_X] / matrix[mu, E4M3_X] for mu in mus]
    text = (
        f"E5M2's error over E4M3's x {min(plain):.2f} to {max(plain):.2f}, "
        f"expanded x {min(wide):.2f} to {max(wide):.2f}"
    )
    return text, min(plain) > 1 and max(wide) <= 1 + CLOSE


def _lowest(matrix: Matrix) -> tuple[str, bool]:
    least = min(PAPER, key=matrix.__getitem__)
    text = f"m {least[0]}, v {least[1]}"
    return text, least in {(DE8_X, E4M3_X), (DE8_X, E5M2_X)}


@measure
def _span(rows: Rows, slot: str, decades: int) -> Finding:
    found = some(measured(rows))
    values = found.values("spans")
    within = 1 - values[slot, f"over_1e{decades}"]
    median = 10 ** values[slot, "p50"]
    text = f"under 1e{decades} in {100 * within:.0f} % of groups, median {number(median)}"
    return judged(text, within >= MOST, found.of("spans", impl=slot))


def exponents(found: Measured, slot: str) -> tuple[float, float, float]:
    """k of E4M3: the 5th, 50th and 95th percentile over groups."""
    wide = np.log10(2.0**8 * 1.75 * 2**9)
    low, middle, high = (wide / found.values("spans")[slot, f"p{p}"] for p in (95, 50, 5))
    return low, middle, high


@measure
def _k(rows: Rows, slot: str, least: float, most: float) -> Finding:
    """Return a measure of whether the median k lies in the paper's span."""
    found = some(measured(rows))
    low, middle, high = exponents(found, slot)
    text = f"median {middle:.1f}, {low:.1f} to {high:.1f} in 90 % of groups"
    same = least <= middle <= most
    return judged(text, same, found.of("spans", impl=slot))


def _worse(matrix: Matrix) -> tuple[str, bool]:
    ratios = [matrix[mu, DE8_X] / matrix[mu, DE8] for mu in (E4M3_X, DE8, DE8_X)]
    return f"x {min(ratios):.2f} to {max(ratios):.2f}", min(ratios) > 1


CLAIMS: tuple[Claim, ...] = (
    # tables
    *(Claim(f"{('Table 9' if name == DE8 else 'Table 1')}, expansion of {name} for {letter}",
            f"error {_spread(slot, name)} smaller", _improves(slot, name))
      for slot, letter in ((MU, "m"), (NU, "v"))
      for name in (EXPANDED if slot == MU else (E4M3, E5M2))),
    Claim("§4.2, expansion of E4M3 for both", f"x {BOTH} smaller",
          _gain((E4M3, E4M3), (E4M3_X, E4M3_X), BOTH)),
    Claim("§6.3.1, DE8 for both → DE8 + expansion for m, E4M3 + expansion for v",
          f"x {DE8_BEST} smaller", _gain((DE8, DE8), (DE8_X, E4M3_X), DE8_BEST)),
    Claim("Table 9, DE8 for v",
          f"expansion makes it worse (x {WORSE:.2f} beside DE8 for m)",
          _reading(_worse)),
    Claim("Table 1, m", "E4M3 is more suitable than E5M2", _reading(_formats)),
    Claim("Table 1, v", "E4M3 is better; expanded nearly the same", _reading(_seconds)),
    Claim("Table 9, the lowest error", "m DE8 + expansion, v E4M3 or E5M2 + expansion",
          _reading(_lowest)),
    Claim("Tables 1 and 9", "the order of all pairs", _reading(_order)),
    # ranges
    Claim("Figure 2a, m", "max / min of a group typically under 1e4", _span(MU, 4)),
    Claim("Figure 2a, v", "max / min of a group usually under 1e1", _span(NU, 1)),
    Claim("Figure 2c, k of m", "1 to 3", _k(MU, 1, 3)),
    Claim("Figure 2c, k of v", "5 to 15", _k(NU, 5, 15)),
    # training
    Claim("Table 13, FP8 states against BF16 training",
          "training perplexity 2.995 → 2.998 (+0.10 %)",
          findings.training("gpt-42m batch=8/coat_adamw", "val_loss", theirs=0.001)),
    Claim("Tables 3 and 4, Figures 5 and 6, OLMo", "training loss 2.551 → 2.568, 2.366 → 2.379",
          "needs 250 to 300 billion tokens"),
    Claim("Tables 5 and 6, Figures 7 and 8, fine-tuning", "average 55.7 → 55.5, VILA 62.80 → 62.51",
          "needs the weights of Llama-2-7B and VILA1.5-7B"),
)  # fmt: skip
