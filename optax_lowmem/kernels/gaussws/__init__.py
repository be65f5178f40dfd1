"""Weights plus noise in square blocks (GaussWS): noise from bits, sampling, gradients' sums."""

from optax_lowmem.kernels.gaussws.dispatch import no_kernel_reason as no_kernel_reason
from optax_lowmem.kernels.gaussws.dispatch import noise_of as noise_of
from optax_lowmem.kernels.gaussws.dispatch import noise_sums as noise_sums
from optax_lowmem.kernels.gaussws.dispatch import packed_noise as packed_noise
from optax_lowmem.kernels.gaussws.dispatch import sample as sample
from optax_lowmem.kernels.gaussws.formats import FORMATS as FORMATS
from optax_lowmem.kernels.gaussws.formats import Format as Format
from optax_lowmem.kernels.gaussws.formats import Scaled as Scaled
from optax_lowmem.kernels.gaussws.formats import format_of as format_of
from optax_lowmem.kernels.gaussws.formats import scaled as scaled
from optax_lowmem.kernels.gaussws.noise import BOX_MULLER as BOX_MULLER
from optax_lowmem.kernels.gaussws.noise import DIFFQ as DIFFQ
from optax_lowmem.kernels.gaussws.noise import EIGHT as EIGHT
from optax_lowmem.kernels.gaussws.noise import GAUSSWS as GAUSSWS
from optax_lowmem.kernels.gaussws.noise import NOISES as NOISES
from optax_lowmem.kernels.gaussws.noise import Noise as Noise
from optax_lowmem.kernels.gaussws.noise import number as number
from optax_lowmem.kernels.gaussws.on_mesh import laid_like as laid_like
from optax_lowmem.kernels.gaussws.reference import cast as cast
from optax_lowmem.kernels.gaussws.reference import perturb as perturb
from optax_lowmem.kernels.gaussws.reference import result_dtype as result_dtype
from optax_lowmem.kernels.gaussws.squares import SIDE as SIDE
from optax_lowmem.kernels.gaussws.squares import absmax as absmax
from optax_lowmem.kernels.gaussws.squares import block_shape as block_shape
from optax_lowmem.kernels.gaussws.squares import check_matrix as check_matrix
from optax_lowmem.kernels.gaussws.squares import spread as spread
