"""State and temporaries of a step, by the drop-ins and by the chains of docs/guides/composition.md.

JAX_PLATFORMS=cpu python -m benchmarks.run composition --record

Compiles the blocks of that page and reads the compiler's plan: nothing is computed.
"""

import argparse
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import optax_lowmem as lowmem
from benchmarks import ROOT, records
from benchmarks.peers import in_jax
from benchmarks.records import Rows
from benchmarks.render import Rendered, Table, cell

PAGE = ROOT / "docs/guides/composition.md"
BLOCK = re.compile(r"^## `(\w+)`|^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
OPTIMIZERS = ("flash_adamw", "flash_lion", "flash_adam_mini")
LEAVES, SIDE = 4, 1024
KINDS = ("drop-in", "chain")


def transformations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each optimizer of the page with its drop-in and its chain; the first block is of them all."""
    namespace: dict[str, Any] = {}
    name = ""
    for heading, block in BLOCK.findall(PAGE.read_text("utf-8")):
        name = heading or name
        exec(compile(block, str(PAGE), "exec"), namespace)
        if block and "drop_in" in namespace:
            yield name, dict(zip(KINDS, (namespace["drop_in"], namespace["chain"]), strict=True))


def measure(tx: Any) -> dict[str, tuple[float, str]]:
    """Bytes per parameter of the state, and of what a step with donated arrays has beside it."""
    master = {f"w{i}": jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32) for i in range(LEAVES)}
    params, state = jax.eval_shape(lambda p: lowmem.init(tx, p), master)
    plan = jax.jit(in_jax.step_of(tx), donate_argnums=(1, 2)).lower(params, state, params).compile()
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    found = {"state_bytes": size, "temp_bytes": plan.memory_analysis().temp_size_in_bytes}
    each = {metric: value / (LEAVES * SIDE * SIDE) for metric, value in found.items()}
    return {f"{metric}_per_param": (value, "bytes") for metric, value in each.items()}


@records.suite()
def main(args: argparse.Namespace) -> Iterator[Rows]:
    first: dict[str, dict[str, Any]] = {}
    for name, both in transformations():
        first.setdefault(name, both)
    more = {"leaves": f"{LEAVES} x {SIDE} x {SIDE}"}
    for name in OPTIMIZERS:
        for kind, tx in first[name].items():
            yield records.records_of("composition", name, kind, measure(tx), **more)


def table(rows: Rows) -> Table:
    """Bytes per parameter, of the drop-in's state and of both kinds' temporaries."""
    found = records.select(rows, bench="composition")
    body = []
    for name, of in records.grouped(found, "case", "impl", "metric").items():
        temporaries = [cell(of[kind]["temp_bytes_per_param"], "{:.1f}") for kind in KINDS]
        state = cell(of["drop-in"]["state_bytes_per_param"], "{:.2f}")
        body.append([f"`{name}`", state, *temporaries])
    return ["", "state", "temporaries of a step, drop-in", "chain"], body, found


TABLES = {"composition": Rendered(table, "composition")}
