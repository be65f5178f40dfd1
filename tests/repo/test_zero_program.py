"""What GPUs send to each other under ZeRO-1, compiled for two H100s that are not there."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
from benchmarks import absent_gpu
from optax_lowmem.sharding import state_shardings

pytestmark = pytest.mark.gpu
SHAPES = {"w": (512, 1024), "layers": (4, 256, 512)}
GATHERED = r"= (.*?) all-gather(?:-start)?\("


@pytest.mark.parametrize("zero_axis", [None, "one"])
def test_zero_gathers_the_new_weights_in_16_bits(zero_axis):
    """Each device slices its part of weights and gradients; FSDP sends nothing."""
    on, tx = absent_gpu.mesh(2), lowmem.flash_adamw(1e-3)
    masters = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    params, state = jax.eval_shape(functools.partial(lowmem.init, tx), masters)
    spec = P("one") if zero_axis is None else P()
    of_params = dict.fromkeys(SHAPES, NamedSharding(on, spec))
    shardings = of_params, state_shardings(tx, params, of_params, zero_axis=zero_axis)
    params, state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        (params, state), shardings,
    )  # fmt: skip
    text = absent_gpu.program(
        on, lambda p, s, g: lowmem.step(tx, g, s, p), params, state, params,
        donated=(0, 1), out_shardings=shardings,
    )  # fmt: skip
    results = " ".join(re.findall(GATHERED, text))
    wanted = set() if zero_axis is None else {"bf16[512,1024]", "bf16[4,256,512]"}
    halves = {"bf16[256,1024]", "bf16[2,256,512]"}  # operands of an asynchronous gather
    assert wanted <= set(re.findall(r"\w+\[[\d,]+\]", results)) <= wanted | halves
    assert not re.search(r"all-reduce|all-to-all|reduce-scatter|collective-permute", text)
    assert not re.search(r"= \w+\[\d+,[\d,]+\]\S* copy(-start)?\(", text)
    assert "xla.gpu.triton" in text
