"""`optax_lowmem.flax`: Flax's own classes, the fused step, and nothing else changed."""

import importlib.util
import inspect
import sys
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem._src.optim.step.engine import Engine
from tests.contract_cases import POLICY, assert_alike, assert_same

pytest.importorskip("flax")

import flax.linen as nn  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
from flax import core, nnx, serialization  # noqa: E402
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OWG  # noqa: E402
from flax.training import train_state  # noqa: E402

import optax_lowmem.flax as ours  # noqa: E402
from optax_lowmem._src.training.flax import as_pure  # noqa: E402
from tests.meshes import mesh_of  # noqa: E402
from tests.tiers import rows  # noqa: E402

STORAGE = lowmem.Storage(policy=POLICY)
STEPS = 3


def adamw(**options: Any) -> optax.GradientTransformationExtraArgs:
    return lowmem.flash_adamw(1e-2, storage=STORAGE, **options)


def not_bias(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


TXS = {
    "flash_adamw": adamw,
    "flash_lion": lambda: lowmem.flash_lion(1e-3, storage=STORAGE),
    "flash_sgd": lambda: lowmem.flash_sgd(1e-2, 0.9, storage=STORAGE),
    "clip, flash_adamw": lambda: lowmem.chain(optax.clip_by_global_norm(0.1), adamw()),
    "MultiSteps": lambda: optax.MultiSteps(adamw(), 2),
    "masked": lambda: optax.masked(adamw(mask=not_bias), not_bias),
    "optax.adamw": lambda: optax.adamw(1e-2),
    "value": lambda: optax.chain(optax.adamw(1e-2), optax.contrib.reduce_on_plateau(0.5, 1)),
}
FUSED_TX = pytest.mark.parametrize(
    "name", ["flash_adamw", "flash_lion", "flash_sgd", "clip, flash_adamw"]
)
# every optimizer on 16-bit weights, and each way to step on f32 ones
CASES = [(name, jnp.bfloat16) for name in TXS] + [
    (name, jnp.float32) for name in ("flash_adamw", "clip, flash_adamw", "optax.adamw")
]


SPLIT_TXS = ["flash_adamw", "flash_lion", "clip, flash_adamw", "MultiSteps"]
AS_GIVEN = {  # and why their f32 weights stay f32
    "optax": lambda: optax.adamw(1e-2),
    "no split": lambda: lowmem.flash_adamw(
        1e-2, storage=lowmem.Storage(master_weight_bits=None, policy=POLICY)
    ),
    "int8 moments": lambda: lowmem.compress_state(optax.adamw(1e-2), mu="int8", policy=POLICY),
}


def data() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(16, 40)), jnp.float32)
    return x, x[:, :8]


def by_width(path: str, leaf: Any) -> Any:
    return jnp.bfloat16 if path.endswith("kernel") else jnp.float32


def assert_close(masters: Any, f32: Any) -> None:
    masters, f32 = jax.tree.leaves(masters), jax.tree.leaves(f32)
    chex.assert_trees_all_equal_dtypes(masters, f32)
    chex.assert_trees_all_close(masters, f32, rtol=2.0**-16, atol=0)


