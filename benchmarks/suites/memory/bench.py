"""Bytes of weights and optimizer state of published models; nothing is allocated.

python -m benchmarks.run memory --record
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

import optax_lowmem as lowmem
from benchmarks import model_shapes, records

PAPER, FULL = lowmem.Storage.paper(), lowmem.Storage.full_precision()
MODELS: dict[str, Callable[[Any], Any]] = {
    "llama-3.1-8b": model_shapes.llama_3_1_8b,
    "gpt2-124m": model_shapes.gpt2_124m,
    "resnet-50": model_shapes.resnet_50,
}
ARGUMENTS = {"sgd": {"momentum": 0.9}}
# implementation -> (optimizer by name, dtype of the weights)
VARIANTS: dict[str, tuple[Callable[[str], optax.GradientTransformation], Any]] = {
    "optax-f32": (lambda name: _made(optax, name), jnp.float32),
    "lowmem": (lambda name: _ours(name, lowmem.Storage()), jnp.bfloat16),
    "lowmem, paper's storage": (lambda name: _ours(name, PAPER), jnp.bfloat16),
    "lowmem, weight split alone": (lambda name: _ours(name, FULL), jnp.bfloat16),
    "lowmem, 8-bit moments alone (paper's)": (lambda name: _ours(name, PAPER), jnp.float32),
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


def _made(module: Any, name: str, **more: Any) -> optax.GradientTransformation:
    return getattr(module, name)(1e-3, **ARGUMENTS.get(name.removeprefix("flash_"), {}), **more)


def _ours(name: str, storage: lowmem.Storage) -> optax.GradientTransformation:
    return _made(lowmem, f"flash_{name}", storage=storage)


def measure(model: str, optimizer: str) -> list[dict[str, Any]]:
    """Records of one model and optimizer."""
    rows = []
    published = PUBLISHED[model, optimizer]
    for (impl, (make, dtype)), paper in zip(VARIANTS.items(), published, strict=True):
        report = lowmem.memory.report(make(optimizer), MODELS[model](dtype))
        values = {
            "params_gib": (report.params_bytes / 2**30, "GiB"),
            "state_gib": (report.state_bytes / 2**30, "GiB"),
            "bytes_per_param": (report.bytes_per_param, "bytes"),
        }
        for metric, (value, unit) in values.items():
            more = {"paper": paper} if metric == "state_gib" and paper else {}
            case = f"{model}/{optimizer}"
            rows.append(records.record("memory", case, impl, metric, value, unit, **more))
    return rows


def main() -> None:
    """Computes and prints; `--record` also stores."""
    parser = argparse.ArgumentParser(description=__doc__)
    records.add_option(parser)
    args = parser.parse_args()
    rows = [row for model, optimizer in PUBLISHED for row in measure(model, optimizer)]
    for row in rows:
        paper = f"paper {row['paper']}" if "paper" in row else ""
        print(f"{row['case']:<22}{row['impl']:<40}{row['metric']:<18}{row['value']:9.3f}  {paper}")
    if args.record:
        print(f"recorded in {records.keep(rows, args.record)}")
