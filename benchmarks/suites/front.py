"""The rows of the README: bytes, time and losses, from the newest records of each."""

import statistics
from collections.abc import Iterator

from benchmarks.claims import UNDECIDED, Missing
from benchmarks.claims.flashoptim import of_examples, of_pairs
from benchmarks.records import Rows, last, on_gpus, select
from benchmarks.render import Rendered, Table
from benchmarks.suites.step.tables import BASE

OURS = {"memory": "lowmem", "step": "lowmem.step"}
# runs, the largest first
LARGEST = {
    "a GPT of 42M": of_pairs("gpt-42m", "adamw", "flash_adamw"),
    "the GPT of 42M": of_examples("adamw"),
}
GPU = "NVIDIA H100 80GB HBM3"


def front(rows: Rows) -> Table:
    """Weights and state of an 8B model, a step of a 1B model, and losses of the largest runs."""
    head = ["AdamW", f"`{BASE.removesuffix('-f32')}.adamw`, f32", "`flash_adamw`, bf16", "ratio"]
    body, used = [], []
    for row, own in (_bytes(rows), _milliseconds(rows), *_losses(rows)):
        if own:
            body.append(row)
            used += own
    return head, body, used


def _bytes(rows: Rows) -> tuple[list[str], Rows]:
    own = select(rows, bench="memory", case="llama-3.1-8b/adamw")
    pair = [
        [last(own, impl=impl, metric=metric) for metric in ("params_gib", "state_gib")]
        for impl in (BASE, OURS["memory"])
    ]
    if not all(record for records in pair for record in records):
        return [], []
    plain, ours = (sum(r["value"] for r in records if r) for records in pair)
    name = "weights and optimizer state, Llama-3.1-8B, counted"
    row = [name, f"{plain:.1f} GiB", f"{ours:.1f} GiB", f"{ours / plain:.2f}"]
    return row, [r for records in pair for r in records if r]


def _milliseconds(rows: Rows) -> tuple[list[str], Rows]:
    own = on_gpus(select(rows, bench="step", case="llama-3.2-1b/adamw", device=GPU))
    pair = [last(own, impl=impl, metric="device_ms") for impl in (BASE, OURS["step"])]
    if not all(pair):
        return [], []
    plain, ours = (r["value"] for r in pair if r)
    name = "the optimizer's step alone, Llama-3.2-1B, one H100"
    row = [name, f"{plain:.2f} ms", f"{ours:.2f} ms", f"{ours / plain:.2f}"]
    return row, [r for r in pair if r]


def _losses(rows: Rows) -> Iterator[tuple[list[str], Rows]]:
    """The largest run there is, and the largest that is decided, with what their test says."""
    for model, measure in LARGEST.items():
        try:
            pair, found = measure.pair(rows), measure(rows)
        except Missing:
            continue
        means = [statistics.mean(values) for values in (pair.plain, pair.ours)]
        size = pair.size.partition(", ")[2]
        margin = f"a margin of {measure.margin.size:g} %"
        name = f"held-out loss, {model}, {size}: {found.verdict}, by {margin}"
        yield [name, *(f"{mean:.4f}" for mean in means), f"{means[1] / means[0]:.4f}"], found.rows
        if found.verdict != UNDECIDED:
            return


TABLES = {"front": Rendered(front, "memory")}
