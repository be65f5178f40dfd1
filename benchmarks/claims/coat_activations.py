"""Claims of COAT on FP8 activations, and our measurements.

The records are of `activations` (one layer: bytes from shapes, errors anywhere, times of a
GPU), `activation_training` and `fit` (a GPU).
"""

from benchmarks.claims import (
    NOT,
    NOT_TRIED,
    ONE_SEED,
    Claim,
    Finding,
    Ratios,
    coat,
    findings,
    graded,
    judged,
    measure,
    some,
    values_of,
)
from benchmarks.claims.equivalence import Margin
from benchmarks.claims.findings import Pair
from benchmarks.records import Rows, last, on_gpus, select
from benchmarks.suites.activations import tables
from benchmarks.suites.activations.layers import CACHED
from benchmarks.suites.fit import tables as fit_tables
from benchmarks.suites.mesh import tables as mesh_tables

CLOSE = 0.05  # two times are alike within this share
FUSED = 0.05  # appendix J: a norm with quantizing takes this much more at most
SPEED, MEMORY = 1.44, 1.55  # §6.2.2, end to end
STATES = (1.02, 1.18)  # Table 11, 8 and 2 GPUs


def _units(rows: Rows, *names: str) -> tuple[list[float], Rows]:
    found = tables.known(rows, "saved_units").get(tables.TWO_THIRDS, {})
    return values_of(*map(found.get, names))


@measure
def _kept(rows: Rows, printed: float, name: str) -> Finding:
    """U of a layer, against a total that the paper prints."""
    (value,), used = _units(rows, name)
    scales = tables.scale_units(tables.TWO_THIRDS) if name == tables.OURS else 0
    text = f"{value:.2f} U" + (f", {scales:.2f} U of it scales" if scales else "")
    return judged(text, graded(value < printed, value <= printed + scales), used)


def _reduction(rows: Rows) -> Finding:
    (plain, ours), used = _units(rows, tables.BF16, tables.OURS)
    ratio = tables.PAPER_BF16 / ours
    text = f"x {ratio:.2f} of Table 2's bf16, x {plain / ours:.2f} of what JAX keeps in bf16"
    return judged(text, graded(ratio > 1.69, False), used)


def _blocks(rows: Rows) -> Finding:
    """Errors of B x B blocks over those of groups as large."""
    found = Ratios(tables.known(rows, "norm_error"), "block", "group")
    return judged(f"x {found.least:.1f} to {found.most:.1f}", found.least > 1, found.rows)


def _errors(rows: Rows, metric: str, *names: str) -> tuple[list[float], Rows]:
    """Of `group <size>`, alone or with `, exact`, and `linear alone`, of the last case."""
    cases = some(tables.known(rows, metric))
    return values_of(*map(list(cases.values())[-1].get, names))


@measure
def _groups(rows: Rows, metric: str) -> Finding:
    values, used = _errors(rows, metric, *tables.PRINTED_ERRORS)
    found = dict(zip(tables.PRINTED_ERRORS, values, strict=True))
    alone = found["linear alone"]
    which = 0 if metric == "forward_error" else 1
    theirs, base = (tables.PRINTED_ERRORS[name][which] for name in ("group 16", "linear alone"))
    text = f"over linear alone: x {found['group 16'] / alone:.2f} for 16 (theirs x "
    text += f"{theirs / base:.2f}), x {found['group 64'] / alone:.2f} for 64"
    return judged(text, found["group 64"] > found["group 4"] > alone, used)


def _scales(rows: Rows) -> Finding:
    printed = {4: 50, 8: 25, 16: 12.5, 32: 6.5, 64: 3.2}
    shares, used = _errors(rows, "scale_share", *(f"group {size}" for size in printed))
    text = ", ".join(f"{100 * share:.3g}" for share in shares) + " %"
    pairs = zip(shares, printed.values(), strict=True)
    return judged(text, all(abs(100 * a - b) < 0.3 for a, b in pairs), used)


def _exact(rows: Rows) -> Finding:
    names = ("linear alone", "group 16", "group 16, exact")
    (base, paper, ours), used = _errors(rows, "forward_error", *names)
    text = f"over linear alone: x {paper / base:.2f} from codes, x {ours / base:.2f} from inputs"
    return judged(text, graded(ours < paper, False), used)


