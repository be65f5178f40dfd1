"""Shardings of the state: where each array lies, and that a sharded step is the unsharded one."""

import collections
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
from optax_lowmem._src.arrays.codecs.expansion import ExpandedCodec
from optax_lowmem.sharding import state_shardings
from tests import small_leaves
from tests.compilation import SAME_BITS
from tests.contract_cases import code_differences
from tests.meshes import mesh_of
from tests.tiers import rows

PARTITIONS_CALLS = jax.default_backend() == "cpu" and jax.__version_info__ >= (0, 12)
LEARNING_RATE = 1e-2
SHAPES = {"embed": (128, 64), "head": (64, 96), "layers": (2, 32, 256), "bias": (40,)}
IS_SHAPE = dict(is_leaf=lambda x: isinstance(x, tuple))

# name -> (mesh, specs of the leaves above, zero_axis)
LAYOUTS = {
    "fsdp": (dict(fsdp=8), (P("fsdp"), P("fsdp"), P(None, "fsdp"), P("fsdp")), None),
    "tensor": (dict(tensor=2),
               (P(None, "tensor"), P("tensor"), P(None, None, "tensor"), P("tensor")), None),
    "both": (dict(fsdp=4, tensor=2),
             (P("fsdp", "tensor"), P("fsdp"), P(None, "fsdp", "tensor"), P()), None),
    "layers": (dict(stage=2), (P(), P(), P("stage"), P()), None),
    "zero": (dict(data=8), (P(), P(), P(), P()), "data"),
    "zero and tensor": (dict(data=4, tensor=2),
                        (P(None, "tensor"), P(), P(None, None, "tensor"), P()), "data"),
}  # fmt: skip
# some groups lie on two devices
UNALIGNED = {
    "half of three groups": (dict(tensor=2), (P(), P(None, "tensor"), P(), P()), None),
    "narrower than a group": (dict(tensor=4), (P(None, "tensor"), P(), P(), P()), None),
}


def laid_out(layout):
    """(shardings of the parameters, zero_axis)."""
    axes, specs, zero_axis = layout
    the_mesh = mesh_of(**axes)
    named = zip(SHAPES, specs, strict=True)
    return {name: NamedSharding(the_mesh, spec) for name, spec in named}, zero_axis


def masters(seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: jnp.asarray(rng.normal(0, 0.2, s), jnp.float32), SHAPES, **IS_SHAPE
    )


@functools.cache
def gradients(steps=20):
    rng = np.random.default_rng(1)

    def leaf(shape):
        wide = np.exp(rng.normal(size=shape))
        return np.asarray(wide * rng.normal(0, 1e-3, (steps, *shape)), jnp.bfloat16)

    return jax.tree.map(leaf, SHAPES, **IS_SHAPE)


def made(name):
    row = small_leaves.record(name)
    storage = row.make(LEARNING_RATE).engine.storage
    return row.make(LEARNING_RATE, storage=storage)


def trained(tx, params, state, shardings=None, steps=20):
    """Some steps in one jit; `shardings` of (params, state)."""

    def run(params, state, grads):
        def one(carry, g):
            return lowmem.step(tx, g, *reversed(carry)), None

        return jax.lax.scan(one, (params, state), grads)[0]

    how = {} if shardings is None else dict(out_shardings=shardings)
    return jax.jit(run, compiler_options=SAME_BITS, **how)(params, state, gradients(steps))


@functools.cache
def unsharded(name):
    tx = made(name)
    return trained(tx, *lowmem.init(tx, masters(), jnp.bfloat16))


@functools.cache
def a_step_later(name):
    """One step more than `unsharded`."""
    return trained(made(name), *unsharded(name), steps=1)


