"""Claims of SwitchBack on 8-bit linear layers, and our measurements.

The records are of `switchback` (training on an accelerator, one seed; a whole model's speed;
appendix D) and `linear` (one layer).
"""

import math
import statistics

import numpy as np

from benchmarks.claims import (
    BETTER,
    NOT,
    SAME,
    Claim,
    Finding,
    Missing,
    all_of,
    judged,
    measure,
    some,
)
from benchmarks.records import Rows, last, on_gpus, select

STANDARD, OTHER_START = "standard", "standard-other-start"
INT8, FP8, M, Q = "switchback-int8", "switchback-fp8", "switchback_m-int8", "switchback_q-int8"
ALL_INT8, TENSORWISE, UNIT = "llm_int8", "tensorwise-fp8", "tensorwise-unit"
CLIPPED, KQ_NORM = f"{UNIT}-clipped", f"{UNIT}-kq-norm"
SCALED, STANDARD_SCALED = f"{UNIT}-layer-scale", "standard-layer-scale"

CLOSE = 0.005  # of the loss: nothing lost
FAILS = 0.05  # of the loss: training has failed
FASTER = (0.05, 0.35)  # Figure 6, right: a layer
HALF = 0.6  # Figure 6, left: "just over half the time"
QUANTISING = 0.25  # Figure 7, left: the largest share
END_TO_END = 0.13  # Figure 7, right, over nn.Linear, ViT-Huge
SAVED = 0.55  # of bf16's bytes: int8 and a scale a row
CLIP_TOKENS, CLIP_DIMS = 65536, (1280, 5120)  # appendix D.3
EQUAL = 0.1  # a variance and its prediction


# ---- Training ------------------------------------------------------------------------------------


def worse(losses: dict[str, float], impl: str, base: str = STANDARD) -> float:
    """The share by which a loss is over the base's; infinite where it is not a number."""
    found = losses[impl] / losses[base] - 1
    return found if math.isfinite(found) else math.inf


def bound(*losses: dict[str, float]) -> float:
    """Return the excess over the standard's loss that counts as visibly worse: more than by chance.

    Chance is another start's, of the first experiment that has one.
    """
    of = next(one for one in losses if OTHER_START in one)
    return max(CLOSE, 2 * abs(worse(of, OTHER_START)))


def values(
    rows: Rows, metric: str, *impls: str, large: bool = False
) -> tuple[dict[str, float], Rows]:
    """A metric of several variants, on the accelerator where the standard was trained last."""
    wanted = {"bench": "train", "metric": metric}
    end = "-large/switchback" if large else "/switchback"
    here = [
        row
        for row in on_gpus(rows)
        if row["case"].endswith(end) and (large or not row["case"].endswith("-large/switchback"))
    ]
    newest = some(last(here, impl=STANDARD, **wanted))
    wanted |= {key: newest[key] for key in ("case", "device", "jax")}
    found = all_of(*(last(here, impl=impl, **wanted) for impl in impls))
    return {row["impl"]: row["value"] for row in found}, found


def _percent(share: float) -> str:
    return f"{100 * share:+.2f} %" if math.isfinite(share) else "becomes NaN"


def _about(used: Rows) -> str:
    flags = used[0]["flags"]
    return f"{flags['parameters'] / 1e6:.0f}M, {flags['steps']} steps of {flags['tokens']:,} tokens"


def _chance(rows: Rows, large: bool) -> tuple[dict[str, float], bool]:
    """Losses of two starts, and whether they are of that batch: otherwise of the smaller one."""
    starts = ("val_loss", STANDARD, OTHER_START)
    try:
        return values(rows, *starts, large=large)[0], True
    except Missing:
        return values(rows, *starts)[0], False


@measure
def _loss(
    rows: Rows, impl: str, expected: str, base: str = STANDARD, large: bool = False
) -> Finding:
    """A held-out loss over the base's: `close` to it, visibly `worse`, `fails` or `trains`."""
    names = dict.fromkeys((STANDARD, base, impl))
    losses, used = values(rows, "val_loss", *names, large=large)
    chance, own = _chance(rows, large)
    more = worse(losses, impl, base)
    text = f"{_about(used)}: {losses[base]:.4f} → {losses[impl]:.4f} ({_percent(more)}; "
    text += f"other initial weights {_percent(worse(chance, OTHER_START))}"
    text += ")" if own else ", with the smaller batch)"
    holds = {
        "close": more <= CLOSE,
        "worse": more > bound(chance),
        "fails": more > FAILS,
        "trains": more <= FAILS,
    }[expected]
    return judged(text, holds, used)