def _between(ratio: float, least: float, most: float) -> str:
    """Grade a ratio beside a range of printed ones."""
    return graded(ratio > most * (1 + CLOSE), ratio >= least * (1 - CLOSE))


def _speedups(rows: Rows) -> Finding:
    found = [some(tables.speedups(rows).get(case)) for case in tables.PRINTED_SPEED]
    ours, used = [times for times, _ in found], [row for _, own in found for row in own]
    grades = [_between(a, b, b) for a, b in zip(ours, tables.PRINTED_SPEED.values(), strict=True)]
    text = ", ".join(f"{times:.2f}" for times in ours)
    close = sum(grade != NOT for grade in grades)
    text = f"x {text}; {close} of {len(grades)} within {CLOSE:.0%}"
    return judged(text, close == len(grades), used)


def _against_flax(rows: Rows) -> Finding:
    """A layer's time with Flax's FP8 products, whose activations stay in bf16."""
    ours, flax = tables.speedups(rows), tables.speedups(rows, tables.FLAX)
    both = {c: {"ours": ours[c][1][1], "flax": flax[c][1][1]} for c in filter(flax.get, ours)}
    found = Ratios(both, "flax", "ours")
    text = f"{found} of its speed, {found.count} shapes"
    return judged(text, graded(found.least > 1.07, found.least > 1), found.rows)


