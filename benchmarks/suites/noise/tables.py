"""The tables of docs/guides/noise.md: what noise on weights costs, from noise, and casts."""

from collections.abc import Callable

from benchmarks.claims import gaussws as paper
from benchmarks.records import Rows, on_gpus
from benchmarks.render import Rendered, Table

OURS, NORMAL = "gaussws", "jax-normal"
LARGEST = "16384x16384"
LLAMA = "llama-134m"


def _rates(rows: Rows, metric: str) -> Table:
    """10^9 elements a second of every implementation, and how many times JAX's normal's."""
    shapes = paper.rates_of_noise(rows, metric)
    names = list(dict.fromkeys(name for own in shapes.values() for name in own))

    def cell(own: dict[str, dict], name: str) -> str:
        if name not in own:
            return ""
        rate = own[name]["value"]
        times = f" ({rate / own[NORMAL]['value']:.1f} x)" if NORMAL in own else ""
        return f"{rate:.3g}{times if name != NORMAL else ''}"

    body = [[shape, *(cell(own, name) for name in names)] for shape, own in shapes.items()]
    return (
        ["rows x columns", *names],
        body,
        [row for own in shapes.values() for row in own.values()],
    )


def forward(rows: Rows) -> Table:
    """Equation 1's forward pass (Figure 5)."""
    return _rates(rows, "gelem_per_s")


def alone(rows: Rows) -> Table:
    """R alone."""
    return _rates(rows, "noise_gelem_per_s")


def _steps(rows: Rows) -> dict[tuple[str, str, str], dict]:
    """(case, variant, metric) -> record of a training step, on the accelerator measured last."""
    found = [
        row
        for row in on_gpus(rows)
        if row["bench"] == "train" and row["impl"] in (paper.BASE, paper.OD, paper.ALL, paper.DIFFQ,
                                                       "box-muller[all]")
        and row["case"].startswith("llama-") and not row["case"].endswith("/gaussws")
    ]  # fmt: skip
    alike = [row for row in found if row["device"] == found[-1]["device"]]
    return {(row["case"], row["impl"], row["metric"]): row for row in alike}


def steps(rows: Rows) -> Table:
    """A Llama's step with noise on no matrix, [od] and [all] (Table 1)."""
    found, body = _steps(rows), []
    for case, name in dict.fromkeys(key[:2] for key in found):
        own = {m: row for (c, n, m), row in found.items() if (c, n) == (case, name)}
        value = {metric: row["value"] for metric, row in own.items()}
        if {"tokens_per_s", "overhead", "extra_bytes", "peak_bytes"} <= value.keys():
            body.append([
                case, name, f"{value['tokens_per_s']:,.0f}", f"{100 * value['overhead']:.2f} %",
                f"{value['extra_bytes']:.3f}", f"{value['peak_bytes'] / 2**30:.2f}",
            ])  # fmt: skip
    head = [
        "model",
        "noise",
        "tokens/s",
        "more time a step",
        "bytes a sampled parameter",
        "peak GiB",
    ]
    return head, body, list(found.values())


def _least(rows: Rows, metric: str, other: str, shape: str | None = None) -> tuple[float, Rows]:
    """Ours over another's rate, the least over shapes."""
    shapes = paper.rates_of_noise(rows, metric)
    pairs = [
        (own[OURS], own[other])
        for case, own in shapes.items()
        if {OURS, other} <= own.keys() and shape in (None, case)
    ]
    used = [row for pair in pairs for row in pair]
    return min(ours["value"] / theirs["value"] for ours, theirs in pairs), used


def _cost(rows: Rows, name: str) -> tuple[float, Rows]:
    """The share of tokens a second that noise takes."""
    row = _steps(rows)[f"{LLAMA}/flash_adamw", name, "overhead"]
    return 1 - 1 / (1 + row["value"]), [row]


def _bytes(rows: Rows) -> tuple[float, Rows]:
    found = _steps(rows)
    used = [
        row
        for (case, name, metric), row in found.items()
        if metric == "extra_bytes" and case.startswith(f"{LLAMA}/") and name != paper.BASE
    ]
    return max(row["value"] for row in used), used


# what, its measure, the limit, whether at most that, how both are printed
TARGETS: tuple[tuple[str, Callable[[Rows], tuple[float, Rows]], float, bool, str], ...] = (
    ("equation 1's forward, times one on jax.random.normal, least over sizes",
     lambda rows: _least(rows, "gelem_per_s", NORMAL), 3.0, False, "{:.2f} x"),
    ("the same, times Box-Muller",
     lambda rows: _least(rows, "gelem_per_s", "box-muller"), 1.0, False, "{:.2f} x"),
    (f"R alone in bf16, {LARGEST}, times jax.random.normal",
     lambda rows: _least(rows, "noise_gelem_per_s", NORMAL, LARGEST), 3.0, False, "{:.2f} x"),
    ("[od], of the tokens/s of Llama-134m", lambda rows: _cost(rows, paper.OD), 0.005, True,
     "{:.2%}"),
    ("[all], the same", lambda rows: _cost(rows, paper.ALL), 0.02, True, "{:.2%}"),
    ("memory, bytes a sampled parameter", _bytes, paper.MEMORY, True, "{:.3f}"),
)  # fmt: skip


def targets(rows: Rows) -> Table:
    """Return the table of the targets for noise on an H100, and whether they are reached."""
    body, used = [], []
    for what, measure, limit, at_most, form in TARGETS:
        try:
            found, own = measure(rows)
        except (KeyError, ValueError, IndexError):  # not all of it is recorded
            continue
        reached = found <= limit if at_most else found >= limit
        asked = ("≤ " if at_most else "≥ ") + form.format(limit)
        body.append([what, asked, form.format(found), "yes" if reached else "**no**"])
        used += own
    return ["on an H100", "asked", "measured", "reached"], body, used


def casts(rows: Rows) -> Table:
    """Held-out losses of trained models cast to formats, over those without a cast."""
    run = paper.newest_run(rows)
    found = {key: row for key, row in run.items() if key[1].startswith("cast ")}
    names = list(dict.fromkeys(name for name, _ in found))
    metrics = [m for m in dict.fromkeys(metric for _, metric in found) if m != "cast clean"]

    def cell(name: str, metric: str) -> str:
        if (name, metric) not in found:
            return ""
        loss, clean = (found[name, m]["value"] for m in (metric, "cast clean"))
        return f"{100 * paper.over(loss, clean):+.2f} %"

    body = [
        [metric.removeprefix("cast "), *(cell(name, metric) for name in names)]
        for metric in metrics
    ]
    return ["cast", *names], body, list(found.values())


TABLES = {
    "noise_targets": Rendered(targets, "noise"),
    "noise_forward": Rendered(forward, "noise"),
    "noise_alone": Rendered(alone, "noise"),
    "noise_steps": Rendered(steps, "noise"),
    "noise_casts": Rendered(casts, "gaussws"),
}
