"""The part of triton.language that generated source uses, on NumPy: it needs no Triton."""

import operator
import types
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np


class Value:
    """An array with Triton's operators and conversions."""

    def __init__(self, array: Any):
        self.array = np.asarray(array)

    def to(self, dtype: np.dtype, bitcast: bool = False) -> "Value":
        """The values in another dtype, or their bits as it."""
        return Value(self.array.view(dtype) if bitcast else self.array.astype(dtype))

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
                                                     "expm1", "log1p",
                                                     "log", "where", "max", "min", "sum",
                                                     "reshape", "broadcast_to")},
    bfloat16=np.dtype(ml_dtypes.bfloat16),
    int1=np.dtype(bool),
    PropagateNan=types.SimpleNamespace(ALL=None),
    maximum=_lifted(lambda x, y, propagate_nan=None: np.maximum(x, y)),
    minimum=_lifted(lambda x, y, propagate_nan=None: np.minimum(x, y)),
    rsqrt=_lifted(lambda x: 1 / np.sqrt(x)),
    full=lambda shape, value, dtype: Value(np.full(shape, value, dtype)),
    arange=lambda start, end: Value(np.arange(start, end, dtype=np.int32)),
    inline_asm_elementwise=_instruction,
)  # fmt: skip


def run(source: str, name: str, *arguments: Any) -> list[np.ndarray]:
    """The results of a generated function on arrays, bf16 as its bits."""
    names = {
        "tl": tl,
        "libdevice": tl,
        "minus": _lifted(np.negative),
        "triton": types.SimpleNamespace(jit=lambda function: function),
    }
    exec(source, names)
    with np.errstate(all="ignore"):
        found = names[name](*map(Value, arguments))
    return [value.array for value in (found if isinstance(found, tuple) else (found,))]
