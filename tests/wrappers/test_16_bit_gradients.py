"""Gradients in the dtype of 16-bit weights, through wrappers that mind what dtype they see."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import Storage
from tests.tiers import in_turn, rows

PARAMS = {"w": jnp.linspace(-1, 1, 256).reshape(4, 64), "b": jnp.ones(8)}
F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
SELECTING = {
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, lambda step: step % 2 == 0),
    "masked around": lambda tx: optax.masked(optax.apply_if_finite(tx, 5), True),
    "averaged": lambda tx: lowmem.track_master_ema(optax.apply_if_finite(tx, 5), decay=0.9),
    "noise around": lambda tx: lowmem.gaussws_noise(optax.apply_if_finite(tx, 5), "w"),
}
OURS = {
    "flash_adamw": lambda: lowmem.flash_adamw(1e-2),
    "compressed": lambda: lowmem.split_master_weights(
        lowmem.compress_state(optax.adam(1e-2), mu=lowmem.codecs.softsign())
    ),
}
LINKS = {
    "accumulated": lambda tx: lowmem.accumulate_gradients(tx, 2, "bfloat16"),
    "chain": lambda tx: lowmem.chain(optax.clip_by_global_norm(1.0), tx),
    "trace before": lambda tx: lowmem.chain(optax.trace(0.9), tx),
    "noise": lambda tx: lowmem.gaussws_noise(tx, "w"),
}
INNER = {
    "adamw": lambda: optax.adamw(1e-2),
    "partition": lambda: optax.partition(
        {"ours": lowmem.flash_adamw(1e-2), "optax": optax.adamw(1e-2)}, {"w": "ours", "b": "optax"}
    ),
}


@jax.jit
def gradient(params):
    return jax.grad(lambda p: sum((leaf**2).sum() for leaf in jax.tree.leaves(p)))(params)


@pytest.mark.parametrize(
    "wrapper, ours, dtype",
    rows(
        itertools.product(SELECTING, OURS, ["bfloat16", "float16"]),
        [
            (wrapper, list(OURS)[i % len(OURS)], ("bfloat16", "float16")[i % 2])
            for i, wrapper in enumerate(SELECTING)
            if wrapper == "apply_if_finite"
        ],
    ),
)
def test_a_step_that_may_be_left_out(wrapper, ours, dtype):
    """optax's condition has zeros of the gradients' dtype in the place of our f32 updates."""
    tx = SELECTING[wrapper](OURS[ours]())
    params, state = jax.jit(lambda p: lowmem.init(tx, p, dtype))(PARAMS)
    grads = gradient(params)
    new, after = jax.jit(lambda *args: lowmem.step(tx, *args))(grads, state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes((new, after), (params, state))
    wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    same, _ = jax.jit(lambda *args: lowmem.step(tx, *args))(wide, state, params)
    for a, b, old in zip(*map(jax.tree.leaves, (new, same, params)), strict=True):
        np.testing.assert_array_equal(np.float32(a), np.float32(b))
        assert (a != old).any()


@pytest.mark.parametrize("link, inner", in_turn(LINKS, INNER))
def test_states_keep_their_dtypes(link, inner):
    """optax's own moments of 16-bit weights, though their gradients come in f32."""
    tx = LINKS[link](INNER[inner]())
    params, state = lowmem.init(tx, PARAMS, allow_rounding=True)

    def body(carry, _):
        params, state = carry
        return lowmem.step(tx, gradient(params), state, params), None

    (new, after), _ = jax.jit(lambda c: jax.lax.scan(body, c, length=4))((params, state))
    chex.assert_trees_all_equal_shapes_and_dtypes((new, after), (params, state))
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(params), strict=True):
        assert (a != b).any()


