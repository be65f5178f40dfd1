"""Bytes per parameter of what is trained in pairs: weights with corrections, and moments."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from _llama.config import STANDARD

import optax_lowmem as lowmem
from benchmarks import records
from benchmarks.records import Rows
from benchmarks.suites.pairs.presets import PRESETS, VARIANTS
from benchmarks.suites.pairs.training import model, optimizer


def report(preset: str, name: str) -> lowmem.memory.Report:
    run, chosen = PRESETS[preset], VARIANTS[name]
    tx = optimizer(run, name)
    weights = jax.eval_shape(model(run, run.vocab, STANDARD)[0], jax.random.key(0))

    def stored(weights: Any) -> Any:
        return lowmem.init(tx, weights, dtype=chosen.dtype, seed=np.uint32(0))[0]

    return lowmem.memory.report(tx, weights if chosen.plain else jax.eval_shape(stored, weights))


def measure(preset: str, rule: str) -> Rows:
    """Return the records of each variant of a rule; activations are not state."""
    rows: Rows = []
    for name, chosen in VARIANTS.items():
        if chosen.rule != rule or chosen.activations != STANDARD:
            continue
        found = report(preset, name)
        sizes = {"weights": found.params_bytes, "state": found.state_bytes}
        sizes["total"] = found.total_bytes
        own = {metric: (size / found.parameters, "bytes/parameter")
               for metric, size in sizes.items()}  # fmt: skip
        more = {"says": chosen.says, "parameters": found.parameters}
        rows += records.records_of("memory", f"{preset}/{rule}", name, own, **more)
    return rows
