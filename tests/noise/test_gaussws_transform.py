"""gaussws_noise: what the loss sees, what the state keeps, and what may stand around it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
from optax_lowmem import gaussws
from optax_lowmem._src.arrays import random
from tests import small_leaves
from tests import tolerances as tol
from tests.oracle import gaussws as oracle
from tests.tiers import rows

BF16, F32 = jnp.bfloat16, jnp.float32
DOWN, UP = "mlp/down/kernel", "mlp/up/kernel"


def start(seed=0, shape=(64, 96)):
    rng = np.random.default_rng(seed)
    draw = lambda *size: jnp.asarray(rng.normal(0, 0.05, size), F32)  # noqa: E731
    return {
        "mlp": {"up": {"kernel": draw(*shape)}, "down": {"kernel": draw(*shape)}},
        "norm": {"scale": 1 + draw(shape[1])},
    }


def leaf(tree, path):
    for name in path.split("/"):
        tree = tree[name]
    return tree


def flash(**more):
    return lowmem.flash_adamw(1e-2, **more)


def noisy(inner=None, parts="down", **more):
    return lowmem.gaussws_noise(flash() if inner is None else inner, parts, **more)


def equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@functools.cache  # compiles once
@functools.cache
def stepper(tx):
    return jax.jit(functools.partial(lowmem.step, tx))


def resampled(params, state, path=DOWN, dtype=BF16, **more):
    """Compute the sampled weight that the loss should see, from the functions alone."""
    key = random.leaf_key(state.seed, state.count, path)
    master = leaf(lowmem.master_params(params, state), path)
    bits = gaussws.bitwidths(state)[path]
    return gaussws.sample(master, bits, key, compute=jnp.dtype(dtype).name, **more)


# ---- what is seen and what is kept ---------------------------------------------------------------
@pytest.mark.parametrize(
    "kind", rows(["split", "f32", "f32 beside bf16", "no split"], ["split", "f32 beside bf16"])
)
def test_noise_from_the_first_step_on(kind):
    dtype = F32 if kind == "f32" else BF16
    none = lowmem.Storage(master_weight_bits=None)
    tx = {
        "split": noisy(),
        "f32": noisy(optax.adamw(1e-2)),
        "f32 beside bf16": noisy(optax.adamw(1e-2), clean_dtype="float32"),
        "no split": noisy(flash(storage=none)),
    }[kind]
    given = start()
    params, state = lowmem.init(tx, given, dtype, allow_rounding=kind == "f32 beside bf16")
    step = stepper(tx)
    for count in range(3):
        assert int(state.count) == count
        wanted = resampled(params, state, dtype=dtype)
        np.testing.assert_array_equal(np.asarray(leaf(params, DOWN)), np.asarray(wanted))
        clean = gaussws.clean_params(params, state)
        kept = F32 if "f32" in kind else BF16
        assert leaf(clean, DOWN).dtype == kept and leaf(params, DOWN).dtype == dtype
        assert (leaf(clean, DOWN) != leaf(params, DOWN)).mean() > 0.2
        assert leaf(clean, UP) is leaf(params, UP)
        grads = jax.tree.map(lambda w: w.astype(F32), params)
        params, state = step(grads, state, params)
    if kind != "no split":
        first, state = lowmem.init(tx, given, dtype, allow_rounding=kind == "f32 beside bf16")
        masters = lowmem.master_params(first, state)
        limit = 0 if "f32" in kind else tol.MASTER_24_MAX
        for w, m in zip(jax.tree.leaves(given), jax.tree.leaves(masters), strict=True):
            if m.shape != (96,) and (kind != "f32 beside bf16" or m is leaf(masters, DOWN)):
                assert (jnp.abs(m - w) <= limit * jnp.abs(w)).all()


def test_init_alone_begins_without_noise():
    """And takes no gradient of bitwidths from noise that nobody has seen."""
    tx, params = noisy(bits_optimizer=optax.sgd(1.0)), start()
    state = tx.init(params)
    assert leaf(state.clean, DOWN).unsafe_buffer_pointer() != (
        leaf(params, DOWN).unsafe_buffer_pointer()
    )  # else both could not be donated
    grads = jax.tree.map(jnp.ones_like, params)
    params, state = lowmem.step(tx, grads, state, params)
    assert (leaf(state.bits, DOWN) == 1).all()
    params, state = lowmem.step(tx, grads, state, params)
    assert (leaf(state.bits, DOWN) != 1).all()


def test_clean_weights_are_stepped_as_without_noise():
    given = start()
    tx, alone = noisy(), flash()
    params, state = lowmem.init(tx, given)
    plain, plain_state = lowmem.init(alone, given)
    for seed in range(4):
        grads = start(seed + 1)
        params, state = stepper(tx)(grads, state, params)
        plain, plain_state = stepper(alone)(grads, plain_state, plain)
    equal(gaussws.clean_params(params, state), plain)
    equal(state.inner_state, plain_state)
    equal(lowmem.master_params(params, state), lowmem.master_params(plain, plain_state))
    assert leaf(params, UP).tolist() == leaf(plain, UP).tolist()


def test_optax_gets_f32_gradients():
    """Of 16-bit ones: it would square those in 16 bits."""
    given, inner = start(), optax.adamw(1e-2)
    tx = noisy(inner, clean_dtype=F32)
    with pytest.raises(ValueError, match="^'mlp/up/kernel' and 1 more would be"):
        lowmem.init(tx, given)  # none of these has a clean weight in f32
    params, state = lowmem.init(tx, given, allow_rounding=True)
    grads = jax.tree.map(lambda g: g.astype(BF16), start(1))
    after = stepper(tx)(grads, state, params)[1]
    wide = {"w": leaf(grads, DOWN).astype(F32)}
    plain = {"w": leaf(given, DOWN)}
    wanted, of_wanted = stepper(inner)(wide, inner.init(plain), plain)
    np.testing.assert_allclose(leaf(after.clean, DOWN), wanted["w"], rtol=1e-6, atol=1e-7)
    nu = leaf(optax.tree.get(after.inner_state, "nu"), DOWN)
    np.testing.assert_allclose(nu, of_wanted[0].nu["w"], rtol=1e-6)


@pytest.mark.parametrize("dtype", rows([BF16, F32], [BF16]))
def test_updates_and_steps_agree(dtype):
    """Weights up to f32's rounding of the update, and how XLA fuses the step inside.

    The rounding of noise is that of the largest weight of a block.
    """
    tx = noisy(parts=["down", "up"])
    params, state = lowmem.init(tx, start(), dtype)
    assert (leaf(params, UP) != leaf(gaussws.clean_params(params, state), UP)).any()

    @jax.jit
    def both(grads, state, params):
        updates, other = tx.update(grads, state, params)
        return lowmem.step(tx, grads, state, params), (optax.apply_updates(params, updates), other)

    for seed in range(3):
        before = params
        (params, state), (added, other) = both(start(seed + 1), state, params)
        masters = [lowmem.master_params(params, one) for one in (state, other)]
        for a, b in zip(*map(jax.tree.leaves, masters), strict=True):
            np.testing.assert_allclose(a, b, rtol=2.0**-14, atol=1e-8)
        equal((state.count, state.seed), (other.count, other.seed))
        np.testing.assert_allclose(leaf(state.bits, UP), leaf(other.bits, UP), rtol=1e-6)
        np.testing.assert_allclose(leaf(state.scale, UP), leaf(other.scale, UP), rtol=1e-5)
        for a, b, old in zip(*map(jax.tree.leaves, (params, added, before)), strict=True):
            a, b, old = (np.float32(x) for x in (a, b, old))
            gap = np.abs(a - b)
            spacing = 2.0**-7 * np.abs(a) if dtype == BF16 else 0
            rounding = 2.0**-20 * (np.abs(old) + np.abs(a)) + 2.0**-23 * np.abs(a).max()
            assert (gap <= rounding + spacing).all()
            assert (gap > 0).mean() < (0.01 if dtype == BF16 else 1)


def test_gradients_of_bitwidths():
    """Equations 3, 9 and 10, by hand, with plain SGD of b_i."""
    init, target, weight, rate = 7.0, 3.0, 0.5, 0.1
    tx = noisy(
        optax.sgd(1e-2), parts=["down", "up"], bits_init=init, bits_target=target,
        bits_loss=weight, bits_optimizer=optax.sgd(rate),
    )  # fmt: skip
    params, state = lowmem.init(tx, start(), F32)
    grads = start(1)
    _, after = stepper(tx)(grads, state, params)
    blocks = sum(gaussws.bitwidths(state)[path].size for path in (DOWN, UP))
    assert blocks == 12
    for path in (DOWN, UP):
        key = random.leaf_key(state.seed, state.count, path)
        w = np.float64(leaf(gaussws.clean_params(params, state), path))
        r = np.float64(gaussws.draw(key, w.shape))
        bits = np.full((2, 3), init)
        of_bits = oracle.gradients(w, bits, r, np.float64(leaf(grads, path)))[1]
        of_bits += weight / blocks * np.sign(bits - target)
        wanted = 1 - rate * (init - target) * of_bits
        np.testing.assert_allclose(leaf(after.bits, path), wanted, atol=1e-6)
        found = gaussws.bitwidths(after)[path]
        np.testing.assert_allclose(found, target + wanted * (init - target), atol=1e-5)


def test_weight_decay_guides_bitwidths_to_the_target():
    tx = noisy(optax.sgd(0.0), bits_optimizer=optax.adamw(1e-1, weight_decay=1.0))
    params, state = lowmem.init(tx, start(), F32)
    grads = jax.tree.map(jnp.zeros_like, params)
    for _ in range(30):
        params, state = stepper(tx)(grads, state, params)
    np.testing.assert_allclose(gaussws.bitwidths(state)[DOWN], 4 + 2 * 0.9**30, rtol=1e-5)
    kept = noisy(bits_optimizer=optax.set_to_zero())
    params, state = lowmem.init(kept, start())
    _, state = stepper(kept)(start(1), state, params)
    assert (gaussws.bitwidths(state)[DOWN] == 6).all()


@pytest.mark.parametrize("noise", rows(["diffq", "box-muller"], ["diffq"]))
def test_other_noise(noise):
    tx = noisy(noise=noise)
    params, state = lowmem.init(tx, start())
    params, state = stepper(tx)(start(1), state, params)
    wanted = resampled(params, state, noise=noise)
    share = np.mean(np.asarray(leaf(params, DOWN)) != np.asarray(wanted))
    assert share < (0.01 if noise == "diffq" else 0.001)  # products that are fused, or not


def test_values_of_few_bits():
    tx = noisy(compute="mxfp4")
    params, state = lowmem.init(tx, start())
    seen = leaf(params, DOWN)
    assert seen.dtype == BF16 and len(np.unique(np.abs(np.float32(seen[:32, :32])))) <= 8
    wide = resampled(params, state, dtype=F32)
    np.testing.assert_array_equal(np.float32(seen), gaussws.fake_cast(wide, "mxfp4"))


def test_new_noise_every_step_and_of_the_seed():
    tx = noisy(optax.set_to_zero())
    given = start()
    params, state = lowmem.init(tx, given, allow_rounding=True)
    seen = []
    for _ in range(4):
        seen.append(np.float32(leaf(params, DOWN)))
        params, state = stepper(tx)(given, state, params)
    other = lowmem.init(tx, given, seed=5, allow_rounding=True)
    assert int(other[1].seed) == 5
    seen.append(np.float32(leaf(other[0], DOWN)))
    for i, one in enumerate(seen):
        assert all((one != two).mean() > 0.3 for two in seen[:i])
    tx = lowmem.gaussws_noise(optax.set_to_zero(), "down", seed=5)
    again = lowmem.init(tx, given, allow_rounding=True)
    equal(again[0], other[0])


# ---- memory --------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["flash_adamw", "adam_mini", "f32"])
def test_memory(kind):
    dtype = BF16
    if kind == "f32":  # f32 weights for the optimizer, bf16 ones for the loss
        inner, tx = optax.adamw(1e-3), noisy(optax.adamw(1e-3), "all", clean_dtype=F32)
        own = F32
    else:
        inner = flash() if kind == "flash_adamw" else lowmem.flash_adam_mini(1e-3)
        tx, own = noisy(inner, "all"), BF16
    shapes = {"mlp": {"down_proj": {"kernel": jax.ShapeDtypeStruct((2048, 768), dtype)}}}
    own = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, own), shapes)
    with_noise, without = lowmem.memory.report(tx, shapes), lowmem.memory.report(inner, own)
    extra = (with_noise.total_bytes - without.total_bytes) / (2048 * 768)
    assert 2 < extra <= 2.02
    assert with_noise.by_slot["bits"] == with_noise.by_slot["scale"] == 4 * 64 * 24


# ---- what it stands around, and what around it ---------------------------------------------------
@pytest.mark.parametrize(
    "around",
    [
        lambda tx: optax.MultiSteps(tx, 3).gradient_transformation(),
        lambda tx: lowmem.accumulate_gradients(tx, 3, into="bfloat16"),
    ],
    ids=["MultiSteps", "accumulate_gradients"],
)
def test_noise_is_frozen_while_gradients_accumulate(around):
    tx = around(noisy())
    params, state = lowmem.init(tx, start())
    seen = [np.float32(leaf(params, DOWN))]
    assert (seen[0] != np.float32(leaf(gaussws.clean_params(params, state), DOWN))).any()
    for seed in range(6):
        params, state = stepper(tx)(start(seed + 1), state, params)
        seen.append(np.float32(leaf(params, DOWN)))
    same = [(a == b).all() for a, b in zip(seen[1:], seen, strict=False)]
    assert same == [True, True, False, True, True, False]
    assert (leaf(params, UP) != leaf(lowmem.init(tx, start())[0], UP)).any()


@pytest.mark.parametrize("name", rows(["stable_adamw", "q_adam_mini"], ["q_adam_mini"]))
def test_other_optimizers(name):
    tx = noisy(small_leaves.record(name).make(1e-3))
    params, state = lowmem.init(tx, start())
    for seed in range(2):
        params, state = stepper(tx)(start(seed + 1), state, params)
    np.testing.assert_array_equal(leaf(params, DOWN), resampled(params, state))


def test_masked_and_partitioned():
    params = start()
    only = optax.masked(noisy(), {"mlp": True, "norm": False})
    weights, state = lowmem.init(only, params, allow_rounding=True)
    assert (leaf(weights, DOWN) != leaf(gaussws.clean_params(weights, state), DOWN)).any()
    labels = {"mlp": "noisy", "norm": "plain"}
    split = optax.partition({"noisy": noisy(), "plain": flash()}, labels)
    weights, state = lowmem.init(split, params)
    weights, state = stepper(split)(start(1), state, weights)
    assert (leaf(weights, DOWN) != leaf(gaussws.clean_params(weights, state), DOWN)).any()


def test_stacked_layers():
    params = {"layers": {"mlp": {"down_proj": {"kernel": jnp.full((3, 40, 64), 0.5)}}}}
    tx = lowmem.gaussws_noise(flash(), "od")
    weights, state = lowmem.init(tx, params)
    w = np.float32(jax.tree.leaves(weights)[0])
    assert gaussws.bitwidths(state)["layers/mlp/down_proj/kernel"].shape == (3, 2, 2)
    assert (w[0] != w[1]).mean() > 0.3 and (w[1] != w[2]).mean() > 0.3


SPECS = [P("a", "b"), P(("a", "b"), None), P(None, "b"), P()]


@pytest.mark.parametrize("spec", rows(SPECS, SPECS[:1]), ids=str)
def test_sharded(spec):
    """Bit for bit, on 8 devices, three steps; and the state lies as `state_shardings` says."""
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(4, 2), ("a", "b"))
    tx = lowmem.gaussws_noise(flash(), ["down", "up"])
    params, state = lowmem.init(tx, start(shape=(256, 128)))
    specs = {"mlp": {"up": {"kernel": spec}, "down": {"kernel": spec}}, "norm": {"scale": P()}}
    places = jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
    of_state = lowmem.sharding.state_shardings(tx, params, places)
    for tree in (of_state.clean, of_state.bits, of_state.scale):
        assert leaf(tree, DOWN).is_equivalent_to(leaf(places, DOWN), 2)
    own, own_state = jax.device_put((params, state), (places, of_state))
    for seed in range(3):
        grads = start(seed + 1, (256, 128))
        params, state = stepper(tx)(grads, state, params)
        own, own_state = stepper(tx)(jax.device_put(grads, places), own_state, own)
    equal(own, params)
    flat = zip(jax.tree.leaves(own_state), jax.tree.leaves(state), strict=True)
    for a, b in flat:
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-5, atol=1e-7)


# ---- misuse --------------------------------------------------------------------------------------
def raises(message, kind=ValueError):
    return pytest.raises(kind, match=message)


MISUSES = {
    "split around": (lambda: lowmem.split_master_weights(noisy(optax.sgd(0.1))), "put the split"),
    "link after": (
        lambda: lowmem.chain(noisy(optax.sgd(0.1)), optax.scale(0.5)),
        "link 0 .* noise",
    ),
    "twice": (lambda: noisy(noisy()), "gaussws_noise around gaussws_noise"),
    "MultiSteps inside": (lambda: noisy(optax.MultiSteps(flash(), 2)), "accumulated inside"),
    "accumulation inside": (
        lambda: noisy(lowmem.accumulate_gradients(flash(), 2, into="moments")),
        "accumulated inside",
    ),
    "no such part": (
        lambda: noisy(parts="qkv"),
        "no leaf matches parts='qkv'; the leaves are 'mlp/down",
    ),
    "a vector": (lambda: noisy(parts="norm/*"), r"'norm/scale' has shape \(96,\)"),
}


@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES)
def test_misuse(misuse):
    make, message = misuse
    with raises(message):
        make().init(start())


BEHIND_THE_NOISE = {
    "around": lambda: optax.chain(noisy(), optax.scale(0.5)),
    "around sgd": lambda: optax.chain(noisy(optax.sgd(0.1)), optax.scale(0.5)),
    "inside": lambda: noisy(optax.chain(flash(), optax.scale(0.5))),
}


@pytest.mark.parametrize("case", rows(BEHIND_THE_NOISE, ["around"]))
def test_explain_tells_what_changes_the_noise(case):
    params = jax.tree.map(lambda w: w.astype(BF16), start())
    bad = BEHIND_THE_NOISE[case]()
    (warning,) = lowmem.explain(bad, params).warnings
    assert "are changed after" in warning
    with pytest.raises(ValueError, match="are changed after"):
        jax.eval_shape(lambda p: lowmem.init(bad, p, allow_rounding=True), start())


def test_explain_does_not_mind_the_noise():
    params = jax.tree.map(lambda w: w.astype(BF16), start())
    assert lowmem.explain(noisy(), params).warnings == ()
    assert lowmem.explain(noisy(optax.adamw(1e-3)), params).warnings == ()


def test_states_of_other_settings():
    params, state = lowmem.init(noisy(), start())
    grads = start(1)
    with raises(r"'mlp/up/kernel' .*with other parts|'mlp/down/kernel' .*with other parts"):
        noisy(parts="up").update(grads, state, params)
    with raises("keeps a GaussWSState"):
        noisy().update(grads, state.inner_state, params)
    with raises("not passing `params`"):
        noisy().update(grads, state)
    with raises("gradient 'norm/scale' has shape"):
        noisy().update({**grads, "norm": {"scale": jnp.ones(3)}}, state, params)


@pytest.mark.parametrize(
    "more, message",
    [
        ({"noise": "normal"}, "noise must be one of gaussws"),
        ({"compute": "bfloat16"}, "one of mxfp8_e4m3"),
        ({"compute": "fp4"}, "format must be one of"),
        ({"clean_dtype": BF16}, "clean_dtype must be float32"),
        ({"bits_init": jnp.float32(6)}, "bits_init must be a number of bits"),
        ({"bits_loss": -1.0}, "bits_loss must be >= 0"),
    ],
    ids=str,
)
def test_arguments(more, message):
    with raises(message):
        noisy(**more)
    with raises(r"parts must be names", TypeError):
        noisy(parts=[3])