def test_a_scalar_beside_a_split_around_an_unsplit_optimizer():
    """The placeholder of a 0-d weight inside has the shape of a correction of it."""
    tx = lowmem.split_master_weights(lowmem.flash_adamw(1e-3, storage=Storage(
        master_weight_bits=None)))  # fmt: skip
    given = {**PARAMS, "temperature": jnp.float32(0.07)}
    params, state = lowmem.init(tx, given)
    found = lowmem.master_params(params, state)
    assert abs(found["temperature"] - 0.07) <= 0.07 * 2**-16
    ema = lowmem.track_master_ema(tx, decay=0.9)
    params, state = lowmem.init(ema, given)
    params, state = lowmem.step(ema, gradient(params), state, params)
    assert lowmem.master_params(params, state)["temperature"].shape == ()


COMPRESSED = {
    "compress_state": lambda **how: lowmem.compress_state(
        optax.adan(1e-2), m=lowmem.codecs.softsign(), **how
    ),
    "compand_momentum": lambda **how: lowmem.compand_momentum(optax.adamw(1e-2), **how),
    "a link": lambda **how: optax.chain(lowmem.compand_momentum(0.9, **how), optax.scale(-1.0)),
    "sqrt_variance_quant": lambda **how: lowmem.sqrt_variance_quant(optax.adamw(1e-2), **how),
}
OF_OPTAX = {
    "alone": lambda tx: tx,
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
    "conditionally_transform": lambda tx: optax.conditionally_transform(tx, lambda step: step > 0),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, lambda step: step > 0),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
}


@pytest.mark.parametrize("wrapper, name", in_turn(OF_OPTAX, COMPRESSED))
def test_updates_of_compressed_states_have_the_dtype_of_their_gradient(wrapper, name):
    """As optax's own, which optax's conditions on the step rely upon."""
    tx = OF_OPTAX[wrapper](COMPRESSED[name]())
    params = {"w": PARAMS["w"].astype(jnp.float16), "b": PARAMS["b"].astype(jnp.bfloat16)}
    state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(3):
        updates, state = update(gradient(params), state, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
    assert all(bool((u != 0).all()) for u in jax.tree.leaves(updates)) or wrapper == "MultiSteps"


@pytest.mark.parametrize("name", COMPRESSED)
def test_updates_of_compressed_states_in_f32_where_that_is_asked_for(name):
    tx, params = COMPRESSED[name](update_dtype="float32"), optax.tree.cast(PARAMS, "bfloat16")
    updates, _ = tx.update(gradient(params), tx.init(params), params)
    assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype("float32")}
    narrow, _ = COMPRESSED[name]().update(gradient(params), tx.init(params), params)
    for u, wide in zip(jax.tree.leaves(narrow), jax.tree.leaves(updates), strict=True):
        np.testing.assert_array_equal(np.float32(u), np.float32(wide.astype(jnp.bfloat16)))
    with pytest.raises(ValueError, match="update_dtype must be one of gradient, float32, got 'b"):
        COMPRESSED[name](update_dtype="bfloat16")


def test_updates_have_the_dtype_of_a_gradient_only_where_their_weight_has_it():
    """The updates of f16 gradients would not land on bf16 weights."""
    tx = lowmem.split_master_weights(optax.sgd(1e-2), update_dtype="gradient")
    params = {"w": jnp.ones((4, 64), jnp.bfloat16)}
    for given, wanted in (("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "float32")):
        updates, _ = tx.update(optax.tree.cast(params, given), tx.init(params), params)
        assert updates["w"].dtype == wanted


@pytest.mark.parametrize("chain, seen", [(lowmem.chain, [F32]), (optax.chain, [BF16, F32])])
def test_another_type_error_is_raised_as_it_is(chain, seen):
    """A chain of optax is tried again with f32 gradients, and the first error gets a note."""
    dtypes = []

    def refuse(updates, state, params=None):
        dtypes.append(updates["w"].dtype)
        raise TypeError(f"not with {updates['w'].dtype}")

    link = optax.GradientTransformation(optax.init_empty_state, refuse)
    tx = chain(link, lowmem.flash_sgd(1e-2))
    params = optax.tree.cast(PARAMS, "bfloat16")
    with pytest.raises(TypeError, match=f"^not with {seen[0]}") as error:
        lowmem.step(tx, gradient(params), tx.init(params), params)
    assert dtypes == seen
    assert len(getattr(error.value, "__notes__", ())) == len(seen) - 1
