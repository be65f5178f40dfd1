"""Generated Triton kernels, and the library that they call, on NumPy: without Triton.

`install` has kernels run so in place of a launch, `run` calls a generated function.
"""

import functools
import importlib.util
import itertools
import math
import operator
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import pytest

from optax_lowmem._src import kernels
from optax_lowmem._src.kernels import gpu_triton


class Value:
    """An array with Triton's operators and conversions."""

    def __init__(self, array: Any):
        self.array = np.asarray(array)

    def to(self, dtype: np.dtype, bitcast: bool = False) -> "Value":
        """The values in another dtype, or their bits as it."""
        if bitcast:
            return Value(self.array.view(dtype))
        x = self.array
        if x.dtype.kind == "f" and dtype.kind in "iu":  # a GPU saturates, and makes 0 of NaN
            limits = np.iinfo(dtype)
            x = np.clip(np.nan_to_num(x.astype(np.float64)), limits.min, limits.max)
        elif dtype in _FP8:  # larger numbers are the largest
            most = float(ml_dtypes.finfo(dtype).max)
            x = np.clip(x, -most, most)
        return Value(x.astype(dtype))

    def __getitem__(self, at: Any) -> "Value":
        return Value(self.array[at])

    def __bool__(self) -> bool:
        return bool(self.array)


def _lifted(function: Callable[..., Any]) -> Callable[..., Value]:
    def call(*args: Any, **options: Any) -> Value:
        arrays = [a.array if isinstance(a, Value) else a for a in args]
        return Value(function(*arrays, **options))

    return call


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift",
              "rshift", "lt", "le", "gt", "ge", "eq", "ne"):  # fmt: skip
    _own = {"and": "and_", "or": "or_"}.get(_name, _name)
    setattr(Value, f"__{_name}__", _lifted(getattr(operator, _own)))
Value.__radd__ = Value.__add__
Value.__rtruediv__ = _lifted(lambda x, other: x.dtype.type(other) / x)
Value.__rsub__ = _lifted(lambda x, other: x.dtype.type(other) - x)
Value.__mul__ = _lifted(lambda x, y: x * x.dtype.type(y) if isinstance(y, float) else x * y)
Value.__rmul__ = Value.__mul__
Value.__invert__ = _lifted(operator.invert)


class Pointer:
    """A pointer to elements of an array; bf16 as its bits."""

    def __init__(self, array: np.ndarray, at: Any = 0):
        self.array, self.at = array, at
        self.dtype = types.SimpleNamespace(element_ty=array.dtype)

    def __add__(self, offsets: Any) -> "Pointer":
        return Pointer(self.array, _lifted(operator.add)(self.at, offsets))


def _load(pointer: Pointer, mask: Any = None, other: float = 0, volatile: bool = False) -> Value:
    at = pointer.at.array
    there = np.broadcast_to(True if mask is None else mask.array, at.shape)
    found = pointer.array[np.where(there, at, 0)]
    return Value(np.where(there, found, pointer.array.dtype.type(other)))


def _store(pointer: Pointer, values: Value, mask: Any = None) -> None:
    at = pointer.at.array
    assert values.array.dtype == pointer.array.dtype, (values.array.dtype, pointer.array.dtype)
    there = np.broadcast_to(True if mask is None else mask.array, at.shape)
    pointer.array[at[there]] = np.broadcast_to(values.array, at.shape)[there]


_FP8 = {np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)}
_INSTRUCTIONS = {"rcp": np.reciprocal, "lg2": np.log2, "ex2": np.exp2, "sub": np.negative}


def _instruction(asm: str, constraints: str, args: list[Value], **options: Any) -> Value:
    return Value(_INSTRUCTIONS[asm[:3]](args[0].array))


_program: tuple[int, ...] = ()  # of a grid, that is running
tl = types.SimpleNamespace(
    **{name: np.dtype(name) for name in ("float32", "float16", "int8", "uint8", "int16", "uint16",
                                         "int32", "uint32")},
    **{name: _lifted(getattr(np, name)) for name in ("abs", "sqrt", "floor", "ceil", "exp", "exp2",
                                                     "expm1", "log1p", "sin", "cos", "tanh",
                                                     "log", "where", "max", "min",
                                                     "reshape", "broadcast_to")},
    sum=_lifted(lambda x, axis: np.sum(x, axis=axis, dtype=x.dtype)),
    trans=_lifted(np.transpose),
    erf=_lifted(np.vectorize(math.erf, otypes=[np.float32])),
    erfc=_lifted(np.vectorize(math.erfc, otypes=[np.float32])),
    bfloat16=np.dtype(ml_dtypes.bfloat16),
    float8e4nv=np.dtype(ml_dtypes.float8_e4m3fn),
    float8e5=np.dtype(ml_dtypes.float8_e5m2),
    int1=np.dtype(bool),
    constexpr=None,
    static_range=range,
    PropagateNan=types.SimpleNamespace(ALL=None),
    maximum=_lifted(lambda x, y, propagate_nan=None: np.maximum(x, y)),
    minimum=_lifted(lambda x, y, propagate_nan=None: np.minimum(x, y)),
    rsqrt=_lifted(lambda x: 1 / np.sqrt(x)),
    full=lambda shape, value, dtype: Value(np.full(shape, value, dtype)),
    arange=lambda start, end: Value(np.arange(start, end, dtype=np.int32)),
    max_contiguous=lambda x, _: x,
    program_id=lambda axis: Value(np.int32(_program[axis])),
    load=_load,
    store=_store,
    inline_asm_elementwise=_instruction,
    debug_barrier=lambda: None,
)  # fmt: skip


