"""Bytes of weights and optimizer state of published models; nothing is allocated."""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import optax

import optax_lowmem as lowmem
from benchmarks import model_shapes, records
from benchmarks.records import Rows
from benchmarks.render import Rendered, Table, cell

PAPER, FULL = lowmem.Storage.paper(), lowmem.Storage.full_precision()
MODELS: dict[str, Callable[[Any], Any]] = {
    "llama-3.1-8b": model_shapes.llama_3_1_8b,
    "gpt2-124m": model_shapes.gpt2_124m,
    "resnet-50": model_shapes.resnet_50,
}
ARGUMENTS = {"sgd": {"momentum": 0.9}}
# implementation -> (storage of ours, dtype of the weights)
VARIANTS: dict[str, tuple[lowmem.Storage | None, Any]] = {
    "optax-f32": (None, jnp.float32),
    "lowmem": (lowmem.Storage(), jnp.bfloat16),
    "lowmem, paper's storage": (PAPER, jnp.bfloat16),
    "lowmem, weight split alone": (FULL, jnp.bfloat16),
    "lowmem, 8-bit moments alone (paper's)": (PAPER, jnp.float32),
}
# FlashOptim Tables 4, 6 and 8, optimizer GiB, in the order of VARIANTS (the second is ours alone);
# it has no row for SGD on Llama
PUBLISHED = {
    ("llama-3.1-8b", "adamw"): (59.8, None, 23.4, 67.3, 15.9),
    ("gpt2-124m", "adamw"): (0.93, None, 0.36, 1.04, 0.25),
    ("gpt2-124m", "lion"): (0.46, None, 0.24, 0.58, 0.12),
    ("resnet-50", "sgd"): (0.10, None, 0.05, 0.12, 0.03),
    ("resnet-50", "adamw"): (0.19, None, 0.08, 0.21, 0.05),
    ("llama-3.1-8b", "sgd"): (None,) * 5,
}

FOUR = lowmem.Storage.four_bit()
FIRST = lowmem.Storage.four_bit(nu=None)
GROUPS_OF_32 = lowmem.Storage.four_bit(nu=None, group_size=32)
HEADS = lowmem.blocks.Structure(32, 8, default="whole")  # Llama-3.1-8B's
ROUNDED = {"master_weight_bits": None, "master_rounding": "stochastic"}
# as a user writes it -> the optimizer; the weights are in bf16 but for optax's
BUDGETS: dict[str, optax.GradientTransformation] = {
    "optax.adamw(lr)": optax.adamw(1e-3),
    "flash_adamw(lr)": lowmem.flash_adamw(1e-3),
    "flash_adamw(lr, storage=Storage(group_size=128))":
        lowmem.flash_adamw(1e-3, storage=lowmem.Storage(group_size=128)),
    "flash_adam_mini(lr)": lowmem.flash_adam_mini(1e-3, blocks=HEADS),
    "flash_adamw(lr, storage=Storage.four_bit())": lowmem.flash_adamw(1e-3, storage=FOUR),
    "flash_lion(lr)": lowmem.flash_lion(1e-3),
    "flash_adam_mini(lr, storage=Storage.four_bit(nu=None))":
        lowmem.flash_adam_mini(1e-3, storage=FIRST, blocks=HEADS),
    "flash_factored_adamw(lr)": lowmem.flash_factored_adamw(1e-3),
    "flash_factored_adamw(lr, storage=Storage.four_bit(nu=None, group_size=32))":
        lowmem.flash_factored_adamw(1e-3, storage=GROUPS_OF_32),
    "flash_lion(lr, storage=Storage.four_bit())": lowmem.flash_lion(1e-3, storage=FOUR),
    'flash_adamw(lr, storage=Storage.four_bit(master_weight_bits=None, master_rounding="stochastic"'
    "))": lowmem.flash_adamw(1e-3, storage=lowmem.Storage.four_bit(**ROUNDED)),
}  # fmt: skip


def measure(model: str, optimizer: str) -> Rows:
    rows = []
    for impl, (storage, dtype) in VARIANTS.items():
        own = getattr(lowmem, f"flash_{optimizer}") if storage else getattr(optax, optimizer)
        how = {"storage": storage} if storage else {}
        tx = own(1e-3, **ARGUMENTS.get(optimizer, {}), **how)
        report = lowmem.memory.report(tx, MODELS[model](dtype))
        params, state = (size / 2**30 for size in (report.params_bytes, report.state_bytes))
        values = {"params_gib": (params, "GiB"), "state_gib": (state, "GiB"),
                  "bytes_per_param": (report.bytes_per_param, "bytes")}  # fmt: skip
        rows += records.records_of("memory", f"{model}/{optimizer}", impl, values)
    return rows


def measure_budget(impl: str) -> Rows:
    dtype = jnp.dtype(jnp.float32 if impl.startswith("optax") else jnp.bfloat16)
    report = lowmem.memory.report(BUDGETS[impl], model_shapes.llama_3_1_8b(dtype))
    weights, state = report.params_bytes, report.state_bytes
    each, unit = dtype.itemsize / weights, "bytes/parameter"
    values = {"weights": weights, "state": state, "total": weights + state}
    own = {metric: (size * each, unit) for metric, size in values.items()}
    return records.records_of("memory", "llama-3.1-8b/budget", impl, own)


@records.suite()
def main(args: argparse.Namespace) -> Iterator[Rows]:
    yield from (measure(*one) for one in PUBLISHED)
    yield [row for impl in BUDGETS for row in measure_budget(impl)]
    from benchmarks.suites.pairs import budgets, sizes  # the model needs flax

    yield sizes.measure(budgets.PRESET, budgets.RULE)


def budget(rows: Rows) -> Table:
    every = records.select(rows, bench="memory", case="llama-3.1-8b/budget")
    found = [row for row in every if row["impl"] in BUDGETS]
    body = [
        [f"`{impl}`", *(cell(of[metric], "{:.2f}") for metric in ("state", "total"))]
        for impl, of in records.grouped(found, "impl", "metric").items()
    ]
    body.sort(key=lambda row: -float(row[-1]))
    return ["bytes per parameter of Llama-3.1-8B", "state", "with weights"], body, found


TABLES = {"budget": Rendered(budget, "memory")}
