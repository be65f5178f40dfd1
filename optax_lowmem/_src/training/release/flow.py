"""The values of a traced loss, by what they depend on.

Values of the jaxpr are of three kinds. Those that depend on no parameter (masks, rotary tables,
dropout keys) have no gradient; they are computed once, before the first stage, or in the stage that
alone reads them. Those that depend on parameters alone (casts, LoRA products) are computed in every
stage that reads them. All others are computed in one stage, and passed on in x to the stages that
read them later.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from optax_lowmem._src.arrays import trees
from optax_lowmem._src.arrays.jaxprs import scan_counts

Atom = Var | Literal
Compute = Callable[[dict[Var, Any]], list[Any]]
# operations on a stack that are the same operation on each of its layers
_CASTS = ("convert_element_type", "copy", "copy_p", "optimization_barrier", "reduce_precision")
_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2")


@dataclasses.dataclass(frozen=True)
class Graph:
    """A jaxpr whose constants are inputs: the first of `inputs`, which are all of its variables."""

    jaxpr: Jaxpr
    consts: list[Any]
    inputs: list[Var]

    @classmethod
    def of(cls, closed: Any) -> "Graph":
        """Return the graph of an open or closed jaxpr."""
        jaxpr = getattr(closed, "jaxpr", closed)
        consts = list(getattr(closed, "consts", ()))
        return cls(jaxpr, consts, [*jaxpr.constvars, *jaxpr.invars])

    def evaluate(
        self, eqns: Sequence[JaxprEqn], outputs: Sequence[Atom], env: Mapping[Var, Any]
    ) -> list[Any]:
        """Evaluate equations, in order, with values of the variables that they read."""
        made = {v for eqn in eqns for v in eqn.outvars}
        read = [*(v for eqn in eqns for v in eqn.invars), *outputs]
        inputs = [v for v in variables(read) if v not in made]
        some = self.jaxpr.replace(
            constvars=[], invars=inputs, outvars=list(outputs), eqns=list(eqns)
        )
        return list(jax.core.eval_jaxpr(some, (), *(env[v] for v in inputs)))

    def __call__(self, *args: Any) -> list[Any]:
        env = dict(zip(self.inputs, [*self.consts, *args], strict=True))
        return self.evaluate(self.jaxpr.eqns, self.jaxpr.outvars, env)

    def inlined(self, calls: Sequence[JaxprEqn], args: Sequence[Any]) -> "Graph":
        """Return the graph with the bodies of some calls in place of these."""

        def run(*values: Any) -> list[Any]:
            env: dict[Any, Any] = dict(zip(self.inputs, values, strict=True))
            for eqn in self.jaxpr.eqns:
                if any(eqn is call for call in calls):
                    results = body_of(eqn)(*(_value(env, v) for v in eqn.invars))
                else:
                    results = self.evaluate([eqn], eqn.outvars, env)
                env.update(zip(eqn.outvars, results, strict=True))
            return [_value(env, v) for v in self.jaxpr.outvars]

        new = Graph.of(jax.make_jaxpr(run)(*self.consts, *args))
        return dataclasses.replace(new, consts=[*new.consts, *self.consts])


def _value(env: Mapping[Any, Any], atom: Atom) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """Return the variables among these, each once."""
    return list(dict.fromkeys(v for v in atoms if isinstance(v, Var)))


def body_of(eqn: JaxprEqn) -> Graph:
    return Graph.of(eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"])


def _live(eqns: Sequence[JaxprEqn], outputs: Iterable[Atom]) -> list[JaxprEqn]:
    """Return the equations that the outputs depend on, and those with effects."""
    needed, kept = set(variables(outputs)), []
    for eqn in reversed(eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            kept.append(eqn)
            needed.update(variables(eqn.invars))
    return kept[::-1]


# ---- which values depend on which parameters -----------------------------------------------------


class Flow:
    """The live values of a graph, by what they depend on.

    Attributes:
      known: variables that depend on no parameter.
      known_read: those of them that are computed before the first stage and read in stages.
      sources: for each variable that depends on parameters alone, the indices of these.
      maker: the equation of each variable that is computed in every stage that reads it.
      eqns: equations of all other variables, in order. `at` in other places is an index of these.
      stacks: the scans among them whose inputs are stacks of layers, by index.
    """

    def __init__(self, graph: Graph, names: Sequence[str], layer_of: Mapping[int, str]):
        self.graph, self.names, self.layer_of = graph, names, layer_of
        consts, params = len(graph.consts), len(names)
        self.constant = set(graph.inputs[:consts])
        inputs = [*graph.inputs[:consts], *graph.inputs[consts + params :]]
        self.known: dict[Var, None] = dict.fromkeys(inputs)
        self.sources = {v: frozenset({i}) for i, v in enumerate(graph.inputs[consts:][:params])}
        self.parameters = list(self.sources)
        self.maker: dict[Var, JaxprEqn] = {}
        self.eqns: list[JaxprEqn] = []
        self.stacks: dict[int, _Scan] = {}
        self.known_steps: list[tuple[list[Var], Compute, JaxprEqn | None]] = []
        self.known_eqns: list[JaxprEqn] = []
        outputs = graph.jaxpr.outvars
        live = _live(graph.jaxpr.eqns, outputs)
        self.read = set(variables([*(v for eqn in live for v in eqn.invars), *outputs]))
        self.order = {id(eqn): number for number, eqn in enumerate(live)}
        for eqn in live:
            self._add(eqn)

    def _add(self, eqn: JaxprEqn) -> None:
        inputs = variables(eqn.invars)
        if all(v in self.known for v in inputs):
            compute: Compute = lambda env: self.graph.evaluate([eqn], eqn.outvars, env)  # noqa: E731
            self._know(eqn.outvars, compute, eqn)
            self.known_eqns.append(eqn)
            if all(v in self.constant for v in inputs):
                self.constant |= set(eqn.outvars)
        elif scan := _Scan.of(self, eqn):
            self.stacks[len(self.eqns)] = scan
            self.eqns.append(eqn)
            self._know(*scan.known_results(self))
        elif all(v in self.sources or v in self.constant for v in inputs) and not eqn.effects:
            self.sources |= dict.fromkeys(eqn.outvars, self.leaves_of(inputs))
            self.maker |= dict.fromkeys(eqn.outvars, eqn)
        else:
            self.eqns.append(eqn)

    def _know(
        self, variables: Sequence[Var], compute: Compute, eqn: JaxprEqn | None = None
    ) -> None:
        self.known |= dict.fromkeys(variables)
        self.known_steps.append((list(variables), compute, eqn))

    def leaves_of(self, atoms: Iterable[Atom]) -> frozenset[int]:
        """Return the indices of the parameters that some values are computed from alone."""
        return frozenset().union(*(self.sources.get(v, ()) for v in variables(atoms)))

    def calls_to_open(self) -> list[JaxprEqn]:
        """Return the calls that contain several layers, or scans that may be over layers."""
        live = [*self.eqns, *self.maker.values()]
        return [eqn for eqn in live if eqn.primitive.name in _CALLS and self._is_opened(eqn)]

    def _is_opened(self, eqn: JaxprEqn) -> bool:
        leaves = self.leaves_of(eqn.invars)
        layers = {self.layer_of[i] for i in leaves if i in self.layer_of}
        return len(layers) > 1 or (bool(leaves) and _has_scan(eqn))

    def makers(
        self, atoms: Iterable[Atom], more: Mapping[Var, JaxprEqn] | None = None
    ) -> list[JaxprEqn]:
        """Return the equations of `maker`, and of `more`, that values depend on."""
        makers = {**self.maker, **(more or {})}
        wanted, found = variables(atoms), {}
        while wanted:
            eqn = makers.get(wanted.pop())
            if eqn is not None and id(eqn) not in found:
                found[id(eqn)] = eqn
                wanted += variables(eqn.invars)
        return [found[key] for key in sorted(found, key=self.order.__getitem__)]

    def compute_in_stages(self, cuts: Sequence[int]) -> None:
        """Leave what only one stage reads, such as a mask of dropout, to be computed there."""
        known = {v: eqn for eqn in self.known_eqns for v in eqn.outvars}
        readers: dict[int, int] = {}
        ends = [*cuts, len(self.eqns)]
        for begin, end in zip([0, *cuts], ends, strict=True):
            atoms = [v for eqn in self.eqns[begin:end] for v in eqn.invars]
            if end in self.stacks:
                atoms += self.stacks[end].eqn.invars
            if end == len(self.eqns):
                atoms += self.graph.jaxpr.outvars
            for eqn in self.makers(atoms, known):
                readers[id(eqn)] = readers.get(id(eqn), 0) + 1 + (begin in self.stacks)
        printed = [v for eqn in self.known_eqns if eqn.effects for v in eqn.invars]
        readers |= {id(eqn): 2 for eqn in self.makers(printed, known)}  # read before the stages
        alone = [eqn for eqn in self.known_eqns if readers.get(id(eqn)) == 1 and not eqn.effects]
        self.maker |= {v: eqn for eqn in alone for v in eqn.outvars}
        in_stages = {id(eqn) for eqn in alone}
        self.known_steps = [step for step in self.known_steps if id(step[2]) not in in_stages]
        read = [v for eqn in (*self.eqns, *self.maker.values()) for v in eqn.invars]
        read_in_stages = set(variables([*read, *self.graph.jaxpr.outvars]))
        self.known_read = [v for v in self.known if v in read_in_stages and v not in self.maker]

    def known_values(self, args: Sequence[Any]) -> list[Any]:
        """Return the values of `known_read`."""
        env = dict(zip(self.graph.inputs, [*self.graph.consts, *args], strict=True))
        for variables, compute, _ in self.known_steps:
            env.update(zip(variables, compute(env), strict=True))
        return [env[v] for v in self.known_read]


def _has_scan(eqn: JaxprEqn) -> bool:
    return any(
        inner.primitive.name == "scan" or inner.primitive.name in _CALLS and _has_scan(inner)
        for inner in body_of(eqn).jaxpr.eqns
    )


@dataclasses.dataclass(frozen=True)
class _Scan:
    """A scan over layers."""

    eqn: JaxprEqn
    consts: int  # number of its constants
    carried: int  # number of its carried values
    # for each of its other inputs that is a parameter, by position among them, the index of the
    # parameter and the casts before the scan
    stacked: dict[int, tuple[int, list[JaxprEqn]]]

    @classmethod
    def of(cls, flow: Flow, eqn: JaxprEqn) -> "_Scan | None":
        """Return the scan of an equation, or None if it is no scan over parameters.

        Raises for a scan over layers that cannot be released.
        """
        if eqn.primitive.name != "scan":
            return None
        consts, carried = scan_counts(eqn, body_of(eqn).jaxpr)
        given = eqn.invars[consts + carried :]
        read = flow.leaves_of(given)
        if not read or (flow.layer_of and not any(i in flow.layer_of for i in read)):
            return None
        casts = {k: _casts(flow, v) for k, v in enumerate(given) if flow.leaves_of([v])}
        stacked = {k: found for k, found in casts.items() if found is not None}
        if not stacked and not flow.layer_of:
            return None
        for k in casts:
            if k not in stacked:
                of = trees.some_of([flow.names[i] for i in sorted(flow.leaves_of([given[k]]))])
                by = flow.maker[given[k]].primitive.name  # type: ignore[index]
                raise ValueError(
                    f"gradient release needs the layers of '{of}' on axis 0 as they are scanned, "
                    f"but `{by}` changes it before the scan. Store it so that the scan reads it as "
                    "it is (with nn.scan, variable_axes={'params': 0}), or read it in the body by "
                    "the number of the layer."
                )
        if eqn.params["reverse"]:
            raise ValueError(
                f"the scan over '{_some(flow, stacked)}' has reverse=True, and gradient release "
                "needs the layers in order."
            )
        return cls(eqn, consts, carried, stacked)

    @property
    def leaves(self) -> list[int]:
        """Indices of the stacks of layers, each once."""
        return list(dict.fromkeys(leaf for leaf, _ in self.stacked.values()))

    def known_results(self, flow: Flow) -> tuple[list[Var], Compute]:
        """Return the results for every layer that are read, and how to compute them.

        Raises if one depends on a parameter or on a carried value.
        """
        results = list(zip(self.eqn.outvars, body_of(self.eqn).jaxpr.outvars, strict=True))
        read = [(out, inner) for out, inner in results[self.carried :] if out in flow.read]
        body = body_of(self.eqn)
        inside = [inner for _, inner in read]
        eqns = _live(body.jaxpr.eqns, inside) if read else []
        made = {v for eqn in eqns for v in eqn.outvars}
        atoms = variables([*(v for eqn in eqns for v in eqn.invars), *inside])
        of_consts = dict(zip(body.inputs, body.consts, strict=False))
        outside = dict(zip(body.inputs[len(body.consts) :], self.eqn.invars, strict=True))
        needed = [v for v in atoms if v not in made and v not in of_consts]
        first = self.consts + self.carried
        carried = set(body.inputs[len(body.consts) :][self.consts : first])
        for v in needed:
            if v in carried or not isinstance(outside[v], Literal) and outside[v] not in flow.known:
                raise ValueError(
                    f"the scan over '{_some(flow, self.stacked)}' returns a value of every layer "
                    "that depends on the parameters, and the loss or aux reads it. Gradient "
                    "release passes on only the carried values: add it up in the carry (a loss of "
                    "the layers), or do not return it (statistics, intermediates)."
                )
        scanned = set(body.inputs[len(body.consts) :][first:])

        def compute(env: dict[Var, Any]) -> list[Any]:
            values = {v: _value(env, outside[v]) for v in needed}
            fixed = of_consts | {v: x for v, x in values.items() if v not in scanned}
            sliced = [v for v in needed if v in scanned]

            def one(_: None, xs: list[Any]) -> tuple[None, list[Any]]:
                return None, body.evaluate(eqns, inside, fixed | dict(zip(sliced, xs, strict=True)))

            length = self.eqn.params["length"]
            return lax.scan(one, None, [values[v] for v in sliced], length)[1]

        return [out for out, _ in read], compute


def _some(flow: Flow, stacked: Mapping[int, tuple[int, Any]]) -> str:
    return trees.some_of([flow.names[leaf] for leaf, _ in stacked.values()])


def _casts(flow: Flow, atom: Atom) -> tuple[int, list[JaxprEqn]] | None:
    """Return the index of a parameter and the casts that make a value of it, or None."""
    casts: list[JaxprEqn] = []
    while atom in flow.maker:
        eqn = flow.maker[atom]
        (source, *others), before = eqn.invars, atom
        shape: Any = getattr(source.aval, "shape", None)
        if eqn.primitive.name not in _CASTS or others or shape != getattr(before.aval, "shape", ()):
            return None
        casts, atom = [eqn, *casts], source
    (leaf,) = flow.leaves_of([atom])
    return leaf, casts
