"""Frozen matrices in 4 bits (NF4, QLoRA), and their products."""

from optax_lowmem._src.arrays.nf4 import NF4Array, dequantize, from_bitsandbytes, quantize
from optax_lowmem._src.layers.nf4 import matmul

__all__ = ["NF4Array", "dequantize", "from_bitsandbytes", "matmul", "quantize"]
