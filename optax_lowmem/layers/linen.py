"""Layers for Flax Linen."""

from optax_lowmem._src.layers.switchback.linen import LayerScale, SwitchBackDense

__all__ = ["LayerScale", "SwitchBackDense"]
