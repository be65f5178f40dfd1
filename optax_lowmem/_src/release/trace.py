"""A loss function as a chain of stages: its jaxpr, cut at scans over parameters and at layers.

Values of the jaxpr are of three kinds. Those that depend on no parameter (masks, rotary tables,
dropout keys) have no gradient; they are computed once, before the first stage, or in the stage that
alone reads them. Those that depend on parameters alone (casts, LoRA products) are computed in every
stage that reads them. All others are computed in one stage, and passed on in x to the stages that
read them later.
"""

import dataclasses
import fnmatch
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from optax_lowmem._src.core import trees
from optax_lowmem._src.core.jaxprs import scan_counts
from optax_lowmem._src.release.model import LayerFunction, Parts, Stack, Unchanged

Atom = Var | Literal
Compute = Callable[[dict[Var, Any]], list[Any]]
# operations on a stack that are the same operation on each of its layers
_CASTS = ("convert_element_type", "copy", "copy_p", "optimization_barrier", "reduce_precision")
_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2")


@dataclasses.dataclass(frozen=True)
class Program:
    """What `Layered` is to a step, traced from a loss function for one shape of its arguments.

    Attributes:
      first: (rest, known) -> x.
      layers: by name, stages (weights, rest, x, known) -> x. Those named in the stacks of the parts
        run once per layer; the others run once, with None as weights.
      last: (rest, x, known) -> loss or (loss, aux).
      has_aux: whether `last` returns (loss, aux).
      parts: the parameters, split into stacks (lists of leaves) and the rest (a list of leaves).
    """

    first: Callable[[Any, Any], Any]
    layers: Mapping[str, LayerFunction]
    last: Callable[[Any, Any, Any], Any]
    has_aux: bool
    parts: Parts

    def take_apart(self, params: optax.Params) -> Parts:
        """Return the parts of the parameters that the program was traced with."""
        del params
        return self.parts


def trace(
    loss: Callable[[Any, Any], Any],
    params: optax.Params,
    batch: object,
    layers: str | Sequence[str] = (),
    has_aux: bool = False,
) -> tuple[Program, Any]:
    """Cut a loss function into stages.

    Args:
      loss: (params, batch) -> loss, or (loss, aux).
      params: the parameters.
      batch: passed to `loss`.
      layers: as in `train_step`.
      has_aux: whether `loss` returns (loss, aux).

    Returns:
      The program, and `known`: the values that depend on no parameter, to run it with.
    """
    named = trees.named_leaves(params)
    names, leaves = [name for name, _ in named], [leaf for _, leaf in named]
    layer_of = _layers_of(names, layers)
    # a new function: JAX would return the jaxpr of a function that it has traced before
    traced, shape = jax.make_jaxpr(lambda *args: loss(*args), return_shape=True)(params, batch)
    if has_aux and not (isinstance(shape, tuple) and len(shape) == 2):
        raise TypeError("with has_aux=True the loss function must return (loss, aux)")
    graph, given = _Graph.of(traced), [*leaves, *jax.tree.leaves(batch)]
    while calls := _Flow(graph, names, layer_of).calls_to_open():
        graph = graph.inlined(calls, given)
    flow = _Flow(graph, names, layer_of)
    cuts = _boundaries(flow)
    flow.compute_in_stages(cuts)
    stages = _Stages(flow, cuts, leaves, jax.tree.structure(shape), has_aux)
    return stages.program(), flow.known_values(given)


