"""The part of triton.language that generated source uses, on NumPy: it needs no Triton.

`run` calls a generated function; `install` has generated kernels run so in place of a GPU.
"""

import dataclasses
import itertools
import math
import operator
import types
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from optax_lowmem._src.core import gpu_triton, jax_triton_call


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
        return Value(x.astype(dtype))

    def __getitem__(self, at: Any) -> "Value":
        return Value(self.array[at])


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
Value.__invert__ = _lifted(operator.invert)

_INSTRUCTIONS = {"rcp": np.reciprocal, "lg2": np.log2, "ex2": np.exp2}


def _instruction(asm: str, constraints: str, args: list[Value], **options: Any) -> Value:
    return Value(_INSTRUCTIONS[asm[:3]](args[0].array))


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
    int1=np.dtype(bool),
    PropagateNan=types.SimpleNamespace(ALL=None),
    maximum=_lifted(lambda x, y, propagate_nan=None: np.maximum(x, y)),
    minimum=_lifted(lambda x, y, propagate_nan=None: np.minimum(x, y)),
    rsqrt=_lifted(lambda x: 1 / np.sqrt(x)),
    full=lambda shape, value, dtype: Value(np.full(shape, value, dtype)),
    arange=lambda start, end: Value(np.arange(start, end, dtype=np.int32)),
    inline_asm_elementwise=_instruction,
    debug_barrier=lambda: None,
)  # fmt: skip


def _to_fp8(dtype: Any) -> Callable[[Value], Value]:
    """As the GPU: larger numbers are the largest."""
    most = float(ml_dtypes.finfo(dtype).max)

    def convert(x: np.ndarray) -> np.ndarray:
        return np.clip(x, -most, most).astype(dtype).view(np.uint8)

    return _lifted(convert)


def _of_fp8(dtype: Any) -> Callable[[Value], Value]:
    return _lifted(lambda x: x.view(dtype).astype(np.float32))


# ---- memory --------------------------------------------------------------------------------------


def _load(
    array: np.ndarray, at: Value, mask: Value, other: float, masked: bool, early: bool
) -> Any:
    where = np.where(mask.array, at.array, 0) if masked else at.array
    found = array.reshape(-1)[where]
    return Value(np.where(mask.array, found, array.dtype.type(other)) if masked else found)


def _store(array: np.ndarray, at: Value, values: Value, mask: Value, masked: bool) -> None:
    there = np.broadcast_to(mask.array, at.array.shape) if masked else ...
    assert values.array.dtype == array.dtype, (values.array.dtype, array.dtype)
    array.reshape(-1)[at.array[there]] = np.broadcast_to(values.array, at.array.shape)[there]


def _library(program: tuple[int, ...] = ()) -> dict[str, Any]:
    """Names that a source finds, in one program of a grid."""
    own = {**vars(tl), "program_id": lambda axis: Value(np.int32(program[axis]))}
    formats = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
    return {
        **{f"to_{name}": _to_fp8(dtype) for name, dtype in formats.items()},
        **{f"of_{name}": _of_fp8(dtype) for name, dtype in formats.items()},
        "tl": types.SimpleNamespace(**own),
        "libdevice": tl,
        "minus": _lifted(np.negative),
        "load": _load,
        "store": _store,
        "pick": lambda pointers, number, low, high: pointers[int(number.array)],
        "triton": types.SimpleNamespace(jit=lambda function: function),
    }


@dataclasses.dataclass(frozen=True)
class Kernel:
    """In place of a `triton.jit` function."""

    source: str
    name: str

    def run(self, grid: tuple[int, ...], arrays: list[np.ndarray]) -> None:
        """Run the programs of a grid on arrays, some of which they write."""
        bits = [x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x for x in arrays]
        code = compile(self.source, self.name, "exec")
        for program in itertools.product(*map(range, grid)):
            names = _library(program)
            exec(code, names)
            with np.errstate(all="ignore"):
                names[self.name](*bits)


def triton_call(*operands: Any, kernel: Kernel, out_shape: Any, grid: Any, **options: Any) -> Any:
    """In place of jax_triton's, of 0.3."""

    def run(*arrays: Any) -> list[np.ndarray]:
        # what no program writes shows
        written = [np.full(like.shape, 77).astype(like.dtype) for like in out_shape]
        kernel.run(grid, [*map(np.array, arrays), *written])
        return written

    shapes = [jax.ShapeDtypeStruct(like.shape, like.dtype) for like in out_shape]
    return jax.pure_callback(run, shapes, *operands, vmap_method="sequential")


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have generated kernels of `gpu_triton` run here."""
    monkeypatch.setattr(gpu_triton, "_compiled", Kernel)
    monkeypatch.setattr(jax_triton_call, "_triton_call", lambda: triton_call)


# ---- functions -----------------------------------------------------------------------------------


def run(source: str, name: str, *arguments: Any) -> list[np.ndarray]:
    """The results of a generated function on arrays, bf16 as its bits."""
    names = _library()
    exec(source, names)
    with np.errstate(all="ignore"):
        found = names[name](*map(Value, arguments))
    return [value.array for value in (found if isinstance(found, tuple) else (found,))]
