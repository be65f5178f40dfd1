"""The step of every optimizer lowered for TPUs by `jax.export`, anywhere and without libtpu."""

import jax
import jax.numpy as jnp
import pytest
from jax import export

import optax_lowmem as lowmem
from tests import small_leaves
from tests.tiers import rows


@pytest.mark.parametrize("name", rows(lowmem.OPTIMIZERS, ["flash_adamw"]))
def test_a_step_is_exported_for_tpus(name):
    tx = small_leaves.record(name).make(1e-3)
    masters = {
        "kernel": jax.ShapeDtypeStruct((64, 4096), jnp.float32),
        "odd": jax.ShapeDtypeStruct((33, 70), jnp.float32),
        "norm": jax.ShapeDtypeStruct((64,), jnp.float32),
    }
    params, state = jax.eval_shape(lambda p: lowmem.init(tx, p), masters)

    def step(grads, state, params):
        return lowmem.step(tx, grads, state, params)

    exported = export.export(jax.jit(step), platforms=["tpu"])(params, state, params)
    assert exported.platforms == ("tpu",)
    wanted = [(x.shape, x.dtype) for x in jax.tree.leaves((params, state))]
    assert [(x.shape, x.dtype) for x in exported.out_avals] == wanted
    # without the names of files that traced a part before
    code = [line for line in exported.mlir_module().splitlines() if not line.startswith("#loc")]
    assert any("stablehlo" in line for line in code)
    assert not any("triton" in line for line in code)
