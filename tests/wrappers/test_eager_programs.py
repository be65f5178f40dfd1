"""`init`, a step and `master_params` outside of a jit compile a few programs, not one for each
primitive and shape."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import codecs
from tests.tiers import rows

MOST = 5
MOST_OF_WRAPPER = 20  # a few for the leaves; one per operation on the count and the leaves' names
_REQUESTS = "/jax/core/compile/backend_compile_duration"  # of a program, from a cache too
_ADAM = lowmem.flash_adamw(1e-3)
_COMPRESS = dict(mu=codecs.softsign(), nu=codecs.sqrt(), policy=lowmem.Policy(min_size=0))

_requests = 0
_sizes = itertools.count(301, 2)  # of no other test: their programs would be found


def _count(event: str, seconds: float, **_: Any) -> None:
    global _requests
    _requests += event == _REQUESTS


jax.monitoring.register_event_duration_secs_listener(_count)


def programs(call: Callable[[], Any]) -> tuple[Any, int]:
    """Return a call's result and the number of programs that it compiles, and none before had."""
    before = _requests
    result = call()
    return result, _requests - before


def tree() -> dict[str, jax.Array]:
    """Two leaves of shapes that no other tree has."""
    n = next(_sizes)
    rng = np.random.default_rng(n)
    return {
        "kernel": jnp.asarray(rng.normal(size=(n, 64)).astype(np.float32)),
        "bias": jnp.asarray(rng.normal(size=(n + 64,)).astype(np.float32)),
    }


def counted(
    tx: optax.GradientTransformation, own: list[int]
) -> optax.GradientTransformationExtraArgs:
    """A transformation that appends what each of its calls compiles to a list."""

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **extra: Any) -> Any:
            before = _requests
            result = function(*args, **extra)
            own.append(_requests - before)
            return result

        return call

    tx = optax.with_extra_args_support(tx)
    return optax.GradientTransformationExtraArgs(counting(tx.init), counting(tx.update))


OPTIMIZERS = {
    "flash_adamw": _ADAM, "flash_lion": lowmem.flash_lion(1e-3),
    "flash_sgd": lowmem.flash_sgd(1e-2, momentum=0.9), "stable_adamw": lowmem.stable_adamw(1e-3),
    "adam_mini": lowmem.adam_mini(1e-3), "coat_adamw": lowmem.coat_adamw(1e-3),
    "f32 state": lowmem.flash_adamw(1e-3, storage=lowmem.Storage.full_precision()),
    "chain": lowmem.chain(optax.clip_by_global_norm(1.0), _ADAM),
}  # fmt: skip
OFTEN = ["adam_mini", "coat_adamw"]


@pytest.mark.parametrize("name", rows(OPTIMIZERS, OFTEN))
def test_a_training_step_is_a_few_programs(name):
    tx, params, other = OPTIMIZERS[name], tree(), tree()
    (weights, state), made = programs(lambda: lowmem.init(tx, params, allow_rounding=True))
    assert made <= MOST
    grads = jax.tree.map(jnp.ones_like, params)
    assert programs(lambda: tx.init(other))[1] <= MOST
    assert programs(lambda: tx.update(grads, state, weights))[1] <= MOST
    assert programs(lambda: lowmem.step(tx, grads, state, weights))[1] <= MOST
    lowmem.master_params(*lowmem.init(tx, tree(), allow_rounding=True))  # its constants
    assert programs(lambda: lowmem.master_params(weights, state))[1] <= 1


WRAPPERS = {
    "compress_state": lambda inner, own: lowmem.compress_state(inner, **_COMPRESS),
    "split_master_weights": lambda inner, own: lowmem.split_master_weights(inner),
    "track_master_ema": lambda inner, own: lowmem.track_master_ema(inner, 0.99),
    "gaussws_noise": lambda inner, own: lowmem.gaussws_noise(
        inner, "kernel", bits_optimizer=counted(optax.sgd(1e-3), own)
    ),
}


