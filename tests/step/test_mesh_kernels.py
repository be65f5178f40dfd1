"""Kernels on a mesh: a device's part is stepped where it lies, and is what the whole leaf has."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
from optax_lowmem import release
from optax_lowmem._src.arrays.sharding import named_sharding
from optax_lowmem._src.kernels import platform
from optax_lowmem._src.optim.step import gpu as gpu_step
from optax_lowmem._src.optim.step import on_mesh
from optax_lowmem.codecs import linear4
from optax_lowmem.sharding import state_shardings
from tests.compilation import SAME_BITS
from tests.contract_cases import assert_alike
from tests.lowering import gpu_mesh, kernels_in, lower_for_cuda
from tests.meshes import mesh_of
from tests.step.test_sharding import COLLECTIVES, LEARNING_RATE
from tests.tiers import rows

SHAPES = {"w": (64, 256), "layers": (4, 16, 96), "bias": (64,)}
POLICY = lowmem.Policy(min_size=0)
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
LAYOUTS = {
    "fsdp": ((8,), {"w": P("a"), "layers": P(None, "a"), "bias": P()}),
    "last axis": ((2,), {"w": P(None, "a"), "layers": P("a"), "bias": P("a")}),
    "two axes": ((2, 4), {"w": P("b", "a"), "layers": P("a", "b"), "bias": P()}),
    "one dimension": ((2, 4), {"w": P(("a", "b")), "layers": P(None, ("b", "a")), "bias": P()}),
}
OPTIMIZERS = ["flash_adamw", "stable_adamw", "q_adamw", "flash_lion", "flash_sgd"]
OPTIMIZERS += ["flash_adamw-int4", "flash_lion-int4"]


def mesh(sizes, kind):
    return mesh_of(kind, **dict(zip("ab", sizes, strict=False)))


def made(name, **storage):
    row = lowmem.OPTIMIZERS[name.removesuffix("-int4")]
    default = row.make(LEARNING_RATE).engine.storage
    if name.endswith("-int4"):
        default = lowmem.Storage(mu=linear4(), nu=linear4(signed=False))
    how = {"policy": POLICY, "group_size": 32, **storage}
    return row.make(LEARNING_RATE, storage=lowmem.Storage(mu=default.mu, nu=default.nu, **how))


def drawn(seed, dtype, scale):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(0, scale, s), dtype) for name, s in SHAPES.items()}


@pytest.fixture
def gpus(monkeypatch):
    """Eight devices that take kernels, which run as plain JAX."""
    launch = gpu_step.launch
    monkeypatch.setattr(platform, "no_gpu_reason", lambda: None)
    as_jax = lambda *args, backend: launch(*args, backend="interpret")  # noqa: E731
    monkeypatch.setattr(gpu_step, "launch", as_jax)


def compiled(tx, specs=None, the_mesh=None, **how):
    step = functools.partial(lowmem.step, tx, implementation="pallas", specs=specs, mesh=the_mesh)
    return jax.jit(step, compiler_options=SAME_BITS, **how)


def steps(tx, step, params, state, place=lambda tree: tree):
    for i in range(3):
        params, state = step(place(drawn(i, jnp.bfloat16, 1e-3)), state, params)
    return params, state


@functools.cache
def unsharded(name):
    tx = made(name)
    return steps(tx, compiled(tx), *lowmem.init(tx, drawn(9, jnp.float32, 0.2), jnp.bfloat16))


def put(tree, where):
    """The tree in parts, which NumPy cuts: of arrays on a device JAX compiles each cut."""
    return jax.device_put(jax.device_get(tree), where)


def check(name, found):
    wanted = unsharded(name)
    rule = made(name).engine.rule
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        if (
            rule.prepares == "leaf" and a.dtype != jnp.int32
        ):  # the mean over a leaf has another order
            a, b = np.float64(a), np.float64(b)
            assert (a != b).mean() < 0.02, path
        else:
            np.testing.assert_array_equal(a, b, err_msg=str(path))


OFTEN = [("flash_adamw", "two axes")]


@pytest.mark.parametrize("name, layout", rows(itertools.product(OPTIMIZERS, LAYOUTS), OFTEN))
def test_auto_axes(name, layout, gpus):
    """With the specs that the caller gives, and no communication but a scalar for a mean."""
    sizes, specs = LAYOUTS[layout]
    the_mesh, tx = mesh(sizes, AUTO), made(name)
    params, state = lowmem.init(tx, drawn(9, jnp.float32, 0.2), jnp.bfloat16)
    of_params = {n: NamedSharding(the_mesh, spec) for n, spec in specs.items()}
    of_state = state_shardings(tx, params, of_params)
    how = dict(in_shardings=(of_params, of_state, of_params), out_shardings=(of_params, of_state))
    place = functools.partial(put, where=of_params)
    params, state = place(params), put(state, of_state)
    step = compiled(tx, specs, the_mesh, **how).lower(params, state, params).compile()
    allowed = {"all-reduce"} if tx.engine.rule.prepares == "leaf" else set()
    assert set(re.findall(COLLECTIVES, step.as_text())) <= allowed
    check(name, steps(tx, step, params, state, place))


EXPLICITLY = [*(("flash_adamw", layout) for layout in LAYOUTS), ("flash_lion-int4", "last axis")]


@pytest.mark.parametrize("name, layout", rows(EXPLICITLY, [("flash_adamw", "two axes")]))
def test_explicit_axes(name, layout, gpus):
    sizes, specs = LAYOUTS[layout]
    the_mesh, tx = mesh(sizes, EXPLICIT), made(name)
    of_params = {n: NamedSharding(the_mesh, spec) for n, spec in specs.items()}
    place = functools.partial(put, where=of_params)
    with jax.set_mesh(the_mesh):
        params, state = lowmem.init(tx, place(drawn(9, jnp.float32, 0.2)), jnp.bfloat16)
        assert jax.typeof(state.mu["w"]).sharding == jax.typeof(params["w"]).sharding
        found = steps(tx, compiled(tx), params, state, place)
        for n, x in found[0].items():
            assert jax.typeof(x).sharding == jax.typeof(params[n]).sharding
    check(name, found)


def test_blocks_on_a_mesh(gpus):
    """Their values are no part of the leaf whose place is given, and XLA steps both."""
    blocks = lowmem.blocks.Structure(default="whole")
    the_mesh, tx = mesh((8,), AUTO), lowmem.flash_adam_mini(LEARNING_RATE, blocks=blocks)
    params = {"w": jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)}
    state = jax.eval_shape(tx.init, params)
    step = functools.partial(lowmem.step, tx, specs={"w": P("a")}, mesh=the_mesh)
    new, of_state = jax.eval_shape(step, params, state, params)
    assert new["w"].shape == (64, 256) and of_state.nu["w"].shape == state.nu["w"].shape


@pytest.mark.full
def test_zero(gpus):
    """Parameters whole on every device, state in parts: the new weights are gathered."""
    the_mesh, tx = mesh((8,), AUTO), made("flash_adamw")
    params, state = lowmem.init(tx, drawn(9, jnp.float32, 0.2), jnp.bfloat16)
    of_params = {n: NamedSharding(the_mesh, P()) for n in SHAPES}
    of_state = state_shardings(tx, params, of_params, zero_axis="a")
    assert of_state.mu["w"].spec == P("a", None)
    how = dict(in_shardings=(of_params, of_state, of_params), out_shardings=(of_params, of_state))
    place = functools.partial(put, where=of_params)
    params, state = place(params), put(state, of_state)
    step = compiled(tx, of_state.mu, **how).lower(params, state, params).compile()
    gathered = re.findall(r"= \w+\[([\d,]*)\][^=]* all-gather(?:-start)?\(", step.as_text())
    assert sorted(gathered) == ["4,16,96", "64,256"]  # weights (bf16 is f32 for a CPU), no state
    check("flash_adamw", steps(tx, step, params, state, place))


@pytest.mark.parametrize("kind", rows([AUTO, EXPLICIT], [EXPLICIT]))
def test_gradient_release(kind, gpus):
    """Each device steps its rows of a layer inside the backward pass; no state moves."""
    tx, the_mesh = made("flash_sgd"), mesh((2,), kind)
    specs = {"head": P(), "layers": {"w": P(None, "a"), "norm": P()}}
    rng = np.random.default_rng(0)
    shapes = {"head": (32, 8), "layers": {"w": (3, 32, 32), "norm": (3, 32)}}
    weights = jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(0, 0.3, shape), jnp.float32),
        shapes, is_leaf=lambda x: isinstance(x, tuple),
    )  # fmt: skip
    batch = jnp.asarray(rng.normal(0, 1, (4, 32)), jnp.float32)

    def layer(own, rest, x, batch):
        w, explicit = own["w"], jax.typeof(own["w"]).sharding.mesh.explicit_axes
        w = jax.sharding.reshard(w, P()) if explicit else w
        return x + jnp.tanh((x * own["norm"][None]) @ w)

    def last(rest, x, batch):
        return jnp.mean(jnp.square((x @ rest["head"]).astype(jnp.float32)))

    model = release.Layered(lambda rest, batch: batch, {"layers": layer}, last)
    start = lowmem.init(tx, weights, jnp.float32)
    one = release.train_step(tx, model, implementation="pallas")
    wanted = jax.jit(one, compiler_options=SAME_BITS)(*start, batch)
    with jax.set_mesh(the_mesh):
        of_params = jax.tree.map(functools.partial(NamedSharding, the_mesh), specs)
        of_state = state_shardings(tx, start[0], of_params)
        told = {} if kind == EXPLICIT else {"mesh": the_mesh, "specs": specs}
        step = release.train_step(tx, model, implementation="pallas", **told)
        places = (of_params, of_state)
        jitted = jax.jit(
            step, compiler_options=SAME_BITS, out_shardings=(NamedSharding(the_mesh, P()), *places)
        )
        given = [put(*pair) for pair in zip(start, places, strict=True)]
        batch = jax.device_put(batch, NamedSharding(the_mesh, P()))
        program = jitted.lower(*given, batch).compile()
        found = program(*given, batch)
    for line in program.as_text().splitlines():
        assert not re.search(rf"= [su]8\[.*({COLLECTIVES})", line), line
    assert_alike(found, wanted, steps=1)


def test_layers_of_other_devices_cannot_be_released():
    tx, the_mesh = made("flash_adamw"), mesh((2,), AUTO)
    model = release.Layered(lambda *_: jnp.ones(32), {"layers": lambda *_: jnp.ones(32)}, jnp.mean)
    params = {"layers": {"w": jnp.ones((4, 32, 32), jnp.bfloat16)}}
    step = release.train_step(tx, model, mesh=the_mesh, specs={"layers": {"w": P("a")}})
    with pytest.raises(ValueError, match=r"'layers/w'.*axis 0 is sharded \(P.*'a'"):
        step(params, tx.init(params), None)


def test_what_kernels_leave_to_xla_on_a_mesh():
    shape, the_mesh = (64, 96), mesh((2,), AUTO)
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}

    def reason(tx, spec):
        (plan,) = tx.engine.plans(params)
        return on_mesh.unsupported(plan, named_sharding("w", shape, spec, the_mesh))

    across = P(None, "a")
    assert "shards of 48 on the last axis, but groups of 32" in reason(made("flash_adamw"), across)
    assert reason(made("flash_adamw", group_size=48), across) is None
    assert reason(made("flash_adamw"), P("a")) is None
    heads = lowmem.blocks.Structure(rules=[("w", lowmem.blocks.Block(heads=(0, 4)))])
    assert "heads are on" in reason(lowmem.flash_adam_mini(1e-3, blocks=heads), P("a"))
    assert reason(lowmem.flash_adam_mini(1e-3, blocks=heads), across) is not None
    whole = lowmem.blocks.Structure(default="whole")
    assert reason(lowmem.flash_adam_mini(1e-3, blocks=whole), P("a")) is None


def test_lowers_for_gpus():
    the_mesh, tx = gpu_mesh(a=8), made("flash_adamw")
    params = {"w": jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "no_gpu_reason", lambda: None)
        step = functools.partial(lowmem.step, tx, mesh=the_mesh, specs={"w": P("a")})
        text = lower_for_cuda(step, params, jax.eval_shape(tx.init, params), params, mesh=the_mesh)
    assert kernels_in(text) == ["fused_update"]


def test_bad_specs():
    tx, params = made("flash_adamw"), {"w": jnp.ones((64, 256), jnp.bfloat16)}
    state = tx.init(params)
    with pytest.raises(ValueError, match="parameter 'w'.*the mesh has no axis 'z'"):
        lowmem.step(tx, params, state, params, mesh=mesh((2,), AUTO), specs={"w": P("z")})
    with pytest.raises(ValueError, match=r"missing \['w'\], extra \['v'\]"):
        lowmem.step(tx, params, state, params, mesh=mesh((2,), AUTO), specs={"v": P("a")})
    with pytest.raises(ValueError, match="pass mesh=, or use set_mesh"):
        lowmem.step(tx, params, state, params, specs={"w": P("a")})
