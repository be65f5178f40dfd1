"""Whether GPU kernels can be used in the computation that is being traced."""

import functools
import importlib.util
from typing import Any

import jax
from jax.sharding import AxisType

_OLDEST = 8.0  # compute capability of Ampere: Triton's oldest with bfloat16


@functools.cache
def no_device_reason() -> str | None:
    """Why GPU kernels cannot be used on this machine; None where they can."""
    if jax.default_backend() != "gpu":
        return f"the default backend is {jax.default_backend()}, and kernels are for NVIDIA GPUs"
    device = jax.local_devices()[0]
    if not device.device_kind.startswith("NVIDIA"):
        return f"kernels are for NVIDIA GPUs, not {device.device_kind}"
    if float(device.compute_capability) < _OLDEST:
        return f"kernels need compute capability {_OLDEST}, not {device.compute_capability}"
    return None


def no_kernel_reason(x: Any = None) -> str | None:
    """Why GPU kernels are not used, on an array, in what is being traced; None where they are.

    A kernel call is opaque to the partitioner: on arrays that are sharded over several devices it
    would gather them. Where several devices are visible it is used inside a `shard_map` over all
    axes only.
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


def explicit_axes_reason(x: Any) -> str | None:
    """Why JAX would raise for a kernel on an array; None where it would not."""
    if isinstance(x, jax.Array) and AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types:
        return "it lies on Explicit mesh axes and this is not inside a shard_map"
    return None


@functools.cache
def has_pallas_triton() -> bool:
    """Whether this JAX lowers Pallas through Triton."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


@functools.cache
def has_jax_triton() -> bool:
    """Whether jax-triton and Triton are installed."""
    return all(importlib.util.find_spec(name) for name in ("jax_triton", "triton"))
