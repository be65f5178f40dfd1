"""Claims of Q-Adam-mini on Adam-mini with 8-bit moments, and our measurements.

The records are of `adam_mini` (one seed) and `rounding`; Tables 3 and 4 are computed
from shapes. The rows have the form of `claims.Claim`.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lowmem as lowmem
from benchmarks import curves as adam_mini_curves
from benchmarks.claims import findings
from benchmarks.claims.findings import BETTER, NOT, SAME, Finding, Measure, Rows
from benchmarks.claims.flashoptim import Claim
from benchmarks.model_shapes import llama
from benchmarks.records import last, on_gpus

ADAMW, MINI, AGAIN = "adamw", "adam_mini", "adam_mini-again"
OURS, NEAREST, EMBEDDINGS = "q_adam_mini", "q_adam_mini-nearest", "q_adam_mini-embeddings"
REFERENCE = "q_adam_mini-reference"
CASE_1, GUARDED = "q_adam_mini-case1", "q_adam_mini-case1-guarded"

# Validation losses of Table 1: AdamW, Adam-mini, Q-Adam-mini.
TABLE_1 = {"60M": (3.34, 3.37, 3.38), "130M": (3.07, 3.08, 3.09)}
# Bytes of state a parameter in Table 3, less the scales and one value a block.
TABLE_3 = {
    "AdamW": (8, optax.adamw(1e-3)),
    "Q-AdamW": (2, lowmem.q_adamw(1e-3)),
    "Adam-mini": (4, lowmem.adam_mini(1e-3)),
    "Q-Adam-mini": (1, lowmem.q_adam_mini(1e-3)),
}
# MiB of v_mean in Table 4, and the models. Its value projections are one block each.
TABLE_4 = {
    "Llama-1B": (1.6, {"layers": 24, "width": 2048, "hidden": 5461, "kv": 2048}),
    "Llama-7B": (3.9, {"layers": 32, "width": 4096, "hidden": 11008, "kv": 4096}),
}
HEADS, VALUE_WHOLE = 32, (("*/v_proj/kernel", "whole"),)
ROUNDING = 1.88  # Table 5: stochastic over nearest

CLOSE = 0.0035  # of the loss: Table 1 has 0.3 % between Adam-mini and Q-Adam-mini
SAME_NORM, ALIKE = 0.01, 0.05  # of the embedding's norm, and of a middle layer's
EXPLODES = 10.0
DIVERGES = 1.2  # of Adam-mini's loss; the reference quantiser's, which trains, is at 1.07
SCALES = 0.04  # bytes of scales and blocks, of 8-bit state in groups of 256


def model(size: str) -> dict:
    """The shapes of a model of Table 4."""
    return llama(jnp.float32, vocab=32000, tied=False, **TABLE_4[size][1])


def state_bytes(method: str, rows: int = 2048, columns: int = 2048) -> float:
    """Bytes of state a parameter of one f32 matrix."""
    matrix = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
    params = {"mlp": {"up_proj": {"kernel": matrix}}}
    return lowmem.memory.report(TABLE_3[method][1], params).state_bytes / matrix.size


def v_mean_mib(size: str) -> tuple[float, float]:
    """MiB of v_mean, with one block a value projection and with one an output neuron of it."""
    found = [
        lowmem.blocks.describe(model(size), heads=HEADS, rules=rules) for rules in (VALUE_WHOLE, ())
    ]
    theirs, right = (one.bytes / 2**20 for one in found)
    return theirs, right


# ---- Training ------------------------------------------------------------------------------------


def _values(rows: Rows, metric: str, *impls: str) -> tuple[list[float], Rows] | None:
    """A metric of several variants, on the device where Adam-mini was measured last."""
    wanted = {"bench": "train", "metric": metric}
    cases = [row for row in rows if row["case"].endswith("/q_adam_mini")]
    newest = last(cases, impl=MINI, **wanted)
    if newest is None:
        return None
    wanted |= {key: newest[key] for key in ("case", "device", "jax")}
    found = findings.all_of(*(last(cases, impl=impl, **wanted) for impl in impls))
    return ([row["value"] for row in found], found) if found else None


def _over_adamw(index: int, impl: str) -> Measure:
    """A held-out loss over AdamW's: no further above it than in Table 1 at 60M."""
    bound = TABLE_1["60M"][index] / TABLE_1["60M"][0]

    def measure(rows: Rows) -> Finding | None:
        read = _values(rows, "val_loss", ADAMW, impl)
        if read is None:
            return None
        (plain, ours), used = read
        size = f"{used[0]['flags']['parameters'] / 1e6:.0f}M"
        text = f"{size}: {plain:.3f} → {ours:.3f} ({_percent(ours / plain)})"
        return Finding(text, SAME if ours / plain <= bound else NOT, used)

    return measure


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2f} %"


