"""Claims of SwitchBack on 8-bit linear layers, and our measurements.

The records are of `switchback` (training on an accelerator, one seed; a whole model's speed;
appendix D) and `linear` (one layer).
"""

import math
from typing import Any

import numpy as np

from benchmarks.claims import (
    Claim,
    Finding,
    Missing,
    Ratios,
    graded,
    judged,
    measure,
    some,
    values_of,
)
from benchmarks.claims.findings import about, newest_run, of_one_seed, over, percent
from benchmarks.records import Rows, alike, grouped, last, on_gpus, select

STANDARD, OTHER_START = "standard", "standard-other-start"
INT8, FP8, M, Q = "switchback-int8", "switchback-fp8", "switchback_m-int8", "switchback_q-int8"
ALL_INT8, TENSORWISE, UNIT = "llm_int8", "tensorwise-fp8", "tensorwise-unit"
CLIPPED, KQ_NORM = f"{UNIT}-clipped", f"{UNIT}-kq-norm"
SCALED, STANDARD_SCALED = f"{UNIT}-layer-scale", "standard-layer-scale"

CLOSE = 0.005  # of the loss: nothing lost
FAILS = 0.05  # of the loss: training has failed
FASTER = (0.05, 0.35)  # Figure 6, right: a layer
HALF = 0.6  # Figure 6, left: "just over half the time"
QUANTIZING = 0.25  # Figure 7, left: the largest share
END_TO_END = 0.13  # Figure 7, right, over nn.Linear, ViT-Huge
SAVED = 0.55  # of bf16's bytes: int8 and a scale a row
CLIP_TOKENS, CLIP_DIMS = 65536, (1280, 5120)  # appendix D.3
EQUAL = 0.1  # a variance and its prediction


def _values(
    rows: Rows, metric: str, *impls: str, large: bool = False
) -> tuple[dict[str, float], Rows]:
    """A metric of several variants, on the accelerator where the standard was trained last."""

    def of(case: str) -> bool:
        return case.endswith("/switchback") and case.endswith("-large/switchback") == large

    run = newest_run(select(on_gpus(rows), bench="train"), of, impl=STANDARD, metric=metric)
    values, used = values_of(*(run.get((impl, metric)) for impl in impls))
    return dict(zip(impls, values, strict=True)), used


@measure
def _loss(
    rows: Rows, impl: str, expected: str, base: str = STANDARD, large: bool = False
) -> Finding:
    """A held-out loss over the base's: `close` to it, visibly `worse`, `fails` or `trains`.

    Visibly worse is more than by chance, which is another start's: of the smaller batch where the
    large one has none.
    """
    losses, used = _values(rows, "val_loss", *dict.fromkeys((STANDARD, base, impl)), large=large)
    starts, where = ("val_loss", STANDARD, OTHER_START), ""
    try:
        others, _ = _values(rows, *starts, large=large)
    except Missing:
        (others, _), where = _values(rows, *starts), " (smaller batch)"
    chance, more = over(others[OTHER_START], others[STANDARD]), over(losses[impl], losses[base])
    shown = percent(more) if math.isfinite(more) else "becomes NaN"
    text = f"{losses[base]:.4f} → {losses[impl]:.4f} ({shown})"
    size = f"{about(used[0])}; another start: {percent(chance)}{where}"
    if expected in ("fails", "trains"):  # far more than seeds differ by
        return judged(text, (more > FAILS) == (expected == "fails"), used, size)
    holds = more <= CLOSE if expected == "close" else more > max(CLOSE, 2 * abs(chance))
    return judged(text, of_one_seed(more, holds), used, size)


@measure
def _features(rows: Rows, metric: str) -> Finding:
    """Mean magnitude behind the last layer, without and with layer scale."""
    found, used = _values(rows, metric, STANDARD, STANDARD_SCALED)
    without, scaled = found.values()
    text = f"behind the last layer: {without:.3g} → {scaled:.3g} with layer scale"
    return judged(text, scaled < without, used)


def _variances(rows: Rows, metric: str, draw: str = "normal") -> dict[str, dict[int, dict]]:
    """product -> length of its sums -> record of appendix D."""
    found = grouped(
        select(rows, bench="switchback", impl=draw, metric=f"{metric}_variance"), "case"
    )
    products: dict[str, dict[int, dict]] = {}
    for case, row in found.items():
        product = case.removeprefix("variance/").rpartition(" of ")[0]
        products.setdefault(product, {})[row["length"]] = row
    return products


def _power(of: dict[int, dict]) -> float:
    """The power of the length that values grow with (least squares of the logarithms)."""
    return float(np.polyfit(np.log(list(of)), np.log([row["value"] for row in of.values()]), 1)[0])


