"""Matrix products of 8-bit operands: quantize a row or a tensor, multiply, scale back."""

from optax_lowmem._src.switchback.quantized_matmul.dispatch import multiply as multiply
from optax_lowmem._src.switchback.quantized_matmul.dispatch import product_reason as product_reason
from optax_lowmem._src.switchback.quantized_matmul.dispatch import quantize as quantize
from optax_lowmem._src.switchback.quantized_matmul.dispatch import (
    quantize_transposed as quantize_transposed,
)
from optax_lowmem._src.switchback.quantized_matmul.reference import E4M3 as E4M3
from optax_lowmem._src.switchback.quantized_matmul.reference import E5M2 as E5M2
from optax_lowmem._src.switchback.quantized_matmul.reference import FORMATS as FORMATS
from optax_lowmem._src.switchback.quantized_matmul.reference import INT8 as INT8
from optax_lowmem._src.switchback.quantized_matmul.reference import LONGEST_SUM as LONGEST_SUM
from optax_lowmem._src.switchback.quantized_matmul.reference import Format as Format
from optax_lowmem._src.switchback.quantized_matmul.reference import Quantized as Quantized
