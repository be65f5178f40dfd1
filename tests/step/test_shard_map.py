"""A user's own shard_map, in which an optimizer sees a device's part of each leaf."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
from optax_lowmem.sharding import state_shardings
from tests import small_leaves
from tests.compilation import SAME_BITS
from tests.meshes import mesh_of
from tests.tiers import rows

CODECS = lowmem.codecs
SPECS = {"rows": P("x"), "vector": P("x"), "whole": P()}


def made(name, **storage):
    """Without random bits, which are those of the part, not of the whole leaf."""
    row = small_leaves.record(name)
    own = row.make(row.learning_rate).engine.storage
    exact = dict(rounding="nearest", master_weight_bits=32)
    return row.make(row.learning_rate, storage=dataclasses.replace(own, **exact, **storage))


OURS = made("flash_adamw")
PAIR = dict(mu=CODECS.softsign(), nu=CODECS.sqrt(), rounding="nearest")
FORMS = {
    "flash_adamw": OURS,
    "flash_lion": made("flash_lion"),
    "coat_adamw": made("coat_adamw"),
    "compress_state": lowmem.compress_state(optax.adam(1e-3), **PAIR),
    "two slots of one name": lowmem.compress_state(
        optax.chain(optax.scale_by_adam(), optax.trace(0.9), optax.scale_by_adam()), **PAIR
    ),
    "compand_momentum": lowmem.compand_momentum(optax.trace(0.9), rounding="nearest"),
    "split_master_weights": lowmem.split_master_weights(
        lowmem.compress_state(optax.adam(1e-3), **PAIR), bits=32
    ),
    "into moments": lowmem.accumulate_gradients(OURS, 2, into="moments"),
    "chain": lowmem.chain(optax.scale(0.5), OURS),
}


def arrays(seed, dtype=jnp.bfloat16):
    """8192 elements, of which a device has 1024: fewer than `min_size`."""
    rng = np.random.default_rng(seed)
    shapes = {"rows": (64, 128), "vector": (8192,), "whole": (16,)}
    return {n: jnp.asarray(rng.normal(0, 1e-2, s), dtype) for n, s in shapes.items()}


def on_mesh(tx, function, params, specs=SPECS):
    """A step of (params, state, gradients) in a shard_map over eight devices."""
    mesh = mesh_of(x=8)
    shardings = state_shardings(tx, params, specs, mesh=mesh)
    of_state = jax.tree.map(lambda sharding: sharding.spec, shardings)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=(specs, of_state, specs), out_specs=(specs, of_state)
    )
    return jax.jit(mapped, compiler_options=SAME_BITS)


@pytest.mark.parametrize("name", rows(FORMS, ["flash_adamw"]))
def test_parts_under_min_size(name):
    """The state says which leaves have codes; the step is that of the whole leaf."""
    tx = FORMS[name]

    def step(params, state, grads):
        return lowmem.step(tx, grads, state, params)

    params = arrays(0, jnp.float32 if name == "compand_momentum" else jnp.bfloat16)
    state = tx.init(params)
    wanted = jax.jit(step, compiler_options=SAME_BITS)(params, state, arrays(1))
    on_host = jax.device_get((params, state, arrays(1)))  # as in test_sharding.py
    found = on_mesh(tx, step, params)(*on_host)
    rows = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True)
    codes = 0
    for (path, a), b in rows:
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))
        codes += a.dtype in (jnp.int8, jnp.uint8, jnp.float8_e4m3fn) and a.ndim > 0
    assert codes >= 2


@pytest.mark.parametrize("name", ["flash_adamw", "compress_state"])
def test_a_state_made_of_parts(name):
    """`init` in a shard_map sees parts alone: those under `min_size` have f32, and keep it."""
    tx = FORMS[name]

    def run(params, grads):
        state = tx.init(params)
        updates, state = tx.update(grads, state, params)
        assert optax.tree.get(state, "mu")["rows"].dtype == jnp.float32
        return updates

    mesh = mesh_of(x=8)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(SPECS, SPECS), out_specs=SPECS)
    jax.eval_shape(mapped, arrays(0), arrays(1))


def test_other_reasons_hold_in_a_shard_map():
    """A pattern or mask that left a leaf uncompressed is not decided by the state."""
    tx = made("flash_adamw")
    state = jax.eval_shape(tx.init, arrays(0))
    other = made("flash_adamw", policy=lowmem.Policy(exclude=("vector",)))
    step = on_mesh(tx, lambda p, s, g: (p, other.update(g, s, p)[1]), arrays(0))
    with pytest.raises(ValueError, match="'vector' is int8.*made or restored with other settings"):
        jax.eval_shape(step, arrays(0), state, arrays(1))


def test_parts_that_cut_groups_are_refused_with_the_cure():
    tx = made("flash_adamw", policy=lowmem.Policy(min_size=0))
    params = {"w": jnp.ones((8, 64), jnp.bfloat16)}
    specs = {"w": P(None, "x")}
    step = on_mesh(tx, lambda p, s, g: (p, tx.update(g, s, p)[1]), params, specs)
    with pytest.raises(ValueError, match="mu_scale of 'w'.*must consist of whole groups.*jit with"):
        jax.eval_shape(step, params, tx.init(params), params)


def whole_optimizers():
    """Of whole leaves, or of their rows and columns."""
    return lowmem.flash_factored_adamw(0.1), lowmem.flash_adam_mini(0.1), lowmem.flash_muon(0.1)


@pytest.mark.parametrize("tx", whole_optimizers(), ids=("factored", "adam_mini", "muon"))
def test_whole_leaves_are_stepped_where_no_device_has_a_part(tx):
    params = {"up_proj": {"kernel": jnp.ones((256, 128), jnp.bfloat16)}}
    state = tx.init(params)
    # whose mean is exact, whatever the order
    each = np.random.default_rng(2).integers(-64, 64, (8, 256, 128)).astype(np.float32) / 1024
    mesh = mesh_of(x=8)

    def of_all(mean):
        def step(params, state, each):
            gradients = {"up_proj": {"kernel": mean(each)}}
            return lowmem.step(tx, gradients, state, params)

        return step

    mapped = jax.shard_map(
        of_all(lambda g: jax.lax.pmean(g[0], "x")),
        mesh=mesh,
        in_specs=(P(), P(), P("x")),
        out_specs=P(),
    )
    one, other = (
        jax.jit(step, compiler_options=SAME_BITS)(params, state, each)
        for step in (of_all(lambda g: g.mean(0)), mapped)
    )
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(other), jax.device_get(one))
    assert (np.asarray(one[0]["up_proj"]["kernel"], np.float32) != 1).mean() > 0.5


def test_parts_of_whole_leaves_are_refused_in_a_shard_map_and_in_a_pmap():
    params = {"up_proj": {"kernel": jnp.ones((256, 128), jnp.bfloat16)}}
    specs, mean = {"up_proj": {"kernel": P("x")}}, "a mean over each of its blocks"
    needed = mean, mean, "a direction of whole matrices"
    refused = [f"leaf 'up_proj/kernel' may differ over x, and {what}" for what in needed]
    refused[0] = "nu of 'up_proj/kernel'.*several devices"  # R and C are not cut as the leaf is
    for tx, what, message in zip(whole_optimizers(), needed, refused, strict=True):
        state = tx.init(params)
        step = on_mesh(tx, lambda p, s, g, tx=tx: lowmem.step(tx, g, s, p), params, specs)
        message = f"(?s){message}.*jit with shardings"
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(step, params, state, params)
        of_each = jax.tree.map(lambda x: x[None], (params, state))
        step = jax.pmap(lambda p, s, tx=tx: lowmem.step(tx, p, s, p), "i")
        with pytest.raises(ValueError, match=f"(?s)or a pmap.*over 'i', and {what}"):
            jax.eval_shape(step, *of_each)


def test_outside_of_a_shard_map_min_size_is_a_setting():
    tx, other = made("flash_adamw"), made("flash_adamw", policy=lowmem.Policy(min_size=10**6))
    with pytest.raises(ValueError, match="other settings"):
        other.update(arrays(1), tx.init(arrays(0)), arrays(0))