@measure
def _features(rows: Rows, metric: str, when: str) -> Finding:
    """Mean magnitude behind the last layer, without and with layer scale."""
    read = values(rows, metric, STANDARD, STANDARD_SCALED)
    without, scaled = (read[0][name] for name in (STANDARD, STANDARD_SCALED))
    text = f"behind the last layer, {when}: {without:.3g} → {scaled:.3g}"
    return judged(text, scaled < without, read[1])


# ---- Appendix D ----------------------------------------------------------------------------------


def variances(rows: Rows, metric: str, draw: str = "normal") -> dict[str, dict[int, dict]]:
    """product -> length of its sums -> record, of the measurement stored last."""
    found: dict[str, dict[int, dict]] = {}
    for row in select(rows, bench="switchback", impl=draw, metric=f"{metric}_variance"):
        product = row["case"].removeprefix("variance/").rpartition(" of ")[0]
        found.setdefault(product, {})[row["length"]] = row
    return found


def growth(values: dict[int, float]) -> float:
    """The power of the length that values grow with (least squares of the logarithms)."""
    return float(np.polyfit(np.log(list(values)), np.log(list(values.values())), 1)[0])


def _growth(rows: Rows) -> Finding:
    found = some(variances(rows, "error"))

    def power(of: dict[int, dict]) -> float:
        return growth({length: row["value"] for length, row in of.items()})

    powers = [power(of) for of in found.values()]
    relative = {
        draw: [power(of) for of in variances(rows, "relative", draw).values()]
        for draw in ("normal", "student-t(4)")
    }
    texts = [f"{min(v):.2f} to {max(v):.2f} ({draw})" for draw, v in relative.items() if v]
    text = (
        f"with the length to the power of {min(powers):.2f} to {max(powers):.2f}; of the sums' own "
        f"variance: {', '.join(texts)}"
    )
    used = [row for of in found.values() for row in of.values()]
    return judged(text, min(powers) >= 1 - EQUAL, used)


def _predicted(rows: Rows) -> Finding:
    found, wanted = variances(rows, "error"), variances(rows, "predicted")
    pairs = [
        (row, wanted[product][length])
        for product, of in found.items()
        for length, row in of.items()
        if length in wanted.get(product, {})
    ]
    some(pairs)
    ratios = [row["value"] / other["value"] for row, other in pairs]
    text = f"measured over predicted: x {min(ratios):.2f} to {max(ratios):.2f}"
    same = max(abs(ratio - 1) for ratio in ratios) <= EQUAL
    return judged(text, same, [row for row, _ in pairs])


def _clip(rows: Rows) -> Finding:
    """The weight gradient of CLIP ViT-Huge against its other products."""
    found, relative = variances(rows, "error"), variances(rows, "relative")
    used = all_of(
        found.get("weight gradient", {}).get(CLIP_TOKENS),
        *(found.get("forward", {}).get(dim) for dim in CLIP_DIMS),
    )
    ratios = [used[0]["value"] / row["value"] for row in used[1:]]
    own = relative["weight gradient"][CLIP_TOKENS]["value"]
    owns = [own / relative["forward"][dim]["value"] for dim in CLIP_DIMS]
    text = " and ".join(f"x {ratio:.1f}" for ratio in ratios)
    text += f" for normal numbers (of the sums' own variance x {owns[0]:.2f} and x {owns[1]:.2f})"
    same = all(r >= CLIP_TOKENS / dim for r, dim in zip(ratios, CLIP_DIMS, strict=True))
    return judged(text, same, used)


# ---- Speed and memory ----------------------------------------------------------------------------


