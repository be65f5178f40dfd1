"""Targets for the fused step on an H100, and the recorded values: a table of docs/."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from benchmarks.peers import cases
from benchmarks.records import Rows, newest
from benchmarks.render import markdown, source

DEVICE = "NVIDIA H100"
OURS, UPDATE, OPTAX, FLASHOPTIM = "lowmem.step", "lowmem.update", "optax-f32", "flashoptim"
TRITON = "lowmem.step-triton"
LLAMA, GPT2, ONE = "llama-3.2-1b", "gpt2-124m", "one-16384"
Value = Callable[..., float]  # of a record: (case, implementation, metric, field="value")


@dataclass(frozen=True)
class Target:
    """A number that was asked for.

    Attributes:
      what: it is of.
      measure: it, from records.
      limit: that it is to reach.
      at_most: whether it is to be smaller than the limit.
      form: how it and the limit are printed.
    """

    what: str
    measure: Callable[[Value], float]
    limit: float
    at_most: bool
    form: str

    def row(self, *values: Value) -> list[str]:
        """Its line: what each of the `values` makes of it, and whether it is reached."""
        asked = ("≤ " if self.at_most else "≥ ") + self.form.format(self.limit)
        return [self.what, asked, *(cell for value in values for cell in self._cells(value))]

    def _cells(self, value: Value) -> tuple[str, str]:
        try:
            found = self.measure(value)
        except KeyError:
            return "not measured", ""
        met = found <= self.limit if self.at_most else found >= self.limit
        return self.form.format(found), "yes" if met else "**no**"


def _of(case: str, impl: str, metric: str) -> Callable[[Value], float]:
    return lambda value: value(case, impl, metric)


def _times(case: str, slower: str, faster: str, metric: str = "device_ms") -> Any:
    return lambda value: value(case, slower, metric) / value(case, faster, metric)


def _times_of(case: str, other: str, impl: str) -> Callable[[Value], float]:
    return lambda value: value(case, impl, "device_ms") / value(other, impl, "device_ms")


def _temp(impl: str, unit: float) -> Callable[[Value], float]:
    return lambda value: value(f"{LLAMA}/adamw", impl, "temp_bytes") / unit


def _peak(value: Value) -> float:
    case = f"{LLAMA}/adamw"
    return value(case, OURS, "peak_bytes") / value(case, OURS, "peak_bytes", "live_bytes") - 1


def _largest(leaf_set: str) -> int:
    return max(math.prod(leaf.shape) for leaf in jax.tree.leaves(cases.LEAF_SETS[leaf_set]()))


def targets() -> list[Target]:
    """All of them."""
    llama, gpt2 = f"{LLAMA}/adamw", f"{GPT2}/adamw"
    ms, share, times, percent = "{:.2f} ms", "{:.1%}", "{:.2f} x", "{:.2%}"
    step_ms, bound = "device_ms", "bound_share"
    return [
        Target("Llama-3.2-1B, AdamW, a step", _of(llama, OURS, step_ms), 5.8, True, ms),
        Target("the same, of its byte bound", _of(llama, OURS, bound), 0.90, False, share),
        Target("times faster than flashoptim", _times(llama, FLASHOPTIM, OURS), 1.9, False, times),
        Target("times faster than optax in f32", _times(llama, OPTAX, OURS), 2.0, False, times),
        Target("GPT-2 124M, AdamW, a step", _of(gpt2, OURS, step_ms), 0.95, True, ms),
        Target("one leaf of 16384 x 16384, of the bound", _of(f"{ONE}/adamw", OURS, bound), 0.95,
               False, share),
        Target("Llama-3.2-1B, Lion, of the bound", _of(f"{LLAMA}/lion", OURS, bound), 0.90, False,
               share),
        Target("Llama-3.2-1B, SGD, of the bound", _of(f"{LLAMA}/sgd", OURS, bound), 0.90, False,
               share),
        Target("Llama-3.2-1B, AdamW, `update` and `apply_updates`", _of(llama, UPDATE, step_ms),
               8.5, True, ms),
        Target("its temporaries, bytes per parameter of the largest leaf",
               _temp(UPDATE, _largest(LLAMA)), 4.0, True, "{:.2f}"),
        Target("temporaries of the step, MB", _temp(OURS, 1e6), 1.0, True, "{:.2f}"),
        Target("peak over weights, state and gradients", _peak, 0.01, True, percent),
        Target("compile time, times optax's", _times(llama, OURS, OPTAX, "compile_s"), 2.0, True,
               times),
        Target("Llama-3.2-1B, coat_adamw, of the bound", _of(f"{LLAMA}/coat_adamw", OURS, bound),
               0.80, False, share),
        *(row for name in ("q_adam_mini", "flash_adam_mini") for row in _mini(name)),
    ]  # fmt: skip


def _mini(name: str) -> Iterator[Target]:
    """Adam-mini's; the gradient counts twice where a block spans rows."""
    case, llama, times = f"{LLAMA}/{name}", f"{LLAMA}/adamw", "{:.2f} x"
    yield Target(
        f"Llama-3.2-1B, {name}, of the bound", _of(case, OURS, "bound_share"), 0.85, False, "{:.1%}"
    )
    yield Target(
        "its time, times flash_adamw's", _times_of(case, llama, OURS), 1.0, True, "{:.3f} x"
    )
    yield Target(
        "stochastic rounding, times nearest (Q-Adam-mini's Table 5: 1.88 x)",
        _times(case, "lowmem.step-stochastic", "lowmem.step-nearest"), 1.1, True, times,
    )  # fmt: skip


def table(rows: Rows) -> str:
    """Asked, found, reached; of the H100 measured last."""
    steps = [r for r in rows if r["bench"] == "step" and r["device"].startswith(DEVICE)]
    found = newest([r for r in steps if r["jax"] == steps[-1]["jax"]])
    known = {(r["case"], r["impl"], r["metric"]): r for r in found}

    def value(case: str, impl: str, metric: str, field: str = "value") -> float:
        return known[case, impl, metric][field]

    def with_triton(case: str, impl: str, metric: str, field: str = "value") -> float:
        if impl == UPDATE or "mini" in case or "coat" in case or impl.startswith(f"{OURS}-"):
            raise KeyError(impl)
        return value(case, TRITON if impl == OURS else impl, metric, field)

    head = ["AdamW with default storage, on an H100", "asked", "Pallas", "reached"]
    head += ["jax-triton", "reached"]
    body = [target.row(value, with_triton) for target in targets()]
    return markdown(head, body) + (source(found) if found else "")


TABLES = {"gpu_targets": table}
