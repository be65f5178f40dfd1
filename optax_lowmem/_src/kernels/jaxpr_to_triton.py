"""Translation of jaxprs to Triton source, so that a formula is written once, in jnp.

The source is for a module with `triton` and the names in `triton_library`.

Arrays of the function are scalars, and tiles whose sizes are powers of two. bf16 and FP8 arrays are
held as their bits, in uint16 and uint8; arithmetic on them is done in f32 and rounded.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from optax_lowmem._src.arrays import numerics
from optax_lowmem._src.kernels import gpu_kernel

Jaxpr: TypeAlias = jex.core.ClosedJaxpr
Equation: TypeAlias = jex.core.JaxprEqn

_TYPES = {
    "float32": "tl.float32", "float16": "tl.float16", "bfloat16": "tl.uint16",
    "float8_e4m3fn": "tl.uint8", "float8_e5m2": "tl.uint8", "int8": "tl.int8",
    "uint8": "tl.uint8", "int16": "tl.int16", "uint16": "tl.uint16", "int32": "tl.int32",
    "uint32": "tl.uint32", "bool": "tl.int1",
}  # fmt: skip
_FP8 = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
_HELD_AS_BITS = ("bfloat16", *_FP8)

# ---- instructions --------------------------------------------------------------------------------

# A PTX instruction of one f32 operand, for a GPU's `numerics.Approximations`; only traced.
_instruction = jex.core.Primitive("instruction")
_instruction.def_abstract_eval(lambda x, name: jax.core.ShapedArray(x.shape, x.dtype))


def _approximation(name: str) -> numerics.Elementwise:
    return lambda x: _instruction.bind(jnp.asarray(x), name=name)


APPROXIMATIONS = gpu_kernel.approximations(_approximation)

# ---- expressions ---------------------------------------------------------------------------------

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==",
    "ne": "!=", "shift_left": "<<", "shift_right_arithmetic": ">>", "and": "&", "or": "|",
    "xor": "^",
}  # fmt: skip
# exp, log and sin are CUDA's, as with Pallas, so that both backends give equal results; Triton's
# exponentials are approximations.
_CALLS = {
    "abs": "tl.abs", "sqrt": "tl.sqrt", "rsqrt": "tl.rsqrt", "floor": "tl.floor",
    "ceil": "tl.ceil", "exp": "libdevice.exp", "exp2": "libdevice.exp2",
    "expm1": "libdevice.expm1", "log1p": "libdevice.log1p", "log": "libdevice.log",
    "sin": "libdevice.sin", "cos": "libdevice.cos", "tanh": "libdevice.tanh",
    "erf": "libdevice.erf", "erfc": "libdevice.erfc",
}  # fmt: skip
_REDUCTIONS = {"reduce_max": "tl.max", "reduce_min": "tl.min", "reduce_sum": "tl.sum"}
_SHAPES = ("broadcast_in_dim", "reshape", "expand_dims", "squeeze")
_UNCHANGED = ("copy", "copy_p", "stop_gradient", "optimization_barrier", "pvary", "reshard")
# primitives that operate on held bits, without arithmetic in f32
_OF_BITS = (
    *_SHAPES, *_UNCHANGED, "bitcast_convert_type", "convert_element_type", "select_n", "transpose",
    "load_tile", "store_tile",
)  # fmt: skip
_INLINED = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat")


def _aval(x: jex.core.Var | jex.core.Literal) -> jax.core.ShapedArray:
    assert isinstance(x.aval, jax.core.ShapedArray)
    return x.aval


class Operation:
    """An equation of a jaxpr with its operands as Triton expressions.

    `avals` and `result` are shapes and dtypes; `fp8` says whether the GPU converts to and from
    E4M3.
    """

    def __init__(self, eqn: Equation, operands: Sequence[str], fp8: bool):
        self.name, self.params, self.operands = eqn.primitive.name, eqn.params, operands
        self.fp8 = fp8
        self.avals, self.result = list(map(_aval, eqn.invars)), _aval(eqn.outvars[0])

    def source(self) -> str:
        """Return the Triton expression of the result."""
        form = FORMS[self.name]
        if self.name in _OF_BITS:
            return form(self)
        widened = copy.copy(self)
        widened.operands = [
            self.widened(x, aval.dtype.name)
            for x, aval in zip(self.operands, self.avals, strict=True)
        ]
        return self.narrowed(form(widened), self.result.dtype.name)

    def widened(self, x: str, kind: str) -> str:
        """Return f32 of the bits that a dtype is held as, or `x` for other dtypes."""
        if kind == "bfloat16":
            return f"({x}.to(tl.uint32) << 16).to(tl.float32, bitcast=True)"
        return f"of_{self._fp8_name(kind)}({x})" if kind in _FP8 else x

    def narrowed(self, x: str, kind: str) -> str:
        """Round f32 to the bits that a dtype is held as (nearest even); inverts `widened`."""
        if kind == "bfloat16":
            return f"({x}).to(tl.bfloat16).to(tl.uint16, bitcast=True)"
        return f"to_{self._fp8_name(kind)}({x})" if kind in _FP8 else x

    def _fp8_name(self, kind: str) -> str:
        by_bits = kind == "float8_e4m3fn" and not self.fp8
        return _FP8[kind] + ("_by_bits" if by_bits else "")

    @property
    def type(self) -> str:
        """Triton's name of the result's dtype."""
        return _TYPES[self.result.dtype.name]

    @property
    def floating(self) -> bool:
        """Return whether the result is a float."""
        return bool(jnp.issubdtype(self.result.dtype, jnp.floating))

    def extreme(self) -> str:
        """Return lax.max or lax.min, which propagate NaN."""
        # Triton's do not by default: https://github.com/triton-lang/triton/issues/1566
        nan = ", propagate_nan=tl.PropagateNan.ALL" if self.floating else ""
        return f"tl.{self.name}imum({self.operands[0]}, {self.operands[1]}{nan})"

    def shift_right_logical(self) -> str:
        """Return a logical shift, which is Triton's of unsigned numbers; bitcast signed ones."""
        x, by = self.operands
        kind = self.avals[0].dtype
        if kind.kind == "u":
            return f"{x} >> {by}"
        unsigned = _TYPES[f"u{kind.name}"]
        x, by = (f"{operand}.to({unsigned}, bitcast=True)" for operand in (x, by))
        return f"({x} >> {by}).to({self.type}, bitcast=True)"

    def negative(self) -> str:
        """Return -x; Triton's negation is 0 - x, which gives 0.0 for 0.0."""
        (x,) = self.operands
        if self.result.dtype == jnp.float32:
            return f"minus({x})"
        return f"{x} * -1.0" if self.floating else f"0 - {x}"

    def sign(self) -> str:
        """Return -1, 0 or 1; NaN for NaN."""
        (x,) = self.operands
        if not self.floating:
            return f"({x} > 0).to({self.type}) - ({x} < 0).to({self.type})"
        return f"tl.where({x} > 0, 1.0, tl.where({x} < 0, -1.0, {x}))"

    def reduce(self) -> str:
        """Return a reduction over axes, the last one first."""
        (result,) = self.operands
        for axis in sorted(self.params["axes"], reverse=True):
            result = f"{_REDUCTIONS[self.name]}({result}, axis={axis})"
        return result

    def transpose(self) -> str:
        """Return the transpose of a matrix."""
        assert tuple(self.params["permutation"]) == (1, 0)
        return f"tl.trans({self.operands[0]})"

    def logistic(self) -> str:
        """Return 1 / (1 + exp(-x)), with Triton's exp, whose error is negligible here."""
        return f"1.0 / (1.0 + tl.exp(minus({self.operands[0]})))"

    def bitcast(self) -> str:
        """Return the operand's bits as another dtype."""
        (x,) = self.operands
        if _TYPES[self.avals[0].dtype.name] == self.type:
            return x
        return f"{x}.to({self.type}, bitcast=True)"

    def convert(self) -> str:
        """Return the operand converted to another dtype."""
        (x,), one, other = self.operands, self.avals[0].dtype.name, self.result.dtype.name
        if one in _HELD_AS_BITS:
            x, one = self.widened(x, one), "float32"
            if other == one:
                return x
        if other in _HELD_AS_BITS:
            return self.narrowed(x if one == "float32" else f"{x}.to(tl.float32)", other)
        return f"{x} != 0" if other == "bool" else f"{x}.to({self.type})"

    def shape(self) -> str:
        """Return a view, or the operand broadcast to more rows or lanes."""
        (x,), old, new = self.operands, tuple(self.avals[0].shape), tuple(self.result.shape)
        if old == new:
            return x
        if self.name != "broadcast_in_dim" and old:
            return f"tl.reshape({x}, {new})"
        dims = self.params.get("broadcast_dimensions", ())
        if old and len(new) > len(old):
            x = f"{x}[{', '.join(':' if d in dims else 'None' for d in range(len(new)))}]"
            old = tuple(old[dims.index(d)] if d in dims else 1 for d in range(len(new)))
        return x if old == new else f"tl.broadcast_to({x}, {new})"

    def iota(self) -> str:
        """Return the index along a dimension."""
        shape, axis = tuple(self.result.shape), self.params["dimension"]
        index = f"tl.arange(0, {shape[axis]}).to({self.type})"
        if len(shape) == 1:
            return index
        at = ", ".join(":" if d == axis else "None" for d in range(len(shape)))
        return f"tl.broadcast_to({index}[{at}], {shape})"

    def instruction(self) -> str:
        """Return a PTX instruction of one f32 operand."""
        return (
            f"tl.inline_asm_elementwise('{self.params['name']} $0, $1;', '=r,r', "
            f"[{self.operands[0]}], dtype={self.type}, is_pure=True, pack=1)"
        )


