"""compress_state on states whose layout or values depend on the parameters, or on what jit does."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import checkpoint
from optax_lowmem.codecs import softsign, sqrt
from tests.contract_cases import OLD_OPTAX
from tests.tolerances import REORDERED_SLOT

PARAMS = {"x": jnp.zeros((64, 64)), "y": jnp.zeros((64, 64))}
GRADS = {"x": jnp.full((64, 64), 1e-3), "y": jnp.ones((64, 64))}


def trained(tx: Any, compiled: tuple[bool, bool], steps: int = 4) -> tuple[Any, Any]:
    """Parameters and state; whether init, and the steps from the second on, are jitted."""
    params, state = PARAMS, (jax.jit(tx.init) if compiled[0] else tx.init)(PARAMS)
    for step in range(steps):
        update = jax.jit(tx.update) if compiled[1] and step else tx.update
        updates, state = update(GRADS, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("compiled", [(False, False), (True, True), (False, True)], ids=str)
@pytest.mark.parametrize("labels", ["ab", "ba"])
def test_scales_stay_with_their_optimizer(labels, compiled):
    """jit sorts the keys of dicts, optax.partition makes them in the order of its argument."""
    inner = optax.partition(
        {label: optax.sgd(1.0, momentum=0.9) for label in labels},
        dict(zip(PARAMS, labels, strict=True)),
    )
    tx = lowmem.compress_state(inner, trace=softsign())
    params, state = trained(tx, compiled)
    wanted, plain = trained(inner, compiled)
    for name, leaf in params.items():
        np.testing.assert_allclose(leaf, wanted[name], rtol=2e-2)
    _, found = checkpoint.to_optax(tx, state, params, inner)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2)


def test_muon_under_jit():
    tx = lowmem.compress_state(optax.contrib.muon(1e-2), mu=softsign())
    params = {"w": jnp.full((64, 64), 0.3), "b": jnp.zeros(4096)}
    for state in (tx.init(params), jax.jit(tx.init)(params)):
        _, new = jax.jit(tx.update)(params, state, params)
        assert jax.tree.structure(new) == jax.tree.structure(state)


@pytest.mark.parametrize("slots", [dict(mu=softsign()), dict(nu=sqrt())], ids=["mu", "nu"])
def test_a_centered_second_moment_is_refused(slots):
    tx = lowmem.compress_state(optax.rmsprop(1e-2, centered=True), **slots)
    with pytest.raises(ValueError, match=r"cannot be kept in 8 bits: it takes the root of nu - mu"):
        tx.init(PARAMS)
    named = lowmem.sqrt_variance_quant(optax.rmsprop(1e-2, centered=True))
    with pytest.raises(ValueError, match=r"without centered=True"):
        named.init(PARAMS)


def large(params: Any) -> Any:
    return jax.tree.map(lambda p: p.size >= 100, params)


def named(params: Any) -> Any:
    return jax.tree.map(lambda p: "a" if p.size >= 100 else "b", params)


BY_SIZE = {
    "masked": optax.chain(optax.masked(optax.adam(1e-3), large)),
    "partition": optax.partition({"a": optax.adam(1e-3), "b": optax.adam(1e-2)}, named),
}


@pytest.mark.parametrize("inner", BY_SIZE.values(), ids=BY_SIZE)
def test_masks_that_go_by_size(inner):
    tx = lowmem.compress_state(inner, mu=softsign(), nu=sqrt())
    params = {"w": jnp.full((64, 64), 0.3), "b": jnp.full(16, 0.3)}
    state = tx.init(params)
    assert jax.tree.structure(state.inner_state) == jax.tree.structure(inner.init(params))
    updates, _ = tx.update(params, state, params)
    wanted, _ = inner.update(params, inner.init(params), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), updates, wanted)


def test_a_running_maximum_stays_where_its_values_stay():
    """Stochastic rounding would let it climb."""
    tx = lowmem.compress_state(optax.amsgrad(0.1, b2=0.0), nu_max=sqrt())  # of g^2 itself
    grads = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)}
    params = {"w": jnp.zeros((64, 64))}
    step = jax.jit(lambda state: tx.update(grads, state, params)[1])
    first = last = step(tx.init(params))
    for _ in range(8):
        last = step(last)
    one, other = (np.asarray(optax.tree.get(s, "nu_max")["w"]) for s in (first, last))
    assert one.dtype == np.uint8 and len(np.unique(one)) > 100
    np.testing.assert_array_equal(one, other)


class NormState(NamedTuple):
    first: jax.Array


def test_what_a_state_takes_from_the_parameters():
    by_norm = optax.GradientTransformation(
        lambda params: NormState(optax.tree.norm(params)), lambda u, s, p=None: (u, s)
    )
    tx = lowmem.compress_state(optax.chain(optax.adam(1e-3), by_norm), mu=softsign(), nu=sqrt())
    for init in (tx.init, jax.jit(tx.init)):
        state = init({"w": jnp.ones((64, 64))})
        assert float(state.inner_state[1].first) == 64.0


# ---- weights in a NamedTuple ---------------------------------------------------------------------
class Layer(NamedTuple):
    mu: Any  # a weight of this name, which is no moment
    w: Any


def in_layers(a: jax.Array, b: jax.Array) -> dict[str, Any]:
    return {"bare": Layer(a, b), "dict": {"layer": Layer(a, b)}, "list": [Layer(a, b)]}


@pytest.mark.parametrize("kind", ["bare", "dict", "list"])
def test_weights_in_a_named_tuple_are_no_state(kind):
    params = in_layers(PARAMS["x"], PARAMS["y"])[kind]
    grads = in_layers(GRADS["x"], GRADS["y"])[kind]
    tx = lowmem.compress_state(optax.adam(1e-3), mu=softsign())
    assert {d.slot for d in lowmem.explain(tx, params).decisions} == {"mu"}
    state = tx.init(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.inner_state[0].nu)} == {jnp.float32.dtype}
    _, state = jax.jit(tx.update)(grads, state, params)
    _, plain = optax.adam(1e-3).update(grads, optax.adam(1e-3).init(params), params)
    _, found = checkpoint.to_optax(tx, state, params)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2)
    _, again = checkpoint.from_optax(tx, plain, params, allow_rounding=True)
    assert jax.tree.structure(again) == jax.tree.structure(state)


@pytest.mark.parametrize("kind", ["bare", "dict", "list"])
def test_slots_of_weights_in_a_named_tuple_keep_their_names(kind):
    params = in_layers(PARAMS["x"], PARAMS["y"])[kind]
    tx = lowmem.flash_adamw(1e-3)
    slots = ["count", "seed", "mu", "mu_scale", "nu", "nu_scale", "correction"]
    assert list(lowmem.memory.report(tx, params).by_slot) == slots
    grads = in_layers(GRADS["x"], GRADS["y"])[kind]
    _, state = tx.update(grads, tx.init(params), params)
    assert list(lowmem.diagnostics.code_shares(state)) == ["mu", "nu"]
    plain = lowmem.flash_adamw(1e-3, storage=lowmem.Storage(mu=None, nu=None))
    _, exact = plain.update(grads, plain.init(params), params)
    spread, wanted = (lowmem.diagnostics.rms(grads, s) for s in (state, exact))
    np.testing.assert_allclose(list(spread.values()), list(wanted.values()), rtol=0.1)


def test_a_registered_state_of_any_name_is_found_inside_wrappers(monkeypatch):
    from optax_lowmem._src.optim.wrappers import slots

    class Velocity(NamedTuple):
        speed: Any

    monkeypatch.setattr(slots, "SLOTS", dict(slots.SLOTS))
    slots.register_slot("Velocity", "speed", signed=True)
    inner = optax.GradientTransformation(
        lambda params: Velocity(jax.tree.map(jnp.zeros_like, params)),
        lambda updates, state, params=None: (updates, Velocity(updates)),
    )
    tx = lowmem.compress_state(optax.masked(inner, {"x": True, "y": False}), speed=softsign())
    assert tx.init(PARAMS).inner_state.inner_state.speed["x"].dtype == jnp.int8


def test_a_name_for_a_slot_that_is_not_registered(monkeypatch):
    """A second moment in codes with a sign would make training diverge."""
    from optax_lowmem._src.optim.wrappers import slots

    class Peaks(NamedTuple):
        peak: Any

    inner = optax.GradientTransformation(
        lambda params: Peaks(jax.tree.map(jnp.zeros_like, params)),
        lambda updates, state, params=None: (updates, state),
    )
    monkeypatch.setattr(slots, "SLOTS", dict(slots.SLOTS))
    with pytest.raises(ValueError, match=r"Peaks.peak is not registered: is it ever negative\?"):
        lowmem.compress_state(inner, peak="int8").init(PARAMS)
    lowmem.compress_state(inner, peak=softsign()).init(PARAMS)
    slots.register_slot("Peaks", "peak", signed=False)
    state = lowmem.compress_state(inner, peak="int8").init(PARAMS)
    assert state.inner_state.peak["x"].dtype == jnp.uint8


@pytest.mark.parametrize(
    "name, moments",
    [
        ("ademamix", {"m1": "int8", "m2": "int8", "nu": "uint8"}),
        ("prodigy", {"exp_avg": "int8", "exp_avg_sq": "uint8", "grad_sum": "int8"}),
        ("dadapt_adamw", {"exp_avg": "int8", "exp_avg_sq": "uint8", "grad_sum": "int8"}),
        ("madgrad", {"s": "int8", "grad_sum_sq": "uint8"}),
        ("simplified_ademamix", {"m": "int8", "n": "uint8"}),
    ],
)
def test_moments_of_optax_contrib(name, moments):
    if not hasattr(optax.contrib, name):
        pytest.skip(f"this optax has no {name}")
    tx = lowmem.compress_state(getattr(optax.contrib, name)(1e-3), **dict.fromkeys(moments, "int8"))
    state = jax.eval_shape(tx.init, PARAMS)
    assert {m: optax.tree.get(state, m)["x"].dtype.name for m in moments} == moments


def test_a_slot_that_starts_as_the_weights_stays_so_before_one_of_zeros(monkeypatch):
    from optax_lowmem._src.optim.wrappers import slots

    class Anchored(NamedTuple):
        anchor: Any

    monkeypatch.setattr(slots, "SLOTS", dict(slots.SLOTS))
    slots.register_slot("Anchored", "anchor", signed=True)
    anchored = optax.GradientTransformation(
        lambda params: Anchored(params), lambda updates, state, params=None: (updates, state)
    )
    codecs = {"anchor": softsign(), "trace": softsign()}
    tx = lowmem.compress_state(optax.chain(anchored, optax.trace(0.9)), **codecs)
    weights = jnp.tile(jnp.asarray([1.0, -1.0]), (64, 32))
    state = tx.init({"w": weights})
    codes, scales = state.inner_state[0].anchor["w"], state.scales["anchor_scale"]["w"]
    np.testing.assert_array_equal(
        lowmem.codecs.decode_array(softsign(), codes, scales, 32), weights
    )
    assert not state.inner_state[1].trace["w"].any()


def test_bytes_of_two_codes_are_of_slots_like_their_weights():
    """Values of blocks stay in f32, with the reason: bytes do not say how many they hold."""
    mini = lowmem.scale_by_adam_mini(blocks=lowmem.blocks.Structure(rules=[("*", (1,))]))
    codecs = {"mu": lowmem.codecs.linear4(), "nu": lowmem.codecs.linear4(signed=False)}
    tx, params = lowmem.compress_state(mini, **codecs), {"w": jnp.ones((64, 65))}
    state = tx.init(params)
    assert state.inner_state.mu["w"].shape == (64, 33)
    assert state.inner_state.nu["w"].dtype == jnp.float32
    reasons = {d.slot: d.reason for d in lowmem.explain(tx, params).decisions}
    assert "values have shape (64, 1) and its parameter (64, 65)" in reasons["nu"]
    assert "2 codes per byte" in reasons["mu"]
    _, after = jax.jit(tx.update)(params, state, params)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    other = {"w": jnp.ones((64, 64))}
    with pytest.raises(ValueError, match="uint8.64, 33. codes.*linear-int4 in groups of 32 keeps"):
        tx.update(other, state, other)


@pytest.mark.skipif(OLD_OPTAX, reason="optax 0.2.6 has no GaLore")
def test_moments_of_another_shape_are_refused():
    """They were taken for a state of another tree, at the first update."""
    tx = lowmem.compress_state(optax.contrib.galore(1e-2, rank=8), mu=lowmem.codecs.softsign())
    with pytest.raises(
        ValueError, match=r"slot mu of 'w' has shape \(8, 64\), its parameter \(64, "
    ):
        tx.init({"w": jnp.ones((64, 64))})


# ---- our own directions --------------------------------------------------------------------------
OF_BLOCKS = {"attn": {"query": {"kernel": jnp.ones((64, 32))}}, "embed": {"w": jnp.ones((300, 4))},
             "norm": jnp.ones(32)}  # fmt: skip
BLOCKS = lowmem.blocks.Structure(heads=4, rules=(("embed/w", (1,)), ("norm", "elementwise")))


def test_second_moments_of_blocks():
    """As the optimizer that keeps them so itself: groups along all blocks, the same random bits."""
    policy, linear = lowmem.Policy(min_size=64), lowmem.codecs.linear(signed=False)
    how = {"group_size": 256, "policy": policy}
    momentum = lowmem.compand_momentum(lowmem.scale_by_adam_mini(blocks=BLOCKS), **how)
    tx = lowmem.sqrt_variance_quant(momentum, codec=linear, **how)
    storage = lowmem.Storage(nu=linear, **how)
    fused = lowmem.scale_by_adam_mini(blocks=BLOCKS, storage=storage)
    grads = jax.tree.map(lambda p: jnp.cos(jnp.arange(1.0, p.size + 1)).reshape(p.shape), OF_BLOCKS)
    state, wanted = tx.init(OF_BLOCKS), fused.init(OF_BLOCKS)
    for _ in range(2):
        updates, state = tx.update(grads, state, OF_BLOCKS)
        directions, wanted = fused.update(grads, wanted, OF_BLOCKS)
    core = state.inner_state.inner_state
    assert core.nu["embed"]["w"].shape == (300, 1)
    assert state.scales["nu_scale"]["embed"]["w"].shape == (2,)
    assert core.nu["norm"].dtype == jnp.float32
    chex.assert_trees_all_close(updates, directions, rtol=REORDERED_SLOT)
    chex.assert_trees_all_equal(core.nu, wanted.nu)
    chex.assert_trees_all_equal(state.scales["nu_scale"], wanted.nu_scale)
    chex.assert_trees_all_equal(state.inner_state.scales["mu_scale"], wanted.mu_scale)

    def told(tx):
        found = lowmem.explain(tx, OF_BLOCKS).decisions
        return {(d.path, d.slot, d.form, d.block, d.group_size, d.codec) for d in found}

    assert told(tx) == told(fused)
    wider = lowmem.sqrt_variance_quant(momentum, codec=linear, group_size=32, policy=policy)
    with pytest.raises(ValueError, match=r"'attn/query/kernel|'embed/w', slot nu.*groups of 32"):
        wider.update(grads, state, OF_BLOCKS)


def test_a_direction_of_blocks_knows_embeddings():
    storage = lowmem.Storage(nu=None, rounding="embeddings", policy=lowmem.Policy(min_size=64))
    tx = lowmem.scale_by_adam_mini(blocks=lowmem.blocks.Structure(default="whole"), storage=storage)
    params = {"embed": {"embedding": jnp.ones((64, 32))}, "mlp": jnp.ones((64, 32))}
    found = {d.path: d.stochastic for d in lowmem.explain(tx, params).decisions if d.slot == "mu"}
    assert found == {"embed/embedding": True, "mlp": False}


def test_a_slot_that_holds_codes_already():
    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    for inner in (
        lowmem.scale_by_flash_adam(),
        lowmem.compress_state(optax.adam(1.0), mu=softsign()),
    ):
        message = r"slot mu of 'w' is already stored as u?int8 codes by the inner .*mu=None"
        with pytest.raises(ValueError, match=message):
            lowmem.compand_momentum(inner).init(params)
    kept = lowmem.scale_by_flash_adam(storage=lowmem.Storage(mu=None))
    assert lowmem.compand_momentum(kept).init(params).inner_state.mu["w"].dtype == jnp.int8


def test_a_trace_has_the_random_bits_of_flash_sgd():
    params = {"w": jnp.ones((64, 64))}
    grads = {"w": jnp.cos(jnp.arange(4096.0)).reshape(64, 64)}
    _, found = (tx := lowmem.compand_momentum(optax.trace(0.9))).update(grads, tx.init(params))
    _, wanted = (tx := lowmem.flash_trace(0.9)).update(grads, tx.init(params))
    chex.assert_trees_all_equal(found.inner_state.trace, wanted.mu)
