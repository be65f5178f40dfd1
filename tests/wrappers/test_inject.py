"""`inject_hyperparams` of every public constructor: what is static is known."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem

PARAMS = {"norm": jnp.ones(64), "mlp": {"up_proj": {"kernel": jnp.ones((64, 64))}}}
# of arguments without a default
GIVEN = {"learning_rate": 1e-3, "decay": 0.9, "b2": 0.999, "eps": 1e-8, "scale": 2.0, "every": 2}


def constructors():
    """Yield the name, and the arguments without a default, of all that makes a transformation."""
    for name in lowmem.__all__:
        made = getattr(lowmem, name)
        signature = inspect.signature(made) if inspect.isfunction(made) else None
        if "GradientTransformation" in str(signature and signature.return_annotation):
            required = [p.name for p in signature.parameters.values() if p.default is p.empty]
            if name == "fuse_updates":  # whose updates are no arrays
                continue
            if not {"inner_factory", "transformations", "slot_codecs"} & set(required):
                yield name, required


def arguments(name, required):
    make = lowmem.flash_adam if name == "accumulate_gradients" else optax.adam
    return {key: GIVEN.get(key, make(1e-3)) for key in required}


@pytest.mark.parametrize(("name", "required"), list(constructors()))
def test_optax_in_bf16_names_ours(name, required):
    """Where `optax.inject_hyperparams` fails in bf16, the error says what to use instead."""
    tx = optax.inject_hyperparams(getattr(lowmem, name))(**arguments(name, required))
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    try:
        jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params), params)
    except (TypeError, ValueError) as error:
        assert "lowmem.inject_hyperparams" in str(error)


@pytest.mark.parametrize(("name", "required"), list(constructors()))
def test_every_constructor_with_its_defaults(name, required):
    given = arguments(name, required)
    tx = lowmem.inject_hyperparams(getattr(lowmem, name))(**given)
    state = jax.eval_shape(tx.init, PARAMS)
    _, after = jax.eval_shape(tx.update, PARAMS, state, PARAMS)
    assert {"learning_rate", "b2", "decay"} & set(required) <= set(after.hyperparams)
    assert all(leaf.dtype == jnp.float32 for leaf in after.hyperparams.values())


def test_functions_and_dtypes_among_the_arguments():
    given = {
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "mask": lambda params: jax.tree.map(lambda w: w.ndim > 1, params),
        "mu_dtype": jnp.bfloat16,
        "storage": lowmem.Storage(mu=None),
    }
    for make in (lowmem.flash_adamw, functools.partial(lowmem.flash_adamw, b1=0.8)):
        tx, zero = lowmem.inject_hyperparams(make)(**given), jax.tree.map(jnp.zeros_like, PARAMS)
        state = tx.init(PARAMS)
        assert state.inner_state.mu["norm"].dtype == jnp.bfloat16
        updates, _ = tx.update(zero, state, PARAMS)
        assert (updates["norm"] == 0).all()
        np.testing.assert_allclose(updates["mlp"]["up_proj"]["kernel"], -1e-3, rtol=1e-6)
