"""A row of an embedding and a neuron of a matrix whose gradients stop: what 8-bit m does then."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import optax_lowmem as lowmem
from optax_lowmem import codecs

ROWS, WIDTH, STEPS, ASLEEP = 16, 256, 600, 100  # a group is a row; the gradients stop at ASLEEP
SCALE, RATE, B2 = 1e-4, 1e-3, 0.95  # of a gradient's elements; the others are Adam-mini's
FLOOR = 1e-5  # the reference implementation's least range of a group


@dataclasses.dataclass(frozen=True)
class Floored(type(codecs.affine())):
    """Our codec with the reference's floor, and nothing else of it."""

    def measure(self, x):
        top = jnp.maximum(jnp.max(x, -1), jnp.min(x, -1) + FLOOR)
        return super().measure(jnp.concatenate([x, top[..., None]], -1))


def _stored(mu, rounding):
    return lowmem.Storage(mu=mu, nu=None, group_size=WIDTH, rounding=rounding)


STORAGES = {
    "f32": lowmem.Storage.full_precision(),
    "ours, nearest": _stored(codecs.affine(), "nearest"),
    "ours, stochastic in the embedding": _stored(codecs.affine(), "embeddings"),
    "ours, stochastic everywhere": _stored(codecs.affine(), "stochastic"),
    "ours with the floor, nearest": _stored(Floored(), "nearest"),
    "ours with the floor, stochastic everywhere": _stored(Floored(), "stochastic"),
    "reference, nearest": _stored(codecs.affine_paper(), "nearest"),
}


def sleeping(storage: lowmem.Storage) -> dict[str, np.ndarray]:
    """Norms of the sleeping row and neuron, and of an awake neuron, after every step."""
    tx = lowmem.adam_mini(RATE, b2=B2, weight_decay=0.0, storage=storage)
    params = {"embed": jnp.zeros((ROWS, WIDTH)), "up": {"kernel": jnp.zeros((ROWS, WIDTH))}}

    def step(carry, t):
        params, state = carry
        g = SCALE * jax.random.normal(jax.random.key(t), (2, ROWS, WIDTH))
        awake = (t < ASLEEP).astype(jnp.float32)
        grads = {
            "embed": g[0].at[0].multiply(awake),
            "up": {"kernel": g[1].at[:, 0].multiply(awake)},
        }
        updates, state = tx.update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        kernel = params["up"]["kernel"]
        norms = map(jnp.linalg.norm, (params["embed"][0], kernel[:, 0], kernel[:, 1]))
        return (params, state), dict(zip(("row", "neuron", "awake neuron"), norms, strict=True))

    run = jax.jit(functools.partial(jax.lax.scan, step))
    return jax.device_get(run((params, tx.init(params)), jnp.arange(STEPS))[1])
