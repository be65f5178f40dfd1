"""Training loops on a mesh: NNX's Optimizer, Orbax' manager."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
import optax_lowmem.flax as ours
from optax_lowmem import checkpoint
from optax_lowmem._src.arrays import trees
from optax_lowmem._src.training.flax import as_pure
from optax_lowmem.sharding import state_shardings
from tests.checkpoint_cases import assert_same_bits
from tests.compilation import SAME_BITS
from tests.integration_cases import (
    MLP,
    OPTIMIZERS,
    STEPS,
    assert_close,
    batch,
    lies,
    mesh_of,
    starting,
    train_step,
)
from tests.tiers import rows


# ---- NNX: sharded by the metadata of its variables -----------------------------------------------
class Model(nnx.Module):
    """Two layers, whose variables name their axes where the model is `sharded`."""

    def __init__(self, width: int = 256, sharded: bool = True):
        def named(init, *names):
            return nnx.with_partitioning(init, names) if sharded else init

        init, zeros, rngs = nnx.initializers.lecun_normal(), nnx.initializers.zeros, nnx.Rngs(0)
        self.up = nnx.Linear(
            128, width, rngs=rngs, kernel_init=named(init, "data", "model"),
            bias_init=named(zeros, "model"),
        )  # fmt: skip
        self.down = nnx.Linear(
            width, 128, rngs=rngs, kernel_init=named(init, "model", "data"), use_bias=False
        )

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


@nnx.jit(donate_argnums=(0, 1))
def nnx_train_step(model, optimizer, x):
    def loss(model):
        return jnp.mean((model(x) - x[:, ::-1]) ** 2)

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def nnx_trained(model, optimizer):
    x = np.random.default_rng(0).normal(size=(16, 128)).astype(np.float32)
    return [float(nnx_train_step(model, optimizer, x)) for _ in range(STEPS)]


NNX = {
    "flash_adamw": lambda: lowmem.flash_adamw(1e-2),
    "chain": lambda: lowmem.chain(optax.clip_by_global_norm(1.0), lowmem.flash_lion(1e-3)),
}


@pytest.mark.parametrize(
    "cls, name",
    rows(
        [(nnx.Optimizer, "chain"), (ours.Optimizer, "flash_adamw")],
        [(ours.Optimizer, "flash_adamw")],
    ),
)
def test_nnx_optimizer_of_a_sharded_model(cls, name):
    tx, mesh = NNX[name](), mesh_of(data=4, model=2)
    with jax.set_mesh(mesh):
        model = Model()
        assert model.up.kernel.sharding.spec == P("data", "model")
        optimizer = cls(model, tx, wrt=nnx.Param)
        wanted = state_shardings(tx, as_pure(nnx.state(model, nnx.Param)))
        all_lie(optimizer, wanted)
        losses = nnx_trained(model, optimizer)
        all_lie(optimizer, wanted)
        state = nnx.state(optimizer)
        # what a restored state is put with: fails where a name does not fit
        jax.device_put(state, nnx.get_named_sharding(state, mesh))
    plain = Model(sharded=False)
    alone = nnx_trained(plain, cls(plain, tx, wrt=nnx.Param))
    np.testing.assert_allclose(losses, alone, rtol=1e-4)
    assert losses[-1] < 0.7 * losses[0]


def all_lie(optimizer, wanted):
    state = as_pure(optimizer.opt_state)
    assert any("mu_scale" in path for path, _ in trees.named_leaves(state))
    rows = zip(trees.named_leaves(state), trees.named_leaves(wanted), strict=True)
    for (path, x), (other, sharding) in rows:
        assert path == other and lies(x, sharding), (path, other, x.sharding)


# ---- Orbax: saved as the loop runs, gone on with on another mesh ---------------------------------
def loop(path, tx, mesh, until):
    """A user's training script: from the newest checkpoint on, saved every second step."""
    model = MLP(box=lambda init, names: init)
    make = starting(ours.TrainState, model, tx, dtype=jnp.bfloat16)
    abstract = jax.eval_shape(make, jax.random.key(0))
    rows = {"Dense_0": P(None, "data"), "Dense_1": P("data")}
    of_params = {
        layer: {name: NamedSharding(mesh, rows[layer] if x.ndim > 1 else P())
                for name, x in leaves.items()}
        for layer, leaves in abstract.params.items()
    }  # fmt: skip
    of_state = state_shardings(tx, abstract.params, of_params)
    shardings = abstract.replace(
        step=NamedSharding(mesh, P()), params=of_params, opt_state=of_state
    )
    options = ocp.CheckpointManagerOptions(save_interval_steps=2, max_to_keep=2)
    with ocp.CheckpointManager(path, options=options) as manager:
        latest = manager.latest_step()
        if latest is None:
            first = jax.jit(make, out_shardings=shardings, compiler_options=SAME_BITS)
            state = first(jax.random.key(0))
        else:
            like = jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                abstract.params, of_params,
            )  # fmt: skip
            params, opt_state = checkpoint.restore_from(manager, tx, like, shardings=of_state)
            state = abstract.replace(step=latest, params=params, opt_state=opt_state)
        start, losses = state, []
        step = jax.jit(train_step, out_shardings=(shardings, None), compiler_options=SAME_BITS)
        while int(state.step) < until:
            state, loss = step(state, *batch())
            losses.append(float(loss))
            items = checkpoint.args(tx, state.params, state.opt_state)
            extra = ocp.args.JsonSave({"loss": losses[-1]})
            manager.save(int(state.step), args=ocp.args.Composite(**items, metrics=extra))
    return start, state, losses


@pytest.mark.full
def test_a_run_that_goes_on_from_its_newest_checkpoint(tmp_path):
    tx = OPTIMIZERS["flash_adamw"]()
    _, whole, losses = loop(tmp_path / "whole", tx, mesh_of(data=2), until=8)
    _, saved, _ = loop(tmp_path / "parts", tx, mesh_of(data=2), until=4)
    assert sorted(p.name for p in (tmp_path / "parts").iterdir()) == ["2", "4"]
    start, moved, _ = loop(tmp_path / "parts", tx, mesh_of(data=4), until=6)
    assert_same_bits((start.params, start.opt_state), (saved.params, saved.opt_state))
    assert len(moved.opt_state.mu["Dense_1"]["kernel"].sharding.device_set) == 4
    start, found, last = loop(tmp_path / "parts", tx, mesh_of(data=2), until=8)
    assert_same_bits((start.params, start.opt_state), (moved.params, moved.opt_state))
    assert sorted(p.name for p in (tmp_path / "parts").iterdir()) == ["6", "8"]
    assert_close((found, [losses[0], *last]), (whole, [losses[0], *losses[6:]]))
