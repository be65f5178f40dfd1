"""Compilation of what would be launched through jax_triton, without a GPU."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from optax_lowmem._src.kernels import gpu_triton, platform

TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int8": "i8",
    "uint8": "u8",
    "int16": "i16",
    "uint16": "u16",
    "int32": "i32",
    "uint32": "u32",
}
_FP8 = 89  # the first compute capability with conversions to and from E4M3


def _triton_call(kernels: list[Any], capability: int) -> Callable[..., Any]:
    """In place of jax_triton's: puts compiled kernels on the list, and returns zeros."""

    def call(
        *operands: Any,
        kernel: Any,
        out_shape: Any,
        grid: tuple[int, ...],
        num_warps: int,
        num_stages: int,
        **options: Any,
    ) -> list[Any]:
        assert all(size > 0 for size in grid)
        statics = {name: value for name, value in options.items() if name.isupper()}
        arrays = [*operands, *out_shape]
        names = kernel.arg_names[: len(arrays)]
        signature = {
            name: "*" + TYPES[jnp.dtype(x.dtype).name]
            for name, x in zip(names, arrays, strict=True)
        }
        source = ASTSource(
            fn=kernel,
            signature=signature | dict.fromkeys(statics, "constexpr"),
            constexprs=statics,
            attrs={(i,): [["tt.divisibility", 16]] for i in range(len(arrays))},
        )
        how = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
        target = GPUTarget("cuda", capability, 32)
        kernels.append(triton.compile(source, target=target, options=how))
        return [jnp.zeros(like.shape, like.dtype) for like in out_shape]

    return call


@contextlib.contextmanager
def compiling(cache: Path, capability: int = 90) -> Iterator[list[Any]]:
    """Have kernels compiled for GPUs of a compute capability (90 is 9.0) and not launched.

    Args:
      cache: a folder for Triton's files.
      capability: of the GPU.

    Yields:
      The list that compiled kernels are put on.
    """
    kernels: list[Any] = []
    call = _triton_call(kernels, capability)
    with (
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(cache)),
        mock.patch.object(platform, "has_fp8_conversions", lambda: capability >= _FP8),
        mock.patch.object(gpu_triton, "_triton_call", lambda: call),
    ):
        yield kernels
