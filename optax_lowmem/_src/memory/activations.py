"""Bytes that are kept between a function and its gradient: by operation; without running it."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from optax_lowmem._src.memory import residuals

_MIB = 2.0**20


@dataclasses.dataclass(frozen=True)
class Saved:
    """An array that the backward pass needs.

    Attributes:
      operation: what made it: the scopes of `jax.named_scope`, else the module or function.
      what: the primitive, or `argument`.
      shape: of the array.
      dtype: of it.
      bytes: that it takes.
      weights: whether it depends on weights alone, or is one.
    """

    operation: str
    what: str
    shape: tuple[int, ...]
    dtype: Any
    bytes: int
    weights: bool


@dataclasses.dataclass(frozen=True)
class ActivationReport:
    """Arrays that a function keeps for its gradient; print it for a table.

    Attributes:
      saved: every array, once.
      unit: bytes of 1 U in the table, or None.
    """

    saved: tuple[Saved, ...]
    unit: float | None = None

    @property
    def activations(self) -> tuple[Saved, ...]:
        """Those that are not weights, nor made of weights alone."""
        return tuple(one for one in self.saved if not one.weights)

    @property
    def total_bytes(self) -> int:
        """Bytes of activations."""
        return sum(one.bytes for one in self.activations)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights, which are in memory anyway."""
        return sum(one.bytes for one in self._weights if one.what == residuals.ARGUMENT)

    @property
    def of_weights_bytes(self) -> int:
        """Bytes of what is made of weights alone, and kept beside them: casts, copies, maxima."""
        return sum(one.bytes for one in self._weights) - self.weight_bytes

    @property
    def _weights(self) -> tuple[Saved, ...]:
        return tuple(one for one in self.saved if one.weights)

    @property
    def by_operation(self) -> dict[str, int]:
        """Bytes of activations that each operation makes, in order."""
        found: dict[str, int] = {}
        for one in self.activations:
            found[one.operation] = found.get(one.operation, 0) + one.bytes
        return found

    def __str__(self) -> str:
        """A table by operation, then by its arrays."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        units = f"{'U':>9}" if self.unit else ""
        yield f"{'':<44}{'MiB':>12}{units}"
        for operation, size in self.by_operation.items():
            yield f"{operation[:44]:<44}{self._cells(size)}"
            for one in self.activations:
                if one.operation == operation and one.bytes >= self.total_bytes / 1000:
                    label = f"  {one.what} {one.dtype}{list(one.shape)}"
                    yield f"{label[:44]:<44}{self._cells(one.bytes)}"
        yield f"{'total':<44}{self._cells(self.total_bytes)}"
        for words, size in (
            ("beside weights", self.weight_bytes),
            ("and what is made of weights", self.of_weights_bytes),
        ):
            if size:
                yield f"{words:<44}{self._cells(size)}"

    def _cells(self, size: float) -> str:
        return f"{size / _MIB:>12.3f}" + (f"{size / self.unit:>9.3f}" if self.unit else "")


def activation_report(
    fn: Callable[..., Any],
    *args: Any,
    weights: int | Sequence[int] = (),
    unit: float | None = None,
) -> ActivationReport:
    """Bytes that are kept for the backward pass of any JAX function, by operation.

    Args:
      fn: of arrays and trees of them; what `jax.vjp` takes.
      *args: its arguments, or their `jax.ShapeDtypeStruct`s: nothing is computed or allocated.
      weights: positions of the arguments that are in memory anyway. They, and what is made of them
        alone, are counted apart.
      unit: bytes of the table's unit, such as COAT's U = batch * sequence * hidden * 2.

    Returns:
      An `ActivationReport`.

    Counted is what `jax.vjp` keeps, each array once. A cast, a broadcast or another view of a
    smaller array counts as that array, as XLA makes it anew where it is used; but what a loop
    (`lax.scan`) keeps of each step is stored as it is. XLA may keep less still, or compute more
    anew. Memory of the gradients, and of work inside an operation, is not counted.

    Example:
      >>> import jax, jax.numpy as jnp, optax_lowmem as lowmem
      >>> x = jax.ShapeDtypeStruct((128, 256), jnp.bfloat16)
      >>> w = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
      >>> report = lowmem.memory.activation_report(lambda x, w: jnp.exp(x @ w), x, w, weights=1)
      >>> report.total_bytes == 2 * 128 * (256 + 512)
      True
    """
    numbers = (weights,) if isinstance(weights, int) else tuple(weights)
    wrong = [number for number in numbers if not 0 <= number < len(args)]
    if wrong:
        raise ValueError(f"weights={wrong} of a function that is given {len(args)} arguments")
    traced = jax.make_jaxpr(lambda *args: jax.vjp(fn, *args)[1])(*args)
    counts = [len(jax.tree.leaves(arg)) for arg in args]
    is_weight = [n in numbers for n, count in enumerate(counts) for _ in range(count)]
    names = [jax.tree_util.keystr(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(args)]
    found = []
    for one in residuals.find(traced, is_weight, names):
        dtype, shape = one.aval.dtype, tuple(one.aval.shape)
        size = math.prod(shape) * dtype.itemsize
        found.append(Saved(one.operation, one.what, shape, dtype, size, one.weights))
    return ActivationReport(tuple(found), unit)
