"""Bytes that a Llama's layer keeps for its backward pass, from shapes alone (COAT, Table 2), and
that it reads and writes, with its kernels, compiled for an H100.

JAX_PLATFORMS=cpu python -m benchmarks.run activation_passes --record   # jax[cuda12], and no GPU

Nothing is run or timed: `benchmarks.absent_gpu` says what is counted. For cuDNN's attention, which
asks for a device, stands a kernel of its arguments and results.
"""

import argparse
import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from benchmarks import absent_gpu, records
from benchmarks.records import Rows
from benchmarks.suites.activations import layers as activation_layers
from benchmarks.suites.activations.layers import Layer, Params, Shape
from optax_lowmem import memory
from optax_lowmem._src.kernels import gpu_kernel

# columns of Table 2, and what else there is: the sums that go past the layer
COLUMNS = ("RMSNorm", "Act Func", "RoPE", "FlashAttn", "Linear", "Residual")
# a part of the names that `jax.named_scope`s give an operation -> its column
_OF = {"norm": 0, "activation": 1, "rotary": 2, "attention": 3, "linear": 4}
CASES = ["h2048-s2048-b4", "h4096-s4096-b4"]
LAYERS = ["bf16", "fp8-flow", "fp8-flow-cached", "flax-fp8"]
# what a kernel is for -> a part of its text, the first that is found
KINDS = {
    "products": ("quantized_product", "__cublas"),
    "attention": ("__cudnn", "attention_"),
    "maxima and codes": ("fp8_", "quantize_transposed", "/linear/", "DotGeneralOp"),
}
REST = "norms, gates, rotary, sums"


def by_column(report: memory.ActivationReport) -> dict[str, float]:
    """U of what the operations of each column made: that of the last known part of their names."""
    found = dict.fromkeys(COLUMNS, 0.0)
    for operation, size in report.by_operation.items():
        parts = [part for part in operation.split("/") if part in _OF]
        found[COLUMNS[_OF[parts[-1]] if parts else -1]] += size / report.unit
    return found


# a kernel that XLA sees the arguments and results of, which it never runs
_attention = functools.partial(gpu_kernel.launch, lambda *_: None, grid=(1,), warps=4)


@jax.custom_vjp
def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Stands for cuDNN's where nothing is run: [batch, length, heads, head] of the same."""
    return _attention((q, k, v), [q], name="attention_forward")[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    sums = jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32)  # of a row's exponentials
    y, sums = _attention((q, k, v), [q, sums], name="attention_forward")
    return y, (q, k, v, y, sums)


def _backward(kept: Any, g: jax.Array) -> tuple[jax.Array, ...]:
    dq, dk, dv = _attention((*kept, g), [*kept[:3]], name="attention_backward")
    return dq, dk, dv


attention.defvjp(_forward, _backward)


def with_attention() -> Any:
    """Trace with a kernel that stands for cuDNN's attention, which asks for a device."""
    return mock.patch.object(
        jax.nn, "dot_product_attention", lambda q, k, v, **_: attention(q, k, v)
    )


def abstract(name: str, shape: Shape, kind: str) -> tuple[Layer, Params, jax.ShapeDtypeStruct]:
    """A layer by its name, and the shapes of its parameters and input."""
    layer, params = activation_layers.make(name, shape, kind)
    x = jax.ShapeDtypeStruct((shape.batch, shape.length, shape.width), jnp.bfloat16)
    with with_attention():
        return layer, jax.eval_shape(params), x


def kept(shape: Shape, name: str, kind: str) -> memory.ActivationReport:
    with with_attention() if kind == "cudnn" else contextlib.nullcontext():
        args = abstract(name, shape, kind)
        return memory.activation_report(*args, weights=0, unit=shape.unit)


def program(on: Mesh, function: Callable[..., Any], *args: Any) -> str:
    with with_attention():
        return absent_gpu.program(on, function, *args)


def count(text: str) -> tuple[dict[str, int], int]:
    """Bytes that a program reads and writes, by what they are for, and how many kernels it has."""
    moved = collections.Counter(dict.fromkeys((*KINDS, REST), 0))
    launches = 0
    for times, rest, size in absent_gpu.kernels(text):
        kinds = (kind for kind, parts in KINDS.items() if any(part in rest for part in parts))
        launches += times
        moved[next(kinds, REST)] += times * size
    return dict(moved), launches


def passes_of(on: Mesh, case: str, name: str) -> Rows:
    """The records of a layer, of its forward pass and of both."""
    layer, params, x = abstract(name, Shape.parse(case), "cudnn")
    found: Rows = []
    for which, function, args in (
        ("forward", layer, (params, x)),
        ("both", activation_layers.backward(layer), (params, x, x)),
    ):
        moved, launches = count(program(on, function, *args))
        values = {
            f"{which}_traffic_bytes": (sum(moved.values()), "B"),
            f"{which}_launches": (launches, ""),
        }
        found += records.records_of(
            "activation_passes", case, name, values, device=records.H100_NEVER_RUN, kinds=moved
        )
    return found


@records.suite(
    shapes={"nargs": "+", "default": CASES, "metavar": "hWIDTH-sLENGTH-bBATCH"},
    impl={"nargs": "+", "choices": activation_layers.NAMES, "default": LAYERS, "metavar": "NAME"},
)
def passes(args: argparse.Namespace) -> Iterator[Rows]:
    on = absent_gpu.mesh()
    yield from (passes_of(on, case, name) for case in args.shapes for name in args.impl)
