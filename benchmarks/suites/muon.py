"""`flash_muon` beside `optax.contrib.muon`, from records of `step` and of the GPT's training."""

import statistics

import jax
import jax.numpy as jnp

from benchmarks import model_shapes
from benchmarks.claims import Missing, read
from benchmarks.claims.findings import Trained
from benchmarks.records import Rows, on_gpus
from benchmarks.render import Rendered, Table
from benchmarks.suites.step.tables import BASE

OURS = "lowmem.step"
STEP, RUN = "llama-3.2-1b/flash_muon", "gpt-42m batch=8/flash_muon"
HEAD = ["Muon", "`optax.contrib.muon`, f32", "`flash_muon`, bf16", ""]


def _of_step(rows: Rows, metric: str) -> tuple[float, float, Rows]:
    (plain, ours), used = read(on_gpus(rows), BASE, OURS, bench="step", case=STEP, metric=metric)
    return plain, ours, used


def table(rows: Rows) -> Table:
    """The time and the temporaries of a step, and the loss of paired runs."""
    body, used = [], []
    try:
        plain, ours, records = _of_step(rows, "device_ms")
        body.append(["a step of Llama-3.2-1B", f"{plain:.1f} ms", f"{ours:.1f} ms",
                     f"{plain / ours:.2f} x faster"])  # fmt: skip
        used += records
        plain, ours, records = _of_step(rows, "temp_bytes")
        weights = jax.tree.leaves(model_shapes.llama_3_2_1b(jnp.bfloat16))
        share = ours / sum(x.size * x.dtype.itemsize for x in weights)
        body.append(["its temporaries", f"{plain / 1e6:,.0f} MB", f"{ours / 1e6:,.0f} MB",
                     f"{share:.1%} of the weights' bytes in bf16"])  # fmt: skip
        used += records
        pair = Trained(RUN).pair(rows)
    except Missing:
        return HEAD, body, used
    plain, ours = (f"{statistics.mean(one):.4f}" for one in (pair.plain, pair.ours))
    body.append([f"held-out loss, {pair.size}", plain, ours, str(pair.interval)])
    return HEAD, body, used + list(pair.rows)


TABLES = {"muon": Rendered(table, "step --leaf-set llama-3.2-1b --optimizer flash_muon")}
