"""Errors of codes, records and training curves for coat_activations.ipynb."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import curves as stored_curves
from benchmarks.records import all_records, newest
from benchmarks.suites.activations import tables as paper
from benchmarks.suites.activations import training
from benchmarks.suites.activations.bytes import COLUMNS, by_column, kept
from benchmarks.suites.activations.errors import SIZES, drawn, mse
from benchmarks.suites.activations.layers import Shape
from benchmarks.tables import TABLES
from optax_lowmem.layers import fp8_flow

Rows = list[dict[str, Any]]


def bars(*names: str) -> dict[str, dict[str, float]]:
    """U of each column of Table 2: as printed, and of layers by their name."""
    found = {
        name: dict(zip(COLUMNS, own[:-1], strict=False)) for name, own in paper.PRINTED.items()
    }
    return found | {f"ours: {name}": by_layer(name) for name in names}


def by_layer(name: str) -> dict[str, float]:
    """U that a layer keeps, with an attention that keeps what cuDNN's does."""
    return by_column(kept(Shape.parse(paper.TWO_THIRDS), name, "cudnn"))


def storage_errors(shape: tuple[int, int]) -> dict[int, tuple[float, float]]:
    """Size of groups -> error of activations that are kept so, and the bytes of scales."""
    x = drawn(shape, 1).astype(jnp.float32)
    found = {}
    for size in SIZES:
        stored = jax.eval_shape(lambda x, n=size: fp8_flow.store(x, n), x)
        share = stored.scales.size * stored.scales.dtype.itemsize / stored.codes.size
        back = jax.jit(lambda x, n=size: fp8_flow.restore(fp8_flow.store(x, n), n))(x)
        found[size] = mse(back, x), share
    return found


def records() -> Rows:
    """The newest of every case."""
    return newest(all_records())


def shown(name: str, rows: Rows) -> bool:
    """Prints a table of docs/guides/activations.md; says so where nothing is recorded."""
    head, body, _ = TABLES[name].make(rows)
    if not body:
        print(f"nothing is recorded yet for {name}")
        return False
    widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]
    for row in (head, *body):
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    return True


def trained() -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
    """The curves of each variant, and what the run was."""
    stored, part = stored_curves.load(training.CURVES), training.PART
    return {name.partition("/")[2]: own for name, own in stored.runs.items()}, stored.about[part]


def over(runs: dict[str, dict[str, np.ndarray]], name: str) -> float:
    """The share by which the last held-out loss is over the standard's."""
    return float(runs[name]["val_loss"][-1] / runs["standard"]["val_loss"][-1] - 1)


def bound(runs: dict[str, dict[str, np.ndarray]], about: dict[str, Any], name: str) -> float:
    """Return a bound on excess loss: a variant's target; on small models, 2 x chance if larger."""
    chance = abs(over(runs, paper.OTHER)) if about["preset"] != "llama-134m" else 0.0
    return max(paper.LOSSES[name][0], 2 * chance)
