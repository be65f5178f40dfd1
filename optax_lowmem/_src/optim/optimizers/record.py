"""The record of an optimizer, which conversion, tests, examples and benchmarks read."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import optax

from optax_lowmem._src.optim.step.rule import UpdateRule

Constructor = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerRecord:
    """One optimizer: its rule, its constructors and its counterpart in optax."""

    rule: UpdateRule  # the rule of `make` with its default arguments
    make: Constructor  # constructor; takes a learning rate and keyword arguments
    # constructor, with the same arguments, of the f32 optimizer that `make` must match
    plain: Constructor
    learning_rate: float  # a rate that converges on small problems
    # slot -> type and field of optax's state, such as `TraceState.trace`; a tuple if the leaves are
    # distributed over several fields
    optax_fields: Mapping[str, str | tuple[str, ...]]
    # types and fields of optax's state that keep their initial values
    optax_constants: tuple[str, ...] = ()
    rate_factor: float = 1.0  # learning rate for a language model, relative to AdamW's
    # constructor of the optax optimizer with the same state in f32, if `plain` is not from optax
    counterpart: Constructor | None = None
    # the optax optimizer without weight decay, if it has another name
    undecayed: Constructor | None = None
    # constructor of the direction alone, such as `scale_by_flash_adam`
    scale_by: Constructor | None = None
    plain_scale_by: Constructor | None = None  # the optax counterpart of `scale_by`
    # records of the other rules that `make` can select by its arguments
    variants: "tuple[OptimizerRecord, ...]" = ()

    @property
    def moments(self) -> tuple[str, ...]:
        """The slots with one value per element in every leaf; 8-bit by default."""
        slots = self.rule.slots
        return tuple(slot.name for slot in slots if not slot.blockwise and not slot.skips_matrices)

    @property
    def in_optax(self) -> Constructor:
        """The constructor of the optax optimizer with the same state in f32."""
        return self.counterpart or self.plain

    @property
    def short_name(self) -> str:
        """The name in optax, such as `adamw` for `flash_adamw`; ours if optax has none."""
        name = name_of(self.make)
        short = name.removeprefix("flash_")
        return short if hasattr(optax, short) else name

    def chosen(
        self, arguments: Mapping[str, object], *constructors: Constructor
    ) -> dict[str, object]:
        """Return the arguments that all of these constructors accept (default: `make`)."""
        known = [inspect.signature(c).parameters for c in constructors or (self.make,)]
        return {k: v for k, v in arguments.items() if all(k in names for names in known)}


def name_of(constructor: Constructor) -> str:
    """Return the name of a function, or of the function inside a `functools.partial`."""
    return getattr(constructor, "func", constructor).__name__
