"""Save and restore checkpoints, by path or with the user's `CheckpointManager`."""

import functools
import math
import operator
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Sharding

from optax_lowmem._src.arrays import host, trees
from optax_lowmem._src.arrays.sharding import replicated, state_sharding
from optax_lowmem._src.arrays.typing import PyTree, Shaped
from optax_lowmem._src.optim import context
from optax_lowmem._src.training.checkpoint import checksums, files, objects
from optax_lowmem._src.training.checkpoint.description import (
    array_differences,
    check_version,
    compare,
    describe,
    dtypes_and_shapes,
    metadata,
)
from optax_lowmem._src.training.checkpoint.files import (
    DESCRIPTION,
    PARAMS,
    STATE,
    StrPath,
    open_manager,
)

# ---- Orbax saves no arrays of size 0, no array without a name, no empty items --------------------

_BARE = "array"  # the name of an array that is the whole tree
_dotted = functools.partial(jax.tree_util.keystr, simple=True, separator=".")


def packed(tree: object) -> PyTree:
    """Return a tree without its arrays of size 0; None if no array is left.

    Raises if two arrays have the same name, which Orbax makes by joining keys with dots.
    """
    trees.named_leaves(tree, _dotted, "in an Orbax checkpoint")
    kept = jax.tree.map(lambda leaf: None if 0 in jnp.shape(leaf) else leaf, tree)
    if not jax.tree.leaves(kept):
        return None
    return {_BARE: kept} if jax.tree_util.all_leaves([kept]) else kept


def unpacked(restored: object, target: object) -> PyTree:
    """Return the tree of `target`, abstract arrays with shardings, from its packed form."""
    arrays = iter(jax.tree.leaves(restored))

    def of_leaf(like: PyTree) -> PyTree:
        empty = 0 in like.shape
        return jnp.zeros(like.shape, like.dtype, device=like.sharding) if empty else next(arrays)

    return jax.tree.map(of_leaf, target)


# ---- shardings of the restored parameters and state ----------------------------------------------

Shardings = PyTree  # a Sharding, or a tree of them, a prefix of the state's


def targets(
    params_like: PyTree,
    state_like: PyTree,
    shardings: Shardings,
    decisions: Sequence[context.Decision],
) -> tuple[PyTree, PyTree]:
    """Return abstract parameters and state, every leaf with its sharding.

    Parameters without a sharding are replicated over the devices of those that have one, or go to
    the default device. `shardings` are those of the state, or None.
    """
    here = replicated(params_like)
    params = jax.tree.map(
        lambda p: _shape_with_sharding(p, getattr(p, "sharding", None) or here), params_like
    )
    leaves, treedef = jax.tree.flatten(state_like)
    if shardings is None:
        of_leaves = _shardings_like_parameters(params, state_like, here, decisions)
    else:
        of_leaves = trees.broadcast_prefix("the tree of shardings", shardings, state_like)
        for (path, _), sharding in zip(trees.named_leaves(state_like), of_leaves, strict=True):
            if not isinstance(sharding, Sharding):
                raise TypeError(
                    f"the sharding of state '{path}' is {sharding!r}: pass a jax.sharding.Sharding,"
                    " such as NamedSharding(mesh, spec)."
                )
    state = [_shape_with_sharding(leaf, s) for leaf, s in zip(leaves, of_leaves, strict=True)]
    return params, jax.tree.unflatten(treedef, state)


def _shape_with_sharding(leaf: Shaped, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype, sharding=sharding)


