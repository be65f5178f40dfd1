"""Availability of GPU kernels in the computation that is being traced."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType

_OLDEST = 8.0  # compute capability of Ampere: Triton's oldest with bfloat16
_HOPPER = "9.0"  # the only one with these instructions of its tensor cores
# The oldest JAX with Mosaic GPU as here, and what its products are made of: it is experimental.
MOSAIC_GPU = "0.11.2"
_OF_MOSAIC_GPU = (
    "ACC",
    "BlockSpec",
    "Layout",
    "SMEM",
    "SwizzleTransform",
    "TilingTransform",
    "commit_smem",
    "copy_smem_to_gmem",
    "emit_pipeline_warp_specialized",
    "find_swizzle",
    "kernel",
    "load",
    "nd_loop",
    "planar_snake",
    "wait_smem_to_gmem",
    "wgmma",
    "wgmma_wait",
)
_MULTIPROCESSORS = 132  # of an H100 SXM or an H200


@functools.cache
def no_device_reason() -> str | None:
    """Return the reason why GPU kernels cannot be used on this machine, or None."""
    if jax.default_backend() != "gpu":
        return f"the default backend is {jax.default_backend()}, and kernels are for NVIDIA GPUs"
    device = jax.local_devices()[0]
    if not device.device_kind.startswith("NVIDIA"):
        return f"kernels are for NVIDIA GPUs, not {device.device_kind}"
    if float(device.compute_capability) < _OLDEST:
        return f"kernels need compute capability {_OLDEST}, not {device.compute_capability}"
    return None


def no_kernel_reason(x: object = None) -> str | None:
    """Return the reason why the traced computation uses no GPU kernels on an array, or None.

    A kernel call is opaque to the partitioner, which would gather arrays that are sharded over
    several devices. Where several devices are visible, kernels are used only inside a `shard_map`
    over all axes.
    """
    reason = no_device_reason() or explicit_axes_reason(x)
    if reason is not None:
        return reason
    if jax.device_count() == 1:
        return None
    axes = jax.sharding.get_abstract_mesh().axis_types
    if axes and all(axis == AxisType.Manual for axis in axes):
        return None
    return (
        f"{jax.device_count()} devices are visible: tell lowmem.step where leaves lie (specs=), or "
        "call it inside a shard_map"
    )


def explicit_axes_reason(x: object) -> str | None:
    """Return the reason why JAX would raise for a kernel on an array, or None."""
    if isinstance(x, jax.Array) and AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types:
        return "it lies on Explicit mesh axes and this is not inside a shard_map"
    return None


def on_cuda(kernel: Callable[..., Any], plain: Callable[..., Any], *args: Any) -> Any:
    """kernel(*args) where it runs on an NVIDIA GPU, else plain(*args).

    A computation for the host's CPU may be traced on a machine with a GPU.
    """
    return jax.lax.platform_dependent(*args, cuda=kernel, default=plain)


@functools.cache
def not_hopper_reason() -> str | None:
    """Return the reason why kernels for Hopper's tensor cores cannot be used, or None."""
    found = getattr(jax.local_devices()[0], "compute_capability", None)
    if found == _HOPPER:
        return None
    return f"the kernel is for compute capability {_HOPPER} (Hopper), not {found}"


def multiprocessors() -> int:
    """Of this machine's GPU; of an H100 where there is none."""
    return getattr(jax.local_devices()[0], "core_count", None) or _MULTIPROCESSORS


@functools.cache
def has_pallas_triton() -> bool:
    """Return whether this JAX lowers Pallas through Triton."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


@functools.cache
def has_mosaic_gpu() -> bool:
    """Return whether this JAX has the Mosaic GPU functions that the kernels here need."""
    if jax.__version_info__[:3] < tuple(map(int, MOSAIC_GPU.split("."))):
        return False
    try:
        from jax.experimental.pallas import mosaic_gpu
    except ImportError:
        return False
    return all(hasattr(mosaic_gpu, name) for name in _OF_MOSAIC_GPU)


@functools.cache
def has_jax_triton() -> bool:
    """Return whether jax-triton and Triton are installed."""
    return all(importlib.util.find_spec(name) for name in ("jax_triton", "triton"))
