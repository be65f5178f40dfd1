"""Tables of training runs of examples/, from their records: seeds, and pairs of implementations."""

import statistics

from benchmarks.claims import findings
from benchmarks.records import Rows, select
from benchmarks.render import Rendered, Table


def train(rows: Rows) -> Table:
    """Validation loss of the demo over seeds, ours and f32."""
    found = select(rows, bench="train", metric="val_loss", case="demo/adamw")
    runs: dict[tuple[str, str, str], list[float]] = {}
    for row in found:
        runs.setdefault((row["case"], row["device"], row["impl"]), []).append(row["value"])
    body = []
    for (case, device, impl), values in runs.items():
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
        mean = f"{statistics.mean(values):.4f} ± {error:.4f}"
        body.append([case, device, impl, str(len(values)), mean])
    return ["model", "device", "optimizer", "seeds", "validation loss"], body, found


def pairs(rows: Rows) -> Table:
    """Every training run in two implementations over the same seeds."""
    body, used = findings.all_pairs(select(rows, bench="train"))
    head = ["run", "device", "against", "metric", "seeds", "means and paired difference", ""]
    return head, body, used


TABLES = {
    "train": Rendered(train, "examples/train_gpt.py --seeds 3"),
    "pairs": Rendered(pairs, "examples/train_gpt.py --seeds 3"),
}
