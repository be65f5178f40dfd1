"""Training loops: gradient release, checkpoints, memory, diagnostics, shardings and Flax."""