def refuse_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on only the fused step of a flash optimizer works."""

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("update was called")

    monkeypatch.setattr(Engine, "update", update)


# ---- Linen -----------------------------------------------------------------------------------
class Net(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8, param_dtype=self.dtype)(x)


def linen(cls: Any, tx: Any, param_dtype: Any = jnp.float32, **kwargs: Any) -> Any:
    model = Net(param_dtype)
    params = model.init(jax.random.key(0), data()[0])["params"]
    return cls.create(apply_fn=model.apply, params=params, tx=tx, **kwargs)


def linen_step(state: Any, x: jax.Array, y: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


LINEN_STEP = jax.jit(linen_step)


def train_linen(state: Any) -> Any:
    for _ in range(STEPS):
        state = LINEN_STEP(state, *data())
    return state


def contents(state: Any) -> Any:
    return {"step": jnp.asarray(state.step), "params": state.params, "opt": state.opt_state}


@pytest.mark.parametrize(
    ("name", "dtype"), rows([c for c in CASES if c[0] != "value"], CASES[1::4])
)
def test_train_state_trains_as_flaxs(name, dtype):
    tx = TXS[name]()
    start = linen(ours.TrainState, tx, dtype, keep_f32=("*",))
    theirs = linen(train_state.TrainState, tx, dtype)
    assert isinstance(start, train_state.TrainState)
    assert_same(contents(start), contents(theirs))
    mine = train_linen(start)
    assert int(mine.step) == STEPS
    assert_alike(contents(mine), contents(train_linen(theirs)), STEPS)
    moved = mine.params["Dense_0"]["kernel"] != start.params["Dense_0"]["kernel"]
    assert moved.mean() > 0.3


@FUSED_TX
def test_train_state_takes_the_fused_step(name, monkeypatch):
    refuse_update(monkeypatch)
    tx = TXS[name]()
    with pytest.raises(AssertionError, match="update was called"):
        jax.eval_shape(linen_step, linen(train_state.TrainState, tx), *data())
    state = linen(ours.TrainState, tx)
    assert jax.eval_shape(linen_step, state, *data()).params["Dense_0"]["kernel"].shape == (40, 8)


def test_train_state_is_donated():
    state = linen(ours.TrainState, adamw(), dtype=jnp.bfloat16)
    expected = LINEN_STEP(state, *data())
    before = jax.tree.leaves((state.params, state.opt_state))
    step = jax.jit(linen_step, donate_argnums=0)
    assert_same(contents(step(state, *data())), contents(expected))
    assert all(leaf.is_deleted() for leaf in before if leaf.size > 1)


def test_train_state_of_split_parameters():
    tx = TXS["clip, flash_adamw"]()
    f32 = linen(ours.TrainState, tx, dtype=jnp.float32)
    assert_same(f32.master_params(), f32.params)
    state = linen(ours.TrainState, tx, dtype=by_width)
    assert state.params["Dense_0"]["kernel"].dtype == jnp.bfloat16
    assert state.params["Dense_0"]["bias"].dtype == jnp.float32
    assert_same((state.params, state.opt_state), lowmem.init(tx, f32.params, by_width))
    assert_close(state.master_params(), f32.params)
    assert not np.array_equal(
        state.params["Dense_0"]["kernel"].astype(jnp.float32), f32.params["Dense_0"]["kernel"]
    )
    trained = train_linen(state)
    assert_same(trained.master_params(), lowmem.master_params(trained.params, trained.opt_state))


@pytest.mark.parametrize("name", SPLIT_TXS)
def test_train_state_splits_f32_parameters_by_itself(name):
    tx, plain = TXS[name](), linen(train_state.TrainState, TXS[name]())
    state = linen(ours.TrainState, tx)
    assert_same((state.params, state.opt_state), lowmem.init(tx, plain.params))
    kernel = linen(ours.TrainState, tx, keep_f32=("*bias",))
    assert_same((kernel.params, kernel.opt_state), lowmem.init(tx, plain.params, by_width))
    for kept in ({"dtype": jnp.float32}, {"keep_f32": ("*",)}):
        assert_same(contents(linen(ours.TrainState, tx, **kept)), contents(plain))


@pytest.mark.parametrize("name", AS_GIVEN)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_train_state_leaves_parameters_without_a_split(name, dtype):
    tx = AS_GIVEN[name]()
    state = linen(ours.TrainState, tx, dtype)
    assert_same(contents(state), contents(linen(train_state.TrainState, tx, dtype)))
    with pytest.raises(ValueError, match=r"'\*kernal' of keep_f32 matches.*: Dense_0/kernel"):
        linen(ours.TrainState, tx, keep_f32=("*kernal",))
    with pytest.raises(TypeError, match="keep_f32 is a tuple"):
        linen(ours.TrainState, tx, keep_f32="")


def test_train_state_splits_what_its_optimizer_splits():
    """16-bit parameters, frozen ones and those of other optimizers are as they were."""
    params = {name: jnp.full((64, 64), 0.1) for name in ("ours", "optax", "frozen")}
    params |= {"half": jnp.ones((64, 64), jnp.float16), "ids": jnp.arange(3)}
    labels = {name: name for name in params} | {"half": "ours"}
    tx = optax.partition(
        {"ours": adamw(), "optax": optax.adam(1e-2), "frozen": optax.set_to_zero(),
         "ids": optax.set_to_zero()}, labels,
    )  # fmt: skip
    state = ours.TrainState.create(apply_fn=None, params=params, tx=tx)
    split = {**params, "ours": state.params["ours"]}
    assert state.params["ours"].dtype == jnp.bfloat16
    assert_same(state.params, split)
    assert_close(state.master_params()["ours"], params["ours"])


@pytest.mark.parametrize("freeze", rows([dict, core.freeze], [core.freeze]))
def test_overwrite_with_gradient(freeze):
    rng = np.random.default_rng(3)
    w = {"w": jnp.asarray(rng.normal(size=(4, 40)), jnp.float32)}
    params = freeze({"params": w, OWG: {"amax": jnp.ones(3)}})
    grads = freeze({"params": w, OWG: {"amax": jnp.full(3, 2.0)}})
    tx = adamw()
    both = (ours.TrainState, train_state.TrainState)
    kept = ({"keep_f32": ("*",)}, {})
    made = [
        cls.create(apply_fn=None, params=params, tx=tx, **how)
        for cls, how in zip(both, kept, strict=True)
    ]
    assert_same(*map(contents, made))
    mine, theirs = (state.apply_gradients(grads=grads) for state in made)
    assert_same(contents(mine), contents(theirs))
    np.testing.assert_array_equal(mine.params[OWG]["amax"], 2.0)
    split = ours.TrainState.create(apply_fn=None, params=params, tx=tx)
    assert type(split.params) is type(params)
    assert split.params["params"]["w"].dtype == jnp.bfloat16
    assert split.params[OWG]["amax"].dtype == jnp.float32
    assert_close(split.master_params()["params"], w)
    assert_same(split.master_params()[OWG], params[OWG])
    stepped = split.apply_gradients(grads=grads)
    assert float(jnp.abs(stepped.master_params()["params"]["w"] - w["w"]).max()) > 1e-3


def test_a_single_array_is_a_tree_of_parameters_too():
    """It is for `create`, in Flax; `apply_gradients` then fails there."""
    tx, w = adamw(), jnp.ones((4, 40))
    state = ours.TrainState.create(apply_fn=None, params=w, tx=tx)
    after = state.apply_gradients(grads=w)
    stepped = lowmem.step(tx, w, state.opt_state, state.params)
    assert_same((after.params, after.opt_state), stepped)
    assert_same(after.master_params(), lowmem.master_params(*stepped))


def test_subclasses_with_more_fields():
    class WithStats(ours.TrainState):
        stats: Any

    state = linen(WithStats, adamw(), dtype=jnp.bfloat16, stats=jnp.zeros(3))
    grads = jax.tree.map(jnp.ones_like, state.params)
    state = state.apply_gradients(grads=grads, stats=jnp.ones(3)).replace(step=7)
    assert type(state) is WithStats and state.step == 7
    np.testing.assert_array_equal(state.stats, 1)
    with pytest.raises(TypeError, match="statistics"):
        state.apply_gradients(grads=grads, statistics=jnp.ones(3))


def test_wrong_arguments_of_train_state():
    with pytest.raises(TypeError, match="parameter 'n'.*int32"):
        ours.TrainState.create(
            apply_fn=None, params={"n": jnp.arange(3)}, tx=adamw(), dtype=jnp.bfloat16
        )
    with pytest.raises(TypeError, match="parameter 'Dense_0/bias'.*int8"):
        linen(ours.TrainState, adamw(), dtype=jnp.int8)
    state = linen(ours.TrainState, adamw())
    with pytest.raises(ValueError, match="missing.*Dense_0/kernel"):
        state.apply_gradients(grads={"Dense_0": {"bias": jnp.ones(8)}})

    class WithDtype(ours.TrainState):
        dtype: Any = None

    with pytest.raises(TypeError, match="WithDtype has a field `dtype`"):
        linen(WithDtype, adamw(), dtype=jnp.bfloat16)


@pytest.mark.parametrize("mine_first", rows([True, False], [False]))
def test_train_states_read_each_others_bytes(mine_first):
    tx = adamw()
    classes = [ours.TrainState, train_state.TrainState][:: 1 if mine_first else -1]
    saved = train_linen(linen(classes[0], tx, jnp.bfloat16))
    fresh = linen(classes[1], tx, jnp.bfloat16)
    restored = serialization.from_bytes(fresh, serialization.to_bytes(saved))
    assert type(restored) is classes[1]
    assert_same(contents(restored), contents(saved))
    assert_same(contents(LINEN_STEP(restored, *data())), contents(LINEN_STEP(saved, *data())))


def test_train_state_through_orbax(tmp_path):
    tx = adamw()
    saved = train_linen(linen(train_state.TrainState, tx, jnp.bfloat16))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        fresh = linen(ours.TrainState, tx, jnp.bfloat16).replace(step=jnp.int32(0))
        restored = checkpointer.restore(tmp_path / "state", fresh)
    assert type(restored) is ours.TrainState
    assert_same(contents(restored), contents(saved))


def test_partitioned_boxes():
    dense = nn.Dense(
        8, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), ("data", None))
    )
    params = dense.init(jax.random.key(0), data()[0])["params"]
    assert isinstance(params["kernel"], nn.Partitioned)
    tx = adamw()
    made = [
        ours.TrainState.create(apply_fn=dense.apply, params=params, tx=tx, dtype=jnp.float32),
        train_state.TrainState.create(apply_fn=dense.apply, params=params, tx=tx),
    ]
    assert nn.get_partition_spec(made[0].opt_state) == nn.get_partition_spec(made[1].opt_state)
    assert_same(contents(LINEN_STEP(made[0], *data())), contents(LINEN_STEP(made[1], *data())))
    split = ours.TrainState.create(apply_fn=dense.apply, params=params, tx=tx)
    assert split.params["kernel"].names == ("data", None)
    assert split.opt_state.mu["kernel"].names == ("data", None)
    assert_close(split.master_params(), params)
    assert jax.tree.structure(split.master_params()) == jax.tree.structure(params)


# ---- NNX -------------------------------------------------------------------------------------
class Model(nnx.Module):
    def __init__(self, dtype: Any = jnp.float32):
        self.dense = nnx.Linear(40, 8, param_dtype=dtype, rngs=nnx.Rngs(0))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return self.dense(x)


def nnx_step(model: Any, optimizer: Any, x: jax.Array, y: jax.Array, **extra: Any) -> Any:
    grads = nnx.grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    return optimizer.update(model, grads, **extra)


def train_nnx(model: Any, optimizer: Any, steps: int = STEPS, **extra: Any) -> tuple[Any, Any]:
    """By the functional API, since nnx.jit takes no `compiler_options`."""
    graphdef, state = nnx.split((model, optimizer))

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        pair = nnx.merge(graphdef, state)
        nnx_step(*pair, x, y, **extra)
        return nnx.state(pair)

    compiled = jax.jit(step)
    for _ in range(steps):
        state = compiled(state, *data())
    return nnx.merge(graphdef, state)


def pure(*nodes: Any) -> Any:
    return [nnx.to_pure_dict(nnx.state(node)) for node in nodes]


def pair_of(cls: Any, tx: Any, param_dtype: Any = jnp.float32, **options: Any) -> tuple[Any, Any]:
    model = Model(param_dtype)
    return model, cls(model, tx, wrt=nnx.Param, **options)


@pytest.mark.parametrize(("name", "dtype"), rows(CASES, CASES[::3]))
def test_optimizer_trains_as_flaxs(name, dtype):
    tx = TXS[name]()
    extra = {"value": nnx.Variable(jnp.float32(1.0))} if name == "value" else {}
    start = pair_of(ours.Optimizer, tx, dtype, keep_f32=("*",))
    theirs = pair_of(nnx.Optimizer, tx, dtype)
    assert isinstance(start[1], nnx.Optimizer)
    assert_same(pure(*start), pure(*theirs))
    mine = train_nnx(*start, **extra)
    assert int(mine[1].step[...]) == STEPS and int(mine[0].calls[...]) == STEPS
    assert_alike(pure(*mine), pure(*train_nnx(*theirs, **extra)), STEPS)
    assert (mine[0].dense.kernel[...] != start[0].dense.kernel[...]).mean() > 0.3
    if name == "value":  # of losses that do not fall
        assert float(mine[1].opt_state[1].scale[...]) < 1


@FUSED_TX
def test_optimizer_takes_the_fused_step(name, monkeypatch):
    refuse_update(monkeypatch)
    tx = TXS[name]()
    with pytest.raises(AssertionError, match="update was called"):
        nnx.eval_shape(nnx_step, *pair_of(nnx.Optimizer, tx), *data())
    change = nnx.eval_shape(nnx_step, *pair_of(ours.Optimizer, tx), *data())
    assert change["dense"]["kernel"].shape == (40, 8)


@pytest.mark.parametrize("name", ["flash_adamw", "optax.adamw"])
def test_update_returns_the_change(name):
    model, optimizer = pair_of(ours.Optimizer, TXS[name](), jnp.bfloat16)
    before = as_pure(nnx.state(nnx.clone(model), nnx.Param))
    change = nnx_step(model, optimizer, *data())
    after = as_pure(nnx.state(model, nnx.Param))
    assert change["dense"]["kernel"].dtype == jnp.float32
    assert_same(optax.apply_updates(before, change), after)
    assert float(jnp.abs(change["dense"]["kernel"]).max()) > 1e-3


def test_optimizer_under_nnx_jit_is_donated():
    model, optimizer = pair_of(ours.Optimizer, adamw(), dtype=jnp.bfloat16)
    expected = train_nnx(nnx.clone(model), nnx.clone(optimizer), 1)
    before = jax.tree.leaves(nnx.state((model, optimizer)))
    step = nnx.jit(lambda *args: nnx_step(*args) and None, donate_argnums=(0, 1))
    step(model, optimizer, *data())
    assert all(leaf.is_deleted() for leaf in before if leaf.size > 1)
    assert int(optimizer.step[...]) == 1
    np.testing.assert_allclose(  # LLVM at its best may fuse multiply-adds
        optimizer.master_params(model)["dense"]["kernel"][...],
        expected[1].master_params(expected[0])["dense"]["kernel"][...],
        rtol=2.0**-15,
    )


HAS_GRAPH = "graph" in inspect.signature(nnx.Optimizer.__init__).parameters


@pytest.mark.parametrize("graph", [True, False, None] if HAS_GRAPH else [None])
def test_optimizer_of_split_parameters(graph):
    tx = TXS["MultiSteps"]()
    f32 = nnx.state(Model(), nnx.Param)
    model, optimizer = pair_of(ours.Optimizer, tx, dtype=by_width, graph=graph)
    assert model.dense.kernel.dtype == jnp.bfloat16
    assert model.dense.bias.dtype == jnp.float32
    assert model.calls.dtype == jnp.int32
    assert_close(optimizer.master_params(model), f32)
    assert jax.tree.structure(optimizer.master_params(model)) == jax.tree.structure(f32)
    assert not np.array_equal(
        model.dense.kernel[...].astype(jnp.float32), f32["dense"]["kernel"][...]
    )
    weights, state = lowmem.init(tx, f32, by_width)
    assert_same(pure(model)[0]["dense"], nnx.to_pure_dict(weights)["dense"])
    assert_same(jax.tree.leaves(as_pure(optimizer.opt_state)), jax.tree.leaves(state))
    exported = nnx.clone(model)
    nnx.update(exported, optimizer.master_params(model))
    assert exported.dense.kernel.dtype == jnp.float32
    assert model.dense.kernel.dtype == jnp.bfloat16  # the clone alone has changed


@pytest.mark.parametrize("name", SPLIT_TXS)
def test_optimizer_splits_f32_parameters_by_itself(name):
    tx = TXS[name]()
    f32 = nnx.state(Model(), nnx.Param)
    for kept, dtype in (({}, jnp.bfloat16), ({"keep_f32": ("*bias",)}, by_width)):
        model, optimizer = pair_of(ours.Optimizer, tx, **kept)
        weights, state = lowmem.init(tx, f32, dtype)
        assert_same(pure(model)[0]["dense"], nnx.to_pure_dict(weights)["dense"])
        assert_same(jax.tree.leaves(as_pure(optimizer.opt_state)), jax.tree.leaves(state))
        assert_close(optimizer.master_params(model), f32)
    plain = pure(*pair_of(nnx.Optimizer, tx))
    for kept in ({"dtype": jnp.float32}, {"keep_f32": ("*",)}):
        assert_same(pure(*pair_of(ours.Optimizer, tx, **kept)), plain)


@pytest.mark.parametrize("name", AS_GIVEN)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_optimizer_leaves_parameters_without_a_split(name, dtype):
    tx = AS_GIVEN[name]()
    theirs = pure(*pair_of(nnx.Optimizer, tx, dtype))
    assert_same(pure(*pair_of(ours.Optimizer, tx, dtype)), theirs)
    with pytest.raises(ValueError, match=r"'\*kernal' of keep_f32 matches.*: dense/kernel"):
        pair_of(ours.Optimizer, tx, keep_f32=("*kernal",))


def test_abstract_optimizer():
    model, optimizer = nnx.eval_shape(lambda: pair_of(ours.Optimizer, adamw()))
    assert model.dense.kernel.dtype == jnp.bfloat16
    assert optimizer.opt_state.mu["dense"]["kernel"].dtype == jnp.int8


def test_wrong_arguments_of_optimizer():
    model, optimizer = pair_of(ours.Optimizer, adamw(), dtype=jnp.float32)
    with pytest.raises(TypeError, match="wrt"):
        ours.Optimizer(model, adamw())
    with pytest.raises(TypeError, match="grads"):
        optimizer.update(model)
    with pytest.raises(TypeError, match="parameter 'calls'.*int32"):
        ours.Optimizer(model, adamw(), wrt=nnx.Variable, dtype=jnp.bfloat16)
    assert model.dense.kernel.dtype == jnp.float32  # nothing has changed
    grads = nnx.state(model, nnx.Param)
    del grads["dense"]["bias"]
    with pytest.raises(ValueError, match="missing.*dense/bias"):
        optimizer.update(model, grads)
    with pytest.raises(ValueError, match="implementation must be one of"):
        optimizer.update(model, nnx.state(model, nnx.Param), implementation="cuda")


@pytest.mark.parametrize("mine_first", rows([True, False], [False]))
def test_optimizers_read_each_others_state(mine_first, tmp_path):
    tx = adamw()
    classes = [ours.Optimizer, nnx.Optimizer][:: 1 if mine_first else -1]
    saved = train_nnx(*pair_of(classes[0], tx, jnp.bfloat16))
    fresh = pair_of(classes[1], tx, jnp.bfloat16)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(saved))
        checkpointer.wait_until_finished()
        nnx.update(fresh, checkpointer.restore(tmp_path / "state", nnx.state(fresh)))
    assert type(fresh[1]) is classes[1]
    assert_same(pure(*fresh), pure(*saved))
    assert_same(pure(*train_nnx(*fresh, 1)), pure(*train_nnx(*saved, 1)))


# ---- sharding metadata -----------------------------------------------------------------------
LOGICAL = {"sharding_rules": (("in", "x"), ("out", "y"))}
SHARDED: dict[str, tuple[int, dict[str, Any], tuple, tuple]] = {
    "aligned groups": (256, {"out_sharding": ("x", "y")}, ("x", "y"), ("x", "y")),
    "indivisible groups": (96, {"out_sharding": ("x", "y")}, ("x", "y"), ("x", None)),
    "two axes": (128, {"out_sharding": (None, ("x", "y"))}, (None, ("x", "y")), (None, None)),
    "its own": (256, {"out_sharding": ("x",), "optimizer_sharding": ("y",)}, ("y",), ("y",)),
    "logical": (96, {"out_sharding": ("in", "out"), **LOGICAL}, ("x", "y"), ("x", None)),
}


def sharded(cls: Any, tx: Any, width: int, metadata: Any, **options: Any) -> tuple[Any, Any]:
    bias = {**metadata, "out_sharding": metadata["out_sharding"][:1]}
    model = nnx.Linear(64, width, kernel_metadata=metadata, bias_metadata=bias, rngs=nnx.Rngs(0))
    return model, cls(model, tx, wrt=nnx.Param, **options)


@pytest.mark.parametrize("case", rows(SHARDED, ["indivisible groups"]))
def test_state_is_sharded_as_far_as_its_shapes_allow(case):
    """Flax's class gives scales their parameter's axes, and fails where those do not fit."""
    width, metadata, codes, scales = SHARDED[case]

    def lies(leaf: Any, axes: tuple[Any, ...]) -> bool:
        wanted = jax.sharding.NamedSharding(mesh_of(x=4, y=2), jax.sharding.PartitionSpec(*axes))
        return leaf[...].sharding.is_equivalent_to(wanted, leaf[...].ndim)

    with jax.set_mesh(mesh_of(x=4, y=2)):
        tx = lowmem.flash_adamw(1e-2)
        model, optimizer = sharded(ours.Optimizer, tx, width, metadata, dtype=jnp.bfloat16)
        state = optimizer.opt_state
        assert lies(state.mu["kernel"], codes) and lies(state.correction["kernel"], codes)
        assert lies(state.nu_scale["kernel"], scales)
        assert state.mu_scale["bias"].shape == ()  # a placeholder: the bias is not compressed
        nnx_step(model, optimizer, jnp.ones((8, 64)), jnp.zeros((8, width)))
        state = nnx.state(optimizer)
        jax.device_put(
            state, nnx.get_named_sharding(state, mesh_of(x=4, y=2))
        )  # fails where one does not fit
    assert float(jnp.abs(optimizer.opt_state.mu["kernel"][...]).max()) > 0


@pytest.mark.parametrize("case", SHARDED)
def test_what_flax_can_shard_stays_as_it_is(case):
    width, metadata, _, _ = SHARDED[case]
    with jax.set_mesh(mesh_of(x=4, y=2)):
        mine, theirs = (
            nnx.state(sharded(cls, optax.adamw(1e-2), width, metadata)[1])
            for cls in (ours.Optimizer, nnx.Optimizer)
        )
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)  # metadata and all
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        assert a.sharding == b.sharding


def test_trainers_get_our_optimizer_and_accumulation(monkeypatch):
    """tunix's `PeftTrainer` makes MultiSteps and nnx.Optimizer in its constructor."""
    flaxs, optaxs = nnx.Optimizer, optax.MultiSteps
    tx, model = adamw(), nnx.Linear(64, 64, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    with ours.substitute():
        optimizer = nnx.Optimizer(model, optax.MultiSteps(tx, 4), wrt=nnx.Param)
        assert isinstance(optax.MultiSteps(tx, 4, use_grad_mean=False), optaxs)
    assert (nnx.Optimizer, optax.MultiSteps) == (flaxs, optaxs)
    assert type(optimizer) is ours.Optimizer and isinstance(optimizer, flaxs)
    assert optimizer.opt_state.accumulated["kernel"].dtype == jnp.bfloat16
    refuse_update(monkeypatch)
    with ours.substitute():
        f32 = Model()
        nnx.Optimizer(f32, tx, wrt=nnx.Param)
        assert f32.dense.kernel.dtype == jnp.float32  # the trainer's config says what it is
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, nnx.state(model, nnx.Param))


def test_without_flax_the_import_says_what_to_install(monkeypatch):
    spec = importlib.util.spec_from_file_location("flaxless", ours.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.delitem(sys.modules, "optax_lowmem._src.training.flax")
    monkeypatch.setitem(sys.modules, "flax", None)  # Python's way to say that it is not there
    with pytest.raises(ImportError, match=r"pip install flax"):
        spec.loader.exec_module(module)
