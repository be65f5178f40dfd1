"""Arrays in host memory: one per layer, and whether there is room for them."""

import collections
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

PINNED = "pinned_host"
Item = TypeVar("Item")
_AHEAD = 2  # stages that are dispatched and have not ended
_GIB = 2**30
_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_DEFAULT_LIMIT = 64  # XLA's


@jax.tree_util.register_pytree_with_keys_class
class PerLayer:
    """An array that is stored as one array per layer, along axis 0, in `parts`."""

    def __init__(self, parts: Iterable[Any]):
        self.parts = tuple(parts)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], None]:
        """Flatten, with the layers' indices as keys."""
        return [(jax.tree_util.SequenceKey(i), x) for i, x in enumerate(self.parts)], None

    @classmethod
    def tree_unflatten(cls, _: None, parts: Iterable[Any]) -> "PerLayer":
        """Rebuild the node."""
        return cls(parts)

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the array."""
        length, *shape = self.parts[0].shape
        return jax.ShapeDtypeStruct((len(self.parts) * length, *shape), self.parts[0].dtype)


def is_per_layer(node: object) -> bool:
    """Return whether a node is an array stored layer by layer."""
    return isinstance(node, PerLayer)


def stacked(tree: Any) -> Any:
    """Return a tree with each `PerLayer` as one array, in the memory of its parts."""

    def whole(node: Any) -> Any:
        if not is_per_layer(node):
            return node
        there = node.parts[0].sharding
        here = SingleDeviceSharding(device_of(node))
        array = _concatenated(jax.device_put(list(node.parts), here))
        return jax.block_until_ready(jax.device_put(array, there))  # one at a time, for memory

    return jax.tree.map(whole, tree, is_leaf=is_per_layer)


_concatenated = jax.jit(jnp.concatenate)


def stacked_shapes(tree: Any) -> Any:
    """Return a tree with each `PerLayer` as shape and dtype of the whole array."""
    return jax.tree.map(lambda x: x.like if is_per_layer(x) else x, tree, is_leaf=is_per_layer)


def is_on_host(x: Any) -> bool:
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


def brought(tree: Any) -> Any:
    """Copy the arrays that are in host memory to their devices."""

    def place(x: jax.Array) -> Sharding:
        return x.sharding.with_memory_kind(_default_kind(x.sharding))

    return jax.device_put(tree, jax.tree.map(place, tree))


def put_back(tree: Any, before: Any) -> Any:
    """Copy arrays to where those of another tree are."""
    return jax.device_put(tree, jax.tree.map(lambda x: x.sharding, before))


def copied(tree: Any, sharding: Sharding) -> Any:
    """Copy arrays to another memory, which may be under way when this returns."""
    return jax.device_put(tree, sharding, may_alias=False)


def device_of(tree: Any) -> jax.Device:
    """Return the device of all arrays of a tree; raises if there are several."""
    shardings = (getattr(x, "sharding", None) for x in jax.tree.leaves(tree))
    devices = {d for s in shardings if isinstance(s, Sharding) for d in s.device_set}
    if len(devices) > 1:
        raise ValueError(
            f"state in host memory is streamed to one device, and these arrays are on "
            f"{len(devices)}: shard the state over them instead (sharding.state_shardings)."
        )
    return devices.pop() if devices else jax.local_devices()[0]


# ---- work that is dispatched ahead ---------------------------------------------------------------


class RunAhead:
    """Bounds the number of stages that are dispatched and have not ended.

    Memory of the device is allocated when work is dispatched, not when it runs.
    """

    def __init__(self) -> None:
        self._stages: collections.deque[Any] = collections.deque()

    def add(self, results: Any, consumed: Any = ()) -> None:
        """Wait for the stage before the one that was just dispatched, then delete its `consumed`.

        `results` are arrays that the new stage makes, and that no other takes the place of.
        """
        self._stages.append((results, consumed))
        if len(self._stages) == _AHEAD:
            results, consumed = self._stages.popleft()
            jax.block_until_ready(results)
            for x in jax.tree.leaves(consumed):
                x.delete()


def ahead(items: Iterable[Item], bring: Callable[[Item], Any]) -> Iterator[Any]:
    """Yield bring(item) for each item, called while the one before is in use."""
    coming: collections.deque[Any] = collections.deque()
    for item in items:
        coming.append(bring(item))
        if len(coming) == _AHEAD:
            yield coming.popleft()
    yield from coming


# ---- room ----------------------------------------------------------------------------------------


def nbytes(tree: Any) -> int:
    """Return the bytes of a tree of arrays or shapes."""
    return sum(int(np.prod(x.shape)) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def free_bytes() -> int | None:
    """Return the free memory of the machine, or of the control group; None if unknown."""
    found = []
    info = _read("/proc/meminfo")
    for line in (info or "").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(1024 * int(line.split()[1]))
    for limit, used, inactive in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        most, now = _read(f"/sys/fs/cgroup/{limit}"), _read(f"/sys/fs/cgroup/{used}")
        if most is None or now is None or not most.strip().isdigit():
            continue
        stat = _read(f"/sys/fs/cgroup/{Path(used).parent}/memory.stat") or ""
        rows = dict(line.split() for line in stat.splitlines())
        found.append(int(most) - int(now) + int(rows.get(inactive, 0)))  # files' pages are freed
    return min(found, default=None)


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return None


def check_room(needed: int, what: str, device: jax.Device, pinned: int = 0) -> None:
    """Raise if host memory is too small for `needed` bytes, beside those `pinned` already."""
    needs = f"{what} needs {needed / _GIB:.2f} GiB of pinned host memory"
    free = free_bytes()
    if free is not None and needed > free:
        raise MemoryError(f"{needs}, and {free / _GIB:.2f} GiB are free on this host.")
    if device.platform != "gpu":
        return
    limit = float(os.environ.get(_LIMIT, _DEFAULT_LIMIT))
    if needed + pinned > limit * _GIB:
        raise MemoryError(
            f"{needs} beside {pinned / _GIB:.2f} GiB in use, and XLA pins {limit:g} GiB at most: "
            f"set {_LIMIT}={-(-(needed + pinned) * 9 // (8 * _GIB))} in the environment before JAX "
            "starts."
        )
