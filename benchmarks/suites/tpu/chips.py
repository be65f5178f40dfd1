"""Compilation for TPUs that are not there, by libtpu on a CPU; nothing is ever run.

The extra `tpu-test` has libtpu, which is under Google's terms and no open licence.
"""

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# libtpu asks the cloud which chips this machine has, and allows one process to use them
_ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
AXIS = "fsdp"


CHIPS = {"v5e": 16 << 30, "v6e": 32 << 30}  # as libtpu calls them -> bytes of HBM


@functools.cache
def mesh(chip: str, shape: tuple[int, int] = (1, 1)) -> Mesh:
    """The chips of a topology along one axis."""
    for name, value in _ALONE.items():
        os.environ.setdefault(name, value)
    found = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{chip}:{'x'.join(map(str, shape))}"
    )
    return Mesh(np.array(found.devices), (AXIS,), axis_types=(AxisType.Auto,))


def replicated(on: Mesh, tree: Any) -> Any:
    return placed(on, tree, jax.tree.map(lambda _: PartitionSpec(), tree))


def placed(on: Mesh, tree: Any, specs: Any) -> Any:
    """The abstract arrays of a tree, sharded by its partition specs or shardings."""

    def one(x: Any, spec: Any) -> Any:
        sharding = NamedSharding(on, spec) if isinstance(spec, PartitionSpec) else spec
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(one, tree, specs)


def compiled(
    on: Mesh, fn: Callable[..., Any], *args: Any, donate: Sequence[int] = (), **how: Any
) -> tuple[Any, float]:
    """A program of abstract arrays, sharded over the chips of a mesh, and seconds of compiling."""
    start = time.perf_counter()
    with jax.sharding.use_abstract_mesh(on.abstract_mesh):
        program = jax.jit(fn, donate_argnums=tuple(donate), **how).lower(*args).compile()
    return program, time.perf_counter() - start