def check(name, layout, start=None, steps=20):
    tx = made(name)
    params, state = start or lowmem.init(tx, masters(), jnp.bfloat16)
    of_params, zero_axis = laid_out(layout)
    of_state = state_shardings(tx, params, of_params, zero_axis=zero_axis)
    on_host = jax.device_get((params, state))  # whose parts NumPy cuts; JAX would compile each cut
    params, state = jax.device_put(on_host, (of_params, of_state))
    found = trained(tx, params, state, (of_params, of_state), steps)
    for x, sharding in zip(jax.tree.leaves(found[1]), jax.tree.leaves(of_state), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    return found


# each way to shard, by rules of each kind
OFTEN = [("flash_adamw", "layers"), ("stable_adamw", "both")]


@pytest.mark.parametrize("name, layout", rows(itertools.product(lowmem.OPTIMIZERS, LAYOUTS), OFTEN))
def test_a_sharded_step_is_the_unsharded_one(name, layout):
    """Every bit after 20 steps; sums over a leaf are taken in another order.

    Powers of a group, compiled for another shape, may differ in their last bits, after which
    stochastic rounding leads elsewhere: with them, one step from the same state. So may all
    arithmetic in the calls of the packed path as newer XLA partitions them on a CPU.
    """
    tx = made(name)
    if isinstance(tx.engine.storage.mu, ExpandedCodec) or PARTITIONS_CALLS:
        return nearly(check(name, LAYOUTS[layout], unsharded(name), 1), a_step_later(name))
    found, wanted = check(name, LAYOUTS[layout]), unsharded(name)
    rule = tx.engine.rule
    if rule.prepares:
        return nearly(found, wanted)
    rows = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True)
    for (path, a), b in rows:
        np.testing.assert_array_equal(a, b, err_msg=str(path))


def nearly(found, wanted):
    """Codes at most one unit apart in 0.1 %, weights 1e-6 of their norm."""
    states = [state._replace(correction=()) for _, state in (found, wanted)]
    worst, share = code_differences(*states)
    assert worst <= 1 and share <= 1e-3
    weights = (jax.tree.leaves(lowmem.master_params(*pair)) for pair in (found, wanted))
    for a, b in zip(*weights, strict=True):
        assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b)


@pytest.mark.parametrize("layout", rows(UNALIGNED, list(UNALIGNED)[:1]))
def test_groups_on_two_devices(layout):
    """Their scales are whole, and the step is what it is elsewhere.

    (Not bit for bit: what is gathered in between is compiled, and fused, in other parts.)
    """
    nearly(check("flash_adamw", UNALIGNED[layout]), unsharded("flash_adamw"))


# ---- where each array lies -----------------------------------------------------------------------
WEIGHTS = {"w": jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)}


def specs_of(tx, spec, params=None, **how):
    the_mesh = mesh_of(x=4, y=2)
    given = {"w": spec}
    found = state_shardings(tx, params or WEIGHTS, given, mesh=the_mesh, **how)
    return jax.tree.map(lambda sharding: sharding.spec, found)


def test_every_field_of_a_state():
    state = specs_of(lowmem.flash_adamw(1e-3), P("x", "y"))
    assert (state.count, state.seed) == (P(), P())
    for slot in (state.mu, state.nu, state.correction, state.mu_scale, state.nu_scale):
        assert slot == {"w": P("x", "y")}
    # 8 parts of 32: each a group; of 64, each half of one
    state = specs_of(lowmem.flash_adamw(1e-3), P(None, ("x", "y")))
    assert (state.mu["w"], state.mu_scale["w"]) == (P(None, ("x", "y")),) * 2
    tx = lowmem.flash_adamw(1e-3, storage=lowmem.Storage(group_size=64))
    state = specs_of(tx, P(None, ("x", "y")))
    assert (state.mu["w"], state.mu_scale["w"]) == (P(None, ("x", "y")), P(None, None))


def test_groups_are_known_by_their_size_not_by_counting():
    """34 columns in two groups of 32: halves of 17 would cut the first."""
    params = {"w": jax.ShapeDtypeStruct((64, 34), jnp.bfloat16)}
    tx = lowmem.flash_adamw(1e-3, storage=lowmem.Storage(policy=lowmem.Policy(min_size=0)))
    state = specs_of(tx, P(None, "y"), params)
    assert (state.mu["w"], state.mu_scale["w"]) == (P(None, "y"), P(None, None))


def test_zero_splits_no_group():
    """Of 6 rows and 64 columns four devices can have neither; of 128 columns a group each."""
    storage = lowmem.Storage(policy=lowmem.Policy(min_size=0))
    tx, the_mesh = lowmem.flash_adamw(1e-3, storage=storage), mesh_of(x=4)
    for columns, spec in ((64, P(None, None)), (128, P(None, "x"))):
        params = {"w": jax.ShapeDtypeStruct((6, columns), jnp.bfloat16)}
        found = state_shardings(tx, params, {"w": P()}, mesh=the_mesh, zero_axis="x")
        assert found.correction["w"].spec == spec