FORMS: dict[str, Callable[[Operation], str]] = {
    **dict.fromkeys(_INFIX, lambda op: f" {_INFIX[op.name]} ".join(op.operands)),
    **dict.fromkeys(_CALLS, lambda op: f"{_CALLS[op.name]}({op.operands[0]})"),
    **dict.fromkeys(_REDUCTIONS, Operation.reduce),
    **dict.fromkeys(("max", "min"), Operation.extreme),
    **dict.fromkeys(_SHAPES, Operation.shape),
    **dict.fromkeys(_UNCHANGED, lambda op: op.operands[0]),
    "shift_right_logical": Operation.shift_right_logical,
    "not": lambda op: f"{op.operands[0]} == 0" if op.type == "tl.int1" else f"~{op.operands[0]}",
    "neg": Operation.negative,
    "div": lambda op: (" / " if op.floating else " // ").join(op.operands),
    "rem": lambda op: " % ".join(op.operands),
    "sign": Operation.sign,
    "square": lambda op: "{0} * {0}".format(*op.operands),
    "integer_pow": lambda op: " * ".join([op.operands[0]] * op.params["y"]),
    "is_finite": lambda op: f'tl.abs({op.operands[0]}) < float("inf")',
    "transpose": Operation.transpose,
    "logistic": Operation.logistic,
    "clamp": lambda op: "tl.minimum(tl.maximum({1}, {0}), {2})".format(*op.operands),
    "select_n": lambda op: "tl.where({0}, {2}, {1})".format(*op.operands),
    "bitcast_convert_type": Operation.bitcast,
    "convert_element_type": Operation.convert,
    "iota": Operation.iota,
    "instruction": Operation.instruction,
}  # fmt: skip


