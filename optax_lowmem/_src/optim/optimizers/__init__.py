"""Optimizers: one file per update rule with its constructors, and `OPTIMIZERS`, their records."""

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import optax

from optax_lowmem._src.arrays.typing import ScalarOrSchedule
from optax_lowmem._src.optim.blocks.structure import Structure
from optax_lowmem._src.optim.optimizers.adam import (
    AdamRule,
    coat_adamw,
    flash_adam,
    flash_adamw,
    scale_by_flash_adam,
)
from optax_lowmem._src.optim.optimizers.adam_mini import (
    AdamMiniRule,
    adam_mini,
    flash_adam_mini,
    q_adam_mini,
    q_adamw,
    scale_by_adam_mini,
)
from optax_lowmem._src.optim.optimizers.factored import (
    FactoredRule,
    flash_factored_adamw,
    scale_by_factored_adam,
)
from optax_lowmem._src.optim.optimizers.lion import LionRule, flash_lion, scale_by_flash_lion
from optax_lowmem._src.optim.optimizers.muon import MuonRule, flash_muon
from optax_lowmem._src.optim.optimizers.record import Constructor, OptimizerRecord
from optax_lowmem._src.optim.optimizers.sgd import (
    GradientRule,
    MomentumRule,
    flash_sgd,
    flash_trace,
)
from optax_lowmem._src.optim.optimizers.stable_adamw import StableAdamRule, stable_adamw
from optax_lowmem._src.optim.step.storage import Storage
from optax_lowmem._src.optim.wrappers.update_clipping import update_clipping


def _clipped_adamw(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-6,
    weight_decay: ScalarOrSchedule = 1e-2,
    mask: optax.MaskOrFn = None,
) -> optax.GradientTransformationExtraArgs:
    """Build `stable_adamw` from `optax.adamw` and `update_clipping`."""
    inner = optax.adamw(learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=mask)
    return update_clipping(inner, b2=b2, eps=eps)


def _mini(make: Constructor) -> Constructor:
    """Use one block for the whole leaf if no block structure can be inferred."""
    return functools.partial(make, blocks=Structure(default="whole"))


# optax before 0.2.7 has no `consistent_rms` (no upstream issue known).
_KNOWN_TO_MUON = inspect.signature(optax.contrib.muon).parameters
_SCALE_OF_MUON: dict[str, Any] = (
    {"consistent_rms": 0.2} if "consistent_rms" in _KNOWN_TO_MUON else {}
)
_adam = functools.partial(
    OptimizerRecord,
    learning_rate=1e-2,
    optax_fields={"mu": "ScaleByAdamState.mu", "nu": "ScaleByAdamState.nu"},
)


def _adamw(make: Constructor, **more: Any) -> OptimizerRecord:
    """Return the record of an AdamW that differs only in its codecs."""
    plain, undecayed = optax.adamw, optax.adam
    return _adam(rule=AdamRule(), make=make, plain=plain, undecayed=undecayed, **more)


def _adamw_with_fewer_moments(
    rule: AdamMiniRule, make: Constructor, plain: Constructor, **more: Any
) -> OptimizerRecord:
    """Return the record of an AdamW with fewer second moments; it can continue optax's AdamW."""
    return _adam(
        rule=rule, make=make, plain=plain, counterpart=optax.adamw, undecayed=optax.adam,
        plain_scale_by=optax.scale_by_adam, **more,
    )  # fmt: skip


def _adam_mini(make: Constructor, **more: Any) -> OptimizerRecord:
    return _adamw_with_fewer_moments(AdamMiniRule(), _mini(make), _mini(adam_mini), **more)


# If several records have the same rule, conversion to optax uses the first.
OPTIMIZERS: dict[str, OptimizerRecord] = {
    "flash_adamw": _adamw(
        flash_adamw, scale_by=scale_by_flash_adam, plain_scale_by=optax.scale_by_adam
    ),
    "flash_adam": _adam(rule=AdamRule(), make=flash_adam, plain=optax.adam),
    "stable_adamw": _adam(rule=StableAdamRule(), make=stable_adamw, plain=_clipped_adamw),
    "coat_adamw": _adamw(coat_adamw),
    "q_adamw": _adamw(q_adamw),
    "q_adam_mini": _adam_mini(q_adam_mini),
    "flash_adam_mini": _adam_mini(flash_adam_mini, scale_by=_mini(scale_by_adam_mini)),
    "flash_factored_adamw": _adamw_with_fewer_moments(
        FactoredRule(),
        flash_factored_adamw,
        functools.partial(flash_factored_adamw, storage=Storage.full_precision()),
        scale_by=scale_by_factored_adam,
    ),
    "flash_lion": OptimizerRecord(
        rule=LionRule(),
        make=flash_lion,
        plain=optax.lion,
        learning_rate=1e-3,
        optax_fields={"mu": "ScaleByLionState.mu"},
        rate_factor=0.3,
        scale_by=scale_by_flash_lion,
        plain_scale_by=optax.scale_by_lion,
    ),
    "flash_sgd": OptimizerRecord(
        rule=MomentumRule(),
        make=functools.partial(flash_sgd, momentum=0.9),
        plain=functools.partial(optax.sgd, momentum=0.9),
        learning_rate=1e-2,
        optax_fields={"mu": "TraceState.trace"},
        rate_factor=50.0,
        scale_by=functools.partial(flash_trace, 0.9),
        plain_scale_by=functools.partial(optax.trace, 0.9),
        variants=(
            OptimizerRecord(
                rule=GradientRule(),
                make=flash_sgd,
                plain=optax.sgd,
                learning_rate=1e-2,
                optax_fields={},
                plain_scale_by=optax.identity,
            ),
        ),
    ),
    "flash_muon": OptimizerRecord(
        rule=MuonRule(),
        make=functools.partial(flash_muon, **_SCALE_OF_MUON),
        plain=functools.partial(optax.contrib.muon, **_SCALE_OF_MUON),
        learning_rate=1e-2,
        optax_fields={"mu": ("MuonState.mu", "ScaleByAdamState.mu"), "nu": "ScaleByAdamState.nu"},
        optax_constants=("MuonState.ns_coeffs",),
    ),
}


def every_record() -> Iterator[OptimizerRecord]:
    """Yield the records of all rules, variants included."""
    for record in OPTIMIZERS.values():
        yield record
        yield from record.variants