def _ratio(
    metric: str, impls: tuple[str, ...], holds: findings.Holds, what: str = "x {:.3g}"
) -> Measure:
    """Variants over Adam-mini; the first one decides."""

    def measure(rows: Rows) -> Finding | None:
        read = _values(rows, metric, MINI, *impls)
        if read is None:
            return None
        (mini, *others), used = read
        text = ", ".join(
            f"{impl} {what.format(value / mini)}" for impl, value in zip(impls, others, strict=True)
        )
        name = metric.replace("val_loss", "held-out loss").replace("_", " ")
        same = holds(others[0] / mini)
        return Finding(f"{name} over Adam-mini's: {text}", SAME if same else NOT, used)

    return measure


def _case_1(rows: Rows) -> Finding | None:
    """Find case 1's highest training loss and its held-out loss; a v that is never 0 beside it."""
    read = _values(rows, "val_loss", MINI, CASE_1, GUARDED)
    if read is None or not adam_mini_curves.CURVES.exists():
        return None
    (mini, case_1, guarded), used = read
    curve = adam_mini_curves.load().runs[CASE_1]
    top = int(np.argmax(curve["train_loss"]))
    text = (
        f"training loss up to {curve['train_loss'][top]:.0f} at step {curve['step'][top]}; "
        f"held-out loss {case_1:.2f}, Adam-mini's x {case_1 / mini:.2f} "
        f"(a v that is never 0, one seed: {guarded:.3f}, x {guarded / mini:.3f})"
    )
    trains = case_1 / mini <= DIVERGES
    return Finding(text, NOT if trains else SAME, used)


