"""A convnet on scikit-learn's digits: optax.sgd in f32, and flash_sgd on bf16 weights.

Both start from the same weights and see the same shifted images in the same order, so that their
results pair up by seed. A whole run is one jitted scan.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _gpt.train import LOWMEM, optimizer_step, stored_dtype
from flax import linen as nn
from sklearn.datasets import load_digits

import optax_lowmem as lowmem
from optax_lowmem.blocks import decay_mask

CLASSES, TRAIN_SHARE = 10, 0.8
PEAK, MOMENTUM, DECAY, SMOOTHING = 0.05, 0.9, 5e-4, 0.1


@dataclass(frozen=True)
class Digits:
    """Images [n, 8, 8, 1] in [0, 1] and their classes [n]."""

    train: tuple[jax.Array, jax.Array]
    held_out: tuple[jax.Array, jax.Array]


class ConvNet(nn.Module):
    """Three convolutions and a hidden layer; computes in the dtype of its input."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(16, (3, 3), dtype=images.dtype)(images))
        x = nn.relu(nn.Conv(32, (3, 3), strides=2, dtype=images.dtype)(x))
        x = nn.relu(nn.Conv(64, (3, 3), strides=2, dtype=images.dtype)(x))
        x = nn.relu(nn.Dense(128, dtype=images.dtype)(x.reshape(len(x), -1)))
        return nn.Dense(CLASSES, dtype=images.dtype)(x).astype(jnp.float32)


def load() -> Digits:
    """The images, shuffled in a fixed order; a fifth is held out."""
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    cut = int(TRAIN_SHARE * len(order))

    def part(chosen: np.ndarray) -> tuple[jax.Array, jax.Array]:
        images = found.images[chosen, ..., None].astype(np.float32) / 16
        return jnp.asarray(images), jnp.asarray(found.target[chosen])

    return Digits(part(order[:cut]), part(order[cut:]))


def shifted(key: jax.Array, images: jax.Array) -> jax.Array:
    """Each image moved by up to one pixel both ways."""
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    corners = jax.random.randint(key, (len(images), 2), 0, 3)
    cut = jax.vmap(lambda image, at: jax.lax.dynamic_slice(image, (*at, 0), images.shape[1:]))
    return cut(padded, corners)


def optimizer(impl: str, steps: int) -> optax.GradientTransformation:
    """SGD with Nesterov momentum and weight decay, either way."""
    warmup = max(1, steps // 20)
    rate = optax.warmup_cosine_decay_schedule(0.0, PEAK, warmup, max(warmup + 1, steps))
    if impl == LOWMEM:
        return lowmem.flash_sgd(rate, MOMENTUM, True, weight_decay=DECAY, mask=decay_mask)
    decay = optax.add_decayed_weights(DECAY, decay_mask)
    return optax.chain(decay, optax.sgd(rate, MOMENTUM, nesterov=True))


def start(impl: str, tx: optax.GradientTransformation, seed: int) -> tuple[Any, Any]:
    """Weights and state."""
    weights = ConvNet().init(jax.random.key(seed), jnp.zeros((1, 8, 8, 1)))["params"]
    if impl == LOWMEM:
        return lowmem.init(tx, weights, dtype=stored_dtype, seed=seed)
    return weights, tx.init(weights)


def trainer(
    impl: str, tx: optax.GradientTransformation, digits: Digits, args: argparse.Namespace
) -> Callable[[Any, Any, jax.Array], tuple[jax.Array, jax.Array]]:
    """From weights, state and a key to the loss and the accuracy on held-out images."""
    take_step = optimizer_step(impl, args.implementation)

    def logits(params: Any, images: jax.Array) -> jax.Array:
        return ConvNet().apply({"params": params}, images.astype(args.compute))

    def loss(params: Any, images: jax.Array, classes: jax.Array) -> jax.Array:
        wanted = optax.smooth_labels(jax.nn.one_hot(classes, CLASSES), SMOOTHING)
        return optax.softmax_cross_entropy(logits(params, images), wanted).mean()

    def body(carry: Any, key: jax.Array) -> tuple[Any, None]:
        params, state = carry
        images, classes = digits.train
        pick, shift = jax.random.split(key)
        chosen = jax.random.randint(pick, (args.batch,), 0, len(images))
        grads = jax.grad(loss)(params, shifted(shift, images[chosen]), classes[chosen])
        return take_step(tx, grads, state, params), None

    @jax.jit
    def run(params: Any, state: Any, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys = jax.random.split(key, args.steps)
        (params, _), _ = jax.lax.scan(body, (params, state), keys)
        images, classes = digits.held_out
        found = logits(params, images)
        losses = optax.softmax_cross_entropy_with_integer_labels(found, classes)
        return losses.mean(), 100 * jnp.mean(found.argmax(-1) == classes)

    return run
