"""`fuse_updates`: the fused step where a program calls `update` and adds."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem._src.optim.step.engine import Engine
from tests.checkpoint_cases import SMALL, assert_same_bits


def optimizer():
    return lowmem.chain(optax.clip_by_global_norm(1.0), lowmem.flash_adamw(1e-2, storage=SMALL))


@pytest.mark.parametrize("apply", [optax.apply_updates, eqx.apply_updates])
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_adding_takes_the_fused_step(apply, jit, dtype, monkeypatch):
    tx = optimizer()
    start = lowmem.init(tx, {"w": jnp.linspace(-1, 1, 64 * 64).reshape(64, 64)}, dtype)
    grads = jax.tree.map(jnp.cos, start[0])
    expected = jit(lambda p, s: lowmem.step(tx, grads, s, p))(*start)
    monkeypatch.setattr(Engine, "update", None)  # only the fused step is left
    fused = lowmem.fuse_updates(tx)

    @jit
    def train_step(params, state):
        updates, state = fused.update(grads, state, params)
        return apply(params, updates), state

    assert_same_bits(train_step(*start), expected)


@pytest.mark.parametrize("other", [jnp.ones((64, 64), jnp.bfloat16), jnp.ones((2, 64, 64))])
def test_an_update_is_added_to_its_parameter_alone(other):
    tx = lowmem.fuse_updates(optimizer())
    params, state = lowmem.init(tx, {"w": jnp.ones((64, 64))}, jnp.float32)
    updates, _ = tx.update(params, state, params)
    with pytest.raises(ValueError, match=r"float32\[64, 64\] is added to .*\[(2, )?64, 64\]"):
        optax.apply_updates({"w": other}, updates)


def test_a_sum_is_no_array():
    tx = lowmem.fuse_updates(optimizer())
    params, state = lowmem.init(tx, {"w": jnp.ones((64, 64))})
    with pytest.raises(TypeError, match="not a valid JAX type"):
        jax.jit(tx.update)(params, state, params)
