"""Report and plan the bytes of a training step, without allocating them."""

from optax_lowmem._src.training.memory.activations import ActivationReport, Saved, activation_report
from optax_lowmem._src.training.memory.plan import Activations, ModePlan, Plan, plan
from optax_lowmem._src.training.memory.state import Report, report

__all__ = [
    "ActivationReport",
    "Activations",
    "ModePlan",
    "Plan",
    "Report",
    "Saved",
    "activation_report",
    "plan",
    "report",
]
