"""Programs that give a state's arrays the shardings of their parameters: none fails at scales.

Each is a client's own way to the shardings of a training state, in a few lines, with widths whose
groups the mesh does not divide.
"""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
from optax_lowmem.flax import Optimizer
from optax_lowmem.sharding import state_shardings
from tests.meshes import mesh_of
from tests.tiers import rows

AUTO = AxisType.Auto
POLICY = lowmem.Policy(min_size=0)
# 96 columns are three groups, 160 five: two parts divide neither; 128 are four
WIDTHS = (96, 160)
RULES = (("embed", "fsdp"), ("mlp", ("tensor", "sequence")), ("batch", "fsdp"))
STEPS, RATE = 60, 3e-3


def made(name="flash_adamw", rate=RATE):
    return getattr(lowmem, name)(rate, storage=lowmem.Storage(policy=POLICY))


@functools.cache
def mesh(**axes):
    return mesh_of(**(axes or dict(fsdp=4, tensor=2, sequence=1)))


@functools.cache
def batch():
    """Numbers of a teacher, so that there is something to learn."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, 64)).astype(np.float32)
    y = np.tanh(x @ rng.normal(0, 0.2, (64, 64))) + rng.normal(0, 0.5, x.shape)
    return x, y.astype(np.float32)


class Model(nnx.Module):
    """Two layers with logical axes, as MaxText names them."""

    def __init__(self):
        make = functools.partial(nnx.Linear, rngs=nnx.Rngs(0))

        def named(*names):
            return dict(kernel_metadata={"out_sharding": names},
                        bias_metadata={"out_sharding": names[-1:]})  # fmt: skip

        self.up = make(64, WIDTHS[0], **named("embed", "mlp"))
        self.mid = make(WIDTHS[0], WIDTHS[1], **named("mlp", "embed"))
        self.down = make(WIDTHS[1], 64, **named("embed", "mlp"))

    def __call__(self, x):
        return self.down(nnx.gelu(self.mid(nnx.gelu(self.up(x)))))


class State(nnx.Module):
    """MaxText's TrainStateNNX."""

    def __init__(self, cls, tx, dtype=jnp.float32):
        splits = cls is Optimizer and dtype != jnp.float32
        self.model = Model()
        if not splits:  # the same weights, rounded
            own = nnx.state(self.model, nnx.Param)
            nnx.update(self.model, jax.tree.map(lambda x: x.astype(dtype), own))
        options = dict(dtype=dtype) if splits else {}
        self.optimizer = cls(self.model, tx, wrt=nnx.Param, **options)


def loss_of(model, x, y):
    return jnp.mean((model(x).astype(jnp.float32) - y) ** 2)


def maxtext(cls, tx, the_mesh, dtype=jnp.float32):
    """Abstract state under the rules, and jits of the first state and of a step, so sharded."""
    create = functools.partial(State, cls, tx, dtype)
    with nn.logical_axis_rules(RULES):
        graph, abstract = nnx.get_abstract_model(create, the_mesh)
        shardings = jax.tree.map(lambda x: x.sharding, abstract)
        init = jax.jit(lambda: nnx.state(create()), out_shardings=shardings)

        def step(state, x, y):
            train = nnx.merge(graph, state)
            loss, grads = nnx.value_and_grad(loss_of)(train.model, x, y)
            train.optimizer.update(train.model, grads)
            return nnx.state(train), loss

        return abstract, init, jax.jit(step, out_shardings=(shardings, None), donate_argnums=0)


@pytest.mark.parametrize("cls", rows([nnx.Optimizer, Optimizer], [Optimizer]))
def test_maxtext_nnx_on_eight_devices(cls):
    """Compiled, not run: XLA's collectives on a CPU, several at once, may wait for ever."""
    abstract, init, step = maxtext(cls, made(), mesh(), jnp.bfloat16)
    with jax.set_mesh(mesh()), nn.logical_axis_rules(RULES):
        init.lower().compile()
        step.lower(abstract, *batch()).compile()
    state = abstract["optimizer"]["opt_state"]
    assert state.mu["up"]["kernel"].sharding.spec == P("fsdp", ("tensor", "sequence"))
    assert state.mu_scale["up"]["kernel"].sharding.spec == P("fsdp", None)


