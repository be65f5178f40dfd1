"""Availability of GPU and TPU kernels in the computation that is being traced."""

import contextlib
import functools
import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.typing import DTypeLike

from optax_lowmem._src.arrays.groups import MAX_ELEMENTS
from optax_lowmem._src.arrays.typing import Shaped

FLOATS = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16")))  # that kernels read
_OLDEST = 8.0  # compute capability of Ampere, the oldest with bfloat16 in Triton
_CONVERTS_FP8 = 8.9  # Ada, the oldest with conversions to and from E4M3
_HOPPER = "9.0"  # the only one with WGMMA instructions
# The oldest JAX with this API of Mosaic GPU, which is experimental, and the names used from it.
MOSAIC_GPU = "0.11.2"
_OF_MOSAIC_GPU = (
    "ACC BlockSpec Layout SMEM SwizzleTransform TilingTransform commit_smem copy_smem_to_gmem "
    "emit_pipeline_warp_specialized find_swizzle kernel load nd_loop planar_snake "
    "wait_smem_to_gmem wgmma wgmma_wait"
).split()
_OF_PALLAS_TRITON = ("CompilerParams", "elementwise_inline_asm", "load", "store")
_MULTIPROCESSORS = 132  # of an H100 SXM or an H200


@functools.cache
def no_gpu_reason() -> str | None:
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

    For how many devices it is, `fallback.with_fallback` decides where JAX lowers it.
    """
    return no_gpu_reason() or explicit_axes_reason(x)


def explicit_axes_reason(x: object) -> str | None:
    """Return the reason why JAX would raise for a kernel on an array, or None."""
    if isinstance(x, jax.Array) and AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types:
        return "it is on Explicit mesh axes, outside of a shard_map"
    return None


# ---- TPUs ----------------------------------------------------------------------------------------


def target(x: object = None) -> str | None:
    """Return the platform that the traced computation is compiled for, such as `tpu`, if known.

    It is the platform of the array's mesh (of its NamedSharding, on Auto axes too), else of the
    mesh of `jax.set_mesh` or `jax.sharding.use_abstract_mesh`, else of `jax.default_device`.
    Single-device shardings, and `in_shardings` of a jit alone, are not visible while JAX traces.
    The tracing machine is ignored: it need not run the computation.
    """
    of_array = [jax.typeof(x).sharding.mesh] if isinstance(x, jax.Array) else []
    for one in (*of_array, jax.sharding.get_abstract_mesh()):
        if one.abstract_device is not None:
            # all that JAX 0.9 knows is the kind: "cpu", "tpu v5 lite"
            kind = one.abstract_device.device_kind.lower().split()[0]
            default = kind if kind in ("cpu", "tpu") else "gpu"
            return str(getattr(one.abstract_device, "platform", default))
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    return device if device is None or isinstance(device, str) else str(device.platform)


def targeting(x: jax.Array) -> contextlib.AbstractContextManager[object]:
    """Return a context in which Pallas compiles for the `target`'s kind of TPU, on any host."""
    if jax.sharding.get_abstract_mesh().abstract_device is not None:
        return contextlib.nullcontext()
    mesh = jax.typeof(x).sharding.mesh
    if mesh.abstract_device is not None:
        return jax.sharding.use_abstract_mesh(mesh)
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(device, jax.Device):
        one = Mesh(np.asarray([device]), ("device",))
        return jax.sharding.use_abstract_mesh(one.abstract_mesh)
    return contextlib.nullcontext()


def may_be_tpu(x: object = None) -> bool:
    """Return whether a TPU may run the traced computation, by its `target` or else this host.

    If the target is unknown, the caller leaves the choice to `jax.lax.platform_dependent`.
    """
    return (target(x) or jax.default_backend()) == "tpu"


def not_tpu_reason(x: object = None) -> str:
    """Return the reason why the traced computation is not for a TPU, if `may_be_tpu` is False."""
    known = target(x)
    where = (
        f"it is traced for {known}" if known else f"the default backend is {jax.default_backend()}"
    )
    return f"{where}, and kernels are for GPUs and TPUs"


# ---- GPUs ----------------------------------------------------------------------------------------


@functools.cache
def not_hopper_reason() -> str | None:
    """Return the reason why kernels for Hopper's tensor cores cannot be used, or None."""
    result = getattr(jax.local_devices()[0], "compute_capability", None)
    if result == _HOPPER:
        return None
    return f"the kernel is for compute capability {_HOPPER} (Hopper), not {result}"


def multiprocessors() -> int:
    """Return the number of multiprocessors of this machine's GPU; without a GPU, of an H100."""
    return getattr(jax.local_devices()[0], "core_count", None) or _MULTIPROCESSORS


@functools.cache
def has_pallas_triton() -> bool:
    """Return whether this JAX lowers Pallas through Triton, which JAX 0.11 deprecated."""
    # https://github.com/jax-ml/jax/issues/25196
    # https://docs.jax.dev/en/latest/pallas/CHANGELOG.html#triton
    try:
        from jax.experimental.pallas import triton
    except ImportError:
        return False
    return all(hasattr(triton, name) for name in _OF_PALLAS_TRITON)


NO_PALLAS_TRITON = "this JAX has no Pallas-Triton lowering"
NO_JAX_TRITON = "jax-triton is not installed (pip install jax-triton)"


def backend() -> str:
    """Return the backend, one of `gpu_kernel.BACKENDS`, for kernels that support both.

    It is generated Triton if JAX does not lower Pallas through Triton; see `no_backend_reason`.
    """
    return "pallas" if has_pallas_triton() else "triton"


def no_backend_reason(name: str | None = None) -> str | None:
    """Return the reason why a backend (every backend, without a name) is unavailable, or None."""
    pallas = name != "triton" and has_pallas_triton()
    if pallas or (name != "pallas" and has_jax_triton()):
        return None
    reasons = {"pallas": NO_PALLAS_TRITON, "triton": NO_JAX_TRITON}
    return reasons[name] if name else "; ".join(reasons.values())


def no_array_reason(
    x: Shaped, shape: tuple[int, ...] | None = None, dtype: DTypeLike | None = None
) -> str | None:
    """Return the reason why no kernel of either backend processes an array of floats, or None.

    `shape` and `dtype` are those that are processed, if they are not x's.
    """
    reason = no_kernel_reason(x) or no_backend_reason()
    if reason is not None:
        return reason
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    size = math.prod(x.shape if shape is None else shape)
    if dtype not in FLOATS:
        return f"{dtype} is not one of {', '.join(one.name for one in FLOATS)}"
    return None if 0 < size <= MAX_ELEMENTS else f"{size} elements, not 1 to {MAX_ELEMENTS}"


@functools.cache
def has_fp8_conversions() -> bool:
    """Return whether this machine's GPU converts to and from E4M3; True without a GPU."""
    result = getattr(jax.local_devices()[0], "compute_capability", None)
    return result is None or float(result) >= _CONVERTS_FP8


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
