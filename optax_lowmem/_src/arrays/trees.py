"""Leaves, their paths and checks; every error names the leaf and the remedy."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.arrays.typing import KeyPath, PyTree, Structure, Tree

DICTS = (dict, OrderedDict)  # in states: those of optax.partition and optax.named_chain
_WRAPPED = (jax.tree_util.GetAttrKey("value"), jax.tree_util.FlattenedIndexKey(0))
NO_PARAMS_MSG = (
    "You are using a transformation that requires the current value of parameters, but you are "
    "not passing `params` when calling `update`. Call tx.update(grads, state, params)."
)


def path_name(path: KeyPath) -> str:
    """Return the name of a key path, such as `blocks/0/attention/kernel`.

    It omits the key of an array in a wrapper: Flax's `.value`, or a first index as in haliax's.
    """
    boxed = len(path) > 1 and path[-1] in _WRAPPED
    return jax.tree_util.keystr(path[:-1] if boxed else path, simple=True, separator="/")


def some_of(paths: Sequence[str], shown: int = 3) -> str:
    """Return the first paths of several, and how many more there are, for display."""
    more = f" and {len(paths) - shown} more" if len(paths) > shown else ""
    return ", ".join(paths[:shown]) + more


def named_leaves(
    tree: object, name_of: Callable[[KeyPath], str] = path_name, what: str = "here"
) -> list[tuple[str, PyTree]]:
    """Return (name, leaf) pairs in flattening order; raises if two leaves have the same name.

    `name_of` returns a name from a key path; `what` says in the error where the names are used.
    """
    named = jax.tree_util.tree_leaves_with_path(tree)
    known: dict[str, KeyPath] = {}
    for path, _ in named:
        name = name_of(path)
        if name in known:
            one, other = (jax.tree_util.keystr(p) for p in (known[name], path))
            raise ValueError(
                f"leaves {one} and {other} would both be called '{name}' {what}: rename one of "
                "their keys."
            )
        known[name] = path
    return [(name, leaf) for name, (_, leaf) in zip(known, named, strict=True)]


def check_transformation(tx: object, call: str, params: object = None) -> None:
    """Raise unless `tx` is an optax transformation, and `params` contain no state of ours.

    `call` says how to pass it, at the end of the error.
    """
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise TypeError(
            f"a {type(tx).__name__} is not an optax transformation, which has init and update: "
            f"{call}"
        )
    states = [] if params is None else jax.tree.leaves(params, is_leaf=is_ours)
    for state in filter(is_ours, states):
        name = type(state).__name__
        raise TypeError(f"a {name} is an optimizer's state, not parameters: {call}")


def wrapped(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return `inner` with an `update` that takes extra arguments."""
    check_transformation(inner, "wrap an instance, such as optax.adam(1e-3).")
    return optax.with_extra_args_support(inner)


def check_param(path: str, leaf: object) -> None:
    """Raise unless a parameter is f32, bf16 or f16."""
    if not hasattr(leaf, "dtype"):
        raise TypeError(
            f"parameter '{path}' is a {type(leaf).__name__}, not an array: make it one with "
            "jnp.asarray, or leave it out with optax.masked."
        )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise TypeError(
            f"parameter '{path}' is {leaf.dtype}, such as a PRNG key, which has no gradient: leave "
            "it out with optax.masked or optax.partition, around this one."
        )
    dtype = jnp.dtype(leaf.dtype)
    if dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        return
    if dtype == jnp.float64:
        raise TypeError(
            f"parameter '{path}' is float64: 8-bit state of a float64 weight would lose it "
            "silently. Cast it to float32, or leave it to plain optax with optax.masked."
        )
    raise TypeError(
        f"parameter '{path}' is {dtype}: only float32, bfloat16 and float16 leaves can be "
        "optimized. Leave it out with optax.masked or optax.partition, around this one."
    )


def check_params(params: optax.Params) -> None:
    """Apply `check_param` to each leaf."""
    for path, leaf in named_leaves(params):
        check_param(path, leaf)


