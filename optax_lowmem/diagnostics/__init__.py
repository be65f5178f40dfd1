"""Training diagnostics: codes and stalls of low-precision state, RMS_t, spikes, weight norms."""

from optax_lowmem.diagnostics.codes import CodeShares as CodeShares
from optax_lowmem.diagnostics.codes import Stall as Stall
from optax_lowmem.diagnostics.codes import code_shares as code_shares
from optax_lowmem.diagnostics.codes import largest_step as largest_step
from optax_lowmem.diagnostics.codes import stalled_leaves as stalled_leaves
from optax_lowmem.diagnostics.detector import SpikeDetector as SpikeDetector
from optax_lowmem.diagnostics.detector import SpikeState as SpikeState
from optax_lowmem.diagnostics.prediction import Prediction as Prediction
from optax_lowmem.diagnostics.prediction import predicted as predicted
from optax_lowmem.diagnostics.second_moment import rms as rms
from optax_lowmem.diagnostics.spikes import loss_spikes as loss_spikes
from optax_lowmem.diagnostics.spikes import rms_spikes as rms_spikes
from optax_lowmem.diagnostics.weight_norms import norm_drift as norm_drift
from optax_lowmem.diagnostics.weight_norms import norms as norms
