"""`optax_lowmem.levanter`: the config that Levanter finds by its name, and what it builds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from tests import levanter_stand_in  # noqa: F401

from optax_lowmem.levanter import FlashAdamWConfig  # isort: skip
from levanter.optim.config import OptimizerConfig  # isort: skip


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("norm", [None, 1e-7])
def test_levanter_builds_flash_adamw(dtype, norm):
    assert OptimizerConfig.choices["flash_adamw"] is FlashAdamWConfig
    tx = FlashAdamWConfig(learning_rate=1e-2, max_grad_norm=norm).build(10)
    params = {"w": jnp.ones((64, 64), dtype), "b": jnp.ones(64, dtype)}
    grads = jax.tree.map(lambda p: p * 1e-8, params)  # of eps's size, so that clipping shows
    state = tx.init(params)
    updates, after = tx.update(grads, state, params, loss=0.0, obj_fn=None)
    assert float(after.hyperparams["learning_rate"]) == np.float32(1e-2)  # Levanter logs it
    assert updates["w"].dtype == dtype  # added without a cast, the weights keep their dtype
    codes = [leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if leaf.shape == (64, 64)]
    assert sorted(codes) == [1, 1] + [1] * (dtype == jnp.bfloat16)
    plain = lowmem.flash_adamw(1e-2, b2=0.95, weight_decay=0.1, mask={"w": True, "b": False})
    if norm is not None:
        grads, _ = optax.clip_by_global_norm(norm).update(grads, None)
    expected, _ = plain.update(grads, plain.init(params), params)
    for name, update in updates.items():
        np.testing.assert_allclose(
            update.astype(np.float32), expected[name], rtol=1e-2 if dtype == jnp.bfloat16 else 1e-6
        )