def _shardings_like_parameters(
    params: PyTree, state: PyTree, here: Sharding, decisions: Sequence[context.Decision]
) -> Sequence[Sharding]:
    """Return the sharding of each array of a state: that of its parameter, otherwise `here`.

    An array belongs to a parameter if its path ends with the parameter's, and its shape is that of
    the parameter or of its codes.
    """
    known = dict(trees.named_leaves(params))
    narrow = {}
    for d in decisions:
        if d.codec is None or d.group_size is None or d.codec.bits == 8:
            continue
        if d.block is not None and not d.block.elementwise:
            continue
        p = known.get(d.path)
        if p is not None and p.shape == d.shape:
            shape = d.codec.storage(d.shape, d.group_size).codes.shape
            narrow[d.path, shape] = state_sharding(
                d.path, d.shape, p.sharding, shape, (d.group_size,)
            )
    results = []
    for path, leaf in trees.named_leaves(state):
        parts = path.split("/")
        names = ["/".join(parts[at:]) for at in range(len(parts))]
        owners = (known.get(name) for name in names)
        owner = next((p for p in owners if p is not None and p.shape == leaf.shape), None)
        of_codes = (narrow[name, leaf.shape] for name in names if (name, leaf.shape) in narrow)
        results.append(next(of_codes, here) if owner is None else owner.sharding)
    return results


if TYPE_CHECKING:
    import orbax.checkpoint as ocp


def args(
    tx: optax.GradientTransformation, params: optax.Params, state: optax.OptState
) -> dict[str, PyTree]:
    """Return the items of a checkpoint, for your `CheckpointManager`.

    Args:
      tx: the optimizer.
      params: its parameters.
      state: its state.

    Returns:
      `ocp.args` by item name: `params`, `opt_state` (unless they have no arrays) and
      `optax_lowmem`, the description of the format. `restore_from` reads them.

    Raises:
      ImportError: without Orbax.
      ValueError: if the state is not one of `tx` for these parameters.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> tx = lowmem.flash_adamw(1e-3)
      >>> params, state = lowmem.init(tx, {"w": jnp.ones((64, 64))})
      >>> sorted(lowmem.checkpoint.args(tx, params, state))
      ['opt_state', 'optax_lowmem', 'params']

    With a manager and items of yours:
    `manager.save(step, args=ocp.args.Composite(**args(tx, params, state), data=...))`.
    """
    ocp, (params, state) = files.orbax(), host.stacked((params, state))
    described = metadata(tx, params)
    for problem in array_differences(
        "state", dtypes_and_shapes(state), described["state"], "Save what tx.init made."
    ):
        raise ValueError(f"the state is not one of this optimizer for these params: {problem}")
    trees = {PARAMS: packed(params), STATE: packed(state)}
    arrays = {name: ocp.args.StandardSave(tree) for name, tree in trees.items() if tree is not None}
    return {**arrays, DESCRIPTION: ocp.args.JsonSave(described)}


def save(
    path: StrPath,
    tx: object,
    params: PyTree = None,
    state: optax.OptState = None,
    step: int | None = None,
    *,
    keep: int | None = None,
) -> None:
    """Save parameters and state as one step of an Orbax `CheckpointManager` directory.

    Of Flax: `save(path, model, optimizer)` saves an NNX model and its `nnx.Optimizer`, or ours;
    `save(path, train_state)` a Linen `TrainState` or an `nnx.ModelAndOptimizer`; with random
    streams, statistics and frozen parameters.

    It returns when the step is complete, so a training step may then donate the arrays. A step gets
    its final name only when it is complete: an interrupted save is never restored, and the next
    save removes it. Every file has a checksum, which `restore` verifies. Only one save at a time
    may write to a directory.

    Args:
      path: directory of all steps; created if it does not exist.
      tx: the optimizer; or an NNX model, or a `TrainState`.
      params: its parameters; or the model's optimizer.
      state: its state.
      step: number of the step; by default, of Flax's objects, the number of steps they have taken.
      keep: number of steps to keep, 1 or more: those with the highest numbers. None keeps all.

    Raises:
      BlockingIOError: if another save, of any process or thread, writes to this directory.
      ImportError: without Orbax.
      ValueError: if the step exists already or is older than all steps that `keep` keeps, if `step`
        or `keep` is not such a number, or if the state is not one of `tx`.

    Speed: the checksums take 6 to 8 % of the time (0.6 GB into the page cache, 2 cores).

    Memory: all arrays of a GPU are copied to the host at once. They are compressed and written at
    most 2 GB at a time, or one larger shard.

    Size: that of weights and state in memory, 5.2 bytes per parameter for `flash_adamw` with bf16
    weights (`optax.adamw` in f32: 12), before compression by Orbax. A state of `release.offload` is
    saved as the ordinary one, and takes its size of host memory again meanwhile.

    Example:
      >>> import jax.numpy as jnp, tempfile, optax_lowmem as lowmem
      >>> tx = lowmem.flash_adamw(1e-3)
      >>> params, state = lowmem.init(tx, {"w": jnp.ones((64, 64))})
      >>> with tempfile.TemporaryDirectory() as path:
      ...     lowmem.checkpoint.save(path, tx, params, state, step=0)
      ...     lowmem.checkpoint.latest_step(path)
      0
    """
    if not hasattr(tx, "init"):
        flax_objects = objects.contents(tx, params)
        tx, params, state = flax_objects.tx, flax_objects.params, flax_objects.state
        step = int(flax_objects.count) if step is None else step
    step = _checked_integer("step", step, 0)
    keep = None if keep is None else _checked_integer("keep", keep, 1, "or None, which keeps all, ")
    ocp = files.orbax()
    with objects.advising(params, state):
        items = args(tx, params, state)
    arrays = jax.tree.leaves([items[name].item for name in (PARAMS, STATE) if name in items])
    largest = max(map(_shard_bytes, arrays), default=0)
    items[DESCRIPTION] = ocp.args.JsonSave({**items[DESCRIPTION].item, "checksums": checksums.FORM})
    with files.sole_writer(path):
        files.remove_temporary(path)
        try:
            _save(path, step, keep, ocp.args.Composite(**items), largest)
        finally:  # threads of an earlier failed save may have written since
            files.remove_temporary(path)


