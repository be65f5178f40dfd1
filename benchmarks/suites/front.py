"""The rows of the front page: bytes, time and losses, from the newest records of each."""

import statistics
from collections.abc import Iterator

from benchmarks.claims import Missing
from benchmarks.claims.flashoptim import of_pairs
from benchmarks.records import Rows, last, select
from benchmarks.render import Table
from benchmarks.suites.step.tables import BASE

TRAINED = of_pairs("gpt-42m", "adamw", "flash_adamw")
GPU = "NVIDIA H100 80GB HBM3"


def front(rows: Rows) -> Table:
    head = ["AdamW", f"`{BASE.removesuffix('-f32')}.adamw`, f32", "`flash_adamw`, bf16", "ratio"]
    body, used = [], []
    memory = select(rows, bench="memory", case="llama-3.1-8b/adamw")
    step = select(rows, bench="step", case="llama-3.2-1b/adamw", device=GPU)
    for name, own, ours, metrics, form in (
        ("weights and optimizer state of Llama-3.1-8B, computed", memory, "lowmem",
         ("params_gib", "state_gib"), "{:.1f} GiB"),
        ("time of the optimizer's step, Llama-3.2-1B, one H100", step, "lowmem.step",
         ("device_ms",), "{:.2f} ms"),
    ):  # fmt: skip
        found = [[last(own, impl=impl, metric=metric) for metric in metrics]
                 for impl in (BASE, ours)]  # fmt: skip
        both = [[row for row in one if row] for one in found]
        if both == found:
            values = [sum(row["value"] for row in one) for one in both]
            body.append([name, *map(form.format, values), f"{values[1] / values[0]:.2f}"])
            used += both[0] + both[1]
    for row, own in _losses(rows):
        body.append(row)
        used += own
    return head, body, used


def _losses(rows: Rows) -> Iterator[tuple[list[str], Rows]]:
    """The mean losses of trained pairs, if there are any."""
    try:
        pair, found = TRAINED.pair(rows), TRAINED(rows)
    except Missing:
        return
    means = [statistics.mean(values) for values in (pair.plain, pair.ours)]
    size = pair.size.partition(", ")[2]
    result = f"{found.verdict} within {TRAINED.margin.size:g} %"
    name = f"held-out loss of a 42M-parameter GPT, {size}: {result}"
    yield [name, *(f"{mean:.4f}" for mean in means), f"{means[1] / means[0]:.4f}"], found.rows
