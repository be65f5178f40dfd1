"""Blocks that share a second moment: structure in a model, and means."""
