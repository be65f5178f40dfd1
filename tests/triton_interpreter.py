"""Triton kernels on NumPy arrays, for numerics on a machine without a GPU.

Run with TRITON_INTERPRET=1 set before Triton is imported. `install()` puts a stand-in for
jax_triton's `triton_call` in place, which hands the arrays to Triton's interpreter.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

from optax_lowmem._src.core import jax_triton_call, triton_library
from optax_lowmem._src.update import jax_triton


class _Storage:
    """Part of torch's storage interface that Triton's interpreter uses."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def cpu(self) -> "_Storage":
        return self

    def copy_(self, other: "_Storage") -> None:
        assert other.array is self.array  # the kernel wrote it in place


class Tensor:
    """Part of torch's tensor interface that Triton's interpreter uses, over a NumPy array."""

    def __init__(self, array: np.ndarray | None, dtype: str):
        self.array, self.dtype = array, dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> _Storage:
        return _Storage(self.array)

    def new_empty(self, size: int, device: str) -> "Tensor":
        assert (size, device) == (0, "cpu")
        return Tensor(None, self.dtype)

    def set_(self, storage: _Storage, offset: int, size: tuple, stride: tuple) -> None:
        del offset, size, stride
        self.array = storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides


def _tensor(array: np.ndarray) -> Tensor:
    return Tensor(array, array.dtype.name)


def _run(kernel: Any, grid: tuple, pointers: list[np.ndarray], options: dict[str, Any]) -> None:
    statics = {name: value for name, value in options.items() if name.isupper()}
    with np.errstate(all="ignore"):
        kernel[grid](*map(_tensor, pointers), **statics)


def _triton_call_03(
    *operands: Any,
    kernel: Any,
    out_shape: Any,
    grid: tuple,
    input_output_aliases: dict[int, int],
    **options: Any,
) -> list[jax.Array]:
    """As jax_triton 0.3: every operand, then every result, those of an alias twice."""
    inputs = [np.array(x) for x in operands]
    owner = {result: operand for operand, result in input_output_aliases.items()}
    outputs = [
        inputs[owner[j]] if j in owner else np.zeros(like.shape, like.dtype)
        for j, like in enumerate(out_shape)
    ]
    _run(kernel, grid, inputs + outputs, options)
    return [jnp.asarray(x) for x in outputs]


def _triton_call_04(
    *operands: Any, kernel: Any, out_type: Any, grid: tuple, **options: Any
) -> list[jax.Array]:
    """As jax_triton 0.4: references are written in place, and other results come last."""
    inputs = [np.array(x[...]) for x in operands]
    outputs = [np.zeros(like.shape, like.dtype) for like in out_type]
    _run(kernel, grid, inputs + outputs, options)
    for reference, array in zip(operands, inputs, strict=True):
        if isinstance(reference, jax.Ref):
            reference[...] = jnp.asarray(array)
    return [jnp.asarray(x) for x in outputs]


@triton.jit
def _minus(x):
    return x * -1.0  # the interpreter has no inline assembly


_convert = interpreter._convert_float


def _rounded(x: np.ndarray, one: Any, other: Any, mode: Any) -> np.ndarray:
    """The interpreter's conversion, to bf16 to nearest even (its own drops the carry)."""
    if (one, other) == (tl.float32, tl.bfloat16):
        return x.astype(jnp.bfloat16).view(np.uint16)
    return _convert(x, one, other, mode)


def install(version: str) -> Any:
    """The kernel's launcher on top of the interpreter, as with jax_triton 0.3 or 0.4."""
    assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1"
    call = {"0.3": _triton_call_03, "0.4": _triton_call_04}[version]
    interpreter._convert_float = _rounded
    triton_library.minus = _minus
    jax_triton_call._triton_call = lambda: call
    jax_triton_call._one_by_one = lambda f: (
        f
    )  # it would trace, and the interpreter needs the arrays
    return jax_triton