def test_bytes_of_two_codes_stay_whole():
    """Codes lie as their parameter where its parts are whole bytes; `explain` says where not."""
    four = {"mu": lowmem.codecs.linear4(), "nu": lowmem.codecs.linear4(signed=False)}
    storage = lowmem.Storage(policy=lowmem.Policy(min_size=0), **four)
    tx = lowmem.flash_adamw(1e-3, storage=storage)
    assert specs_of(tx, P("x", "y")).mu["w"] == P("x", "y")
    # 24 a part are 12 bytes, but cut groups; of 33, the 17th byte would have codes of both
    for columns, codes in ((48, P("x", "y")), (66, P("x", None))):
        params = {"w": jax.ShapeDtypeStruct((64, columns), jnp.bfloat16)}
        found = specs_of(tx, P("x", "y"), params)
        assert found.mu["w"] == found.nu["w"] == codes
        assert found.mu_scale["w"] == P("x", None) and found.correction["w"] == P("x", "y")
        where = NamedSharding(mesh_of(x=4, y=2), P("x", "y"))
        leaf = jax.ShapeDtypeStruct((64, columns), jnp.bfloat16, sharding=where)
        (step,) = lowmem.explain(tx, {"w": leaf}).steps
        assert f"shards of {columns // 2} on the last axis, but groups of 32" in step.reason
        assert ("bytes of 2 codes" in step.reason) == (columns == 66)
        assert tx.init({"w": jnp.ones((64, columns), device=where)}).mu["w"].sharding.spec == codes


def test_heads_stay_together():
    """6 on an axis of 192: in two parts, 3 each; in four they would be cut."""
    blocks = lowmem.blocks.Structure(rules=[("w", lowmem.blocks.Block((0,), heads=(1, 6)))])
    tx = lowmem.flash_adam_mini(1e-3, blocks=blocks)
    params = {"w": jax.ShapeDtypeStruct((64, 192), jnp.bfloat16)}
    assert jax.eval_shape(tx.init, params).nu["w"].shape == (1, 6)
    assert specs_of(tx, P("x", "y"), params).nu["w"] == P(None, "y")
    assert specs_of(tx, P("y", "x"), params).nu["w"] == P(None, None)


def test_rows_and_columns_lie_on_every_device():
    tx = lowmem.flash_factored_adamw(1e-3, min_dim_size_to_factor=64)
    for spec in (P("x", None), P("x", "y"), P(None, "y")):
        state = specs_of(tx, spec)
        assert (state.nu["w"], state.mu["w"]) == (P(), spec)


