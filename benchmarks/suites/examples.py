"""Tables of training runs of examples/: seeds, pairs, and Muon's beside its step."""

import statistics

import jax.numpy as jnp

from benchmarks import model_shapes
from benchmarks.claims import Missing, findings, read
from benchmarks.peers.device_loop import live_bytes
from benchmarks.records import Rows, on_gpus, select
from benchmarks.render import Rendered, Table
from benchmarks.suites.step.tables import BASE


def train(rows: Rows) -> Table:
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


STEP, RUN = "llama-3.2-1b/flash_muon", "gpt-42m batch=8/flash_muon"


def muon(rows: Rows) -> Table:
    """`flash_muon` and `optax.contrib.muon`: a step's time and temporaries, the loss of pairs."""
    head = ["Muon", "`optax.contrib.muon`, f32", "`flash_muon`, bf16", ""]
    weights, body, used = live_bytes(model_shapes.llama_3_2_1b(jnp.bfloat16)), [], []
    try:
        for name, metric, form, unit in (
            ("a step of Llama-3.2-1B", "device_ms", "{:.1f} ms", 1),
            ("its temporaries", "temp_bytes", "{:,.0f} MB", 1e6),
        ):
            of = {"bench": "step", "case": STEP, "metric": metric}
            (plain, ours), found = read(on_gpus(rows), BASE, "lowmem.step", **of)
            words = f"{plain / ours:.2f} x faster"
            if metric == "temp_bytes":
                words = f"{ours / weights:.1%} of the weights' bytes in bf16"
            body.append([name, form.format(plain / unit), form.format(ours / unit), words])
            used += found
        pair = findings.Trained(RUN).pair(rows)
    except Missing:
        return head, body, used
    plain, ours = (f"{statistics.mean(one):.4f}" for one in (pair.plain, pair.ours))
    body.append([f"held-out loss, {pair.size}", plain, ours, str(pair.interval)])
    return head, body, used + list(pair.rows)


TABLES = {
    "train": Rendered(train, "examples/train_gpt.py --seeds 3"),
    "muon": Rendered(muon, "step --leaf-set llama-3.2-1b --optimizer flash_muon"),
}
