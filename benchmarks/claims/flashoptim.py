"""Claims of FlashOptim, and our measurements, of many suites' records."""

import statistics
from collections.abc import Sequence

import numpy as np

from benchmarks import curves
from benchmarks.claims import (
    Claim,
    Finding,
    Holds,
    findings,
    graded,
    judged,
    measure,
    read,
    some,
    values_of,
)
from benchmarks.claims.equivalence import Margin
from benchmarks.claims.findings import F32, OURS, PAPER, Trained, over
from benchmarks.records import RESULTS, Rows, last, on_gpus, select
from benchmarks.suites.digits import Together
from benchmarks.suites.flashoptim.bench import BY_SIDE
from benchmarks.suites.memory import PUBLISHED, VARIANTS

LLAMA, GPT2_ADAMW, GPT2_LION = "llama-3.1-8b/adamw", "gpt2-124m/adamw", "gpt2-124m/lion"
SPLIT_ALONE = "lowmem, weight split alone"
CODES_ALONE = "lowmem, 8-bit moments alone (paper's)"
SHAPES, FILE = "llama-2-7b/adamw", "normal/adamw"
# Of a classifier of digits: the paper's own standard deviation of accuracies, and a share of a loss
# of 0.14 nats that curves show.
ACCURACY, CURVES = Margin(0.1, "% of the accuracy"), Margin(1.0)
DIGITS = "the printed digits"
DIVERGES = 1.2  # times the baseline's loss
RATIO = f"ratio ± {findings.STEP_SHARE:g}"
BILLION = 7  # parameters of Llama-2-7B, as the paper rounds them
# Bytes per parameter of scales (0.19) and of one layer's gradients beside the paper's 5.
RELEASE_SLACK = 0.3


def _agree(value: float, printed: str) -> bool:
    """Compare a number with one of the paper, to the digits that it prints."""
    return f"{value:.{len(printed.partition('.')[2])}f}" == printed


def _sizes(weights: Sequence[str], state: Sequence[str]) -> str:
    """Return the text of GiB: of f32 and FlashOptim, and of its split and its codes alone."""
    (plain, flash), (before, after, split, codes) = weights, state
    text = f"weights {plain} → {flash} GiB, state {before} → {after}"
    return f"{text} (split alone {split}, 8-bit moments alone {codes})"


@measure
def gib(rows: Rows, model: str, optimizer: str) -> Finding:
    """GiB of weights and state, as the paper's tables print them; our default's beside them."""
    places = len(WEIGHTS[model][0].partition(".")[2])
    wanted = {"bench": "memory", "case": f"{model}/{optimizer}"}
    weights, first = read(rows, F32, PAPER, metric="params_gib", **wanted)
    state, second = read(rows, *STATES, OURS, metric="state_gib", **wanted)
    *shown, default = (f"{value:.{places}f}" for value in (*weights, *state))
    printed = [*WEIGHTS[model], *_states(model, optimizer)]
    text = "as printed" if shown == printed else _sizes(shown[:2], shown[2:])
    text += f"; default storage: {default}" if default != shown[3] else ""
    return judged(text, shown == printed, first + second)


@measure
def bytes_a_parameter(rows: Rows, case: str, plain: str, flash: str, gradients: bool) -> Finding:
    """Bytes of weights, state and perhaps gradients of the weights' size, scales included."""
    found, used = read(rows, F32, PAPER, OURS, bench="memory", case=case, metric="bytes_per_param")
    more = (4, 2, 2) if gradients else (0, 0, 0)
    before, after, default = (value + g for value, g in zip(found, more, strict=True))
    text = f"{before:.2f} → {after:.2f} (default storage: {default:.2f})"
    return judged(text, _agree(before, plain) and _agree(after, flash), used)


