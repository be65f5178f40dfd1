"""The small problem of the other programs: a network of two matrices that learns another one."""

import jax
import jax.numpy as jnp


def start(width: int = 64):
    """f32 weights, inputs and targets."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"w1": jax.random.normal(keys[0], (width, 256)) / 8, "w2": jnp.zeros((256, width))}
    x = jax.random.normal(keys[1], (256, width))
    return params, x, jnp.tanh(x @ jax.random.normal(keys[2], (width, width)) / 8)


def loss_fn(params, x, y):
    hidden = jax.nn.relu(x @ params["w1"].astype(x.dtype))
    return jnp.mean((hidden @ params["w2"].astype(x.dtype) - y) ** 2)