# ---- jaxprs --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Graph:
    """A jaxpr whose constants are inputs.

    Attributes:
      jaxpr: a jaxpr with its equations.
      consts: values of its constants.
      inputs: its variables for the constants, then for the arguments.
    """

    jaxpr: Jaxpr
    consts: list[Any]
    inputs: list[Var]

    @classmethod
    def of(cls, closed: Any) -> "_Graph":
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
        inputs = [v for v in _variables(read) if v not in made]
        some = self.jaxpr.replace(
            constvars=[], invars=inputs, outvars=list(outputs), eqns=list(eqns)
        )
        return list(jax.core.eval_jaxpr(some, (), *(env[v] for v in inputs)))

    def __call__(self, *args: Any) -> list[Any]:
        env = dict(zip(self.inputs, [*self.consts, *args], strict=True))
        return self.evaluate(self.jaxpr.eqns, self.jaxpr.outvars, env)

    def inlined(self, calls: Sequence[JaxprEqn], args: Sequence[Any]) -> "_Graph":
        """Return the graph with the bodies of some calls in place of these."""

        def run(*values: Any) -> list[Any]:
            env: dict[Any, Any] = dict(zip(self.inputs, values, strict=True))
            for eqn in self.jaxpr.eqns:
                if any(eqn is call for call in calls):
                    results = _body(eqn)(*(_value(env, v) for v in eqn.invars))
                else:
                    results = self.evaluate([eqn], eqn.outvars, env)
                env.update(zip(eqn.outvars, results, strict=True))
            return [_value(env, v) for v in self.jaxpr.outvars]

        new = _Graph.of(jax.make_jaxpr(run)(*self.consts, *args))
        return dataclasses.replace(new, consts=[*new.consts, *self.consts])


def _value(env: Mapping[Any, Any], atom: Atom) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]


def _variables(atoms: Iterable[Atom]) -> list[Var]:
    """Return the variables among these, each once."""
    return list(dict.fromkeys(v for v in atoms if isinstance(v, Var)))


