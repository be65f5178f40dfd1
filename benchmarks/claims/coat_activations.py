"""Claims of COAT on FP8 activations, and our measurements.

The records are of `activations` (one layer: bytes from shapes, errors anywhere, times of a
GPU), `activation_training` and `fit` (a GPU).
"""

from benchmarks.claims import BETTER, NOT, SAME, Claim, Finding, Missing, judged, measure, some
from benchmarks.records import Rows, on_gpus
from benchmarks.suites.activations import tables
from benchmarks.suites.activations.layers import CACHED
from benchmarks.suites.activations.tables import BF16, OURS, PAPER_BF16, PRINTED, TWO_THIRDS
from benchmarks.suites.fit import tables as fit_tables

NOISE = 0.001  # two equal runs on a GPU differ by less
CLOSE = 0.05  # two times are alike within this share
FUSED = 0.05  # appendix J: a norm with quantizing takes this much more at most
DOUBLE = 2  # times the batch
SPEED, MEMORY = 1.44, 1.55  # §6.2.2, end to end
FLAX = "flax-fp8"
STATES = 1.18  # Table 11, 2 GPUs

# ---- Bytes and errors ----------------------------------------------------------------------------


@measure
def _kept(rows: Rows, printed: float, what: str) -> Finding:
    """U of a layer, against a total that the paper prints."""
    row = some(tables.known(rows, "saved_units").get(TWO_THIRDS, {}).get(what))
    most = printed + (tables.scale_units(TWO_THIRDS) if what == OURS else 0)
    value = row["value"]
    text = f"{value:.2f} U"
    if what == OURS:
        text += f", {tables.scale_units(TWO_THIRDS):.2f} U of it scales"
    verdict = BETTER if value < printed else SAME if value <= most else NOT
    return judged(text, verdict, [row])


def _reduction(rows: Rows) -> Finding:
    found = tables.known(rows, "saved_units").get(TWO_THIRDS, {})
    if not {BF16, OURS} <= found.keys():
        raise Missing
    ours, plain = found[OURS]["value"], found[BF16]["value"]
    ratio = PAPER_BF16 / ours
    text = f"x {ratio:.2f} of Table 2's bf16, x {plain / ours:.2f} of what JAX keeps in bf16"
    return judged(text, BETTER if ratio > 1.69 else NOT, [found[BF16], found[OURS]])


def _blocks(rows: Rows) -> Finding:
    """Errors of B x B blocks over those of groups as large."""
    found = {
        case: own
        for case, own in tables.known(rows, "norm_error").items()
        if {"block", "group"} <= own.keys()
    }
    some(found)
    ratios = [own["block"]["value"] / own["group"]["value"] for own in found.values()]
    text = f"x {min(ratios):.1f} to {max(ratios):.1f}"
    used = [row for own in found.values() for row in own.values()]
    return judged(text, min(ratios) > 1, used)


def errors(rows: Rows, metric: str) -> dict[str, dict]:
    """`group <size>`, alone or with `, exact`, and `linear alone` -> record."""
    cases = tables.known(rows, metric)
    return list(cases.values())[-1] if cases else {}


@measure
def _groups(rows: Rows, metric: str) -> Finding:
    """Return a measure of whether errors grow with the group, and of 16's over linear alone."""
    found = errors(rows, metric)
    names = [name for name in tables.PRINTED_ERRORS if name in found]
    if len(names) < len(tables.PRINTED_ERRORS):
        raise Missing
    values = {name: found[name]["value"] for name in names}
    grows = values["group 64"] > values["group 4"] > values["linear alone"]
    share = values["group 16"] / values["linear alone"]
    which = 0 if metric == "forward_error" else 1
    printed = {n: e[which] for n, e in tables.PRINTED_ERRORS.items()}
    theirs = printed["group 16"] / printed["linear alone"]
    text = (
        f"groups of 16: x {share:.2f} of linear alone (theirs x {theirs:.2f}), of 64: "
        f"x {values['group 64'] / values['linear alone']:.2f}"
    )
    return judged(text, grows, [found[name] for name in names])


def _scales(rows: Rows) -> Finding:
    found = errors(rows, "scale_share")
    names = [f"group {size}" for size in (4, 8, 16, 32, 64)]
    if not all(name in found for name in names):
        raise Missing
    shares = [found[name]["value"] for name in names]
    text = ", ".join(f"{100 * share:.3g}" for share in shares) + " %"
    printed = (50, 25, 12.5, 6.5, 3.2)
    same = all(abs(100 * a - b) < 0.3 for a, b in zip(shares, printed, strict=True))
    return judged(text, same, [found[name] for name in names])


def _exact(rows: Rows) -> Finding:
    """Compare the error of activations computed from inputs with that of those from codes."""
    found = errors(rows, "forward_error")
    names = ("linear alone", "group 16", "group 16, exact")
    if not all(name in found for name in names):
        raise Missing
    base, paper, ours = (found[name]["value"] for name in names)
    text = f"over linear alone: x {paper / base:.2f} from codes, x {ours / base:.2f} from inputs"
    return judged(text, BETTER if ours < paper else NOT, [found[name] for name in names])


