"""Layers for Flax Linen."""

from optax_lowmem._src.switchback.linen import LayerScale as LayerScale
from optax_lowmem._src.switchback.linen import SwitchBackDense as SwitchBackDense

__all__ = ["LayerScale", "SwitchBackDense"]