def _body(eqn: JaxprEqn) -> _Graph:
    return _Graph.of(eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"])


def _live(eqns: Sequence[JaxprEqn], outputs: Iterable[Atom]) -> list[JaxprEqn]:
    """Return the equations that the outputs depend on, and those with effects."""
    needed, kept = set(_variables(outputs)), []
    for eqn in reversed(eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            kept.append(eqn)
            needed.update(_variables(eqn.invars))
    return kept[::-1]


# ---- which values depend on which parameters -----------------------------------------------------


def _layers_of(names: Sequence[str], layers: str | Sequence[str]) -> dict[int, str]:
    """Return the path of the layer of each leaf that `layers` names, by index of the leaf."""
    result: dict[int, str] = {}
    for pattern in [layers] if isinstance(layers, str) else layers:
        depth = len(pattern.split("/"))
        found = {}
        for i, name in enumerate(names):
            parts = name.split("/")
            if fnmatch.fnmatchcase("/".join(parts[:depth]), pattern):
                found[i] = parts
        if not found:
            raise ValueError(
                f"layers={pattern!r} is no path in the parameters ({trees.some_of(names, 4)}): "
                "name the list of layers, such as 'layers', or its members by a pattern, 'Block_*'."
            )
        one = len({tuple(parts[:depth]) for parts in found.values()}) == 1
        result |= {i: "/".join(parts[: depth + one]) for i, parts in found.items()}
    return result


class _Flow:
    """The live values of a graph, by what they depend on.

    Attributes:
      known: variables that depend on no parameter.
      known_read: those of them that are computed before the first stage and read in stages.
      sources: for each variable that depends on parameters alone, the indices of these.
      maker: the equation of each variable that is computed in every stage that reads it.
      eqns: equations of all other variables, in order. `at` in other places is an index of these.
      stacks: the scans among them whose inputs are stacks of layers, by index.
    """

    def __init__(self, graph: _Graph, names: Sequence[str], layer_of: Mapping[int, str]):
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
        self.read = set(_variables([*(v for eqn in live for v in eqn.invars), *outputs]))
        self.order = {id(eqn): number for number, eqn in enumerate(live)}
        for eqn in live:
            self._add(eqn)

    def _add(self, eqn: JaxprEqn) -> None:
        inputs = _variables(eqn.invars)
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
        return frozenset().union(*(self.sources.get(v, ()) for v in _variables(atoms)))

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
        wanted, found = _variables(atoms), {}
        while wanted:
            eqn = makers.get(wanted.pop())
            if eqn is not None and id(eqn) not in found:
                found[id(eqn)] = eqn
                wanted += _variables(eqn.invars)
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
        read_in_stages = set(_variables([*read, *self.graph.jaxpr.outvars]))
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
        for inner in _body(eqn).jaxpr.eqns
    )


# ---- scans over layers ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Scan:
    """A scan over layers.

    Attributes:
      eqn: its equation.
      consts: number of its constants.
      carried: number of its carried values.
      stacked: for each of its other inputs that is a parameter, by position among them, the index
        of the parameter and the casts before the scan.
    """

    eqn: JaxprEqn
    consts: int
    carried: int
    stacked: dict[int, tuple[int, list[JaxprEqn]]]

    @classmethod
    def of(cls, flow: _Flow, eqn: JaxprEqn) -> "_Scan | None":
        """Return the scan of an equation, or None if it is no scan over parameters.

        Raises:
          ValueError: for a scan over layers that cannot be released.
        """
        if eqn.primitive.name != "scan":
            return None
        consts, carried = scan_counts(eqn, _body(eqn).jaxpr)
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

    def known_results(self, flow: _Flow) -> tuple[list[Var], Compute]:
        """Return the results for every layer that are read, and how to compute them.

        Raises:
          ValueError: if one depends on a parameter or on a carried value.
        """
        results = list(zip(self.eqn.outvars, _body(self.eqn).jaxpr.outvars, strict=True))
        read = [(out, inner) for out, inner in results[self.carried :] if out in flow.read]
        body = _body(self.eqn)
        inside = [inner for _, inner in read]
        eqns = _live(body.jaxpr.eqns, inside) if read else []
        made = {v for eqn in eqns for v in eqn.outvars}
        atoms = _variables([*(v for eqn in eqns for v in eqn.invars), *inside])
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


def _some(flow: _Flow, stacked: Mapping[int, tuple[int, Any]]) -> str:
    return trees.some_of([flow.names[leaf] for leaf, _ in stacked.values()])


def _casts(flow: _Flow, atom: Atom) -> tuple[int, list[JaxprEqn]] | None:
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


# ---- where to cut --------------------------------------------------------------------------------


def _boundaries(flow: _Flow) -> list[int]:
    """Return the positions in `flow.eqns` before which a stage begins.

    Raises:
      ValueError: if there is no layer, or if layers cannot be separated.
    """
    _check_stacks(flow)
    reads = [flow.leaves_of(eqn.invars) for eqn in flow.eqns]
    stacked = {i for scan in flow.stacks.values() for i in scan.leaves}
    firsts: list[int] = []
    seen: set[str] = set()
    for at, leaves in enumerate(reads):
        new = {flow.layer_of[i] for i in leaves - stacked if i in flow.layer_of} - seen
        if len(new) > 1:
            raise ValueError(
                f"`{flow.eqns[at].primitive.name}` reads the parameters of several layers "
                f"({trees.some_of(sorted(new))}) at once, so their gradients cannot be computed "
                "one layer after another. Gradient release needs layers that are called one by "
                "one, or a lax.scan (nn.scan, nnx.scan) over layers on axis 0 of their parameters."
            )
        seen |= new
        firsts += [at] * len(new)
    if not flow.stacks and not firsts:
        raise ValueError(
            "the loss has no lax.scan (nn.scan, nnx.scan) over parameters, so there are no layers "
            "to release. Layers in a list are named: layers='layers', or layers='Block_*'."
        )
    cuts = {at + after for at in flow.stacks for after in (0, 1)}
    stops = [at for at, leaves in enumerate(reads) if leaves or at in flow.stacks]
    ends = firsts[:]
    if firsts:  # the first parameter that no layer reads, after the layers
        of_layers = frozenset().union(*reads[firsts[0] : firsts[-1] + 1])
        last = {flow.layer_of[i] for i in reads[firsts[-1]] if i in flow.layer_of}
        of_layers |= {i for i, layer in flow.layer_of.items() if layer in last}
        after = [at for at in stops if at > firsts[-1] and not reads[at] <= of_layers]
        ends += after[:1]
    costs = _costs(flow)
    for end in ends:
        begin = 1 + max([at for at in stops if at < end], default=-1)
        cuts.add(min(range(end, begin - 1, -1), key=costs.__getitem__))
    return sorted(cuts)


def _check_stacks(flow: _Flow) -> None:
    readers: dict[int, int] = {}
    for at, scan in flow.stacks.items():
        for leaf in scan.leaves:
            other = readers.setdefault(leaf, at)
            if other != at:
                raise ValueError(
                    f"two scans read '{flow.names[leaf]}', and gradient release updates a layer "
                    "after its only use: share parameters outside of the scans."
                )
    elsewhere = set(flow.leaves_of(flow.graph.jaxpr.outvars))
    for at, eqn in enumerate(flow.eqns):
        here = flow.stacks.get(at)
        count = None if here is None else here.consts + here.carried
        elsewhere |= flow.leaves_of(eqn.invars[:count])
    for leaf in sorted(elsewhere & set(readers)):
        raise ValueError(
            f"'{flow.names[leaf]}' is read outside of the scan over its layers (an L2 penalty, "
            "aux), and gradient release updates a layer after its only use: read it in the body of "
            "the scan. Weight decay is an argument of the optimizer."
        )


def _last_reads(flow: _Flow) -> dict[Var, int]:
    """Return the index of the last equation that reads each variable; the outputs are read last."""
    last = {v: at for at, eqn in enumerate(flow.eqns) for v in _variables(eqn.invars)}
    return last | dict.fromkeys(_variables(flow.graph.jaxpr.outvars), len(flow.eqns))


def _costs(flow: _Flow) -> list[int]:
    """Return the bytes that a cut before each equation passes on."""
    last, changes = _last_reads(flow), [0] * (len(flow.eqns) + 2)
    for at, eqn in enumerate(flow.eqns):
        for v in eqn.outvars:
            if v in last:
                aval: Any = v.aval
                size = math.prod(aval.shape) * aval.dtype.itemsize
                changes[at + 1] += size
                changes[last[v] + 1] -= size
    return list(itertools.accumulate(changes))


# ---- the stages ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Stages:
    """Build the stages of a program.

    Attributes:
      flow: the values of the loss.
      cuts: where stages begin.
      leaves: the parameters.
      results: tree structure of what the loss returns.
      has_aux: whether that is (loss, aux).
    """

    flow: _Flow
    cuts: list[int]
    leaves: list[Any]
    results: Any
    has_aux: bool

    def program(self) -> Program:
        """Return the program."""
        scans, eqns = self.flow.stacks, self.flow.eqns
        stages: dict[str, LayerFunction] = {}
        for begin, end in itertools.pairwise(self.cuts):
            if begin not in scans:
                stages[str(begin)] = self._once(begin, eqns[begin:end], end)
                continue
            stages[str(begin)] = self._layer(begin)
            if end in scans:
                stages[f"before {end}"] = self._once(end, [], end)
        first = self._once(0, eqns[: self.cuts[0]], self.cuts[0])
        last = self._evaluation(
            self._entering(self.cuts[-1]), eqns[self.cuts[-1] :], self.flow.graph.jaxpr.outvars
        )
        return Program(
            lambda rest, known: first(None, rest, (), known),
            stages,
            lambda rest, x, known: self.results.unflatten(last(rest, x, known)),
            self.has_aux,
            self._parts(),
        )

    def _parts(self) -> Parts:
        stacks, rest = {}, dict(enumerate(self.leaves))
        for at, scan in self.flow.stacks.items():
            stack = [rest.pop(i) for i in scan.leaves]
            stacks[str(at)] = Stack(stack, scan.leaves, scan.eqn.params["length"])
        leaves = list(rest.values())
        return Parts(stacks, leaves, list(rest), jax.tree.structure(leaves))

    def _once(self, begin: int, eqns: Sequence[JaxprEqn], end: int) -> LayerFunction:
        """Return a stage that evaluates some equations once."""
        scan = self.flow.stacks.get(end)
        carry = [] if scan is None else scan.eqn.invars[scan.consts :][: scan.carried]
        others = self._crossing(end) if scan is None else self._beside(end)
        evaluate = self._evaluation(self._entering(begin), eqns, [*carry, *others])

        def stage(weights: None, rest: Any, x: Any, known: Any) -> Any:
            del weights
            values = evaluate(rest, x, known)
            if scan is None:
                return values
            return values[: len(carry)], jnp.int32(0), Unchanged(values[len(carry) :])

        return stage

    def _layer(self, at: int) -> LayerFunction:
        """Return the stage that evaluates the body of a scan, for one layer."""
        scan = self.flow.stacks[at]
        count, casts = scan.consts + scan.carried, scan.stacked
        body, graph, parameters = _body(scan.eqn), self.flow.graph, self.flow.parameters
        given = scan.eqn.invars[count:]
        whole = [v for k, v in enumerate(given) if k not in casts]
        evaluate = self._evaluation(self._beside(at), [], [*scan.eqn.invars[: scan.consts], *whole])

        def layer(weights: list[Any], rest: Any, x: Any, known: Any) -> Any:
            carry, number, others = x
            values = evaluate(rest, others, known)
            of_layer = iter(
                lax.dynamic_index_in_dim(value, number, keepdims=False)
                for value in values[scan.consts :]
            )
            weight_of = dict(zip(scan.leaves, weights, strict=True))
            xs = []
            for k, atom in enumerate(given):
                if k in casts:
                    leaf, eqns = casts[k]
                    xs += graph.evaluate(eqns, [atom], {parameters[leaf]: weight_of[leaf]})
                else:
                    xs.append(next(of_layer))
            results = body(*values[: scan.consts], *carry, *xs)
            return results[: scan.carried], number + 1, others

        return layer

    def _evaluation(
        self, inputs: Sequence[Var | None], eqns: Sequence[JaxprEqn], outputs: Sequence[Atom]
    ) -> Callable[[Any, Any, Any], list[Any]]:
        """Return (rest, x, known) -> outputs, where x has the inputs as leaves."""
        flow = self.flow
        stacked = {i for scan in flow.stacks.values() for i in scan.leaves}
        parameters = [v for i, v in enumerate(flow.parameters) if i not in stacked]
        made = flow.makers([*(v for eqn in eqns for v in eqn.invars), *outputs])

        def evaluate(rest: list[Any], x: Any, known: list[Any]) -> list[Any]:
            env: dict[Any, Any] = dict(zip(flow.known_read, known, strict=True))
            env |= zip(parameters, rest, strict=True)
            env |= zip(inputs, jax.tree.leaves(x), strict=True)
            values = flow.graph.evaluate([*made, *eqns], outputs, env)
            pairs = zip(values, outputs, strict=True)
            return [jnp.asarray(x, _dtype(v)) if isinstance(v, Literal) else x for x, v in pairs]

        return evaluate

    def _entering(self, at: int) -> Sequence[Var | None]:
        """Return the variables of x where a stage begins that is no scan."""
        before = self.flow.stacks.get(at - 1)
        if before is None:
            return self._crossing(at)
        return [*before.eqn.outvars[: before.carried], None, *self._beside(at - 1)]

    def _crossing(self, at: int) -> list[Var]:
        """Return the variables that are computed before a position and read from it on."""
        last = _last_reads(self.flow)
        made = [v for eqn in self.flow.eqns[:at] for v in eqn.outvars if v not in self.flow.known]
        return [v for v in made if last.get(v, -1) >= at]

    def _beside(self, at: int) -> list[Var]:
        """Return the variables beside the carry that a scan needs: read in layers or after it."""
        scan = self.flow.stacks[at]
        count = scan.consts + scan.carried
        atoms = _variables([*scan.eqn.invars[: scan.consts], *scan.eqn.invars[count:]])
        read = [v for v in atoms if v not in self.flow.known and v not in self.flow.sources]
        later = [v for v in self._crossing(at + 1) if v not in scan.eqn.outvars]
        return list(dict.fromkeys([*read, *later]))


def _dtype(atom: Atom) -> Any:
    aval: Any = atom.aval
    return aval.dtype