# ---- Times ---------------------------------------------------------------------------------------


def _at_least(ratio: float, printed: float) -> str:
    """The verdict on a gain."""
    if ratio > printed * (1 + CLOSE):
        return BETTER
    return SAME if ratio >= printed * (1 - CLOSE) else NOT


@measure
def _speedup(rows: Rows, case: str, printed: float) -> Finding:
    found = some(tables.speedups(rows).get(case))
    times, used = found
    text = f"x {times:.2f}"
    return judged(text, _at_least(times, printed), used)


def _against_flax(rows: Rows) -> Finding:
    """A layer's time with Flax's FP8 products, whose activations stay in bf16."""
    ours, flax = tables.speedups(rows), tables.speedups(rows, FLAX)
    cases = some([case for case in ours if case in flax])
    ratios = [ours[case][0] / flax[case][0] for case in cases]
    used = [row for case in cases for row in (ours[case][1][1], flax[case][1][1])]
    text = f"x {min(ratios):.2f} to {max(ratios):.2f} of its speed, {len(cases)} shapes"
    same = min(ratios) > 1
    return judged(text, BETTER if min(ratios) > 1.07 else same, used)


def _norm_times(rows: Rows, *names: str) -> dict[str, list[dict]]:
    """case -> records of these ways to scale a norm's result, where all are there."""
    found = tables.known(on_gpus(rows), "device_ms")
    return {
        case: [own[name] for name in names]
        for case, own in found.items()
        if case.startswith("norm-") and own.keys() >= set(names)
    }


