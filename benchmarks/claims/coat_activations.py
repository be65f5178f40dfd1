"""Claims of COAT on FP8 activations, and our measurements.

The records are of `activations` (one layer: bytes from shapes, errors anywhere, times of a
GPU), `activation_training` and `fit` (a GPU). The rows have the form of `claims.Claim`.
"""

from collections.abc import Iterator

from benchmarks.claims.findings import BETTER, NOT, SAME, Finding, Measure, Rows
from benchmarks.claims.flashoptim import Claim
from benchmarks.records import on_gpus
from benchmarks.suites.activations import tables
from benchmarks.suites.activations.layers import CACHED
from benchmarks.suites.activations.tables import BF16, OURS, PAPER_BF16, PRINTED, TWO_THIRDS
from benchmarks.suites.fit import tables as fit_tables

NOISE = 0.001  # two equal runs on a GPU differ by less
CLOSE = 0.05  # two times are alike within this share
FUSED = 0.05  # appendix J: a norm with quantising takes this much more at most
DOUBLE = 2  # times the batch
SPEED, MEMORY = 1.44, 1.55  # §6.2.2, end to end
FLAX = "flax-fp8"
STATES = 1.18  # Table 11, 2 GPUs

# ---- Bytes and errors ----------------------------------------------------------------------------


def _kept(printed: float, what: str) -> Measure:
    """U of a layer, against a total that the paper prints."""

    def measure(rows: Rows) -> Finding | None:
        row = tables.known(rows, "saved_units").get(TWO_THIRDS, {}).get(what)
        if row is None:
            return None
        most = printed + (tables.scale_units(TWO_THIRDS) if what == OURS else 0)
        value = row["value"]
        text = f"{value:.2f} U"
        if what == OURS:
            text += f", {tables.scale_units(TWO_THIRDS):.2f} U of it scales"
        verdict = BETTER if value < printed else SAME if value <= most else NOT
        return Finding(text, verdict, [row])

    return measure


def _reduction(rows: Rows) -> Finding | None:
    found = tables.known(rows, "saved_units").get(TWO_THIRDS, {})
    if not {BF16, OURS} <= found.keys():
        return None
    ours, plain = found[OURS]["value"], found[BF16]["value"]
    ratio = PAPER_BF16 / ours
    text = f"x {ratio:.2f} of Table 2's bf16, x {plain / ours:.2f} of what JAX keeps in bf16"
    return Finding(text, BETTER if ratio > 1.69 else NOT, [found[BF16], found[OURS]])


def _blocks(rows: Rows) -> Finding | None:
    """Errors of B x B blocks over those of groups as large."""
    found = {
        case: own
        for case, own in tables.known(rows, "norm_error").items()
        if {"block", "group"} <= own.keys()
    }
    if not found:
        return None
    ratios = [own["block"]["value"] / own["group"]["value"] for own in found.values()]
    text = f"x {min(ratios):.1f} to {max(ratios):.1f}"
    used = [row for own in found.values() for row in own.values()]
    return Finding(text, SAME if min(ratios) > 1 else NOT, used)


def errors(rows: Rows, metric: str) -> dict[str, dict]:
    """`group <size>`, alone or with `, exact`, and `linear alone` -> record."""
    cases = tables.known(rows, metric)
    return list(cases.values())[-1] if cases else {}


def _groups(metric: str) -> Measure:
    """Return a measure of whether errors grow with the group, and of 16's over linear alone."""

    def measure(rows: Rows) -> Finding | None:
        found = errors(rows, metric)
        names = [name for name in tables.PRINTED_ERRORS if name in found]
        if len(names) < len(tables.PRINTED_ERRORS):
            return None
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
        return Finding(text, SAME if grows else NOT, [found[name] for name in names])

    return measure


def _scales(rows: Rows) -> Finding | None:
    found = errors(rows, "scale_share")
    names = [f"group {size}" for size in (4, 8, 16, 32, 64)]
    if not all(name in found for name in names):
        return None
    shares = [found[name]["value"] for name in names]
    text = ", ".join(f"{100 * share:.3g}" for share in shares) + " %"
    printed = (50, 25, 12.5, 6.5, 3.2)
    same = all(abs(100 * a - b) < 0.3 for a, b in zip(shares, printed, strict=True))
    return Finding(text, SAME if same else NOT, [found[name] for name in names])


def _exact(rows: Rows) -> Finding | None:
    """Compare the error of activations computed from inputs with that of those from codes."""
    found = errors(rows, "forward_error")
    names = ("linear alone", "group 16", "group 16, exact")
    if not all(name in found for name in names):
        return None
    base, paper, ours = (found[name]["value"] for name in names)
    text = f"over linear alone: x {paper / base:.2f} from codes, x {ours / base:.2f} from inputs"
    return Finding(text, BETTER if ours < paper else NOT, [found[name] for name in names])