@pytest.mark.filterwarnings("ignore:'sharding:DeprecationWarning")
@pytest.mark.parametrize("key", ["sharding", "sharding_names"])
@pytest.mark.parametrize("cls", [nnx.Optimizer, Optimizer])
def test_maxtext_nnx_scanned_layers(cls, key):
    """MaxText's scanned layers have an old key beside `out_sharding`, and are traced on no mesh."""
    names = ("mlp", "layers", "embed")

    def create():
        model = nnx.Module()
        kernel = nnx.Param(jnp.ones((256, 2, 160)), out_sharding=names)
        model.kernel = kernel.replace(**{key: names, nnx.PARTITION_NAME: "layers"})
        return cls(model, made(), wrt=nnx.Param)

    with nnx.use_eager_sharding(False):
        state = nnx.eval_shape(create).opt_state
    for field, fitting in ("mu", names), ("mu_scale", ("mlp", "layers", None)):
        leaf = getattr(state, field)["kernel"]
        assert leaf.get_metadata()["out_sharding"] == fitting
        spec = nn.logical_to_mesh_axes(fitting, rules=(*RULES, ("layers", None)))
        NamedSharding(mesh(fsdp=8, tensor=1, sequence=1), spec).shard_shape(leaf.shape)


WIDE = {"no groups are cut": 4096 * 32, "more parts than groups": 4096}


