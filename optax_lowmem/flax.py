"""Flax's Linen `TrainState` and NNX `Optimizer` with the fused step: one changed import.

    from optax_lowmem.flax import TrainState  # was flax.training.train_state
    from optax_lowmem.flax import Optimizer  # was flax.nnx

Both are subclasses of Flax's, take any optax transformation, and read each other's checkpoints.
"""

from optax_lowmem._src.flax import Optimizer as Optimizer
from optax_lowmem._src.flax import TrainState as TrainState

__all__ = ["Optimizer", "TrainState"]
