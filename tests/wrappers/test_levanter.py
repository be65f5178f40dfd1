"""`optax_lowmem.levanter`: the config that Levanter finds by its name, and what it builds."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from tests import levanter_stand_in  # noqa: F401
from tests.tiers import in_turn

from optax_lowmem.levanter import FlashAdamWConfig  # isort: skip
from levanter.optim.config import OptimizerConfig  # isort: skip


@pytest.mark.parametrize("dtype, norm", in_turn([jnp.float32, jnp.bfloat16], [None, 1e-7]))
def test_levanter_builds_flash_adamw(dtype, norm):
    assert OptimizerConfig.choices["flash_adamw"] is FlashAdamWConfig
    tx = FlashAdamWConfig(learning_rate=1e-2, max_grad_norm=norm).build(10)
    params = {"w": jnp.ones((64, 64), dtype), "b": jnp.ones(64, dtype)}
    grads = jax.tree.map(lambda p: p * 1e-8, params)  # of eps's size, so that clipping shows
    state = tx.init(params)
    updates, after = tx.update(grads, state, params, loss=0.0, obj_fn=None)
    new = eqx.apply_updates(params, updates)  # as Levanter does, without a cast
    assert float(after.hyperparams["learning_rate"]) == np.float32(1e-2)  # Levanter logs it
    plain = lowmem.flash_adamw(1e-2, b2=0.95, weight_decay=0.1, mask={"w": True, "b": False})
    if norm is not None:
        grads, _ = optax.clip_by_global_norm(norm).update(grads, None)
    expected, _ = lowmem.step(plain, grads, plain.init(params), params)
    for name, value in new.items():
        assert value.dtype == dtype
        np.testing.assert_allclose(
            value.astype(np.float32), expected[name].astype(np.float32), rtol=1e-6
        )
