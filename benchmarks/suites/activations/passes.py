"""Bytes that a Llama's layer reads and writes, and its kernels, compiled for an H100.

JAX_PLATFORMS=cpu python -m benchmarks.run activation_passes --record   # jax[cuda12], and no GPU

Nothing is run or timed. Bytes are those of the operands and results of each kernel: an operand that
a kernel reads twice counts once, also one that the L2 cache still has. XLA chooses no algorithms by
trying them (`xla_gpu_autotune_level=0`), and leaves all products to cuBLAS or to our kernels. For
cuDNN's attention, which asks for a device, stands a kernel of its arguments and results.
"""

import argparse
import collections
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks import records
from benchmarks.records import Rows
from benchmarks.suites.activations import bench
from benchmarks.suites.activations import layers as activation_layers
from benchmarks.suites.activations.layers import Layer, Params, Shape
from benchmarks.suites.tpu.program import Program
from optax_lowmem._src.core import gpu_kernel, platform

CASES = ["h2048-s2048-b4", "h4096-s4096-b4"]
LAYERS = ["bf16", "fp8-flow", "fp8-flow-cached", "flax-fp8"]
OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
# what a kernel is for -> a part of its text, the first that is found
KINDS = {
    "products": ("quantized_product", "__cublas"),
    "attention": ("__cudnn", "attention_"),
    "maxima and codes": ("fp8_", "quantize_transposed", "/linear/", "DotGeneralOp"),
}
REST = "norms, gates, rotary, sums"
# XLA's description of the device, as text of its protocol buffer
_TARGET = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  l2_cache_size: 52428800
  memory_bandwidth: 3352320000000
  device_memory_size: 84978434048
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.8.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def mesh() -> Mesh:
    """An H100 that is not there, for programs to be compiled for."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # which asks the driver
    found = topologies.get_topology_desc(
        platform="cuda", topology_name="h100", topology="1x1x1", target_config=_TARGET
    )
    return Mesh(np.array(found.devices), ("one",), axis_types=(AxisType.Auto,))


def _attention(name: str, given: tuple[jax.Array, ...], results: list[Any]) -> list[jax.Array]:
    """A kernel that XLA sees the arguments and results of, which it never runs."""
    return gpu_kernel.launch(lambda *_: None, given, results, (1,), warps=4, name=name)


@jax.custom_vjp
def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Stands for cuDNN's where nothing is run: [batch, length, heads, head] of the same."""
    return _attention("attention_forward", (q, k, v), [q])[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    sums = jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32)  # of a row's exponentials
    y, sums = _attention("attention_forward", (q, k, v), [q, sums])
    return y, (q, k, v, y, sums)


def _backward(kept: Any, g: jax.Array) -> tuple[jax.Array, ...]:
    dq, dk, dv = _attention("attention_backward", (*kept, g), [*kept[:3]])
    return dq, dk, dv


attention.defvjp(_forward, _backward)


@contextlib.contextmanager
def as_on_one() -> Iterator[None]:
    """Trace as on a machine with one H100."""
    with contextlib.ExitStack() as patches:
        for module, name, value in (
            (jax, "device_count", lambda: 1),
            (platform, "no_device_reason", lambda: None),
            (platform, "not_hopper_reason", lambda: None),
            (jax.nn, "dot_product_attention", lambda q, k, v, **_: attention(q, k, v)),
        ):
            patches.enter_context(mock.patch.object(module, name, value))
        yield


def layer_and_parameters(name: str, shape: Shape) -> tuple[Layer, Params]:
    """A layer with cuDNN's attention, and the shapes of its parameters."""
    if name != "flax-fp8":
        return activation_layers.make_abstract(name, shape, "cudnn")
    like = jax.eval_shape(lambda: activation_layers.flax_fp8(shape, "xla")[1])  # has no cuDNN here
    return lambda variables, x: activation_layers.FlaxFp8(shape, "cudnn").apply(variables, x), like


def program(on: Mesh, function: Callable[..., Any], *args: Any) -> str:
    """The text of a function's program for the device of a mesh; args are abstract."""
    where = NamedSharding(on, PartitionSpec())
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), args)
    with jax.sharding.use_abstract_mesh(on.abstract_mesh), as_on_one():
        lowered = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
        return lowered.compile(compiler_options=OPTIONS).as_text()


def kind(text: str) -> str:
    """Return what the kernel of an instruction is for, of `KINDS` or `REST`."""
    found = (name for name, parts in KINDS.items() if any(part in text for part in parts))
    return next(found, REST)


def count(text: str) -> tuple[dict[str, int], int]:
    """Bytes that a program reads and writes, by what they are for, and how many kernels it has."""
    found, moved = Program(text), collections.Counter(dict.fromkeys((*KINDS, REST), 0))
    launches = 0
    for times, (inside, one) in found.runs():
        if size := found.moved(inside, one):
            # cuBLAS' room to work in is no result
            size -= sum(x.size for x in one.results[1:]) if "__cublas" in one.rest else 0
            launches += times
            moved[kind(one.rest)] += times * size
    return dict(moved), launches


def rows(on: Mesh, case: str, name: str) -> Rows:
    """The records of a layer, of its forward pass and of both."""
    shape = Shape.parse(case)
    layer, params = layer_and_parameters(name, shape)
    x = jax.ShapeDtypeStruct((shape.batch, shape.length, shape.width), jnp.bfloat16)
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
    on = mesh()
    yield from (rows(on, case, name) for case in args.shapes for name in args.impl)