@pytest.mark.parametrize("width", WIDE.values(), ids=WIDE)
@pytest.mark.parametrize("cls", [nnx.Optimizer, Optimizer])
def test_nnx_on_256_devices(cls, width):
    """4096 columns are 128 groups of 32: scales are replicated there, codes sharded."""
    fsdp = AbstractMesh((256,), ("fsdp",), axis_types=(AUTO,))
    tx = lowmem.flash_adamw(RATE)

    def create():
        model = nnx.Linear(64, width, kernel_metadata={"out_sharding": (None, "fsdp")},
                           rngs=nnx.Rngs(0))  # fmt: skip
        return cls(model, tx, wrt=nnx.Param)

    with jax.sharding.use_abstract_mesh(fsdp):
        state = nnx.eval_shape(create).opt_state
    scales = (None, "fsdp" if width // 32 >= 256 else None)
    for field, names in ("mu", (None, "fsdp")), ("mu_scale", scales), ("nu_scale", scales):
        leaf = getattr(state, field)["kernel"]
        assert leaf.get_metadata()["out_sharding"] == names
        NamedSharding(fsdp, P(*names)).shard_shape(leaf.shape)  # raises where it does not divide


def test_boxes_of_linen_on_256_devices():
    fsdp = AbstractMesh((256,), ("fsdp",), axis_types=(AUTO,))
    kernel = nn.with_partitioning(nn.initializers.ones, (None, "fsdp"))
    model = nn.Dense(4096, kernel_init=kernel)

    def init(key):
        params = model.init(key, jnp.ones((1, 64)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=lowmem.flash_adamw(RATE))

    with jax.sharding.use_abstract_mesh(fsdp):
        specs = nn.get_partition_spec(jax.eval_shape(init, jax.random.key(0))).opt_state
    assert specs.mu["kernel"] == P(None, "fsdp")
    assert specs.mu_scale["kernel"] == specs.nu_scale["kernel"] == P(None, None)


def test_more_devices_than_a_mesh_says(monkeypatch):
    """Without a mesh any number of parts up to that of the devices may come."""
    kernel = nn.with_partitioning(nn.initializers.ones, (None, "fsdp"))
    params = jax.eval_shape(nn.Dense(4096, kernel_init=kernel).init, jax.random.key(0),
                            jnp.ones((1, 64)))["params"]  # fmt: skip
    for devices, name in (8, "fsdp"), (200, None):
        monkeypatch.setattr(jax, "device_count", lambda devices=devices: devices)
        state = jax.eval_shape(lowmem.flash_adamw(RATE).init, params)
        assert state.mu_scale["kernel"].names == (None, name)


def test_a_state_of_variables_keeps_its_metadata():
    tx = made()
    with jax.set_mesh(mesh(x=4, y=2)):
        model = nnx.Linear(64, 128, kernel_metadata={"out_sharding": ("x", "y")}, rngs=nnx.Rngs(0))
        params = nnx.state(model, nnx.Param)
        state = tx.init(params)
    assert state.mu_scale["kernel"].get_metadata()["out_sharding"] == ("x", "y")
    new = jax.eval_shape(tx.update, params, state, params)[1]
    assert jax.tree.structure(new) == jax.tree.structure(state)


# ---- shardings by rules on paths -----------------------------------------------------------------
SHAPES = {"up": {"kernel": (64, 96)}, "down": {"kernel": (160, 64), "bias": (64,)}}
PATHS = ((r"up/kernel", P("fsdp", "tensor")), (r"down/kernel", P("tensor", "fsdp")), (r".", P()))


def by_rules(tree):
    """EasyLM's match_partition_rules: the first rule that the path of an array has."""

    def spec(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not leaf.shape or np.prod(leaf.shape) == 1:
            return P()
        return next(spec for rule, spec in PATHS if re.search(rule, name))

    return jax.tree_util.tree_map_with_path(spec, tree)


def params_of_shapes(dtype=jnp.bfloat16):
    return jax.tree.map(lambda s: jnp.ones(s, dtype), SHAPES, is_leaf=lambda x: type(x) is tuple)


def named(specs, the_mesh):
    return jax.tree.map(lambda spec: NamedSharding(the_mesh, spec), specs)


CHAINS = {
    "alone": lambda: made(),
    "chain": lambda: lowmem.chain(optax.clip_by_global_norm(1.0), made()),
    "compress_state": lambda: lowmem.compress_state(
        optax.adamw(RATE), mu=lowmem.codecs.softsign(), nu=lowmem.codecs.sqrt(), policy=POLICY
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_easylm(name):
    """docs/guides/sharding.md: the parameters' specs by rules, the state's by `state_shardings`."""
    tx, the_mesh, params = CHAINS[name](), mesh(fsdp=2, tensor=4), params_of_shapes()
    state = jax.eval_shape(tx.init, params)
    with pytest.raises(
        ValueError, match="divisible|divide"
    ):  # by rules scales are sharded as kernels
        jax.eval_shape(jax.jit(tx.init, out_shardings=named(by_rules(state), the_mesh)), params)
    specs = by_rules(params)
    shardings = state_shardings(tx, params, specs, mesh=the_mesh)
    on_mesh = jax.jit(tx.init, out_shardings=shardings)(
        jax.device_put(params, named(specs, the_mesh))
    )
    assert optax.tree.get(on_mesh, "mu")["up"]["kernel"].sharding.spec == P("fsdp", "tensor")
    for x, sharding in zip(jax.tree.leaves(on_mesh), jax.tree.leaves(shardings), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)


@pytest.mark.parametrize("name", CHAINS)
def test_optax_map_params(name):
    """Specs spread over the state by optax.tree.map_params reach scales too: theirs are others."""
    tx, the_mesh, params = CHAINS[name](), mesh(fsdp=2, tensor=4), params_of_shapes()
    specs = by_rules(params)
    shardings = state_shardings(tx, params, specs, mesh=the_mesh)
    state = jax.eval_shape(tx.init, params)
    spread = optax.tree.map_params(
        tx, lambda _, spec: spec, state, specs, transform_non_params=lambda _: P()
    )
    assert optax.tree.get(spread, "mu")["up"]["kernel"] == P("fsdp", "tensor")
    rows = zip(jax.tree.leaves(state), jax.tree.leaves(spread), jax.tree.leaves(shardings),
               strict=True)  # fmt: skip
    differ = 0
    for array, spec, own in rows:
        own.shard_shape(array.shape)  # raises where it does not divide
        if array.shape in ((64, 96), (160, 64)):
            assert own.spec == spec
        differ += own.spec != spec
    assert differ >= 4


@pytest.mark.full
def test_big_vision():
    """Its fsdp(axis) takes the largest dimension that the axis divides, of any array by itself."""
    tx, the_mesh, params = made(), mesh(fsdp=8), params_of_shapes()

    def fsdp(leaf):
        axes = [None] * leaf.ndim
        for d in np.argsort(leaf.shape)[::-1]:
            if leaf.shape[d] % 8 == 0:
                axes[d] = "fsdp"
                break
        return NamedSharding(the_mesh, P(*axes))

    state = jax.eval_shape(tx.init, params)
    of_params, of_state = jax.tree.map(fsdp, params), jax.tree.map(fsdp, state)
    params, state = (
        jax.device_put(params, of_params),
        jax.jit(tx.init, out_shardings=of_state)(params),
    )
    step = jax.jit(lambda g, s, p: lowmem.step(tx, g, s, p), out_shardings=(of_params, of_state))
    new, after = step(params, state, params)
    for x, sharding in zip(jax.tree.leaves(after), jax.tree.leaves(of_state), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    assert float(jnp.abs(after.mu["up"]["kernel"]).max()) > 0


def test_specs_of_a_partitioned_tree():
    """As of equinox.partition: None where there is no array, in parameters and specs."""
    params = {"w": jnp.ones((64, 128)), "activation": None}
    specs = {"w": P("fsdp"), "activation": None}
    shardings = state_shardings(made(), params, specs, mesh=mesh(fsdp=8))
    assert shardings.mu["w"].spec == P("fsdp", None)


def test_a_sharding_of_another_kind_is_refused_by_its_path():
    params = {"w": jnp.ones((64, 128))}
    with pytest.raises(ValueError, match="sharding of 'w' is a SingleDeviceSharding"):
        state_shardings(made(), params, {"w": params["w"].sharding})
