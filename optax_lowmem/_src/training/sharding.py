"""Derive the shardings of an optimizer state from the shardings of the parameters."""

import functools
import math
import warnings
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_leaves_with_path, tree_map_with_path

from optax_lowmem._src.arrays import array_metadata, trees
from optax_lowmem._src.arrays.sharding import (
    mesh_of,
    named_sharding,
    sharding_leaves,
    state_sharding,
)
from optax_lowmem._src.arrays.shards import Shards, axes_of, divides, spec_of
from optax_lowmem._src.arrays.typing import PyTree, Shaped
from optax_lowmem._src.optim import context

Rules = Sequence[tuple[str, str | tuple[str, ...] | None]]  # logical name, mesh axes


def state_shardings(
    tx: optax.GradientTransformation,
    params: optax.Params,
    param_shardings: object = None,
    *,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    zero_axis: str | None = None,
    memory_kind: str | None = None,
) -> PyTree:
    """Return a sharding for every array of `tx.init(params)`.

    Codes, corrections and all other arrays with their parameter's shape use its sharding. So do
    scales and block-wise second moments, except that they are not sharded along an axis where a
    shard boundary would cut through a group or a head. All other arrays are replicated.

    Linen's `nn.get_partition_spec` of a whole `TrainState` works too, but does not know the mesh:
    there scales (0.19 bytes per parameter) are not sharded along the last axis, unless their number
    of groups is a multiple of 64 (2048 columns in groups of 32), which mesh axes of up to 64
    devices divide.

    Args:
      tx: any optax transformation, wrapped or not.
      params: the parameters that the optimizer gets, or their `jax.eval_shape`, optionally with
        Linen's metadata (`Partitioned`). For `lowmem.init` those that it returns, in bf16: the
        state of f32 parameters has no corrections.
      param_shardings: a tree like `params` of `NamedSharding` or `PartitionSpec` (None:
        replicated). By default the shardings of the arrays in `params`, or the axis names in their
        metadata.
      mesh: mesh of partition specs and axis names; by default that of `jax.set_mesh`.
      rules: (logical name, mesh axis or None) pairs, for metadata with logical names.
      zero_axis: a mesh axis over which the state is sharded although the parameters are not
        (ZeRO-1), along the first dimension that it divides.
      memory_kind: memory kind of the state's shardings, such as `pinned_host`; by default the
        device's.

    Returns:
      A tree of `NamedSharding` like `tx.init(params)`, without metadata; for `out_shardings` of
      `jax.jit(tx.init)`, `jax.device_put`, or an abstract target of a checkpoint.

    Raises:
      ValueError: for an axis that is not in the mesh, is used twice, or does not divide its
        dimension; for a parameter of unknown sharding.

    Warns:
      UserWarning: for shapes in f32 of sharded parameters that `lowmem.init` would store in bf16. A
        transformation with `Storage(master_weight_bits=None)` keeps no corrections: no warning.

    Example:
      >>> import jax, jax.numpy as jnp, optax_lowmem as lowmem
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> specs = {"w": jax.sharding.PartitionSpec("data")}
      >>> params = {"w": jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)}
      >>> tx = lowmem.flash_adamw(1e-3)
      >>> shardings = lowmem.sharding.state_shardings(tx, params, specs, mesh=mesh)
      >>> print(shardings.mu_scale["w"].spec)
      P('data', None)
    """
    boxed, params = params, array_metadata.unboxed(params)
    placed = _placed(boxed, params, param_shardings, mesh, rules)
    the_mesh = mesh_of(placed, mesh)
    if zero_axis is not None and zero_axis not in the_mesh.shape:
        raise ValueError(f"zero_axis={zero_axis!r}: the mesh has the axes {tuple(the_mesh.shape)}.")
    state, decisions = context.dry_run(tx, params)
    sizes: dict[str, set[int]] = {}
    for decision in decisions:
        if decision.group_size is not None:
            sizes.setdefault(decision.path, set()).add(decision.group_size)
    known, sharded = {}, []
    for (path, leaf), sharding in zip(tree_leaves_with_path(params), placed, strict=True):
        name, shape = trees.path_name(path), tuple(leaf.shape)
        groups = tuple(sizes.get(name, ()))
        whole = named_sharding(name, shape, sharding, the_mesh)
        if zero_axis is not None:
            whole = _with_zero(shape, whole, zero_axis, groups)
        sharded += [name] if any(whole.spec) else []
        known[path] = functools.partial(state_sharding, name, shape, whole, group_sizes=groups)

    _warn_of_f32(tx, params, sharded)

    def of_leaf(path: tuple[object, ...], leaf: Shaped) -> NamedSharding:
        of_parameter = _owner(path, known)
        spec = of_parameter(shape=tuple(leaf.shape)).spec if of_parameter else PartitionSpec()
        return NamedSharding(the_mesh, spec, memory_kind=memory_kind)

    return tree_map_with_path(of_leaf, state)


