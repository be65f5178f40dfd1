"""Report and plan the bytes of a training step, without allocating them."""

from optax_lowmem._src.memory.activations import ActivationReport as ActivationReport
from optax_lowmem._src.memory.activations import Saved as Saved
from optax_lowmem._src.memory.activations import activation_report as activation_report
from optax_lowmem._src.memory.plan import Activations as Activations
from optax_lowmem._src.memory.plan import ModePlan as ModePlan
from optax_lowmem._src.memory.plan import Plan as Plan
from optax_lowmem._src.memory.plan import plan as plan
from optax_lowmem._src.memory.state import Report as Report
from optax_lowmem._src.memory.state import report as report

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