def _inner(eqn: Equation) -> Sequence[Jaxpr]:
    """Return the closed jaxprs of a call, or of the two branches of a `lax.cond`."""
    if eqn.primitive.name == "cond":
        return eqn.params["branches"]
    if eqn.primitive.name not in _INLINED:
        return ()
    inner = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
    return (inner if hasattr(inner, "consts") else jex.core.ClosedJaxpr(inner, ()),)


def missing(closed: Jaxpr) -> str | None:
    """Return a part of a closed jaxpr that has no translation to Triton, or None.

    This is the name of a primitive, or a description of a constant array.
    """
    shapes = [np.shape(value) for value in closed.consts if np.ndim(value)]
    if shapes:
        return f"a constant array of shape {shapes[0]}"
    for eqn in closed.jaxpr.eqns:
        name, inner = eqn.primitive.name, _inner(eqn)
        result = next(filter(None, map(missing, inner)), None)
        if result is not None or (not inner and name not in FORMS):
            return result or name
    return None


class _Writer:
    """Writes the lines of a function's body; `fp8` as in `Operation`."""

    def __init__(self, fp8: bool) -> None:
        self.lines: list[str] = []
        self.fp8 = fp8
        self.depth = 1

    def body(self, closed: Jaxpr, arguments: Sequence[str]) -> list[str]:
        """Write a closed jaxpr, and return the names of its results."""
        names = dict(zip(closed.jaxpr.invars, arguments, strict=True))
        for variable, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            names[variable] = _literal(value, value.dtype)

        def read(x: jex.core.Var | jex.core.Literal) -> str:
            return _literal(x.val, _aval(x).dtype) if isinstance(x, jex.core.Literal) else names[x]

        for eqn in closed.jaxpr.eqns:
            operands = [read(x) for x in eqn.invars]
            inner = _inner(eqn)
            if eqn.primitive.name == "cond":
                results = self._either(inner, *operands)
            elif inner:
                results = self.body(inner[0], operands)
            else:
                results = [self._named(Operation(eqn, operands, self.fp8))]
            names.update(zip(eqn.outvars, results, strict=True))
        return [read(x) for x in closed.jaxpr.outvars]

    def _line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def _named(self, operation: Operation) -> str:
        name = f"v{len(self.lines)}"
        statement = operation.name in ("store_tile", "barrier")
        self._line(operation.source() if statement else f"{name} = {operation.source()}")
        return name

    def _either(self, branches: Sequence[Jaxpr], which: str, *operands: str) -> list[str]:
        """Write two branches, and return names that both assign their results to."""
        no, yes = branches
        results = [f"c{len(self.lines)}_{i}" for i in range(len(yes.jaxpr.outvars))]
        for line, branch in ((f"if {which} != 0:", yes), ("else:", no)):
            self._line(line)
            self.depth += 1
            for name, value in zip(results, self.body(branch, operands), strict=True):
                self._line(f"{name} = {value}")
            self.depth -= 1
        return results


def _literal(value: ArrayLike, dtype: DTypeLike) -> str:
    value, kind = np.asarray(value)[()], np.dtype(dtype)
    if kind == jnp.bfloat16:
        value, kind = np.asarray(value, dtype).view(np.uint16)[()], np.dtype(np.uint16)
    if kind.kind == "f":
        number = float(value)
        text = repr(number) if math.isfinite(number) else f'float("{number}")'
    else:
        text = str(int(value))
    return f"tl.full((), {text}, {_TYPES[kind.name]})"


def kernel(
    closed: Jaxpr, name: str, parameters: Sequence[str], inputs: Sequence[str], fp8: bool = True
) -> str:
    """Return the source of a `triton.jit` kernel whose body is a jaxpr.

    The jaxpr loads and stores through pointers, and returns nothing. `parameters` are the kernel's;
    `inputs` names the parameter of each input of the jaxpr. `fp8` is as in `Operation`.
    """
    writer = _Writer(fp8)
    writer.body(closed, inputs)
    return _source(name, parameters, writer.lines)


def _source(name: str, parameters: Sequence[str], body: Sequence[str]) -> str:
    lines = ["@triton.jit", f"def {name}({', '.join(parameters)}):"]
    return "\n".join([*lines, *body]) + "\n"
