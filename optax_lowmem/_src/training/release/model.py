"""`Layered`, a model as a chain of stages, and the split of its parameters into stacks and rest."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import Jaxpr
from jax.typing import ArrayLike

from optax_lowmem._src.arrays import trees

LayerFunction = Callable[[Any, Any, Any, Any], Any]  # (weights, rest, x, batch) -> x


@dataclasses.dataclass(frozen=True, eq=False)
class Layered:
    """A model with stacked layers: a first stage, stacks of equal layers, and a last stage.

    ::

        x = first(rest, batch)
        for path, layer in layers.items():          # each stack in turn
            for weights in params[path]:            # one layer after another
                x = layer(weights, rest, x, batch)
        loss = last(rest, x, batch)

    `rest` is the tree of parameters with None in place of the stacks. Every function may read any
    part of it: an embedding that is also the output head, an attention block that all layers share.

    Args:
      first: (rest, batch) -> x, any tree of arrays. The layers keep its shapes and dtypes.
      layers: dict from the path of a stack in the parameters (as in `explain`: "layers",
        "decoder/blocks") to its layer function, (weights, rest, x, batch) -> x. Each leaf of a
        stack has the layers on axis 0; `weights` is one layer's subtree, without that axis. If a
        layer needs its index, keep a counter in x.
      last: (rest, x, batch) -> loss, a float scalar, or (loss, aux).
      has_aux: whether `last` returns (loss, aux).

    A `Layered` is callable as (params, batch, frozen=None) -> loss. It scans over each stack and
    rematerialises every layer, for evaluation, or for `jax.value_and_grad` and `lowmem.step`.
    `frozen` are parameters that are not trained, such as the base of LoRA's adapters, as in
    `train_step`.

    Raises:
      TypeError: for stages that are not functions.
      ValueError: if there is no stack. When called, for a path that is not in the parameters, and
        for leaves of a stack with different numbers of layers.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem import release
      >>> model = release.Layered(
      ...     first=lambda rest, batch: rest["embed"][batch],
      ...     layers={"layers": lambda weights, rest, x, batch: x + jnp.tanh(x @ weights["w"])},
      ...     last=lambda rest, x, batch: jnp.mean((x @ rest["embed"].T) ** 2),
      ... )
      >>> params = {"embed": jnp.ones((5, 4)), "layers": {"w": jnp.zeros((3, 4, 4))}}
      >>> print(model(params, jnp.array([0, 1])))
      16.0
    """

    first: Callable[[Any, Any], Any]
    layers: Mapping[str, LayerFunction]
    last: Callable[[Any, Any, Any], Any]
    has_aux: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Mapping) or not self.layers:
            raise ValueError(
                f"layers is a dict from the path of a stack to its layer function, for example "
                f"{{'layers': block}}, got {self.layers!r}"
            )
        stages = {"first": self.first, **self.layers, "last": self.last}
        for name, stage in stages.items():
            if not callable(stage):
                raise TypeError(f"stage '{name}' of the model is not a function: {stage!r}")

    def __call__(self, params: optax.Params, batch: object, frozen: optax.Params = None) -> Any:
        """Return the loss, or (loss, aux)."""
        parts = self.take_apart(params, frozen)
        x = self.first(parts.rest(), batch)
        for path, layer in self.layers.items():

            def body(x: object, weights: object, layer: LayerFunction = layer) -> tuple[Any, None]:
                return layer(weights, parts.rest(), x, batch), None

            body = jax.checkpoint(body, prevent_cse=False)
            x, _ = lax.scan(body, x, parts.stacks[path].tree)
        return self.last(parts.rest(), x, batch)

    def take_apart(self, params: optax.Params, frozen: optax.Params = None) -> "Parts":
        """Split parameters, joined with frozen ones, into the stacks and the rest."""
        return take_apart(params, tuple(self.layers), frozen)


@dataclasses.dataclass(frozen=True)
class Stack:
    """Parameters of a stack of layers."""

    tree: Any  # subtree whose leaves have the layers on axis 0
    indices: list[int]  # indices of its leaves among all: trained ones first, then frozen ones
    trained: list[int]  # those of its trained leaves
    layers: int

    def trained_of(self, leaves: Sequence[Any]) -> list[Any]:
        """Return those of values for each leaf that belong to trained ones."""
        return [x for i, x in zip(self.indices, leaves, strict=True) if i in self.trained]


@dataclasses.dataclass(frozen=True)
class Parts:
    """Parameters, split into stacks and the rest."""

    stacks: dict[str, Stack]  # by path
    leaves: list[Any]  # of the rest
    indices: list[int]  # of these leaves among all
    treedef: Any  # of the rest
    trained: int  # number of trained leaves, those of the smallest indices

    def rest(self, changed: Mapping[int, jax.Array] | None = None) -> Any:
        """Return the rest of the tree, with the leaves at some positions replaced."""
        changed = changed or {}
        return self.treedef.unflatten([changed.get(i, x) for i, x in enumerate(self.leaves)])

    def are_trained(self, positions: Sequence[int]) -> list[int]:
        """Return those of some positions in the rest whose leaves are trained."""
        return [at for at in positions if self.indices[at] < self.trained]


def joined(params: optax.Params, frozen: optax.Params, path: str = "") -> Any:
    """Return the tree of two of its parts: dicts have the keys of both, None is filled in."""
    if params is None or frozen is None:
        return frozen if params is None else params
    if isinstance(params, dict) and isinstance(frozen, dict):
        names = {**params, **frozen}
        return {
            name: joined(params.get(name), frozen.get(name), f"{path}/{name}".lstrip("/"))
            for name in names
        }
    (ones, one), (others, other) = _children(params), _children(frozen)
    if one != other or any(child is params for child in ones):  # a leaf
        raise ValueError(
            f"'{path}' is in the trained parameters and in the frozen ones: leave it out of one "
            "of them, or put None there."
        )
    return one.unflatten([joined(*both, path) for both in zip(ones, others, strict=True)])


def _children(node: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(node, is_leaf=lambda child: child is not node)


def take_apart(
    params: optax.Params, paths: Sequence[str], frozen: optax.Params = None, *, some: bool = False
) -> Parts:
    """Split parameters, joined with frozen ones, into the stacks at these paths and the rest.

    Raises if nothing is at one of the paths, unless only `some` of the stacks are asked for.
    """
    trained, count = len(jax.tree.leaves(params)), itertools.count()
    numbers = [jax.tree.map(lambda _: next(count), tree) for tree in (params, frozen)]
    number = iter(jax.tree.leaves(joined(*numbers)))
    nodes, treedef = named_nodes(joined(params, frozen), paths, some=some)
    stacks: dict[str, Stack] = {}
    others: list[Any] = []
    indices: list[int] = []
    for path, node in nodes:
        of_node = [next(number) for _ in jax.tree.leaves(node)]
        if path in paths:
            of_trained = [i for i in of_node if i < trained]
            stacks[path] = Stack(node, of_node, of_trained, layers_of(path, node))
            others.append(None)
        else:
            indices += of_node
            others.append(node)
    rest, rest_treedef = jax.tree.flatten(treedef.unflatten(others))
    return Parts(stacks, rest, indices, rest_treedef, trained)


def named_nodes(
    params: optax.Params, paths: Sequence[str], *, some: bool = False
) -> tuple[list[tuple[str, Any]], Any]:
    """Return the nodes at these paths and the leaves elsewhere, with their paths, and the treedef.

    Raises if nothing is at one of the paths, unless only `some` of the nodes are asked for.
    """

    def is_stack(path: tuple[object, ...], node: object) -> bool:
        return trees.path_name(path) in paths

    flat, treedef = jax.tree_util.tree_flatten_with_path(
        params, is_leaf=is_stack, is_leaf_takes_path=True
    )
    nodes = [(trees.path_name(path), node) for path, node in flat]
    names = [name for name, _ in nodes]
    for path in paths:
        if path not in names and not some:
            raise ValueError(
                f"there is no '{path}' in the parameters ({', '.join(names[:4])}, ...): `layers` "
                "names the subtree whose leaves have the layers on axis 0."
            )
    return nodes, treedef


def layers_of(path: str, tree: optax.Params) -> int:
    """Return the number of layers of a stack; raises if its leaves differ in it."""
    leaves = trees.named_leaves(tree)
    if not leaves:
        raise ValueError(f"the stack '{path}' has no leaves: pass the path of the layers.")
    sizes = {name: jnp.shape(leaf)[:1] for name, leaf in leaves}
    (first, size), *others = sizes.items()
    for name, other in [(first, size), *others]:
        where = f"{path}/{name}" if name else path
        if not other or other[0] == 0:
            raise ValueError(
                f"leaf '{where}' of the stack '{path}' has no layer axis: every leaf of a stack "
                "needs one entry per layer on axis 0. Move it out of the stack, into the rest."
            )
        if other != size:
            raise ValueError(
                f"leaf '{where}' has {other[0]} layers on axis 0 and '{path}/{first}' has "
                f"{size[0]}: all leaves of a stack need as many layers. Move it into another "
                "stack, or into the rest."
            )
    return int(size[0])


class Unchanged(NamedTuple):
    """Arrays in x that every layer of a stack returns unchanged, so that one copy is saved."""

    arrays: Any


def map_x(on_array: Callable[..., Any], on_unchanged: Callable[[Unchanged], Any], x: object) -> Any:
    """Map over x, with separate functions for its arrays and for its `Unchanged` nodes."""

    def one(node: Any) -> Any:
        return on_unchanged(node) if isinstance(node, Unchanged) else on_array(node)

    return jax.tree.map(one, x, is_leaf=lambda node: isinstance(node, Unchanged))


def reads(function: Callable[..., Any], rest: optax.Params, *args: object) -> tuple[list[int], Any]:
    """Return the positions of the leaves of `rest` that `function(rest, *args)` uses, and shapes.

    The shapes are those of its result.
    """
    # a new function: JAX would return the jaxpr of a function that it has traced before
    closed, shapes = jax.make_jaxpr(lambda *given: function(*given), return_shape=True)(rest, *args)
    used = _read(closed.jaxpr)[: len(jax.tree.leaves(rest))]
    return [at for at, flag in enumerate(used) if flag], shapes


def _read(jaxpr: Jaxpr) -> list[bool]:
    """Return whether each input of a jaxpr is (or may be) used, looking into called jaxprs."""
    used = {id(var) for var in jaxpr.outvars}
    for eqn in reversed(jaxpr.eqns):
        if not eqn.effects and not any(id(var) in used for var in eqn.outvars):
            continue  # nothing reads its results
        inner = eqn.params.get("jaxpr")
        inner = getattr(inner, "jaxpr", inner)
        flags = [True] * len(eqn.invars)
        if inner is not None and len(inner.invars) == len(eqn.invars):
            flags = _read(inner)
        used |= {id(var) for var, flag in zip(eqn.invars, flags, strict=True) if flag}
    return [id(var) in used for var in jaxpr.invars]


def _is_float(x: ArrayLike) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def floats(tree: object) -> list[Any]:
    """Return the leaves of inexact dtype, which have gradients."""
    return [x for x in jax.tree.leaves(tree) if _is_float(x)]


def with_floats(tree: object, values: Sequence[jax.Array]) -> Any:
    """Return the tree with its `floats` replaced."""
    new = iter(values)
    return jax.tree.map(lambda x: next(new) if _is_float(x) else x, tree)
