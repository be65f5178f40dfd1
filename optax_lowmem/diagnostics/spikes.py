"""Detect loss spikes and RMS spikes in recorded series (StableAdamW, appendix E)."""

from optax_lowmem._src.diagnostics.spikes import DECAY as DECAY
from optax_lowmem._src.diagnostics.spikes import DEVIATIONS as DEVIATIONS
from optax_lowmem._src.diagnostics.spikes import IGNORE as IGNORE
from optax_lowmem._src.diagnostics.spikes import INTERVAL as INTERVAL
from optax_lowmem._src.diagnostics.spikes import LEAD as LEAD
from optax_lowmem._src.diagnostics.spikes import LEAST as LEAST
from optax_lowmem._src.diagnostics.spikes import RMS_THRESHOLD as RMS_THRESHOLD
from optax_lowmem._src.diagnostics.spikes import loss_spikes as loss_spikes
from optax_lowmem._src.diagnostics.spikes import rms_spikes as rms_spikes

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
