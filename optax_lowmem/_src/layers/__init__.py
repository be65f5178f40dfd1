"""Layers with 8-bit products, FP8 activations and noise, and losses."""
