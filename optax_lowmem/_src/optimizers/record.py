"""The record of one optimizer, from which conversion, tests, examples and benchmarks derive."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import optax

from optax_lowmem._src.step.rule import UpdateRule

Constructor = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerRecord:
    """One optimizer: its rule, its constructors and its counterpart in optax.

    Attributes:
      rule: the rule of `make` with its default arguments.
      make: constructor, of a learning rate and keyword arguments.
      plain: constructor of the f32 optimizer that it must follow, with the same arguments.
      learning_rate: one that converges on small problems.
      optax_fields: slot -> type and field of optax's state, such as `TraceState.trace`; several
        where one has some of the leaves and another the rest.
      optax_constants: types and fields of optax's state that are as its `init` makes them.
      rate_factor: learning rate of a language model, relative to AdamW's.
      counterpart: constructor of the optax optimizer that has the same state in f32, where `plain`
        is not one of optax's.
      undecayed: that without weight decay, where optax has it under another name.
      scale_by: constructor of the direction alone, as `optax.scale_by_adam`.
      plain_scale_by: its counterpart in optax.
      variants: records of the other rules that arguments of `make` choose.
    """

    rule: UpdateRule
    make: Constructor
    plain: Constructor
    learning_rate: float
    optax_fields: Mapping[str, str | tuple[str, ...]]
    optax_constants: tuple[str, ...] = ()
    rate_factor: float = 1.0
    counterpart: Constructor | None = None
    undecayed: Constructor | None = None
    scale_by: Constructor | None = None
    plain_scale_by: Constructor | None = None
    variants: "tuple[OptimizerRecord, ...]" = ()

    @property
    def moments(self) -> tuple[str, ...]:
        """The slots with one value per parameter, of every leaf, which are 8-bit by default."""
        slots = self.rule.slots
        return tuple(slot.name for slot in slots if not slot.shared and not slot.of_rest)

    @property
    def in_optax(self) -> Constructor:
        """The constructor of the optax optimizer that has the same state in f32."""
        return self.counterpart or self.plain

    @property
    def short_name(self) -> str:
        """The name in optax, `adamw` for `flash_adamw`; our own where optax has none like it."""
        name = name_of(self.make)
        short = name.removeprefix("flash_")
        return short if hasattr(optax, short) else name

    def chosen(self, arguments: Mapping[str, Any], *constructors: Constructor) -> dict[str, Any]:
        """Return those of some arguments that all of these constructors take (default: `make`)."""
        known = [inspect.signature(c).parameters for c in constructors or (self.make,)]
        return {k: v for k, v in arguments.items() if all(k in names for names in known)}


def name_of(constructor: Constructor) -> str:
    """Return the name of a function, also of a `functools.partial` of it."""
    return getattr(constructor, "func", constructor).__name__
