"""Transformations of optax optimizers: compressed state, split master weights, and their kin."""
