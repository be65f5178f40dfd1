"""Steps of optimizers on one large leaf, compiled for TPUs that are not there.

The extra `tpu-test` has libtpu, which compiles on a CPU; it is under Google's terms and no open
licence.
"""

import functools
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import optax_lowmem as lowmem
from benchmarks.peers import in_jax

CHIPS = ("v5e", "v6e")  # as libtpu calls them
AXIS = "fsdp"
BASE = "optax.adamw"  # in f32
ON_FOUR = "/2x2"  # of a case on a mesh, where leaves are sharded along their first axis
# libtpu asks the cloud which chips this machine has, and allows one process to use them
_ALONE = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
          "TPU_WORKER_HOSTNAMES": "localhost"}  # fmt: skip


@functools.cache
def mesh(chip: str, shape: str = "1x1") -> Mesh:
    """The chips of a topology along one axis."""
    for name, value in _ALONE.items():
        os.environ.setdefault(name, value)
    found = topologies.get_topology_desc(platform="tpu", topology_name=f"{chip}:{shape}")
    return Mesh(np.array(found.devices), (AXIS,), axis_types=(AxisType.Auto,))


def placed(on: Mesh, tree: Any, specs: Any) -> Any:
    """The abstract arrays of a tree, sharded by its partition specs or shardings."""

    def one(x: Any, spec: Any) -> Any:
        sharding = NamedSharding(on, spec) if isinstance(spec, PartitionSpec) else spec
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(one, tree, specs)


def compiled(on: Mesh, function: Callable[..., Any], *args: Any, **how: Any) -> Any:
    """A program of abstract arrays, sharded over the chips of a mesh."""
    with jax.sharding.use_abstract_mesh(on.abstract_mesh):
        return jax.jit(function, **how).lower(*args).compile()


# case -> shape of its leaf
LEAVES = {"2048x8192": (2048, 8192), "128256x2048": (128256, 2048)}
LEAVES[f"2048x8192{ON_FOUR}"] = LEAVES["2048x8192"]
XLA = "-xla"  # behind an optimizer's name: its step without kernels
IMPLEMENTATIONS = (
    BASE, "flash_adamw", "flash_lion", "flash_sgd", "coat_adamw", "flash_adam_mini",
    "flash_factored_adamw", "stable_adamw", f"flash_adamw{XLA}",
)  # fmt: skip


def prepared(chip: str, case: str, impl: str) -> tuple[Any, Callable[..., Any], tuple[Any, ...]]:
    """The mesh, the step and its abstract gradients, state and parameters."""
    four = case.endswith(ON_FOUR)
    on = mesh(chip, "2x2" if four else "1x1")
    params = {"kernel": jax.ShapeDtypeStruct(LEAVES[case], jnp.float32)}
    specs = {"kernel": PartitionSpec(*[AXIS] * four)}
    if impl == BASE:
        tx = optax.adamw(1e-3)
        state, step = jax.eval_shape(tx.init, params), in_jax.update_and_apply(tx)
        lies = optax.tree.map_params(
            tx, lambda _, spec: spec, state, specs, transform_non_params=lambda _: PartitionSpec()
        )
    else:
        tx = lowmem.OPTIMIZERS[impl.removesuffix(XLA)].make(1e-3)
        params, state = jax.eval_shape(lambda p: lowmem.init(tx, p), params)
        lies = lowmem.sharding.state_shardings(tx, params, specs, mesh=on)
        where = {"mesh": on, "specs": specs} if four else {}
        step = in_jax.step_of(tx, "xla" if impl.endswith(XLA) else "pallas_tpu", **where)
    params = placed(on, params, specs)
    return on, step, (params, placed(on, state, lies), params)


def compile_case(chip: str, case: str, impl: str) -> Any:
    on, step, args = prepared(chip, case, impl)
    lies = jax.tree.map(lambda x: x.sharding, (args[2], args[1]))
    return compiled(on, step, *args, donate_argnums=(1, 2), out_shardings=lies)


def _bytes(tree: Any) -> int:
    """Bytes of the arrays of a tree, of one device, without the padding of tiles."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def ideal_bytes(chip: str, case: str, impl: str) -> tuple[int, int]:
    """Bytes of a step that moves each once, and of the state and parameters that it rewrites."""
    _, _, (grads, state, params) = prepared(chip, case, impl)
    rewritten = _bytes((state, params))
    return _bytes(grads) + 2 * rewritten, rewritten
