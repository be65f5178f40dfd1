"""Small leaves in vectors: the step is that of the vectors, and everything else sees the leaves."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
from optax_lowmem import checkpoint
from optax_lowmem._src.core import groups
from optax_lowmem._src.core.packs import InPack
from tests.compilation import SAME_BITS
from tests.contract_cases import assert_same
from tests.tiers import rows

SHAPES = {"a": (6, 40), "b": (33,), "empty": (0, 3), "large": (40, 96), "s": (), "z": (2, 3, 64)}
BELOW = 1000
DECAYS = {"a": True, "b": False, "empty": True, "large": True, "s": False, "z": True}
CODED = lowmem.Storage(policy=lowmem.Policy(min_size=0))
PLAIN = lowmem.Storage(mu=None, nu=None)


def tree_of(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=s), dtype) for name, s in SHAPES.items()}


def adamw(storage, mask=None, below=None):
    tx = lowmem.flash_adamw(1e-2, weight_decay=0.3, mask=mask, storage=storage)
    return tx if below is None else lowmem.pack_small_leaves(tx, below)


def stepped(tx, params, state, steps=3, grad_dtype=jnp.float32):
    step = jax.jit(functools.partial(lowmem.step, tx), compiler_options=SAME_BITS)
    for seed in range(steps):
        params, state = step(tree_of(seed + 1, grad_dtype), state, params)
    return params, state


def together(tree, names):
    return jnp.concatenate([tree[name].reshape(-1) for name in names])


# the leaves of each vector in CODED, without a mask: a 0-d or empty leaf has no codes
VECTORS = {"a": ("a", "b", "z"), "empty": ("empty", "s")}


def concatenated(tree):
    """The tree that the inner optimizer has."""
    return {name: together(tree, own) for name, own in VECTORS.items()} | {"large": tree["large"]}


def test_a_leaf_of_as_many_elements_is_not_small():
    state = adamw(CODED, below=2 * 3 * 64).init(tree_of(0))
    assert [isinstance(state.mu[name], InPack) for name in ("b", "z")] == [True, False]


@pytest.mark.parametrize("dtype", rows([jnp.float32, jnp.bfloat16], [jnp.bfloat16]))
def test_a_step_is_that_of_the_vectors(dtype):
    inner, tx = adamw(dataclasses.replace(CODED, policy=lowmem.Policy(min_size=33))), None
    tx = lowmem.pack_small_leaves(adamw(CODED), BELOW)
    params, state = lowmem.init(tx, tree_of(0), dtype)
    like, of_vectors = lowmem.init(inner, concatenated(tree_of(0)), dtype)
    assert jax.tree.leaves(state.mu)[0].shape == (240 + 33 + 384,)
    assert state.mu["b"] == InPack("a") and state.mu["s"] == InPack("empty")
    assert state.mu["a"].dtype == jnp.int8 and state.mu["empty"].dtype == jnp.float32
    step = jax.jit(functools.partial(lowmem.step, tx), compiler_options=SAME_BITS)
    plain = jax.jit(functools.partial(lowmem.step, inner), compiler_options=SAME_BITS)
    update = jax.jit(tx.update, compiler_options=SAME_BITS)
    for seed in range(3):
        grads = tree_of(seed + 1)
        updates, after = update(grads, state, params)
        updated = optax.apply_updates(params, updates)
        params, state = step(grads, state, params)
        assert_same((updated, after), (params, state))
        like, of_vectors = plain(concatenated(grads), of_vectors, like)
        assert_same(concatenated(params), like)
        assert_same(jax.tree.leaves(state), jax.tree.leaves(of_vectors))
    masters = lowmem.master_params(params, state)
    assert_same(concatenated(masters), lowmem.master_params(like, of_vectors))
    assert {n: x.shape for n, x in masters.items()} == SHAPES


def test_leaves_that_are_not_packed_keep_all_their_bits():
    params, state = lowmem.init(adamw(CODED), tree_of(0))
    params, state = stepped(adamw(CODED), params, state)
    tx = adamw(CODED, below=BELOW)
    found, of_packs = stepped(tx, *lowmem.init(tx, tree_of(0)))
    assert_same(found["large"], params["large"])
    for field in ("mu", "mu_scale", "nu", "nu_scale", "correction"):
        assert_same(getattr(of_packs, field)["large"], getattr(state, field)["large"])


# ---- masks and policies are of the leaves as they are --------------------------------------------
MASKS = {
    "a tree": DECAYS,
    "a function": lambda tree: {name: DECAYS[name] for name in tree},
    "by dimensions": lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree),
    "none": None,
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_weight_decay_of_each_leaf_is_its_own(mask):
    """Zero gradients: what moves is what decays, by 1 - 0.3 x 1e-2."""
    tx, params = adamw(PLAIN, mask, BELOW), tree_of(0)
    grads = jax.tree.map(jnp.zeros_like, params)
    new, _ = lowmem.step(tx, grads, tx.init(params), params)
    found = mask(params) if callable(mask) else mask or dict.fromkeys(params, True)
    for name, p in params.items():
        wanted = p * jnp.float32(0.997) if found[name] else p
        np.testing.assert_allclose(new[name], wanted, rtol=2.0**-22, err_msg=name)


def test_a_policy_is_asked_of_leaves():
    policies = {
        "exclude": lowmem.Policy(min_size=1, exclude=("nu:b", "z")),
        "size": lowmem.Policy(min_size=300),
        "mask": lowmem.Policy(min_size=1, mask=lambda tree: {name: name != "a" for name in tree}),
    }
    for policy in policies.values():
        storage = dataclasses.replace(CODED, policy=policy)
        shown = [
            lowmem.explain(adamw(storage, below=b), tree_of(0)).decisions for b in (None, BELOW)
        ]
        assert shown[0] == shown[1]
        state = adamw(storage, below=BELOW).init(tree_of(0))
        forms = {(d.path, d.slot): d.form for d in shown[1]}
        for slot in ("mu", "nu"):
            for name, node in getattr(state, slot).items():
                held = getattr(state, slot)[node.pack] if isinstance(node, InPack) else node
                assert (held.dtype == jnp.float32) == (forms[name, slot] is None), (name, slot)


def test_a_mask_around_or_a_partition():
    tx = optax.partition(
        {"d": adamw(PLAIN, below=BELOW), "n": lowmem.pack_small_leaves(lowmem.flash_lion(1e-2))},
        {name: "d" if decays else "n" for name, decays in DECAYS.items()},
    )
    params, grads = tree_of(0), tree_of(1)
    new, state = lowmem.step(tx, grads, tx.init(params), params)
    plain, _ = lowmem.step(adamw(PLAIN), grads, adamw(PLAIN).init(params), params)
    for name in ("a", "z"):
        np.testing.assert_array_equal(new[name], plain[name])
    lion = lowmem.flash_lion(1e-2)
    other, _ = lowmem.step(lion, grads, lion.init(params), params)
    np.testing.assert_array_equal(new["b"], other["b"])
    assert len(optax.tree.get_all_with_path(state, "count")) == 2


# ---- forms of trees and calls --------------------------------------------------------------------
@pytest.mark.parametrize("tree", [{}, {"w": jnp.ones((40, 96))}, {"one": jnp.ones(3)}])
def test_nothing_to_pack_is_the_inner_optimizer(tree):
    tx, inner = adamw(CODED, below=BELOW), adamw(CODED)
    params, state = lowmem.init(tx, tree)
    assert_same((params, state), lowmem.init(inner, tree))
    grads = jax.tree.map(jnp.ones_like, params)
    found = lowmem.step(tx, grads, state, params)
    assert_same(found, lowmem.step(inner, grads, state, params))


def test_an_unpacked_state_goes_on_unpacked():
    params, state = lowmem.init(adamw(CODED), tree_of(0))
    packed = adamw(CODED, below=BELOW)
    assert_same(stepped(packed, params, state), stepped(adamw(CODED), params, state))


def test_scan_donation_and_16_bit_gradients():
    tx = adamw(CODED, DECAYS, BELOW)
    params, state = lowmem.init(tx, tree_of(0))
    wanted = stepped(tx, params, state, grad_dtype=jnp.bfloat16)
    grads = [tree_of(seed + 1, jnp.bfloat16) for seed in range(3)]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)

    def run(params, state, stack):
        return jax.lax.scan(
            lambda c, g: (lowmem.step(tx, g, c[1], c[0]), None), (params, state), stack
        )[0]

    run = jax.jit(run, donate_argnums=(0, 1), compiler_options=SAME_BITS)
    before = jax.tree.leaves((params, state))
    assert_same(run(params, state, stack), wanted)
    assert all(leaf.is_deleted() for leaf in before if leaf.size)


@pytest.mark.parametrize("update_dtype", ["float32", "param"])
def test_dtypes_of_updates_and_a_bare_direction(update_dtype):
    storage = dataclasses.replace(CODED, update_dtype=update_dtype)
    params = {**tree_of(0, jnp.bfloat16), "b": tree_of(0)["b"]}
    grads = {**params, "a": tree_of(0)["a"]}  # of two dtypes in one vector
    for packed, plain in (
        (adamw(storage, below=BELOW), adamw(storage)),
        (lowmem.pack_small_leaves(tx := lowmem.scale_by_flash_adam(storage=storage), BELOW), tx),
    ):
        found = jax.eval_shape(packed.update, grads, packed.init(params), params)[0]
        wanted = jax.eval_shape(plain.update, grads, plain.init(params), params)[0]
        assert found == wanted


def test_a_bare_direction_without_parameters():
    plain = lowmem.scale_by_flash_adam(storage=PLAIN)
    found = [
        jax.jit(tx.update, compiler_options=SAME_BITS)(tree_of(1), tx.init(tree_of(0)))[0]
        for tx in (plain, lowmem.pack_small_leaves(plain, BELOW))
    ]
    assert_same(*found)


def test_boxes_of_linen_name_no_axis_of_a_vector():
    params = {
        name: linen.Partitioned(value, ("x",) * value.ndim) for name, value in tree_of(0).items()
    }
    tx = adamw(CODED, below=BELOW)
    weights, state = lowmem.init(tx, params)
    assert state.mu["a"].names == (None,) and state.mu["large"].names == ("x", "x")
    new, after = jax.jit(functools.partial(lowmem.step, tx))(params, state, weights)
    assert jax.tree.structure((new, after)) == jax.tree.structure((weights, state))
    assert jax.tree.map(jnp.shape, linen.unbox(lowmem.master_params(new, after))) == SHAPES


# ---- what reads a state --------------------------------------------------------------------------
def test_explain_and_the_memory_report():
    params = tree_of(0, jnp.bfloat16)
    shown = lowmem.explain(adamw(CODED, below=BELOW), params)
    assert not shown.warnings and {d.path for d in shown.steps} == set(SHAPES)
    assert "in one vector with 2 other small leaves" in str(shown)
    assert "xla updates 3 of 6 leaves" in str(shown)
    found = lowmem.memory.report(adamw(CODED, below=BELOW), params)
    state = adamw(CODED, below=BELOW).init(params)
    assert found.state_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert found.counterpart == "optax.adamw"
    late = optax.chain(adamw(CODED, below=BELOW), optax.scale(0.5))
    (warning,) = lowmem.explain(late, jax.eval_shape(lambda: params)).warnings
    assert "the updates of a, b, " in warning


def test_codes_of_several_in_a_byte_are_of_the_vector():
    """An odd number of them: `to_optax` and `code_shares` read each once."""
    storage = dataclasses.replace(lowmem.Storage.four_bit(), policy=CODED.policy)
    tx = adamw(storage, below=BELOW)
    params, state = stepped(tx, *lowmem.init(tx, tree_of(0)), steps=1)
    assert state.mu["a"].shape == (329,)  # of 657
    shares = lowmem.diagnostics.code_shares(state, tx, params)
    assert set(shares["mu"]) == {"a", "large"}
    _, plain = checkpoint.to_optax(tx, state, params)
    zeros = np.mean(together(plain[0].mu, VECTORS["a"]) == 0)
    np.testing.assert_allclose(shares["mu"]["a"].zero, zeros, rtol=2.0**-20)


@pytest.mark.parametrize("dtype", rows([jnp.float32, jnp.bfloat16], [jnp.bfloat16]))
def test_checkpoints(tmp_path, dtype):
    pytest.importorskip("orbax.checkpoint")
    tx = adamw(CODED, DECAYS, BELOW)
    params, state = stepped(tx, *lowmem.init(tx, tree_of(0), dtype))
    checkpoint.save(tmp_path, tx, params, state, step=3)
    assert_same(checkpoint.restore(tmp_path, tx, params), (params, state))
    for other in (adamw(CODED, DECAYS), adamw(CODED, DECAYS, 100), adamw(CODED, None, BELOW)):
        with pytest.raises(ValueError, match="saved with, in pack_small_leaves if that was"):
            checkpoint.restore(tmp_path, other, params)
    assert_same(pickle.loads(pickle.dumps(state)), state)


def test_conversion_from_and_to_optax():
    """Moments that stay in f32 are exact; so a state goes from unpacked to packed and back."""
    tx, inner = adamw(PLAIN, DECAYS, BELOW), adamw(PLAIN, DECAYS)
    params, state = stepped(inner, *lowmem.init(inner, tree_of(0), jnp.float32))
    masters, plain = checkpoint.to_optax(inner, state, params)
    weights, packed = checkpoint.from_optax(tx, plain, masters, jnp.float32)
    assert isinstance(packed.mu["z"], InPack)
    assert_same(checkpoint.to_optax(tx, packed, weights), (masters, plain))
    assert_same(stepped(tx, weights, packed)[0], stepped(inner, params, state)[0])
    coded = adamw(CODED, None, BELOW)
    _, packed = checkpoint.from_optax(coded, plain, masters)
    _, back = checkpoint.to_optax(coded, packed, tree_of(0, jnp.bfloat16))
    found, wanted = (together(mu, VECTORS["a"]) for mu in (back[0].mu, plain[0].mu))
    own = coded.engine.storage
    bound = own.mu.error_bound(groups.to_groups(wanted, own.group_size), stochastic=True)
    gap = np.abs(found - wanted)
    assert gap.any() and (gap <= bound.reshape(-1)[: gap.size]).all()


# ---- on a mesh -----------------------------------------------------------------------------------
def test_replicated_small_leaves_beside_a_sharded_one():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])
    specs = {name: P("x") if name == "large" else P() for name in SHAPES}
    put = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    tx = adamw(CODED, DECAYS, BELOW)
    params, state = lowmem.init(tx, tree_of(0))
    where = lowmem.sharding.state_shardings(tx, params, put)
    assert where.mu["large"].spec == P("x", None) and where.mu["a"].is_fully_replicated
    grads = tree_of(1)
    wanted = jax.jit(functools.partial(lowmem.step, tx), compiler_options=SAME_BITS)(
        grads, state, params
    )
    step = functools.partial(lowmem.step, tx, mesh=mesh, specs=specs)
    arguments = [jax.device_put(x, s) for x, s in ((grads, put), (state, where), (params, put))]
    assert_same(jax.jit(step, compiler_options=SAME_BITS)(*arguments), wanted)


def test_sharded_small_leaves_are_refused():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
    tx = adamw(CODED, below=BELOW)
    specs = {name: P("x") if name == "a" else P() for name in SHAPES}
    params = tree_of(0)
    state = tx.init(params)
    with pytest.raises(ValueError, match="leaf 'a' of shape .* is sharded.*lower `below`"):
        jax.eval_shape(lambda p, s: lowmem.step(tx, p, s, p, mesh=mesh, specs=specs), params, state)
    params["a"] = jax.device_put(params["a"], NamedSharding(mesh, P("x")))
    with pytest.raises(ValueError, match="leaf 'a' of shape .* is sharded.*240 elements"):
        tx.init(params)


# ---- errors --------------------------------------------------------------------------------------
def test_what_cannot_be_packed():
    for make in (lowmem.stable_adamw, lowmem.flash_muon, lowmem.flash_adam_mini):
        rule = type(make(1e-3).engine.rule).__name__
        with pytest.raises(ValueError, match=f"^{rule} uses whole leaves"):
            lowmem.pack_small_leaves(make(1e-3))
    for other in (optax.adamw(1e-3), lowmem.chain(lowmem.flash_adamw(1e-3))):
        with pytest.raises(ValueError, match="needs one of our optimizers, unwrapped"):
            lowmem.pack_small_leaves(other)
    with pytest.raises(TypeError, match="not an optax transformation"):
        lowmem.pack_small_leaves(1e-3)
    for below in (-1, 1e4, True):
        with pytest.raises(ValueError, match="below must be a number of elements"):
            lowmem.pack_small_leaves(lowmem.flash_adamw(1e-3), below)
    with pytest.raises(ValueError, match="gradient release steps one layer"):
        lowmem.release.train_step(adamw(CODED, below=BELOW), None)


def test_other_trees_than_at_init():
    tx = adamw(CODED, below=BELOW)
    params = tree_of(0)
    state = tx.init(params)
    longer = {**params, "b": jnp.ones(34)}
    with pytest.raises(ValueError, match="'a' is int8.657., but .* keeps int8.658."):
        tx.update(longer, state, longer)
    fewer = {name: p for name, p in params.items() if name != "b"}
    with pytest.raises(ValueError, match="missing .'b'., extra"):
        tx.update(fewer, state, fewer)
    with pytest.raises(ValueError, match="'b' has shape"):
        tx.update(longer, state, params)
    cast = {**params, "b": params["b"].astype(jnp.bfloat16)}
    with pytest.raises(ValueError, match="'a' and 'b' share a vector.*differ in dtype"):
        tx.update(params, state, cast)
    with pytest.raises(ValueError, match="'a' and 'b' share a vector.*differ in decays"):
        adamw(CODED, DECAYS, BELOW).update(params, state, params)
    with pytest.raises(ValueError, match="in pack_small_leaves, which must then step it"):
        adamw(CODED).update(params, state, params)
    weights, state = lowmem.init(tx, params)
    with pytest.raises(ValueError, match="'a' and 2 more leaves .* these leaves have 658 elements"):
        lowmem.master_params({**weights, "b": jnp.ones(34, jnp.bfloat16)}, state)