def _layers(rows: Rows, metric: str) -> dict[str, dict[str, dict]]:
    """shape -> implementation or operation -> record, on the accelerator measured last."""
    here = on_gpus(rows)
    here = select(here, bench="linear", metric=metric)
    found: dict[str, dict[str, dict]] = {}
    for row in here:
        if (row["device"], row["jax"]) == (here[-1]["device"], here[-1]["jax"]):
            found.setdefault(row["case"], {})[row["impl"]] = row
    return found


@measure
def _speedup(rows: Rows, impl: str) -> Finding:
    pairs = [
        (of["bf16"], of[impl])
        for of in _layers(rows, "device_ms").values()
        if {"bf16", impl} <= of.keys()
    ]
    some(pairs)
    gains = [plain["value"] / ours["value"] - 1 for plain, ours in pairs]
    low, high = min(gains), max(gains)
    text = f"{100 * low:+.0f} to {100 * high:+.0f} % over {len(pairs)} shapes"
    verdict = NOT if low < FASTER[0] else BETTER if high > FASTER[1] else SAME
    return judged(text, verdict, [row for pair in pairs for row in pair])


def _operations(rows: Rows, *names: str) -> list[list[dict]]:
    """Records of operations, for each shape that has them all."""
    every = _layers(rows, "operation_ms").values()
    return [[of[name] for name in names] for of in every if of.keys() >= set(names)]


def _multiplies(rows: Rows) -> Finding:
    found = some(_operations(rows, "bf16 forward", "int8 forward"))
    ratio = statistics.median(ours["value"] / plain["value"] for plain, ours in found)
    text = f"x {ratio:.2f} of bf16's time, median of {len(found)} shapes"
    verdict = BETTER if ratio < 0.5 else SAME if ratio <= HALF else NOT
    return judged(text, verdict, [row for pair in found for row in pair])


def _share(rows: Rows) -> Finding:
    quantising = [f"int8 quantize {of}" for of in ("x", "g", "w", "w transposed")]
    multiplying = ["int8 forward", "int8 input gradient", "bf16 weight gradient"]
    found = some(_operations(rows, *quantising, *multiplying))
    count = len(quantising)
    shares = [
        sum(row["value"] for row in of[:count]) / sum(row["value"] for row in of) for of in found
    ]
    text = f"{100 * min(shares):.0f} to {100 * max(shares):.0f} % over {len(found)} shapes"
    used = [row for of in found for row in of]
    return judged(text, max(shares) <= QUANTISING, used)


def _saved(rows: Rows) -> Finding:
    found = some([of for of in _layers(rows, "saved_bytes").values() if {"bf16", M} <= of.keys()])
    ratio = max(of[M]["value"] / of["bf16"]["value"] for of in found)
    used = [of[name] for of in found for name in ("bf16", M)]
    return judged(f"x {ratio:.3f} of bf16's bytes", ratio <= SAVED, used)


@measure
def _whole_model(rows: Rows, impl: str) -> Finding:
    """Tokens a second of Llama-3.2-1B's step, all matrices of its layers in 8 bits."""
    steps = [row for row in rows if row["case"].startswith("llama-1b")]
    steps = select(steps, bench="train", metric="tokens_per_s")
    ours = some([row for row in steps if row["flags"].get("linear") in (impl, f"{impl}-auto")])
    alike = {key: ours[-1][key] for key in ("device", "jax", "impl")}
    flags = {"linear": STANDARD}
    plain = some(last(steps, flags=ours[-1]["flags"] | flags, **alike))
    # of one run: all in 8 bits, and only what is faster so
    ours = [row for row in select(ours, **alike) if row["flags"] | flags == plain["flags"]]
    gains = {row["flags"]["linear"]: row["value"] / plain["value"] - 1 for row in ours}
    shown = ", ".join(
        f"{row['value']:,.0f} ({row['flags']['linear']}, "
        f"{100 * gains[row['flags']['linear']]:+.1f} %)"
        for row in ours
    )
    text = f"{plain['value']:,.0f} → {shown} tokens/s"
    same = max(gains.values()) >= END_TO_END
    return judged(text, same, [plain, *ours])


