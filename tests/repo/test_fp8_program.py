"""What GPUs send to each other in FP8 layers under FSDP, compiled for H100s that are not there."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import absent_gpu
from optax_lowmem.layers import fp8_flow

pytestmark = pytest.mark.gpu
KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def block(x, scale, up, down):
    y = fp8_flow.linear(fp8_flow.rms_norm(x, scale), up)
    return fp8_flow.linear(fp8_flow.gated_product(y), down)


def test_fsdp_gathers_codes():
    """Weights as FP8 codes in each pass, gradients scattered, maxima of tensors; by kernels."""
    on = absent_gpu.mesh(2)
    cut, whole = NamedSharding(on, P("one")), NamedSharding(on, P())

    def step(x, weights, g):
        y, pull = jax.vjp(lambda x, weights: block(x, *weights), x, weights)
        return y, *pull(g)

    of_weights = whole, cut, cut
    x = jax.ShapeDtypeStruct((8, 512, 1024), jnp.bfloat16, sharding=cut)
    weights = tuple(
        jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)
        for shape, sharding in zip(((1024,), (1024, 2048), (2048, 1024)), of_weights, strict=True)
    )
    text = absent_gpu.program(on, step, x, weights, x, out_shardings=(cut, cut, of_weights))
    moved = {
        (kind, array)
        for arrays, kind in re.findall(rf"= (.*?) ({KINDS})(?:-start)?\(", text)
        for array in re.findall(r"\w+\[[\d,]*\]", arrays)
    }
    dtypes = {(kind, array.split("[")[0]) for kind, array in moved}
    assert dtypes == {
        ("all-gather", "f8e4m3fn"), ("reduce-scatter", "bf16"),
        ("all-reduce", "s32"), ("all-reduce", "f32"),
    }  # fmt: skip
    reduced = {array for kind, array in moved if kind == "all-reduce" and array.startswith("f32")}
    assert reduced == {"f32[1024]"}  # the gradient of the norm's scale, beside maxima
    assert "__cublas" not in text and "mosaic_gpu" in text and "xla.gpu.triton" in text
