"""Explicit mesh axes: a state keeps the shardings in its types, and steps as elsewhere."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
from optax_lowmem.sharding import state_shardings
from tests import small_leaves
from tests.compilation import SAME_BITS
from tests.contract_cases import skip_old_multi_steps
from tests.meshes import mesh_of
from tests.step.test_sharding import PARTITIONS_CALLS, nearly
from tests.tiers import rows

POLICY = lowmem.Policy(min_size=0)
FULL = pytest.mark.full
CODECS = lowmem.codecs
FOUR = lowmem.Storage(mu=CODECS.linear4(), nu=CODECS.linear4(signed=False), policy=POLICY)
# name -> (shape, spec); on 4 devices
WHOLE = {
    "rows": ((16, 64), P("x")),
    "columns": ((8, 128), P(None, "x")),
    "replicated": ((40,), P()),
    "middle": ((2, 8, 4), P(None, "x")),
}
CUT = {"half groups": ((8, 64), P(None, "x")), "three groups": ((8, 96), P(None, "x"))}
LEAVES = WHOLE | CUT


def mesh(devices=4, kind=AxisType.Explicit):
    return mesh_of(kind, x=devices)


def made(name):
    row = small_leaves.record(name)
    storage = row.make(row.learning_rate).engine.storage
    return row.make(row.learning_rate, storage=dataclasses.replace(storage, policy=POLICY))


def compressed(tx, **slots):
    return lowmem.compress_state(tx, policy=POLICY, **slots)


OURS, SOFTSIGN, SQRT = made("flash_adamw"), CODECS.softsign(), CODECS.sqrt()
# every optimizer of ours and every wrapper
FORMS = {
    **{name: made(name) for name in lowmem.OPTIMIZERS},
    "scale_by_flash_adam": lowmem.scale_by_flash_adam(storage=lowmem.Storage(policy=POLICY)),
    "compress_state adam": compressed(optax.adam(1e-3), mu=SOFTSIGN, nu=SQRT),
    "compress_state adan": compressed(optax.adan(1e-3), m=SOFTSIGN, v=SOFTSIGN, n=SQRT),
    "compress_state amsgrad": compressed(optax.amsgrad(1e-3), mu=SOFTSIGN, nu=SQRT, nu_max=SQRT),
    "4 bits": lowmem.flash_adamw(1e-3, storage=FOUR),
    "compress_state 4 bits": compressed(optax.adam(1e-3), mu=FOUR.mu, nu=FOUR.nu),
    "compand_momentum": lowmem.compand_momentum(optax.trace(0.9), policy=POLICY),
    "sqrt_variance_quant": lowmem.sqrt_variance_quant(optax.scale_by_rms(), policy=POLICY),
    "moments of blocks": lowmem.sqrt_variance_quant(
        lowmem.scale_by_adam_mini(blocks=lowmem.blocks.Structure(rules=(("*", (-1,)),))),
        policy=POLICY,
    ),
    "split_master_weights": lowmem.split_master_weights(optax.adam(1e-3)),
    "into bfloat16": lowmem.accumulate_gradients(OURS, 2, into="bfloat16"),
    "into moments": lowmem.accumulate_gradients(OURS, 2, into="moments"),
    "track_master_ema": lowmem.track_master_ema(OURS, 0.9),
    "update_clipping": lowmem.update_clipping(optax.adamw(1e-3), b2=0.999, eps=1e-8),
    "gaussws_noise": lowmem.gaussws_noise(OURS, ("rows", "columns", "half groups")),
    "chain": lowmem.chain(optax.clip_by_global_norm(1.0), OURS),
    "MultiSteps": optax.MultiSteps(OURS, 2).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(OURS, 3),
}


def arrays(leaves=LEAVES, dtype=jnp.bfloat16, seed=0, scale=0.2):
    rng = np.random.default_rng(seed)
    return {n: jnp.asarray(rng.normal(0, scale, s), dtype) for n, (s, _) in leaves.items()}


def placed(tree, leaves=LEAVES, the_mesh=None):
    the_mesh = the_mesh or mesh()
    return {n: jax.device_put(x, NamedSharding(the_mesh, leaves[n][1])) for n, x in tree.items()}


def types(tree):
    """(path, shape, dtype, sharding) of each array, as they are part of its type."""
    found = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        own = jax.typeof(x) if isinstance(x, jax.Array) else x
        spec = getattr(own.sharding, "spec", P())
        spec = (*spec, *[None] * (own.ndim - len(spec)))
        found.append((jax.tree_util.keystr(path), own.shape, own.dtype, spec))
    return found


def gradients_of(name, params):
    """optax.apply_if_finite has zeros of the gradients' dtype in the place of updates: f32."""
    wide = jnp.float32 if name == "apply_if_finite" else None
    return jax.tree.map(lambda p: p.astype(wide or p.dtype), params)