def _beside_llm_int8(rows: Rows) -> Finding:
    """Tokens a second of the runs above at each batch, over bf16's."""
    names = (INT8, ALL_INT8, STANDARD)
    read = some(all_of(*(values(rows, "tokens_per_s", *names, large=x) for x in (False, True))))
    said, holds = [], True
    for found, own in read:
        ours, theirs = (found[name] / found[STANDARD] for name in names[:2])
        tokens = own[0]["flags"]["tokens"]
        said.append(f"{tokens:,} tokens a step: x {ours:.2f} and x {theirs:.2f} of bf16's tokens/s")
        holds = holds and theirs <= min(1, ours)
    used = [row for _, own in read for row in own]
    return judged("; ".join(said), holds, used)


CLAIMS: tuple[Claim, ...] = (
    # training
    *(Claim(f"Figure 1, SwitchBack, {name}{where}",
            "CLIP ViT-Huge: 0.1 points of accuracy under bf16", _loss(impl, "close", large=large))
      for name, impl in (("int8", INT8), ("fp8", FP8))
      for where, large in (("", False), (", a large batch", True))),
    *(Claim(f"Figure 1, LLM.int8(){where}", "5.9 points of accuracy under bf16",
            _loss(ALL_INT8, "worse", large=large))
      for where, large in (("", False), (", a large batch (appendix D.3)", True))),
    Claim("§2.2.1, SwitchBackM", "negligible differences", _loss(M, "close", INT8)),
    Claim("§2.2.1, SwitchBackQ", "a scale a row of W: no better accuracy", _loss(Q, "close", INT8)),
    Claim("Figure 1, tensor-wise fp8, scaled to its range", "diverges over 420M parameters",
          _loss(TENSORWISE, "fails")),
    Claim("Figure 1, tensor-wise fp8, scaled to 1", "diverges over 420M parameters",
          _loss(UNIT, "fails")),
    *(Claim(f"Figure 2, with {name}", "diverges", _loss(impl, "fails"))
      for name, impl in (("gradient clipping", CLIPPED), ("KQ layer norm", KQ_NORM))),
    Claim("Figure 2, with zero-init layer scale", "trains without diverging",
          _loss(SCALED, "trains", STANDARD_SCALED)),
    Claim("Figure 2, features at init",
          "without layer scale the mean magnitude is high for later layers, with it it is not",
          _features("first_features", "at init")),
    Claim("Figure 2, features at the end",
          "without layer scale the mean magnitude is high for later layers, with it it is not",
          _features("last_features", "at the end")),
    Claim("Figure 1, CLIP ViT-Base to Huge", "zero-shot accuracy on ImageNet",
          "needs LAION-2B and 2.9e20 operations a run; above, a language model"),
    Claim("Figures 11 and 21, maxima of features and gradients",
          "grow without layer scale, and jump where the loss does",
          "of CLIP on LAION; above, mean magnitudes of features in a language model"),
    # analysis
    Claim("Appendix D.2, variance of the error", "grows with the inner dimension", _growth),
    Claim("Appendix D.1, equation 12", "k σq² (σu² + σv² + σq²), measured σq²", _predicted),
    Claim("Appendix D.3, CLIP ViT-Huge's weight gradient against its forward products",
          "51.2 and 12.8 times the variance, and more if the maxima grow", _clip),
    # speed
    *(Claim(f"Figures 6, right, and 10, a layer in {name}",
            "5 to 35 % faster, more for larger sizes", _speedup(impl))
      for name, impl in (("int8", INT8), ("fp8 (the paper: int8)", FP8))),
    Claim("Figure 6, left, int8 products", "just over half the time of fp16's", _multiplies),
    Claim("Figure 7, left, quantizing", "at most 25 % of a layer's time", _share),
    *(Claim(f"Figure 7, right, a whole model in {name} (ours: Llama-3.2-1B)",
            "CLIP ViT-Huge 13 % faster than with nn.Linear", _whole_model(impl))
      for name, impl in (("int8", INT8), ("fp8 (the paper: int8)", FP8))),
    Claim("Figure 8, a whole model, SwitchBack against LLM.int8()",
          "faster than LLM.int8(), which gives no speed-up over bf16", _beside_llm_int8),
    Claim("Algorithm 3, what SwitchBackM keeps for the backward pass", "8-bit tensors only",
          _saved),
)  # fmt: skip
