"""Classify images of digits with a convolutional network in Flax NNX."""

import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits

import optax_lowmem as lowmem
from optax_lowmem import flax as lowmem_flax


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.dense = nnx.Linear(4 * 4 * 32, 128, rngs=rngs)
        self.head = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, images):
        x = nnx.avg_pool(nnx.relu(self.conv(images)), (2, 2), strides=(2, 2))
        return self.head(nnx.relu(self.dense(x.reshape(len(x), -1))))


def loss_fn(model, images, labels):
    logits = model(images).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@nnx.jit
def train_step(model, optimizer, images, labels):
    loss, grads = nnx.value_and_grad(loss_fn)(model, images, labels)
    optimizer.update(model, grads)
    return loss


def main(steps: int = 60) -> tuple[float, float]:
    digits = load_digits()
    images, labels = jnp.asarray(digits.images[..., None] / 16), jnp.asarray(digits.target)
    model = Network(nnx.Rngs(0))
    tx = lowmem.flash_adamw(1e-3, weight_decay=0.01)
    optimizer = lowmem_flax.Optimizer(model, tx, wrt=nnx.Param)  # rounds the weights to bf16
    losses = []
    for i in range(steps):
        batch = slice(i * 128 % 1536, i * 128 % 1536 + 128)
        losses.append(float(train_step(model, optimizer, images[batch], labels[batch])))
    return losses[0], losses[-1]


if __name__ == "__main__":
    print("loss at the first and at the last step:", *main())
