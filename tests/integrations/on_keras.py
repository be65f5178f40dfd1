"""A Keras model on JAX in a loop of its own: `model.fit` takes Keras's optimizers only."""

import common  # isort: skip

import os

os.environ["KERAS_BACKEND"] = "jax"  # read by Keras's import

import jax  # noqa: E402
import keras  # noqa: E402
import optax  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import optax_lowmem as lowmem  # noqa: E402

MESH = jax.make_mesh((common.DEVICES,), ("data",), axis_types=(AxisType.Auto,))
TOKENS = common.tokens(8, 32, 256)


def train(impl):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([
        keras.layers.Embedding(256, 160), keras.layers.Dense(320, "gelu"), keras.layers.Dense(256)
    ])  # fmt: skip
    model.build((8, 31))
    values = [variable.value for variable in model.trainable_variables]
    others = [variable.value for variable in model.non_trainable_variables]
    specs = [P("data") if value.ndim > 1 else P() for value in values]
    values = jax.device_put(values, [NamedSharding(MESH, spec) for spec in specs])
    make = optax.adamw if impl == common.PLAIN else lowmem.flash_adamw
    tx = make(10 * common.RATE)  # a model without attention learns slowly
    weights, state = lowmem.init(tx, values, common.DTYPES[impl], allow_rounding=True)
    shardings = lowmem.sharding.state_shardings(tx, weights, specs, mesh=MESH)
    state = jax.device_put(state, shardings)

    def loss_fn(weights, x, y):
        logits, _ = model.stateless_call(weights, others, x)
        return keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True).mean()

    @jax.jit
    def train_step(weights, state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(weights, x, y)
        return *lowmem.step(tx, grads, state, weights), loss

    losses = []
    for _ in range(common.STEPS):
        weights, state, loss = train_step(weights, state, TOKENS[:, :-1], TOKENS[:, 1:])
        losses.append(float(loss))
    for variable, value in zip(model.trainable_variables, weights, strict=True):
        variable.assign(value)  # for model.save, model.evaluate
    return losses, (weights, state), sum(value.size for value in values)


if __name__ == "__main__":
    common.compare("keras", train)
