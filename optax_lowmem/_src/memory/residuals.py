"""Arrays that a traced backward function holds, with the operation that made each."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

# made anew by XLA where they are used: views, and numbers written wider
_VIEWS = {
    "broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "iota", "reduce_precision",
    "reshape", "rev", "squeeze", "transpose",
}  # fmt: skip
ARGUMENT = "argument"
_LIBRARIES = ("site-packages", "dist-packages", "optax_lowmem")


class Residual(NamedTuple):
    """An array that is kept.

    Attributes:
      operation: what made it.
      what: the primitive, or `argument`.
      aval: its shape and dtype.
      weights: whether it depends on weights alone.
    """

    operation: str
    what: str
    aval: Any
    weights: bool


class _Frame:
    """A jaxpr, and the call that runs it."""

    def __init__(self, jaxpr: Any, active: Sequence[bool], parent: Any = None, eqn: Any = None):
        self.jaxpr, self.parent, self.eqn = jaxpr, parent, eqn
        self.makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.active = _flow(jaxpr, active)
        self.inner: dict[int, _Frame] = {}

    def depends(self, atom: Any) -> bool:
        """Return whether a variable depends on more than weights."""
        return not _literal(atom) and self.active.get(atom, False)

    def call(self, eqn: Any) -> "_Frame | None":
        """The jaxpr that an equation runs once, of its operands."""
        if eqn.primitive.name in ("scan", "while", "cond"):
            return None
        if id(eqn) not in self.inner and (jaxpr := _called(eqn)) is not None:
            active = [self.depends(atom) for atom in eqn.invars]
            self.inner[id(eqn)] = _Frame(jaxpr, active, self, eqn)
        return self.inner.get(id(eqn))


def _literal(atom: Any) -> bool:
    return not hasattr(atom, "count") and hasattr(atom, "val")


def _called(eqn: Any) -> Any:
    """The jaxpr of a call or a scan, whose variables are those of the equation."""
    for name in ("jaxpr", "call_jaxpr"):
        if (jaxpr := eqn.params.get(name)) is not None:
            jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
            sizes = (len(jaxpr.invars), len(jaxpr.outvars))
            return jaxpr if sizes == (len(eqn.invars), len(eqn.outvars)) else None
    return None


def _flow(jaxpr: Any, active: Sequence[bool]) -> dict[Any, bool]:
    """Return for each variable whether it depends on the active inputs."""
    found = dict(zip(jaxpr.invars, active, strict=True))
    for eqn in jaxpr.eqns:
        given = [not _literal(atom) and found.get(atom, False) for atom in eqn.invars]
        inner = _called(eqn)
        if inner is None:
            results = [any(given)] * len(eqn.outvars)
        elif eqn.primitive.name == "scan":
            results = _flow_of_scan(eqn, inner, given)
        else:
            results = _results(inner, given)
        found |= dict(zip(eqn.outvars, results, strict=True))
    return found


def _results(jaxpr: Any, given: Sequence[bool]) -> list[bool]:
    found = _flow(jaxpr, given)
    return [not _literal(atom) and found.get(atom, False) for atom in jaxpr.outvars]


def _flow_of_scan(eqn: Any, inner: Any, given: list[bool]) -> list[bool]:
    """Until nothing more is carried on. What is stacked has an axis that the carry has not."""
    carries = _as_inside(eqn.outvars, inner.outvars)
    first = _as_inside(eqn.invars, inner.invars) - carries
    while True:
        results = _results(inner, given)
        carry = slice(first, first + carries)
        carried = [a or b for a, b in zip(given[carry], results[:carries], strict=True)]
        if carried == given[carry]:
            return results
        given[carry] = carried


def _as_inside(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(a.aval.ndim == b.aval.ndim for a, b in zip(outside, inside, strict=True))


# ---- what made an array --------------------------------------------------------------------------


def find(traced: Any, is_weight: Sequence[bool], names: Sequence[str]) -> Iterator[Residual]:
    """The arrays that the results of a jaxpr take, each once, without views of others.

    Args:
      traced: a closed jaxpr whose results are kept.
      is_weight: of each of its arguments.
      names: of each of its arguments.
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
                yield Residual(f"argument {arguments[var]}", ARGUMENT, var.aval, weights)
            else:
                yield Residual("constant", "constant", var.aval, weights)
        else:
            yield Residual(*_label(frame, var), var.aval, weights)


def _origin(frame: _Frame, atom: Any) -> tuple[_Frame, Any] | None:
    """The array of which another is a view; None for a number."""
    while not _literal(atom):
        eqn = frame.makers.get(atom)
        if eqn is None:
            if frame.parent is None or atom not in frame.jaxpr.invars:
                return frame, atom
            position = frame.jaxpr.invars.index(atom)
            frame, atom = frame.parent, frame.eqn.invars[position]
        elif (inner := frame.call(eqn)) is not None:
            frame, atom = inner, inner.jaxpr.outvars[eqn.outvars.index(atom)]
        elif eqn.primitive.name in _VIEWS and all(
            _literal(given) or _bytes(given) <= _bytes(atom) for given in eqn.invars
        ):
            if not eqn.invars:
                return None
            atom = eqn.invars[0]
        else:
            return frame, atom
    return None


def _bytes(var: Any) -> int:
    return var.aval.size * var.aval.dtype.itemsize


def _label(frame: _Frame, var: Any) -> tuple[str, str]:
    """(operation, primitive) that made an array: inside the step of a loop, if it is one."""
    made = [frame.makers[var]]  # from the inside out
    while (inner := _called(made[0])) is not None:
        var = inner.outvars[made[0].outvars.index(var)]
        makers = [eqn for eqn in inner.eqns if not _literal(var) and var in eqn.outvars]
        if not makers:
            break
        made.insert(0, makers[0])
    what = made[0].primitive.name
    while frame.eqn is not None:
        made.append(frame.eqn)
        frame = frame.parent
    return _operation(made) or what, what


def _operation(made: Sequence[Any]) -> str:
    """Scopes without the names of transformations, or the user's module or function."""
    stacks = "/".join(str(eqn.source_info.name_stack) for eqn in reversed(made))
    scopes = [part for part in re.sub(r"\w+\(|\)", "", stacks).split("/") if part]
    if scopes:
        return "/".join(scopes)
    for eqn in made:
        traceback = eqn.source_info.traceback
        names = [
            frame.function_name
            for frame in (traceback.frames if traceback is not None else ())
            if not any(part in frame.file_name for part in _LIBRARIES)
        ]
        modules = [name.removesuffix(".__call__") for name in names if name.endswith(".__call__")]
        if names:
            return (modules or names)[0]
    return ""