@pytest.mark.parametrize("name", rows(WRAPPERS, list(WRAPPERS)[::3]))
def test_a_wrapper_adds_a_few_programs(name):
    params, other, own = tree(), tree(), []
    tx = WRAPPERS[name](counted(optax.adam(1e-3), own), own)

    def added(call: Callable[[], Any]) -> tuple[Any, int]:
        own.clear()
        result, made = programs(call)
        return result, made - sum(own)

    assert added(lambda: tx.init(other))[1] <= MOST
    (weights, state), made = added(lambda: lowmem.init(tx, params, allow_rounding=True))
    assert made <= MOST
    grads = jax.tree.map(jnp.ones_like, params)
    assert added(lambda: tx.update(grads, state, weights))[1] <= MOST_OF_WRAPPER
    assert added(lambda: lowmem.step(tx, grads, state, weights))[1] <= MOST_OF_WRAPPER


@pytest.mark.parametrize("codec", [codecs.softsign(), codecs.expanded_e4m3(), codecs.affine()])
def test_an_array_is_encoded_and_decoded_by_one_program_each(codec):
    x = tree()["kernel"]
    stored, made = programs(lambda: codecs.encode_array(codec, x, 32))
    assert made == 1
    assert programs(lambda: codecs.decode_array(codec, *stored, 32))[1] == 1


def test_averages_are_one_program():
    tx = lowmem.track_master_ema(optax.sgd(0.1), 0.99)
    _, state = lowmem.init(tx, tree(), allow_rounding=True)
    assert programs(lambda: lowmem.ema_params(state))[1] == 1


EQUAL = {
    "flash_adamw": _ADAM,
    "adam_mini": lowmem.adam_mini(1e-3, blocks=lowmem.blocks.Structure(default="whole")),
    "compress": lowmem.compress_state(optax.trace(0.9), trace=codecs.softsign()),
    "ema": lowmem.track_master_ema(optax.sgd(0.1), 0.99),
}


@pytest.mark.parametrize("name", rows(EQUAL, ["flash_adamw", "compress"]))
def test_many_equal_leaves_share_a_program(name):
    tx = EQUAL[name]

    def step(leaves: int) -> int:
        params = {f"layer{i}": jnp.full((64, 70), 0.1) for i in range(leaves)}
        weights, state = lowmem.init(tx, params, allow_rounding=True)
        before = _requests
        tx.update(params, state, weights)
        return _requests - before

    step(9)
    assert step(10) <= 1  # of the keys, all together


def test_another_step_compiles_nothing():
    params, tx = tree(), lowmem.chain(optax.clip_by_global_norm(1.0), _ADAM)
    params, state = lowmem.init(tx, params, allow_rounding=True)
    grads = jax.tree.map(jnp.ones_like, params)
    for _ in range(2):
        before = _requests
        params, state = lowmem.step(tx, grads, state, params)
    assert _requests == before


def test_another_batch_of_accumulated_gradients_compiles_nothing():
    params, tx = tree(), lowmem.accumulate_gradients(_ADAM, 2, "bfloat16")
    params, state = lowmem.init(tx, params, allow_rounding=True)
    grads = jax.tree.map(jnp.ones_like, params)
    counts = []
    for _ in range(6):
        before = _requests
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        counts.append(_requests - before)
    assert counts[0] and not any(counts[2:])


def test_a_learning_rate_that_is_an_array_compiles_once():
    params = tree()
    tx = optax.inject_hyperparams(lambda rate: lowmem.chain(lowmem.flash_sgd(rate)))(rate=1e-2)
    state = tx.init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    for rate in (1e-2, 2e-2, 3e-2):
        state.hyperparams["rate"] = jnp.float32(rate)
        before = _requests
        updates, _ = tx.update(grads, state, params)
        np.testing.assert_allclose(
            updates["bias"], -np.float32(rate) * np.ones_like(params["bias"])
        )
    assert _requests == before


def test_arrays_of_a_new_state_are_all_others():
    tx = lowmem.accumulate_gradients(_ADAM, 4, "moments")
    leaves = [x for x in jax.tree.leaves(tx.init(tree())) if x.size]
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)