def moment_ratio(runs: dict[str, dict[str, np.ndarray]], impl: str, curve: str) -> float:
    """A norm over Adam-mini's, means of the second half of training."""
    ours, mini = (runs[name][curve] for name in (impl, MINI))
    return float(np.mean(ours[len(ours) // 2 :]) / np.mean(mini[len(mini) // 2 :]))


def _moments(rows: Rows) -> Finding | None:
    """Norms of m and v of the embedding, of the stored curves that the records came with."""
    read = _values(rows, "embedding_norm", MINI, REFERENCE, OURS)
    if read is None or not adam_mini_curves.CURVES.exists():
        return None
    runs = adam_mini_curves.load().runs
    ratios = {
        (impl, curve): moment_ratio(runs, impl, curve)
        for impl in (REFERENCE, OURS)
        for curve in ("mu_norm", "nu_norm")
    }
    text = "; ".join(
        f"{impl}: m x {ratios[impl, 'mu_norm']:.2f}, v x {ratios[impl, 'nu_norm']:.2f}"
        for impl in (REFERENCE, OURS)
    )
    explodes = any(ratios[REFERENCE, curve] > 1.1 for curve in ("mu_norm", "nu_norm"))
    return Finding(f"over Adam-mini's, second half: {text}", NOT if explodes else SAME, read[1])


def _training() -> Iterator[Claim]:
    for index, name, impl in ((1, "Adam-mini", MINI), (2, "Q-Adam-mini", OURS)):
        says = ", ".join(
            f"{size}: {losses[0]} → {losses[index]} ({_percent(losses[index] / losses[0])})"
            for size, losses in TABLE_1.items()
        )
        yield Claim(f"Table 1, AdamW → {name}", f"validation loss {says}", _over_adamw(index, impl))
    yield Claim(
        "Table 1, Q-AdamW, 350M and 1B",
        "2.71 → 2.71, 2.55 → 2.55",
        "Q-AdamW was not trained; the large models need C4 and many days of a GPU",
    )
    yield Claim(
        "Table 2, fine-tuning Llama3-8B",
        "MMLU 63.37 → 63.50 %, GSM-8K 56.86 → 56.03 %",
        "needs the weights of Llama3-8B, and the memory to train them in f32 with AdamW beside",
    )
    yield Claim(
        "Figure 3, 8-bit m and v (Case 1)",
        "does not train: a loss spike after 10K steps, then divergence",
        _case_1,
    )
    yield Claim(
        "Figure 5, 8-bit m, f32 v (Case 2), nearest",
        "stable, but slower than Adam-mini in the end",
        _ratio("val_loss", (REFERENCE, NEAREST), lambda x: 1 + CLOSE < x < DIVERGES, "x {:.4f}"),
    )


def _norms() -> Iterator[Claim]:
    yield Claim(
        "Figure 6a, embedding, nearest",
        "its norm explodes",
        _ratio("embedding_norm", (REFERENCE,), lambda x: x > EXPLODES),
    )
    yield Claim(
        "§2.3.2, embedding, nearest, without the reference's floor",
        "to prevent the explosion, randomness is needed",
        _ratio("embedding_norm", (NEAREST,), lambda x: x > EXPLODES, "x {:.4f}"),
    )
    for where, impls in (
        ("nearest", (REFERENCE,)),
        ("stochastic in the embedding", (EMBEDDINGS, NEAREST)),
        ("stochastic everywhere", (OURS,)),
    ):
        yield Claim(
            f"Figure 6b, a middle layer, {where}",
            "nearly identical to Adam-mini's",
            _ratio("mlp_norm", impls, lambda x: abs(x - 1) <= ALIKE),
        )
    yield Claim("Figure 7, m and v of the embedding", "their norms do not explode", _moments)
    yield Claim(
        "Figure 8a, stochastic in the embedding",
        "its norm stays",
        _ratio("embedding_norm", (EMBEDDINGS, OURS), lambda x: abs(x - 1) <= SAME_NORM, "x {:.4f}"),
    )
    yield Claim(
        "Figure 8b, stochastic in the embedding",
        "matches Adam-mini in f32 (Table 1: + 0.3 %)",
        _ratio("val_loss", (EMBEDDINGS, OURS, AGAIN), lambda x: x <= 1 + CLOSE, "x {:.4f}"),
    )


# ---- Memory and time -----------------------------------------------------------------------------


def _table_3(method: str) -> Measure:
    def measure(rows: Rows) -> Finding:
        del rows
        found, paper = state_bytes(method), TABLE_3[method][0]
        same = 0 <= found - paper <= SCALES
        return Finding(f"{found:.3f} bytes a parameter", SAME if same else NOT, [])

    return measure


def _table_4(size: str) -> Measure:
    def measure(rows: Rows) -> Finding:
        del rows
        theirs, right = v_mean_mib(size)
        text = f"{theirs:.2f} MiB; with a block for each neuron of the values {right:.2f}"
        same = f"{theirs:.1f}" == str(TABLE_4[size][0])
        return Finding(text, SAME if same else NOT, [])

    return measure


def _latency(rows: Rows) -> Finding | None:
    """Stochastic over nearest encoding, on the accelerator measured last."""
    here = on_gpus(rows)
    wanted = {"bench": "rounding", "metric": "device_ms"}
    found = findings.all_of(
        *(last(here, impl=impl, **wanted) for impl in ("nearest", "stochastic"))
    )
    if found is None:
        return None
    nearest, stochastic = (row["value"] for row in found)
    ratio = stochastic / nearest
    verdict = SAME if abs(ratio - ROUNDING) <= findings.STEP_SHARE else NOT
    verdict = BETTER if ratio < ROUNDING - findings.STEP_SHARE else verdict
    return Finding(f"{nearest:.2f} → {stochastic:.2f} ms (x {ratio:.2f})", verdict, found)


def _memory() -> Iterator[Claim]:
    constants = {"AdamW": "", "Q-AdamW": "", "Adam-mini": " + O(1)", "Q-Adam-mini": " + O(1)"}
    for method, (size, _) in TABLE_3.items():
        factor = "" if size == 1 else size
        says = f"{factor}mn{constants[method]} bytes of state (no scales)"
        yield Claim(f"Table 3, {method}", says, _table_3(method))
    for size, (mib, _) in TABLE_4.items():
        yield Claim(f"Table 4, v of {size}", f"{mib} MB", _table_4(size))
    yield Claim(
        "Table 5, stochastic rounding of [1,000,000, 2048]",
        f"17.5 → 33.1 ms (x {ROUNDING:.2f})",
        _latency,
    )


CLAIMS = (*_training(), *_norms(), *_memory())
