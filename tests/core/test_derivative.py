"""Gradients through a step: refused where 8-bit state or a split would lose a part of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem.codecs import softsign

PLAIN = lowmem.Storage(mu=None, nu=None, master_weight_bits=None)
WHOLE = lowmem.blocks.Structure(default="whole")
START = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)


def final_loss(make, start, rate, steps=3):
    """The loss after a few steps, as a function of the first weights and of the rate."""
    tx = make(rate)
    params, state = start, tx.init(jax.lax.stop_gradient(start))
    for _ in range(steps):
        gradients = jax.tree.map(lambda w: jnp.sin(3 * w.astype(jnp.float32)), params)
        updates, state = tx.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return sum(jnp.sum(jnp.cos(w.astype(jnp.float32))) for w in jax.tree.leaves(params))


LOSSY = {
    "moments": (lowmem.flash_adamw, jnp.float32),
    "split": (lambda rate: lowmem.flash_adamw(rate, storage=lowmem.Storage(mu=None, nu=None)),
              jnp.bfloat16),
    "mini": (lambda rate: lowmem.flash_adam_mini(rate, blocks=WHOLE), jnp.float32),
    "compress_state": (lambda rate: lowmem.compress_state(optax.sgd(rate, 0.9), trace=softsign()),
                       jnp.float32),
    "split_master_weights": (lambda rate: lowmem.split_master_weights(optax.sgd(rate)),
                             jnp.bfloat16),
    "in a chain": (lambda rate: lowmem.chain(optax.clip(1.0), lowmem.flash_lion(rate)),
                   jnp.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("of", [0, 1], ids=["weights", "rate"])
@pytest.mark.parametrize("name", LOSSY)
def test_a_gradient_that_would_be_wrong_is_refused(name, of, compiled):
    make, dtype = LOSSY[name]
    gradient = jax.grad(lambda *args: final_loss(make, {"w": args[0]}, args[1]), argnums=of)
    with pytest.raises(TypeError, match=r"has no derivative.*stop_gradient.*lowmem\.Storage\("):
        (jax.jit(gradient) if compiled else gradient)(jnp.asarray(START, dtype), 1e-2)


def test_forward_mode_and_scan_are_refused_too():
    make, params = lowmem.flash_adamw, {"w": jnp.asarray(START)}
    with pytest.raises(TypeError, match="has no derivative"):
        jax.jvp(lambda p: final_loss(make, p, 1e-2), (params,), (params,))

    def of_scan(rate):
        tx = lowmem.flash_adamw(rate)

        def body(carry, _):
            updates, state = tx.update(carry[0], carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        (params_, _), _ = jax.lax.scan(body, (params, tx.init(params)), length=3)
        return jnp.sum(params_["w"])

    with pytest.raises(TypeError, match="has no derivative"):
        jax.grad(of_scan)(1e-2)


@pytest.mark.parametrize("of", [0, 1], ids=["weights", "rate"])
def test_without_codes_and_split_the_gradient_is_optax_s(of):
    def gradient(make):
        return jax.grad(lambda *args: final_loss(make, *args), argnums=of)(
            {"w": jnp.asarray(START)}, 1e-2
        )

    ours = gradient(lambda rate: lowmem.flash_adamw(rate, eps=1e-3, storage=PLAIN))
    theirs = gradient(lambda rate: optax.adamw(rate, eps=1e-3))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert any(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(ours))


def test_what_does_not_depend_on_the_variable_is_left_alone():
    """A step inside of a differentiated function, of numbers that are not its variable."""
    params = {"w": jnp.asarray(START)}

    def loss(scale):
        tx = lowmem.flash_adamw(1e-2)
        updates, _ = tx.update(params, tx.init(params), params)
        stopped, _ = tx.update(jax.lax.stop_gradient({"w": scale * START}), tx.init(params), params)
        return scale * jnp.sum(updates["w"] + stopped["w"])

    assert np.isfinite(jax.grad(loss)(2.0))
