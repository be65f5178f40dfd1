"""Bytes of weights, of optimizer state and of activations."""