def gradient_release(rows: Rows) -> Finding:
    """All that a step of an 8B Llama holds but what forward and backward pass need alone."""
    found = select(rows, bench="train", impl=OURS, metric="beside_backward")
    found = [r for r in found if r["case"].startswith("llama-8b") and r["flags"]["release"]]
    value = some(found)[-1]["value"]
    text = f"Llama-3.1-8B on one GPU: {value:.2f} bytes, scales included"
    # the paper counts codes alone: 0.1875 bytes of scales are ours to add
    return judged(text, value <= 5 + RELEASE_SLACK, found[-1:])


def scale_overhead(rows: Rows) -> Finding:
    """Bytes of scales per parameter and moment: what two moments take beyond 5 bytes."""
    (value,), used = read(rows, PAPER, case=LLAMA, metric="bytes_per_param")
    each = (value - 5) / 2
    return judged(f"{each:.4f}", _agree(each, "0.0625"), used)


@measure
def step_time(rows: Rows, case: str, plain_ms: float, flash_ms: float) -> Finding:
    """Our step over the f32 step of the same run, on the accelerator measured last."""
    steps = select(on_gpus(rows), bench="step", case=case, metric="device_ms")
    ours = some(last(steps, impl="lowmem.step"))
    here = select(steps, device=ours["device"], jax=ours["jax"])
    (plain, own), used = read(here, F32, "lowmem.step")
    ratio, theirs = own / plain, flash_ms / plain_ms
    verdict = graded(ratio < theirs - findings.STEP_SHARE, ratio <= theirs + findings.STEP_SHARE)
    return judged(f"{plain:.2f} → {own:.2f} ms (x {ratio:.2f})", verdict, used)


def _checkpoints(rows: Rows, case: str, metric: str) -> tuple[list[float], Rows]:
    return read(rows, F32, PAPER, OURS, bench="checkpoint", case=case, metric=metric)


def of_7b(rows: Rows) -> Finding:
    """GB of a model of 7 billion parameters, from bytes per parameter of Llama-2-7B.

    The paper leaves out the scales, an eighth of a byte per parameter.
    """
    found, used = _checkpoints(rows, SHAPES, "bytes_per_param")
    before, after, default = (BILLION * value for value in found)
    without = after - BILLION / 8
    text = f"{before:.1f} → {after:.1f} GB (default storage: {default:.1f}), "
    same = (round(before), round(without)) == (84, 35)
    return judged(f"{text}{without:.1f} GB without scales", same, used)


def on_disk(rows: Rows) -> Finding:
    """Bytes of files per parameter: Orbax compresses both."""
    (before, after, default), used = _checkpoints(rows, FILE, "disk_bytes_per_param")
    text = f"{before:.2f} → {after:.2f} bytes per parameter (default storage: {default:.2f})"
    return judged(text, after / before <= 0.5, used)


@measure
def split_errors(rows: Rows, target: str, schemes: dict[str, Holds]) -> Finding:
    """The largest mean relative error over the normal exponents of a 16-bit format."""
    texts, same, every = [], True, []
    for scheme, holds in schemes.items():
        here = select(rows, bench="claims", case=f"split/{target}", impl=scheme)
        names = ("min_mean_relative_error", "max_mean_relative_error")
        (low, high), used = values_of(*(last(here, metric=name) for name in names))
        span = dict.fromkeys(f"{error:.1e}" if error else "0" for error in (low, high))
        texts, every = [*texts, " to ".join(span)], every + used
        same = same and holds(low) and holds(high)
    return judged(", ".join(texts), same, every)


def exact_share(rows: Rows) -> Finding:
    wanted = {"bench": "claims", "case": "split/bf16", "metric": "exact_share"}
    found, used = read(rows, "ulp-32", "bits-32", **wanted)
    theirs, ours = (100 * value for value in found)
    text = f"{theirs:.2f} % with Algorithm 1, "
    side = last(rows, impl=BY_SIDE, **wanted)
    if side is not None:
        text += f"{100 * side['value']:.2f} % with the error's side, "
        used.append(side)
    text += f"{ours:.2f} % with our split"
    return judged(text, _agree(theirs, "99.92"), used)


