"""Checkpoints: save, restore, check the format, convert from and to optax, export weights."""
