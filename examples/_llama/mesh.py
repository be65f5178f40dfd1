"""Shardings of the arrays on a mesh of data x fsdp x tensor devices."""

import math
from typing import Any

import jax
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem

from .config import Settings
from .model import leaf_path

AXES = ("data", "fsdp", "tensor")
BATCH = P(("data", "fsdp"))

# A matrix that makes more of something (heads, hidden units, tokens) is cut between tensor devices
# where it is more, and so is the one behind it: each pair needs one sum over devices.
_SPECS = {
    "embed_tokens": P("tensor", "fsdp"),
    "lm_head": P("fsdp", "tensor"),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), P("fsdp", "tensor")),
    **dict.fromkeys(("o_proj", "down_proj"), P("tensor", "fsdp")),
}

# of a leaf beside a matrix, from the spec of that matrix
_OF_LEAVES = {
    "bias": lambda spec: spec[1:],
    "lora_a": lambda spec: (spec[0], None),
    "lora_b": lambda spec: (None, spec[1]),
}


def make_mesh(settings: Settings) -> Mesh:
    """The mesh; its axes are Auto: XLA partitions what is not ours."""
    sizes = (settings.data, settings.fsdp, settings.tensor)
    axes, devices = (AxisType.Auto,) * len(AXES), jax.devices()[: settings.devices]
    return jax.make_mesh(sizes, AXES, axis_types=axes, devices=devices)


def parameter_specs(params: Any) -> Any:
    """The PartitionSpec of each parameter, by its path."""

    def of(keys: tuple[Any, ...], leaf: Any) -> P:
        path = leaf_path(keys).split("/")
        spec = next((_SPECS[name] for name in path if name in _SPECS), ())  # norms: everywhere
        spec = _OF_LEAVES.get(path[-1], lambda spec: spec)(spec)
        return P(*(None,) * (leaf.ndim - len(spec)), *spec) if spec else P()  # of a stack: each

    return jax.tree_util.tree_map_with_path(of, params)


def shardings(tx: Any, params: Any, settings: Settings, mesh: Mesh) -> tuple[Any, Any]:
    """Those of the parameters and of the optimizer's state."""
    specs = parameter_specs(params)
    of_params = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    zero_axis = "data" if settings.zero else None
    try:
        of_state = lowmem.sharding.state_shardings(
            tx, params, specs, mesh=mesh, zero_axis=zero_axis
        )
    except ValueError as error:
        raise SystemExit(f"{settings.preset} on this mesh: {error}") from None
    return of_params, of_state


def of_loss(settings: Settings, mesh: Mesh) -> dict[str, Any]:
    """Return the loss's `mesh` and `specs`, with which each device sums its own chunks."""
    if settings.devices == 1:
        return {}
    head = _SPECS["embed_tokens" if settings.shape.tied else "lm_head"]
    return {"mesh": mesh, "specs": (BATCH, head)}


def step_placement(of_state: Any, mesh: Mesh) -> dict[str, Any]:
    """Return lowmem.step's `mesh` and `specs` (those of mu), which GPUs do not need."""
    if jax.device_count() == 1 or jax.default_backend() == "gpu":
        return {}
    inner = optax.tree.get(of_state, "inner_state", of_state)  # noise has an optimizer of its own
    return {"mesh": mesh, "specs": optax.tree.get(inner, "mu")}


def bytes_per_device(tree: Any, of_tree: Any) -> int:
    """Compute the bytes per device of a tree of arrays."""

    def size(leaf: Any, sharding: NamedSharding) -> int:
        return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, tree, of_tree)))