@measure
def moments(rows: Rows, preset: str, rule: str, slot: str, share: float) -> Finding:
    """Figure 4 on states of a run of `pairs`: over its leaves and looks, in the stored curves."""
    path = RESULTS / f"pairs-{preset}-{rule}.npz"
    some(path.exists())
    stored = curves.load(path)
    base = {"adam": "adamw", "lion": "lion"}[rule]
    curve = f"nmse {slot} {{}}, paper"
    own = {name: run for name, run in stored.runs.items()
           if name.startswith(f"{base} seed") and curve.format("linear") in run}  # fmt: skip
    texts, holds = [], True
    errors = {
        kind: np.concatenate([run[curve.format(kind)].ravel() for run in some(own).values()])
        for kind in ("linear", "companded")
    }
    for name, rank in (("median", 50), ("95th percentile", 95)):
        linear, companded = (float(np.nanpercentile(x, rank)) for x in errors.values())
        texts.append(f"{name} {linear:.1e} → {companded:.1e}")
        holds = holds and companded < share * linear
    wanted = {"bench": "pairs", "case": f"{preset}/{rule}", "impl": base, "metric": "val_loss"}
    size = f"{stored.about['parameters'] / 1e6:.3g}M weights, {findings.count(len(own))}"
    used = [row for row in select(rows, **wanted) if f"{base} seed {row['seed']}" in own]
    return judged("; ".join(texts), holds, used, size)


def diverges(rows: Rows) -> Finding:
    linear, companded = (
        of_pairs("gpt-42m", "adamw", f"flash_adamw-{name}").pair(rows)
        for name in ("linear", "paper")
    )
    of_linear, of_companded = (
        # infinite where it is no number
        [1 + over(b, a) for a, b in zip(pair.plain, pair.ours, strict=True)]
        for pair in (linear, companded)
    )
    text = f"linear x {min(of_linear):.3g} to {max(of_linear):.3g}, companded x "
    text += f"{min(of_companded):.4f} to {max(of_companded):.4f} of AdamW's held-out loss"
    holds = min(of_linear) > DIVERGES >= max(of_companded)
    return judged(text, holds, [*linear.rows, *companded.rows], linear.size)


# short runs of `pairs`, of many seeds, with controls
SHORT, SMALLEST = "gpt2-124m steps=200", "smoke-gpt2 steps=400"


@measure
def beside_control(rows: Rows, case: str) -> Finding:
    """Compare ours with AdamW whose rates are a thousandth higher, and how far pairs lie apart."""
    names = {"flash_adamw": "flash_adamw", "adamw-nudged": "the control"}
    pairs = {name: of_pairs(case, "adamw", name).pair(rows) for name in names}
    versus = of_pairs(case, "adamw-nudged", "flash_adamw").pair(rows)
    some(len(versus.plain) > 1)
    apart = ", ".join(f"{statistics.stdev(pairs[name].differences):.2f} % with {says}"
                      for name, says in names.items())  # fmt: skip
    text = f"{versus.interval}; deviation of a pair {apart}"
    used = [row for pair in pairs.values() for row in pair.rows]
    return judged(text, versus.verdict(findings.MARGIN), used, versus.size)


TABLES = {"llama-3.1-8b": 4, "resnet-50": 6, "gpt2-124m": 8}
PROFILED = {
    ("llama-3.1-8b", "adamw"): "Llama-3.1-8B, AdamW",
    ("resnet-50", "sgd"): "ResNet-50, SGD",
    ("resnet-50", "adamw"): "ResNet-50, AdamW",
    ("gpt2-124m", "adamw"): "GPT-2 124M, AdamW",
    ("gpt2-124m", "lion"): "GPT-2 124M, Lion",
}
WEIGHTS = {"llama-3.1-8b": ("29.9", "15.0"), "resnet-50": ("0.10", "0.05"),
           "gpt2-124m": ("0.46", "0.23")}  # fmt: skip


STATES = (F32, PAPER, SPLIT_ALONE, CODES_ALONE)


