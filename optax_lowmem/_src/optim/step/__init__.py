"""One optimizer step: rule, plans, state, backends."""

from optax_lowmem._src.optim.step.backend import IMPLEMENTATIONS as IMPLEMENTATIONS
from optax_lowmem._src.optim.step.backend import choose as choose
from optax_lowmem._src.optim.step.backend import fused_updates as fused_updates
from optax_lowmem._src.optim.step.plan import LeafPlan as LeafPlan
from optax_lowmem._src.optim.step.plan import SlotPlan as SlotPlan
from optax_lowmem._src.optim.step.reference import MASTER as MASTER
from optax_lowmem._src.optim.step.reference import split_update as split_update
from optax_lowmem._src.optim.step.state import Leaf as Leaf