@measure
def _norms(rows: Rows, one: str, other: str, holds: float, words: str) -> Finding:
    cases = tables.known(on_gpus(rows), "device_ms")
    norms = {case: own for case, own in cases.items() if case.startswith("norm-")}
    found = Ratios(norms, one, other)
    middle = sorted(found.each)[found.count // 2]
    return judged(f"{found} of {words}, {found.count} sizes", middle <= holds, found.rows)


def _cached(rows: Rows) -> Finding:
    """A layer's time without looking for the maxima of its kernels."""
    found = Ratios(tables.known(on_gpus(rows), "device_ms"), tables.OURS, CACHED)
    pairs = zip(found.rows[::2], found.rows[1::2], strict=True)
    # beyond what turns differ by
    apart = all(a.get("min", a["value"]) > b.get("max", b["value"]) for a, b in pairs)
    return judged(f"a layer's speed {found}; no bit changes", apart, found.rows)


class Trained(findings.Trained):
    """A measure: losses over bf16's with AdamW, of the runs with the most seeds."""

    def pair(self, rows: Rows) -> Pair:
        return Pair.of(tables.paired(rows, self.ours))


def _alone(rows: Rows) -> Finding:
    """An 8B model on one GPU: without FP8 it does not fit, with it it does."""
    own = fit_tables.fits(rows).get("llama-8b-s2048", {})
    names = (fit_tables.BASE, fit_tables.COAT)
    (plain, coat), used = values_of(*(own.get(name, {}).get("max_batch") for name in names))
    return judged(f"Llama-3.1-8B: largest batch {plain:g} → {coat:g}", plain == 0 < coat, used)


KEPT_ALL = "llama-3b-s2048"  # layers without FP8 keep what JAX keeps; LEAN: as little as they can
LEAN = f"{KEPT_ALL}-lean"


def _ratio(rows: Rows, metric: str, ours: str, base: str, case: str) -> tuple[float, Rows]:
    """Of the largest batches, or of tokens a second at each one's."""
    every = fit_tables.fits(rows)
    own = some(every.get(case))
    found = [own.get(name, {}).get("max_batch") for name in (base, ours)]
    if metric != "max_batch":
        (plain, coat), _ = values_of(*found)
        found = [every.get(f"{case}-b{int(batch)}", {}).get(name, {}).get(metric)
                 for name, batch in ((base, plain), (ours, coat))]  # fmt: skip
    (plain, coat), used = values_of(*found)
    return coat / plain, used


def _planned(rows: Rows, ours: str, base: str) -> tuple[float, Rows]:
    """Of peaks at the largest batch of the baseline, on the line through each one's plans."""
    own = some(fit_tables.fits(rows).get(LEAN))
    largest = some(own.get(base, {}).get("max_batch"))
    peaks, used = [], [largest]
    for name in (base, ours):
        of = own.get(name, {})
        (most, peak, each), found = values_of(
            *(of.get(metric) for metric in ("max_batch", "planned_bytes", "sequence_bytes"))
        )
        peaks.append(peak - (most - largest["value"]) * each)
        used += found
    return peaks[0] / peaks[1], used


def _activations_alone(rows: Rows) -> Finding:
    """Speed at the largest batch over FP8 states alone, whose weights are split too."""
    ratio, used = _ratio(rows, "tokens_per_s", BOTH, "coat_adamw", KEPT_ALL)
    verdict = _between(ratio, *ACTIVATIONS)
    return judged(f"x {ratio:.2f} over coat_adamw", verdict, used, "Llama-3.2-3B")


def _on_a_mesh(rows: Rows) -> Finding:
    """Say what a run on simulated devices shows of FSDP: losses and bytes, no speed."""
    found = [row for row in select(rows, bench="mesh", impl=mesh_tables.COAT)
             if row["device"].startswith("cpu")]  # fmt: skip
    many = max((row["devices"] for row in found), default=0)
    one, cut = (last(found, devices=n, metric="train_device_bytes") for n in (1, many))
    loss = last(found, devices=many, metric="train_loss")
    difference = last(found, devices=many, metric="loss_difference")
    (before, after, apart, _), used = values_of(one, cut, difference, loss)
    text = f"not run on GPUs; on {many} simulated devices weights and state per device are "
    text += f"x {before / after:.1f} smaller, and losses within {100 * apart:.1f} % of one device's"
    run = used[-1]["run"]
    size = f"{found[0]['model']}, {run['steps']} steps of {run['batch'] * run['sequence']} tokens"
    return judged(text, NOT_TRIED, used, f"{size}, {ONE_SEED}")


@measure
def _alike(rows: Rows, metric: str, ours: str, printed: tuple[float, float]) -> Finding:
    """Compare runs whose weights are stored alike; the worst comparison decides."""
    texts, verdicts, every = [], [], []
    for what, (base, names) in ALIKE.items():
        if metric == "planned_bytes":
            (ratio, used), pair = _planned(rows, names[ours], base), ""
        else:
            ratio, used = _ratio(rows, metric, names[ours], base, LEAN)
            pair = f"{used[0]['value']:,.0f} → {used[-1]['value']:,.0f}, "
        texts.append(f"{what}: {pair}x {ratio:.2f}")
        verdicts, every = [*verdicts, _between(ratio, *printed)], every + used
    return judged("; ".join(texts), findings.worst(verdicts), every, "Llama-3.2-3B, lean layers")


ACTIVATIONS = (1.33, 1.56)  # Table 11: FP8 states and activations over states alone, 8 and 2 GPUs
BOTH = fit_tables.COAT
# how weights are stored -> the baseline, and what is compared with it
ALIKE = {
    "f32 weights": (
        fit_tables.BASE, {BOTH: fit_tables.COAT_F32, "coat_adamw": fit_tables.COAT_STATES_F32},
    ),
    "split weights": (fit_tables.SPLIT, {BOTH: BOTH, "coat_adamw": "coat_adamw"}),
}  # fmt: skip


def _margin(printed: float) -> Margin:
    """The paper's own difference, give or take a tenth of a percent."""
    return Margin(0.1, claimed=100 * printed)


CLAIMS: tuple[Claim, ...] = (
    # bytes
    Claim("Table 2, a layer in bf16",
          f"{tables.PAPER_BF16} U, half of it for norms and activation functions",
          _kept(tables.PAPER_BF16, tables.BF16)),
    Claim("Table 2, COAT", f"{tables.PRINTED['COAT'][-1]} U (no scales)",
          _kept(tables.PRINTED["COAT"][-1], tables.OURS)),
    Claim("Table 14, DeepSeek-V3's formats", f"{tables.PRINTED['DeepSeek-V3'][-1]} U",
          _kept(tables.PRINTED["DeepSeek-V3"][-1], tables.OURS)),
    Claim("Tables 2 and 7, memory of a layer", "x 1.69 less, x 1.65 achieved", _reduction),
    Claim("Figure 4a, blocks of B x B tokens and channels", "a larger error than 1 x B² groups",
          _blocks),
    Claim("Table 10, scales", "50, 25, 12.5, 6.5, 3.2 % for groups of 4 to 64", _scales),
    Claim("Table 10, forward error", "grows with the group; 16 is a good balance",
          _groups("forward_error")),
    Claim("Table 10, backward error", "grows with the group; 16 is a good balance",
          _groups("backward_error")),
    Claim("Table 10, forward error, norms and activations from their inputs (ours)",
          "they compute from codes", _exact),
    # times
    Claim("Table 7, a layer, 4 shapes",
          f"x {', '.join(map(str, tables.PRINTED_SPEED.values()))} of bf16's speed", _speedups),
    Claim("Table 7, a layer over TransformerEngine (ours: Flax's FP8 products)",
          "x 1.03 to 1.07 of its speed", _against_flax),
    Claim("Figure 4b, Group Scaling", "less overhead than just-in-time scaling",
          _norms("group-scaling", "just-in-time", 1.0, "its time")),
    Claim("§5.2, Group Scaling", "not significantly slower than delayed scaling",
          _norms("group-scaling", "delayed-scaling", 1 + CLOSE, "its time")),
    Claim("Appendix J and Table 12, a norm that quantizes", "less than 5 % more time",
          _norms("fp8-flow", tables.BF16, 1 + FUSED, "the norm's")),
    Claim("Appendix G.5, maxima of weights once per accumulation", "less overhead", _cached),
    Claim("Appendix H, linear layers in groups of 128", "40 % slower, little more accurate",
          "FP8 activations have one scale per tensor; `switchback_m` has one per row"),
    # training
    *(Claim(f"Table 13, {tables.SAYS[name]}",
            f"training loss {printed:+.2%}",
            Trained("", ours=name, margin=_margin(printed)))
      for name, printed in tables.LOSSES.items()),
    *(Claim(f"Table 13, {tables.SAYS[name]}, {model}",
            f"training loss {tables.LOSSES[name]:+.2%}",
            coat.of_llamas(case, _margin(tables.LOSSES[name]), f32=f32, split=split))
      for model, case in coat.LLAMAS.items()
      for name, f32, split in (
          ("fp8", ("adamw", "adamw+fp8"), ("split", "split+fp8")),
          ("fp8-coat_adamw", ("adamw", "coat_adamw-f32+fp8"), ("split", "coat_adamw+fp8")),
      )),
    # fitting
    Claim("Table 8, Llama-2-7B on one GPU", "bf16 runs out of memory, COAT fits", _alone,
          "so it is"),
    *(Claim(where, says, _alike(metric, name, printed),
            f"the factor ± {CLOSE:.0%}")
      for where, says, metric, name, printed in (
          ("§6.2.2, micro-batch, states and activations", "doubled", "max_batch", BOTH,
           (2.0, 2.0)),
          ("§6.2.2, peak memory, states and activations",
           f"up to x {MEMORY} less", "planned_bytes", BOTH, (MEMORY, MEMORY)),
          ("Table 11, speed, states and activations",
           f"nearly x {SPEED}", "tokens_per_s", BOTH, (SPEED, SPEED)),
          ("Table 11, speed, states alone",
           f"x {STATES[0]} to {STATES[1]}", "tokens_per_s", "coat_adamw", STATES),
      )),
    Claim("Table 11, speed, activations alone, split weights",
          f"x {ACTIVATIONS[0]} to {ACTIVATIONS[1]} over FP8 states",
          _activations_alone, f"in these ± {CLOSE:.0%}"),
    Claim("Table 8, Llama-2-7B, 13B and 30B on 2 to 8 GPUs, FSDP", "x 1.36 to 2.25 speed",
          _on_a_mesh),
    Claim("Abstract and Table 8, TransformerEngine", "its speed, or less than COAT's",
          "needs a machine with TransformerEngine; the table has Flax's FP8 products"),
)  # fmt: skip