def with_values(params: optax.Params) -> optax.Params:
    """Replace each `jax.ShapeDtypeStruct` in a tree by zeros with its sharding.

    This lets an `init` that stores the weights' values run on shapes, for the state's layout.
    """
    return jax.tree.map(
        lambda leaf: jnp.zeros_like(leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf,
        params,
    )


def match(what: str, tree: optax.Updates, params: optax.Params) -> list[jax.Array]:
    """Return the leaves of `tree`; raise unless real, with the structure and shapes of `params`."""
    like: Structure = jax.tree.structure(params)
    if like != jax.tree.structure(tree) and (differs := difference(_names(params), _names(tree))):
        raise ValueError(
            f"the {what} tree does not have the structure of the parameters: {differs}. "
            "Pass the same tree to init and update."
        )
    leaves = jax.tree.leaves(tree)
    for i, (leaf, param) in enumerate(zip(leaves, jax.tree.leaves(params), strict=True)):
        if jnp.shape(leaf) != jnp.shape(param):
            raise ValueError(
                f"{what} '{_names(params)[i]}' has shape {jnp.shape(leaf)}, its parameter has "
                f"{jnp.shape(param)}: pass one with its parameter's shape."
            )
        if jnp.iscomplexobj(leaf):
            raise TypeError(
                f"{what} '{_names(params)[i]}' is {leaf.dtype}, whose imaginary part would be "
                "lost: pass a real one."
            )
    return leaves


def check_state_tree(tree: object, params: optax.Params) -> None:
    """Raise unless a tree in a state has the leaves of `params`, by name and in order."""
    like: Structure = jax.tree.structure(params)
    if like != jax.tree.structure(tree) and (differs := difference(_names(tree), _names(params))):
        raise ValueError(
            f"the state is of other parameters: {differs}. Pass the same tree to init and "
            "update, or call init on this one."
        )


def _names(tree: object) -> list[str]:
    return [name for name, _ in named_leaves(tree)]


def difference(expected: list[str], found: list[str]) -> str:
    """Describe how leaf names differ from those expected; "" if they do not."""
    if expected == found:
        return ""
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    if missing or extra:
        return f"missing {missing[:3]}, extra {extra[:3]}"
    return f"the order is {found[:3]}, not {expected[:3]}"


def check_state(state: optax.OptState, kind: type[NamedTuple]) -> None:
    """Raise unless a state has the fields of the NamedTuple that the optimizer keeps."""
    if getattr(state, "_fields", None) != kind._fields:
        raise ValueError(
            f"the state is a {type(state).__name__}, this optimizer keeps a {kind.__name__} with "
            f"{', '.join(kind._fields)}. The arguments are step(tx, grads, state, params) and "
            "update(grads, state, params). If they are so, it was made by another optimizer, or "
            "restored without its types: restore it into the structure of tx.init(params)."
        )


def broadcast_prefix(what: str, prefix: object, tree: object) -> list[PyTree]:
    """Return the value of a prefix tree (an optax mask) for each leaf of `tree`, in order."""
    try:
        spread = jax.tree.map(lambda value, sub: jax.tree.map(lambda _: value, sub), prefix, tree)
    except ValueError as error:
        names = [name for name, _ in named_leaves(tree)]
        given = [name for name, _ in named_leaves(prefix)]
        missing = [n for n in names if not any(f"{n}/".startswith(f"{g}/") for g in given)]
        unknown = [g for g in given if not any(f"{n}/".startswith(f"{g}/") for n in names)]
        faults = [f"it has no value for {some_of(missing)}"] if missing else []
        faults += [f"its {some_of(unknown)} is no parameter"] if unknown else []
        raise ValueError(
            f"{what} does not fit the parameters ({some_of(names)}): "
            f"{', and '.join(faults) or 'its containers are of other types'}. Give a tree of bools "
            "of their structure, a prefix of it, or a function of them."
        ) from error
    return jax.tree.leaves(spread)


def chosen(choice: PyTree, params: optax.Params) -> PyTree:
    """Return the tree of an optax-style choice: a tree, or a function of the parameters.

    As in optax, a choice is a function if all its leaves are callable: a tree whose class is
    callable, such as an Equinox module of bools, is a tree.
    """
    kinds = [callable(leaf) for leaf in jax.tree.leaves(choice)]
    return choice(params) if kinds and all(kinds) else choice


def check_mask(name: str, mask: object, instead: str) -> None:
    """Raise for a mask with strings, such as the name of a parameter.

    `instead`, a format with the string, says how to select parameters by a name.
    """
    for leaf in jax.tree.leaves(mask):
        if isinstance(leaf, str):
            raise TypeError(
                f"{name} is a tree of bools or a function of the parameters, not a name, got "
                f"{mask!r}: write {instead.format(leaf)}"
            )


def mask_values(what: str, mask: optax.MaskOrFn, params: optax.Params) -> list[bool]:
    """Return the value of an optax-style mask for each leaf of `params`, in order."""
    tree = chosen(mask, params)
    if tree is None:
        raise TypeError(f"the function of {what} returned None: let it return a tree of bools.")
    values = broadcast_prefix(what, tree, params)
    for (path, _), value in zip(named_leaves(params), values, strict=True):
        given = f"{what} for '{path}' is one bool that is known when tracing"
        if isinstance(value, jax.core.Tracer):
            raise TypeError(f"{given}, got the traced {value}")
        if jnp.ndim(value) if hasattr(value, "dtype") else not isinstance(value, int):
            shape = f"an array of shape {value.shape}" if hasattr(value, "shape") else repr(value)
            raise TypeError(f"{given}, got {shape}: a mask takes or leaves whole leaves")
    return list(map(bool, values))


def is_named_tuple(node: object) -> TypeGuard[NamedTuple]:
    """Return whether a node is a NamedTuple instance."""
    return isinstance(node, tuple) and hasattr(node, "_fields")


def is_ours(node: object) -> TypeGuard[NamedTuple]:
    """Return whether a node is a state of this library or of one of its optimizers.

    The class of the state of a user's own rule is outside this package: fields count and seed tell
    it.
    """
    if not is_named_tuple(node):
        return False
    library = type(node).__module__.split(".")[0] == "optax_lowmem"
    return library or {"count", "seed"} <= set(node._fields)


def holds(tree: object, test: Callable[[object], bool]) -> bool:
    """Return whether any node of a tree, its root included, passes a test."""
    return any(map(test, jax.tree.leaves(tree, is_leaf=test)))


def keep_dtypes(old: Tree, new: Tree, given: optax.Updates | None = None) -> Tree:
    """Cast a new state to the dtypes of the old one, which f32 gradients would change.

    If none of the `given` gradients is 16-bit, dtypes are not kept, as in optax.
    """
    before: Structure = jax.tree.structure(old)
    if before != jax.tree.structure(new):
        return new
    leaves = jax.tree.leaves(given)
    if given is not None and not any(numerics.is_narrow(jnp.result_type(x)) for x in leaves):
        return new

    def kept(a: jax.Array, b: jax.Array) -> jax.Array:
        return b if jnp.result_type(a) == jnp.result_type(b) else b.astype(a.dtype)

    return jax.tree.map(kept, old, new)


def states_with(
    state: optax.OptState, field: str, test: Callable[[object], bool] = is_named_tuple
) -> Iterator[PyTree]:
    """Yield every NamedTuple with a given field inside an optimizer state, through any wrapper.

    The test is `is_ours` for a field of ours, since a NamedTuple of weights may have the same
    field.
    """
    result = jax.tree.leaves(state, is_leaf=lambda n: test(n) and field in n._fields)
    for node in result:
        if test(node):
            yield node
            for name in node._fields:
                if name != field:
                    yield from states_with(getattr(node, name), field, test)


def is_state(node: object, slot: str = "") -> bool:
    """Return whether a node of a state is itself a state, not weights held in a NamedTuple.

    `slot` is the field that holds it; outside of any field ("other") every NamedTuple is a state.
    """
    named = type(node).__name__.endswith(("State", "Schedule"))  # as all states of optax are named
    return is_named_tuple(node) and (named or slot == "other")


def state_fields(state: optax.OptState, name: str = "other") -> Iterator[tuple[str, PyTree]]:
    """Yield (slot, subtree) for every field of every NamedTuple of an optimizer state."""
    if is_state(state, name):
        for field in state._fields:
            yield from state_fields(getattr(state, field), field)
    elif type(state) in (tuple, list) and any(_has_states(part, name) for part in state):
        for part in state:
            yield from state_fields(part, name)
    elif type(state) in DICTS and (
        name == "scales" or any(_has_states(part, name) for part in state.values())
    ):
        for key, part in state.items():
            yield from state_fields(part, key if name == "scales" else name)
    else:
        yield name, state


def _has_states(node: object, slot: str) -> bool:
    def filled(inner: optax.OptState) -> bool:
        return is_state(inner, slot) and bool(inner._fields)

    return holds(node, filled)


def nbytes(tree: object) -> int:
    """Return the bytes of a tree of arrays or shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def widened(tree: Tree, floats_only: bool = False) -> Tree:
    """Convert the arrays of a tree, or only those of narrow floats, to f32; shapes give shapes."""

    def wide(x: PyTree) -> PyTree:
        if floats_only and not numerics.is_narrow(x.dtype):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding)
        return numerics.widen(x)

    return jax.tree.map(wide, tree)


def as_given(updates: optax.Updates, gradients: optax.Updates) -> optax.Updates:
    """Cast f32 updates to 16-bit gradients' dtypes; other trees (lookahead's) are unchanged."""
    treedef: Structure = jax.tree.structure(updates)
    if treedef != jax.tree.structure(gradients):
        return updates

    def cast(u: jax.Array, g: jax.Array) -> jax.Array:
        return u.astype(g.dtype) if numerics.is_narrow(g.dtype) and u.dtype == jnp.float32 else u

    return jax.tree.map(cast, updates, gradients)
