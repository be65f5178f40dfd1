"""Detect loss spikes and RMS spikes in recorded series (StableAdamW, appendix E)."""

from optax_lowmem._src.training.diagnostics.spikes import (
    DECAY,
    DEVIATIONS,
    IGNORE,
    INTERVAL,
    LEAD,
    LEAST,
    RMS_THRESHOLD,
    loss_spikes,
    rms_spikes,
)

__all__ = [
    "DECAY",
    "DEVIATIONS",
    "IGNORE",
    "INTERVAL",
    "LEAD",
    "LEAST",
    "RMS_THRESHOLD",
    "loss_spikes",
    "rms_spikes",
]