def _states(model: str, optimizer: str) -> list[str]:
    """Return the GiB of state that the paper's tables print, of STATES."""
    places = len(WEIGHTS[model][0].partition(".")[2])
    of = dict(zip(VARIANTS, PUBLISHED[model, optimizer], strict=True))
    return [f"{of[impl]:.{places}f}" for impl in STATES]


def of_pairs(preset: str, plain: str, ours: str) -> Trained:
    rule = "lion" if plain == "lion" else "adam"
    return Trained(f"{preset}/{rule}", plain, ours, bench="pairs")


SHORT_RUNS = (
    *((f"GPT-2 124M, 200 steps, AdamW{what}", of_pairs(SHORT, "adamw", impl))
      for what, impl in (("", "flash_adamw"), (", control: f32, rates x 1.001", "adamw-nudged"))),
    ("GPT-2 0.1M, AdamW", findings.Several({
        says: of_pairs(SMALLEST, "adamw", impl)
        for says, impl in (("flash_adamw", "flash_adamw"), ("f32 moments, split weights", "split"),
                           ("control: rates x 1.001", "adamw-nudged"),
                           ("control: rounded start", "adamw-rounded"))
    })),
)  # fmt: skip

CLAIMS: tuple[Claim, ...] = (
    # training
    *(Claim(f"Table 3, {what}", f"validation loss {says}", how)
      for rule, base, ours, says in (
          ("AdamW", "adamw", "flash_adamw", "3.263 ± 0.001 → 3.265 ± 0.001 (+0.06 %)"),
          ("Lion", "lion", "flash_lion", "3.240 ± 0.002 → 3.240 ± 0.001 (0.00 %)"),
      )
      for what, how in (
          (f"GPT-2 124M, {rule}", of_pairs("gpt2-124m", base, ours)),
          (f"GPT-2 124M, 300 steps, {rule}", of_pairs("gpt2-124m-300", base, ours)),
          *(SHORT_RUNS if rule == "AdamW" else ()),
          (f"GPT 42M, {rule}", of_pairs("gpt-42m", base, ours)),
          (f"GPT 42M, {rule} as published",
           of_pairs("gpt-42m", base, f"{ours}-paper")),
      )),
    *(Claim(f"Table 3, {model}, flash_adamw over the control (ours)",
            "how far equal runs come apart", beside_control(case),
            str(findings.MARGIN))
      for model, case in (("GPT-2 124M, 200 steps", SHORT), ("GPT-2 0.1M", SMALLEST))),
    Claim("Table 2, SGD", "no loss: ImageNet accuracy 77.01 ± 0.02 → 77.16 ± 0.09 %",
          Together(margin=ACCURACY, metric="val_accuracy")),
    Claim("Figure 2b, SGD", "nearly identical loss curves",
          Together(margin=CURVES)),
    Claim("Table 3, the same text", "GPT-2 124M, 20,000 steps of 0.5M tokens of FineWeb",
          "needs FineWeb's 10 billion tokens and 7 hours of an H200 per run"),
    Claim("Table 3, in-context learning", "AdamW 44.0 → 45.0, Lion 44.0 → 44.7 %",
          "needs that model and the data of eight benchmarks"),
    Claim("Table 2, Figures 2 and 6, ImageNet", "SGD 77.01 → 77.16, AdamW 75.51 → 75.67 % accuracy",
          "needs ImageNet; the table has a convnet on digits"),
    Claim("Table 2, Figures 2 and 8, GSM8k", "75.09 ± 0.40 → 74.98 ± 0.77 % accuracy",
          "needs the weights of Llama-3.1-8B, 26 billion tokens and many GPUs"),
    # memory
    Claim("Table 1, AdamW", "16 → 7 bytes per parameter (weights, gradients, state; no scales)",
          bytes_a_parameter(LLAMA, "16", "7", gradients=True), DIGITS),
    Claim("Table 1, SGD with momentum", "12 → 6 bytes per parameter",
          bytes_a_parameter("llama-3.1-8b/sgd", "12", "6", gradients=True), DIGITS),
    Claim("Table 1, gradient release", "5 bytes (SGD: 4)", gradient_release,
          f"at most {RELEASE_SLACK} more, of scales"),
    Claim("§3.2, scales", "1/16 = 0.0625 bytes per parameter and moment", scale_overhead, DIGITS),
    Claim("§3.4, checkpoint with AdamW", "12 → 5 bytes per parameter (no scales)",
          bytes_a_parameter(LLAMA, "12", "5", gradients=False), DIGITS),
    Claim("§3.4, checkpoint of a 7B model", "84 → 35 GB (no scales)", of_7b, DIGITS),
    Claim("Abstract, checkpoint size", "cut by more than half", on_disk, "at most half"),
    *(Claim(f"Table {TABLES[model]}, {name}",
            _sizes(WEIGHTS[model], _states(model, optimizer)), gib(model, optimizer), DIGITS)
      for (model, optimizer), name in PROFILED.items()),
    *(Claim(f"Table {table}, total of {what}", says,
            "with gradients and PyTorch's allocator; the table has weights and state")
      for table, what, says in (
          ("6", "ResNet-50, SGD and AdamW", "0.30 → 0.17 and 0.40 → 0.20 GiB"),
          ("8", "GPT-2 124M, AdamW and Lion", "1.77 → 0.74 and 1.30 → 0.62 GiB"),
      )),
    Claim("Table 4 and Figure 1, peak of finetuning Llama-3.1-8B", "175.2 → 112.9 GiB",
          "needs the fine-tuning on several GPUs"),
    # speed
    *(Claim(f"Table {table}, step of {what}", f"{plain} → {flash} ms (x {flash / plain:.2f})",
            step_time(case, plain, flash), RATIO)
      for table, what, case, plain, flash in [
          ("8", "GPT-2 124M, AdamW", GPT2_ADAMW, 5.7, 5.9),
          ("8", "GPT-2 124M, Lion", GPT2_LION, 4.3, 4.5),
          ("6", "ResNet-50, SGD", "resnet-50/sgd", 8.4, 9.0),
          ("6", "ResNet-50, AdamW", "resnet-50/adamw", 11.9, 12.2),
          ("4", "Llama-3.1-8B, AdamW (ours: Llama-3.2-1B)", "llama-3.2-1b/adamw", 12.5, 11.5),
      ]),
    Claim("Tables 4, 6 and 8, steps of the ablations", "x 0.84 to 1.06 of the reference",
          "`benchmarks.run step` times whole optimizers only"),
    # codes
    Claim("Figure 3, bf16 weight, error with a correction of 16 bits, bf16, 8 bits",
          "under 1e-9, over 1e-6, like bf16's",
          split_errors("bf16", {"ulp-32": lambda e: e < 1e-9, "float": lambda e: e > 1e-6,
                                "ulp-24": lambda e: 1e-6 < e < 1e-5})),
    Claim("Figure 3, fp16 weight, with 16 bits (normal range), 8 bits", "none, under 1e-6",
          split_errors("fp16", {"ulp-32": lambda e: e == 0, "ulp-24": lambda e: e < 1e-6})),
    Claim("§4.4, 16-bit correction of bf16", "99.92 % bit for bit", exact_share, DIGITS),
    *(Claim(f"Figure 4, {slot} of {name}, {model}", f"companding lowers the error{much}",
            moments(preset, rule, letter, share), same)
      for preset, model in (("gpt2-124m", "GPT-2 124M"), ("gpt-42m", "GPT 42M"))
      for rule, name, slot, letter, much, share, same in (
          ("adam", "AdamW", "momentum", "m", "", 1.0, "a lower median and 95th percentile"),
          ("adam", "AdamW", "variance", "v", " substantially", 0.5,
           "under half, of both percentiles"),
          ("lion", "Lion", "momentum", "m", "", 1.0, "a lower median and 95th percentile"),
      )),
    Claim("Figure 5, GPT 42M", "a linear variance diverges, a companded one trains",
          diverges, f"a loss over {DIVERGES:g} times the baseline's, or no number"),
)  # fmt: skip
