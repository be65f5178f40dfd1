"""The records of the table, with the arguments that give small leaves the form of large ones."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import optax_lowmem as lowmem
from optax_lowmem._src.optim.optimizers.record import OptimizerRecord

ARGUMENTS: dict[str, Any] = {"min_dim_size_to_factor": 2}


def record(name: str) -> OptimizerRecord:
    """An optimizer's record, whose constructors factor small matrices too."""
    row = lowmem.OPTIMIZERS[name]
    return dataclasses.replace(
        row, make=_small(row.make), plain=_small(row.plain), scale_by=_small(row.scale_by)
    )


def _small(make: Callable[..., Any] | None) -> Any:
    names = inspect.signature(make).parameters if make is not None else ()
    arguments = {name: value for name, value in ARGUMENTS.items() if name in names}
    return functools.partial(make, **arguments) if make is not None and arguments else make
