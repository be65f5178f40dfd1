"""A model, its training step and comparisons, shared by the tests against other packages."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lowmem as lowmem
from tests.contract_cases import code_differences
from tests.meshes import mesh_of as mesh_of

STEPS = 8
WIDTH = 96  # three groups of 32: no even number of devices divides them

MESH = functools.partial(mesh_of, data=4, model=2)


@functools.cache
def batch():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 64)).astype(np.float32)
    return x, x[:, ::-1]


class MLP(nn.Module):
    """Two layers whose kernels, and one bias, name their axes by `box`."""

    box: callable = nn.with_partitioning
    names: tuple = ("data", "model")

    @nn.compact
    def __call__(self, x):
        of_rows, of_columns = self.names
        init = nn.initializers.lecun_normal()
        wide = self.box(init, (of_rows, of_columns))
        x = nn.Dense(WIDTH, kernel_init=wide,
                     bias_init=self.box(nn.initializers.zeros, (of_columns,)))(x)  # fmt: skip
        return nn.Dense(64, kernel_init=self.box(init, (of_columns, of_rows)))(nn.gelu(x))


def train_step(state, x, y):
    def loss(params):
        return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def run(step, state, steps=STEPS):
    losses = []
    for _ in range(steps):
        state, loss = step(state, *batch())
        losses.append(float(loss))
    return state, losses


def starting(cls, model, tx, **options):
    """Return a function of a key that creates the first training state."""

    def init(key):
        params = model.init(key, batch()[0])["params"]
        return cls.create(apply_fn=model.apply, params=params, tx=tx, **options)

    return init


def assert_close(found, wanted):
    """Gradients are summed in another order, and a code may be rounded the other way."""
    (state, losses), (other, of_other) = found, wanted
    assert losses[-1] < 0.7 * losses[0]
    np.testing.assert_allclose(losses, of_other, rtol=1e-4)
    for a, b in zip(masters_of(state), masters_of(other), strict=True):
        assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b)
    _, share = code_differences(*(codes_of(s.opt_state) for s in (state, other)))
    assert share <= 0.1  # of other random bits it is about a half


def codes_of(state):
    """Without corrections, which are the last bits of the weights."""
    rows = jax.tree_util.tree_leaves_with_path(state)
    return [x for path, x in rows if "correction" not in jax.tree_util.keystr(path)]


def masters_of(state):
    return jax.tree.leaves(lowmem.master_params(state.params, state.opt_state))


def lies(array, sharding):
    return array.sharding.is_equivalent_to(sharding, array.ndim)


RATE = 1e-2
OPTIMIZERS = {
    "flash_adamw": lambda: lowmem.flash_adamw(RATE),
    "adam_mini": lambda: lowmem.flash_adam_mini(RATE),
    "chain, 16 bits": lambda: lowmem.chain(
        optax.clip_by_global_norm(1.0), lowmem.flash_adamw(RATE)
    ),
    "compressed": lambda: lowmem.split_master_weights(
        lowmem.compress_state(optax.amsgrad(RATE), mu=lowmem.codecs.softsign())
    ),
}
DTYPES = {"chain, 16 bits": {"dtype": jnp.bfloat16}}
