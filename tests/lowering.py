"""StableHLO of programs for NVIDIA GPUs and TPUs, lowered on a machine without one."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from optax_lowmem._src.kernels.platform import MOSAIC_GPU, has_mosaic_gpu

needs_mosaic = pytest.mark.skipif(
    not has_mosaic_gpu(), reason=f"needs Mosaic GPU of JAX {MOSAIC_GPU}"
)
# From JAX 0.11 on a kernel is lowered for a device, so that one is named; before, it is ignored.
_NAMES_PLATFORM = "platform" in inspect.signature(AbstractDevice).parameters  # from 0.10 on


def _device(kind: str, platform: str, cores: int) -> AbstractDevice:
    return AbstractDevice(kind, cores, **({"platform": platform} if _NAMES_PLATFORM else {}))


_GPU = _device("NVIDIA H100 80GB HBM3", "gpu", 132)
_TPU = _device("TPU v5 lite", "tpu", 1)


def gpu_mesh(**axes: int) -> AbstractMesh:
    """A mesh of GPUs to lower a `shard_map` for: `gpu_mesh(data=8)`; without axes, one GPU."""
    kinds = (AxisType.Auto,) * len(axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), kinds, abstract_device=_GPU)


def lower_for_cuda(fn: Callable[..., Any], *args: Any, mesh: AbstractMesh | None = None) -> str:
    """StableHLO of `jax.jit(fn)` for CUDA; args are arrays or `jax.ShapeDtypeStruct`s."""
    with use_abstract_mesh(gpu_mesh() if mesh is None else mesh):
        return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def tpu_mesh(**axes: int) -> AbstractMesh:
    """As `gpu_mesh`, of TPUs."""
    kinds = (AxisType.Auto,) * len(axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), kinds, abstract_device=_TPU)


def lower_for_tpu(fn: Callable[..., Any], *args: Any, mesh: AbstractMesh | None = None) -> str:
    """As `lower_for_cuda`, for TPUs: Mosaic's part that JAX itself has."""
    with use_abstract_mesh(tpu_mesh() if mesh is None else mesh):
        return jax.jit(fn).trace(*args).lower(lowering_platforms=("tpu",)).as_text()


def tpu_kernels_in(text: str) -> list[str]:
    """Names of the kernels in a text of `lower_for_tpu`, one a launch site."""
    calls = re.findall(r"@tpu_custom_call\b.*", text)
    return [re.search(r'kernel_name = "(\w+)"', call)[1] for call in calls]


def kernels_in(text: str) -> list[str]:
    """Names of the Pallas kernels in a text of `lower_for_cuda`, one a launch site."""
    calls = re.findall(r"@(?:__gpu\$xla\.gpu\.triton|mosaic_gpu_v2)\b.*", text)
    # Mosaic GPU has the name in a serialised module, after a hexadecimal escape
    name = re.compile(r'name = "(\w+)"|\\00(?!stable_)(\w+)_mosaic_gpu\\00')
    return [next(filter(None, name.search(call).groups())) for call in calls]