def _module(name: str) -> types.ModuleType:
    """A module of hand-written Triton that finds this one in its place."""
    triton = types.SimpleNamespace(jit=lambda f: f, constexpr_function=lambda f: f, language=tl)
    extra = types.SimpleNamespace(libdevice=tl)
    path = Path(importlib.util.find_spec(name).origin)
    found = types.ModuleType(name)
    here = {"triton": triton, "triton.language": tl, "triton.language.extra": extra}
    with mock.patch.dict(sys.modules, here):
        exec(compile(path.read_text(), path, "exec"), vars(found))
    return found


LIBRARY = _module("optax_lowmem._src.kernels.triton_library")


# ---- launches ------------------------------------------------------------------------------------
def _run(kernel: Any, grid: tuple[int, ...], arrays: Sequence[Any], options: Any) -> None:
    """Run the programs of a grid on arrays, some of which they write."""
    global _program
    statics = {name: value for name, value in options.items() if name.isupper()}
    bits = [x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x for x in arrays]
    for _program in itertools.product(*map(range, grid)):
        with np.errstate(all="ignore"):
            kernel(*(Pointer(x.reshape(-1)) for x in bits), **statics)


def _called(run: Callable[..., Any], like: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like]
    return jax.pure_callback(run, shapes, *operands, vmap_method="sequential")


def _unwritten(like: Any) -> np.ndarray:
    return np.full(like.shape, 77).astype(like.dtype)  # what no program writes shows


def triton_call_03(
    *operands: Any, kernel: Any, out_shape: Any, grid: Any, input_output_aliases: Any = None,
    **options: Any,
) -> list[jax.Array]:  # fmt: skip
    """As jax_triton 0.3: every operand, then every result, those of an alias twice."""
    owner = {result: operand for operand, result in (input_output_aliases or {}).items()}

    def run(*arrays: Any) -> list[np.ndarray]:
        inputs = [np.array(x) for x in arrays]
        outputs = [
            inputs[owner[j]] if j in owner else _unwritten(like) for j, like in enumerate(out_shape)
        ]
        _run(kernel, grid, inputs + outputs, options)
        return outputs

    return _called(run, out_shape, operands)


def triton_call_04(
    *operands: Any, kernel: Any, out_type: Any, grid: Any, **options: Any
) -> list[jax.Array]:
    """As jax_triton 0.4: references are written in place, and other results come last."""
    references = [i for i, x in enumerate(operands) if isinstance(x, jax.Ref)]
    values = [x[...] if i in references else x for i, x in enumerate(operands)]

    def run(*arrays: Any) -> list[np.ndarray]:
        inputs, outputs = [np.array(x) for x in arrays], [_unwritten(like) for like in out_type]
        _run(kernel, grid, inputs + outputs, options)
        return [*(inputs[i] for i in references), *outputs]

    found = _called(run, [*(values[i] for i in references), *out_type], values)
    for i, array in zip(references, found, strict=False):
        operands[i][...] = array
    return found[len(references) :]


def install(patch: pytest.MonkeyPatch, triton_call: Callable[..., Any] = triton_call_03) -> None:
    """Have generated kernels run here, the step's with the arithmetic of the reference."""
    patch.setitem(sys.modules, f"{kernels.__name__}.triton_library", LIBRARY)
    patch.setattr(kernels, "triton_library", LIBRARY, raising=False)
    patch.setattr(gpu_triton, "_triton_call", lambda: triton_call)
    patch.setattr(gpu_triton, "_compiled", functools.cache(LIBRARY.compiled_from))
    patch.setattr(gpu_triton._TracedProgram, "approximations", None)


def run(source: str, name: str, *arguments: Any) -> list[np.ndarray]:
    """The results of a generated function on arrays, bf16 as its bits."""
    return _results(LIBRARY.compiled_from(source, name), arguments)


def called(name: str, *arguments: Any) -> list[np.ndarray]:
    """The results of a function of the library."""
    return _results(getattr(LIBRARY, name), arguments)


def _results(function: Callable[..., Any], arguments: Sequence[Any]) -> list[np.ndarray]:
    with np.errstate(all="ignore"):
        found = function(*map(Value, arguments))
    return [value.array for value in (found if isinstance(found, tuple) else (found,))]
