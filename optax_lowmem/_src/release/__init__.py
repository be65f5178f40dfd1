"""Gradient release: layers of a stack updated inside the backward pass."""
