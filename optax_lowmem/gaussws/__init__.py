"""Gaussian weight sampling: noise of a learnt bitwidth on weights, instead of quantising them."""

from optax_lowmem.gaussws.bitwidth import SafeFormat as SafeFormat
from optax_lowmem.gaussws.bitwidth import bitwidth as bitwidth
from optax_lowmem.gaussws.bitwidth import bitwidth_loss as bitwidth_loss
from optax_lowmem.gaussws.bitwidth import most_bits as most_bits
from optax_lowmem.gaussws.bitwidth import safe_format as safe_format
from optax_lowmem.gaussws.casting import fake_cast as fake_cast
from optax_lowmem.gaussws.casting import underflow_share as underflow_share
from optax_lowmem.gaussws.sampling import draw as draw
from optax_lowmem.gaussws.sampling import draw_packed as draw_packed
from optax_lowmem.gaussws.sampling import noise_key as noise_key
from optax_lowmem.gaussws.sampling import perturb as perturb
from optax_lowmem.gaussws.sampling import sample as sample
from optax_lowmem.gaussws.sampling import unpack as unpack
from optax_lowmem.gaussws.states import BitsTable as BitsTable
from optax_lowmem.gaussws.states import LayerBits as LayerBits
from optax_lowmem.gaussws.states import bits_table as bits_table
from optax_lowmem.gaussws.states import bitwidths as bitwidths
from optax_lowmem.gaussws.states import clean_params as clean_params
from optax_lowmem.gaussws.states import safe_cast as safe_cast
from optax_lowmem.kernels.gaussws import FORMATS as FORMATS
from optax_lowmem.kernels.gaussws import NOISES as NOISES
