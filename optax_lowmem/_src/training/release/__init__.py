"""Gradient release: layers updated inside the backward pass; their state in host memory."""