WRAPPING = ["moments of blocks", "gaussws_noise", "MultiSteps"]


@pytest.mark.filterwarnings("ignore:.*Adam-mini:UserWarning", "ignore:.*block:UserWarning")
@pytest.mark.parametrize("name", rows(FORMS, ["flash_adamw", *WRAPPING[:2]]))
def test_a_state_keeps_its_types(name):
    if name == "MultiSteps":
        skip_old_multi_steps()
    tx = FORMS[name]
    with jax.set_mesh(mesh()):
        params = placed(arrays())
        state = tx.init(params)
        assert types(jax.eval_shape(tx.init, params)) == types(state)
        grads = gradients_of(name, params)
        updates, new = jax.eval_shape(tx.update, grads, state, params)
        assert types(new) == types(state)
        assert [row[3] for row in types(updates)] == [row[3] for row in types(params)]

        def run(params, state, grads):
            def one(carry, _):
                return lowmem.step(tx, grads, *reversed(carry)), None

            return jax.lax.scan(one, (params, state), length=2)[0]

        if name != "scale_by_flash_adam" and "compand" not in name and "sqrt_var" not in name:
            assert types(jax.eval_shape(run, params, state, grads)) == types((params, state))


@pytest.mark.filterwarnings("ignore:.*Adam-mini:UserWarning", "ignore:.*block:UserWarning")
@pytest.mark.parametrize(
    "name", rows([name for name in FORMS if name != "gaussws_noise"], ["into bfloat16"])
)
def test_one_array_of_three_dimensions_on_eight_devices(name):
    tx = FORMS[name]
    with jax.set_mesh(mesh(8)):
        params = jnp.zeros((2, 8, 4), jnp.float16, out_sharding=P(None, "x"))
        state = tx.init(params)
        grads = gradients_of(name, params)
        assert types(jax.jit(tx.init)(params)) == types(state)
        jitted = jax.jit(tx.update)(grads, state, params)
        # outside of a jit optax.apply_if_finite raises for optax.adamw too
        eager = jitted if name == "apply_if_finite" else tx.update(grads, state, params)
        assert types(eager[1]) == types(jitted[1]) == types(state)
        assert types(eager[0]) == types(jitted[0])


@pytest.mark.parametrize("name", ["4 bits", pytest.param("compress_state 4 bits", marks=FULL)])
def test_parts_that_would_cut_bytes_of_two_codes(name):
    """5 columns a device: codes are whole on that axis, values and updates are not."""
    tx, leaves = FORMS[name], {"w": ((8, 20), P(None, "x"))}
    wanted = jax.jit(tx.update)(arrays(leaves), tx.init(arrays(leaves)), arrays(leaves))
    with jax.set_mesh(mesh()):
        params = placed(arrays(leaves), leaves)
        state = tx.init(params)
        updates, after = jax.jit(tx.update)(params, state, params)
    assert types(after) == types(state) and types(updates)[0][3] == (None, "x")
    assert ("w", (8, 10), (None, None)) in [(p[-3:-2], s, spec) for p, s, _, spec in types(after)]
    for a, b in zip(jax.tree.leaves((updates, after)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=1e-6)


def test_the_shardings_are_those_of_state_shardings():
    tx = made("flash_adamw")
    params = placed(arrays())
    with jax.set_mesh(mesh()):
        state = tx.init(params)
    wanted = state_shardings(tx, params)
    for (path, x), own in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(wanted), strict=True
    ):
        assert x.sharding.is_equivalent_to(own, x.ndim), path
    assert wanted.mu_scale["columns"].spec == P(None, "x")
    assert wanted.mu_scale["half groups"].spec == P(None, None)


