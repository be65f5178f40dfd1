"""Weights plus noise in square blocks (GaussWS): noise from bits, sampling, gradients' sums."""

from optax_lowmem._src.noise.kernels.dispatch import no_kernel_reason as no_kernel_reason
from optax_lowmem._src.noise.kernels.dispatch import noise_of as noise_of
from optax_lowmem._src.noise.kernels.dispatch import noise_sums as noise_sums
from optax_lowmem._src.noise.kernels.dispatch import packed_noise as packed_noise
from optax_lowmem._src.noise.kernels.dispatch import sample as sample
from optax_lowmem._src.noise.kernels.formats import FORMATS as FORMATS
from optax_lowmem._src.noise.kernels.formats import Format as Format
from optax_lowmem._src.noise.kernels.formats import Scaled as Scaled
from optax_lowmem._src.noise.kernels.formats import format_of as format_of
from optax_lowmem._src.noise.kernels.formats import scaled as scaled
from optax_lowmem._src.noise.kernels.noise import BOX_MULLER as BOX_MULLER
from optax_lowmem._src.noise.kernels.noise import DIFFQ as DIFFQ
from optax_lowmem._src.noise.kernels.noise import EIGHT as EIGHT
from optax_lowmem._src.noise.kernels.noise import GAUSSWS as GAUSSWS
from optax_lowmem._src.noise.kernels.noise import NOISES as NOISES
from optax_lowmem._src.noise.kernels.noise import Noise as Noise
from optax_lowmem._src.noise.kernels.noise import number as number
from optax_lowmem._src.noise.kernels.on_mesh import laid_like as laid_like
from optax_lowmem._src.noise.kernels.reference import SIDE as SIDE
from optax_lowmem._src.noise.kernels.reference import absmax as absmax
from optax_lowmem._src.noise.kernels.reference import block_shape as block_shape
from optax_lowmem._src.noise.kernels.reference import cast as cast
from optax_lowmem._src.noise.kernels.reference import check_matrix as check_matrix
from optax_lowmem._src.noise.kernels.reference import perturb as perturb
from optax_lowmem._src.noise.kernels.reference import result_dtype as result_dtype
from optax_lowmem._src.noise.kernels.reference import spread as spread
