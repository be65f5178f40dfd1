"""Bytes that a Llama's layer keeps for its backward pass, from shapes alone (COAT, Table 2), and
that it reads and writes, with its kernels, compiled for an H100.

JAX_PLATFORMS=cpu python -m benchmarks.run activation_passes --record   # jax[cuda12], and no GPU

Nothing is run or timed: `benchmarks.absent_gpu` says what is counted.
"""

import argparse
import collections
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from benchmarks import absent_gpu, records
from benchmarks.records import Rows
from benchmarks.suites.activations import layers as activation_layers
from benchmarks.suites.activations.layers import Layer, Params, Shape
from optax_lowmem import memory

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


def abstract(name: str, shape: Shape, kind: str) -> tuple[Layer, Params, jax.ShapeDtypeStruct]:
    """A layer by its name, and the shapes of its parameters and input."""
    layer, params = activation_layers.make(name, shape, kind)
    x = jax.ShapeDtypeStruct((shape.batch, shape.length, shape.width), jnp.bfloat16)
    with absent_gpu.cudnn():
        return layer, jax.eval_shape(params), x


def kept(shape: Shape, name: str, kind: str) -> memory.ActivationReport:
    with absent_gpu.cudnn():
        args = abstract(name, shape, kind)
        return memory.activation_report(*args, weights=0, unit=shape.unit)


def program(on: Mesh, function: Callable[..., Any], *args: Any) -> str:
    with absent_gpu.cudnn():
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
    """The records of a layer, of its forward and backward pass."""
    layer, params, x = abstract(name, Shape.parse(case), "cudnn")
    moved, launches = count(program(on, activation_layers.backward(layer), params, x, x))
    values = {
        "both_traffic_bytes": (sum(moved.values()), "B"),
        "both_launches": (launches, ""),
    }
    more = {"device": records.H100_NEVER_RUN, "kinds": moved}
    return records.records_of("activation_passes", case, name, values, **more)


@records.suite(
    shapes={"nargs": "+", "default": CASES, "metavar": "hWIDTH-sLENGTH-bBATCH"},
    impl={"nargs": "+", "choices": activation_layers.NAMES, "default": LAYERS, "metavar": "NAME"},
)
def passes(args: argparse.Namespace) -> Iterator[Rows]:
    on = absent_gpu.mesh()
    yield from (passes_of(on, case, name) for case in args.shapes for name in args.impl)
