"""Gaussian weight sampling: train with noise of a learned bitwidth on the weights."""

from optax_lowmem._src.layers.noise.bitwidth import (
    SafeFormat,
    bitwidth,
    bitwidth_loss,
    fake_cast,
    most_bits,
    safe_format,
    underflow_share,
)
from optax_lowmem._src.layers.noise.distributions import NOISES
from optax_lowmem._src.layers.noise.formats import FORMATS
from optax_lowmem._src.layers.noise.sampling import draw, noise_key, perturb, sample
from optax_lowmem._src.optim.step.masters import clean_params
from optax_lowmem._src.training.gaussws_noise.states import (
    BitsTable,
    LayerBits,
    bits_table,
    bitwidths,
    safe_cast,
)
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
    "fake_cast",
    "most_bits",
    "noise_key",
    "perturb",
    "safe_cast",
    "safe_format",
    "sample",
    "underflow_share",
]
