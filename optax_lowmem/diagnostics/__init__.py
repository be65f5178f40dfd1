"""Diagnose training: code usage and stalls of low-precision state, RMS_t, spikes, weight norms."""

from optax_lowmem._src.training.diagnostics.codes import (
    CodeShares,
    Stall,
    code_shares,
    largest_step,
    stalled_leaves,
)
from optax_lowmem._src.training.diagnostics.per_leaf import norms, rms
from optax_lowmem._src.training.diagnostics.spikes import (
    Prediction,
    SpikeDetector,
    SpikeState,
    loss_spikes,
    predicted,
    rms_spikes,
)

__all__ = [
    "CodeShares",
    "Prediction",
    "SpikeDetector",
    "SpikeState",
    "Stall",
    "code_shares",
    "largest_step",
    "loss_spikes",
    "norms",
    "predicted",
    "rms",
    "rms_spikes",
    "stalled_leaves",
]
