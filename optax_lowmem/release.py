"""Gradient release: update each layer inside the backward pass.

A `lax.scan` over layers returns their gradients as one stack, as large as the weights. In a model
that is unrolled under one jit, XLA frees each gradient after its update, if the names of the layers
sort in their order.
"""

from optax_lowmem._src.arrays.host import stacked
from optax_lowmem._src.training.release.model import Layered
from optax_lowmem._src.training.release.offload import offload, offload_weights
from optax_lowmem._src.training.release.step import train_step

__all__ = ["Layered", "offload", "offload_weights", "stacked", "train_step"]
