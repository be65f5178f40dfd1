"""One optimizer step: rule, plans, state, backends."""

from optax_lowmem._src.step.backend import IMPLEMENTATIONS as IMPLEMENTATIONS
from optax_lowmem._src.step.backend import choose as choose
from optax_lowmem._src.step.backend import fused_updates as fused_updates
from optax_lowmem._src.step.batch import LeafState as LeafState
from optax_lowmem._src.step.plan import LeafPlan as LeafPlan
from optax_lowmem._src.step.plan import SlotPlan as SlotPlan
from optax_lowmem._src.step.reference import MASTER as MASTER
from optax_lowmem._src.step.reference import split_update as split_update