WRAPPED = {
    "chain": lambda tx: lowmem.chain(optax.clip_by_global_norm(1.0), tx),
    "masked": lambda tx: optax.masked(tx, {"a": {"w": True}, "w": False}),
    "partition": lambda tx: optax.partition(
        {"ours": tx, "plain": optax.adam(1e-3)}, {"a": {"w": "ours"}, "w": "plain"}
    ),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "inject": lambda tx: optax.inject_hyperparams(lowmem.flash_adamw, hyperparam_dtype=jnp.float32)(
        1e-3
    ),
    "accumulate": lambda tx: lowmem.accumulate_gradients(tx, 2, into="bfloat16"),
    "ema": lambda tx: lowmem.track_master_ema(tx, 0.9),
    "compress": lambda tx: lowmem.split_master_weights(
        lowmem.compress_state(optax.adan(1e-3), m=lowmem.codecs.softsign())
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_through_wrappers(wrapper):
    tx = WRAPPED[wrapper](lowmem.flash_adamw(1e-3))
    params = {"a": {"w": jnp.ones((64, 256), jnp.bfloat16)}, "w": jnp.ones((8, 64), jnp.bfloat16)}
    the_mesh = mesh_of(x=4, y=2)
    of_params = {
        "a": {"w": NamedSharding(the_mesh, P("x", "y"))}, "w": NamedSharding(the_mesh, P("x"))
    }  # fmt: skip
    of_state = state_shardings(tx, params, of_params)
    state = jax.jit(tx.init, out_shardings=of_state)(params)
    assert any(x.shape == (64, 256) for x in jax.tree.leaves(state))
    for x in jax.tree.leaves(state):
        wanted = {(64, 256): P("x", "y"), (64, 8): P("x", "y"), (8, 64): P("x")}.get(x.shape, P())
        assert x.sharding.is_equivalent_to(NamedSharding(the_mesh, wanted), x.ndim), x.shape


def test_by_default_where_the_parameters_are():
    the_mesh = mesh_of(x=4, y=2)
    params = jax.device_put(
        {"w": jnp.ones((64, 256), jnp.bfloat16)}, NamedSharding(the_mesh, P("x", "y"))
    )
    assert state_shardings(lowmem.flash_lion(1e-3), params).mu["w"].spec == P("x", "y")


@pytest.mark.parametrize("rules", [None, (("embed", "x"), ("mlp", "y"))])
def test_boxes_of_linen(rules):
    names = ("x", "y") if rules is None else ("embed", "mlp")
    layer = linen.Dense(256, kernel_init=linen.with_partitioning(linen.initializers.ones, names))
    params = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((1, 64)))["params"]
    tx = lowmem.flash_adamw(1e-3, storage=lowmem.Storage(None))
    of_state = state_shardings(tx, params, mesh=mesh_of(x=4, y=2), rules=rules)
    assert of_state.mu["kernel"].spec == of_state.mu_scale["kernel"].spec == P("x", "y")
    assert of_state.mu["bias"].spec == P(None)

    def init():
        return tx.init(layer.init(jax.random.key(0), jnp.ones((1, 64)))["params"])

    state = jax.jit(init, out_shardings=of_state)()
    assert linen.meta.unbox(state).mu["kernel"].sharding.spec == P("x", "y")


def test_bytes_of_a_device():
    params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)}
    tx, given = lowmem.flash_adamw(1e-3), {"w": P()}
    of_state = state_shardings(tx, params, given, mesh=mesh_of(data=8), zero_axis="data")
    state = jax.eval_shape(tx.init, params)

    def size(x, shape):
        return math.prod(shape) * x.dtype.itemsize

    rows = list(zip(jax.tree.leaves(state), jax.tree.leaves(of_state), strict=True))
    local = sum(size(x, sharding.shard_shape(x.shape)) for x, sharding in rows)
    assert local == (sum(size(x, x.shape) for x, _ in rows) - 8) // 8 + 8


def test_state_on_the_host():
    """State stored in host memory between steps and moved to the device gives the same bits."""
    the_mesh, tx = mesh_of(x=4), lowmem.flash_adamw(1e-3)
    params = {"w": jnp.ones((64, 256), jnp.bfloat16)}
    given = {"w": P("x")}
    here, there = (
        state_shardings(tx, params, given, mesh=the_mesh, memory_kind=kind)
        for kind in (None, "pinned_host")
    )
    state = jax.device_put(tx.init(params), there)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state)} == {"pinned_host"}
    found = lowmem.step(tx, params, jax.device_put(state, here), params)
    wanted = lowmem.step(tx, params, tx.init(params), params)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "given, how, message",
    [
        (P("z"), {}, r"parameter 'w' of shape \(64, 256\).*no axis 'z', only \('x', 'y'\)"),
        (P("x", "x"), {}, "axis 'x' is named twice"),
        (P("x", None, "y"), {}, "more entries than the parameter has dimensions"),
        (P(), {"zero_axis": "data"}, "zero_axis='data': the mesh has"),
    ],
)
def test_bad_specs(given, how, message):
    with pytest.raises(ValueError, match=message):
        specs_of(lowmem.flash_adamw(1e-3), given, **how)


def test_what_is_missing():
    tx, params = lowmem.flash_adamw(1e-3), {"w": jax.ShapeDtypeStruct((66, 256), jnp.bfloat16)}
    with pytest.raises(ValueError, match=r"'w'.*x makes 4 parts, which do not divide dimension 0"):
        specs_of(tx, P("x"), params)
    with pytest.raises(ValueError, match="the sharding of parameter 'w' is not known"):
        state_shardings(tx, params)
    with pytest.raises(ValueError, match="pass mesh=, or use set_mesh"):
        state_shardings(tx, params, {"w": P("x")})
    with pytest.raises(ValueError, match=r"missing \['w'\], extra \['v'\]"):
        state_shardings(tx, params, {"v": P("x")}, mesh=mesh_of(x=4))


