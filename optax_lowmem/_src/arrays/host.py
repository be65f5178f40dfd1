"""Arrays in host memory, and work that is dispatched ahead of their copies."""

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding

from optax_lowmem._src.arrays.typing import PyTree

PINNED = "pinned_host"
Item = TypeVar("Item")
AHEAD = 2  # stages that are dispatched and have not ended


@jax.tree_util.register_pytree_with_keys_class
class PerLayer:
    """An array that is stored as one array per layer, along axis 0, in `parts`."""

    def __init__(self, parts: Iterable[PyTree]):
        self.parts = tuple(parts)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[PyTree, PyTree]], None]:
        return [(jax.tree_util.SequenceKey(i), x) for i, x in enumerate(self.parts)], None

    @classmethod
    def tree_unflatten(cls, _: None, parts: Iterable[PyTree]) -> "PerLayer":
        return cls(parts)

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the array."""
        length, *shape = self.parts[0].shape
        return jax.ShapeDtypeStruct((len(self.parts) * length, *shape), self.parts[0].dtype)


def is_per_layer(node: object) -> bool:
    """Return whether a node is an array stored layer by layer."""
    return isinstance(node, PerLayer)


def like(tree: PyTree) -> PyTree:
    """Return a tree with the shape of the whole array in place of each `PerLayer`."""
    return jax.tree.map(lambda x: x.like if is_per_layer(x) else x, tree, is_leaf=is_per_layer)


def fetched(x: Any) -> np.ndarray:
    """Return an array of NumPy; unlike `np.asarray(x)`, a JAX array does not keep it."""
    if isinstance(x, jax.Array):
        x = jax.make_array_from_single_device_arrays(x.shape, x.sharding, [x])
    return np.asarray(x)


def stacked(tree: PyTree) -> PyTree:
    """Return parameters, or a state, with one array for all layers of a stack.

    Args:
      tree: what `release.offload_weights`, `release.offload` or a training step returned.

    Returns:
      The tree that `lowmem.init` made, with copies of stacks in the memory where their layers are.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem import release
      >>> model = release.Layered(
      ...     first=lambda rest, batch: batch,
      ...     layers={"layers": lambda weights, rest, x, batch: x @ weights["w"]},
      ...     last=lambda rest, x, batch: jnp.mean(x**2),
      ... )
      >>> params = release.offload_weights(model, {"layers": {"w": jnp.ones((3, 4, 4))}})
      >>> release.stacked(params)["layers"]["w"].shape
      (3, 4, 4)
    """

    def whole(node: PyTree) -> PyTree:
        if not is_per_layer(node):
            return node
        array = np.concatenate([fetched(x) for x in node.parts])
        # one at a time, for memory
        return jax.block_until_ready(jax.device_put(array, node.parts[0].sharding))

    return jax.tree.map(whole, tree, is_leaf=is_per_layer)


def is_on_host(x: PyTree) -> bool:
    """Return whether an array is in another memory than that of its device."""
    if isinstance(x, jax.core.Tracer):
        return jax.typeof(x).memory_space == jax.memory.Space.Host
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, Sharding):
        return False
    return sharding.memory_kind not in (None, _default_kind(sharding))


def _default_kind(sharding: Sharding) -> str:
    device: Any = next(iter(sharding.device_set))
    return str(device.default_memory().kind)


def brought(tree: PyTree) -> PyTree:
    """Copy the arrays that are in host memory to their devices."""

    def place(x: jax.Array) -> Sharding:
        return x.sharding.with_memory_kind(_default_kind(x.sharding))

    return jax.device_put(tree, jax.tree.map(place, tree))


def put(tree: PyTree, shardings: PyTree, **how: Any) -> PyTree:
    """Copy a tree of arrays, as `jax.device_put` does; of shapes, return those of the copies."""
    if not has_shapes(tree):
        return jax.device_put(tree, shardings, **how)
    shardings = jax.tree.broadcast(shardings, tree)
    return jax.tree.map(lambda x, sharding: x.update(sharding=sharding), tree, shardings)


def put_back(tree: PyTree, before: PyTree) -> PyTree:
    """Copy arrays to where those of another tree are."""
    return put(tree, jax.tree.map(lambda x: x.sharding, before))


def device_of(tree: PyTree) -> jax.Device:
    """Return the device of all arrays of a tree; raises if there are several."""
    shardings = (getattr(x, "sharding", None) for x in jax.tree.leaves(tree))
    devices = {d for s in shardings if isinstance(s, Sharding) for d in s.device_set}
    if len(devices) > 1:
        raise ValueError(
            f"state in host memory is streamed to one device, and these arrays are on "
            f"{len(devices)}: shard the state over them instead (sharding.state_shardings)."
        )
    return devices.pop() if devices else jax.local_devices()[0]


# ---- shapes in place of arrays -------------------------------------------------------------------


def shape_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the shape of an array; it has a sharding if the array is committed to a device."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    kind, sharding = jax.typeof(x), x.sharding if getattr(x, "committed", False) else None
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding, weak_type=kind.weak_type)


def without_memory_space(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return a shape without its memory space, with which JAX 0.12 traces."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)


def has_shapes(tree: PyTree) -> bool:
    """Return whether a tree has shapes in place of arrays."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))


class Stage:
    """A jitted function; given shapes, as `shape_of` returns them, it compiles and returns shapes.

    Later calls with such arrays do not compile. At least one committed argument must be used by the
    function, if there are any: JAX ignores unused ones when it commits the results.
    """

    def __init__(self, function: Callable[..., PyTree], **how: Any):
        # without `keep_unused`, with which JAX never frees a compiled program (no upstream issue
        # known; jax 0.12.0)
        self.jitted = jax.jit(function, **how)

    def __call__(self, *args: PyTree) -> PyTree:
        if not has_shapes(args):
            return self.jitted(*args)
        shapes = self.jitted.eval_shape(*args)
        shardings = self.jitted.lower(*args).compile().output_shardings  # which JAX caches
        committed = any(getattr(x, "sharding", None) is not None for x in jax.tree.leaves(args))
        return put(shapes, shardings) if committed else shapes


# ---- work that is dispatched ahead ---------------------------------------------------------------


class RunAhead:
    """Bounds the number of stages that are dispatched and have not ended.

    Memory of the device is allocated when work is dispatched, not when it runs.
    """

    def __init__(self) -> None:
        self._stages: collections.deque[PyTree] = collections.deque()

    def dispatched(self, results: PyTree, consumed: PyTree = ()) -> None:
        """Wait for the stage before the one that was just dispatched, then delete its `consumed`.

        `results` are arrays of the new stage that are not donated to a later stage.
        """
        self._stages.append((results, consumed))
        if len(self._stages) == AHEAD:
            self._wait()

    def drain(self) -> None:
        """Wait for all stages, and delete what they consumed."""
        while self._stages:
            self._wait()

    def _wait(self) -> None:
        results, consumed = self._stages.popleft()
        jax.block_until_ready(results)
        for x in jax.tree.leaves(consumed):
            if isinstance(x, jax.Array):
                x.delete()


def ahead(items: Iterable[Item], bring: Callable[[Item], PyTree]) -> Iterator[PyTree]:
    """Yield bring(item) for each item, called while the one before is in use."""
    coming: collections.deque[PyTree] = collections.deque()
    for item in items:
        coming.append(bring(item))
        if len(coming) == AHEAD:
            yield coming.popleft()
    yield from coming
