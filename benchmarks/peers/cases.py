"""Cases of the step benchmark: leaf sets, and optimizers with their hyperparameters."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_lowmem as lowmem
from benchmarks import model_shapes


def _leaves(**shapes: tuple[int, ...]) -> Callable[[], Any]:
    return lambda: {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}


_DEMO_BLOCK = {"qkv": (128, 384), "proj": (128, 128), "up": (128, 512), "down": (512, 128),
               "scale": (128,), "bias": (512,)}  # fmt: skip
# name -> the tree of its shapes
LEAF_SETS: dict[str, Callable[[], Any]] = {
    "gpt2-124m": model_shapes.gpt2_124m,
    "llama-3.2-1b": model_shapes.llama_3_2_1b,
    "resnet-50": model_shapes.resnet_50,
    "one-16384": _leaves(w=(16384, 16384)),
    "ten-million": _leaves(**{f"w{i}": (1024, 2560) for i in range(4)}),
    "one-ten-million": _leaves(w=(4096, 2560)),
    "demo-gpt": _leaves(
        embed=(256, 128),
        **{f"block{i}/{n}": s for i in range(4) for n, s in _DEMO_BLOCK.items()},
    ),
    "tiny": _leaves(w=(64, 160), odd=(65, 67), bias=(160,)),  # to try the benchmark itself
}
# by the name in optax, where it is there
RECORDS = {record.short_name: record for record in lowmem.OPTIMIZERS.values()}


def hidden(params: Any) -> Any:
    """Muon's matrices: all but embeddings, as its authors have it."""

    def axes(path: Any, p: Any) -> Any:
        embeds = "embed" in jax.tree_util.keystr(path)
        return optax.contrib.MuonDimensionNumbers() if p.ndim == 2 and not embeds else None

    return jax.tree_util.tree_map_with_path(axes, params)


def hyperparameters(record: Any) -> dict[str, Any]:
    """Those that the optimizer, its counterpart in optax and the peers are all given."""
    own = getattr(record.in_optax, "keywords", {})  # SGD's momentum
    given = {"weight_decay": 0.1, "muon_weight_dimension_numbers": hidden}
    taken = record.chosen(given, record.in_optax, record.make)
    return {"learning_rate": record.learning_rate / 10, **own, **taken}


OPTIMIZERS: dict[str, dict[str, Any]] = {n: hyperparameters(r) for n, r in RECORDS.items()}
# (query, key) heads of a leaf set, for Adam-mini's blocks
HEADS: dict[str, tuple[int, int]] = {"gpt2-124m": (12, 12), "llama-3.2-1b": (32, 8)}
WEIGHT_SCALE, GRADIENT_SCALE = 0.02, 1e-3


def shapes(leaf_set: str) -> list[tuple[int, ...]]:
    return [leaf.shape for leaf in jax.tree.leaves(LEAF_SETS[leaf_set]())]


def parameters(leaf_set: str) -> int:
    return sum(math.prod(shape) for shape in shapes(leaf_set))
