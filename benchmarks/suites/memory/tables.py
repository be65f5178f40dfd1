"""The table of the bytes that weights and state take, from memory."""

from benchmarks.records import Rows, select
from benchmarks.render import Rendered, Table


def memory(rows: Rows) -> Table:
    """GiB of weights and state of Llama-3.1-8B, beside the paper's Table 4."""
    found = select(rows, bench="memory", case="llama-3.1-8b/adamw")
    impls = list(dict.fromkeys(r["impl"] for r in found))
    value = {(r["impl"], r["metric"]): r["value"] for r in found}
    paper = {r["impl"]: r.get("paper") for r in found if r["metric"] == "state_gib"}
    body = [
        [
            impl,
            f"{value[impl, 'params_gib']:.1f}",
            f"{value[impl, 'state_gib']:.1f}",
            f"{value[impl, 'bytes_per_param']:.2f}",
            f"{paper[impl]:.1f}" if paper[impl] else "",
        ]
        for impl in impls
    ]
    head = ["Llama-3.1-8B, AdamW", "weights GiB", "state GiB", "bytes/param", "paper: state GiB"]
    return head, body, found


TABLES = {"memory": Rendered(memory, "memory")}