def _shard_bytes(x: PyTree) -> int:
    """Compute the bytes of a device's part of an array."""
    shape = x.sharding.shard_shape(x.shape) if isinstance(x, jax.Array) else x.shape
    return math.prod(shape) * int(x.dtype.itemsize)


def _save(path: StrPath, step: int, keep: int | None, items: PyTree, largest: int) -> None:
    """Save a step, and delete all but the `keep` highest; `largest` is a shard's bytes."""
    with open_manager(path, largest, enable_async_checkpointing=False) as manager:
        complete = files.steps(manager)
        if step in complete:
            raise ValueError(f"{path} has a checkpoint of step {step} already: save another step.")
        if step in files.folders(manager):
            raise ValueError(
                f"{path} has a folder of step {step} that is not a complete checkpoint: remove "
                "it, or save another step."
            )
        newer = sorted(old for old in complete if old > step)
        if keep is not None and len(newer) >= keep:
            raise ValueError(
                f"step {step} is older than the steps {newer[-keep:]} in {path}, which "
                f"keep={keep} keeps: save a newer step, or keep more."
            )
        manager.save(step, args=items, force=True)
        if keep is not None:
            for old in sorted(files.steps(manager))[:-keep]:
                manager.delete(old)


def _checked_integer(name: str, value: PyTree, least: int, other: str = "") -> int:
    """Return a number of steps as an int; raise unless it is an integer of at least `least`."""
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        # if a state is passed as the step, its arrays are not fetched for the message
        arrays = any(map(np.ndim, jax.tree.leaves(value)))
        got = f"a {type(value).__name__}" if arrays else repr(value)
        raise ValueError(f"{name} must be a whole number from {least} up, {other}got {got}")
    return number


def latest_step(path: StrPath) -> int | None:
    """Return the newest complete step in a directory that `save` wrote, or None.

    Args:
      path: directory of all steps.
    """
    if not files.is_remote(path) and not os.path.isdir(path):
        return None
    with open_manager(path, create=False) as manager:
        return max(files.steps(manager), default=None)