def test_corrections_of_weights_in_f32():
    """Those that `lowmem.init` makes would be replicated: a warning says so."""
    in_f32, split = {"w": jax.ShapeDtypeStruct((64, 256), jnp.float32)}, lowmem.flash_adamw(1e-3)
    with pytest.warns(UserWarning, match="w is float32, for which tx.init makes no corrections"):
        specs_of(split, P("x"), in_f32)
    specs_of(lowmem.flash_adamw(1e-3, storage=lowmem.Storage(None)), P("x"), in_f32)
    specs_of(split, P(), in_f32)  # a warning is an error here
    specs_of(split, P("x"), {"w": jnp.ones((64, 256))})
    shapes, _ = jax.eval_shape(lambda p: lowmem.init(split, p), in_f32)
    assert specs_of(split, P("x"), shapes).correction["w"] == P("x", None)


# ---- communication -------------------------------------------------------------------------------
COLLECTIVES = r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("


def compiled_step(tx, params, of_params, of_state):
    """The text of a compiled step."""
    state = jax.eval_shape(tx.init, params)
    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), params)
    step = jax.jit(
        functools.partial(lowmem.step, tx),
        in_shardings=(of_params, of_state, of_params),
        out_shardings=(of_params, of_state),
        compiler_options=SAME_BITS,
    )
    return step.lower(grads, state, params).compile().as_text()


def text_of_layout(tx, layout, dtype):
    of_params, zero_axis = laid_out(layout)
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, dtype), SHAPES, **IS_SHAPE)
    of_state = state_shardings(tx, params, of_params, zero_axis=zero_axis)
    return compiled_step(tx, params, of_params, of_state)


def of_layout(tx, layout, dtype):
    """Count the collectives of each kind in a compiled step."""
    return collections.Counter(re.findall(COLLECTIVES, text_of_layout(tx, layout, dtype)))


@pytest.mark.parametrize("layout", rows(["fsdp", "tensor", "both", "layers"], ["both"]))
def test_rows_and_columns_move_and_no_matrix(layout):
    """A few vectors of a value per row and column, in f32."""
    text = text_of_layout(made("flash_factored_adamw"), LAYOUTS[layout], jnp.bfloat16)
    moved = [line.split(found[0])[0] for line in text.splitlines()
             if (found := re.search(COLLECTIVES, line))]  # fmt: skip
    values = [math.prod(map(int, dimensions.split(",")))
              for left in moved for dimensions in re.findall(r"f32\[([\d,]+)\]", left)]  # fmt: skip
    vectors = {"embed": 128 + 64, "head": 64 + 96, "layers": 2 * (32 + 256)}
    assert values and max(values) <= max(vectors.values())  # a leaf has from 6,144 on
    assert sum(values) <= 1.5 * sum(vectors.values())
    assert len(moved) <= 4 * len(vectors)


@pytest.mark.parametrize("layout", rows(LAYOUTS, ["both"]))
def test_no_more_communication_than_optax(layout):
    ours = of_layout(made("flash_adamw"), LAYOUTS[layout], jnp.bfloat16)
    assert ours == of_layout(optax.adamw(LEARNING_RATE), LAYOUTS[layout], jnp.float32)
    assert bool(ours) == ("zero" in layout)  # ZeRO-1 gathers the new weights


# what docs/guides/sharding.md says of them
OF_CUT_GROUPS = {
    "half of three groups": {"all-gather": 2},
    "narrower than a group": {"all-reduce": 1, "all-gather": 2},
}


@pytest.mark.parametrize("layout", UNALIGNED)
def test_communication_of_cut_groups(layout):
    ours = of_layout(made("flash_adamw"), UNALIGNED[layout], jnp.bfloat16)
    assert ours == OF_CUT_GROUPS[layout]
    assert not of_layout(optax.adamw(LEARNING_RATE), UNALIGNED[layout], jnp.float32)