@measure
def _ratios(rows: Rows, names: tuple[str, str], holds: float, words: str) -> Finding:
    """Return a measure of whether one way takes at most `holds` times another, in the median."""
    found = some(_norm_times(rows, *names))
    ratios = sorted(one["value"] / two["value"] for one, two in found.values())
    middle = ratios[len(ratios) // 2]
    text = f"x {ratios[0]:.2f} to {ratios[-1]:.2f} of {words}, {len(ratios)} sizes"
    used = [row for own in found.values() for row in own]
    return judged(text, middle <= holds, used)


def _cached(rows: Rows) -> Finding:
    """A layer's time without looking for the maxima of its kernels."""
    found = tables.known(on_gpus(rows), "device_ms")
    pairs = [(own[OURS], own[CACHED]) for own in found.values() if {OURS, CACHED} <= own.keys()]
    some(pairs)
    ratios = [one["value"] / two["value"] for one, two in pairs]
    text = f"a layer's speed x {min(ratios):.2f} to {max(ratios):.2f}; no bit changes"
    ends = [(one.get("min", one["value"]), two.get("max", two["value"])) for one, two in pairs]
    apart = all(least > most for least, most in ends)  # beyond what turns differ by
    return judged(text, apart, [row for pair in pairs for row in pair])


# ---- Training, and what fits ---------------------------------------------------------------------


@measure
def _trained(rows: Rows, name: str) -> Finding:
    """A loss over bf16's with AdamW: as near as the paper's, counted from its own difference."""
    found = tables.losses(rows)
    if not {"standard", name} <= found.keys():
        raise Missing
    more, flags = tables.over(found, name), found["standard"]["flags"]
    text = (
        f"{flags['parameters'] / 1e6:.0f}M, {flags['steps']} steps: held-out loss "
        f"{found['standard']['value']:.4f} → {found[name]['value']:.4f} ({more:+.2%})"
    )
    printed = tables.LOSSES[name][1]
    most = tables.LOSSES[name][0]
    chance = tables.over(found, tables.OTHER) if tables.OTHER in found else 0.0
    better = more < printed / 2 and abs(more) > abs(chance)
    verdict = BETTER if better else SAME if more <= most else NOT
    return judged(text, verdict, [found["standard"], found[name]])


def _case(rows: Rows, preset: str, *names: str) -> tuple[str, dict[str, dict[str, dict]]]:
    """A model's case and its records by configuration, of which some may not be missing."""
    found = {case: own for case, own in fit_tables.fits(rows).items()
             if case == f"llama-{preset}-s2048"}  # fmt: skip
    case, own = some(next(iter(found.items()), None))
    some(own.keys() >= set(names))
    return case, own


def _alone(rows: Rows) -> Finding:
    """An 8B model on one GPU: without FP8 it does not fit, with it it does."""
    names = (fit_tables.BASE, fit_tables.COAT)
    _, found = _case(rows, "8b", *names)
    most = [found[name]["max_batch"] for name in names]
    text = f"Llama-3.1-8B: largest batch {most[0]['value']:g} → {most[1]['value']:g}"
    same = most[0]["value"] == 0 < most[1]["value"]
    return judged(text, same, most)


def _batches(rows: Rows) -> Finding:
    names = (fit_tables.BASE, fit_tables.COAT)
    _, found = _case(rows, "3b", *names)
    plain, coat = (found[name]["max_batch"] for name in names)
    text = f"Llama-3.2-3B, one GPU: {plain['value']:g} → {coat['value']:g}"
    verdict = BETTER if coat["value"] > DOUBLE * plain["value"] else (
        SAME if coat["value"] == DOUBLE * plain["value"] else NOT
    )  # fmt: skip
    return judged(text, verdict, [plain, coat])


@measure
def _end_to_end(rows: Rows, metric: str, printed: float, ours: str = fit_tables.COAT) -> Finding:
    """Peaks at one batch, or tokens a second at each one's largest."""
    (case, own), every = _case(rows, "3b", fit_tables.ALL), fit_tables.fits(rows)
    records = []
    for name in (fit_tables.BASE, ours):
        batch = (
            own[fit_tables.ALL]["common_batch"] if metric == "planned_bytes"
            else own.get(name, {}).get("max_batch")
        )  # fmt: skip
        some(batch)
        timed = every.get(f"{case}-b{int(batch['value'])}", {}).get(name, {})
        if metric not in timed:
            raise Missing
        records.append(timed[metric])
    plain, coat = (row["value"] for row in records)
    ratio = plain / coat if metric == "planned_bytes" else coat / plain
    text = f"Llama-3.2-3B, one GPU: x {ratio:.2f}, over optax.adamw with f32 weights"
    return judged(text, _at_least(ratio, printed), records)


CLAIMS: tuple[Claim, ...] = (
    # bytes
    Claim("Table 2, a layer in bf16",
          f"{PAPER_BF16} U, half of it for norms and activation functions",
          _kept(PAPER_BF16, BF16)),
    Claim("Table 2, COAT", f"{PRINTED['COAT'][-1]} U (no scales)",
          _kept(PRINTED["COAT"][-1], OURS)),
    Claim("Table 14, DeepSeek-V3's formats", f"{PRINTED['DeepSeek-V3'][-1]} U",
          _kept(PRINTED["DeepSeek-V3"][-1], OURS)),
    Claim("Tables 2 and 7, memory of a layer", "x 1.69 less, x 1.65 achieved", _reduction),
    Claim("Figure 4a, blocks of B x B tokens and channels", "a larger error than 1 x B² groups",
          _blocks),
    Claim("Table 10, scales", "50, 25, 12.5, 6.5, 3.2 % for groups of 4 to 64", _scales),
    Claim("Table 10, forward error", "grows with the group; 16 is a good balance",
          _groups("forward_error")),
    Claim("Table 10, backward error", "grows with the group; 16 is a good balance",
          _groups("backward_error")),
    Claim("Table 10, forward error, norms and activations from what they are given (ours)",
          "they compute from codes", _exact),
    # times
    *(Claim(f"Table 7, forward and backward of a layer, {case}", f"x {printed} of bf16's speed",
            _speedup(case, printed))
      for case, printed in tables.PRINTED_SPEED.items()),
    Claim("Table 7, a layer against TransformerEngine (ours: against Flax's FP8 products)",
          "x 1.03 to 1.07 of its speed", _against_flax),
    Claim("Figure 4b, Group Scaling", "less overhead than just-in-time scaling",
          _ratios(("group-scaling", "just-in-time"), 1.0, "its time")),
    Claim("§5.2, Group Scaling", "not significantly slower than delayed scaling",
          _ratios(("group-scaling", "delayed-scaling"), 1 + CLOSE, "its time")),
    Claim("Appendix J and Table 12, a norm that quantizes", "less than 5 % more time",
          _ratios(("fp8-flow", BF16), 1 + FUSED, "the norm's")),
    Claim("Appendix G.5, maxima of weights found once an accumulation", "less overhead", _cached),
    Claim("Appendix H, linear layers in groups of 128", "40 % slower, little more accurate",
          "one scale a tensor is all that this flow has; `switchback_m` has one a row"),
    # training
    *(Claim(f"Table 13, {tables.SAYS[name]}", f"training perplexity {printed:+.2%}", _trained(name))
      for (name, (_, printed)) in tables.LOSSES.items()),
    # fitting
    Claim("Table 8, Llama-2-7B on one GPU", "bf16 runs out of memory, COAT fits", _alone),
    Claim("§6.2.2, micro-batch", "doubled", _batches),
    Claim("§6.2.2, peak memory at one batch", f"up to x {MEMORY} less",
          _end_to_end("planned_bytes", MEMORY)),
    Claim("§6.2.2, Table 11, speed at the largest batch", f"nearly x {SPEED}",
          _end_to_end("tokens_per_s", SPEED)),
    Claim("Table 11, FP8 states alone, speed at the largest batch", f"x 1.02 to {STATES}",
          _end_to_end("tokens_per_s", 1.02, "coat_adamw")),
    Claim("Table 8, Llama-2-13B and 30B on 2 to 8 GPUs", "x 1.53 to 2.25 speed",
          "was measured on one GPU only: `fit` above"),
)  # fmt: skip