def trained(tx, place, steps=4):
    params, state = lowmem.init(tx, place(arrays(dtype=jnp.float32)), jnp.bfloat16)
    step = jax.jit(functools.partial(lowmem.step, tx), compiler_options=SAME_BITS)
    for i in range(steps):
        params, state = step(place(arrays(seed=i + 1, scale=1e-3)), state, params)
    return params, state


BITS = ("flash_adamw", "flash_sgd", "into bfloat16")


@pytest.mark.parametrize("name", rows(BITS, ["flash_sgd"]))
def test_a_step_is_that_of_one_device(name):
    """Every bit where groups are whole; where they are cut, other parts are compiled."""
    tx = FORMS[name]
    wanted = trained(tx, lambda tree: tree)
    with jax.set_mesh(mesh()):
        found = trained(tx, placed)
    rows = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True)
    for (path, a), b in rows:
        name = jax.tree_util.keystr(path)
        if not PARTITIONS_CALLS and not any(cut in name for cut in CUT):
            np.testing.assert_array_equal(a, b, err_msg=name)
    if name in lowmem.OPTIMIZERS:
        nearly(found, wanted)


def test_parameters_whole_and_state_in_parts():
    tx, the_mesh = made("flash_adamw"), mesh()
    leaves = {"w": ((16, 64), P())}
    with jax.set_mesh(the_mesh):
        params = placed(arrays(leaves), leaves, the_mesh)
        state = jax.device_put(tx.init(params), state_shardings(tx, params, zero_axis="x"))
        assert jax.typeof(state.mu["w"]).sharding.spec == P("x", None)
        new, after = jax.jit(functools.partial(lowmem.step, tx))(params, state, params)
    assert types((new, after)) == types((params, state))


def test_equal_leaves_on_a_mesh_of_one_device(monkeypatch):
    """They are stepped alone: as one stack they would have to be sharded alike."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    leaves = {f"{i:03}": ((8, 32), P("x") if i % 2 else P()) for i in range(80)}
    tx = made("flash_adamw")
    with jax.set_mesh(mesh(1)):
        params = placed(arrays(leaves), leaves, mesh(1))
        state = jax.eval_shape(tx.init, params)
        found = jax.eval_shape(functools.partial(lowmem.step, tx), params, state, params)
    assert types(found) == types((params, state))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_explain_says_which_groups_are_cut(kind):
    params = placed(arrays(dtype=jnp.float32), the_mesh=mesh(kind=kind))
    found = {step.path: step.reason for step in lowmem.explain(made("flash_adamw"), params).steps}
    for path, parts in ("half groups", 16), ("three groups", 24):
        assert f"shards of {parts} on the last axis, but groups of 32" in found[path]
    assert "parts of" not in found["columns"] + found["rows"] + found["replicated"]


@pytest.mark.filterwarnings("ignore:.*Adam-mini:UserWarning", "ignore:.*block:UserWarning")
@pytest.mark.parametrize(
    "name", rows(["flash_adamw", "compress_state adam", "split_master_weights"], ["flash_adamw"])
)
def test_auto_axes(name):
    """Updates and state of a parameter's shape have its sharding, also after an eager `init`."""
    tx, params = FORMS[name], placed(arrays(WHOLE), WHOLE, mesh(kind=AxisType.Auto))
    of_shape = {x.shape: x.sharding for x in params.values()}
    state = tx.init(params)
    updates, after = jax.jit(tx.update)(params, state, params)
    for x in jax.tree.leaves((state, updates, after)):
        if x.shape in of_shape and x.ndim > 1:
            assert x.sharding.is_equivalent_to(of_shape[x.shape], x.ndim), x.shape
    assert jax.tree.structure(after) == jax.tree.structure(state)
