"""Report the bytes of weights, optimizer state and activations, without allocating them."""

from optax_lowmem._src.memory.activations import ActivationReport as ActivationReport
from optax_lowmem._src.memory.activations import Saved as Saved
from optax_lowmem._src.memory.activations import activation_report as activation_report
from optax_lowmem._src.memory.state import Report as Report
from optax_lowmem._src.memory.state import report as report

__all__ = ["ActivationReport", "Report", "Saved", "activation_report", "report"]
