"""The tables of docs/results/noise.md: what noise on weights costs, from noise, and casts."""

from collections.abc import Callable

from benchmarks.claims import Missing, Ratios
from benchmarks.claims import gaussws as paper
from benchmarks.records import Rows, alike, grouped, on_gpus, select
from benchmarks.render import GIB, Rendered, Table, cell, target

OURS, NORMAL = "gaussws", "jax-normal"
LARGEST = "16384x16384"
LLAMA = "llama-134m"
NOISES = (paper.BASE, paper.OD, paper.ALL, paper.DIFFQ)


def _rates(rows: Rows, metric: str) -> Table:
    """10^9 elements a second of every implementation, and how many times JAX's normal's."""
    shapes = paper.rates_of_noise(rows, metric)
    names = list(dict.fromkeys(name for own in shapes.values() for name in own))

    def rate(own: dict[str, dict], name: str) -> str:
        times = name != NORMAL and NORMAL in own
        more = cell(own.get(name), " ({:.1f} x)", own[NORMAL]["value"]) if times else ""
        return cell(own.get(name), "{:.3g}") + more

    body = [[shape, *(rate(own, name) for name in names)] for shape, own in shapes.items()]
    used = [row for own in shapes.values() for row in own.values()]
    return ["rows x columns", *names], body, used


def _steps(rows: Rows) -> dict[str, dict[str, dict[str, dict]]]:
    """case -> variant -> metric -> record of a training step, on the accelerator measured last."""
    found = [
        row for row in select(on_gpus(rows), bench="train")
        if row["impl"] in NOISES and row["case"].startswith("llama-")
        and not row["case"].endswith("/gaussws")
    ]  # fmt: skip
    return grouped(alike(found, "device"), "case", "impl", "metric")


def steps(rows: Rows) -> Table:
    """A Llama's step with noise on no matrix, [od] and [all] (Table 1)."""
    body, used = [], []
    for case, variants in _steps(rows).items():
        for name, of in variants.items():
            used += of.values()
            if {"tokens_per_s", "overhead", "extra_bytes", "peak_bytes"} <= of.keys():
                body.append([
                    case, name, cell(of["tokens_per_s"], "{:,.0f}"),
                    cell(of["overhead"], "{:.2f} %", 0.01), cell(of["extra_bytes"], "{:.3f}"),
                    cell(of["peak_bytes"], "{:.2f}", GIB),
                ])  # fmt: skip
    head = ["model", "noise", "tokens/s", "more time a step", "bytes a sampled parameter",
            "peak GiB"]  # fmt: skip
    return head, body, used


Measured = tuple[float, Rows]


def _least(rows: Rows, metric: str, other: str, shape: str | None = None) -> Measured:
    """Ours over another's rate, the least over shapes."""
    shapes = paper.rates_of_noise(rows, metric)
    found = Ratios({c: own for c, own in shapes.items() if shape in (None, c)}, OURS, other)
    return found.least, found.rows


def _cost(rows: Rows, name: str) -> Measured:
    """The share of tokens a second that noise takes."""
    row = _steps(rows)[f"{LLAMA}/flash_adamw"][name]["overhead"]
    return 1 - 1 / (1 + row["value"]), [row]


def _bytes(rows: Rows) -> Measured:
    cases = [of for case, of in _steps(rows).items() if case.startswith(f"{LLAMA}/")]
    used = [of[name]["extra_bytes"] for of in cases for name in of if name != paper.BASE]
    return max(row["value"] for row in used), used


# what, its measure, how it is printed, the limit
TARGETS: tuple[tuple[str, Callable[[Rows], Measured], str, float], ...] = (
    ("equation 1's forward, times one on jax.random.normal, least over sizes",
     lambda rows: _least(rows, "gelem_per_s", NORMAL), "≥ {:.2f} x", 3.0),
    ("the same, times Box-Muller",
     lambda rows: _least(rows, "gelem_per_s", "box-muller"), "≥ {:.2f} x", 1.0),
    (f"R alone in bf16, {LARGEST}, times jax.random.normal",
     lambda rows: _least(rows, "noise_gelem_per_s", NORMAL, LARGEST), "≥ {:.2f} x", 3.0),
    ("[od], of the tokens/s of Llama-134m", lambda rows: _cost(rows, paper.OD), "≤ {:.2%}", 0.005),
    ("[all], the same", lambda rows: _cost(rows, paper.ALL), "≤ {:.2%}", 0.02),
    ("memory, bytes a sampled parameter", _bytes, "≤ {:.3f}", paper.MEMORY),
)  # fmt: skip


def targets(rows: Rows) -> Table:
    body, used = [], []
    for what, measure, asked, limit in TARGETS:
        try:
            found, own = measure(rows)
        except (KeyError, ValueError, Missing):  # not all of it is recorded
            continue
        body.append(target(what, asked, limit, found))
        used += own
    return ["on an H100", "asked", "measured", "reached"], body, used


def casts(rows: Rows) -> Table:
    """Held-out losses of trained models cast to formats, over those without a cast."""
    run = paper.run_of(rows)
    found = {key: row for key, row in run.items() if key[1].startswith("cast ")}
    names = list(dict.fromkeys(name for name, _ in found))
    metrics = [m for m in dict.fromkeys(metric for _, metric in found) if m != "cast clean"]

    def loss(name: str, metric: str) -> str:
        if (name, metric) not in found:
            return ""
        cast, clean = (found[name, m]["value"] for m in (metric, "cast clean"))
        return paper.percent(paper.over(cast, clean))

    body = [[m.removeprefix("cast "), *(loss(name, m) for name in names)] for m in metrics]
    return ["cast", *names], body, list(found.values())


TABLES = {
    "noise_targets": Rendered(targets, "noise"),
    "noise_forward": Rendered(lambda rows: _rates(rows, "gelem_per_s"), "noise"),  # Figure 5
    "noise_alone": Rendered(lambda rows: _rates(rows, "noise_gelem_per_s"), "noise"),
    "noise_steps": Rendered(steps, "noise"),
    "noise_casts": Rendered(casts, "gaussws"),
}  # fmt: skip
