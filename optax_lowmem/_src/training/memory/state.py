"""Report the bytes of weights and optimizer state by slot and leaf, without allocating them."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.arrays import trees
from optax_lowmem._src.optim import context
from optax_lowmem._src.training.checkpoint.optax_conversion import counterpart, counterpart_name

UNITS = {"GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10}


@dataclasses.dataclass(frozen=True)
class Report:
    """Bytes of the parameters and of the state of an optimizer.

    Attributes:
      parameters: number of parameters.
      params_bytes: bytes of the weights.
      by_slot: bytes of each state field.
      by_leaf: path -> {"params" or state field: bytes}.
      reasons: path -> {slot: the reason why it is not compressed}.
      baseline: the report of the optimizer to compare with, on f32 weights.
      counterpart: the name of that optimizer, if none was given: the optax optimizer of which this
        is the low-memory form.
      no_counterpart: whether there is low-memory state, but no optimizer to compare with was found.
    """

    parameters: int
    params_bytes: int
    by_slot: dict[str, int]
    by_leaf: dict[str, dict[str, int]]
    reasons: dict[str, dict[str, str]]
    baseline: "Report | None" = None
    counterpart: str | None = None
    no_counterpart: bool = False

    @property
    def state_bytes(self) -> int:
        """Return the bytes of the optimizer state."""
        return sum(self.by_slot.values())

    @property
    def total_bytes(self) -> int:
        """Return the bytes of weights and state."""
        return self.params_bytes + self.state_bytes

    @property
    def bytes_per_param(self) -> float:
        """Return the bytes of weights and state per parameter."""
        return self.total_bytes / max(self.parameters, 1)

    def __str__(self) -> str:
        """Return a table by slot, the comparison, and the uncompressed leaves with reasons."""
        return "\n".join([*self._table(), *self._comparison_line(), *self._uncompressed_lines()])

    def _table(self) -> Iterator[str]:
        plain = self.baseline if self.counterpart is None else None
        unit = self._unit()
        head = f"{'':<16}{unit:>10}{'bytes/param':>13}"
        yield head + (f"{f'baseline {unit}':>14}{'bytes/param':>13}" if plain else "")
        rows = ["params", *dict.fromkeys([*self.by_slot, *(plain.by_slot if plain else ())])]
        for name in [*rows, "total"]:
            line = f"{name:<16}" + self._cells(name, unit)
            yield line + (f"{'':>1}" + plain._cells(name, unit, 13) if plain else "")

    def _cells(self, name: str, unit: str, width: int = 10) -> str:
        named = {"params": self.params_bytes, "total": self.total_bytes, **self.by_slot}
        size = named.get(name, 0)
        return f"{size / UNITS[unit]:>{width}.3f}{size / max(self.parameters, 1):>13.4f}"

    def _unit(self) -> str:
        return unit_of(max(self.total_bytes, self.baseline.total_bytes if self.baseline else 0))

    def _comparison_line(self) -> Iterator[str]:
        if self.no_counterpart:
            yield (
                "not compared: no optax optimizer is known to correspond to this one; pass "
                "baseline=, or use lowmem.chain in place of optax.chain"
            )
        if self.baseline is None or self.counterpart is None:
            return
        unit = self._unit()
        ours, plain = (r.total_bytes / UNITS[unit] for r in (self, self.baseline))
        yield f"{ours:.3f} {unit}; {self.counterpart} on f32 weights: {plain:.3f} {unit}"

    def _uncompressed_lines(self) -> Iterator[str]:
        kept: dict[str, list[str]] = defaultdict(list)
        for path, slots in self.reasons.items():
            for slot, reason in slots.items():
                kept[f"{slot}: {reason}"].append(path)
        if kept:
            yield "not compressed:"
        for reason, paths in kept.items():
            yield f"  {trees.some_of(paths)}: {reason}"


def unit_of(largest: float) -> str:
    """Return the unit of a table whose largest size is `largest` bytes."""
    return next((name for name, size in UNITS.items() if largest >= size / 10), "KiB")


def report(
    tx: optax.GradientTransformation,
    params: optax.Params,
    *,
    baseline: optax.GradientTransformation | None = None,
) -> Report:
    """Report the bytes of `params` and of the state of `tx`.

    Args:
      tx: any optax transformation.
      params: the weights as stored, or their `jax.eval_shape`; nothing is allocated.
      baseline: an optimizer to compare with, on the same parameters in f32; by default the optax
        optimizer of which `tx` is the low-memory form, if there is one.

    Returns:
      A `Report`; print it for a table.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_lowmem as lowmem
      >>> params = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)}
      >>> report = lowmem.memory.report(lowmem.flash_adamw(1e-3), params)
      >>> round(report.bytes_per_param, 4)
      5.1875
    """
    name, result = None, _report(tx, params)
    if baseline is None:
        try:
            other = counterpart(tx, params)
        except ValueError:  # inside an optax wrapper, or without a counterpart in optax
            return dataclasses.replace(result, no_counterpart=True)
        if other is tx:
            return result
        name, baseline = counterpart_name(tx), other
    plain = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)
    return dataclasses.replace(result, baseline=_report(baseline, plain), counterpart=name)


def _report(tx: optax.GradientTransformation, params: Any) -> Report:
    """Return the report without a baseline."""
    state, decisions = context.dry_run(tx, params)
    leaves = dict(trees.named_leaves(params))
    by_leaf = {path: {"params": trees.nbytes(leaf)} for path, leaf in leaves.items()}
    by_slot: dict[str, int] = defaultdict(int)
    for slot, tree in trees.state_fields(state):
        for path, leaf in trees.named_leaves(tree):
            by_slot[slot] += trees.nbytes(leaf)
            if path in by_leaf:
                by_leaf[path][slot] = by_leaf[path].get(slot, 0) + trees.nbytes(leaf)
    reasons: dict[str, dict[str, str]] = defaultdict(dict)
    for decision in decisions:
        if decision.form is None and decision.slot != "step":
            reasons[decision.path][decision.slot] = decision.reason
    return Report(
        parameters=sum(math.prod(leaf.shape) for leaf in leaves.values()),
        params_bytes=trees.nbytes(params),
        by_slot=dict(by_slot),
        by_leaf=by_leaf,
        reasons=dict(reasons),
    )
