"""Rotary positions whose gradient needs nothing kept: it is the rotation back."""

from functools import partial

import jax
import jax.numpy as jnp


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def rotate(x: jax.Array, base: float) -> jax.Array:
    """Turns queries or keys [batch, length, heads, head] by their position, in f32."""
    return _turned(x, base, 1.0)


def _turned(x: jax.Array, base: float, direction: float) -> jax.Array:
    length, head = x.shape[1], x.shape[-1]
    frequency = base ** (-jnp.arange(0, head, 2, dtype=jnp.float32) / head)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency[None]
    cos, sin = (f(angle)[None, :, None] for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sin = sin * jnp.float32(direction)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


rotate.defvjp(
    lambda x, base: (rotate(x, base), None),
    lambda base, saved, g: (_turned(g, base, -1.0),),
)