def _warn_of_f32(
    tx: optax.GradientTransformation, params: optax.Params, sharded: list[str]
) -> None:
    """Warn of f32 shapes, if `lowmem.init` would make corrections for sharded ones.

    f32 arrays are the parameters that the optimizer gets, so they need no warning.
    """
    leaves = jax.tree.leaves(params)
    abstract = all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    if not sharded or not abstract or any(leaf.dtype != jnp.float32 for leaf in floats):
        return
    in_bf16 = jax.eval_shape(lambda p: optax.tree.cast(p, jnp.bfloat16), params)
    _, decisions = context.dry_run(tx, in_bf16)
    split = [d.path for d in decisions if d.slot == "correction" and d.form and d.path in sharded]
    if split:
        warnings.warn(
            f"{trees.some_of(split)} {'is' if len(split) == 1 else 'are'} float32, for which "
            "tx.init makes no corrections. The state of lowmem.init has them, beside weights in "
            "bf16, and these shardings would replicate them. Pass the parameters of lowmem.init, "
            "or their shapes: jax.eval_shape(lambda p: lowmem.init(tx, p)[0], params).",
            UserWarning,
            stacklevel=3,
        )


def _with_zero(
    shape: tuple[int, ...], sharding: NamedSharding, zero_axis: str, group_sizes: tuple[int, ...]
) -> NamedSharding:
    """Add `zero_axis` to the first dimension where it divides both codes and scales."""
    axes = axes_of(sharding.spec, len(shape))
    if any(zero_axis in names for names in axes):
        return sharding
    units = [*[1] * (len(shape) - 1), math.lcm(*group_sizes)]
    for d, names in enumerate(axes):
        more = spec_of([*axes[:d], (*names, zero_axis), *axes[d + 1 :]])
        wider = NamedSharding(sharding.mesh, more)
        if divides(Shards.of(wider, len(shape)).parts[d], shape[d], units[d]):
            return wider
    return sharding


def _owner(path: tuple[object, ...], known: Mapping[tuple[object, ...], PyTree]) -> PyTree:
    """Return the value of the longest path in `known` that ends a state array's path, or None."""
    for start in range(len(path)):
        if path[start:] in known:
            return known[path[start:]]
    return known.get(())  # the parameters are a single array


def _placed(
    boxed: optax.Params, params: optax.Params, given: object, mesh: Mesh | None, rules: Rules | None
) -> list[PyTree]:
    """Return a NamedSharding, PartitionSpec or None (replicated) for each parameter."""
    if given is not None:
        return sharding_leaves(params, given)
    boxes = jax.tree.leaves(boxed, is_leaf=array_metadata.is_box)
    return [
        _declared_sharding(trees.path_name(path), box, leaf, mesh, rules)
        for box, (path, leaf) in zip(boxes, tree_leaves_with_path(params), strict=True)
    ]


def _declared_sharding(
    path: str, box: PyTree, leaf: Shaped, mesh: Mesh | None, rules: Rules | None
) -> PyTree:
    """Return the sharding or partition spec that a parameter carries, None for replicated."""
    if array_metadata.is_box(box):
        spec = box.get_partition_spec()
        if rules is None:
            return spec
        from flax import linen

        return linen.logical_to_mesh_axes(tuple(spec), rules)
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return sharding
    some_mesh = mesh is not None or not jax.sharding.get_abstract_mesh().empty
    if some_mesh or isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return None
    raise ValueError(
        f"the sharding of parameter '{path}' is not known: pass param_shardings, a tree of "
        "NamedSharding or PartitionSpec, or parameters that are already on the mesh."
    )