def restore(
    path: StrPath,
    tx: object,
    params_like: PyTree = None,
    *,
    step: int | None = None,
    shardings: Shardings = None,
) -> PyTree:
    """Restore parameters and state as `save` wrote them, bit for bit, on any mesh and devices.

    Of Flax: `restore(path, model, optimizer)` writes into these objects, onto the devices and with
    the shardings of their arrays; so does `restore(path, model_and_optimizer)`. A `TrainState` is
    not changed: `train_state = restore(path, train_state)`.

    Args:
      path: directory of all steps.
      tx: the optimizer to continue with; or a model or `TrainState` as was saved.
      params_like: the model's optimizer; or the parameters' shapes, dtypes and shardings: arrays
        or `jax.ShapeDtypeStruct`s, such as `jax.eval_shape` of the function that initialises them.
      step: step to restore; by default the newest complete one.
      shardings: of the state: a tree of `jax.sharding.Sharding`s or a prefix of it, such as one for
        all: `SingleDeviceSharding(device, memory_kind="pinned_host")` restores into host memory,
        for `release.offload`. By default arrays with a parameter's shape have its sharding, and the
        rest are replicated over the parameters' devices.

    Returns:
      (params, state); of NNX objects None, of a `TrainState` a new one.

    Raises:
      ImportError: without Orbax.
      ValueError: no complete step; another codec, group size, tree, shape or dtype (nothing is
        cast); a checkpoint that is truncated or damaged.

    Memory: on a CPU the peak is 1.4 to 1.8 times the size of the restored arrays.

    Example:
      >>> import jax.numpy as jnp, tempfile, optax_lowmem as lowmem
      >>> tx = lowmem.flash_adamw(1e-3)
      >>> params, state = lowmem.init(tx, {"w": jnp.ones((64, 64))})
      >>> with tempfile.TemporaryDirectory() as path:
      ...     lowmem.checkpoint.save(path, tx, params, state, step=7)
      ...     params, state = lowmem.checkpoint.restore(path, tx, params)
      >>> params["w"].dtype
      dtype(bfloat16)
    """
    flax_objects = None
    if not hasattr(tx, "init"):
        flax_objects = objects.contents(tx, params_like)
        tx, params_like = flax_objects.tx, flax_objects.params
        shardings = flax_objects.shardings if shardings is None else shardings
    with open_manager(path, create=False) as manager, objects.advising(params_like):
        result = restore_from(manager, tx, params_like, step=step, shardings=shardings)
    return result if flax_objects is None else flax_objects.put(*result)


def restore_from(
    manager: "ocp.CheckpointManager",
    tx: optax.GradientTransformation,
    params_like: optax.Params,
    *,
    step: int | None = None,
    shardings: Shardings = None,
) -> tuple[PyTree, PyTree]:
    """Restore as `restore`, from your `CheckpointManager` that saved the items of `args`.

    Args:
      manager: an `ocp.CheckpointManager`.
      tx: the optimizer to continue with.
      params_like: as in `restore`.
      step: as in `restore`.
      shardings: as in `restore`.

    Returns:
      (params, state).

    Raises:
      ValueError: as in `restore`.
    """
    ocp = files.orbax()
    complete = files.steps(manager)
    step = max(complete, default=None) if step is None else _checked_integer("step", step, 0)
    if step not in complete:
        which = "" if step is None else f" of step {step}"
        raise ValueError(
            f"{manager.directory} has no complete checkpoint{which}; it has the steps "
            f"{sorted(complete)}."
        )
    assert step is not None
    has_checksums = files.verify_checksums(manager, step)
    saved = files.description(manager, step)
    check_version(saved)
    if "checksums" in saved and not has_checksums:
        raise ValueError(
            f"step {step} in {manager.directory} was saved with checksums, but files "
            f"'{checksums.NAME}' are missing: restore another step or a copy."
        )
    state_like, decisions = context.dry_run(tx, params_like)
    compare(saved, describe(params_like, state_like, decisions))
    abstract = targets(params_like, state_like, shardings, decisions)
    expected = dict(zip((PARAMS, STATE), abstract, strict=True))
    stored = {n: tree for n, t in expected.items() if (tree := packed(t)) is not None}
    files.check_arrays(manager, step, stored)
    items = {name: ocp.args.StandardRestore(target) for name, target in stored.items()}
    result = files.read(manager, step, items) if items else {}
    params, state = (unpacked(result.get(name), target) for name, target in expected.items())
    return params, state
