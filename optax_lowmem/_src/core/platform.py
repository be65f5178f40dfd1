"""Availability of GPU and TPU kernels in the computation that is being traced."""

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

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
    return _several_devices_reason(jax.device_count())


def _several_devices_reason(devices: int) -> str | None:
    if devices == 1 or in_shard_map():
        return None
    return (
        f"{devices} devices are visible: tell lowmem.step where leaves lie (specs=), or "
        "call it inside a shard_map"
    )


def in_shard_map() -> bool:
    """Return whether a `shard_map` over all axes of a mesh is being traced."""
    axes = jax.sharding.get_abstract_mesh().axis_types
    return bool(axes) and all(axis == AxisType.Manual for axis in axes)


def explicit_axes_reason(x: object) -> str | None:
    """Return the reason why JAX would raise for a kernel on an array, or None."""
    if isinstance(x, jax.Array) and AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types:
        return "it lies on Explicit mesh axes and this is not inside a shard_map"
    return None


# ---- TPUs ----------------------------------------------------------------------------------------


def target(x: object = None, mesh: Mesh | AbstractMesh | None = None) -> str | None:
    """Return the platform that a traced computation is known to be for, such as `tpu`, or None.

    It is that of a given mesh, else of the mesh that an array lies on (its NamedSharding, on Auto
    axes too), else of the mesh of `jax.set_mesh` or `jax.sharding.use_abstract_mesh`, else of
    `jax.default_device`. Shardings of one device, and `in_shardings` of a jit alone, do not show
    while JAX traces. The machine that traces is not asked: it need not be the one that computes.
    """
    given = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    for one in ([] if given is None else [given]) + _meshes(x):
        if one.abstract_device is not None:
            return str(one.abstract_device.platform)
    device = _default_device()
    return device if device is None or isinstance(device, str) else str(device.platform)


def _meshes(x: object) -> list[AbstractMesh]:
    """The mesh that an array lies on, and that of the context; they may have no axes."""
    own = [jax.typeof(x).sharding.mesh] if isinstance(x, jax.Array) else []
    return [*own, jax.sharding.get_abstract_mesh()]


def _default_device() -> Any:
    return jax.config.jax_default_device  # type: ignore[attr-defined]


def targeting(x: object = None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which Pallas finds the kind of TPU that is the `target`, on any host."""
    if jax.sharding.get_abstract_mesh().abstract_device is not None:
        return contextlib.nullcontext()
    found = [mesh for mesh in _meshes(x) if mesh.abstract_device is not None]
    device = _default_device()
    if not found and isinstance(device, jax.Device):
        found.append(Mesh(np.asarray([device]), ("device",)).abstract_mesh)
    return jax.sharding.use_abstract_mesh(found[0]) if found else contextlib.nullcontext()


def may_be_tpu(x: object = None, mesh: Mesh | AbstractMesh | None = None) -> bool:
    """Return whether a TPU may run what is traced: its `target`, or else this host's.

    Where it is not known, the caller leaves the choice to `jax.lax.platform_dependent`.
    """
    return (target(x, mesh) or jax.default_backend()) == "tpu"


def not_tpu_reason(x: object = None) -> str | None:
    """Return the reason why the traced computation is for no TPU, or None."""
    if may_be_tpu(x):
        return None
    known = target(x)
    where = (
        f"it is traced for {known}" if known else f"the default backend is {jax.default_backend()}"
    )
    return f"{where}, and kernels are for GPUs and TPUs"


def no_tpu_reason(x: object = None) -> str | None:
    """Return the reason why the traced computation uses no TPU kernels on an array, or None."""
    reason = not_tpu_reason(x) or explicit_axes_reason(x)
    if reason is not None:
        return reason
    # of a program for the machine that traces it, the machine's
    known = [mesh.size for mesh in _meshes(x) if mesh.axis_names] or [1]
    return _several_devices_reason(known[0] if target(x) else jax.device_count())


# ---- GPUs ----------------------------------------------------------------------------------------


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