def _bytes() -> Iterator[Claim]:
    coat, deepseek = PRINTED["COAT"][-1], PRINTED["DeepSeek-V3"][-1]
    says = f"{PAPER_BF16} U, half of it for norms and activation functions"
    yield Claim("Table 2, a layer in bf16", says, _kept(PAPER_BF16, BF16))
    yield Claim("Table 2, COAT", f"{coat} U (no scales)", _kept(coat, OURS))
    yield Claim("Table 14, DeepSeek-V3's formats", f"{deepseek} U", _kept(deepseek, OURS))
    yield Claim("Tables 2 and 7, memory of a layer", "x 1.69 less, x 1.65 achieved", _reduction)
    says = "a larger error than 1 x B² groups"
    yield Claim("Figure 4a, blocks of B x B tokens and channels", says, _blocks)
    yield Claim("Table 10, scales", "50, 25, 12.5, 6.5, 3.2 % for groups of 4 to 64", _scales)
    says = "grows with the group; 16 is a good balance"
    yield Claim("Table 10, forward error", says, _groups("forward_error"))
    yield Claim("Table 10, backward error", says, _groups("backward_error"))
    yield Claim("Table 10, forward error, norms and activations from what they are given (ours)",
                "they compute from codes", _exact)  # fmt: skip


# ---- Times ---------------------------------------------------------------------------------------


def _at_least(ratio: float, printed: float) -> str:
    """The verdict on a gain."""
    if ratio > printed * (1 + CLOSE):
        return BETTER
    return SAME if ratio >= printed * (1 - CLOSE) else NOT


def _speedup(case: str, printed: float) -> Measure:
    def measure(rows: Rows) -> Finding | None:
        found = tables.speedups(rows).get(case)
        if found is None:
            return None
        times, used = found
        text = f"x {times:.2f}"
        return Finding(text, _at_least(times, printed), used)

    return measure


def _against_flax(rows: Rows) -> Finding | None:
    """A layer's time with Flax's FP8 products, whose activations stay in bf16."""
    ours, flax = tables.speedups(rows), tables.speedups(rows, FLAX)
    cases = [case for case in ours if case in flax]
    if not cases:
        return None
    ratios = [ours[case][0] / flax[case][0] for case in cases]
    used = [row for case in cases for row in (ours[case][1][1], flax[case][1][1])]
    text = f"x {min(ratios):.2f} to {max(ratios):.2f} of its speed, {len(cases)} shapes"
    same = min(ratios) > 1
    return Finding(text, BETTER if min(ratios) > 1.07 else SAME if same else NOT, used)


def _norm_times(rows: Rows, *names: str) -> dict[str, list[dict]]:
    """case -> records of these ways to scale a norm's result, where all are there."""
    found = tables.known(on_gpus(rows), "device_ms")
    return {
        case: [own[name] for name in names]
        for case, own in found.items()
        if case.startswith("norm-") and own.keys() >= set(names)
    }