def _span(values: list[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.2f}" for value in (min(values), max(values))))


def _growth(rows: Rows) -> Finding:
    found = some(_variances(rows, "error"))
    powers = [*map(_power, found.values())]
    relative = {
        draw: [*map(_power, _variances(rows, "relative", draw).values())]
        for draw in ("normal", "student-t(4)")
    }
    texts = [f"{_span(v)} ({draw})" for draw, v in relative.items() if v]
    text = f"with the length to the power of {_span(powers)}; relative to the sums' variance "
    text += ", ".join(texts)
    used = [row for of in found.values() for row in of.values()]
    return judged(text, min(powers) >= 1 - EQUAL, used)


def _predicted(rows: Rows) -> Finding:
    wanted = _variances(rows, "predicted")
    pairs = {
        f"{product} {length}": {"found": row, "wanted": wanted[product][length]}
        for product, of in _variances(rows, "error").items()
        for length, row in of.items()
        if length in wanted.get(product, {})
    }
    found = Ratios(pairs, "found", "wanted")
    same = max(abs(ratio - 1) for ratio in found.each) <= EQUAL
    return judged(f"measured over predicted: {found}", same, found.rows[::2])


def _clip(rows: Rows) -> Finding:
    """The weight gradient of CLIP ViT-Huge against its other products."""
    found, relative = _variances(rows, "error"), _variances(rows, "relative")
    (of_weights, *others), used = values_of(
        found.get("weight gradient", {}).get(CLIP_TOKENS),
        *(found.get("forward", {}).get(dim) for dim in CLIP_DIMS),
    )
    ratios = [of_weights / other for other in others]
    own = relative["weight gradient"][CLIP_TOKENS]["value"]
    owns = [own / relative["forward"][dim]["value"] for dim in CLIP_DIMS]
    text = " and ".join(f"x {ratio:.1f}" for ratio in ratios)
    text += f" (relative to the sums' variance x {owns[0]:.2f} and x {owns[1]:.2f})"
    same = all(r >= CLIP_TOKENS / dim for r, dim in zip(ratios, CLIP_DIMS, strict=True))
    return judged(text, same, used)


def _layers(rows: Rows, metric: str) -> dict[str, dict[str, dict]]:
    """shape -> implementation or operation -> record, on the accelerator measured last."""
    here = alike(select(on_gpus(rows), bench="linear", metric=metric))
    return grouped(here, "case", "impl")


@measure
def _speedup(rows: Rows, impl: str) -> Finding:
    found = Ratios(_layers(rows, "device_ms"), "bf16", impl)
    low, high = found.least - 1, found.most - 1
    text = f"{100 * low:+.0f} to {100 * high:+.0f} % over {found.count} shapes"
    within = low >= FASTER[0]
    return judged(text, graded(within and high > FASTER[1], within), found.rows)


def _multiplies(rows: Rows) -> Finding:
    found = Ratios(_layers(rows, "operation_ms"), "int8 forward", "bf16 forward")
    text = f"x {found.median:.2f} of bf16's time, median of {found.count} shapes"
    return judged(text, graded(found.median < 0.5, found.median <= HALF), found.rows)


def _share(rows: Rows) -> Finding:
    quantizing = [f"int8 quantize {of}" for of in ("x", "g", "w", "w transposed")]
    names = [*quantizing, "int8 forward", "int8 input gradient", "bf16 weight gradient"]
    every = _layers(rows, "operation_ms").values()
    found = some([[of[name] for name in names] for of in every if of.keys() >= set(names)])
    times = [[row["value"] for row in of] for of in found]
    shares = [sum(of[: len(quantizing)]) / sum(of) for of in times]
    text = f"{100 * min(shares):.0f} to {100 * max(shares):.0f} % over {len(found)} shapes"
    return judged(text, max(shares) <= QUANTIZING, [row for of in found for row in of])


def _saved(rows: Rows) -> Finding:
    found = Ratios(_layers(rows, "saved_bytes"), M, "bf16")
    return judged(f"x {found.most:.3f} of bf16's bytes", found.most <= SAVED, found.rows)


@measure
def _whole_model(rows: Rows, impl: str) -> Finding:
    """Tokens a second of Llama-3.2-1B's step, all matrices of its layers in 8 bits."""
    steps = select(rows, bench="train", metric="tokens_per_s")
    steps = [row for row in steps if row["case"].startswith("llama-1b")]
    ours = some([row for row in steps if row["flags"].get("linear") in (impl, f"{impl}-auto")])
    run: dict[str, Any] = {key: ours[-1][key] for key in ("device", "jax", "impl")}
    flags = {"linear": STANDARD}
    plain = some(last(steps, flags=ours[-1]["flags"] | flags, **run))
    # of one run: all in 8 bits, and only what is faster so
    ours = [row for row in select(ours, **run) if row["flags"] | flags == plain["flags"]]
    gains = {row["flags"]["linear"]: row["value"] / plain["value"] - 1 for row in ours}
    shown = ", ".join(
        f"{row['value']:,.0f} ({100 * gain:+.1f} %)"
        for row, gain in zip(ours, gains.values(), strict=True)
    )
    text = f"Llama-3.2-1B: {plain['value']:,.0f} → {shown} tokens/s"
    return judged(text, max(gains.values()) >= END_TO_END, [plain, *ours])


def _beside_llm_int8(rows: Rows) -> Finding:
    """Tokens a second of the runs above at each batch, over bf16's."""
    said, holds, used = [], True, []
    for large in (False, True):
        names = INT8, ALL_INT8, STANDARD
        found, own = _values(rows, "tokens_per_s", *names, large=large)
        ours, theirs = (found[name] / found[STANDARD] for name in names[:2])
        tokens = own[0]["flags"]["tokens"]
        said.append(f"x {ours:.2f} and x {theirs:.2f} at {tokens:,} tokens per step")
        holds, used = holds and theirs <= min(1, ours), used + own
    return judged("of bf16's tokens/s: " + "; ".join(said), holds, used)


def trained(large: bool) -> list[Claim]:
    """Return the claims of Figure 1 on losses, with a batch of 8,192 or 65,536 tokens."""
    where = ", a large batch" if large else ""
    near, far = (f"{points} points of accuracy under bf16" for points in (0.1, 5.9))
    return [
        Claim(f"Figure 1, SwitchBack, int8{where}", near, _loss(INT8, "close", large=large)),
        Claim(f"Figure 1, SwitchBack, fp8{where}", near, _loss(FP8, "close", large=large)),
        Claim(f"Figure 1, LLM.int8(){where}", far, _loss(ALL_INT8, "worse", large=large)),
    ]


FEATURES = "large in later layers without layer scale, small with it"
CLAIMS: tuple[Claim, ...] = (
    # training
    *trained(False),
    Claim("§2.2.1, SwitchBackM", "negligible differences", _loss(M, "close", INT8)),
    Claim("§2.2.1, SwitchBackQ", "a scale per row of W: no better accuracy",
          _loss(Q, "close", INT8)),
    Claim("Figure 1, tensor-wise fp8, scaled to its range", "diverges over 420M parameters",
          _loss(TENSORWISE, "fails")),
    Claim("Figure 1, tensor-wise fp8, scaled to 1", "diverges over 420M parameters",
          _loss(UNIT, "fails")),
    *(Claim(f"Figure 2, with {name}", "diverges", _loss(impl, "fails"))
      for name, impl in (("gradient clipping", CLIPPED), ("KQ layer norm", KQ_NORM))),
    Claim("Figure 2, with zero-init layer scale", "trains without diverging",
          _loss(SCALED, "trains", STANDARD_SCALED)),
    *trained(True),
    Claim("Figure 2, features at init", FEATURES, _features("first_features")),
    Claim("Figure 2, features at the end", FEATURES, _features("last_features")),
    Claim("Figure 1, CLIP ViT-Base to Huge", "zero-shot accuracy on ImageNet",
          "needs LAION-2B and 2.9e20 operations per run; the table has a language model"),
    Claim("Figures 11 and 21, maxima of features and gradients",
          "grow without layer scale, and jump where the loss does",
          "need CLIP on LAION; the table has mean magnitudes in a language model"),
    # analysis
    Claim("Appendix D.2, variance of the error", "grows with the inner dimension", _growth),
    Claim("Appendix D.1, equation 12", "k σq² (σu² + σv² + σq²), measured σq²", _predicted),
    Claim("Appendix D.3, CLIP ViT-Huge's weight gradient against its forward products",
          "51.2 and 12.8 times the variance, and more if the maxima grow", _clip),
    # speed
    *(Claim(f"Figures 6, right, and 10, a layer in {name}",
            "5 to 35 % faster, more for larger sizes", _speedup(impl))
      for name, impl in (("int8", INT8), ("fp8 (paper: int8)", FP8))),
    Claim("Figure 6, left, int8 products", "just over half the time of fp16's", _multiplies),
    Claim("Figure 7, left, quantizing", "at most 25 % of a layer's time", _share),
    *(Claim(f"Figure 7, right, a whole model in {name}",
            "CLIP ViT-Huge 13 % faster than with nn.Linear", _whole_model(impl))
      for name, impl in (("int8", INT8), ("fp8 (paper: int8)", FP8))),
    Claim("Figure 8, a whole model, SwitchBack against LLM.int8()",
          "faster than LLM.int8(), which gives no speed-up over bf16", _beside_llm_int8),
    Claim("Algorithm 3, what SwitchBackM keeps for the backward pass", "8-bit tensors only",
          _saved),
)  # fmt: skip
