"""A loss function as a chain of stages: its jaxpr, cut at scans over parameters and at layers."""

import dataclasses
import fnmatch
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from optax_lowmem._src.arrays import trees
from optax_lowmem._src.training.release.flow import Atom, Flow, Graph, body_of, variables
from optax_lowmem._src.training.release.model import LayerFunction, Parts, Stack, Unchanged


@dataclasses.dataclass(frozen=True)
class TracedLoss:
    """A loss function traced for one shape of its arguments, with the interface of `Layered`."""

    first: Callable[[Any, Any], Any]  # (rest, known) -> x
    # by name, stages (weights, rest, x, known) -> x. Those named in the stacks of the parts run
    # once per layer; the others run once, with None as weights
    layers: Mapping[str, LayerFunction]
    last: Callable[[Any, Any, Any], Any]  # (rest, x, known) -> loss or (loss, aux)
    has_aux: bool  # whether `last` returns (loss, aux)
    # the parameters, split into stacks (lists of leaves) and the rest (a list of leaves)
    parts: Parts

    def take_apart(self, params: optax.Params) -> Parts:
        """Return the parts of the parameters that the loss was traced with."""
        return self.parts


def trace(
    loss: Any, params: Any, batch: object, layers: str | Sequence[str], has_aux: bool = False
) -> tuple[TracedLoss, Any]:
    """Cut a loss function into stages.

    Returns the traced loss and `known`, the values that depend on no parameter, to run it with. The
    loss is (params, batch) -> loss, or (loss, aux) with `has_aux`; `layers` are as in `train_step`.
    """
    named = trees.named_leaves(params)
    names, leaves = [name for name, _ in named], [leaf for _, leaf in named]
    layer_of = _layers_of(names, layers)
    # a new function: JAX would return the jaxpr of a function that it has traced before
    traced, shape = jax.make_jaxpr(lambda *args: loss(*args), return_shape=True)(params, batch)
    if has_aux and not (isinstance(shape, tuple) and len(shape) == 2):
        raise TypeError("with has_aux=True the loss function must return (loss, aux)")
    graph, given = Graph.of(traced), [*leaves, *jax.tree.leaves(batch)]
    while calls := Flow(graph, names, layer_of).calls_to_open():
        graph = graph.inlined(calls, given)
    flow = Flow(graph, names, layer_of)
    cuts = _boundaries(flow)
    flow.compute_in_stages(cuts)
    stages = _Stages(flow, cuts, leaves, jax.tree.structure(shape), has_aux)
    return stages.traced_loss(), flow.known_values(given)


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


def _boundaries(flow: Flow) -> list[int]:
    """Return the positions in `flow.eqns` before which a stage begins.

    Raises if there is no layer, or if layers cannot be separated.
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


def _check_stacks(flow: Flow) -> None:
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


def _last_reads(flow: Flow) -> dict[Var, int]:
    """Return the index of the last equation that reads each variable; the outputs are read last."""
    last = {v: at for at, eqn in enumerate(flow.eqns) for v in variables(eqn.invars)}
    return last | dict.fromkeys(variables(flow.graph.jaxpr.outvars), len(flow.eqns))


def _costs(flow: Flow) -> list[int]:
    """Return the bytes that a cut before each equation passes on."""
    last, changes = _last_reads(flow), [0] * (len(flow.eqns) + 2)
    for at, eqn in enumerate(flow.eqns):
        for v in eqn.outvars:
            if v in last:
                size = trees.nbytes(v.aval)
                changes[at + 1] += size
                changes[last[v] + 1] -= size
    return list(itertools.accumulate(changes))


@dataclasses.dataclass(frozen=True)
class _Stages:
    """Build the stages of a `TracedLoss`, which begin at `cuts`; `results`: the loss' structure."""

    flow: Flow
    cuts: list[int]
    leaves: list[Any]
    results: Any
    has_aux: bool

    def traced_loss(self) -> TracedLoss:
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
        return TracedLoss(
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
            stacks[str(at)] = Stack(stack, scan.leaves, scan.leaves, scan.eqn.params["length"])
        leaves = list(rest.values())
        return Parts(stacks, leaves, list(rest), jax.tree.structure(leaves), len(self.leaves))

    def _once(self, begin: int, eqns: Sequence[JaxprEqn], end: int) -> LayerFunction:
        """Return a stage that evaluates some equations once."""
        scan = self.flow.stacks.get(end)
        carry = [] if scan is None else scan.eqn.invars[scan.consts :][: scan.carried]
        others = self._crossing(end) if scan is None else self._beside(end)
        evaluate = self._evaluation(self._entering(begin), eqns, [*carry, *others])

        def stage(weights: None, rest: Any, x: Any, known: Any) -> Any:
            values = evaluate(rest, x, known)
            if scan is None:
                return values
            return values[: len(carry)], jnp.int32(0), Unchanged(values[len(carry) :])

        return stage

    def _layer(self, at: int) -> LayerFunction:
        """Return the stage that evaluates the body of a scan, for one layer."""
        scan = self.flow.stacks[at]
        count, casts = scan.consts + scan.carried, scan.stacked
        body, graph, parameters = body_of(scan.eqn), self.flow.graph, self.flow.parameters
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
        atoms = variables([*scan.eqn.invars[: scan.consts], *scan.eqn.invars[count:]])
        read = [v for v in atoms if v not in self.flow.known and v not in self.flow.sources]
        later = [v for v in self._crossing(at + 1) if v not in scan.eqn.outvars]
        return list(dict.fromkeys([*read, *later]))


def _dtype(atom: Atom) -> Any:
    aval: Any = atom.aval
    return aval.dtype
