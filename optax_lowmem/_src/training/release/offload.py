"""State and weights in host memory for gradient release, with one array per layer."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Sharding, SingleDeviceSharding

from optax_lowmem._src.arrays import host, trees
from optax_lowmem._src.arrays.host import PerLayer
from optax_lowmem._src.training.release import room
from optax_lowmem._src.training.release.model import Layered, layers_of, named_nodes, take_apart
from optax_lowmem._src.training.release.optimizer import Optimizer
from optax_lowmem._src.training.release.update import read_layer


def offload_weights(model: Layered, params: optax.Params, *, min_bytes: int = 2**20) -> Any:
    """Return parameters for `train_step(offload=True)` in host memory, with one array per layer.

    They may also be frozen ones, with matrices in NF4 (`layers.nf4`).

    Args:
      model: the model.
      params: the parameters, in any memory, of JAX or NumPy, or their shapes; the JAX arrays of
        stacks are deleted as they are copied. A stack may also be an iterator of its layers, trees
        without the layer axis: each is copied before the next is made, so that the stack never
        exists on the device.
      min_bytes: smaller arrays are copied to the device.

    Returns:
      The parameters, which `train_step`, `offload` and `checkpoint.save` take, or their shapes for
      shapes. `checkpoint.restore` returns ordinary ones.

    Raises:
      MemoryError: if host memory is too small; says how much is needed. Nothing is copied then.
      ValueError: for parameters on several devices; for a stack that is not there.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem import release
      >>> model = release.Layered(
      ...     first=lambda rest, batch: batch,
      ...     layers={"layers": lambda weights, rest, x, batch: x @ weights["w"]},
      ...     last=lambda rest, x, batch: jnp.mean(x**2),
      ... )
      >>> layers = ({"w": jnp.full((4, 4), i)} for i in range(3))
      >>> params = release.offload_weights(model, {"layers": layers}, min_bytes=0)
      >>> first, *_ = params["layers"]["w"].parts
      >>> first.shape, first.sharding.memory_kind
      ((1, 4, 4), 'pinned_host')
    """
    nodes, treedef = named_nodes(params, tuple(model.layers))
    given = [node for _, node in nodes if not isinstance(node, Iterator)]
    device = host.device_of(given)
    place = _places(device, host.PINNED, min_bytes)
    room.check_room(trees.nbytes(given), "a copy of the weights", device)

    def move(path: str, node: Any) -> Any:
        if path not in model.layers:
            return _moved(node, place(node))
        if not isinstance(node, Iterator):
            number = layers_of(path, node)
            return jax.tree.map(lambda x: _cut(x, number, place), node)
        rows = [jax.tree.map(lambda x: _moved(x[None], place(x)), layer) for layer in node]
        return jax.tree.map(lambda *parts: PerLayer(parts), *rows)

    return treedef.unflatten([move(path, node) for path, node in nodes])


def offload(
    tx: optax.GradientTransformation,
    model: Layered,
    params: optax.Params,
    state: optax.OptState | None = None,
    *,
    memory_kind: str = host.PINNED,
    min_bytes: int = 2**20,
) -> Any:
    """Return a state for `train_step(offload=True)`: in host memory, with one array per layer.

    Args:
      tx: the optimizer, as in `train_step`.
      model: the model.
      params: the trained parameters, on one device or of `offload_weights`, or their shapes.
      state: the state to move, as `lowmem.init`, `tx.init` and `checkpoint.restore` return it, in
        any memory; the arrays of stacks are deleted as they are copied. None makes the state of
        `tx.init(params)` layer by layer: it never exists on the device.
      memory_kind: "pinned_host", or "device" to keep the state on the device (for comparison).
      min_bytes: smaller arrays stay on the device.

    Returns:
      The state, or its shapes for shapes. `checkpoint.save` takes it and writes the files of the
      ordinary state, so that a run may be resumed with or without `offload`; it needs the state's
      size of host memory again while it saves.

    Raises:
      MemoryError: if host memory is too small; says how much is needed. Nothing is copied then.
      ValueError: for parameters on several devices, and as `train_step`.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> from optax_lowmem import release
      >>> model = release.Layered(
      ...     first=lambda rest, batch: batch,
      ...     layers={"layers": lambda weights, rest, x, batch: x @ weights["w"]},
      ...     last=lambda rest, x, batch: jnp.mean(x**2),
      ... )
      >>> params = {"layers": {"w": jnp.ones((3, 4, 4))}}
      >>> state = release.offload(lowmem.flash_adamw(1e-3), model, params, min_bytes=0)
      >>> first, *_ = state.mu["layers"]["w"].parts
      >>> first.shape, first.sharding.memory_kind
      ((1, 4, 4), 'pinned_host')
    """
    optimizer, device = Optimizer.of(tx), host.device_of(params)
    engine, shapes = optimizer.engine, host.has_shapes(params)
    place, params = _places(device, memory_kind, min_bytes), host.like(params)
    whole = jax.eval_shape(tx.init, params) if state is None else state
    inner = optimizer.inner(whole)
    # those that are frozen are not in the parameters
    stacks = take_apart(params, tuple(model.layers), some=True).stacks.values()
    layers = {i: stack.layers for stack in stacks for i in stack.indices}
    fields = engine.fields()
    columns = {name: jax.tree.leaves(getattr(inner, name)) for name in fields}
    if memory_kind == host.PINNED:
        rows = [(x, layers.get(i, 1)) for xs in columns.values() for i, x in enumerate(xs)]
        moving = [x for x, number in rows if place(x, number).memory_kind == memory_kind]
        room.check_room(trees.nbytes(moving), "the optimizer's state", device)

    def start() -> Any:
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params)
        new, firsts = optimizer.inner(tx.init(zeros)), {}
        for name in fields:
            firsts[name] = jax.tree.leaves(getattr(new, name))
            for i, number in layers.items():
                if firsts[name][i].ndim:
                    firsts[name][i] = read_layer(firsts[name][i], jnp.int32(0), number)
        return new.count, new.seed, firsts

    count, seed = inner.count, inner.seed
    if state is None:
        count, seed, columns = jax.jit(start).eval_shape() if shapes else jax.jit(start)()
    for column in columns.values():
        for i, x in enumerate(column):
            if i not in layers or not x.ndim:
                column[i] = _moved(x, place(x))
            elif state is None:  # the first layer, and all are equal
                column[i] = PerLayer(_moved(x, place(x)) for _ in range(layers[i]))
            else:
                column[i] = _cut(x, layers[i], place)
    count, seed = host.put((count, seed), SingleDeviceSharding(device))
    return optimizer.outer(whole, engine.of_columns(count, seed, columns, params))


def _places(device: jax.Device, memory_kind: str, min_bytes: int) -> Callable[..., Sharding]:
    """Return (array, parts) -> where a part of it is kept: small ones on the device."""
    here = SingleDeviceSharding(device)
    there = SingleDeviceSharding(device, memory_kind=memory_kind)
    return lambda x, number=1: there if x.ndim and trees.nbytes(x) >= number * min_bytes else here


def _moved(x: Any, sharding: Sharding) -> Any:
    # one at a time, for memory
    return jax.block_until_ready(host.put(x, sharding, may_alias=False))


def _cut(x: Any, number: int, place: Callable[..., Sharding]) -> PerLayer:
    """Copy the layers of an array one by one, through host memory, and delete it."""
    size, sharding = x.shape[0] // number, place(x, number)
    if isinstance(x, jax.ShapeDtypeStruct):
        part = x.update(shape=(size, *x.shape[1:]), sharding=sharding)
        return PerLayer([part] * number)
    array = host.fetched(x)
    parts = [_moved(array[i * size :][:size], sharding) for i in range(number)]
    if isinstance(x, jax.Array):
        x.delete()
    return PerLayer(parts)
