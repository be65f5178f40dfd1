"""Gradient release: each layer of a stack is updated inside the backward pass.

A model unrolled under one jit needs none of this: XLA frees each gradient at its update. The
gradients of layers that run in a `lax.scan` come out of it as one stack, as large as the weights.
"""

from optax_lowmem._src.release.model import Layered as Layered
from optax_lowmem._src.release.step import train_step as train_step

__all__ = ["Layered", "train_step"]
