"""The arrays of Flax's objects: an NNX model with its optimizer, or a `TrainState`."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Sharding

from optax_lowmem._src.arrays import array_metadata
from optax_lowmem._src.arrays.sharding import replicated
from optax_lowmem._src.arrays.typing import PyTree

_FP8 = "_overwrite_with_gradient"  # Flax's collection


@dataclasses.dataclass(frozen=True)
class Contents:
    """The arrays of objects, as trees."""

    inner: optax.GradientTransformation  # the optimizer
    params: PyTree  # the parameters that it trains
    opt_state: PyTree  # its state
    rest: PyTree  # every other array: statistics, random keys, counts of steps, frozen parameters
    count: PyTree  # number of steps taken
    # writes parameters, state and rest into the objects; returns a new `TrainState`
    write: Callable[[PyTree, PyTree, PyTree], PyTree]

    @property
    def tx(self) -> optax.GradientTransformation:
        """The optimizer with `rest` in its state; only its `init` is called, on shapes."""
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.state["rest"])

        def init(params: PyTree) -> PyTree:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
            return {"opt_state": self.inner.init(params), "rest": zeros}

        return optax.GradientTransformation(init, self.inner.update)

    @functools.cached_property
    def state(self) -> PyTree:
        """The optimizer's state, with `rest`."""
        return {"opt_state": self.opt_state, "rest": jax.tree.map(_array, self.rest)}

    @property
    def shardings(self) -> PyTree:
        """The sharding of each array of `state`; those on fewer devices are replicated."""
        whole = replicated((self.params, self.state))

        def of(leaf: PyTree) -> Sharding:
            sharding = getattr(leaf, "sharding", None)
            return sharding if sharding and sharding.device_set == whole.device_set else whole

        return jax.tree.map(of, self.state)

    def put(self, params: PyTree, state: PyTree) -> PyTree:
        """Write restored arrays into the objects."""
        rest = jax.tree.map(_as_key, self.rest, state["rest"])
        return self.write(params, state["opt_state"], rest)


def contents(model: PyTree, optimizer: PyTree = None) -> Contents:
    """Return the arrays of a model and its `nnx.Optimizer`, or of one object that holds both."""
    if optimizer is None and all(hasattr(model, name) for name in ("tx", "params", "opt_state")):
        return _of_train_state(model)
    if optimizer is None and "model" in getattr(model, "__dict__", ()):
        model, optimizer = model.model, model
    if all(hasattr(optimizer, name) for name in ("tx", "wrt", "opt_state")):
        return _of_nnx(model, optimizer)
    raise TypeError(
        "pass an optax optimizer with its params and state, an NNX model with its nnx.Optimizer, "
        "or one nnx.ModelAndOptimizer or TrainState; got "
        f"{type(model).__name__} and {type(optimizer).__name__}."
    )


@contextlib.contextmanager
def advising(*trees: PyTree) -> Iterator[None]:
    """Add to an error about NNX variables what to pass instead of them."""
    try:
        yield
    except (TypeError, ValueError) as error:
        variable = array_metadata.is_variable
        if any(map(variable, jax.tree.leaves(trees, is_leaf=variable))):
            error.add_note(
                "These are variables of Flax NNX. Pass the objects: checkpoint.save(path, model, "
                "optimizer), checkpoint.restore(path, model, optimizer)."
            )
        raise


def _of_nnx(model: PyTree, optimizer: PyTree) -> Contents:
    from flax import nnx

    graph = getattr(optimizer, "graph", None)
    known = {} if graph is None else {"graph": graph}  # unknown to Flax before 0.12.7
    params, others = nnx.split_state(nnx.state(model, **known), optimizer.wrt, ...)
    counts = nnx.state(optimizer, **known)
    counts = nnx.State({k: v for k, v in counts.items() if k not in ("model", "opt_state")})

    def write(params: PyTree, opt_state: PyTree, rest: PyTree) -> None:
        """Write restored arrays into the variables of the model and the optimizer."""
        nnx.update(model, params, rest["model"])
        # optax's tuples as a State, which `update` takes; params and rest consist of States
        nnx.update(optimizer.opt_state, nnx.state(opt_state, **known))
        nnx.update(optimizer, rest["optimizer"])

    params, opt_state, rest = map(
        array_metadata.pure, (params, optimizer.opt_state, {"model": others, "optimizer": counts})
    )
    return Contents(optimizer.tx, params, opt_state, rest, optimizer.step[...], write)


def _of_train_state(state: PyTree) -> Contents:
    rest = {
        field.name: getattr(state, field.name)
        for field in dataclasses.fields(state)
        if field.metadata.get("pytree_node", True) and field.name not in ("params", "opt_state")
    }
    params, fp8 = state.params, isinstance(state.params, Mapping) and _FP8 in state.params
    if fp8:
        params, rest[_FP8] = params["params"], params[_FP8]

    def write(params: PyTree, opt_state: PyTree, rest: PyTree) -> PyTree:
        if fp8:
            params = type(state.params)({"params": params, _FP8: rest.pop(_FP8)})
        return state.replace(params=params, opt_state=opt_state, **rest)

    return Contents(state.tx, params, state.opt_state, rest, state.step, write)


def _is_key(leaf: PyTree) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _array(leaf: PyTree) -> PyTree:
    """Return a leaf as an array; for random keys, a dict from their dtype to their data."""
    if not _is_key(leaf):
        return leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
    abstract = isinstance(leaf, jax.ShapeDtypeStruct)
    data = jax.random.key_data
    return {str(leaf.dtype): jax.eval_shape(data, leaf) if abstract else data(leaf)}


def _as_key(leaf: PyTree, restored: PyTree) -> PyTree:
    if not _is_key(leaf):
        return restored
    kinds: list[PyTree] = []  # `key_impl` takes no ShapeDtypeStruct
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), leaf)
    return jax.random.wrap_key_data(*restored.values(), impl=kinds[0])
