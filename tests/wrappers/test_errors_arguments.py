"""Arguments in another order or of another kind: each error says which, and what to pass."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lowmem as lowmem
from tests.wrappers.test_errors import flash, raises, weights


def test_arguments_in_another_order():
    tx, params = flash(), weights(jnp.float32)
    calls = [
        lambda: lowmem.init(params, tx),
        lambda: lowmem.explain(params, tx),
        lambda: lowmem.memory.report(params, tx),
        lambda: lowmem.step(params, tx, params, params),
        lambda: lowmem.chain([tx, tx]),
    ]
    for call in calls:
        with raises("a (dict|list) is not an optax transformation.*: .*pass|one by one", TypeError):
            call()
    with raises("chain takes at least one transformation"):
        lowmem.chain()
    kept, state = lowmem.init(tx, params)
    given_a_state = [
        lambda: lowmem.init(tx, state),
        lambda: lowmem.explain(tx, (state, optax.EmptyState())),
        lambda: lowmem.memory.report(optax.adam(1e-3), state),
        lambda: lowmem.checkpoint.metadata(tx, state),
    ]
    for call in given_a_state:
        with raises("a .*State is an optimizer's state, not parameters: pass", TypeError):
            call()
    with raises(r"is an optimizer's state: master_params\(params, state\)", TypeError):
        lowmem.master_params(state, kept)


@pytest.mark.parametrize("value", [[1e-3, 1e-4], (1e-3,), {"a": 1e-3}], ids=str)
def test_hyperparameters_that_are_containers(value):
    with raises("learning_rate must be a number, an f32 scalar or a schedule, got", TypeError):
        lowmem.flash_adamw(value)
    with raises("b1 must be a number", TypeError):
        lowmem.flash_adamw(1e-3, b1=value)


def test_a_vector_is_no_hyperparameter():
    """It would broadcast along columns, silently where there are as many."""
    params = weights(jnp.float32)
    tx = lowmem.flash_adamw(jnp.full(params["block"]["kernel"].shape[-1], 1e-3))
    with raises(r"learning_rate must be a scalar, got an array of shape .*partition", TypeError):
        tx.update(params, tx.init(params), params)


def test_blocks_that_are_no_structure():
    for make in (lowmem.adam_mini, lowmem.flash_adam_mini, lowmem.q_adam_mini):
        with raises(r"blocks must be a lowmem.blocks.Structure, got \{'heads': 4\}", TypeError):
            make(1e-3, blocks=dict(heads=4))
    with raises(r"blocks must be a lowmem.blocks.Structure, got \{'heads': 4\}", TypeError):
        lowmem.scale_by_adam_mini(blocks=dict(heads=4))


def test_weights_cast_after_init():
    tx, params = flash(), weights(jnp.float32)
    state = tx.init(params)
    cast = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    with raises(r"correction of .* is int8\[\].*lowmem\.init\(tx, params_f32\)"):
        tx.update(cast, state, cast)


WRAPPERS = {
    "compress_state": lambda tx: lowmem.compress_state(tx, mu=lowmem.codecs.softsign()),
    "compand_momentum": lowmem.compand_momentum,
    "sqrt_variance_quant": lowmem.sqrt_variance_quant,
    "split_master_weights": lowmem.split_master_weights,
    "accumulate_gradients": lambda tx: lowmem.accumulate_gradients(tx, 2, into="bfloat16"),
    "track_master_ema": lambda tx: lowmem.track_master_ema(tx, 0.9),
    "per_tensor_loss_scale": lambda tx: lowmem.per_tensor_loss_scale(tx, 2.0),
    "update_clipping": lambda tx: lowmem.update_clipping(tx, b2=0.99, eps=1e-8),
    "gaussws_noise": lowmem.gaussws_noise,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_of_what_is_no_optimizer(name):
    for what, kind in ((optax.adam, "function"), (weights(jnp.float32), "dict")):
        with raises(f"a {kind} is not an optax transformation.*such as optax.adam", TypeError):
            WRAPPERS[name](what)


@pytest.mark.parametrize("wrap", [lowmem.compand_momentum, lowmem.sqrt_variance_quant])
def test_a_decay_in_the_place_of_an_optimizer(wrap):
    params = weights(jnp.float32)
    assert wrap(0.9).init(params) and wrap(jnp.float32(0.9)).init(params)
    for decay in (1.0, -0.1, 2):
        with raises(r"the decay must be in \[0, 1\)"):
            wrap(decay)


def test_an_optimizer_that_is_no_tuple():
    """optax.MultiSteps is an object with init and update."""
    params = {"w": jnp.ones((64, 64))}
    tx = lowmem.compand_momentum(optax.MultiSteps(optax.adam(1e-3), 2))
    assert tx.init(params).inner_state.inner_opt_state[0].mu["w"].dtype == jnp.int8
