"""Flax's Linen `TrainState` and NNX `Optimizer` with the fused step; only an import changes.

    from optax_lowmem.flax import TrainState  # was flax.training.train_state
    from optax_lowmem.flax import Optimizer  # was flax.nnx

Both are subclasses of Flax's classes, take any optax transformation, and read checkpoints that
Flax's classes wrote, and vice versa. `substitute` gives them to trainers that make their optimizer.
"""

from optax_lowmem._src.training.flax import Optimizer, TrainState, substitute

__all__ = ["Optimizer", "TrainState", "substitute"]
