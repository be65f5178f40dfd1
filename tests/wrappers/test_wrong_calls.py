"""Calls and trees that are easy to get wrong: an error or a warning names it and the remedy."""

from collections import OrderedDict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import Policy, Storage, codecs
from optax_lowmem.flax import TrainState
from tests.contract_cases import assert_same

PARAMS = {"kernel": jnp.full((64, 128), 0.1), "bias": jnp.ones(8)}
GRADS = jax.tree.map(jnp.cos, PARAMS)
ADAN = {"m": codecs.softsign()}

# ---- arguments in each other's place -------------------------------------------------------------
SPLIT = {
    "flash_adamw": lambda: lowmem.flash_adamw(1e-3),
    "split": lambda: lowmem.split_master_weights(optax.adan(1e-3)),
    "chain": lambda: lowmem.chain(optax.clip(1.0), lowmem.flash_lion(1e-3)),
    "into bfloat16": lambda: lowmem.accumulate_gradients(lowmem.flash_adamw(1e-3), 1),
}


@pytest.mark.parametrize("make", SPLIT.values(), ids=SPLIT)
def test_gradients_and_parameters_in_each_others_place(make):
    tx = make()
    params, state = lowmem.init(tx, PARAMS)
    message = r"'bias' is bfloat16 and the weight float32.*each other's place.*Call tx\.update"
    if make in (SPLIT["chain"], SPLIT["into bfloat16"]):  # which hand on f32 gradients
        message = r"weight 'bias' is float32, .* in each other's place: call tx\.update"
    with pytest.raises(ValueError, match=message):
        tx.update(params, state, GRADS)
    with pytest.raises(ValueError, match=message):
        lowmem.step(tx, params, state, GRADS)
    tx.update(GRADS, state, params)


@pytest.mark.parametrize("make", SPLIT.values(), ids=SPLIT)
def test_leaves_in_another_order(make):
    tx, params = make(), OrderedDict(a=jnp.ones(8), b=jnp.zeros(8))
    state, turned = tx.init(params), OrderedDict(reversed(params.items()))
    with pytest.raises(ValueError, match=r"the order is \['b', 'a'\], not \['a', 'b'\]"):
        tx.update(turned, state, params)
    with pytest.raises(ValueError, match=r"the order is \['b', 'a'\], not \['a', 'b'\]"):
        tx.update(turned, state, turned)


CLIPPED = {
    "chain": lambda: lowmem.chain(optax.clip_by_global_norm(1.0), lowmem.flash_adamw(1e-3)),
    "named": lambda: optax.named_chain(
        ("clip", optax.clip(1.0)), ("adam", lowmem.flash_adam(1e-3))
    ),
    "alone": lambda: lowmem.flash_adamw(1e-3),
}


@pytest.mark.parametrize("make", CLIPPED.values(), ids=CLIPPED)
def test_state_and_parameters_in_each_others_place(make):
    tx = make()
    params, state = lowmem.init(tx, PARAMS)
    if make is not CLIPPED["named"]:
        for arguments in ((GRADS, params, state), (state, GRADS, params)):
            with pytest.raises(ValueError, match=r"are step\(tx, grads, state, params\)"):
                lowmem.step(tx, *arguments)
    lowmem.step(tx, GRADS, state, params)


# ---- what changes weights or updates behind the optimizer ------------------------------------
STARTS_OF_SPLIT = {
    "lowmem.init": lambda tx: lowmem.init(tx, PARAMS),
    "traced": lambda tx: jax.eval_shape(lambda p: lowmem.init(tx, p), PARAMS),
    "TrainState": lambda tx: TrainState.create(apply_fn=None, params=PARAMS, tx=tx),
}


@pytest.mark.parametrize("begin", STARTS_OF_SPLIT.values(), ids=STARTS_OF_SPLIT)
def test_a_scale_after_the_optimizer(begin):
    tx = optax.chain(lowmem.flash_adamw(1e-3), optax.scale(0.5))
    with pytest.raises(ValueError, match=r"bias, kernel are changed after.*Put the transf"):
        begin(tx)
    begin(optax.chain(optax.scale(0.5), lowmem.flash_adamw(1e-3)))
    lowmem.init(tx, PARAMS, jnp.float32)  # f32 weights have no correction


def test_half_precision_weights_of_no_optimizer_are_not_rounded_silently():
    """float16 has three more bits than bfloat16; with a split, the correction keeps them."""
    half = {"kernel": jnp.full((64, 128), 1.0009765625, jnp.float16)}  # 1 + 2^-10
    weights, state = lowmem.init(lowmem.flash_adamw(1e-3), half)
    assert weights["kernel"].dtype == jnp.bfloat16
    assert_same(lowmem.master_params(weights, state), jax.tree.map(jnp.float32, half))
    with pytest.raises(ValueError, match="'kernel' would be rounded from float16 to bfloat16"):
        lowmem.init(optax.adamw(1e-3), half)
    kept, _ = lowmem.init(optax.adamw(1e-3), half, jnp.float16)
    assert kept["kernel"] is half["kernel"]
    rounded, _ = lowmem.init(optax.adamw(1e-3), half, allow_rounding=True)
    assert float(rounded["kernel"][0, 0]) == 1.0