def _ratios(names: tuple[str, str], holds: float, words: str) -> Measure:
    """Return a measure of whether one way takes at most `holds` times another, in the median."""

    def measure(rows: Rows) -> Finding | None:
        found = _norm_times(rows, *names)
        if not found:
            return None
        ratios = sorted(one["value"] / two["value"] for one, two in found.values())
        middle = ratios[len(ratios) // 2]
        text = f"x {ratios[0]:.2f} to {ratios[-1]:.2f} of {words}, {len(ratios)} sizes"
        used = [row for own in found.values() for row in own]
        return Finding(text, SAME if middle <= holds else NOT, used)

    return measure


def _cached(rows: Rows) -> Finding | None:
    """A layer's time without looking for the maxima of its kernels."""
    found = tables.known(on_gpus(rows), "device_ms")
    pairs = [(own[OURS], own[CACHED]) for own in found.values() if {OURS, CACHED} <= own.keys()]
    if not pairs:
        return None
    ratios = [one["value"] / two["value"] for one, two in pairs]
    text = f"a layer's speed x {min(ratios):.2f} to {max(ratios):.2f}; no bit changes"
    ends = [(one.get("min", one["value"]), two.get("max", two["value"])) for one, two in pairs]
    apart = all(least > most for least, most in ends)  # beyond what turns differ by
    return Finding(text, SAME if apart else NOT, [row for pair in pairs for row in pair])


def _times() -> Iterator[Claim]:
    for case, printed in tables.PRINTED_SPEED.items():
        where = f"Table 7, forward and backward of a layer, {case}"
        yield Claim(where, f"x {printed} of bf16's speed", _speedup(case, printed))
    yield Claim("Table 7, a layer against TransformerEngine (ours: against Flax's FP8 products)",
                "x 1.03 to 1.07 of its speed", _against_flax)  # fmt: skip
    yield Claim("Figure 4b, Group Scaling", "less overhead than just-in-time scaling",
                _ratios(("group-scaling", "just-in-time"), 1.0, "its time"))  # fmt: skip
    yield Claim("§5.2, Group Scaling", "not significantly slower than delayed scaling",
                _ratios(("group-scaling", "delayed-scaling"), 1 + CLOSE, "its time"))  # fmt: skip
    yield Claim("Appendix J and Table 12, a norm that quantises", "less than 5 % more time",
                _ratios(("fp8-flow", BF16), 1 + FUSED, "the norm's"))  # fmt: skip
    yield Claim("Appendix G.5, maxima of weights found once an accumulation", "less overhead",
                _cached)  # fmt: skip
    yield Claim("Appendix H, linear layers in groups of 128", "40 % slower, little more accurate",
                "one scale a tensor is all that this flow has; "
                "`switchback_m` has one a row")  # fmt: skip


# ---- Training, and what fits ---------------------------------------------------------------------


def _trained(name: str) -> Measure:
    """A loss over bf16's with AdamW: as near as the paper's, counted from its own difference."""

    def measure(rows: Rows) -> Finding | None:
        found = tables.losses(rows)
        if not {"standard", name} <= found.keys():
            return None
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
        return Finding(text, verdict, [found["standard"], found[name]])

    return measure


def _training() -> Iterator[Claim]:
    for name, (_, printed) in tables.LOSSES.items():
        says = f"training perplexity {printed:+.2%}"
        yield Claim(f"Table 13, {tables.SAYS[name]}", says, _trained(name))


def _case(rows: Rows, preset: str) -> tuple[str, dict[str, dict[str, dict]]] | None:
    found = {case: own for case, own in fit_tables.fits(rows).items()
             if case == f"llama-{preset}-s2048"}  # fmt: skip
    return next(iter(found.items()), None)


def _alone(rows: Rows) -> Finding | None:
    """An 8B model on one GPU: without FP8 it does not fit, with it it does."""
    found = _case(rows, "8b")
    names = (fit_tables.BASE, fit_tables.COAT)
    if found is None or not all(name in found[1] for name in names):
        return None
    most = [found[1][name]["max_batch"] for name in names]
    text = f"Llama-3.1-8B: largest batch {most[0]['value']:g} → {most[1]['value']:g}"
    same = most[0]["value"] == 0 < most[1]["value"]
    return Finding(text, SAME if same else NOT, most)


def _batches(rows: Rows) -> Finding | None:
    found = _case(rows, "3b")
    names = (fit_tables.BASE, fit_tables.COAT)
    if found is None or not all(name in found[1] for name in names):
        return None
    plain, coat = (found[1][name]["max_batch"] for name in names)
    text = f"Llama-3.2-3B, one GPU: {plain['value']:g} → {coat['value']:g}"
    verdict = BETTER if coat["value"] > DOUBLE * plain["value"] else (
        SAME if coat["value"] == DOUBLE * plain["value"] else NOT
    )  # fmt: skip
    return Finding(text, verdict, [plain, coat])


def _end_to_end(metric: str, printed: float, ours: str = fit_tables.COAT) -> Measure:
    """Peaks at one batch, or tokens a second at each one's largest."""

    def measure(rows: Rows) -> Finding | None:
        found, every = _case(rows, "3b"), fit_tables.fits(rows)
        if found is None or fit_tables.ALL not in found[1]:
            return None
        case, own = found
        records = []
        for name in (fit_tables.BASE, ours):
            batch = (
                own[fit_tables.ALL]["common_batch"] if metric == "planned_bytes"
                else own.get(name, {}).get("max_batch")
            )  # fmt: skip
            if batch is None:
                return None
            timed = every.get(f"{case}-b{int(batch['value'])}", {}).get(name, {})
            if metric not in timed:
                return None
            records.append(timed[metric])
        plain, coat = (row["value"] for row in records)
        ratio = plain / coat if metric == "planned_bytes" else coat / plain
        text = f"Llama-3.2-3B, one GPU: x {ratio:.2f}, over optax.adamw with f32 weights"
        return Finding(text, _at_least(ratio, printed), records)

    return measure


def _fitting() -> Iterator[Claim]:
    yield Claim("Table 8, Llama-2-7B on one GPU", "bf16 runs out of memory, COAT fits", _alone)
    yield Claim("§6.2.2, micro-batch", "doubled", _batches)
    yield Claim("§6.2.2, peak memory at one batch", f"up to x {MEMORY} less",
                _end_to_end("planned_bytes", MEMORY))  # fmt: skip
    yield Claim("§6.2.2, Table 11, speed at the largest batch", f"nearly x {SPEED}",
                _end_to_end("tokens_per_s", SPEED))  # fmt: skip
    yield Claim("Table 11, FP8 states alone, speed at the largest batch",
                f"x 1.02 to {STATES}",
                _end_to_end("tokens_per_s", 1.02, "coat_adamw"))  # fmt: skip
    yield Claim("Table 8, Llama-2-13B and 30B on 2 to 8 GPUs", "x 1.53 to 2.25 speed",
                "was measured on one GPU only: `fit` above")  # fmt: skip


CLAIMS = (*_bytes(), *_times(), *_training(), *_fitting())
