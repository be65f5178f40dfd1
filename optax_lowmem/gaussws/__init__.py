"""Gaussian weight sampling: train with noise of a learned bitwidth on the weights."""

from optax_lowmem._src.core.clean_weights import clean_params as clean_params
from optax_lowmem._src.noise.bitwidth import SafeFormat as SafeFormat
from optax_lowmem._src.noise.bitwidth import bitwidth as bitwidth
from optax_lowmem._src.noise.bitwidth import bitwidth_loss as bitwidth_loss
from optax_lowmem._src.noise.bitwidth import fake_cast as fake_cast
from optax_lowmem._src.noise.bitwidth import most_bits as most_bits
from optax_lowmem._src.noise.bitwidth import safe_format as safe_format
from optax_lowmem._src.noise.bitwidth import underflow_share as underflow_share
from optax_lowmem._src.noise.distributions import NOISES as NOISES
from optax_lowmem._src.noise.formats import FORMATS as FORMATS
from optax_lowmem._src.noise.sampling import draw as draw
from optax_lowmem._src.noise.sampling import draw_packed as draw_packed
from optax_lowmem._src.noise.sampling import noise_key as noise_key
from optax_lowmem._src.noise.sampling import perturb as perturb
from optax_lowmem._src.noise.sampling import sample as sample
from optax_lowmem._src.noise.sampling import unpack as unpack
from optax_lowmem._src.noise.states import BitsTable as BitsTable
from optax_lowmem._src.noise.states import LayerBits as LayerBits
from optax_lowmem._src.noise.states import bits_table as bits_table
from optax_lowmem._src.noise.states import bitwidths as bitwidths
from optax_lowmem._src.noise.states import safe_cast as safe_cast
from optax_lowmem.gaussws import parts as parts

__all__ = [
    "BitsTable",
    "FORMATS",
    "LayerBits",
    "NOISES",
    "SafeFormat",
    "bits_table",
    "bitwidth",
    "bitwidth_loss",
    "bitwidths",
    "clean_params",
    "draw",
    "draw_packed",
    "fake_cast",
    "most_bits",
    "noise_key",
    "perturb",
    "safe_cast",
    "safe_format",
    "sample",
    "underflow_share",
    "unpack",
]
