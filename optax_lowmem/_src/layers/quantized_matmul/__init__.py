"""Matrix products of int8 or FP8 operands."""

from optax_lowmem._src.layers.quantized_matmul.dispatch import LONGEST_ROW as LONGEST_ROW
from optax_lowmem._src.layers.quantized_matmul.dispatch import multiply as multiply
from optax_lowmem._src.layers.quantized_matmul.dispatch import product_reason as product_reason
from optax_lowmem._src.layers.quantized_matmul.dispatch import quantize as quantize
from optax_lowmem._src.layers.quantized_matmul.dispatch import (
    quantize_transposed as quantize_transposed,
)
from optax_lowmem._src.layers.quantized_matmul.plain import E4M3 as E4M3
from optax_lowmem._src.layers.quantized_matmul.plain import E5M2 as E5M2
from optax_lowmem._src.layers.quantized_matmul.plain import FORMATS as FORMATS
from optax_lowmem._src.layers.quantized_matmul.plain import INT8 as INT8
from optax_lowmem._src.layers.quantized_matmul.plain import LONGEST_SUM as LONGEST_SUM
from optax_lowmem._src.layers.quantized_matmul.plain import Format as Format
from optax_lowmem._src.layers.quantized_matmul.plain import Quantized as Quantized
from optax_lowmem._src.layers.quantized_matmul.plain import absmax_of as absmax_of
from optax_lowmem._src.layers.quantized_matmul.plain import as_stored as as_stored
from optax_lowmem._src.layers.quantized_matmul.plain import codes_of as codes_of
from optax_lowmem._src.layers.quantized_matmul.plain import multiply_plain as multiply_plain
from optax_lowmem._src.layers.quantized_matmul.plain import quantize_plain as quantize_plain
from optax_lowmem._src.layers.quantized_matmul.plain import scales_of as scales_of
