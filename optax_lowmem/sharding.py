"""Derive the shardings of an optimizer state from the shardings of the parameters."""

from optax_lowmem._src.training.sharding import state_shardings

__all__ = ["state_shardings"]
