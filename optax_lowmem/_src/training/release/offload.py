"""The optimizer's state in host memory for gradient release, with one array per layer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Sharding, SingleDeviceSharding

from optax_lowmem._src.arrays import host, trees
from optax_lowmem._src.arrays.host import PerLayer, Stage
from optax_lowmem._src.training.release import room
from optax_lowmem._src.training.release.model import Layered, take_apart
from optax_lowmem._src.training.release.optimizer import Optimizer
from optax_lowmem._src.training.release.update import read_layer

read_layer_stage = Stage(read_layer, static_argnums=2)


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
      params: the parameters, on one device, or their shapes.
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
    engine, here = optimizer.engine, SingleDeviceSharding(device)
    there = SingleDeviceSharding(device, memory_kind=memory_kind)
    whole = jax.eval_shape(tx.init, params) if state is None else state
    inner = optimizer.inner(whole)
    stacks = take_apart(params, tuple(model.layers)).stacks.values()
    layers = {i: stack.layers for stack in stacks for i in stack.indices}
    fields = engine.fields()
    columns = {name: jax.tree.leaves(getattr(inner, name)) for name in fields}

    def place(x: Any, number: int = 1) -> Sharding:
        return there if x.ndim and trees.nbytes(x) >= number * min_bytes else here

    if there.memory_kind == host.PINNED:
        rows = [(x, layers.get(i, 1)) for xs in columns.values() for i, x in enumerate(xs)]
        moving = [x for x, number in rows if place(x, number) is there]
        room.check_room(trees.nbytes(moving), "the optimizer's state", device)

    def moved(x: Any) -> Any:
        # one at a time, for memory
        return jax.block_until_ready(host.put(x, place(x), may_alias=False))

    def start(params: optax.Params) -> Any:
        new, firsts = optimizer.inner(tx.init(params)), {}
        for name in fields:
            firsts[name] = jax.tree.leaves(getattr(new, name))
            for i, number in layers.items():
                if firsts[name][i].ndim:
                    firsts[name][i] = read_layer(firsts[name][i], jnp.int32(0), number)
        return new.count, new.seed, firsts

    def cut(x: Any, number: int) -> PerLayer:
        if state is None:  # the first layer, and all are equal
            return PerLayer(moved(x) for _ in range(number))
        on_device = host.put(x, here)
        pieces = [moved(read_layer_stage(on_device, np.int32(i), number)) for i in range(number)]
        if isinstance(x, jax.Array):
            x.delete()
        return PerLayer(pieces)

    count, seed = inner.count, inner.seed
    if state is None:
        started = jax.jit(start)
        shapes = host.has_shapes(params)
        count, seed, columns = started.eval_shape(params) if shapes else started(params)
    for column in columns.values():
        for i, x in enumerate(column):
            column[i] = cut(x, layers[i]) if i in layers and x.ndim else moved(x)
    count, seed = host.put((count, seed), here)
    return optimizer.outer(whole, engine.of_columns(count, seed, columns, params))
