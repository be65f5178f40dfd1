"""Programs compiled for H100s that are not there, and what they launch and move.

It takes `jax[cuda12]` and no GPU; nothing is run or timed. XLA chooses no algorithms by trying them
(`xla_gpu_autotune_level=0`), and leaves all products to cuBLAS or to our kernels. Bytes are those
of the operands and results of each kernel: an operand that a kernel reads twice counts once, also
one that the L2 cache still has.
"""

import contextlib
import os
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from benchmarks.suites.tpu.program import Program
from optax_lowmem._src.kernels import platform

OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
_BYTES = 84_978_434_048  # of memory
# XLA's description of the device, as text of its protocol buffer
_TARGET = """
gpu_device_info {
  cuda_compute_capability { major: 9 } threads_per_block_limit: 1024 threads_per_warp: 32
  threads_per_core_limit: 2048 shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 registers_per_block_limit: 65536 registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 core_count: 132
  fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: 52428800 memory_bandwidth: 3352320000000
  device_memory_size: BYTES runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.8.0"
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
""".replace("BYTES", str(_BYTES))


def mesh(count: int = 1) -> Mesh:
    """H100s that are not there, of one host, for programs to be compiled for."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # which asks the driver
    found = topologies.get_topology_desc(
        platform="cuda", topology_name="h100", topology=f"1x1x{count}", target_config=_TARGET
    )
    return Mesh(np.array(found.devices), ("one",), axis_types=(AxisType.Auto,))


def cudnn() -> Any:
    """Trace cuDNN's attention, whose version JAX reads from the library on this machine."""
    # no public name: AttributeError if JAX moves it
    name = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
    return mock.patch(name, lambda: 90800)


@contextlib.contextmanager
def present(on: Mesh) -> Iterator[None]:
    """Show code the H100s of a `mesh` as this machine's devices."""
    limit = int(0.95 * _BYTES)  # as the examples set it
    first = types.SimpleNamespace(
        device_kind=on.devices.flat[0].device_kind,
        compute_capability="9.0",
        memory_stats=lambda: {"bytes_limit": limit},
    )
    with (
        mock.patch.object(jax, "devices", lambda: list(on.devices.flat)),
        mock.patch.object(jax, "local_devices", lambda backend=None: [first]),
        mock.patch.object(jax, "device_count", lambda: on.size),
        mock.patch.object(jax, "default_backend", lambda: "gpu"),
        mock.patch.object(platform, "no_gpu_reason", lambda: None),
        mock.patch.object(platform, "not_hopper_reason", lambda: None),
    ):
        yield


def compiled(
    on: Mesh,
    function: Callable[..., Any],
    *args: Any,
    donated: tuple[int, ...] = (),
    out_shardings: Any = None,
) -> Compiled:
    """A function's program for a `mesh`, traced as on a machine with these H100s.

    Arguments without a sharding are replicated.
    """
    every = NamedSharding(on, PartitionSpec())

    def placed(x: Any) -> jax.ShapeDtypeStruct:
        sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or every)

    args = jax.tree.map(placed, args)
    with present(on), jax.sharding.use_abstract_mesh(on.abstract_mesh):
        return build(jax.jit(function, donate_argnums=donated, out_shardings=out_shardings), *args)


def build(function: Any, *args: Any) -> Compiled:
    """Compile what `jax.jit` returned, where H100s are `present`."""
    lowered = function.trace(*args).lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options=OPTIONS)


def program(on: Mesh, function: Callable[..., Any], *args: Any, **more: Any) -> str:
    """The text of a `compiled` program."""
    return compiled(on, function, *args, **more).as_text()


def kernels(text: str) -> Iterator[tuple[int, str, int]]:
    """Yield how often a kernel of a program is launched, its text, and the bytes that it moves."""
    for times, one, size in Program(text).executed():
        if size:
            # cuBLAS' room to work in is no result
            size -= sum(x.size for x in one.results[1:]) if "__cublas" in one.rest else 0
            yield times, one.rest, size
