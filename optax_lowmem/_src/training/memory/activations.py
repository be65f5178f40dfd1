"""Report the bytes that a function saves for its backward pass, without running it."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from optax_lowmem._src.arrays import trees
from optax_lowmem._src.arrays.jaxprs import scan_counts

Atom = Var | Literal

_MIB = 2.0**20


@dataclasses.dataclass(frozen=True)
class Saved:
    """An array that is saved for the backward pass.

    Attributes:
      operation: what computes it: its `jax.named_scope`s, else the module or function.
      what: the primitive, `argument` or `constant`.
      shape: shape of the array.
      dtype: dtype of the array.
      bytes: size of the array in bytes.
      weights: whether it is a weight or computed from weights alone.
    """

    operation: str
    what: str
    shape: tuple[int, ...]
    dtype: Any
    bytes: int
    weights: bool


@dataclasses.dataclass(frozen=True)
class ActivationReport:
    """Arrays that a function saves for its backward pass; print it for a table.

    Attributes:
      saved: every saved array, once.
      unit: bytes of 1 U in the table, or None.
    """

    saved: tuple[Saved, ...]
    unit: float | None = None

    @property
    def activations(self) -> tuple[Saved, ...]:
        """Return the arrays that are neither weights nor computed from weights alone."""
        return tuple(one for one in self.saved if not one.weights)

    @property
    def total_bytes(self) -> int:
        """Return the bytes of activations."""
        return sum(one.bytes for one in self.activations)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of weights, which are in memory in any case."""
        return sum(one.bytes for one in self._weights if one.what == _ARGUMENT)

    @property
    def of_weights_bytes(self) -> int:
        """Return the bytes of arrays computed from weights alone: casts, copies, maxima."""
        return sum(one.bytes for one in self._weights) - self.weight_bytes

    @property
    def _weights(self) -> tuple[Saved, ...]:
        return tuple(one for one in self.saved if one.weights)

    @property
    def by_operation(self) -> dict[str, int]:
        """Return the bytes of activations by operation, in order."""
        results: dict[str, int] = {}
        for one in self.activations:
            results[one.operation] = results.get(one.operation, 0) + one.bytes
        return results

    def __str__(self) -> str:
        """Return a table by operation and array."""
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
    *args: object,
    weights: int | Sequence[int] = (),
    unit: float | None = None,
) -> ActivationReport:
    """Report the bytes that any JAX function saves for its backward pass, by operation.

    Args:
      fn: a function of trees of arrays, as for `jax.vjp`.
      *args: its arguments, or their `jax.ShapeDtypeStruct`s: nothing is computed or allocated.
      weights: positions of the arguments that are in memory in any case. They, and arrays computed
        from them alone, are counted separately.
      unit: bytes of the table's unit, such as COAT's U = batch * sequence * hidden * 2.

    Returns:
      An `ActivationReport`.

    The report counts what `jax.vjp` keeps, each array once. A cast, a broadcast or another view of
    a smaller array counts as that array, since XLA recomputes it where it is used; but what a loop
    (`lax.scan`) keeps of each step is counted as it is. XLA may keep less, or recompute more.
    Gradients, and temporary memory inside an operation, are not counted.

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
        raise ValueError(f"weights={wrong} must be positions of the {len(args)} arguments")
    traced = jax.make_jaxpr(lambda *args: jax.vjp(fn, *args)[1])(*args)
    counts = [len(jax.tree.leaves(arg)) for arg in args]
    is_weight = [n in numbers for n, count in enumerate(counts) for _ in range(count)]
    names = [jax.tree_util.keystr(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(args)]
    return ActivationReport(tuple(_saved_arrays(traced, is_weight, names)), unit)


# ---- arrays that a traced backward function needs ------------------------------------------------

# recomputed by XLA where they are used: views, and casts to wider dtypes
_VIEWS = {
    "broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "iota", "reduce_precision",
    "reshape", "rev", "squeeze", "transpose",
}  # fmt: skip
_ARGUMENT = "argument"
_LIBRARIES = ("site-packages", "dist-packages", "optax_lowmem")


class _Frame:
    """A jaxpr with the equation that calls it, and that equation's frame (`parent`)."""

    def __init__(
        self,
        jaxpr: Jaxpr,
        active: Sequence[bool],
        parent: "_Frame | None" = None,
        eqn: JaxprEqn | None = None,
    ):
        self.jaxpr, self.parent, self.eqn = jaxpr, parent, eqn
        self.makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.active = _depends_on(jaxpr, active)
        self.inner: dict[int, _Frame] = {}

    def depends(self, atom: Atom) -> bool:
        """Return whether a variable depends on more than weights."""
        return isinstance(atom, Var) and self.active.get(atom, False)

    def call(self, eqn: JaxprEqn) -> "_Frame | None":
        """Return the frame of the jaxpr that an equation calls once on its operands, or None."""
        if eqn.primitive.name in ("scan", "while", "cond"):
            return None
        if id(eqn) not in self.inner and (jaxpr := _called(eqn)) is not None:
            active = [self.depends(atom) for atom in eqn.invars]
            self.inner[id(eqn)] = _Frame(jaxpr, active, self, eqn)
        return self.inner.get(id(eqn))


def _called(eqn: JaxprEqn) -> Jaxpr | None:
    """Return the jaxpr of an equation with matching inputs and outputs (calls, scans), or None."""
    for name in ("jaxpr", "call_jaxpr"):
        if (jaxpr := eqn.params.get(name)) is not None:
            jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
            sizes = (len(jaxpr.invars), len(jaxpr.outvars))
            return jaxpr if sizes == (len(eqn.invars), len(eqn.outvars)) else None
    return None