# ---- patterns, dtypes ----------------------------------------------------------------------------
MISSPELT = {
    "flash_adamw": lambda policy: lowmem.flash_adamw(1e-3, storage=Storage(policy=policy)),
    "direction": lambda policy: lowmem.scale_by_flash_adam(storage=Storage(policy=policy)),
    "compressed": lambda policy: lowmem.compress_state(optax.adan(1e-3), policy=policy, **ADAN),
    "chain": lambda policy: lowmem.chain(
        optax.clip(1.0), lowmem.flash_sgd(0.1, 0.9, storage=Storage(policy=policy))
    ),
}
STARTS = {
    "tx.init": lambda tx: tx.init(PARAMS),
    "lowmem.init": lambda tx: lowmem.init(tx, PARAMS, jnp.float32),
    "TrainState": lambda tx: TrainState.create(apply_fn=None, params=PARAMS, tx=tx),
}


@pytest.mark.parametrize("begin", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("make", MISSPELT.values(), ids=MISSPELT)
def test_a_pattern_that_matches_nothing(make, begin):
    with pytest.warns(UserWarning, match="pattern '.embed.' of Policy.exclude matches no") as said:
        begin(make(Policy(exclude=("*embed*", "bias"))))
    assert len(said) == 1
    begin(make(Policy(exclude=("*kernel*", "bias"))))


def test_a_pattern_for_the_leaves_of_another_optimizer():
    """Inside a mask not all leaves are seen, and only who sees all can tell."""
    tx = optax.masked(MISSPELT["flash_adamw"](Policy(exclude=("kernel",))), {
        "kernel": False, "bias": True})  # fmt: skip
    tx.init(PARAMS)
    lowmem.init(tx, PARAMS, jnp.float32)


OF_SLOTS = {
    "flash_adamw": lambda dtype, **how: lowmem.flash_adamw(1e-3, mu_dtype=dtype, **how),
    "flash_adam": lambda dtype, **how: lowmem.flash_adam(1e-3, mu_dtype=dtype, **how),
    "flash_lion": lambda dtype, **how: lowmem.flash_lion(1e-3, mu_dtype=dtype, **how),
    "flash_sgd": lambda dtype, **how: lowmem.flash_sgd(0.1, 0.9, False, dtype, **how),
    "direction": lambda dtype, **how: lowmem.scale_by_flash_adam(mu_dtype=dtype, **how),
    "direction of blocks": lambda dtype, **how: lowmem.scale_by_adam_mini(
        mu_dtype=dtype,
        **{"blocks": lowmem.blocks.Structure(default="whole"), "storage": Storage(), **how},
    ),
}


@pytest.mark.parametrize("make", OF_SLOTS.values(), ids=OF_SLOTS)
def test_the_dtype_of_a_slot_that_is_compressed(make):
    message = r"dtype of mu, bfloat16, applies only to .* mu is softsign-int8\..*Storage\(mu=None\)"
    with pytest.warns(UserWarning, match=message) as said:
        tx = make(jnp.bfloat16)
    assert len(said) == 1
    state = tx.init(PARAMS)
    assert (state.mu["kernel"].dtype, state.mu["bias"].dtype) == (jnp.int8, jnp.bfloat16)
    quiet = make(jnp.bfloat16, storage=Storage(mu=None)).init(PARAMS)
    assert quiet.mu["kernel"].dtype == jnp.bfloat16
    make(None)


# ---- leaves --------------------------------------------------------------------------------------
EVERYONE = {
    **SPLIT,
    "direction": lowmem.scale_by_flash_adam,
    "compressed": lambda: lowmem.compress_state(optax.adan(1e-3), **ADAN),
    "ema": lambda: lowmem.track_master_ema(lowmem.flash_adamw(1e-3), 0.9),
}


@pytest.mark.parametrize("make", EVERYONE.values(), ids=EVERYONE)
def test_a_prng_key_among_the_parameters(make):
    params = {**PARAMS, "key": jax.random.key(0)}
    message = r"parameter 'key' is key<fry>, such as a PRNG key.*optax\.masked or optax\.partition"
    with pytest.raises(TypeError, match=message):
        make().init(params)
    with pytest.raises(TypeError, match=message):
        lowmem.init(make(), params)


class Layer(NamedTuple):
    """Weights with the names of our own states' fields."""

    kernel: Any
    correction: Any
    clean: Any
    accumulated: Any
    ema_correction: Any


NAMED = {
    **SPLIT,
    "ema": lambda: lowmem.track_master_ema(lowmem.flash_adamw(1e-3), 0.9),
}


@pytest.mark.parametrize("make", NAMED.values(), ids=NAMED)
def test_weights_with_the_names_of_our_fields(make):
    tx, layer = make(), Layer(*(jnp.full((64, 128), size) for size in (0.1, 0.2, 0.3, 0.4, 0.5)))
    params, state = lowmem.init(tx, layer)
    for found, given in zip(lowmem.master_params(params, state), layer, strict=True):
        np.testing.assert_allclose(found, given, rtol=2.0**-16)
    if state is not None and make is NAMED["ema"]:
        assert_same(lowmem.ema_params(state), lowmem.master_params(params, state))
    params, state = lowmem.step(tx, jax.tree.map(jnp.ones_like, layer), state, params)
    assert type(lowmem.master_params(params, state)) is Layer
    assert lowmem.explain(tx, params).warnings == ()
