"""The tables of docs/results/noise.md: what noise on weights costs, from noise, and casts."""

from benchmarks.claims import gaussws as paper
from benchmarks.records import Rows, alike, grouped, on_gpus, select
from benchmarks.render import GIB, Rendered, Table, cell

NOISES = (paper.BASE, paper.OD, paper.ALL, paper.DIFFQ)
CAST = "cast all "  # of all matrices, behind which the format is


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
    head = ["model", "noise", "tokens/s", "more time per step", "bytes per sampled parameter",
            "peak GiB"]  # fmt: skip
    return head, body, used


def casts(rows: Rows) -> Table:
    """Held-out losses of trained models cast to formats, over those without a cast."""
    run = paper.run_of(rows)
    found = {key: row for key, row in run.items() if key[1].startswith(CAST)}
    names = list(dict.fromkeys(name for name, _ in found))

    def loss(name: str, metric: str) -> str:
        row = found.get((name, metric))
        clean = run.get((name, "cast clean"))
        return paper.percent(paper.over(row["value"], clean["value"])) if row and clean else ""

    metrics = list(dict.fromkeys(metric for _, metric in found))
    body = [[m.removeprefix(CAST), *(loss(name, m) for name in names)] for m in metrics]
    return ["cast of all matrices", *names], body, list(found.values())


TABLES = {"noise_steps": Rendered(steps, "noise"), "noise_casts": Rendered(casts, "gaussws")}
