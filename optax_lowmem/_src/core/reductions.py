"""Reductions over a whole leaf, wherever its parts lie."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from optax_lowmem._src.core import varying
from optax_lowmem._src.core.block import Block


def mean_of_leaf(x: jax.Array) -> jax.Array:
    """The mean over a leaf, also where a `shard_map` shows this function a part of it only.

    Raises:
      ValueError: inside a `shard_map` that does not say which values differ from device to device.
    """
    mean = jnp.mean(x)
    axes = tuple(sorted(varying.axes_of(x)))
    if axes:  # parts are of one size
        return lax.pmean(mean, axes)
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    for name in (name for name, kind in kinds if kind == AxisType.Manual):
        if not varying.axes_of(lax.axis_index(name)):
            raise ValueError(
                f"inside a shard_map with check_vma=False nobody knows whether a leaf is sharded "
                f"over '{name}', and a mean over it is needed: use check_vma=True."
            )
    return mean


def check_blocks(blocks: Sequence[Block]) -> None:
    """Raises inside a `shard_map`, where what one sees of a leaf may be parts of its blocks."""
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Manual in mesh.axis_types and not all(block.elementwise for block in blocks):
        raise ValueError(
            "inside a shard_map nobody knows which blocks of weights lie on several devices, and "
            "a mean over each is needed: use jit with shardings, which finds out."
        )


def rms_of_ratio(g: jax.Array, u: jax.Array, eps: jax.Array) -> jax.Array:
    """RMS_t = sqrt(E[g^2 / max(u, eps^2)]) of a leaf (Wortsman et al., appendix F.2).

    Args:
      g: gradient, f32.
      u: second moment after it, without bias.
      eps: f32: in f16 the square of 1e-6 is 0.
    """
    return jnp.sqrt(mean_of_leaf(g * g / jnp.maximum(u, eps * eps)))


def clipped_share(rms: jax.Array, threshold: jax.Array) -> jax.Array:
    """1 / max(1, RMS_t / d), of the learning rate (Algorithm 2); NaN where RMS_t is."""
    return 1 / jnp.maximum(1, rms / threshold)
