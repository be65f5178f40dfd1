"""Diagnose training: code usage and stalls of low-precision state, RMS_t, spikes, weight norms."""

from optax_lowmem._src.diagnostics.codes import CodeShares as CodeShares
from optax_lowmem._src.diagnostics.codes import Stall as Stall
from optax_lowmem._src.diagnostics.codes import code_shares as code_shares
from optax_lowmem._src.diagnostics.codes import largest_step as largest_step
from optax_lowmem._src.diagnostics.codes import stalled_leaves as stalled_leaves
from optax_lowmem._src.diagnostics.per_leaf import norm_drift as norm_drift
from optax_lowmem._src.diagnostics.per_leaf import norms as norms
from optax_lowmem._src.diagnostics.per_leaf import rms as rms
from optax_lowmem._src.diagnostics.spikes import Prediction as Prediction
from optax_lowmem._src.diagnostics.spikes import SpikeDetector as SpikeDetector
from optax_lowmem._src.diagnostics.spikes import SpikeState as SpikeState
from optax_lowmem._src.diagnostics.spikes import loss_spikes as loss_spikes
from optax_lowmem._src.diagnostics.spikes import predicted as predicted
from optax_lowmem._src.diagnostics.spikes import rms_spikes as rms_spikes
from optax_lowmem.diagnostics import spikes as spikes

__all__ = [
    "CodeShares",
    "Prediction",
    "SpikeDetector",
    "SpikeState",
    "Stall",
    "code_shares",
    "largest_step",
    "loss_spikes",
    "norm_drift",
    "norms",
    "predicted",
    "rms",
    "rms_spikes",
    "stalled_leaves",
]