def _depends_on(jaxpr: Jaxpr, active: Sequence[bool]) -> dict[Var, bool]:
    """Return for each variable whether it depends on the active inputs."""
    result = dict(zip(jaxpr.invars, active, strict=True))
    for eqn in jaxpr.eqns:
        given = [isinstance(atom, Var) and result.get(atom, False) for atom in eqn.invars]
        inner = _called(eqn)
        if inner is None:
            results = [any(given)] * len(eqn.outvars)
        elif eqn.primitive.name == "scan":
            results = _dependent_scan_results(eqn, inner, given)
        else:
            results = _dependent_results(inner, given)
        result |= dict(zip(eqn.outvars, results, strict=True))
    return result


def _dependent_results(jaxpr: Jaxpr, given: Sequence[bool]) -> list[bool]:
    result = _depends_on(jaxpr, given)
    return [isinstance(atom, Var) and result.get(atom, False) for atom in jaxpr.outvars]


def _dependent_scan_results(eqn: JaxprEqn, inner: Jaxpr, given: list[bool]) -> list[bool]:
    """Return which results of a scan depend on active operands, once the carry is stable."""
    first, carries = scan_counts(eqn, inner)
    while True:
        results = _dependent_results(inner, given)
        carry = slice(first, first + carries)
        carried = [a or b for a, b in zip(given[carry], results[:carries], strict=True)]
        if carried == given[carry]:
            return results
        given[carry] = carried


# ---- what made an array --------------------------------------------------------------------------


def _saved_arrays(
    traced: ClosedJaxpr, is_weight: Sequence[bool], names: Sequence[str]
) -> Iterator[Saved]:
    """Yield the arrays that are the results of a jaxpr, or of which these are views, each once.

    `is_weight` and `names` are of the arguments of the jaxpr.
    """
    top = _Frame(traced.jaxpr, [not weight for weight in is_weight])
    arguments = dict(zip(traced.jaxpr.invars, names, strict=True))
    seen = set()
    for atom in traced.jaxpr.outvars:
        place = _origin(top, atom)
        if place is None or (id(place[0]), place[1]) in seen:
            continue
        frame, var = place
        seen.add((id(frame), var))
        weights = not frame.depends(var)
        eqn = frame.makers.get(var)
        if eqn is None:
            if var in arguments:
                yield _make_saved(var, f"argument {arguments[var]}", _ARGUMENT, weights)
            else:
                yield _make_saved(var, "constant", "constant", weights)
        else:
            yield _make_saved(var, *_label(frame, var), weights)


def _make_saved(var: Var, operation: str, what: str, weights: bool) -> Saved:
    aval: Any = var.aval  # JAX's type includes tokens, which have neither shape nor dtype
    return Saved(operation, what, tuple(aval.shape), aval.dtype, trees.nbytes(aval), weights)


def _origin(frame: _Frame, atom: Atom) -> tuple[_Frame, Var] | None:
    """Return the array (with its frame) of which an atom is a view; None for a number."""
    while isinstance(atom, Var):
        eqn = frame.makers.get(atom)
        if eqn is None:
            if frame.parent is None or frame.eqn is None or atom not in frame.jaxpr.invars:
                return frame, atom
            given = frame.eqn.invars[frame.jaxpr.invars.index(atom)]
            frame, atom = frame.parent, given
        elif (inner := frame.call(eqn)) is not None:
            frame, atom = inner, inner.jaxpr.outvars[eqn.outvars.index(atom)]
        elif eqn.primitive.name in _VIEWS and all(
            isinstance(given, Literal) or trees.nbytes(given.aval) <= trees.nbytes(atom.aval)
            for given in eqn.invars
        ):
            if not eqn.invars:
                return None
            atom = eqn.invars[0]
        else:
            return frame, atom
    return None


def _label(frame: _Frame, var: Var) -> tuple[str, str]:
    """Return the (operation, primitive) that computes an array, inside a loop's step if it can."""
    made = [frame.makers[var]]  # innermost first
    while (inner := _called(made[0])) is not None:
        out = inner.outvars[made[0].outvars.index(var)]
        makers = [eqn for eqn in inner.eqns if isinstance(out, Var) and out in eqn.outvars]
        if not makers or not isinstance(out, Var):
            break
        made.insert(0, makers[0])
        var = out
    what = made[0].primitive.name
    around: _Frame | None = frame
    while around is not None and around.eqn is not None:
        made.append(around.eqn)
        around = around.parent
    return _operation(made) or what, what


def _operation(made: Sequence[JaxprEqn]) -> str:
    """Return the scopes without names of transformations, or the user's module or function."""
    stacks = "/".join(str(eqn.source_info.name_stack) for eqn in reversed(made))
    scopes = [part for part in re.sub(r"\w+\(|\)", "", stacks).split("/") if part]
    if scopes:
        return "/".join(scopes)
    for eqn in made:
        traceback = eqn.source_info.traceback
        frames: Sequence[Any] = traceback.frames if traceback is not None else ()
        names: list[str] = [
            frame.function_name
            for frame in frames
            if not any(part in frame.file_name for part in _LIBRARIES)
        ]
        modules = [name.removesuffix(".__call__") for name in names if name.endswith(".__call__")]
        if names:
            return (modules or names)[0]
    return ""
