"""Gradient release: update each layer of a stack inside the backward pass.

A model that is unrolled under one jit does not need this: XLA frees each gradient after its update.
A `lax.scan` over layers returns their gradients as one stack, as large as the weights.
"""

from optax_lowmem._src.release.model import Layered as Layered
from optax_lowmem._src.release.offload import offload as offload
from optax_lowmem._src.release.step import train_step as train_step

__all__ = ["Layered", "offload", "train_step"]
