"""Bytes that a Llama's layer reads and writes, and its kernels, compiled for an H100.

JAX_PLATFORMS=cpu python -m benchmarks.run activation_passes --record   # jax[cuda12], and no GPU

Nothing is run or timed: `benchmarks.absent_gpu` says what is counted. For cuDNN's attention, which
asks for a device, stands a kernel of its arguments and results.
"""

import argparse
import collections
from collections.abc import Callable, Iterator
from typing import Any

from jax.sharding import Mesh

from benchmarks import absent_gpu, records
from benchmarks.records import Rows
from benchmarks.suites.activations import bench
from benchmarks.suites.activations import layers as activation_layers
from benchmarks.suites.activations.bytes import abstract, with_attention
from benchmarks.suites.activations.layers import Shape

CASES = ["h2048-s2048-b4", "h4096-s4096-b4"]
LAYERS = ["bf16", "fp8-flow", "fp8-flow-cached", "flax-fp8"]
# what a kernel is for -> a part of its text, the first that is found
KINDS = {
    "products": ("quantized_product", "__cublas"),
    "attention": ("__cudnn", "attention_"),
    "maxima and codes": ("fp8_", "quantize_transposed", "/linear/", "DotGeneralOp"),
}
REST = "norms, gates, rotary, sums"


def program(on: Mesh, function: Callable[..., Any], *args: Any) -> str:
    """The text of a function's program for an H100; args are abstract."""
    with with_attention():
        return absent_gpu.program(on, function, *args)


def kind(text: str) -> str:
    """Return what the kernel of an instruction is for, of `KINDS` or `REST`."""
    found = (name for name, parts in KINDS.items() if any(part in text for part in parts))
    return next(found, REST)


def count(text: str) -> tuple[dict[str, int], int]:
    """Bytes that a program reads and writes, by what they are for, and how many kernels it has."""
    moved = collections.Counter(dict.fromkeys((*KINDS, REST), 0))
    launches = 0
    for times, rest, size in absent_gpu.kernels(text):
        launches += times
        moved[kind(rest)] += times * size
    return dict(moved), launches


def rows(on: Mesh, case: str, name: str) -> Rows:
    """The records of a layer, of its forward pass and of both."""
    layer, params, x = abstract(name, Shape.parse(case), "cudnn")
    found: Rows = []
    for passes, function, args in (
        ("forward", layer, (params, x)),
        ("both", bench.backward(layer), (params, x, x)),
    ):
        moved, launches = count(program(on, function, *args))
        values = {
            f"{passes}_traffic_bytes": (sum(moved.values()), "B"),
            f"{passes}_launches": (launches, ""),
        }
        found += records.records_of(
            "activation_passes", case, name, values, device=records.H100_NEVER_RUN, kinds=moved
        )
    return found


@records.suite(
    shapes={"nargs": "+", "default": CASES, "metavar": "hWIDTH-sLENGTH-bBATCH"},
    impl={"nargs": "+", "choices": activation_layers.NAMES, "default": LAYERS, "metavar": "NAME"},
)
def main(args: argparse.Namespace) -> Iterator[Rows]:
    on = absent_gpu.mesh()
    yield from (rows(on, case, name) for case in args.shapes for name in args.impl)
